"""What distorts the figures of load tests, and does not distort ours."""

import asyncio
import sys
from collections import Counter
from time import sleep

import pytest

from magicdec.config.load import compose
from magicdec.peers import endpoint
from magicdec.peers.answer import EndpointRequest, Event
from magicdec.peers.base import Address
from magicdec.peers.endpoint import Endpoint
from magicdec.scenarios import Job, run
from magicdec.serving.request import Params
from tests.peers.stand_in import RAMP, standing_in
from tests.peers.test_openai import served
from tests.tracking.sample import lines

CHUNK_S = 0.02
ONE = ["scenario.concurrencies=[1]", "scenario.num_requests=3"]


def test_the_burst_at_the_start_is_outside_of_the_window(tmp_path):
    """Steps are slow as long as other requests are prefilled: TPOT is, the time of a step is
    not.
    """
    keys = ["scenario.batch_sizes=[2]", "scenario.context_lens=[32]", "batch.generate_len=40"]
    ramp_s = 5 * CHUNK_S
    with standing_in(per_chunk=1, chunk_s=CHUNK_S, ramp_s=ramp_s) as (_, url):
        config = compose(
            [
                "engine=openai",
                "scenario=profile",
                f"engine.url={url}",
                *keys,
                "data=random",
                "tracker=[]",
                f"runs_dir={tmp_path}",
            ]
        )
        result = run(config, Job())
        load = served(tmp_path, url, *ONE, "batch.generate_len=40")
    (line,) = lines(tmp_path / result["id"] / "history.jsonl")
    assert line["time/target_decode_ms"] < 1.5e3 * CHUNK_S
    slow_ms = 1e3 * (CHUNK_S + ramp_s * (RAMP - 1) / 39)
    assert load["autoregressive/time_per_output_token_ms"] > slow_ms > 1.5e3 * CHUNK_S


@pytest.mark.parametrize("takes", [("return_token_ids",), ()])
def test_reasoning_is_no_prefill(tmp_path, takes):
    """A token that is reasoning is the first token, whether or not the server tells its id."""
    chunk_s = 3 * CHUNK_S  # longer than a busy machine is late
    with standing_in(per_chunk=1, chunk_s=chunk_s, thinks=6, takes=takes) as (_, url):
        result = served(tmp_path, url, *ONE)
    assert result["autoregressive/time_to_first_token_ms_p50"] < 3e3 * chunk_s
    per_token = result["autoregressive/time_per_output_token_ms_p50"]
    assert per_token == pytest.approx(1e3 * chunk_s, rel=0.5)


def test_long_prompts_that_are_rejected_are_told(tmp_path, capsys):
    """The figures are of shorter prompts: that is said, and how much shorter."""
    with standing_in(longest=40) as (_, url):
        result = served(tmp_path, url, "engine.retries=0", "scenario.length_shares=[0.5,1.0]")
    assert result["autoregressive/failed_requests"] == 3
    assert result["autoregressive/failed_context_len_mean"] == 64
    assert result["autoregressive/answered_context_len_mean"] == 32
    said = " ".join(capsys.readouterr().err.split())
    assert "they have 64 prompt tokens on average and those that were answered 32" in said


def test_rejected_prompts_that_are_not_longer_are_only_counted(tmp_path, capsys):
    """All are as long as each other: which of two users comes last is a matter of luck."""
    with standing_in(breaks_at=8) as (_, url):
        result = served(tmp_path, url, "engine.retries=0", "scenario.length_shares=[1.0]")
    assert result["autoregressive/failed_requests"] == 1
    assert "figures are of shorter prompts" not in capsys.readouterr().err


def test_a_chunk_of_several_tokens_is_several_tokens(tmp_path):
    with standing_in(per_chunk=4, chunk_s=CHUNK_S) as (_, url):
        result = served(tmp_path, url, *ONE)
    per_token = result["autoregressive/time_per_output_token_ms_p50"]
    assert per_token == pytest.approx(1e3 * CHUNK_S / 4, rel=0.4)
    assert result["autoregressive/inter_chunk_latency_ms_p50"] > 0.9e3 * CHUNK_S


def test_the_time_until_a_request_is_sent_again_is_no_latency(tmp_path, capsys):
    """The server refuses each request once, and takes it 300 ms later."""
    with standing_in(busy_ms=300) as (server, url):
        result = served(tmp_path, url, *ONE)
    assert len(server.asked) == len(server.refused)
    assert result["autoregressive/retried_requests"] == 3
    assert result["autoregressive/time_to_first_token_ms_p50"] < 200
    assert result["autoregressive/request_latency_ms_p50"] < 250
    assert result["autoregressive/wall_s"] > 0.9
    assert "3 of 3 requests were sent again" in capsys.readouterr().err


def test_a_client_that_is_late_itself_says_so(tmp_path, capsys, monkeypatch):
    """It takes longer over an event than the server waits between two."""
    with standing_in(chunk_s=CHUNK_S) as (_, url):
        in_time = served(tmp_path, url, *ONE)
        take = EndpointRequest.take

        def slowly(request: EndpointRequest, event: Event) -> None:
            take(request, event)
            sleep(3 * CHUNK_S)

        monkeypatch.setattr(EndpointRequest, "take", slowly)
        capsys.readouterr()
        late = served(tmp_path, url, *ONE, "data.seed=1")
    said = capsys.readouterr().err
    assert "autoregressive, concurrency 1: this client was late by" in said
    assert "the machine is too busy for these times: stop other work" in said, "at one request"
    assert in_time["autoregressive/client_late_ms"] < late["autoregressive/client_late_ms"]
    assert late["autoregressive/client_late_ms"] > 1e3 * CHUNK_S


def test_to_send_a_long_prompt_takes_no_longer_than_a_short_one():
    """Nothing looks at each of its tokens, while the chunks of other requests wait."""

    async def calls(length: int) -> int:
        """Return how many functions are called, those of the parser of answers included."""
        counts = Counter[str]()
        async with Endpoint(Address("a server", url, "stand-in"), None) as server:
            sys.setprofile(lambda _, event, __: counts.update((event,)))
            request = EndpointRequest([1] * length, Params(1))
            await server.receive(request)
            sys.setprofile(None)
        assert request.error is None
        return counts["call"]

    with standing_in() as (_, url):
        few, many = (asyncio.run(calls(length)) for length in (10, 5000))
    assert many < few + 1000


def test_no_prompt_is_decoded_while_others_are_answered(tmp_path, monkeypatch):
    """By a client of a server that takes text."""
    events, note_sent, text_of = [], EndpointRequest.note_sent, endpoint.text_of
    monkeypatch.setattr(
        endpoint, "text_of", lambda *given: events.append("text") or text_of(*given)
    )
    monkeypatch.setattr(
        EndpointRequest, "note_sent", lambda self: events.append("sent") or note_sent(self)
    )
    with standing_in(takes_ids=False) as (_, url):
        served(tmp_path, url)
    assert events.count("text") >= 6
    assert events[-6:] == ["sent"] * 6
