"""What a run does."""
