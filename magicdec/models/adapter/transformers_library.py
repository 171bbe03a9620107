"""The transformers library as the adapter uses it: its version, and a config.json in its hands.

Only this package and the peer `engine=transformers` import it for models.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

from magicdec.architectures.hugging_face import WITHOUT_EFFECT
from magicdec.errors import UserError, in_one_line
from magicdec.models.unread import report_line

OLDEST = "5.24"  # whose modules take what we pass
# Keys that configurations read without having them: of rotary embeddings, which they check
# themselves, and what modules ask for with getattr.
ALSO_READ = frozenset(
    (
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim"),
        *("rope_local_base_freq", "sliding_window_pattern"),
    )
)


@cache
def quiet() -> None:
    """Silence what transformers prints about itself."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def check_version() -> None:
    """Raise UserError where the installed transformers is older than the adapter takes."""
    installed = transformers.__version__
    if Version(installed) < Version(OLDEST):
        raise UserError(
            f"target.implementation=transformers needs transformers {OLDEST} or newer, and"
            f" {installed} is installed; pip install 'transformers>={OLDEST}'"
        )


def config_of(plain: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a config.json; raise UserError for a model_type that it
    does not have.
    """
    model_type = plain.get("model_type")
    mapping = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in mapping:
        remote = ", and code from a checkpoint is never run" if plain.get("auto_map") else ""
        raise UserError(
            f"model_type={model_type!r:.60} is not known to transformers"
            f" {transformers.__version__}{remote}"
        )
    try:
        config = mapping[model_type].from_dict(dict(plain))
        config.get_text_config()  # fails where a model has several
    except Exception as error:  # its own checks, of many kinds
        raise UserError(f"transformers refuses it ({in_one_line(error):.300})") from None
    return config


def unread_keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that transformers' configuration does not know, with their
    values.
    """
    config = config_of(plain)
    usual = {*type(config)().to_dict(), *config.attribute_map, *WITHOUT_EFFECT, *ALSO_READ}
    return {key: value for key, value in plain.items() if key not in usual and value is not None}


def config_from(text: str) -> Any:
    """Return transformers' configuration of the text of a config.json that was read before."""
    return config_of(json.loads(text))


def read_causal(folder: Path, whole: Any, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return a causal language model with a checkpoint's weights, on the CPU; `attention` is the
    implementation, by default transformers' own choice.

    Only safetensors are read, and no code of the checkpoint is run. Raise UserError for weights
    that are missing or have other shapes, and report those that have no place in the model.
    """
    quiet()
    loader: Any = transformers.AutoModelForCausalLM
    try:
        causal, report = loader.from_pretrained(
            folder,
            config=whole,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{folder}: transformers cannot load its weights ({in_one_line(error):.200})"
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{folder}: {len(missing)} tensors are missing, such as {missing[0]}")
    if wrong := sorted(report["mismatched_keys"]):
        raise UserError(f"{folder}: tensors have other shapes than its modules, such as {wrong[0]}")
    if unread := sorted(report["unexpected_keys"]):
        report_line(f"{folder}: {len(unread)} tensors are not read, such as {unread[0]}")
    return causal
