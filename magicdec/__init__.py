"""MagicDec: speculative decoding for long contexts and large batches, as a config-driven experiment framework."""

__version__ = "0.1.0"
