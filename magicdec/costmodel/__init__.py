"""Predict the time, memory and speedup of a configuration without running it."""
