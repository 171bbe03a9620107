"""Say what a checkpoint holds and nothing here reads: keys of its json files, and tensors that are
computed instead.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.errors import UserError, to_stderr
from magicdec.inputs.rules import SHORT
from magicdec.models.rope import rope_frequencies
from magicdec.models.tensors import have_same_numbers, read_part

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# That old versions of transformers have written.
FREQUENCIES = re.compile(r".*rotary_emb\.inv_freq")
# Tensors that need not be read: those below compare them with what is used in their place.
DISPENSABLE = rf"{FREQUENCIES.pattern}|{re.escape(HEAD)}"
COPIES = "verifier_.*"  # speculators' copies of the target's weights, which nobody compares
VOCABULARY = "d2t|t2d"  # of an EAGLE-3 head: checkpoint.py reads it
MOST_KEYS = 8  # that a warning names


def report_keys(path: Path, keys: Mapping[str, Any], why: str) -> None:
    """Print one line about the keys of a json file that are not read, if there are any."""
    if not keys:
        return
    first = list(keys.items())[:MOST_KEYS]
    shown = [f"{key[:60]}={SHORT.repr(value)}" for key, value in first]
    more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
    report_line(f"{path}: {why}: {', '.join(shown)}{more}")


def dispensable(config: ModelConfig) -> re.Pattern[str]:
    """Return which tensors need not have a place in an architecture."""
    of_heads = [COPIES] * config.is_head + [VOCABULARY] * isinstance(config, HeadConfig)
    return re.compile("|".join([DISPENSABLE, *of_heads]))


def check_output_matrix(draft: Mapping[str, Path], target: Mapping[str, Path]) -> None:
    """Raise UserError where a draft that proposes with its target's output matrix comes with
    another one.
    """
    if HEAD not in draft:
        return
    used = HEAD if HEAD in target else EMBEDDING
    if used in target and have_same_numbers((draft[HEAD], HEAD), (target[used], used)):
        return
    raise UserError(
        f"{draft[HEAD]}: {HEAD} differs from the target's {used}, and the draft would propose with"
        " the target's; set draft.model.path to a draft that was made for this target"
    )


def is_tied(files: Mapping[str, Path]) -> bool:
    """Return whether a checkpoint whose config.json ties the head has no head with numbers of its
    own.

    Where it has one, transformers takes it, whatever config.json says. That is reported.
    """
    if EMBEDDING not in files or HEAD not in files:
        return True
    if have_same_numbers((files[EMBEDDING], EMBEDDING), (files[HEAD], HEAD)):
        return True
    report_line(
        f"{files[HEAD]}: {HEAD} differs from {EMBEDDING}, so it is used, as in transformers,"
        " although config.json has tie_word_embeddings=true; set that to false"
    )
    return False


def report_frequencies(files: Mapping[str, Path], config: ModelConfig) -> None:
    """Report stored rotary frequencies that are other than those of config.json, which are used.

    Those without scaling are no contradiction: linear scaling used to be applied to positions.
    """
    expected = [
        rope_frequencies(config)[0],
        rope_frequencies(replace(config, rope_scaling=None))[0],
    ]
    for name, path in files.items():
        if FREQUENCIES.fullmatch(name) and not _is_one_of(read_part(path, name).float(), expected):
            report_line(
                f"{path}: {name} is not read, as in transformers, and differs from the frequencies"
                " of config.json"
            )
            return


def _is_one_of(stored: Tensor, expected: list[Tensor]) -> bool:
    """Return whether frequencies, which may have been stored in 16 bits, are among the expected
    ones.
    """
    usual = (frequencies for frequencies in expected if frequencies.shape == stored.shape)
    return any(torch.allclose(stored, frequencies, rtol=0.02, atol=1e-6) for frequencies in usual)


@cache
def report_line(line: str) -> None:
    """Print a warning, once in a process: the jobs of a sweep read the same checkpoint."""
    to_stderr(f"warning: {line}")
