"""Programs in the order of their launch, in lockstep, over an L2 cache: which of their loads come
from memory.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import islice


def loads_from_memory(
    programs: Iterable[Iterable[Hashable]], at_once: int, num_blocks: int
) -> tuple[int, int]:
    """Count the loads of blocks from memory, and all loads. Each program is the blocks that it
    loads; `at_once` of them run together, and the cache keeps the `num_blocks` used last.
    """
    cache: OrderedDict[Hashable, None] = OrderedDict()
    waiting, missed, total = map(iter, programs), 0, 0
    running = list(islice(waiting, at_once))
    while running:
        for program in list(running):
            block = next(program, None)
            if block is None:
                running.remove(program)
                running += islice(waiting, 1)
                continue
            total += 1
            if block in cache:
                cache.move_to_end(block)
                continue
            missed += 1
            cache[block] = None
            if len(cache) > num_blocks:
                cache.popitem(last=False)
    return missed, total
