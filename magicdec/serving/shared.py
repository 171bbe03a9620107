"""Slots of a model that several ranks share: rank 0 schedules, and the others do what it does.

Offline every rank runs the same program. Here what comes next depends on who asks and when, which only rank 0 knows: it
sends each call of its slots to the others as it makes it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from magicdec.decoding.state import State
from magicdec.engine.native import NativeEngine
from magicdec.serving.request import Params
from magicdec.serving.slots import Abandoned, Slots


class SharedSlots(Slots):
    """On rank 0 to be used like any slots; on the others `follow` is all there is to call."""

    is_shared = True

    def __init__(self, engine: NativeEngine, num_slots: int, max_len: int):
        """On all ranks of the default process group at once."""
        super().__init__(engine, num_slots, max_len)
        self._orders = dist.new_group(backend="gloo")  # small things between hosts, whatever moves the tensors
        self._state: State | None = None  # of the request that was prefilled last

    def follow(self) -> None:
        """Do what rank 0 does until it closes its slots; between the chunks of a prefill, until it goes on with it."""
        while True:
            order: list[Any] = [None]
            dist.broadcast_object_list(order, src=0, group=self._orders)
            name, *arguments = order[0]
            if name == "go_on":
                return
            if name == "abandon":
                raise Abandoned
            if name == "prefill":
                prompt, params, speculative = arguments
                with suppress(Abandoned):
                    self.prefill(prompt, params, speculative, lambda _: self.follow())
            else:
                getattr(self, name)(*arguments)
            if name == "close":
                return

    def prefill(
        self, prompt: list[int], params: Params, speculative: bool, progress: Callable[[int], None]
    ) -> tuple[State, int, bool]:
        """See Slots.prefill."""
        self._tell("prefill", prompt, params, speculative)

        def between_chunks(count: int) -> None:
            try:
                progress(count)
            except Abandoned:
                self._tell("abandon")
                raise
            self._tell("go_on")

        prefilled = super().prefill(prompt, params, speculative, between_chunks)
        self._state = prefilled[0]
        return prefilled

    def seat(self, slot: int, state: State | None, params: Params, speculative: bool) -> None:
        """See Slots.seat. Each rank has a state of its own, which is the one that it prefilled last."""
        self._tell("seat", slot, None, params, speculative)
        assert self._state is not None
        super().seat(slot, self._state, params, speculative)

    def release(self, slot: int) -> None:
        """See Slots.release."""
        self._tell("release", slot)
        super().release(slot)

    def step(self, speculative: bool) -> Tensor:
        """See Slots.step."""
        self._tell("step", speculative)
        return super().step(speculative)

    def close(self) -> None:
        """See Slots.close."""
        self._tell("close")
        dist.destroy_process_group(self._orders)
        super().close()

    def _tell(self, *order: Any) -> None:
        """Have the other ranks do the same; they themselves tell nobody."""
        if dist.get_rank() == 0:
            dist.broadcast_object_list([order], src=0, group=self._orders)
