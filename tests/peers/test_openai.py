"""engine=openai: our own server against our engine, and stand-ins for servers that take and break
other things.
"""

import json
import math
from itertools import cycle

import pytest

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.inputs.rules import parse, parse_json
from magicdec.peers.answer import EndpointRequest, Event
from magicdec.peers.base import AcceptanceCounts
from magicdec.peers.endpoint import read_counters
from magicdec.planning.resolve import resolve
from magicdec.scenarios import Job, run
from magicdec.serving.request import Params
from magicdec.units import WAYS
from tests.peers import stand_in
from tests.peers.stand_in import counters, standing_in
from tests.refusals import refusal
from tests.scenarios.test_run import TINY
from tests.serving.conftest import SETTINGS, parts, serving
from tests.tracking.sample import lines

__all__ = ["parts"]  # a fixture
LOAD = ["scenario=serve", "scenario.concurrencies=[2]", "scenario.num_requests=6", "tracker=[]"]
LOAD += ["batch.context_len=64", "batch.generate_len=9"]


def served(tmp_path, url: str, *overrides: str) -> dict:
    """The result of a run under load, after its history and generations."""
    config = compose(
        ["engine=openai", f"engine.url={url}", f"runs_dir={tmp_path}", *LOAD, *overrides]
    )
    result = run(config, Job())
    return result | {
        name: lines(tmp_path / result["id"] / f"{name}.jsonl")
        for name in ("history", "generations")
    }


def test_a_server_does_not_tell_whether_its_weights_are_random():
    keys = ["engine=openai", "engine.url=http://localhost:1/v1", "data=random", *LOAD]
    assert resolve(compose(keys)).sources == {}


@pytest.mark.slow
def test_our_server_writes_what_our_engine_writes(tmp_path, parts, capsys):
    """Both ways, under both kinds of load, and the server of the baseline has no draft."""
    levels = ["scenario.concurrencies=[1,3]", "scenario.rates=[50]"]
    native = run(compose([*SETTINGS, *LOAD, *levels, f"runs_dir={tmp_path}"]), Job())
    with serving(parts, 3, 128) as url, serving(parts, 3, 128, speculative=False) as plain:
        result = served(tmp_path, f"{url}/v1", f"engine.baseline_url={plain}/v1", *levels)
    for ours, theirs in zip(
        lines(tmp_path / native["id"] / "generations.jsonl"), result["generations"], strict=True
    ):
        assert [theirs[way] for way in ("autoregressive", "speculative")] == [
            ours["autoregressive"]
        ] * 2
    same = (
        "acceptance_rounds",
        "acceptance_rate",
        "acceptance_length",
        "alpha",
        "lossless/identical",
    )
    assert {key: result[key] for key in same} == {key: native[key] for key in same}
    assert [next(iter(row)) for row in result["history"]] == ["concurrency", "concurrency", "rate"]
    assert result["acceptance/source"] == "usage"
    assert {key for key in native if "_ms" in key} <= set(result)
    assert "tiny at http://127.0.0.1" in capsys.readouterr().out


def test_a_server_replays_a_trace_and_has_figures_by_category(tmp_path, parts):
    rows = [{"p": f"def f{n}(self): return", "c": "ab"[n % 2], "t": n / 100} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        "data=jsonl",
        f"data.path={tmp_path}/rows.jsonl",
        "data.prompt=p",
        "data.category=c",
        "data.arrival=t",
    ]
    keys += ["scenario.concurrencies=[]", "scenario.replays=[2]"]
    native = run(compose([*SETTINGS, *LOAD, *keys, f"runs_dir={tmp_path}"]), Job())
    with serving(parts, 3, 128) as url:
        result = served(tmp_path, f"{url}/v1", *keys)
    same = [
        f"category/{name}/{key}" for name in "ab" for key in ("rows", "tokens", "acceptance_rate")
    ]
    assert {key: result[key] for key in same} == {key: native[key] for key in same}
    assert [next(iter(row)) for row in result["history"]] == ["replay"]


