"""Inputs from outside: rules for values, hashes of files, modules of plugins."""
