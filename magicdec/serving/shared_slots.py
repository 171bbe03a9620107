"""Slots of a model that several ranks share: rank 0 schedules, and the others repeat its calls.

Offline every rank runs the same program. Here the next call depends on requests that only rank 0
receives, so it sends each call of its slots to the others.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from magicdec.engine.native import NativeEngine
from magicdec.serving.request import Params
from magicdec.serving.slots import Abandoned, Slots


def _on_all_ranks(method: Callable[..., Any]) -> Any:
    """Return a method of Slots that rank 0 sends to the other ranks before it runs."""

    def call(slots: "SharedSlots", *arguments: Any) -> Any:
        slots._send(method.__name__, *arguments)
        return method(slots, *arguments)

    return call


class SharedSlots(Slots):
    """Slots that rank 0 uses like any others; the other ranks call only `follow`."""

    is_shared = True

    def __init__(self, engine: NativeEngine, num_slots: int, max_len: int):
        """Allocate; called on all ranks of the default process group at once."""
        super().__init__(engine, num_slots, max_len)
        # Sends small objects between hosts; the tensors may have another backend.
        self._orders = dist.new_group(backend="gloo")

    def follow(self) -> None:
        """Repeat rank 0's calls until it closes its slots or, between the chunks of a prefill, goes
        on with it.
        """
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

    @override
    def prefill(
        self, prompt: list[int], params: Params, speculative: bool, progress: Callable[[int], None]
    ) -> tuple[int, bool]:
        self._send("prefill", prompt, params, speculative)

        def between_chunks(count: int) -> None:
            try:
                progress(count)
            except Abandoned:
                self._send("abandon")
                raise
            self._send("go_on")

        return super().prefill(prompt, params, speculative, between_chunks)

    seat, release, step = map(_on_all_ranks, (Slots.seat, Slots.release, Slots.step))

    @override
    def close(self) -> None:
        self._send("close")
        dist.destroy_process_group(self._orders)
        super().close()

    def _send(self, *order: Any) -> None:
        """Send a call from rank 0 to the other ranks; on those, do nothing."""
        if dist.get_rank() == 0:
            dist.broadcast_object_list([order], src=0, group=self._orders)