@pytest.mark.parametrize("way", WAYS)
def test_one_server_is_speculative_if_it_speculates(tmp_path, parts, way):
    with serving(parts, 3, 128, speculative=way == "speculative") as url:
        result = served(tmp_path, f"{url}/v1")
    assert {key.partition("/")[0] for key in result if "time_to_first" in key} == {way}


@pytest.mark.parametrize(
    ("takes", "form"),
    [
        ({}, list),
        ({"takes": ()}, list),
        ({"takes": ("ignore_eos", "return_token_ids")}, list),
        ({"takes_ids": False}, str),
        ({"takes_ids": False, "takes": ("ignore_eos",)}, str),
    ],
)
def test_a_server_is_asked_in_the_way_that_it_takes(tmp_path, takes, form, capsys):
    with standing_in(**takes) as (server, url):
        result = served(tmp_path, url)
    assert {type(body["prompt"]) for body in server.asked} == {form}
    assert set(server.asked[-1]) & set(server.behaviour.takes) == set(server.behaviour.takes) - {
        "top_k"
    }
    assert ("does not take ignore_eos" in capsys.readouterr().err) == (
        "ignore_eos" not in server.behaviour.takes
    )
    if "return_token_ids" in server.behaviour.takes:
        assert [row["autoregressive"] for row in result["generations"]] == [list(range(1, 10))] * 6
    assert result["autoregressive/requests_per_second"] * result[
        "autoregressive/wall_s"
    ] == pytest.approx(6)
    per_second = (
        result["autoregressive/tokens_per_second"] / result["autoregressive/requests_per_second"]
    )
    assert per_second == pytest.approx(9), "as many tokens as its usage counts"


# The last event of a completion, with the metrics that vLLM's documentation shows
# (--per-request-spec-decode-metrics summary).
VLLM_EVENT = """{"id": "cmpl-1", "object": "text_completion", "created": 1787366173, "choices": [],
"model": "a", "usage": {"prompt_tokens": 11, "total_tokens": 65, "completion_tokens": 54},
"metrics": {"speculative_decoding": {"mean_acceptance_length": 1.2325581395348837,
"draft_acceptance_rate": 0.07751937984496124, "acceptance_histogram": [39, 1, 0, 3],
"num_spec_steps": 43, "num_accepted_draft_tokens": 10, "num_draft_tokens": 129,
"num_spec_tokens": 3}}}"""


def test_the_acceptance_of_a_request_is_what_vllm_says_of_it():
    request = EndpointRequest([1], Params(54))
    request.take(parse_json(Event, VLLM_EVENT))
    request.conclude(lambda text: [], is_done=True, ignores_eos=True)
    assert request.counts == AcceptanceCounts(43, 129, (4, 3, 3))
    metrics = request.counts.metrics(3)
    assert metrics["acceptance_length"] == pytest.approx(1.2325581395348837)
    assert metrics["acceptance_rate"] == pytest.approx(0.07751937984496124)


@pytest.mark.parametrize("metrics", ['"none"', '{"speculative_decoding": {"num_spec_steps": -1}}'])
def test_metrics_in_another_form_are_ignored(metrics):
    request = EndpointRequest([1], Params(2))
    usage = '"usage": {"completion_tokens": 2}'
    request.take(parse_json(Event, f'{{"choices": [], {usage}, "metrics": {metrics}}}'))
    request.conclude(lambda text: [], is_done=True, ignores_eos=True)
    assert request.counts is None


