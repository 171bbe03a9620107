"""The engine: the round, its graphs, its audit, and batches of prompts decoded by it."""
