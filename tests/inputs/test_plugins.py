"""Policies and drafts from outside the package: installed with an entry point, or named in the key
`plugins`.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from magicdec.config import registry
from magicdec.config.load import compose, to_dict
from magicdec.costmodel.comparison import published
from magicdec.errors import UserError
from magicdec.inputs import plugins
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from magicdec.scenarios.peer import load
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.run_id import run_id
from tests.programs import ROOT, python
from tests.runs import SMALL, one_line

# The policy and the draft that docs/adding-a-policy.md takes as its examples, and their options.
EXAMPLES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-policy.md").read_text("utf-8"), re.S
)
OPTIONS = {
    "conf/cache/strided.yaml": "# Every n-th token.\npolicy: strided\nbudget: 64\nrecent: 8\n",
    "conf/draft/echo.yaml": "# The last token again.\nname: echo\ngamma: 2\nback: 1\n",
}
# A package with an entry point.
PACKAGE = {
    "others/__init__.py": "\n".join(EXAMPLES),
    **{f"others/{path}": text for path, text in OPTIONS.items()},
    "others-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n",
    "others-1.0.dist-info/entry_points.txt": "[magicdec.plugins]\nothers = others\n",
}
POLICY = """
from pydantic.dataclasses import dataclass
from magicdec.cache.streaming import Streaming, StreamingCache
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT

@dataclass(frozen=True, config=STRICT)
class Mine(Streaming):
    policy: str = "mine"
    extra: int = 3

POLICIES.register(Mine)(type("MineCache", (StreamingCache,), {"__module__": __name__}))
"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A function that runs the command line, in a folder outside the checkout, where the package is
    installed.
    """
    here = tmp_path_factory.mktemp("here")
    paths = [written(tmp_path_factory.mktemp("site"), PACKAGE), os.environ.get("PYTHONPATH")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))}

    def launch(*arguments):
        done = python(
            *(arguments if arguments[0] == "-m" else (ROOT / "launch.py", *arguments)),
            cwd=here,
            env=env,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, here

    return launch


def test_an_installed_package_is_in_the_help(launched):
    lines = launched("--help")[0].splitlines()
    assert any(line.startswith("draft: ") and "echo" in line for line in lines)
    assert any(line.startswith("cache: ") and "strided" in line for line in lines)


def test_an_installed_package_is_predicted(launched):
    keys = [
        "target=llama-3.1-8b",
        "hardware=h100",
        "scenario.alpha=0.8",
        "runs_dir=predicted",
        "wandb.mode=disabled",
    ]
    shown, _ = launched(
        "scenario=predict", "cache=strided", "cache.budget=512", "batch.context_len=32000", *keys
    )
    assert "strided 512" in shown


@pytest.mark.slow
def test_an_installed_package_runs_in_a_sweep_and_is_reported(launched):
    pairs = ["draft=self,echo", "cache=strided", "cache.recent=16"]
    _, here = launched("--multirun", *pairs, *SMALL)
    results = list(iter_runs(here / "runs"))
    assert [(one["status"], one["lossless/identical"]) for one in results] == [("done", True)] * 2
    assert all("+" in one["source"] for one in results), "the plugin's source counts"
    assert [one["config"]["cache"]["recent"] for one in results] == [16, 16]
    shown, _ = launched(
        "-m", "magicdec", "report", "runs", "--columns", "draft.name,cache.policy,alpha"
    )
    assert "strided" in shown
    assert "echo" in shown


@pytest.fixture
def clean(monkeypatch):
    """The registries and the module path without what plugins have added."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "PLUGINS", {})
    yield
    for choices in (registry.POLICIES, registry.DRAFTS):
        added = [
            name
            for name, entry in choices._entries.items()
            if not entry.work.__module__.startswith("magicdec.")
        ]
        # Modules of the package stay imported, and would not register themselves again.
        for name in added:
            del choices._entries[name]
    sys.modules.pop("my_policy", None)