def test_acceptance_by_context_is_that_of_our_engine(tmp_path, parts, capsys):
    """Both print it, with the error of the shortest contexts."""
    keys = ["scenario.length_shares=[0.25,1.0]", "scenario.num_requests=10"]
    native = run(compose([*SETTINGS, *LOAD, *keys, f"runs_dir={tmp_path}"]), Job())
    assert "tokens per round" in capsys.readouterr().out
    with serving(parts, 2, 128) as url:
        result = served(tmp_path, f"{url}/v1", *keys)
    names = [key for key in native if key.startswith("context/")]
    assert {"context/16/acceptance_length_ci95", "context/error_of_shortest"} <= {*names}
    assert {key: result[key] for key in names} == {key: native[key] for key in names}
    told = [row["acceptance_length"] for row in result["generations"]]
    assert len(told) == 10
    assert "a length measured on the shortest contexts is" in " ".join(
        capsys.readouterr().out.split()
    )


def test_times_are_those_of_the_chunks(tmp_path):
    """A chunk every 20 ms: the first token, then four times two tokens."""
    with standing_in(chunk_s=0.02) as (_, url):
        result = served(tmp_path, url)
    assert 20 <= result["autoregressive/time_to_first_token_ms_p50"] < 80
    assert 20 <= result["autoregressive/inter_chunk_latency_ms_p50"] < 60
    total = (
        result["autoregressive/request_latency_ms_p50"]
        - result["autoregressive/time_to_first_token_ms_p50"]
    )
    assert result["autoregressive/time_per_output_token_ms_p50"] == pytest.approx(
        total / 8, rel=0.3
    )


@pytest.mark.parametrize(("metrics", "share"), [("vllm", 1), ("sglang", None)])
def test_acceptance_by_the_servers_own_counters(tmp_path, metrics, share):
    """9 tokens: the first, then four rounds that accept their only proposal."""
    with standing_in(metrics=metrics) as (_, url):
        result = served(tmp_path, url)
    found = [result[key] for key in ("acceptance/source", "acceptance_rounds", "acceptance_length")]
    assert found == ["/metrics", 6 * 4, 2]
    assert result.get("acceptance_rate") == result.get("alpha") == share


def test_acceptance_that_nobody_reports_is_unknown(tmp_path):
    with standing_in() as (_, url), standing_in() as (_, other):
        result = served(tmp_path, url, f"engine.baseline_url={other}")
    assert (result["acceptance/source"], result["acceptance_rounds"]) == ("unknown", 0)
    assert result["lossless/identical"] is True
    assert math.isfinite(result["speedup"])


@pytest.mark.parametrize(
    ("kind", "fixed", "requests"), [("concurrency", "[1]", 6), ("rate", "[]", 2)]
)
@pytest.mark.slow
def test_the_highest_load_within_a_bound(tmp_path, capsys, kind, fixed, requests):
    """Every load keeps the one bound, and none the other."""
    levels = [f"scenario.slo={kind}", "scenario.slo_most=3", f"scenario.concurrencies={fixed}"]
    some, one = (f"scenario.num_requests={number}" for number in (requests, 1))
    with standing_in() as (_, url), standing_in() as (_, other):
        levels += [f"engine.baseline_url={other}"]
        kept = served(tmp_path, url, *levels, "scenario.first_token_ms=1e9", some)
        broken = served(tmp_path, url, *levels, "scenario.first_token_ms=1e-9", one)
    found = [
        [result[f"{way}/slo_{kind}"] for way in ("autoregressive", "speculative")]
        for result in (kept, broken)
    ]
    assert found[1] == [0, 0]
    assert found[0] == [3, 3] if kind == "concurrency" else min(found[0]) > 3 / 1.1
    assert (
        f"highest {kind} within the bounds: autoregressive {found[0][0]:g}"
        in capsys.readouterr().out
    )
    assert ("speedup" in kept) == (fixed != "[]" or kind == "rate")


def test_counters_of_several_engines_are_summed():
    found = read_counters(
        counters("vllm", 5, 3) + "\n" + counters("vllm", 2, 3).replace('engine="0"', 'engine="1"')
    )
    assert found == AcceptanceCounts(7, 14, (7, 7))
    assert read_counters("\x00 nonsense {") == AcceptanceCounts()


