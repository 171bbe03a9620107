"""The software of a run: the code, plugins included, the versions and the commit."""

import importlib
import subprocess

from magicdec.config import registry
from magicdec.tracking import software


def test_a_plugin_is_part_of_the_code(tmp_path, monkeypatch):
    """A module, or a package with all its modules, outside this one that makes an entry in a
    registry.
    """
    monkeypatch.setattr(registry, "PLUGINS", {})
    monkeypatch.setattr(software, "PLUGINS", registry.PLUGINS)
    monkeypatch.setattr(registry.CORPORA, "_entries", dict(registry.CORPORA._entries))
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "from magicdec.config.choices import Corpus\nfrom magicdec.config.registry import CORPORA\n"
        "@CORPORA.register(Corpus('mine'))\ndef load(request): ...\n"
    )
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    hashes, bare = [software.source()], tmp_path / "without_init"  # a namespace package
    bare.mkdir()
    (bare / "one.py").write_text(code)
    for file in (tmp_path / "a_plugin_of_mine.py", package / "__init__.py"):
        file.write_text(code)
        importlib.import_module(file.stem if file.parent == tmp_path else package.name)
        hashes.append(software.source())
        file.write_text(f"{file.read_text()}# edited\n")
        hashes.append(software.source())
    (package / "helper.py").write_text("")
    hashes.append(software.source())
    importlib.import_module("without_init.one")
    hashes.append(software.source())
    assert len(set(hashes)) == 7


def test_the_commit_is_that_of_the_package_and_dirty_with_a_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "CHECKOUT", tmp_path)
    assert software.commit() == {"commit": None, "commit_dirty": None}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "magicdec").mkdir()
    (tmp_path / "magicdec" / "old.py").touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(git + command, check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (tmp_path / "notes.txt").touch()
    assert software.commit() == {"commit": head, "commit_dirty": False}
    for name in ("new.py", "old.py"):
        (tmp_path / "magicdec" / name).write_text("edited")
        assert software.commit() == {"commit": head, "commit_dirty": True}
        subprocess.run([*git, "stash", "-q", "-u"], check=True)
    assert software.commit() == {"commit": head, "commit_dirty": False}
