"""`magicdec calibrate`: what a machine achieves, as an option of the group hardware."""
