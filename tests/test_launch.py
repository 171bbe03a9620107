"""The command line: exit codes, one line per mistake, nothing left behind."""

import os
import re
import subprocess
import sys

import pytest
from hydra.errors import MissingConfigException

from magicdec import __version__, cli
from magicdec.config.explain import explain
from magicdec.config.load import compose, override
from magicdec.errors import UserError
from magicdec.tracking.sweep import INTERRUPTED
from tests.inputs.test_plugins import written
from tests.programs import ROOT


@pytest.fixture
def ran():
    """Collect the configurations and jobs that were run."""
    return []


@pytest.fixture
def run(here, ran, monkeypatch, capsys, hydra_logging):
    """The command line in this process, with a function in place of the scenario. Returns exit code
    and stderr.
    """

    def with_arguments(*arguments, scenario=lambda config, job: {}):
        monkeypatch.setattr(
            "magicdec.scenarios.run", lambda *run: ran.append(run) or scenario(*run)
        )
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        return cli.main(), capsys.readouterr().err

    return with_arguments


@pytest.fixture
def refuse(run, ran, here):
    """The one line of an error that ends a command before it leaves anything or runs."""

    def refused(*arguments):
        before = sorted(here.rglob("*"))
        code, err = run(*arguments)
        assert (code, err.count("\n"), ran) == (cli.USER_ERROR, 1, [])
        assert sorted(here.rglob("*")) == before
        return err.removesuffix("\n")

    return refused


def in_subprocess(*arguments, program=(str(ROOT / "launch.py"),), **env):
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["target=llama-3.1-8"],
            r"target=llama-3.1-8: no such option; one of: .*; did you mean llama-3.1-8b\?",
        ),
        (["batch=null"], r"batch=null: no such option; one of: default"),
        (
            ["draft=model", "target@draft.model=llama"],
            r"target@draft.model=llama: no such option; one of: .*",
        ),
        (
            ["experiment=table3c"],
            r"experiment=table3c: .*, quick, paper/figure1b, .*; did you mean paper/table3c\?",
        ),
        (
            ["experiment=paper/tabel2"],
            r"experiment=paper/tabel2: .*, quick, paper/.*; did you mean paper/table2\?",
        ),
        (["hydra/sweeper=nope"], r"hydra/sweeper=nope: no such option; one of: basic.*"),
        (
            ["target@draft.model=tiny"],
            r"target@draft.model: this draft has no model of its own; use draft=model",
        ),
        (["targe=tiny"], r"unknown key targe; did you mean target\?"),
        (["batch.sise=1"], r"unknown key batch.sise; did you mean batch.size\?"),
        (["gamma=2"], r"unknown key gamma; did you mean draft.gamma\?"),
        (["batch.n=1"], r"unknown key batch.n; batch has: size, context_len, .*"),
        (
            ["engine=transformers", "engine.cache=static"],
            r"unknown key engine.cache; did you mean engine.kv_cache\?",
        ),
        (
            ["attention.name=cpp"],
            r"unknown key attention.name; attention has no keys: write attention=VALUE",
        ),
        (["+foo=1"], r"unknown key foo; there are: target, draft, .*"),
        (["+draft.gamma=1"], r"draft.gamma is there already: leave out the \+"),
        (["sweeps=gamma_x_budget"], r"sweeps=gamma_x_budget: write -m \+sweeps=gamma_x_budget"),
        (["batch.context_len=long"], r"batch.context_len=long: must be a whole number"),
        (
            ["batch.size=1.5"],
            r"batch.size=1.5: must be auto or a whole number from 1 to 2,147,483,647",
        ),
        (["data.save_prompts=maybe"], r"data.save_prompts=maybe: must be true or false"),
        (["wandb.tags=a"], r"wandb.tags=a: must be a list, as in \[a,b\]"),
        (["runs_dir=null"], r"runs_dir=null: must have a value"),
        (["runs_dir=???"], r"runs_dir is missing a value"),
        (
            ["draft=model", "draft.model=tiny"],
            r"draft.model=tiny: cannot be set as a whole, only its keys can",
        ),
        (["target"], r"target: not of the form key=value; .*"),
        (["draft.gamma=1,2"], r"draft.gamma=1,2: several values need -m; .*"),
    ],
)
def test_what_hydra_and_omegaconf_find_is_explained(overrides, error):
    with pytest.raises(UserError, match=rf"^{error}\Z"):
        compose(overrides)


def test_what_only_an_extra_brings_names_the_extra():
    missing = MissingConfigException("", "hydra/sweeper/optuna", ["basic"])
    expected = "hydra/sweeper=optuna: needs pip install 'magicdec[optuna]'"
    assert explain(missing, ["hydra/sweeper=optuna"]) == expected


