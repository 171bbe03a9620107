"""A request of OpenAI's `/v1/completions`: its fields, and from them the prompt and the engine's parameters."""

import random
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from magicdec.errors import UserError
from magicdec.serving.request import Params
from magicdec.verification.sampling import Sampling

# OpenAI's fields that are not supported: they are accepted with a value that has no effect, and then ignored.
NEUTRAL: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ("", []),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
# In place of pydantic's own messages.
MESSAGES = {"extra_forbidden": "not supported; leave it out", "missing": "is required"}


class Strict(BaseModel):
    """An object whose fields must be known and of the right type; null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None and value not in NEUTRAL.get(key, ())}


class StreamOptions(Strict):
    """Options of a streamed completion."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Completion(Strict):
    """A request as OpenAI defines it, with vLLM's `top_k` and `ignore_eos`, and `gamma`."""

    model: str
    prompt: str | list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    gamma: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> "Completion":
        """Read a request. Raise UserError, one line about the first mistake, for one that is not valid."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise UserError(_described(error.errors()[0])) from None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> str | list[int]:
        """Accept a prompt, or a list of one, as a text or as token ids."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError(f"{len(prompt)} prompts; send one in each request")
            prompt = prompt[0]
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))):
            raise ValueError("must be a text or a list of token ids")
        return prompt

    def params(self) -> Params:
        """Return the engine's parameters. Raise UserError for a value out of range."""
        sampling = Sampling(
            temperature=self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,  # either keeps every token in vLLM
            top_p=self.top_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
        )
        return Params(self.max_tokens, sampling, self.gamma, self.ignore_eos)

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the prompt as tokens."""
        return tokenizer.encode(self.prompt, verbose=False) if isinstance(self.prompt, str) else self.prompt


def _described(mistake: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors in the words of this package."""
    key = ".".join(str(part)[:40] for part in mistake["loc"])
    message = mistake["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = MESSAGES.get(mistake["type"], message)
    if not key:
        return message
    value = "" if mistake["type"] == "missing" else f"={reprlib.repr(mistake['input'])}"
    return f"{key}{value}: {message}"
