"""Other Hydra apps of an environment in which the wheel of magicdec is installed: they behave as
without it.
"""

import subprocess
import sys
import sysconfig
import venv

import pytest

from magicdec.config.hydra_versions import IS_1_3
from tests.inputs.test_plugins import written
from tests.programs import ROOT
from tests.test_wheel import build

# The smallest app there is, and one with a configuration of its own whose words are ours, too.
SMALL = """
import hydra, sys
from hydra.core.plugins import Plugins

@hydra.main(version_base="1.3")
def main(cfg):
    ours = [name for name in sys.modules if name.startswith(("magicdec", "hydra_plugins.magicdec."))]
    ours += [kind for kind in Plugins.instance().discover() if "magicdec" in kind.__module__]
    print("got", dict(cfg), ours)

main()
"""  # noqa: E501
LARGE = """
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

ConfigStore.instance().store(name="schema", node={"steps": 3})
OmegaConf.register_new_resolver("head_name", lambda: "mine")

@hydra.main(version_base="1.3", config_path="settings", config_name="config")
def main(cfg):
    print("got", OmegaConf.to_container(cfg, resolve=True))

main()
"""
# An app whose jobs compose our configuration, and one with a number to optimise.
USER = LARGE.replace("print(", "print(compose(['experiment=quick']).batch.size)\n    print(")
OBJECTIVE = LARGE.replace("print(", "return float(cfg.steps) or print(")
FILES = {
    "small.py": SMALL,
    "large.py": LARGE,
    "user.py": f"from magicdec.config.load import compose{USER}",
    "objective.py": OBJECTIVE,
    "settings/config.yaml": (
        "defaults: [schema, target: big, _self_]\nsteps: 4\nhead: ${head_name:}\n"
    ),
    "settings/target/big.yaml": "architecture: resnet18\n",
    "conf/target/elsewhere.yaml": "architecture: of another app\n",
}
BIG = "got {'steps': 4, 'target': {'architecture': 'resnet18'}, 'head': 'mine'}\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a fresh environment with the wheel, and the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    purelib = sysconfig.get_path("purelib", "venv", {"base": folder / "venv"})
    build(ROOT, folder).extractall(purelib)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    written(folder, {f"{purelib}/libraries.pth": "\n".join(libraries)})
    return folder / "venv" / "bin" / "python"


@pytest.fixture
def app(python, tmp_path):
    """Run a program in a folder of its own; return what subprocess.run returns."""
    written(tmp_path, FILES)

    def run(*arguments):
        command = [python, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    return run


def test_the_environment_has_the_wheel_and_not_the_checkout(app):
    shown = app(
        "-c",
        "import magicdec.config.folders as f, hydra_plugins.magicdec as p; print(f.CONF,"
        " *p.__path__)",
    )
    assert shown.returncode == 0, shown.stderr
    assert str(ROOT) not in shown.stdout
    assert shown.stdout.count("site-packages") == 2


def test_a_multirun_is_that_of_hydra_and_imports_nothing_of_ours(app):
    done = app("small.py", "-m", "+x=1,2")
    assert done.returncode == 0, done.stderr
    assert "magicdec" not in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("got")] == [
        "got {'x': 1} []",
        "got {'x': 2} []",
    ]


def test_words_that_are_ours_too_mean_what_the_app_says(app):
    done = app("large.py")
    assert (done.returncode, done.stdout) == (0, BIG), done.stderr


def test_conf_of_the_working_directory_is_not_searched(app):
    refused = app("large.py", "target=elsewhere")
    assert refused.returncode != 0
    assert "Could not find 'target/elsewhere'" in refused.stderr
    assert "magicdec" not in app("large.py", "--info", "searchpath").stdout


def test_our_options_are_not_offered_to_others(app):
    refused = app("small.py", "hydra/launcher=nope")
    assert "basic" in refused.stderr
    assert "magicdec" not in refused.stderr


@pytest.mark.extra
@pytest.mark.parametrize(
    ("plugin", "arguments"),
    [
        ("hydra_joblib_launcher", ["hydra/launcher=joblib", "steps=1,2"]),
        (
            "hydra_optuna_sweeper",
            ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "steps=range(1,3)"],
        ),
    ],
)
def test_plugins_of_others_run_their_jobs(app, tmp_path, plugin, arguments):
    pytest.importorskip(f"hydra_plugins.{plugin}")
    if plugin == "hydra_optuna_sweeper" and not IS_1_3:
        pytest.skip("hydra-optuna-sweeper 1.3 does not work with Hydra 1.4")
    done = app("objective.py", "-m", "hydra.sweep.dir=jobs", *arguments)
    assert done.returncode == 0, done.stderr
    steps = [path.read_text() for path in sorted(tmp_path.glob("jobs/*/.hydra/overrides.yaml"))]
    assert len(steps) == 2
    # A search may include the end.
    assert set(steps) <= {f"- steps={number}\n" for number in (1, 2, 3)}


def test_an_app_that_uses_our_api_keeps_its_own_configuration(app):
    done = app("user.py", "-m", "steps=1,2")
    assert done.returncode == 0, done.stderr
    jobs = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert jobs == ["2", BIG.replace("4", "1").strip(), "2", BIG.replace("4", "2").strip()]
