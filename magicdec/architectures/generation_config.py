"""Read a Hugging Face `generation_config.json`: the tokens that end a sequence, and what would
change the others.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from magicdec.architectures.model_config import LONGEST, TokenId
from magicdec.inputs.rules import JSON, must

EosIds = Annotated[
    TokenId | list[TokenId] | None,
    must(f"must be a whole number, 0 to {LONGEST:,}, or a list of them"),
]


@dataclass(frozen=True, config=JSON)
class GenerationConfig:
    """The keys of a `generation_config.json` that are read."""

    eos_token_id: EosIds = None


# Keys of a `generation_config.json` with which transformers' `generate` writes other tokens, greedy
# ones too, and the value that has no effect. Its temperature, top_k and top_p are those of the
# group `sampling` here.
PROCESSORS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": {},
}


def unread_processors(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `generation_config.json` that would change the tokens, and that are not
    read.
    """
    return {
        key: plain[key]
        for key, neutral in PROCESSORS.items()
        if plain.get(key) is not None and plain[key] != neutral
    }


def eos_ids(config: GenerationConfig) -> tuple[int, ...]:
    """Return a checkpoint's end-of-sequence tokens as a tuple, empty if it names none."""
    value = config.eos_token_id
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
