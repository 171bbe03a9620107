"""The wheel holds everything that the command needs outside of a checkout."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = {".py", ".cpp", ".h", ".csv", ".css", ".html", ".js", ".json", ".safetensors", ".typed", ".yaml"}
builders = pytest.importorskip("hatchling.builders.wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def files(folder):
    """The files of a folder of the checkout that the package reads."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in CODE and "__pycache__" not in path.parts and path.name != "planned.yaml"
    }


def test_package_and_plugins_are_whole(wheel):
    expected = files("magicdec") | files("hydra_plugins")
    assert {"magicdec/kernels/attention.cpp", "magicdec/models/tiny/target/model.safetensors"} <= expected
    assert {"magicdec/tracking/report/assets/page.html", "hydra_plugins/process_launcher.py"} <= expected
    assert expected - set(wheel.namelist()) == set()


@pytest.mark.parametrize("folder", ["conf", "sweeps"])
def test_configuration_is_in_the_package(wheel, folder):
    expected = {f"magicdec/{name}" for name in files(folder)}
    assert len(expected) > 5
    assert expected - set(wheel.namelist()) == set()


def test_nothing_else_is_installed(wheel):
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "magicdec",
        "hydra_plugins",
        "magicdec-0.1.0.dist-info",
    }


def test_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "magicdec = magicdec.cli:main" in wheel.read(name).decode()
