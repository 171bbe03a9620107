"""Other engines on the same prompts."""
