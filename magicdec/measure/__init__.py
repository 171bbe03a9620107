"""Times, metrics and memory."""
