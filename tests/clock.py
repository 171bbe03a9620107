"""A clock that counts work instead of seconds, so that times are exact on any machine."""

import pytest

from magicdec.attention.sdpa import SdpaAttention
from magicdec.decoding import timers

SECONDS = 1e-3  # that each slot takes which attention is given to read


def count_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass by the slots that are read alone, of every pass of target and draft."""
    slots, plan = [0], SdpaAttention.plan

    def counted(attention, seqlens_B, *rest):
        slots[0] += int(seqlens_B.sum())
        return plan(attention, seqlens_B, *rest)

    monkeypatch.setattr(SdpaAttention, "plan", counted)
    monkeypatch.setattr(timers.time, "perf_counter", lambda: SECONDS * slots[0])
