"""The layers of the package: a module imports from its own folder and from folders further down,
never up.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = """
threads version | errors units shell processes | inputs | architectures | config | costmodel |
kernels | verification data | attention | models | cache | decoding | drafts | engine | measure |
serving | peers | tracking | report | planning | scenarios | http calibrate conformance |
commands"""
ENGINE = "kernels attention models cache decoding drafts verification engine"
RANKS = {name: rank for rank, names in enumerate(LAYERS.split("|")) for name in names.split()}
# The command line and the Python API may import from every layer. Only they import each other, and
# the package itself offers the API: a module that imports a name from it imports whatever the API
# does.
NAMES = "cli __main__ api"
ENTRY_POINTS = {f"magicdec.{name}" for name in NAMES.split()}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "magicdec").rglob("*.py")
}


def imports(path):
    """Modules of the package that a file imports, lazily or for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("magicdec"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("magicdec"))


def room_of(module):
    return module.split(".")[1] if "." in module else ""


def test_no_import_runs_up():
    wrong = []
    for name, path in FILES.items():
        for imported in imports(path):
            if (name, imported) == ("magicdec", "magicdec.api"):
                continue
            ours, theirs = room_of(name), room_of(imported)
            up = (
                theirs
                and ours != theirs
                and name not in ENTRY_POINTS
                and RANKS[theirs] >= RANKS[ours or "errors"]
            )
            if up or not theirs or (imported in ENTRY_POINTS and name not in ENTRY_POINTS):
                wrong.append(f"{name} imports {imported}")
            elif imported not in FILES:
                wrong.append(f"{name} imports {imported}, which does not exist")
    assert wrong == []


def test_the_engine_imports_neither_the_cost_model_nor_the_store():
    """Lazy imports count, too."""
    found = [
        f"{name} imports {imported}"
        for name, path in FILES.items()
        for imported in imports(path)
        if room_of(name) in ENGINE.split() and room_of(imported) in ("costmodel", "tracking")
    ]
    assert found == []


def test_no_modules_import_each_other():
    """Lazy imports count, too: they hide a cycle. CycleError names the modules."""
    TopologicalSorter({name: set(imports(path)) for name, path in FILES.items()}).prepare()


def test_only_entry_points_and_the_foundation_are_outside_of_a_room():
    foundation = "errors processes shell threads units version"
    names = {path.stem for path in (ROOT / "magicdec").glob("*.py")}
    assert names == {*NAMES.split(), *foundation.split(), "__init__"}


def test_no_two_files_have_a_name_that_does_not_say_which():
    """What is chosen by name may be called alike in two groups: cache=random and data=random."""
    options = {path.stem for path in (ROOT / "conf").rglob("*.yaml")}
    options |= {path.stem for path in (ROOT / "magicdec" / "commands").glob("*.py")}
    names = [path.stem for path in FILES.values() if path.stem not in ("__init__", "base")]
    twins = {name for name in names if names.count(name) > 1}
    assert twins - options == set()


def at_once(name, seen):
    """Return the modules that are imported with a module: not those within functions, or for type
    checking.
    """
    if name not in seen:
        seen.add(name)
        body = ast.parse(FILES[name].read_text()).body
        for node in body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("magicdec"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    at_once(inner if inner in FILES else node.module, seen)
    return seen


def test_what_measures_imports_neither_predictions_nor_what_reads_configurations():
    """The frame of a run does both, before and behind it (magicdec/scenarios/__init__.py)."""
    imported = at_once("magicdec.scenarios.compare", set())
    folders = {name.split(".")[1] for name in imported}
    assert {"engine", "measure", "drafts"} <= folders
    assert folders & {"peers", "serving", "http", "calibrate"} == set()
    others = {
        "config.options",
        "config.checks",
        "planning.resolve",
        "planning.fits",
        "planning.acceptances",
        "planning.setup",
        "models.description",
        "scenarios.prediction_errors",
        "tracking.reader",
        "tracking.store",
        "tracking.trackers",
    }
    others = {f"magicdec.{name}" for name in others}
    assert others <= FILES.keys()
    assert imported & others == set()
    assert [name for name in imported if "costmodel" in name] == []
