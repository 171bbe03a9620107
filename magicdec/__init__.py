"""MagicDec: speculative decoding for long contexts and large batches, as a config-driven experiment framework."""

from magicdec import threads

__version__ = "0.1.0"

threads.set_defaults()  # PyTorch, which reads them once, is imported later
