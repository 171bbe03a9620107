"""The asynchronous engine: many users at once, who come, leave early, and ask for what cannot
be.
"""

import asyncio
import gc
import random
import threading
from unittest.mock import Mock

import pytest

from magicdec.errors import UserError
from magicdec.measure.memory_use import proc_bytes
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.request import Params
from magicdec.serving.scheduler import Scheduler
from tests.serving.test_lossless import ENDLESS, GENERATE, LENGTHS, expected, slots_with
from tests.small import random_prompts

pytestmark = pytest.mark.anyio
PROMPTS = random_prompts(LENGTHS)
SLOTS = slots_with("self", "streaming")


@pytest.fixture
async def engine():
    """A fresh engine, whose thread ends with it."""
    async with AsyncEngine(Scheduler(SLOTS)) as engine:
        yield engine
    assert "magicdec-scheduler" not in {thread.name for thread in threading.enumerate()}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def collect(stream) -> list[int]:
    return [token async for chunk in stream for token in chunk]


async def test_many_at_once_each_with_its_own_tokens_and_stats(engine):
    streams = [
        engine.generate(p, Params(n, ENDLESS)) for p, n in zip(PROMPTS, GENERATE, strict=True)
    ]
    with pytest.raises(
        UserError, match="200 prompt tokens and max_tokens=64 exceed the limit of 101 tokens"
    ):
        engine.generate([1] * 200)
    assert await asyncio.gather(*map(collect, streams)) == expected()
    for stream, prompt, count in zip(streams, PROMPTS, GENERATE, strict=True):
        stats = stream.stats
        assert (stats.prompt_tokens, stats.tokens) == (len(prompt), count)
        assert 0 < stats.time_to_first_token_s <= stats.request_latency_s
        spent = stats.request_latency_s - stats.time_to_first_token_s
        assert sum(stats.inter_chunk_s) == pytest.approx(spent)
        assert len(stats.inter_chunk_s) <= count - 1
        if count == 1:
            assert (
                stats.time_per_output_token_s
                is stats.acceptance_rate
                is stats.acceptance_length
                is None
            )
        else:
            assert stats.time_per_output_token_s == pytest.approx(spent / (count - 1))
            assert 0 <= stats.acceptance_rate <= 1
            assert stats.acceptance_length == pytest.approx(1 + 4 * stats.acceptance_rate)


async def test_a_prompt_is_checked_once(engine, monkeypatch):
    check = Mock(wraps=SLOTS.check)
    monkeypatch.setattr(SLOTS, "check", check)
    assert len(await collect(engine.generate(PROMPTS[0], Params(3, ENDLESS)))) == 3
    assert check.call_count == 1


async def test_chunks_are_what_rounds_commit():
    # Every proposal is accepted.
    async with AsyncEngine(Scheduler(slots_with("self", "full"))) as engine:
        stream = engine.generate(PROMPTS[0], Params(20, ENDLESS))
        assert [len(chunk) async for chunk in stream] == [1, 5, 5, 5, 4]
    assert len(stream.stats.inter_chunk_s) == 4


@pytest.mark.parametrize("way", ["cancel", "let go", "cancelled task"])
async def test_whoever_leaves_frees_the_slot(engine, way):
    async def leave_early():
        stream = engine.generate(PROMPTS[0], Params(50, ENDLESS))
        async for _ in stream:
            if way == "cancel":
                stream.cancel()
            elif way == "let go":
                return
            else:
                asyncio.current_task().cancel()

    tasks = [asyncio.create_task(leave_early()) for _ in range(5)]
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [way == "cancelled task"] * 5
    del tasks
    gc.collect()
    await until(lambda: engine.num_running == engine.num_waiting == 0)
    assert await collect(engine.generate(PROMPTS[1], Params(GENERATE[1], ENDLESS))) == expected()[1]


async def test_letting_go_of_a_stream_cancels_its_request(engine):
    stream = engine.generate(PROMPTS[0], Params(50, ENDLESS))
    request = stream.request
    del stream
    gc.collect()
    assert request.cancelled


async def test_a_thousand_in_the_queue_do_no_harm(engine):
    streams = [
        engine.generate(PROMPTS[i % 7], Params(GENERATE[i % 7], ENDLESS)) for i in range(1000)
    ]
    assert await asyncio.gather(*map(collect, streams[:14])) == expected() * 2
    for stream in streams[14:-1]:
        stream.cancel()
    assert [await collect(stream) for stream in streams[14:20]] == [[]] * 6
    assert await collect(streams[-1]) == expected()[999 % 7]


async def test_closing_ends_what_is_still_running():
    async with AsyncEngine(Scheduler(SLOTS)) as engine:
        streams = [engine.generate(PROMPTS[0], Params(50, ENDLESS)) for _ in range(6)]
        await anext(streams[0])
    assert {stream.request.end for stream in streams} == {"cancelled"}
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.generate(PROMPTS[0])


async def test_a_failure_reaches_everybody(monkeypatch):
    slots = slots_with("self", "streaming")
    for name in ("step", "release"):  # a device that has failed does nothing any more
        monkeypatch.setattr(slots, name, Mock(side_effect=MemoryError("no more")))
    async with AsyncEngine(Scheduler(slots)) as engine:
        streams = [engine.generate(PROMPTS[0], Params(50)) for _ in range(5)]
        outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"the request has failed"}
        assert isinstance(outcomes[0].__cause__, MemoryError)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.generate(PROMPTS[0], Params(2))


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_soak():
    """Two thousand requests of random lengths, a fifth of them cancelled: none lost, none mixed up,
    memory flat.
    """
    generator, resident, at_once = random.Random(0), [], asyncio.Semaphore(50)

    async def user(engine, number):
        which = generator.randrange(7)
        stream = engine.generate(PROMPTS[which], Params(GENERATE[which], ENDLESS))
        give_up_at = generator.randrange(GENERATE[which]) if generator.random() < 0.2 else None
        tokens = []
        async for chunk in stream:
            if give_up_at is not None and len(tokens) >= give_up_at:
                stream.cancel()
                return "cancelled"
            tokens += chunk
        assert tokens == expected()[which]
        if number % 200 == 0:
            resident.append(proc_bytes("self/status", "VmRSS"))
        return "done"

    async def in_turn(engine, number):
        async with at_once:
            return await user(engine, number)

    async with AsyncEngine(Scheduler(slots_with("model", "streaming", num_slots=6))) as engine:
        outcomes = await asyncio.gather(*(in_turn(engine, number) for number in range(2000)))
        await until(lambda: engine.num_running == engine.num_waiting == 0)
    assert outcomes.count("done") + outcomes.count("cancelled") == 2000
    assert 200 < outcomes.count("cancelled") < 600
    assert max(resident[2:]) - resident[1] < 32 << 20, resident
