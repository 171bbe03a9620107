"""The settings that a kind of run needs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.groups import BatchConfig


class Needs:
    """The needs of a kind of run, with those of most as defaults."""

    name: str
    predicts: ClassVar[bool] = False  # it loads no weights, and measures nothing
    searches: ClassVar[bool] = False  # for drafts and caches of its own
    reads_text: ClassVar[bool] = True
    measures_acceptance: ClassVar[bool] = True
    prefills_batches: ClassVar[bool] = False  # those of the data, which jobs of a sweep share
    serves: ClassVar[bool] = False  # requests that come and go
    audits: ClassVar[bool] = False  # the logits of what was written
    stores_units: ClassVar[bool] = False  # parts of the work, each when it ends
    # Its result depends on other runs in the store, so that no sweep skips it.
    reads_store: ClassVar[bool] = False
    # Keys of its own that name a file, whose content decides the result.
    files: ClassVar[tuple[str, ...]] = ()
    # The keys that say how many prompts it needs.
    row_keys: ClassVar[tuple[str, ...]] = ("batch.size", "batch.num_batches")
    # Keys of its own that replace general ones.
    at: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def replaced(self, draft: DraftConfig, cache: CacheConfig) -> Mapping[str, str]:
        """Return the keys, or whole groups, that have no effect, each with the choice that is the
        reason and, after a semicolon, what to do instead.
        """
        return {general: f"{self.choice}; set {own}" for general, own in self.at.items()}

    @property
    def choice(self) -> str:
        """Return the choice of this scenario, as it is typed."""
        return f"scenario={self.name}"

    def key_of(self, general: str) -> str:
        """Return the key that this scenario has in place of a general one, or the general one."""
        return self.at.get(general, general)

    def largest(self, batch: BatchConfig) -> tuple[int, int]:
        """Return the rows and the context of the largest batch; `batch.size` is resolved."""
        return int(batch.size), self.longest(batch)

    def longest(self, batch: BatchConfig) -> int:
        """Return the longest context."""
        return batch.context_len