GLOBAL = "# @package _global_\n"
MANY = "a grid of draft.gamma: 10,001 values has more than 10,000 jobs"
NESTED = "{a:" * 400 + "1" + "}" * 400


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("draft.gamma=256", "draft.gamma=256: must be below cache.budget=256"),
        ("--experimental-rerun x", "--experimental-rerun=x: would load a pickle"),
        (
            "--target=tiny",
            "unrecognized arguments: --target=tiny; keys are set without dashes: key=value",
        ),
        (
            "+sweeps=gamma_x_budget",
            "+sweeps=gamma_x_budget: a grid needs -m, as in magicdec -m +sweeps",
        ),
        ("-m target=tiny,tini", "target=tini: no such option; one of: "),
        ("-m draft.gamma=range(1,1000000000)", f"-m: {MANY}"),
        ("-m draft.gamma=shuffle(range(1,1000000000))", f"-m: {MANY}"),
        ("-m draft.gamma=range(0.0,1.0,1e-300)", f"-m: {MANY}"),
        (
            "-m +sweeps=gamma_x_budget data.seed=range(0,5000)",
            (
                "-m: a grid of draft.gamma: 4, cache.budget: 3, data.seed: 5,000 values has more"
                " than 10,000 jobs"
            ),
        ),
        (f"target.architecture.rope_scaling={NESTED}", "target.archi"),
        ("reprot runs", "reprot: neither a command (audit, "),
        ("compare no-run no-run", "no-run"),
        ("report no-folder", "no-folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(refuse, typed, error):
    assert refuse(*typed.split()).startswith(f"error: {error}")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        (
            "batch/mine",
            "context_len: long",
            "batch/mine.yaml: batch.context_len=long: must be a whole number",
        ),
        ("batch/mine", "size: [1\n", "expected ',' or ']'"),
        # In other words by OmegaConf 2.4.
        ("batch/mine", "size: &a [*a]\n", "/conf/batch/mine.yaml"),
        ("batch/mine", "a: &a [*b]\nb: &b [*a]\n", "mine.yaml, line 1: found undefined alias"),
        ("batch/mine", f"size: {'[' * 600}{']' * 600}\n", "batch/mine.yaml: nested too deeply"),
        (
            "batch/mine",
            "".join(f"{' ' * depth}a:\n" for depth in range(600)),
            "batch/mine.yaml: nested too deeply",
        ),
        (
            "cache/mine",
            "budget: 64\n",
            "cache.policy is missing a value; cache/mine.yaml must set it",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults:\n  - /cache: quest\n",
            "write `override /cache: quest` in its",
        ),
        (
            "experiment/b",
            "batch:\n  size: 2\n",
            "experiment/b.yaml: must begin with the line `# @package",
        ),
        (
            *("experiment/c", f"{GLOBAL}defaults:\n  - override /attention: cpp\n"),
            (
                "experiment/c.yaml: attention is a key and no group: write attention: VALUE below"
                " the defaults"
            ),
        ),
        (
            "experiment/d",
            f"{GLOBAL}attention:\n  name: cpp\n",
            "attention={'name': 'cpp'}: must be one of",
        ),
    ],
)
def test_a_mistake_in_a_users_own_file_names_the_file(refuse, here, file, text, error):
    written(here, {f"conf/{file}.yaml": text})
    assert error in refuse("--config-dir", "conf", file.replace("/", "="))


def test_a_run_gets_a_typed_configuration_and_hydra_leaves_no_files(run, ran, here):
    assert run("draft.gamma=2") == (0, "")
    assert [config.draft.gamma for config, _ in ran] == [2]
    assert not list(here.iterdir())


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flags_stand_anywhere(run, ran, here, place):
    typed = ["hydra/launcher=basic", "draft.gamma=1,2"]
    typed[place:place] = ["--config-dir", "conf", "-m"]
    (here / "conf").mkdir()
    assert run(*typed) == (0, "")
    assert [config.draft.gamma for config, _ in ran] == [1, 2]


def test_the_version_is_our_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch.py", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out == f"magicdec {__version__}\n"


def test_a_config_path_is_relative_to_the_working_directory(run, here):
    written(here, {"mine/config.yaml": "defaults: [magicdec_schema, _self_]\nbatch: {sizes: 3}\n"})
    code, err = run("--config-path", "mine")
    assert code == cli.USER_ERROR
    assert "unknown key batch.sizes; did you mean batch.size?" in err


def test_an_experiment_that_is_a_grid_says_so(run):
    code, err = run("experiment=paper/table3c")
    assert code == 0
    assert re.fullmatch(
        r"warning: experiment=paper/table3c is a grid over .+: -m runs all of it\n", err
    )


