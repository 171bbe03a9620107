"""The HTTP server, as its clients see it: a real one, on a port of this machine, with the bundled
model.
"""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from magicdec.commands import serve
from magicdec.data.tokenizer import Detokenizer
from magicdec.errors import UserError
from magicdec.http import app as http
from magicdec.http import uvicorn_server
from magicdec.http.completion import NEUTRAL, Chat, Completion
from magicdec.http.http_answer import HttpAnswer
from magicdec.http.stoppable_text import StoppableText
from magicdec.serving.engine import AsyncEngine, Stream
from magicdec.serving.request import Params
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from tests.serving.conftest import SETTINGS

pytestmark = pytest.mark.anyio
PROMPT = "def __init__(self, name):\n    self.name = "


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
    tokens = batch.decoder.generate().tokens[0]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = client.post("/v1/completions", json=body(prompt=prompt)).json()
        assert answer["choices"] == [
            {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}
        ]
        usage = answer["usage"]
        proposals = usage.pop("completion_tokens_details")
        assert usage == {
            "prompt_tokens": len(ids),
            "completion_tokens": 24,
            "total_tokens": len(ids) + 24,
        }
        accepted, rejected = (
            proposals[f"{name}_prediction_tokens"] for name in ("accepted", "rejected")
        )
        assert accepted + rejected == 3 * proposals["rounds"] > 0
        assert 0 < accepted < 24
    answer = client.post("/v1/completions", json=body(return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == tokens
    streamed = events(client, stream_options={"include_usage": True}, return_token_ids=True)
    assert [
        token for event in streamed[:-1] for token in event["choices"][0]["token_ids"]
    ] == tokens
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == expected
    reasons = [event["choices"][0]["finish_reason"] for event in streamed[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert streamed[-1]["usage"]["completion_tokens"] == 24
    assert len({event["id"] for event in streamed}) == 1


@pytest.mark.parametrize("stop", ["\n", "self", "name", " = "])
def test_nothing_behind_a_stop_string_is_sent_or_counted(client, parts, stop):
    """The last token is the one that completes the stop string: the answer of a server without a
    draft.
    """
    _, tokenizer = parts
    whole = client.post(
        "/v1/completions", json=body(return_token_ids=True, max_tokens=60, ignore_eos=True)
    ).json()
    tokens = whole["choices"][0]["token_ids"]
    texts = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    last = next((count for count, text in enumerate(texts) if stop in text), None)
    assert last is not None, "the text has the stop string"
    asked = {"stop": stop, "return_token_ids": True, "max_tokens": 60, "ignore_eos": True}
    counted = metric(client, "magicdec_generation_tokens_total")
    answer = client.post("/v1/completions", json=body(**asked)).json()
    assert answer["choices"][0]["token_ids"] == tokens[:last]
    assert answer["choices"][0]["text"] == texts[last].partition(stop)[0]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == last
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + last
    assert metric(client, "magicdec_generation_tokens_total") == counted + last
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *streamed, final = events(client, stream_options=usage, **asked)
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == tokens[
        :last
    ]
    assert final["usage"] == answer["usage"], (
        "rounds behind the end are not counted, however far the engine was"
    )
    sent = 0
    for event in streamed[:-1]:
        sent += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == sent


def test_a_seed_makes_a_sample_again(client):
    def sampled(seed):
        return client.post(
            "/v1/completions", json=body(temperature=1.0, top_p=0.9, seed=seed)
        ).json()["choices"]

    assert sampled(1) == sampled(1) != sampled(2)


def message(response, status: int) -> str:
    """The message of an error, which has OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error["message"]


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "gpt"}, 404, "model='gpt' is not served here; tiny is"),
        ({"prompt": "word " * 3000}, 400, "exceed the limit of 2,048 tokens"),
        (
            {"prompt": [1] * 2048},
            400,
            "2,048 prompt tokens and max_tokens=24 exceed the limit of 2,048 tokens",
        ),
        (
            {"prompt": "word " * 20_000},
            413,
            "the request is over 81,920 bytes; it may be 2,048 tokens long",
        ),
        ({"prompt": [5000]}, 400, "outside of the vocabulary"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, 400, "prompt=['a', 'b']: 2 prompts; send one in each request"),
        ({"prompt": None}, 400, "prompt: is required"),
        ({"prompt": [1, "a"]}, 400, "prompt=[1, 'a']: must be a text or a list of token ids"),
        ({"prompt": [["a"]]}, 400, "must be a text or a list of token ids"),
        ({"max_tokens": "many"}, 400, "max_tokens='many': must be a valid integer"),
        ({"max_tokens": 0}, 400, "max_tokens=0: must be at least 1"),
        ({"temperature": -1}, 400, "temperature=-1"),
        ({"top_p": 1e-300}, 400, "top_p=1e-300: must be from 1e-30 to 1"),
        ({"top_k": 1 << 63}, 400, "top_k=9223372036854775808: must be at least 1 and below 2^31"),
        ({"gamma": 9}, 400, "gamma=9: must be at most 3"),
        ({"n": 2}, 400, "n=2: not supported; leave it out"),
        ({"logprobs": 5}, 400, "logprobs=5: not supported; leave it out"),
        ({"logprobs": 0}, 400, "logprobs=0: not supported; leave it out"),
        ({"stop": [""]}, 400, "stop=['']: must be a text or a list of texts that are not empty"),
        ({"stop": [5]}, 400, "stop=[5]: must be a text or a list of texts that are not empty"),
        ({"stop": list("abcde")}, 400, "at most 4 stop strings"),
        ({"max_token": 5}, 400, "max_token=5: not supported; leave it out"),
        (
            {"stream_options": {"usage": True}},
            400,
            "stream_options.usage=True: not supported; leave it out",
        ),
    ],
)
def test_what_cannot_be_done_gets_its_status(client, changes, status, said):
    assert said in message(client.post("/v1/completions", json=body(**changes)), status)
    # Requests of other tests may still be ending.
    until(lambda: metric(client, "magicdec_requests_running") == 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"model": ', "Invalid JSON: EOF while parsing a value"),
        (b"", "Invalid JSON"),
        (b"7", "must be an object"),
        (b"[" * 50_000, "Invalid JSON: recursion limit"),
        (b'{"model": "tiny", "prompt": "\xff"}', "Invalid JSON"),
        (b'{"model": "tiny", "prompt": "a\\ud800"}', "Invalid JSON"),
        (
            b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
            "temperature=nan: must be 0 (greedy) or",
        ),
        (
            b'{"model": "tiny", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
            "Invalid JSON: number out of range",
        ),
    ],
)
def test_what_is_not_a_request_is_refused(client, content, said):
    response = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert said in message(response, 400)


def test_all_errors_have_the_same_shape(client):
    assert "content-type=text/plain: must be" in message(
        client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415
    )
    assert message(client.get("/v1/nothing"), 404) == "Not Found"
    assert message(client.get("/v1/completions"), 405) == "Method Not Allowed"


EDGES = [
    -(1 << 64),
    -1,
    0,
    0.5,
    1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**400,
    1e-300,
    1e308,
]
LIMITED = ["max_tokens", "temperature", "top_p", "top_k", "seed", "gamma"]
FIELDS = [*Completion.model_fields, *NEUTRAL, "logprobs", "anything"]
ANYTHING = st.recursive(
    # Characters without exception: lone surrogates, too.
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def check_survival(client, changes: dict) -> None:
    """Whatever a request says, it is answered or refused, and the engine goes on."""
    content = json.dumps(body(max_tokens=2, temperature=1) | changes)
    response = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413)
        message(response, response.status_code)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("field", LIMITED)
def test_no_number_harms_the_server(client, field):
    for edge in EDGES:
        check_survival(client, {field: edge})
    assert client.post("/v1/completions", json=body()).status_code == 200


def test_no_field_harms_the_server(client):
    @settings(max_examples=100)
    @given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=2))
    def fuzz(changes):
        check_survival(client, changes)

    fuzz()
    assert client.post("/v1/completions", json=body()).status_code == 200


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            Completion,
            {"prompt": "a"} | {f"k{i}": 0 for i in range(100_000)},
            "k0=0: not supported; leave it out",
        ),
        (Chat, {"messages": [{}] * 100_000}, "messages.0.role: is required"),
        (
            Chat,
            {"messages": [{"role": "user", "content": [0] * 100_000}]},
            "messages.0.content=[0, 0, ",
        ),
    ],
)
def test_a_body_full_of_mistakes_costs_little(kind, fields, said):
    """One mistake is described, and no more are collected: all of these would take a second and a
    gigabyte.
    """
    content = json.dumps({"model": "tiny"} | fields)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=f"^{re.escape(said)}"):
            kind.parse(content)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_fields_that_change_nothing_are_taken(client):
    neutral = {"n": 1, "best_of": 1, "stop": None, "logprobs": None, "user": "me"}
    neutral |= {"repetition_penalty": 1.0, "top_k": -1}
    assert client.post("/v1/completions", json=body(max_tokens=1, **neutral)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(client, stream):
    cancelled = 'magicdec_requests_total{end="cancelled"}'
    before = metric(client, cancelled) if cancelled in client.get("/metrics").text else 0
    asked = body(max_tokens=2000, ignore_eos=True, stream=stream)
    if stream:
        with client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()  # kept: when it is dropped, so is the connection
            next(lines)
            assert metric(client, "magicdec_requests_running") == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=asked, timeout=0.5)
    until(
        lambda: (
            metric(client, "magicdec_requests_running")
            == metric(client, "magicdec_requests_waiting")
            == 0
        )
    )
    until(lambda: metric(client, cancelled) == before + 1)


@asynccontextmanager
async def local(parts, tokenizer=None, **settings):
    """An engine, and a client of its app on the same event loop."""
    engine = AsyncEngine(Scheduler(Slots(parts[0], 1, 256)))
    transport = httpx.ASGITransport(
        http.create_app(engine, tokenizer or parts[1], "tiny", **settings)
    )
    async with (
        engine,
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client,
    ):
        yield engine, client


def complete(client, **changes):
    return client.post("/v1/completions", json=body(**changes))


async def test_a_prompt_is_tokenised_while_the_server_goes_on(parts):
    asked, may_answer = threading.Event(), threading.Event()

    def encode(text, **_):
        asked.set()
        assert may_answer.wait(20)
        return [1, 2, 3]

    tokenizer = SimpleNamespace(
        encode=encode, decode=lambda tokens, skip_special_tokens: "x" * len(tokens)
    )
    async with local(parts, tokenizer) as (_, client):
        answer = asyncio.create_task(complete(client, max_tokens=2))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        may_answer.set()
        assert (await answer).json()["choices"][0]["text"] == "xx"


async def test_the_queue_has_a_bound(parts):
    async with local(parts, max_waiting=2) as (_, client):  # a slot, and two that wait
        answers = await asyncio.gather(*(complete(client) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert message(refused, 429) == "too many requests are waiting; try again later"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await complete(client)).status_code == 200


async def test_a_failed_request_is_answered_and_the_next_one_served(parts, monkeypatch):
    async with local(parts) as (engine, client):
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.scheduler.slots, "seat", Mock(side_effect=OverflowError("too large"))
            )
            assert message(await complete(client), 500) == "the request has failed"
        assert (await complete(client)).status_code == 200


async def test_a_request_that_never_arrives_gives_its_place_back(parts, monkeypatch):
    async def never():
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(http, "BODY_S", 0.05)
    async with local(parts, max_waiting=0) as (_, client):
        json_type = {"content-type": "application/json"}
        said = message(
            await client.post("/v1/completions", content=never(), headers=json_type), 408
        )
        assert said == "the request did not arrive within 0.05 s"
        assert (await complete(client)).status_code == 200


async def test_an_engine_that_ends_while_a_request_comes_in_is_unavailable(parts, monkeypatch):
    def ended(*_):
        raise RuntimeError("the engine is closed")

    async with local(parts) as (engine, client):
        monkeypatch.setattr(engine, "generate", ended)
        assert message(await complete(client), 503) == "the engine is closed"


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_the_engine_ends_the_answers(parts, stream):
    async with local(parts) as (engine, client):
        asked = asyncio.create_task(complete(client, max_tokens=200, stream=stream))
        while not engine.num_running:
            await asyncio.sleep(0.01)
        engine.close()
        assert message(await complete(client), 503) == "the engine is closed"
        if stream:
            assert json.loads((await asked).text.split("data: ")[-1])["error"]["code"] == 503
        else:
            assert message(await asked, 503) == "the engine is closed"


async def test_waiting_for_an_answer_does_not_poll():
    async def receive():
        received.append(True)
        await asyncio.Event().wait()

    received, stream = [], Stream([1], Params(), asyncio.get_running_loop())
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    answer = HttpAnswer(
        Completion(model="tiny", prompt="a"), stream, {}, StoppableText(None), Mock()
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(answer.whole(request), 0.3)
    assert len(received) == 1


def test_what_else_it_tells(client):
    assert client.get("/health").status_code == 200
    (described,) = client.get("/v1/models").json()["data"]
    assert (described["id"], described["max_model_len"]) == ("tiny", 2048)
    assert 0 <= time.time() - described["created"] < 3600
    tokens = metric(client, "magicdec_generation_tokens_total")
    client.post(
        "/v1/completions", json=body(max_tokens=7, ignore_eos=True, prompt=[*range(9, 109)])
    )
    assert metric(client, "magicdec_generation_tokens_total") == tokens + 7
    accepted, proposed = (
        metric(client, f"magicdec_{name}_tokens_total") for name in ("accepted", "proposed")
    )
    assert 0 < accepted < proposed
    by_position = [
        metric(client, f'magicdec_accepted_tokens_per_position_total{{position="{i}"}}')
        for i in range(3)
    ]
    assert sum(by_position) == accepted
    assert metric(client, "magicdec_rounds_total") * 3 >= proposed
    assert by_position == sorted(by_position, reverse=True)
    assert metric(client, "magicdec_time_to_first_token_seconds_count") > 0


def test_half_a_character_is_held_back(parts):
    _, tokenizer = parts
    text = "x = 'ä → 😀'\n"
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [detokenizer.add([token]) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces


def test_it_listens_on_loopback_unless_told_otherwise(monkeypatch, capsys):
    heard = []

    def bound(host, port):
        heard.append((host, port))
        return nullcontext()

    monkeypatch.setattr(uvicorn_server, "bound", bound)
    monkeypatch.setattr(uvicorn_server.Server, "run", lambda server, sockets: None)
    assert serve.main([*SETTINGS, "batch.size=1", "batch.context_len=256"]) == 0
    assert heard == [("127.0.0.1", 8000)]
    for mistake, said in (
        ("--port=65536", "--port=65536: must be from 0 to 65,535"),
        ("--max-waiting=-1", "--max-waiting=-1: must be at least 0"),
        ("target=tny", "did you mean tiny?"),
        ("draft.num_layers=3", "draft.num_layers=3 has no effect with draft=self"),
        ("draft.gamm=3", "unknown key draft.gamm; did you mean draft.gamma?"),
        (
            "sampling.temperature=0.7",
            "sampling.temperature=0.7 has no effect: each request names its own sampling",
        ),
        ("data=repeat", "data=repeat has no effect: requests bring their own prompts; leave it"),
        ("batch.size=0", "batch.size=0: must be auto or a whole number from 1 to 2,147,483,647"),
    ):
        assert serve.main([mistake]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert said in error


WITHOUT_FASTAPI = """
import sys
sys.modules["fastapi"] = None
from magicdec.commands import serve
print(serve.main(["target=tiny"]))
serve.main(["--help"])
"""


def test_without_the_extra_the_help_works_and_a_server_is_a_users_mistake():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FASTAPI], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("2\nusage: magicdec serve")
    said = "error: serving over HTTP needs fastapi: pip install 'magicdec[serve]'"
    assert done.stderr.splitlines()[-1] == said
