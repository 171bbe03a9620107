"""The run store, Weights & Biases, and reports."""