LIBRARY = "libtorch_cpu.so: failed to map segment from shared object"


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (
            RuntimeError("the disk is on fire"),
            cli.FAILURE,
            r"Traceback(?s:.*)RuntimeError: the disk is on fire",
        ),
        (
            ValueError("the disk is on fire"),
            cli.FAILURE,
            r"Traceback(?s:.*)ValueError: the disk is on fire",
        ),
        (
            UserError("target.path=x holds\nno weights"),
            cli.USER_ERROR,
            "error: target.path=x holds no weights",
        ),
        (MemoryError(), cli.USER_ERROR, r"error: out of memory \(MemoryError.*"),
        (ImportError(LIBRARY), cli.USER_ERROR, r"error: out of memory \(ImportError.*"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)
def test_only_a_defect_shows_its_traceback(run, failure, code, said):
    def fail(config, job):
        raise failure

    got, err = run(scenario=fail)
    assert got == code
    assert re.fullmatch(f"{said}\n", err)


def test_an_interrupted_subcommand_is_one_line(run, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("magicdec.commands.report.main", interrupted)
    assert run("report", "runs") == (INTERRUPTED, "interrupted\n")


def test_a_working_directory_that_was_removed_is_one_line(run, here):
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    assert run() == (
        cli.USER_ERROR,
        "error: the working directory was removed; change to one that exists\n",
    )


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
def test_a_secret_of_the_environment_is_stored_nowhere(refuse, here, monkeypatch, typed, key):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    written(here, {"conf/batch/mine.yaml": f"{GLOBAL}data: {{path: '${{oc.env:HF_TOKEN}}'}}\n"})
    assert (
        refuse(*typed) == f"error: {key} holds the value of HF_TOKEN, and is stored: leave it out"
    )


@pytest.mark.parametrize(
    "typed",
    [
        ["-m", "engine=openai", "engine.url=http://me:secret@host/v1", "batch.size=1,2"],
        ["-m", "engine=openai", "engine.url=http://me:se/cret@host/v1", "batch.size=1,2"],
        ["-m", "batch=mine", "draft.gamma=1,2"],
    ],
)
def test_a_password_in_an_address_is_stored_nowhere(refuse, here, typed):
    address = f"{GLOBAL}engine: {{url: 'http://me:secret@host/v1'}}\n"
    written(here, {"conf/batch/mine.yaml": address})
    why = "a name or password in the address would be stored; use engine.key_variable"
    assert refuse(*typed) == f"error: engine.url: {why}"


def test_what_is_typed_is_stored_as_it_was_typed(run, ran, monkeypatch):
    monkeypatch.setenv("MINE", "/data/books")
    typed = "wandb.entity=${oc.env:MINE}"
    assert run(typed) == (0, "")
    assert [(config.wandb.entity, job.overrides) for config, job in ran] == [
        ("/data/books", (typed,))
    ]
    assert run("data.path=${nope:1}") == (
        cli.USER_ERROR,
        "error: data.path: Unsupported interpolation type nope\n",
    )


@pytest.mark.parametrize(
    "text",
    ["/home/jürgen/llama", "'quoted'", "it's", "a, b", "", "123", "1e5", ".5", "NULL", "nan"],
)
def test_a_text_of_a_program_arrives_as_it_is(text):
    assert compose([override("wandb.entity", text)]).wandb.entity == text
    assert override("target.path", "org/name-1.0") == "target.path=org/name-1.0"


@pytest.mark.parametrize("name", ["a/../../../x", "..", "a\\b", " a", "a\tb", "x" * 300])
@pytest.mark.parametrize("key", ["sweep.name", "scenario.save_as"])
def test_a_name_does_not_lead_out_of_its_folder(refuse, key, name):
    scenario = (
        ["scenario=plan", "hardware=a100"]
        if key == "scenario.save_as"
        else ["-m", "draft.gamma=1,2"]
    )
    err = refuse(*scenario, override(key, name), "runs_dir=a/b/runs")
    assert re.match(rf"error: {key}=.*: must be the name of a file", err)


def test_a_failing_job_does_not_stop_a_sweep(run, ran, here):
    def scenario(config, job):
        if config.draft.gamma == 2:
            raise UserError("draft.gamma=2 is unlucky")
        return {}

    narrowed = [
        "+sweeps=gamma_x_budget",
        "draft.gamma=2,64,4",
        "cache.budget=64",
        "runs_dir=results",
    ]
    code, err = run("-m", "hydra/launcher=basic", *narrowed, scenario=scenario)
    assert code == cli.USER_ERROR
    assert [(config.draft.gamma, config.cache.budget) for config, _ in ran] == [(2, 64), (4, 64)]
    first, second, hydras = err.splitlines()
    assert hydras.startswith("Error executing job with overrides: ")
    assert re.fullmatch(r"error: job 0 \(draft.gamma=2 .*\): draft.gamma=2 is unlucky", first)
    assert re.fullmatch(
        r"error: job 1 \(draft.gamma=64 .*\): draft.gamma=64: must be below cache.budget=64", second
    )
    (sweep,) = (here / "results" / "sweeps").glob("*_gamma_x_budget")
    assert sorted(path.name for path in sweep.iterdir()) == ["jobs.jsonl", "multirun.yaml"]
    assert [path.name for path in here.iterdir()] == ["results"]


@pytest.fixture
def without_torch(tmp_path):
    """Settings of a process that fails where it imports PyTorch."""
    written(tmp_path, {"torch/__init__.py": "1 / 0"})
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


WITHOUT_POSIX = """
import sys
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios"])  # as on Windows: importing one fails
import multiprocessing.context
del multiprocessing.context.ForkServerContext
from magicdec.cli import main
sys.exit(main())
"""  # noqa: E501


def test_help_names_every_group_and_needs_neither_pytorch_nor_modules_of_posix(without_torch):
    result = in_subprocess("--help", program=("-c", WITHOUT_POSIX), **without_torch)
    assert (result.returncode, result.stderr) == (0, "")
    for group in {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()} - {
        "hydra",
        "local",
    }:
        assert f"\n  {group} " in result.stdout, "a sentence"
        assert f"\n{group}: " in result.stdout, "its options"


def test_modules_in_the_working_directory_replace_none_of_pythons(here):
    written(here, {"random.py": "1 / 0", "tempfile.py": "1 / 0"})
    shown = in_subprocess("--version", program=("-m", "magicdec"), PYTHONPATH=str(ROOT))
    assert (shown.returncode, shown.stderr) == (0, "")


def test_help_names_every_command():
    text = (ROOT / "conf" / "hydra" / "help" / "magicdec.yaml").read_text()
    assert [command for command in cli.COMMANDS if f"magicdec {command} " not in text] == []


def test_a_mistyped_command_is_guessed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["magicdec", "reprot"])
    assert cli.main() == cli.USER_ERROR
    assert capsys.readouterr().err.endswith(" nor key=value; did you mean report?\n")


