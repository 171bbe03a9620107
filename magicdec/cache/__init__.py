"""Drafts' caches and the policies that select what they keep: draft_cache is the interface, and
each policy is a file. The target's cache is models/kv_cache.py.
"""
