"""The repository as a whole: the page on architecture is true, no link leads nowhere, every script
has its imports.
"""

import importlib
import re
from itertools import pairwise

import pytest

from tests.test_layers import LAYERS, ROOT

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "magicdec/models/tiny/README.md",
]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_picture_shows_the_layers_in_their_order():
    picture = re.search(r"```text\n(.*?)```", ARCHITECTURE, re.DOTALL)[1].splitlines()
    ranks = {name: rank for rank, names in enumerate(LAYERS.split("|")) for name in names.split()}
    lines = [
        [ranks[word] for word in line.split("   ")[0].split() if word in ranks] for line in picture
    ]
    lines = [line for line in lines if line]
    assert sum(map(len, lines)) == len(ranks)
    assert [line for line, below in pairwise(lines) if min(line) < max(below)] == []


def test_files_that_the_page_names_exist():
    named = set(re.findall(r"`((?:magicdec|tests|conf|docs)/[\w./-]+)`", ARCHITECTURE))
    named = {path for path in named if "NAME" not in path}
    assert len(named) > 20
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Each names a file that exists and, with an anchor, a heading that the page has."""
    for page, anchor in re.findall(
        r"\]\(([^)#\s:]*)(?:#([^)\s]+))?[)\s]", document.read_text(encoding="utf-8")
    ):
        path = document.parent / page if page else document
        assert path.exists(), page
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
                for heading in headings
            }
            assert anchor in slugs, (page, anchor, slugs)


@pytest.mark.extra
@pytest.mark.parametrize(
    "script", [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")], ids=lambda path: path.name
)
def test_scripts_find_what_they_import(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    try:
        importlib.import_module(script.stem)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "cosmic_ray"):  # of extras
            raise
        pytest.skip(str(error))
