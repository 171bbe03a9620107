"""The repository as a whole: every module has its line in the map, no link leads nowhere, every script its imports."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "magicdec/models/tiny/README.md"]


def test_every_module_has_a_line():
    told = (ROOT / "docs/structure.md").read_text()
    named = set(re.findall(r"`([\w./]+\.py)`", told))
    folders = ("magicdec", "hydra_plugins", "benchmarks", "tools")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    missing = {str(path.relative_to(ROOT)) for path in modules} - named
    assert {path for path in missing if Path(path).name not in named} == set()
    gone = {path for path in named if "/" in path and not (ROOT / path).exists()}
    assert gone == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    assert [link for link in links if ":" not in link and not (document.parent / link).exists()] == []


@pytest.mark.parametrize(
    "script", [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")], ids=lambda path: path.name
)
def test_scripts_find_what_they_import(script, monkeypatch):
    for library in ("matplotlib", "cosmic_ray"):  # of extras
        if re.search(rf"^(import|from) {library}\b", script.read_text(), re.MULTILINE):
            pytest.importorskip(library)
    monkeypatch.syspath_prepend(script.parent)
    importlib.import_module(script.stem)
