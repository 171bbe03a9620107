"""Compare the runs of a store: on the terminal, as a table for other programs, and on a page with
plots.
"""
