"""Calibration from files: a known machine gives the times, and the fit finds it."""

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import yaml

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.calibrate.result_files import _architecture, of_results
from magicdec.commands import calibrate
from magicdec.config.groups import Efficiency
from magicdec.config.load import compose, to_dict
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.round import Setup, prefill_s, round_times
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from tests.programs import ROOT

LOADS = ROOT / "tests" / "peers" / "results"
pytest.importorskip("scipy")
pytestmark = pytest.mark.usefixtures("here")
NAMED = ["target=llama-3.1-8b", "hardware=h200"]
TRUTH = {
    "bandwidth_fraction": 0.8,
    "matmul_fraction": 0.6,
    "layer_overhead_us": 12.0,
    "step_overhead_us": 2500.0,
}
OUTPUT = 256  # tokens


def setup(batch=8, context=4000, efficiency=None):
    machine = configured("h200", efficiency=efficiency or Efficiency(**TRUTH), stack="magicdec")
    return Setup(architecture("llama-3.1-8b"), machine, batch, context, target_name="llama-3.1-8b")


def load(users, prompt):
    """A file of vllm bench serve: users who never pause, on a server that decodes all and prefills
    one at a time.
    """
    at = setup(users, prompt + OUTPUT // 2)
    first_s, steps = prefill_s(at, at.target, 1, prompt), OUTPUT - 1
    step_s = at.target_time.total + users / steps * (1 - 1 / users) * first_s
    rate = users / (steps * step_s)
    content = json.loads((LOADS / "vllm_bench.json").read_text())
    content |= {
        "max_concurrency": users,
        "request_throughput": rate,
        "output_throughput": rate * OUTPUT,
    }
    content |= {
        f"total_{kind}_tokens": content["completed"] * n
        for kind, n in (("input", prompt), ("output", OUTPUT))
    }
    return content | {"mean_tpot_ms": 1e3 * step_s, "mean_ttft_ms": 1e3 * first_s}


def written(name):
    return yaml.safe_load((calibrate.OPTIONS / f"{name}.yaml").read_text())["efficiency"]


def test_a_server_is_found_from_its_load(tmp_path, capsys):
    """At other loads than the files': its steps, and its prefill."""
    for users, prompt in product((1, 8, 64), (500, 8000)):
        (tmp_path / f"{users}-{prompt}.json").write_text(json.dumps(load(users, prompt)))
    files = sorted(map(str, tmp_path.glob("*.json")))
    assert calibrate.main(["--name", "served", "--results", *files, *NAMED]) == 0
    shown = capsys.readouterr().out
    assert "held back" in shown
    assert "T_D" not in shown
    found, truth = setup(32, 3000, Efficiency(**written("served"))), setup(32, 3000)
    assert found.target_time.total == pytest.approx(truth.target_time.total, rel=0.02)
    first_s = prefill_s(truth, truth.target, 1, 3000)
    assert prefill_s(found, found.target, 1, 3000) == pytest.approx(first_s, rel=0.05)


def test_every_tool_gives_points():
    files = [LOADS / f"{name}.json" for name in ("vllm_bench", "aiperf", "guidellm")]
    found = of_results(files, NAMED)
    assert found.is_served
    assert [(row.context_len, row.batch_size) for row in found.rows] == [(545, 3), (72, 1), (72, 1)]
    vllm = found.rows[0]
    assert (vllm.autoregressive_ms, vllm.prompt_len, vllm.prefill_ms) == (
        pytest.approx(21.603, rel=1e-4),
        513,
        None,
    )
    assert vllm.prefills == pytest.approx(1.96146 * 0.0216030 * 3 / 4, rel=1e-4)
    assert (found.values["name"], vllm.element_bytes) == ("h200", 2)


def run(folder, lines, *keys):
    """A finished run with this configuration and this history."""
    folder.mkdir()
    config = to_dict(compose([*NAMED, *keys]))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text('{"status": "done"}')


def profile_run(folder, grid):
    """A folder as scenario=profile leaves it, with the times that the cost model itself
    predicts.
    """
    lines = []
    for batch, context, gamma in grid:
        times = round_times(setup(batch, context), gamma)
        point = {"batch_size": batch, "context_len": context, "gamma": gamma}
        for name, time in (
            ("target_decode", times.target),
            ("draft", times.draft),
            ("verify", times.verify),
        ):
            point[f"time/{name}_ms"] = 1e3 * time.total
        lines.append(point | {"time/round_ms": 1e3 * times.round_s})
    run(folder, lines, "scenario=profile", "cache.budget=512")


def test_a_machine_is_found_from_a_profile(tmp_path, capsys):
    profile_run(tmp_path / "run", [(b, s, 3) for b in (4, 32) for s in (4000, 32_000)])
    assert calibrate.main(["--results", "run/result.json", "--name", "mine"]) == 0
    assert "held back" in capsys.readouterr().out
    assert written("mine")["bandwidth_fraction"] == pytest.approx(
        TRUTH["bandwidth_fraction"], rel=0.05
    )
    at = [
        "scenario=predict",
        "target=llama-3.1-8b",
        "batch.size=16",
        "batch.context_len=16000",
        "cache.budget=512",
    ]
    found = setup_of(resolve(compose([*at, "hardware=mine"])))
    assert found.hardware.note == "calibrated by its configuration"
    assert found.target_time.total == pytest.approx(setup(16, 16_000).target_time.total, rel=0.05)


def test_a_profile_of_another_target_than_is_named(tmp_path):
    """The machine is named with a target, which need not be the run's."""
    profile_run(tmp_path / "run", [(4, 4000, 3)])
    found = of_results([tmp_path / "run"], ["hardware=h200"])
    assert {"llama-3.1-8b", "tiny"} <= found.models.keys()


def served_run(folder, *keys):
    """A folder as scenario=serve leaves it, on our engine."""
    names = {"tokens_per_second": "output_throughput", "requests_per_second": "request_throughput"}
    names |= {"time_per_output_token_ms": "mean_tpot_ms", "time_to_first_token_ms": "mean_ttft_ms"}
    lines = [{"rate": 2.0, "speculative/tokens_per_second": 3.0}]
    for users in (1, 8):
        one = load(users, 2000)
        lines.append(
            {"concurrency": users}
            | {f"autoregressive/{key}": one[name] for key, name in names.items()}
        )
    sizes = ("batch.context_len=2000", f"batch.generate_len={OUTPUT}")
    run(folder, lines, "scenario=serve", "draft=none", *sizes, *keys)


def test_the_draft_of_a_run_under_load_is_in_no_row(tmp_path):
    """A head, whose architecture has keys of its own."""
    head = ["draft=eagle3", "draft.model.path=magicdec/models/tiny/eagle3"]
    served_run(tmp_path / "head", *head)
    assert [*of_results([tmp_path / "head"], []).models] == ["llama-3.1-8b"]


def test_a_target_of_transformers_modules_is_described_again():
    config = resolve(compose(["scenario=predict", "target=qwen3-30b-a3b"])).target.config
    assert isinstance(config, ModulesConfig)
    again = _architecture({"name": "qwen3-30b-a3b", "architecture": asdict(config)})
    assert replace(again, eos_token_ids=()) == config


def test_a_run_under_load_gives_its_levels_without_speculation(tmp_path):
    served_run(tmp_path / "run")
    found = of_results([tmp_path / "run"], [])
    levels = [(row.batch_size, row.context_len, row.prefill_ms is None) for row in found.rows]
    assert levels == [(1, 2128, False), (8, 2128, True)]
    served_run(tmp_path / "other", "engine=openai")
    with pytest.raises(UserError, match="other: name the server's machine, as in target=llama"):
        of_results([tmp_path / "other"], [])
    assert len(of_results([tmp_path / "run", tmp_path / "other"], NAMED).rows) == 4
    served_run(tmp_path / "third", "hardware=h100")
    with pytest.raises(UserError, match=r"of several machines \(h200, h100\)"):
        of_results([tmp_path / "run", tmp_path / "third"], [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec_decode_acceptance_length": 2.0}, "the server has speculated"),
        ({"max_concurrency": None}, "bounds neither concurrency nor rate"),
        ({"mean_tpot_ms": None}, "has no time per output token; measure with streaming"),
    ],
)
def test_levels_that_say_nothing_about_a_step_are_refused(tmp_path, changes, said):
    content = json.loads((LOADS / "vllm_bench.json").read_text()) | changes
    (tmp_path / "load.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"load.json: .*{said}"):
        of_results([tmp_path / "load.json"], NAMED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--results", "nowhere"], "nowhere: cannot be read: No such file"),
        (["--results", "."], "not a finished run of scenario=profile or scenario=serve"),
        (
            ["--results", str(ROOT / "pyproject.toml"), *NAMED],
            "JSON of vllm bench serve --save-result, AIPerf's",
        ),
        (
            ["--results", str(LOADS / "aiperf.json")],
            "say what AIPerf has measured, as in target=llama-3.1-8b",
        ),
        (["--results", str(LOADS / "aiperf.json"), "target=tiny"], "hardware.bandwidth_gbs=null"),
        (["--results", "target=tiny"], "--results target=tiny: name a file"),
        (["--results", "a.json", "--url", "http://127.0.0.1/v1"], "--results has measured already"),
        (["--name", "../mine"], "must be the name of a file"),
        (["--name", "h100"], "--name h100: hardware=h100 is an option already ("),
        (["--name", "taken"], "is there already; choose another name"),
        (["target=tinny"], "target"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    (tmp_path / "conf" / "hardware" / "taken.yaml").write_text("name: cpu\n")
    assert calibrate.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
