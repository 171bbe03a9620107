"""Attention backends for NVIDIA GPUs: imported where one is asked for, or where attention=auto
finds a GPU.
"""