NO_STREAM = "<html>Welcome</html>"
STREAM = 'data: {"choices": 3}\n\n'


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"status": 500, "body": '{"error": {"message": "out of order"}}'}, "out of order"),
        (
            {"status": 401, "body": "{}"},
            "it refuses the key; name the variable that holds it with engine.key_variable",
        ),
        ({"status": 307, "body": "{}"}, "307"),
        ({"body": NO_STREAM}, "its answer is not a stream of events: <html>Welcome</html>"),
        ({"body": STREAM}, "choices=3: must be a list"),
        ({"body": "data: {nonsense\n\n"}, ""),
        ({"body": 'data: [1, 2]\n\ndata: null\n\ndata: "a"\n\n'}, ""),
        ({"usage": False, "takes": ("ignore_eos",)}, "its answer has no usage"),
        ({"chunk_s": 5}, "no answer within engine.time_limit_s=0.5 seconds"),
        (
            {"breaks_at": 1},
            "its answer has 3 of 8 tokens: it breaks off, without a finish_reason or [DONE]",
        ),
        ({"models": ("a", "b")}, "engine.model=null: {url} serves a, b; choose one"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(tmp_path, behaviour, said):
    with standing_in(**behaviour) as (_, url), refusal(url, said.format(url=url)) as raised:
        served(tmp_path, url, "engine.retries=0", "engine.time_limit_s=0.5")
    assert str(raised.value).startswith("engine.")
    assert len(str(raised.value)) < 500
    assert next(tmp_path.glob("*/result.json")).read_text().count('"failed"') == 1


ERRORS = [
    'data: {"error": {"message": "no room", "code": 503}}',
    'data: {"error": "no room"}',
    'data: {"error": {"code": 503, "msg": "no room"}}',
    'data: {"object": "error", "message": "no room", "code": 503}',
    'data: {"detail": [{"loc": ["body"], "msg": "no room"}]}',
    'event: error\ndata: {"message": "no room"}',
    "event: error\ndata: no room",
    'event: error\r\ndata: {"error":\r\ndata:  "no room"}\r\n',
    'error: {"code": 503, "message": "no room"}',
    '{"error": {"message": "no room"}}',
    '{"object": "error",\n "message": "no room"}',
    "no room",
]
FORMS = [(200, text + end) for text, end in zip(ERRORS, cycle(("", "\n\n")), strict=False)]
FORMS += [
    (500, text)
    for text in (
        '{"error": "no room"}',
        '{"detail": "no room"}',
        '{"message": "no room"}',
        "no room",
    )
]


@pytest.mark.parametrize(("status", "body"), FORMS)
def test_the_words_of_an_error_reach_the_user_in_every_form(tmp_path, status, body):
    with standing_in(status=status, body=body) as (_, url), refusal(url, "no room"):
        served(tmp_path, url, "engine.retries=0")


# What a server takes, and so what it tells.
IDS, TEXT = ("ignore_eos", "return_token_ids"), ("ignore_eos",)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (
            {"reason": None, "done": False, "takes": IDS},
            "it breaks off, without a finish_reason or [DONE]",
        ),
        (
            {"reason": None, "done": False, "takes": TEXT},
            "it breaks off, without a finish_reason or [DONE]",
        ),
        (
            {"reason": None, "done": False, "takes": ()},
            "it breaks off, without a finish_reason or [DONE]",
        ),
        ({"reason": "stop", "takes": IDS}, "although ignore_eos was sent (finish_reason=stop)"),
        (
            {"reason": "length", "takes": TEXT},
            "although ignore_eos was sent (finish_reason=length)",
        ),
        ({"reason": None, "takes": TEXT}, "although ignore_eos was sent (finish_reason=None)"),
    ],
)
def test_an_answer_that_was_cut_short_is_no_answer(tmp_path, behaviour, said):
    """After 3 of 9 tokens: the stream breaks off, or ends as if the model had ended it, which was
    forbidden.
    """
    short = "6 of 6 requests failed: its answer has 3 of 9 tokens"
    with standing_in(most=3, **behaviour) as (_, url), refusal(url, short, said):
        served(tmp_path, url)


