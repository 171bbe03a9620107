"""Write a workload of code edits: modules of Python's standard library, each with several names to
replace.

    python benchmarks/edits.py edits.jsonl
    python launch.py -m +sweeps=suffix

Output repeats the prompt, and the requests of a module resemble each other, as those of an agent
do.
"""

import argparse
import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "bisect",
    "colorsys",
    "copy",
    "fnmatch",
    "genericpath",
    "heapq",
    "linecache",
    "posixpath",
)
NUM_LINES = 60  # of a module, from its first function or class on
EDITS = 4  # of a module

PROMPT = """Replace the name {old} by {new} in this module.

```python
{code}
```

The whole module, with {new} in place of {old}:

```python
{start}
"""


def names(code: str) -> list[str]:
    """Return the variables and arguments of some code, the most frequent first."""
    found = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.arg | ast.Name)
    )
    return [name for name, _ in found.most_common()]


def excerpt(path: Path) -> str:
    """Return whole statements of a module, from its first function or class on, about NUM_LINES of
    them.
    """
    source = path.read_text()
    body = ast.parse(source).body
    first = next(
        i for i, node in enumerate(body) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    start = end = body[first].lineno - 1
    for node in body[first:]:
        assert node.end_lineno is not None
        if node.end_lineno - start > NUM_LINES and end > start:
            break
        end = node.end_lineno
    return "\n".join(source.splitlines()[start:end])


def requests() -> Iterator[dict[str, str]]:
    """Yield the requests, those of a module one after the other."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        code = excerpt(library / f"{module}.py")
        for old in names(code)[:EDITS]:
            text = PROMPT.format(old=old, new=f"{old}_value", code=code, start=code.splitlines()[0])
            yield {"module": module, "name": old, "prompt": text}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file to write")
    out = parser.parse_args().out
    out.write_text("".join(json.dumps(request) + "\n" for request in requests()))