def test_a_reader_that_stops_reading_is_no_error(here):
    command = f"{sys.executable} {ROOT / 'launch.py'} --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=here)
    assert done.stdout.startswith("Speculative decoding")
    assert done.stderr == ""


def test_exit_codes_reach_the_shell_and_a_mistake_does_not_wait_for_pytorch(here, without_torch):
    shown = in_subprocess(
        "--cfg", "job", "draft=model", "target@draft.model=llama-3.2-1b", "draft.model.path=x"
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "name: llama-3.2-1b\n    path: x" in shown.stdout
    refused = in_subprocess("cache.bugdet=3", **without_torch)
    assert refused.returncode == cli.USER_ERROR
    assert refused.stderr == "error: unknown key cache.bugdet; did you mean cache.budget?\n"
    assert [path.name for path in here.iterdir()] == ["torch"]


def test_tab_completion(here, monkeypatch, capsys, hydra_logging):
    installed = in_subprocess("-sc", "install=bash")
    assert (installed.returncode, installed.stderr) == (0, "")
    assert "complete" in installed.stdout
    line = "launch.py target=ti"
    targets = ["target=tiny", "target=tiny-draft", "target=tinyllama-1.1b"]
    asked = in_subprocess("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert asked.stdout.split() == targets

    def completed(line):
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        monkeypatch.setattr(sys, "argv", ["launch.py", "-sc", "query=bash"])
        assert cli.main() == 0
        return capsys.readouterr().out.split()

    assert completed("launch.py serve target=ti") == targets
    for typed, commands in {
        "re": {"report"},
        "c": {"compare", "clean", "calibrate", "check-plugin"},
    }.items():
        for line in (f"magicdec {typed}", f"python launch.py {typed}"):
            assert set(completed(line)) & set(cli.COMMANDS) == commands


def test_every_subcommand_shows_its_own_usage(monkeypatch, capsys):
    pytest.importorskip("uvicorn")
    for command in cli.COMMANDS:
        monkeypatch.setattr(sys, "argv", ["magicdec", command, "--help"])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out.startswith(f"usage: magicdec {command} ")


def test_options_of_the_users_own_folder(run, ran, here):
    written(here, {"conf/cache/mine.yaml": "defaults: [streaming]\nbudget: 77\n"})
    assert run("cache=mine") == (0, "")
    for config in (ran[0][0], compose(["cache=mine"])):
        assert (config.cache.policy, config.cache.budget) == ("streaming", 77)
