"""The repository as a whole: the page on architecture is true, no link leads nowhere, every script
has its imports, and statements are read once.
"""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.test_layers import LAYERS, ROOT

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
MOST_NODES = 24  # of expressions, for each line of a statement

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


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules of the package."""
    for folder in ("magicdec", "hydra_plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_no_class_name_has_two_meanings():
    places = defaultdict(list)
    for path, module in sources():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@cache
def statements() -> list[tuple[str, ast.stmt]]:
    """Return the statements without a body of the package, with their places."""
    return [
        (f"{path}:{node.lineno}", node)
        for path, module in sources()
        for node in ast.walk(module)
        if isinstance(node, SIMPLE)
    ]


def nodes_a_line(statement: ast.stmt) -> float:
    nodes = sum(isinstance(node, ast.expr | ast.comprehension) for node in ast.walk(statement))
    return nodes / ((statement.end_lineno or statement.lineno) - statement.lineno + 1)


def unpacks_a_generator(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return False
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
    return any(isinstance(value, ast.GeneratorExp) for value in values)


def nests_conditionals(statement: ast.stmt) -> bool:
    outer = (node for node in ast.walk(statement) if isinstance(node, ast.IfExp))
    return any(
        isinstance(part, ast.IfExp)
        for node in outer
        for part in (node.test, node.body, node.orelse)
    )


def names_later(statement: ast.stmt) -> bool:
    """Return whether a value is read to the left of the walrus that names it."""
    nodes = list(ast.walk(statement))
    named = {
        node.target.id: (node.lineno, node.col_offset)
        for node in nodes
        if isinstance(node, ast.NamedExpr)
    }
    return any(
        (node.lineno, node.col_offset) < named.get(node.id, (0, 0))
        for node in nodes
        if isinstance(node, ast.Name)
    )


@pytest.mark.parametrize(
    "reads_twice",
    [
        pytest.param(lambda statement: nodes_a_line(statement) > MOST_NODES, id="dense"),
        unpacks_a_generator,
        nests_conditionals,
        names_later,
    ],
)
def test_statements_are_read_once(reads_twice):
    """Name the steps of what is found here."""
    assert [place for place, statement in statements() if reads_twice(statement)] == []


@pytest.mark.parametrize(
    ("reads_twice", "source"),
    [
        (unpacks_a_generator, "a, b = (len(x) for x in y)"),
        (nests_conditionals, "a = 1 if b else 2 if c else 3"),
        (names_later, "a = [b for c in d if (b := len(c))]"),
        (lambda statement: nodes_a_line(statement) > MOST_NODES, f"a = {'b + ' * 13}b"),
    ],
)
def test_what_reads_twice_is_found(reads_twice, source):
    assert reads_twice(ast.parse(source).body[0])