def test_an_answer_may_end_early_where_it_was_allowed_to(tmp_path):
    for behaviour, keys in (
        ({"reason": "stop"}, ["sampling.ignore_eos=false"]),
        ({"takes": ()}, []),
    ):
        with standing_in(most=3, **behaviour) as (_, url):
            result = served(tmp_path, url, *keys)
        assert result["autoregressive/failed_requests"] == 0
        rates = [result[f"autoregressive/{of}_per_second"] for of in ("tokens", "requests")]
        assert rates[0] == pytest.approx(3 * rates[1])


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_given_up_is_no_answer(tmp_path, reason):
    with (
        standing_in(reason=reason) as (_, url),
        refusal(url, f"its answer ends with finish_reason={reason}"),
    ):
        served(tmp_path, url)


@pytest.mark.parametrize("takes", [("ignore_eos", "return_token_ids"), ("ignore_eos",)])
@pytest.mark.parametrize(
    "more", [{}, {"usage_has_choices": False}, {"reason": None}, {"reason": "eos_token"}]
)
def test_a_usage_that_lags_hides_no_token(tmp_path, takes, more):
    """Text comes every 20 ms, the first one after 20 ms; the counter says so at the end alone."""
    with standing_in(chunk_s=0.02, lagging_usage=True, takes=takes, **more) as (_, url):
        result = served(tmp_path, url)
    assert result["autoregressive/failed_requests"] == 0
    assert 20 <= result["autoregressive/time_to_first_token_ms_p50"] < 80
    assert result["autoregressive/inter_chunk_latency_ms_p50"] >= 20
    assert result["autoregressive/time_per_output_token_ms_p50"] > 5


def test_what_can_be_done_without_is_not_asked_for(tmp_path):
    """A usage without the prompt's tokens, with details of another kind; none at all, where tokens
    are told.
    """
    request = EndpointRequest([1, 2], Params(2))
    usage = {"completion_tokens": 2, "prompt_tokens": None, "completion_tokens_details": [1]}
    for plain in ({"choices": [{"text": "ab"}], "timings": 3}, {"choices": None, "usage": usage}):
        request.take(parse(Event, plain))
    request.conclude(lambda text: [*map(ord, text)], is_done=False, ignores_eos=True)
    assert (request.tokens, request.end, request.counts, request.prompt_tokens) == (
        [97, 98],
        "length",
        None,
        None,
    )
    with standing_in(usage=False) as (_, url):
        assert served(tmp_path, url)["autoregressive/failed_requests"] == 0


def test_no_server(tmp_path):
    with pytest.raises(
        UserError, match=r"^engine\.url=http://127\.0\.0\.1:9/v1: no connection \(.+\)$"
    ):
        served(tmp_path, "http://127.0.0.1:9/v1", "engine.retries=0")


def test_what_was_measured_before_a_server_died_is_kept(tmp_path, capsys):
    """It dies within the second level, of which the answered requests count."""
    with standing_in(dies_at=13) as (_, url), pytest.raises(UserError, match="no connection"):
        served(tmp_path, url, "scenario.concurrencies=[1,2,3]", "engine.retries=0")
    (folder,) = (path.parent for path in tmp_path.glob("*/result.json"))
    first, second = lines(folder / "history.jsonl")
    assert (first["concurrency"], first["autoregressive/failed_requests"]) == (1, 0)
    assert (second["concurrency"], second["autoregressive/failed_requests"]) == (2, 3)
    assert (
        "warning: autoregressive, concurrency 2: 3 of 6 requests failed: no connection"
        in capsys.readouterr().err
    )


