"""Find Hugging Face checkpoints, and read which architecture they have.

Only json and safetensors are opened, never a pickle, which can run code when it is loaded. Every
mistake of a user raises a UserError that names the file.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from magicdec.architectures.block_config import KEY
from magicdec.architectures.generation_config import (
    GenerationConfig,
    eos_ids,
    unread_processors,
)
from magicdec.architectures.hugging_face import from_hugging_face, unread_keys
from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.quantized_checkpoints import refusal_of_quantized
from magicdec.errors import Unsupported, UserError
from magicdec.inputs.rules import parse
from magicdec.models.checkpoint import CONFIG, OBJECT, PICKLES, files_of
from magicdec.models.metadata import read_json
from magicdec.models.unread import is_tied, report_keys

GENERATION_CONFIG = "generation_config.json"
NOT_READ = "keys that are not read"
NOT_APPLIED = "transformers' generate applies these keys, and no engine does here"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def locate(path: str, key: str = "target.path", weights: bool = True) -> Path:
    """Return the local folder of a checkpoint.

    `path` is a folder, relative to the working directory or to where the package is (so that the
    bundled pair is found from anywhere), or a hub id `org/name`, optionally `org/name@revision`,
    which is downloaded into the hub's cache; with `weights=False` only its json files are. `key` is
    the configuration key that errors name.
    """
    for folder in (Path(os.path.expanduser(path)), Path(__file__).resolve().parents[2] / path):
        # False, where Path.is_dir raises for a path that is too long.
        if path and os.path.isdir(folder):
            return folder
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"{key}={path} is not a folder; valid: a folder with a {CONFIG}, or a hub id such as"
            " org/name"
        )
    return _download(path, key, ["*.json", "*.safetensors"] if weights else ["*.json"])


def read_config(folder: Path, implementation: str = "auto", runs: bool = True) -> ModelConfig:
    """Return the architecture that the folder's `config.json` describes.

    `implementation` is target.implementation: what `native` does not cover, `auto` describes as
    transformers' modules. Without `runs`, models are described as well that can only be predicted:
    quantized ones, and those with other layers than attention.

    The end-of-sequence tokens are those of `generation_config.json` where it names any, as in
    transformers' generate. A head of its own counts as such, even if `config.json` ties it. Keys
    that are not read are reported. Raise UserError for a missing or broken file, an architecture
    that is not covered, or a quantized checkpoint.
    """
    path = folder / CONFIG
    plain = read_json(path, OBJECT)
    if "draft_vocab_size" in plain or "speculators_model_type" in plain or KEY in plain:
        return _read_head(folder, plain)
    config = describe(plain, str(path), implementation, runs)
    if config.implementation == "native":
        report_keys(path, unread_keys(plain), NOT_READ)
    else:
        from magicdec.models.adapter.transformers_library import unread_keys as unread_by_modules

        report_keys(path, unread_by_modules(plain), NOT_READ)
    if config.tie_word_embeddings and any(folder.glob("*.safetensors")):
        config = replace(config, tie_word_embeddings=is_tied(files_of(folder)))
    return replace(config, eos_token_ids=_eos_ids(folder) or config.eos_token_ids)


def _read_head(folder: Path, plain: OBJECT) -> ModelConfig:
    """Return the model over a target's hidden states that a config.json describes."""
    from magicdec.architectures.block_config import block_from, unread_keys_of_block
    from magicdec.architectures.head_config import head_from, unread_keys_of_head
    from magicdec.architectures.mtp_config import mtp_from, unread_keys_of_mtp

    path = folder / CONFIG
    config: ModelConfig
    if plain.get("speculators_model_type") == "mtp":
        config = mtp_from(plain, str(path))
        unread = unread_keys_of_mtp(plain)
    elif KEY in plain:
        config = block_from(plain, str(path))
        unread = unread_keys_of_block(plain)
    else:
        config = head_from(plain, _files_of_head(folder), str(path))
        unread = unread_keys_of_head(plain)
    report_keys(path, unread, NOT_READ)
    return config


def describe(
    plain: OBJECT, name: str, implementation: str = "auto", runs: bool = True
) -> ModelConfig:
    """Return the architecture of a config.json, as our own transformer runs it or as transformers'
    modules do. `name` is what errors call the file; see `read_config`.
    """
    quantized = refusal_of_quantized(plain)
    if runs and quantized:
        raise UserError(f"{name}: {quantized}")
    if implementation != "transformers" and not quantized:
        try:
            return from_hugging_face(plain, name)
        except Unsupported:
            if implementation == "native":
                raise
    # Importing transformers takes seconds, and our own transformer does not need it. An old one
    # lacks what the other modules import.
    from magicdec.models.adapter.transformers_library import check_version

    check_version()
    from magicdec.models.adapter.facts import describe as describe_modules

    config = describe_modules(plain, name)
    if runs and config.refusal:
        raise UserError(f"{name}: {config.refusal}")
    return replace(config, refusal=quantized) if quantized else config


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens that `generation_config.json` names, and report what else
    it asks for.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return ()
    plain = read_json(path, OBJECT)
    report_keys(path, unread_processors(plain), NOT_APPLIED)
    return eos_ids(parse(GenerationConfig, plain, where=str(path)))


def _files_of_head(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor; None where only the config.json is here. Raise UserError for
    a pickle.
    """
    if any(folder.glob("*.safetensors")):
        return files_of(folder)
    for pattern in PICKLES:
        for path in folder.glob(pattern):
            raise UserError(
                f"{path} is a pickle; only safetensors are read: convert it with"
                " tools/convert_head.py"
            )
    return None


def _download(path: str, key: str, patterns: list[str]) -> Path:
    """Return a snapshot of a hub repository in the hub's own cache, without subfolders and copies
    of the weights.
    """
    # Imported here because a local folder does not need it.
    from huggingface_hub import errors, snapshot_download

    name, _, revision = path.partition("@")
    others = ["*/*", "consolidated*"]
    try:
        return Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, ignore_patterns=others
            )
        )
    except errors.GatedRepoError:
        reason = (
            f"is gated: accept its licence on https://huggingface.co/{name}, then log in with `hf"
            " auth login`"
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        reason = (
            "was found neither as a folder nor on the hub (a private one needs `hf auth login`)"
        )
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = (
            "is neither a folder nor in the hub's cache, and the hub is out of reach: download it"
            f" and pass {key}=FOLDER"
        )
    except Exception as error:  # any failure of the network or the disk is one line for the user
        reason = (
            "could not be downloaded"
            f" ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        )
    raise UserError(f"{key}={path} {reason}") from None
