"""The shapes of models and draft heads, and how they are read from `config.json`. Torch-free."""