def test_answers_that_break_off_are_counted_and_left_out(tmp_path):
    with standing_in(breaks_at=8) as (_, url), standing_in() as (_, other):
        result = served(tmp_path, url, f"engine.baseline_url={other}")
    assert (result["speculative/failed_requests"], result["autoregressive/failed_requests"]) == (
        1,
        0,
    )
    answered = {way: result[f"{way}/requests_per_second"] * result[f"{way}/wall_s"] for way in WAYS}
    assert answered == pytest.approx({"autoregressive": 6, "speculative": 5})
    assert "speedup" in result, "of the five that both have answered"
    assert "speedup_duration" not in result


def test_a_busy_server_is_asked_again(tmp_path, monkeypatch):
    answers, stream = iter([503, 429]), stand_in.Handler.stream

    def busy(self, body, **_):
        status = next(answers, None)
        return self.answer(status, "") if status else stream(self, body)

    monkeypatch.setattr(stand_in.Handler, "stream", busy)
    with standing_in() as (_, url):
        assert served(tmp_path, url)["autoregressive/failed_requests"] == 0


def test_a_key_comes_from_the_environment_and_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "very-secret-key")
    with standing_in() as (server, url):
        served(tmp_path, url, "engine.key_variable=THEIR_KEY")
    assert {body["key"] for body in server.asked} == {"Bearer very-secret-key"}
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"THEIR_KEY" in stored
    assert b"very-secret-key" not in stored


LOCAL = "engine.url=http://127.0.0.1/v1"


@pytest.mark.parametrize(
    "typed", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"]
)
def test_the_address_of_a_server_is_that_of_its_api(typed):
    assert compose(["engine=openai", f"engine.url={typed}", *LOAD]).engine.urls == {
        "engine.url": "http://127.0.0.1:8000/v1"
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "engine.url=null: give a server's address, as in engine.url=http://127.0.0.1:8000/v1"),
        (["engine.url=127.0.0.1:8000"], "must be an address such as http://127.0.0.1:8000/v1"),
        (["engine.url=file:///etc/passwd"], "must be an address such as"),
        (["engine.url='http://[::1:8000/v1'"], "must be an address such as"),
        (["engine.url=http://127.0.0.1:port/v1"], "must be an address such as"),
        (["engine.url=http://me:secret@127.0.0.1/v1"], "would be stored; use engine.key_variable"),
        (
            ["engine.url=http://example.org/v1"],
            "is another machine, which gets all prompts; set engine.allow_remote",
        ),
        (["engine.url=http://127.0.0.1.example.org/v1"], "is another machine"),
        ([LOCAL, "engine.baseline_url=http://10.0.0.1/v1"], "engine.baseline_url=http://10."),
        ([LOCAL, "engine.key_variable=NO_SUCH"], "the environment has no such variable"),
        (
            [LOCAL, "scenario=compare"],
            "engine=openai goes with scenario=serve and scenario=profile only",
        ),
        ([LOCAL, "draft=self"], "draft.name=self: engine=openai has no such draft"),
    ],
)
def test_refusals(overrides, said):
    with refusal(said) as raised:
        run(compose(["engine=openai", *LOAD, *overrides]), Job())
    assert "secret" not in str(raised.value)


def test_a_remote_host_is_allowed_by_a_key():
    plan = resolve(
        compose(
            [
                "engine=openai",
                "engine.url=https://example.org/v1",
                "engine.allow_remote=true",
                *LOAD,
            ]
        )
    )
    assert plan.target.folder is not None
    assert "target" not in plan.fingerprints


def test_a_target_whose_weights_are_elsewhere_is_its_tokenizer(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    for path in (TINY / "target").glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    chosen = ["target=custom", f"target.path={folder}"]
    with standing_in() as (_, url):
        assert served(tmp_path / "runs", url, *chosen)["autoregressive/failed_requests"] == 0
    config = compose(["engine=openai", LOCAL, *LOAD, *chosen])
    before = resolve(config).fingerprints
    (folder / "tokenizer.json").write_bytes(b" " + (folder / "tokenizer.json").read_bytes())
    after = resolve(config).fingerprints
    assert before == after | {"tokenizer": before["tokenizer"]} != after
