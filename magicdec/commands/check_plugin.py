"""`magicdec check-plugin MODULE`: check the policies and drafts of a plugin as the built-in ones
are checked.

Their output must be the target's own, for rows of different lengths. They must select and propose
what exists, within their budget and gamma, and draw from the distributions that they return. They
must allocate the bytes that they declare. A row that serving copies must accept what it would
alone. A small random model decodes, in seconds. Exit code 0 if everything holds, 1 otherwise.
"""

import argparse
from collections.abc import Sequence

from magicdec.conformance.examine import examine
from magicdec.errors import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a module, print a line for every finding, and return the exit code."""
    parser = argparse.ArgumentParser(
        "magicdec check-plugin", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "module", help="as in plugins=[MODULE]; the working directory is searched, too"
    )
    options = parser.parse_args(arguments)
    return exit_code(lambda: _report(options.module))


def _report(module: str) -> int:
    failed = False
    for choice, check, wrong in examine(module):
        print(
            f"{'FAILED' if wrong else 'ok':8}{choice:20}{check}{wrong and f': {wrong}'}", flush=True
        )
        failed |= bool(wrong)
    return int(failed)
