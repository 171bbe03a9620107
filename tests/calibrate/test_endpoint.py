"""Calibration of a server: our own, and stand-ins with known times."""

import sys

import pytest
import yaml

from magicdec.calibrate import steps
from magicdec.calibrate.bursts import measure_server
from magicdec.commands import calibrate
from magicdec.errors import UserError
from magicdec.http import app
from magicdec.peers.lateness import Lateness
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from tests.peers.stand_in import standing_in
from tests.serving.conftest import listening, parts

__all__ = ["parts"]  # a fixture
pytest.importorskip("scipy")
pytestmark = pytest.mark.usefixtures("here")
NAMED = ["target=llama-3.1-8b", "hardware=h200"]
GRID = ["scenario.concurrencies=[2,1]", "scenario.length_shares=[0.5,1.0]", "batch.context_len=64"]


@pytest.mark.slow
def test_our_server(parts, capsys):
    engine, tokenizer = parts
    serving = AsyncEngine(Scheduler(Slots(engine, 2, 128), False))
    with listening(app.create_app(serving, tokenizer, "tiny"), serving, grace_s=0) as (_, port):
        arguments = [
            "--url",
            f"http://127.0.0.1:{port}/v1",
            "--name",
            "own",
            "target=tiny",
            "hardware=cpu",
            *GRID,
        ]
        assert calibrate.main([*arguments, "batch.generate_len=16"]) == 0
    assert "held back" in capsys.readouterr().out
    text = (calibrate.OPTIONS / "own.yaml").read_text()
    assert text.startswith(
        f"# tiny at http://127.0.0.1:{port}/v1: 4 points. Written by: magicdec calibrate\n"
    )
    assert yaml.safe_load(text)["name"] == "cpu"


@pytest.mark.slow
def test_the_points_are_those_of_the_chunks(monkeypatch, capsys):
    """A chunk of one token every 20 ms, and no prefill."""
    monkeypatch.setattr(
        steps, "rates_of", lambda plan: pytest.fail("hardware=h200 is not this machine")
    )
    with standing_in(per_chunk=1, chunk_s=0.02) as (server, url):
        found = measure_server(url, [*NAMED, *GRID, "batch.generate_len=36"])
    assert [(row.batch_size, row.prompt_len) for row in found.rows] == [
        (1, 32),
        (1, 64),
        (2, 32),
        (2, 64),
    ]
    for row in found.rows:
        assert 19 < row.autoregressive_ms < 80, "never early, and late on a busy machine"
        assert row.context_len == pytest.approx(row.prompt_len + 18, abs=2)
    assert [row.prefill_ms for row in found.rows[2:]] == [None, None], (
        "of several users it includes waiting"
    )
    prompts = [tuple(body["prompt"]) for body in server.asked[1:]]
    assert len(set(prompts)) == len(prompts), "or a cache of prefixes would save their prefill"
    assert found.models.keys() == {"llama-3.1-8b"}


def test_a_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "very-secret-key")
    with standing_in(per_chunk=1) as (server, url):
        measure_server(
            url, [*NAMED, *GRID, "batch.generate_len=12", "engine.key_variable=THEIR_KEY"]
        )
    assert {body["key"] for body in server.asked} == {"Bearer very-secret-key"}


def test_a_server_that_speculates_is_calibrated_by_its_baseline_and_diagnosed(monkeypatch, capsys):
    """A client that is late on a busy machine would have nothing diagnosed: see test_outside.py."""
    monkeypatch.setattr(Lateness, "is_too_late", lambda *_: False)
    slow = {"per_chunk": 3, "metrics": "vllm", "chunk_s": 0.02}
    with standing_in(per_chunk=1, chunk_s=0.01) as (_, plain), standing_in(**slow) as (_, url):
        baseline = f"engine.baseline_url={plain}"
        keys = [*NAMED, *GRID, baseline, "batch.generate_len=30"]
        timed = measure_server(url, keys)
    assert all(9 < row.autoregressive_ms < 40 for row in timed.rows), "of the baseline"
    assert "it pays in" in timed.diagnosis or timed.diagnosis.startswith("pays in")


@pytest.mark.parametrize(
    ("behaviour", "overrides", "said"),
    [
        (
            {"metrics": "vllm"},
            NAMED,
            "the server speculates; a calibration needs one that does not",
        ),
        ({"status": 500, "body": '{"error": {"message": "out of order"}}'}, NAMED, "out of order"),
        (
            {},
            [*NAMED, "batch.generate_len=2"],
            "answers have too few chunks; set batch.generate_len above 8",
        ),
        ({"takes_ids": False}, NAMED, "what is"),
    ],
)
def test_servers_that_cannot_be_calibrated(behaviour, overrides, said, capsys):
    with standing_in(**behaviour) as (_, url):
        assert calibrate.main(["--url", url, *overrides, "engine.retries=0", *GRID]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: engine.url={url}: ")
    assert said in line


@pytest.mark.parametrize(
    ("url", "overrides", "said"),
    [
        ("http://example.org/v1", NAMED, "set engine.allow_remote=true"),
        (
            "http://example.org/v1",
            ["engine.allow_remote=true"],
            "hardware=auto: name the server's machine",
        ),
        ("ftp://127.0.0.1/v1", NAMED, "must be an address such as"),
        ("http://[::1:8000/v1", NAMED, "must be an address such as"),
        (
            "http://127.0.0.1/v1",
            [*NAMED, "scenario=compare"],
            "engine=openai goes with scenario=serve and scenario=profile only",
        ),
    ],
)
def test_what_is_refused_before_anything_is_sent(url, overrides, said):
    with pytest.raises(UserError, match=said):
        measure_server(url, overrides)


def test_without_the_client_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "magicdec.calibrate.bursts", None)  # as an import that fails
    assert calibrate.main(["--url", "http://127.0.0.1/v1", *NAMED]) == 2
    assert "needs OpenAI's client: pip install 'magicdec[openai]'" in capsys.readouterr().err
