"""The wheel holds everything that the command needs outside of a checkout."""

import shutil
import zipfile

import pytest

from magicdec.version import VERSION
from tests.programs import ROOT

CODE = {
    ".py",
    ".cpp",
    ".h",
    ".csv",
    ".css",
    ".html",
    ".js",
    ".json",
    ".safetensors",
    ".typed",
    ".yaml",
}
builders = pytest.importorskip("hatchling.builders.wheel")


def build(source, folder):
    (path,) = builders.WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def files(folder):
    """The files of a folder of the checkout that the package reads."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in CODE and "__pycache__" not in path.parts and path.name != "planned.yaml"
    }


def test_package_and_plugins_configuration_and_the_command_are_whole(tmp_path):
    wheel = build(ROOT, tmp_path)
    expected = files("magicdec") | files("hydra_plugins")
    assert {
        "magicdec/kernels/attention.cpp",
        "magicdec/models/tiny/target/model.safetensors",
    } <= expected
    assert {
        "magicdec/report/assets/page.html",
        "hydra_plugins/magicdec/_launcher.py",
    } <= expected
    for folder in ("conf", "sweeps"):
        assert len(files(folder)) > 5
        expected |= {f"magicdec/{name}" for name in files(folder)}
    assert expected - set(wheel.namelist()) == set()
    facts = f"magicdec-{VERSION}.dist-info"
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "magicdec",
        "hydra_plugins",
        facts,
    }
    assert "magicdec = magicdec.cli:main" in wheel.read(f"{facts}/entry_points.txt").decode()


def test_settings_of_this_machine_stay_here(tmp_path):
    (tmp_path / "magicdec").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "magicdec/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("conf/config.yaml", "conf/local/default.yaml", "magicdec/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with build(tmp_path, tmp_path / "dist") as archive:
        names = archive.namelist()
    assert "magicdec/conf/config.yaml" in names
    assert not [name for name in names if "local" in name]
