"""The differences between Hydra 1.3 with OmegaConf 2.3 and Hydra 1.4 with OmegaConf 2.4.

Nothing else asks for a version of either.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase, setbase
from omegaconf import OmegaConf

IS_1_3 = hydra.__version__.startswith("1.3.")
# Hydra 1.3 behaves like the version that it is asked for. Hydra 1.4 warns whoever asks.
BEHAVIOUR = "1.3"


def register_resolver(name: str, resolver: Callable[..., Any], use_cache: bool = False) -> None:
    """Register ${NAME:...} with OmegaConf, in place of one of the same name."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, replace=True, use_cache=use_cache)


def choose_behaviour() -> None:
    """Have Hydra behave in the same way in every version, for the rest of this process."""
    if IS_1_3:
        setbase(BEHAVIOUR)


@contextmanager
def initialized(conf: Path) -> Iterator[None]:
    """Initialize Hydra with a folder, also within an app that has initialized it for itself, and
    goes on with that.
    """
    version = VersionBase.instance()
    behaviour, app = version.version_base, GlobalHydra.instance().hydra
    asked: dict[str, Any] = {"version_base": BEHAVIOUR} if IS_1_3 else {}
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), **asked):
            yield
    finally:
        GlobalHydra.instance().hydra = app
        version.version_base = behaviour
