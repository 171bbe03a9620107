"""The command line: exit codes, one line per mistake, nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from magicdec import __version__, cli
from magicdec.config.explain import explain
from magicdec.config.load import compose as compose_config
from magicdec.config.load import load, override
from magicdec.errors import UserError
from magicdec.tracking.sweep import INTERRUPTED

ROOT = Path(__file__).parents[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, monkeypatch, capsys, hydra_logging):
    """The command line in this process, with a function in place of the scenario."""

    def with_arguments(*arguments, scenario=lambda config, job: {}):
        monkeypatch.setattr("magicdec.scenarios.run", scenario)
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        code = cli.main()
        return code, capsys.readouterr().err

    return with_arguments


def in_subprocess(*arguments, **env):
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["target=llama-3.1-8"], r"target=llama-3.1-8: no such option; one of: .*; did you mean llama-3.1-8b\?"),
        (["batch=null"], r"batch=null: no such option; one of: default"),
        (["draft=model", "target@draft.model=llama"], r"target@draft.model=llama: no such option; one of: .*"),
        (["experiment=table3c"], r"experiment=table3c: .*, quick, paper/figure1b, .*; did you mean paper/table3c\?"),
        (["experiment=paper/tabel2"], r"experiment=paper/tabel2: .*, quick, paper/.*; did you mean paper/table2\?"),
        (["hydra/sweeper=nope"], r"hydra/sweeper=nope: no such option; one of: basic.*"),
        (["target@draft.model=tiny"], r"target@draft.model: this draft has no model of its own; use draft=model"),
        (["targe=tiny"], r"unknown key targe; did you mean target\?"),
        (["batch.sise=1"], r"unknown key batch.sise; did you mean batch.size\?"),
        (["gamma=2"], r"unknown key gamma; did you mean draft.gamma\?"),
        (["batch.n=1"], r"unknown key batch.n; batch has: size, context_len, .*"),
        (["engine=transformers", "engine.cache=static"], r"unknown key engine.cache; did you mean engine.kv_cache\?"),
        (["attention.name=cpp"], r"unknown key attention.name; attention has no keys: write attention=VALUE"),
        (["+foo=1"], r"unknown key foo; there are: target, draft, .*"),
        (["+draft.gamma=1"], r"draft.gamma is there already: leave out the \+"),
        (["sweeps=gamma_x_budget"], r"sweeps=gamma_x_budget: write -m \+sweeps=gamma_x_budget"),
        (["batch.context_len=long"], r"batch.context_len=long: must be a whole number"),
        (["batch.size=1.5"], r"batch.size=1.5: must be auto or at least 1"),
        (["data.save_prompts=maybe"], r"data.save_prompts=maybe: must be true or false"),
        (["wandb.tags=a"], r"wandb.tags=a: must be a list, as in \[a,b\]"),
        (["runs_dir=null"], r"runs_dir=null: must have a value"),
        (["runs_dir=???"], r"runs_dir is missing a value"),
        (["draft=model", "draft.model=tiny"], r"draft.model=tiny: cannot be set as a whole, only its keys can"),
        (["target"], r"target: not of the form key=value; .*"),
        (["draft.gamma=1,2"], r"draft.gamma=1,2: several values need -m; .*"),
    ],
)
def test_what_hydra_and_omegaconf_find_is_explained(monkeypatch, overrides, error):
    with initialize_config_dir(str(cli.CONF), version_base="1.3"), pytest.raises(Exception) as raised:
        load(compose("config", overrides))
    assert re.fullmatch(error, explain(raised.value, overrides))


def test_what_only_an_extra_brings_names_the_extra():
    missing = MissingConfigException("", "hydra/sweeper/optuna", ["basic"])
    expected = "hydra/sweeper=optuna: needs pip install 'magicdec[optuna]'"
    assert explain(missing, ["hydra/sweeper=optuna"]) == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["draft.gamma=256"], "error: draft.gamma=256: must be below cache.budget=256"),
        (["--experimental-rerun", "x"], "error: --experimental-rerun=x: would load a pickle"),
        (["--target=tiny"], "error: unrecognized arguments: --target=tiny; keys are set without dashes: key=value"),
        (
            ["+sweeps=gamma_x_budget"],
            "error: +sweeps=gamma_x_budget: a grid needs -m, as in magicdec -m +sweeps",
        ),
        (["-m", "target=tiny,tini"], "error: target=tini: no such option; one of: "),
        (
            ["-m", "draft.gamma=range(1,1000000000)"],
            "error: -m: a grid of draft.gamma: 10,001 values has more than",
        ),
        (
            ["-m", "draft.gamma=shuffle(range(1,1000000000))"],
            "error: -m: a grid of draft.gamma: 10,001 values has more than",
        ),
        (["-m", "draft.gamma=range(0.0,1.0,1e-300)"], "error: -m: a grid of draft.gamma: 10,001 values has more than"),
        (
            ["-m", "+sweeps=gamma_x_budget", "data.seed=range(0,5000)"],
            "error: -m: a grid of draft.gamma: 4, cache.budget: 3, data.seed: 5,000 values has more than 10,000 jobs",
        ),
        (["target.architecture.rope_scaling=" + "{a:" * 400 + "1" + "}" * 400], "error: target.archi"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, here, arguments, error):
    code, err = run(*arguments)
    assert code == cli.USER_ERROR
    assert err.startswith(error)
    assert err.count("\n") == 1
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("context_len: long", "batch/mine.yaml: batch.context_len=long: must be a whole number"),
        ("size: [1\n", "mine.yaml, line 2: expected ',' or ']'"),
        ("size: &a [*a]\n", "batch/mine.yaml: its aliases are endless"),
        ("a: &a [*b]\nb: &b [*a]\n", "mine.yaml, line 1: found undefined alias"),
        (f"a: &a {[0] * 60}\nb: &b {['*a'] * 60}\nc: {['*b'] * 60}\n".replace("'", ""), "more than 100,000 values"),
        (f"size: {'[' * 600}{']' * 600}\n", "batch/mine.yaml: nested too deeply"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(600)), "batch/mine.yaml: nested too deeply"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(run, here, text, error):
    (here / "conf" / "batch").mkdir(parents=True)
    (here / "conf" / "batch" / "mine.yaml").write_text(text)
    code, err = run("--config-dir", "conf", "batch=mine")
    assert (code, err.count("\n")) == (cli.USER_ERROR, 1)
    assert error in err


def test_a_run_gets_a_typed_configuration_and_hydra_leaves_no_files(run, here):
    got = []
    assert run("draft.gamma=2", scenario=lambda config, job: got.append(config) or {}) == (0, "")
    assert got[0].draft.gamma == 2
    assert not list(here.iterdir())


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flags_stand_anywhere(run, place):
    typed = ["hydra/launcher=basic", "draft.gamma=1,2"]
    typed[place:place] = ["--config-dir", "conf", "-m"]
    Path("conf").mkdir()
    got = []
    assert run(*typed, scenario=lambda config, job: got.append(config.draft.gamma) or {}) == (0, "")
    assert got == [1, 2]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_failure_shows_its_traceback(run, kind):
    def crash(config, job):
        raise kind("the disk is on fire")

    code, err = run(scenario=crash)
    assert code == cli.FAILURE
    assert err.startswith("Traceback")
    assert err.endswith(f"{kind.__name__}: the disk is on fire\n")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        (
            "experiment/a",
            "# @package _global_\ndefaults:\n  - /cache: quest\n",
            "write `override /cache: quest` in its",
        ),
        (
            "experiment/b",
            "batch:\n  size: 2\n",
            "experiment/b.yaml: must begin with the line `# @package",
        ),
        (
            "experiment/c",
            "# @package _global_\ndefaults:\n  - override /attention: cpp\n",
            "experiment/c.yaml: attention is a key and no group: write attention: VALUE below the defaults",
        ),
        ("experiment/d", "# @package _global_\nattention:\n  name: cpp\n", "attention={'name': 'cpp'}: must be one of"),
        ("cache/mine", "budget: 64\n", "cache.policy is missing a value; cache/mine.yaml must set it"),
    ],
)
def test_a_mistake_in_a_users_own_option(run, here, file, text, error):
    path = here / "conf" / f"{file}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    code, err = run("--config-dir", "conf", file.replace("/", "="))
    assert (code, err.count("\n")) == (cli.USER_ERROR, 1)
    assert error in err


def test_the_version_is_our_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch.py", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out == f"magicdec {__version__}\n"


def test_a_config_path_is_relative_to_the_working_directory(run, here):
    (here / "mine").mkdir()
    (here / "mine" / "config.yaml").write_text("defaults: [schema, _self_]\nbatch: {sizes: 3}\n")
    code, err = run("--config-path", "mine")
    assert code == cli.USER_ERROR
    assert "unknown key batch.sizes; did you mean batch.size?" in err


def test_an_experiment_that_is_a_grid_says_so(run):
    code, err = run("experiment=paper/table3c")
    assert code == 0
    assert re.fullmatch(r"warning: experiment=paper/table3c is a grid over .+: -m runs all of it\n", err)


def test_a_mistake_found_in_the_run_is_one_line(run):
    def refuse(config, job):
        raise UserError("target.path=x holds\nno weights")

    assert run(scenario=refuse) == (cli.USER_ERROR, "error: target.path=x holds no weights\n")


def test_a_working_directory_that_was_removed_is_one_line(run, here):
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    assert run() == (cli.USER_ERROR, "error: the working directory was removed; change to one that exists\n")


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("libtorch_cpu.so: failed to map segment from shared object")]
)
def test_too_little_memory_for_the_libraries_is_one_line(run, error):
    def fail(config, job):
        raise error

    code, err = run(scenario=fail)
    assert (code, err.count("\n")) == (cli.USER_ERROR, 1)
    assert err.startswith(f"error: out of memory ({type(error).__name__}")


SECRET = "hf_0123456789abcdef"


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["data.path=${oc.env:HF_TOKEN}"], "data.path"),
        (["wandb.tags=[a,'x-${oc.env:HF_TOKEN}']"], "wandb.tags"),
        ([f"data.path={SECRET}"], "data.path"),
        ([f"data.path={SECRET}", "data.path=null"], "data.path"),
        (["-m", "draft.gamma=1,2", f"wandb.project={SECRET}"], "wandb.project"),
        (["batch=mine"], "data.path"),
    ],
)
def test_a_secret_of_the_environment_is_stored_nowhere(run, here, monkeypatch, typed, key):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (here / "conf" / "batch").mkdir(parents=True)
    (here / "conf" / "batch" / "mine.yaml").write_text("# @package _global_\ndata: {path: '${oc.env:HF_TOKEN}'}\n")
    before = sorted(here.rglob("*"))
    code, err = run(*typed, scenario=lambda config, job: pytest.fail("it runs"))
    assert (code, err) == (cli.USER_ERROR, f"error: {key} holds the value of HF_TOKEN, and is stored: leave it out\n")
    assert sorted(here.rglob("*")) == before


def test_what_is_typed_is_stored_as_it_was_typed(run, monkeypatch):
    monkeypatch.setenv("MINE", "/data/books")
    got = []
    typed = "wandb.entity=${oc.env:MINE}"
    assert run(typed, scenario=lambda config, job: got.append((config, job)) or {}) == (0, "")
    assert (got[0][0].wandb.entity, got[0][1].overrides) == ("/data/books", (typed,))
    assert run("data.path=${nope:1}") == (cli.USER_ERROR, "error: data.path: Unsupported interpolation type nope\n")


@pytest.mark.parametrize("name", ["a/../../../x", "..", "a\\b", " a", "a\tb", "x" * 300])
@pytest.mark.parametrize("key", ["sweep.name", "scenario.save_as"])
def test_a_name_does_not_lead_out_of_its_folder(run, here, key, name):
    scenario = ["scenario=plan", "hardware=a100"] if key == "scenario.save_as" else ["-m", "draft.gamma=1,2"]
    code, err = run(*scenario, override(key, name), "runs_dir=a/b/runs")
    assert (code, err.count("\n")) == (cli.USER_ERROR, 1)
    assert re.match(rf"error: {key}=.*: must be the name of a file", err)
    assert not any(here.iterdir())


def test_an_interrupt_ends_it(run):
    def interrupt(config, job):
        raise KeyboardInterrupt

    assert run(scenario=interrupt) == (INTERRUPTED, "interrupted\n")


def test_a_failing_job_does_not_stop_a_sweep(run, here):
    ran = []

    def scenario(config, job):
        ran.append((config.draft.gamma, config.cache.budget))
        if config.draft.gamma == 2:
            raise UserError("draft.gamma=2 is unlucky")
        return {}

    narrowed = ["draft.gamma=2,64,4", "cache.budget=64"]
    code, err = run(
        "-m", "hydra/launcher=basic", "+sweeps=gamma_x_budget", *narrowed, "runs_dir=results", scenario=scenario
    )
    assert code == cli.USER_ERROR
    assert ran == [(2, 64), (4, 64)]
    first, second, hydras = err.splitlines()
    assert hydras.startswith("Error executing job with overrides: ")
    assert re.fullmatch(r"error: job 0 \(draft.gamma=2 .*\): draft.gamma=2 is unlucky", first)
    assert re.fullmatch(r"error: job 1 \(draft.gamma=64 .*\): draft.gamma=64: must be below cache.budget=64", second)
    (sweep,) = (here / "results" / "sweeps").glob("*_gamma_x_budget")
    assert sorted(path.name for path in sweep.iterdir()) == ["jobs.jsonl", "multirun.yaml"]
    assert [path.name for path in here.iterdir()] == ["results"]


def test_help_names_every_group_and_loads_no_torch(here):
    result = in_subprocess("--help", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    groups = [
        folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir() and folder.name not in ("hydra", "local")
    ]
    for group in groups:
        assert f"\n  {group} " in result.stdout, "a sentence"
        assert f"\n{group}: " in result.stdout, "its options"
    assert "| torch" not in result.stderr


def test_a_reader_that_stops_reading_is_no_error(here):
    command = f"{sys.executable} {ROOT / 'launch.py'} --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=here)
    assert done.stdout.startswith("Speculative decoding")
    assert done.stderr == ""


def test_exit_codes_reach_the_shell(here):
    shown = in_subprocess("--cfg", "job", "draft=model", "target@draft.model=llama-3.2-1b", "draft.model.path=x")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "name: llama-3.2-1b\n    path: x" in shown.stdout
    refused = in_subprocess("cache.budget=1")
    assert refused.returncode == cli.USER_ERROR
    assert refused.stderr.startswith("error: cache.budget=1: must be above cache.num_sink=4")
    assert not list(here.iterdir())


def test_tab_completion(here):
    installed = in_subprocess("-sc", "install=bash")
    assert (installed.returncode, installed.stderr) == (0, "")
    assert "complete" in installed.stdout
    for line in ("launch.py target=ti", "launch.py serve target=ti"):
        asked = in_subprocess("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
        assert asked.stdout.split() == ["target=tiny", "target=tiny-draft", "target=tinyllama-1.1b"]


WITHOUT_POSIX = """
import sys
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios"])  # as on Windows: importing one fails
import multiprocessing.context
del multiprocessing.context.ForkServerContext
from magicdec.cli import main
sys.exit(main())
"""


def test_help_needs_no_module_of_posix():
    command = [sys.executable, "-c", WITHOUT_POSIX, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\ntarget: " in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reprot", "runs"], "error: reprot: neither a command (report, "),
        (["compare", "no-run", "no-run"], "error: no-run"),
        (["report", "no-folder"], "error: no-folder"),
    ],
)
def test_subcommands(run, arguments, said):
    code, err = run(*arguments)
    assert (code, err.count("\n")) == (cli.USER_ERROR, 1)
    assert err.startswith(said)


def test_every_subcommand_shows_its_own_usage(monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    for command in cli.COMMANDS:
        monkeypatch.setattr(sys, "argv", ["magicdec", command, "--help"])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out.startswith(f"usage: magicdec {command} ")


def test_options_of_the_users_own_folder(run, here):
    (here / "conf" / "cache").mkdir(parents=True)
    (here / "conf" / "cache" / "mine.yaml").write_text("defaults: [streaming]\nbudget: 77\n")
    got = []
    assert run("cache=mine", scenario=lambda config, job: got.append(config) or {}) == (0, "")
    assert (got[0].cache.policy, got[0].cache.budget) == ("streaming", 77)
    assert compose_config(["cache=mine"]).cache.budget == 77


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--help"], 0, "cache: "), (["cache.bugdet=3"], 2, "unknown key cache.bugdet; did you mean cache.budget?")],
)
def test_help_and_unknown_keys_do_not_wait_for_pytorch(tmp_path, arguments, code, words):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not needed here')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = in_subprocess(*arguments, PYTHONPATH=path)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
