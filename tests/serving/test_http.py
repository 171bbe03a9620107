"""The HTTP server, as its clients see it: a real one, on a port of this machine, with the bundled model."""

import json
import re
import threading
import time

import httpx
import pytest
import uvicorn

from magicdec import build
from magicdec.config import compose
from magicdec.data.tokenizer import load_tokenizer
from magicdec.resolve import resolve
from magicdec.serving import http
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress

SETTINGS = [
    "scenario=serve",
    "hardware=cpu",
    "attention=sdpa",
    "draft.gamma=3",
    "cache.budget=32",
    "batch.prefill_chunk=32",
]
PROMPT = "def __init__(self, name):\n    self.name = "


@pytest.fixture(scope="module")
def parts():
    """The engine's own parts, and the bundled model's tokenizer."""
    plan = resolve(compose(SETTINGS))
    with progress() as bars:
        return build.engine(plan, bars), load_tokenizer(plan.target.folder)


@pytest.fixture(scope="module")
def client(parts):
    engine, tokenizer = parts
    app = http.create_app(AsyncEngine(Scheduler(Slots(engine, 2, 2048))), tokenizer, "tiny")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join()


def body(**changes) -> dict:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | changes


def events(client, **changes) -> list[dict]:
    with client.stream("POST", "/v1/completions", json=body(stream=True, **changes)) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(client, name: str) -> float:
    return float(re.search(rf"^{re.escape(name)} (.*)$", client.get("/metrics").text, re.M)[1])


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_completion_is_what_the_offline_decoder_writes(client, parts):
    engine, tokenizer = parts
    ids = tokenizer.encode(PROMPT)
    batch = engine.open([ids])
    batch.decoder.state.limit_B.fill_(len(ids) + 24)
    batch.decoder.prefill(32)
    expected = tokenizer.decode(batch.decoder.generate().tokens[0], skip_special_tokens=True)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = client.post("/v1/completions", json=body(prompt=prompt)).json()
        assert answer["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 24, "total_tokens": len(ids) + 24}
    streamed = events(client, stream_options={"include_usage": True})
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == expected
    assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None] * (len(streamed) - 2) + [
        "length"
    ]
    assert streamed[-1]["usage"]["completion_tokens"] == 24
    assert len({event["id"] for event in streamed}) == 1


def test_a_seed_makes_a_sample_again(client):
    def sampled(seed):
        return client.post("/v1/completions", json=body(temperature=1.0, top_p=0.9, seed=seed)).json()["choices"]

    assert sampled(1) == sampled(1) != sampled(2)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "gpt"}, 404, "model=gpt is not served here; tiny is"),
        ({"prompt": "word " * 3000}, 400, "together they may be 2,048"),
        ({"prompt": [1] * 2048}, 400, "the prompt has 2,048 tokens and max_tokens=24: together they may be 2,048"),
        ({"prompt": [5000]}, 400, "outside of the vocabulary"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, 400, "prompt: 2 of them"),
        ({"prompt": None}, 400, "prompt"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens=0: must be at least 1"),
        ({"temperature": -1}, 400, "temperature=-1"),
        ({"gamma": 9}, 400, "gamma=9: must be at most 3"),
        ({"n": 2}, 400, "n=2: not supported"),
        ({"logprobs": 5}, 400, "logprobs=5: not supported"),
        ({"max_token": 5}, 400, "max_token"),
    ],
)
def test_what_cannot_be_done_gets_its_status(client, changes, status, said):
    response = client.post("/v1/completions", json=body(**changes))
    assert response.status_code == status
    assert said in response.json()["error"]["message"]
    assert metric(client, "magicdec_requests_running") == 0


def test_what_is_not_json_is_refused(client):
    response = client.post("/v1/completions", content=b'{"model": ', headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_fields_that_change_nothing_are_taken(client):
    neutral = {
        "n": 1,
        "best_of": 1,
        "stop": None,
        "logprobs": None,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "user": "me",
    }
    assert client.post("/v1/completions", json=body(max_tokens=1, **neutral)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(client, stream):
    before = (
        metric(client, 'magicdec_requests_total{end="cancelled"}') if "cancelled" in client.get("/metrics").text else 0
    )
    asked = body(max_tokens=2000, ignore_eos=True, stream=stream)
    if stream:
        with client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()  # kept: when it is dropped, so is the connection
            next(lines)
            assert metric(client, "magicdec_requests_running") == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=asked, timeout=0.5)
    until(lambda: metric(client, "magicdec_requests_running") == metric(client, "magicdec_requests_waiting") == 0)
    until(lambda: metric(client, 'magicdec_requests_total{end="cancelled"}') == before + 1)


def test_what_else_it_tells(client):
    assert client.get("/health").status_code == 200
    (described,) = client.get("/v1/models").json()["data"]
    assert (described["id"], described["max_model_len"]) == ("tiny", 2048)
    tokens = metric(client, "magicdec_generation_tokens_total")
    client.post("/v1/completions", json=body(max_tokens=7, ignore_eos=True))
    assert metric(client, "magicdec_generation_tokens_total") == tokens + 7
    assert metric(client, "magicdec_accepted_tokens_total") > 0
    assert metric(client, "magicdec_time_to_first_token_seconds_count") > 0


def test_half_a_character_is_held_back(parts):
    _, tokenizer = parts
    text = "x = 'ä → 😀'\n"
    detokenizer = http.Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [detokenizer.add([token]) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces


def test_it_listens_on_loopback_unless_told_otherwise(monkeypatch, capsys):
    heard = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **where: heard.append(where))
    assert http.main([*SETTINGS, "batch.size=1", "batch.context_len=256"]) == 0
    assert heard == [{"host": "127.0.0.1", "port": 8000}]
    for mistake, said in (("target=nothing", "nothing"), ("batch.size=0", "batch.size=0: must be auto or at least 1")):
        assert http.main([mistake]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert said in error
