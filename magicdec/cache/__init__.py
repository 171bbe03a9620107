"""KV caches and the policies that choose what a draft keeps."""
