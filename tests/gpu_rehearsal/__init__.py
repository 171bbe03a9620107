"""Checks of what a GPU would execute, without one: see docs/attention.md, "Without a GPU"."""
