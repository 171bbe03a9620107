"""What a GPU would be given, checked without one: see docs/attention.md, "Without a GPU"."""
