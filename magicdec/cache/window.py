"""A sliding window without sinks: the plainest policy, and the one that shows what sinks are for."""

from magicdec.cache.streaming import StreamingCache


class WindowCache(StreamingCache):
    """The `budget` latest tokens of every row."""

    def fixed_slots(self, budget: int) -> int:
        """See CompactCache.fixed_slots."""
        return 0
