"""Prefill, the round, and generation."""
