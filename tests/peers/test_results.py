"""Result files of load generators. The fixtures of AIPerf 0.13 and GuideLLM 0.8.1 are what they wrote about two users
of our server, that of vllm bench serve 0.32 about four, without the keys that are not read.
"""

import json
from pathlib import Path

import pytest

from magicdec.errors import UserError
from magicdec.peers.results.read import read_results

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


def test_vllm_bench():
    tool, (level,) = read_results(FILES / "vllm_bench.json")
    assert (tool, level.model, level.load) == ("vllm bench serve", "tiny", {"concurrency": 4})
    assert (level.context_len, level.generate_len, level.speculation) == (512.65, 64, {})
    figures = {
        "tokens_per_second": 125.53,
        "requests_per_second": 1.9615,
        "time_per_output_token_ms": 21.603,
        "time_per_output_token_ms_p50": 22.533,
        "time_to_first_token_ms_p99": 1335.6,
        "request_latency_ms": 1998.9,
    }
    assert {name: level.metrics[name] for name in figures} == pytest.approx(figures, rel=1e-4)


def test_latencies_of_requests_are_there_if_asked_for(tmp_path):
    """With --percentile-metrics."""
    path = changed(tmp_path, "vllm_bench.json", **{f"{kind}_e2el_ms": None for kind in ("mean", "median", "p99")})
    assert not [name for name in read_results(path)[1][0].metrics if name.startswith("request_latency_ms")]


def test_vllm_bench_appends_lines_and_reports_acceptance(tmp_path):
    plain = (FILES / "vllm_bench.json").read_text()
    other = {"request_rate": 2.5, "max_concurrency": None}
    spoken = {"spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 75.0}
    path = tmp_path / "appended.json"
    path.write_text("\n".join(json.dumps(json.loads(plain) | more) for more in (other, spoken)))
    open_loop, speculative = read_results(path)[1]
    assert open_loop.load == {"rate": 2.5}
    assert speculative.speculation == {"acceptance_length": 2.5, "acceptance_rate": 0.75}


def test_aiperf():
    tool, (level,) = read_results(FILES / "aiperf.json")
    assert (tool, level.model, level.load, level.context_len) == ("AIPerf", "tiny", {"concurrency": 2}, 64)
    assert level.metrics["time_per_output_token_ms"] == pytest.approx(3.4065, rel=1e-3)
    assert level.metrics["time_to_first_token_ms_p50"] == pytest.approx(32.261, rel=1e-3)
    assert level.metrics["wall_s"] == pytest.approx(0.27378, rel=1e-3)


def test_an_older_aiperf_and_one_that_counts_acceptance(tmp_path):
    """Before `phases` there was `loadgen` (0.6)."""
    old = {"endpoint": {"model_names": ["tiny"]}, "loadgen": {"request_rate": 3.0}}
    rounds = {"0": 1, "2": 3}
    path = changed(tmp_path, "aiperf.json", input_config=old, pooled_spec_decode_acceptance_histogram=rounds)
    (level,) = read_results(path)[1]
    assert (level.model, level.load, level.speculation) == ("tiny", {"rate": 3}, {"acceptance_length": 2.5})


def test_aiperf_counts_acceptance_by_the_usage_of_answers(tmp_path):
    usage = {f"total_usage_{name}_prediction_tokens": {"avg": avg} for name, avg in (("accepted", 6), ("rejected", 2))}
    (level,) = read_results(changed(tmp_path, "aiperf.json", **usage))[1]
    assert level.speculation == {"acceptance_rate": 0.75}


def test_guidellm():
    tool, (level,) = read_results(FILES / "guidellm.json")
    assert (tool, level.model, level.load, level.generate_len) == ("GuideLLM", "tiny", {"concurrency": 2}, 16)
    assert level.metrics["time_per_output_token_ms"] == pytest.approx(5.446, rel=1e-3), "without the first token"
    assert level.metrics["request_latency_ms"] == pytest.approx(110.66, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        ({"type_": "synchronous"}, {"concurrency": 1}),
        ({"type_": "poisson", "rate": 2.0, "max_concurrency": 512}, {"rate": 2.0}),
        ({"type_": "throughput"}, {}),
    ],
)
def test_loads_of_guidellm(tmp_path, strategy, load):
    (level,) = read_results(changed(tmp_path, "guidellm.json", benchmarks__0__config__strategy=strategy))[1]
    assert level.load == load


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("vllm_bench.json", {"completed": 0}, "completed=0: no request was answered"),
        ("vllm_bench.json", {"duration": None}, "duration is missing a value"),
        ("vllm_bench.json", {"mean_tpot_ms": "fast"}, "mean_tpot_ms='fast': must be a number"),
        ("vllm_bench.json", {"total_input_tokens": None}, "not a result file that is read here: result.json of a run"),
        ("aiperf.json", {"request_count__avg": 0}, "request_count=0: no request was answered"),
        ("aiperf.json", {"output_sequence_length": None}, "output_sequence_length is missing a value"),
        ("guidellm.json", {"metadata__version": 1}, "metadata.version=1: must be one of 2"),
        ("guidellm.json", {"benchmarks": []}, "no request was answered"),
        ("guidellm.json", {"benchmarks__0__metrics__request_totals__successful": 0}, "no request was answered"),
    ],
)
def test_mistakes_are_one_line(tmp_path, name, changes, said):
    path = changed(tmp_path, name, **changes)
    with pytest.raises(UserError) as raised:
        read_results(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", b"id,status\n", b"[1]", b"3\n4\n", b"\xff\xfe", b"{}", b'{"a": 1}\n{"b": 2}\n']
)
def test_other_files_name_what_is_read(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"other: not a result file .*vllm bench serve .*AIPerf.*GuideLLM's benchmarks"):
        read_results(path)
    with pytest.raises(UserError, match="nowhere: cannot be read: No such file"):
        read_results(tmp_path / "nowhere")
