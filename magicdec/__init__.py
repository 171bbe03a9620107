"""MagicDec: speculative decoding for long contexts and large batches, as a config-driven experiment
framework.

The Python API is in magicdec/api.py, and described in docs/python.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from magicdec import threads
from magicdec.version import VERSION

if TYPE_CHECKING:
    from magicdec.api import Result, UserError, histories, load, predict, run, runs, study

__all__ = [
    "Result",
    "UserError",
    "__version__",
    "histories",
    "load",
    "predict",
    "run",
    "runs",
    "study",
]
__version__ = VERSION

threads.set_defaults()  # PyTorch, which reads them once, is imported later


def __getattr__(name: str) -> Any:
    """Import the API when it is first used: importing the package itself must stay cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("magicdec.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