def test_a_folder_of_your_own(tmp_path, monkeypatch, clean):
    """A module and its option in the working directory, and settings of the machine."""
    local = "# @package _global_\nplugins: [my_policy]\nruns_dir: elsewhere\n"
    files = {
        "my_policy.py": POLICY,
        "conf/cache/mine.yaml": "policy: mine\nbudget: 64\nnum_sink: 2\nextra: 5\n",
    }
    monkeypatch.chdir(written(tmp_path, files | {"conf/local/default.yaml": local}))
    config = compose(["cache=mine", "cache.extra=7"])
    assert (config.runs_dir, config.plugins) == ("elsewhere", ["my_policy"])
    assert (config.cache.policy, config.cache.extra, config.cache.num_sink) == ("mine", 7, 2)
    assert {"my_policy": tmp_path / "my_policy.py"} == registry.PLUGINS
    inner = compose(["draft=hierarchical", "cache@draft.cache=mine"])
    assert inner.draft.cache == config.cache.__class__(budget=64, num_sink=2, extra=5)
    for override, error in {
        "cache.extra=many": "cache.extra=many: must be a whole number",
        "cache.extr=1": "unknown key cache.extr; did you mean cache.extra?",
        "cache.num_sink=-1": "cache.num_sink=-1: must be at least 0",
        "cache.budget=2": "cache.budget=2: must be above cache.num_sink=2",
    }.items():
        with pytest.raises(UserError, match=f"^{error}"):
            compose(["cache=mine", override])


def test_an_option_whose_plugin_was_not_named_says_so(tmp_path, monkeypatch, clean):
    monkeypatch.chdir(written(tmp_path, {"conf/cache/mine.yaml": "policy: mine\nbudget: 64\n"}))
    with pytest.raises(
        UserError, match=r"cache.policy=mine: must be one of full, .*; plugins=\[MODULE\] adds"
    ):
        compose(["cache=mine"])


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, clean, module, why):
    monkeypatch.chdir(written(tmp_path, {"broken.py": "1 / 0\n"}))
    with pytest.raises(
        UserError, match=one_line(f"plugins=[{module}]: {module} cannot be imported ({why}")
    ):
        compose([f"plugins=[{module}]"])


def test_plugins_do_not_change_the_id_of_a_run(tmp_path, monkeypatch, clean):
    monkeypatch.chdir(written(tmp_path, {"my_policy.py": POLICY}))
    plain, with_plugin = (
        to_dict(compose(overrides)) for overrides in ([], ["plugins=[my_policy]"])
    )
    assert with_plugin["plugins"] == ["my_policy"]
    assert run_id(plain, {}, "cpu") == run_id(with_plugin, {}, "cpu")
    assert plugins.GROUP == "magicdec.plugins"


def test_a_policy_whose_option_leaves_out_its_keys_is_predicted(tmp_path, monkeypatch, clean):
    files = {"my_policy.py": POLICY, "conf/cache/mine.yaml": "policy: mine\nbudget: 64\n"}
    monkeypatch.chdir(written(tmp_path, files))
    keys = ["scenario=predict", "hardware=h100", "plugins=[my_policy]", "cache=mine"]
    setup = setup_of(resolve(compose([*keys, "batch.size=8"])))
    assert published(setup, "pg19") == {}


def test_our_server_gets_the_plugins_of_the_run_that_starts_it(tmp_path, monkeypatch, clean):
    files = {"my_policy.py": POLICY, "conf/cache/mine.yaml": "policy: mine\nbudget: 64\n"}
    monkeypatch.chdir(written(tmp_path, files))
    keys = ["engine=magicdec", "hardware=cpu", "plugins=[my_policy]", "cache=mine"]
    plan = resolve(compose(keys))
    served = compose(["scenario=serve", *load(plan).overrides(speculative=True)])
    assert (served.plugins, served.cache) == (["my_policy"], plan.config.cache)
