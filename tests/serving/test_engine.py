"""The asynchronous engine: many users at once, who come, leave early, and ask for what cannot be."""

import asyncio
import gc
import random
import threading

import pytest

from magicdec.errors import UserError
from magicdec.measure.memory import proc_bytes
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.request import Params
from magicdec.serving.scheduler import Scheduler
from tests.serving.test_lossless import ENDLESS, GENERATE, LENGTHS, expected, slots_with
from tests.small import random_prompts

PROMPTS = random_prompts(LENGTHS)
SLOTS = slots_with("self", "streaming")


def run(scenario, slots=SLOTS):
    """Run a coroutine function on a fresh engine; the engine's thread ends with it."""

    async def opened():
        async with AsyncEngine(Scheduler(slots)) as engine:
            return await asyncio.wait_for(scenario(engine), 120)

    try:
        return asyncio.run(opened())
    finally:
        assert "magicdec-scheduler" not in {thread.name for thread in threading.enumerate()}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def collect(stream) -> list[int]:
    return [token async for chunk in stream for token in chunk]


def test_many_at_once_each_with_its_own_tokens_and_stats():
    async def scenario(engine):
        streams = [engine.generate(p, Params(n, ENDLESS)) for p, n in zip(PROMPTS, GENERATE, strict=True)]
        return streams, await asyncio.gather(*map(collect, streams))

    streams, tokens = run(scenario)
    assert tokens == expected()
    for stream, prompt, count in zip(streams, PROMPTS, GENERATE, strict=True):
        stats = stream.stats
        assert (stats.prompt_tokens, stats.tokens) == (len(prompt), count)
        assert 0 < stats.time_to_first_token_s <= stats.request_latency_s
        spent = stats.request_latency_s - stats.time_to_first_token_s
        assert sum(stats.inter_chunk_s) == pytest.approx(spent)
        assert len(stats.inter_chunk_s) <= count - 1
        if count == 1:
            assert stats.time_per_output_token_s is stats.acceptance_rate is stats.acceptance_length is None
        else:
            assert stats.time_per_output_token_s == pytest.approx(spent / (count - 1))
            assert 0 <= stats.acceptance_rate <= 1
            assert stats.acceptance_length == pytest.approx(1 + 4 * stats.acceptance_rate)


def test_chunks_are_what_rounds_commit():
    async def scenario(engine):
        stream = engine.generate(PROMPTS[0], Params(20, ENDLESS))
        return stream, [chunk async for chunk in stream]

    stream, chunks = run(scenario, slots_with("self", "full"))  # every proposal is accepted
    assert [len(chunk) for chunk in chunks] == [1, 5, 5, 5, 4]
    assert len(stream.stats.inter_chunk_s) == 4


def test_one_too_long_is_refused_and_the_others_are_unharmed():
    async def scenario(engine):
        first = engine.generate(PROMPTS[0], Params(GENERATE[0], ENDLESS))
        with pytest.raises(UserError, match="the prompt has 200 tokens and max_tokens=64: together they may be 101"):
            engine.generate([1] * 200)
        return await collect(first)

    assert run(scenario) == expected()[0]


@pytest.mark.parametrize("way", ["cancel", "let go", "cancelled task"])
def test_whoever_leaves_frees_the_slot(way):
    async def scenario(engine):
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
        return await collect(engine.generate(PROMPTS[1], Params(GENERATE[1], ENDLESS)))

    assert run(scenario) == expected()[1]


def test_letting_go_of_a_stream_cancels_its_request():
    async def scenario(engine):
        stream = engine.generate(PROMPTS[0], Params(50, ENDLESS))
        request = stream.request
        del stream
        gc.collect()
        return request.cancelled

    assert run(scenario)


def test_a_thousand_in_the_queue_do_no_harm():
    async def scenario(engine):
        streams = [engine.generate(PROMPTS[i % 7], Params(GENERATE[i % 7], ENDLESS)) for i in range(1000)]
        first = await asyncio.gather(*map(collect, streams[:14]))
        assert first == expected() * 2
        for stream in streams[14:-1]:
            stream.cancel()
        assert [await collect(stream) for stream in streams[14:20]] == [[]] * 6
        return await collect(streams[-1])

    assert run(scenario) == expected()[999 % 7]


def test_closing_ends_what_is_still_running():
    async def scenario(engine):
        stream = engine.generate(PROMPTS[0], Params(50, ENDLESS))
        waiting = [engine.generate(PROMPTS[0], Params(50, ENDLESS)) for _ in range(5)]
        await anext(stream)
        return engine, [stream, *waiting]

    engine, streams = run(scenario)
    assert {stream.request.end for stream in streams} == {"cancelled"}
    with pytest.raises(RuntimeError, match="the engine is closed"):
        asyncio.run(scenario(engine))


def test_a_failure_reaches_everybody(monkeypatch):
    def fail(_):
        raise MemoryError("no more")

    async def scenario(engine):
        streams = [engine.generate(PROMPTS[0], Params(50)) for _ in range(5)]
        outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"the request has failed"}
        assert isinstance(outcomes[0].__cause__, MemoryError)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.generate(PROMPTS[0], Params(2))

    slots = slots_with("self", "streaming")
    monkeypatch.setattr(slots, "step", fail)
    monkeypatch.setattr(slots, "release", fail)  # a device that has failed does nothing any more
    run(scenario, slots)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_soak():
    """Two thousand requests of random lengths, a fifth of them cancelled: none lost, none mixed up, memory flat."""
    generator, resident = random.Random(0), []
    long = slots_with("model", "streaming", num_slots=6)

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

    async def scenario(engine):
        at_once = asyncio.Semaphore(50)

        async def in_turn(number):
            async with at_once:
                return await user(engine, number)

        outcomes = await asyncio.gather(*map(in_turn, range(2000)))
        await until(lambda: engine.num_running == engine.num_waiting == 0)
        return outcomes

    async def opened():
        async with AsyncEngine(Scheduler(long)) as engine:
            return await scenario(engine)

    outcomes = asyncio.run(opened())
    assert outcomes.count("done") + outcomes.count("cancelled") == 2000
    assert 200 < outcomes.count("cancelled") < 600
    assert max(resident[2:]) - resident[1] < 32 << 20, resident
