"""Drafts, which propose tokens: the interface, and a file for each."""
