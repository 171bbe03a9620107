"""A sliding window without sinks: the plainest policy, and the one that shows what sinks are for."""

from magicdec.cache.draft_cache import CACHES
from magicdec.cache.streaming import StreamingCache
from magicdec.policies import POLICIES


@CACHES.register("window")
class WindowCache(StreamingCache):
    """The `budget` latest tokens of every row."""

    facts = POLICIES["window"]

    def fixed_slots(self, budget: int) -> int:
        """See CompactCache.fixed_slots."""
        return 0
