"""KV caches and the policies that select what a draft keeps: kv_cache, draft_cache, and a file per
policy.
"""
