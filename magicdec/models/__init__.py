"""The decoder-only transformer, its checkpoints, and the bundled tiny pair."""
