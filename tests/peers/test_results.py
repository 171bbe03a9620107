"""Result files of load generators. The fixtures of AIPerf 0.13 and GuideLLM 0.8.1 are what they
wrote about two users of our server, that of vllm bench serve 0.32 about four, without the keys that
are not read.
"""

import json
from pathlib import Path

import pytest

from magicdec.errors import UserError
from magicdec.peers.results.read import read_results
from tests.refusals import refusal

FILES = Path(__file__).parent / "results"


def changed(tmp_path, name, **changes):
    """A copy of a fixture with other values; keys are dotted with two underscores."""
    content = json.loads((FILES / name).read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        part = content
        for one in path:
            part = part[int(one) if isinstance(part, list) else one]
        part.pop(last, None) if value is None else part.__setitem__(last, value)
    (tmp_path / name).write_text(json.dumps(content))
    return tmp_path / name


VLLM_BENCH = {
    "tokens_per_second": 125.53,
    "requests_per_second": 1.9615,
    "request_latency_ms": 1998.9,
}
VLLM_BENCH |= {"time_per_output_token_ms": 21.603, "time_per_output_token_ms_p50": 22.533}
VLLM_BENCH |= {"time_to_first_token_ms_p99": 1335.6}
AIPERF = {
    "time_per_output_token_ms": 3.4065,
    "time_to_first_token_ms_p50": 32.261,
    "wall_s": 0.27378,
}
# Without the first token.
GUIDELLM = {"time_per_output_token_ms": 5.446, "request_latency_ms": 110.66}


@pytest.mark.parametrize(
    ("name", "tool", "load", "lengths", "figures"),
    [
        ("vllm_bench.json", "vllm bench serve", {"concurrency": 4}, (512.65, 64), VLLM_BENCH),
        ("aiperf.json", "AIPerf", {"concurrency": 2}, (64, 15.8333), AIPERF),
        ("guidellm.json", "GuideLLM", {"concurrency": 2}, (64, 16), GUIDELLM),
    ],
)
def test_figures_under_our_names(name, tool, load, lengths, figures):
    found, (level,) = read_results(FILES / name)
    assert (found, level.model, level.load, level.speculation) == (tool, "tiny", load, {})
    assert (level.context_len, level.generate_len) == pytest.approx(lengths, rel=1e-4)
    assert {key: level.metrics[key] for key in figures} == pytest.approx(figures, rel=1e-4)


def test_latencies_of_requests_are_there_if_asked_for(tmp_path):
    """vllm bench serve writes them with --percentile-metrics."""
    path = changed(
        tmp_path,
        "vllm_bench.json",
        **{f"{kind}_e2el_ms": None for kind in ("mean", "median", "p99")},
    )
    assert not [
        name for name in read_results(path)[1][0].metrics if name.startswith("request_latency_ms")
    ]


def test_vllm_bench_appends_lines_and_reports_acceptance(tmp_path):
    plain = (FILES / "vllm_bench.json").read_text()
    other = {"request_rate": 2.5, "max_concurrency": None}
    spoken = {"spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 75.0}
    path = tmp_path / "appended.json"
    path.write_text("\n".join(json.dumps(json.loads(plain) | more) for more in (other, spoken)))
    open_loop, speculative = read_results(path)[1]
    assert open_loop.load == {"rate": 2.5}
    assert speculative.speculation == {"acceptance_length": 2.5, "acceptance_rate": 0.75}


STRATEGY = "benchmarks__0__config__strategy"
# Before `phases` there was `loadgen` (0.6).
LOADGEN = {
    "input_config": {"endpoint": {"model_names": ["tiny"]}, "loadgen": {"request_rate": 3.0}}
}
ROUNDS = {"pooled_spec_decode_acceptance_histogram": {"0": 1, "2": 3}}
USAGE = {
    f"total_usage_{name}_prediction_tokens": {"avg": avg}
    for name, avg in (("accepted", 6), ("rejected", 2))
}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("aiperf.json", LOADGEN, {"model": "tiny", "load": {"rate": 3}}),
        ("aiperf.json", ROUNDS, {"speculation": {"acceptance_length": 2.5}}),
        ("aiperf.json", USAGE, {"speculation": {"acceptance_rate": 0.75}}),
        ("guidellm.json", {STRATEGY: {"type_": "synchronous"}}, {"load": {"concurrency": 1}}),
        (
            "guidellm.json",
            {STRATEGY: {"type_": "poisson", "rate": 2.0, "max_concurrency": 9}},
            {"load": {"rate": 2.0}},
        ),
        ("guidellm.json", {STRATEGY: {"type_": "throughput"}}, {"load": {}}),
    ],
)
def test_other_loads_and_acceptance(tmp_path, name, changes, expected):
    (level,) = read_results(changed(tmp_path, name, **changes))[1]
    assert {key: getattr(level, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("vllm_bench.json", {"completed": 0}, "completed=0: no request was answered"),
        ("vllm_bench.json", {"duration": None}, "duration is missing a value"),
        ("vllm_bench.json", {"mean_tpot_ms": "fast"}, "mean_tpot_ms='fast': must be a number"),
        (
            "vllm_bench.json",
            {"total_input_tokens": None},
            "not a result file that is read here: JSON of vllm bench serve",
        ),
        ("aiperf.json", {"request_count__avg": 0}, "request_count=0: no request was answered"),
        (
            "aiperf.json",
            {"output_sequence_length": None},
            "output_sequence_length is missing a value",
        ),
        ("guidellm.json", {"metadata__version": 1}, "metadata.version=1: must be one of 2"),
        ("guidellm.json", {"benchmarks": []}, "no request was answered"),
        (
            "guidellm.json",
            {"benchmarks__0__metrics__request_totals__successful": 0},
            "no request was answered",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, name, changes, said):
    path = changed(tmp_path, name, **changes)
    with refusal(said) as raised:
        read_results(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"id,status\n",
        b"[1]",
        b"3\n4\n",
        b"\xff\xfe",
        b"{}",
        b'{"a": 1}\n{"b": 2}\n',
        b"[" * 100_000,
    ],
)
def test_other_files_name_what_is_read(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(
        UserError,
        match=r"other: not a result file .*vllm bench serve .*AIPerf.*GuideLLM's benchmarks",
    ):
        read_results(path)
    with pytest.raises(UserError, match="nowhere: cannot be read: No such file"):
        read_results(tmp_path / "nowhere")
