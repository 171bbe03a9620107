"""The runs of a store compared: on the terminal, as a table for other programs, and as one page with plots."""
