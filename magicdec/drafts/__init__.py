"""Draft strategies: whatever proposes tokens."""
