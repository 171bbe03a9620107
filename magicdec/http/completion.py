"""Requests of OpenAI's API for completions and chats: fields, prompt, parameters, and the answer's
shape.
"""

import random
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import override

from magicdec.data.tokenizer import encode_chat, encode_prompt
from magicdec.errors import UserError
from magicdec.serving.request import Params
from magicdec.verification.sampling import Sampling

# OpenAI's fields that are not supported: values that have no effect are accepted and ignored.
NEUTRAL: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ("", []),
    "top_logprobs": (0,),
    "store": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
MOST_STOPS = 4  # as in OpenAI's API
# Replacements for pydantic's messages.
MESSAGES = {
    "extra_forbidden": "not supported; leave it out",
    "missing": "is required",
    "too_short": "must not be empty",
}


class Strict(BaseModel):
    """Object whose fields must be known and of the right type. Null counts as leaving a field
    out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Mapping[str, tuple]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, neutral = cls.model_fields, cls.neutral
        kept = {
            key: value
            for key, value in given.items()
            if value is not None and value not in neutral.get(key, ())
        }
        # Report the first mistake only: there may be a million.
        unknown = next((key for key in kept if key not in fields), None)
        return {key: value for key, value in kept.items() if key in fields or key == unknown}


class StreamOptions(Strict):
    """Options of a streamed completion."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SharedFields(Strict):
    """Fields that both kinds of requests share: OpenAI's, some of vLLM's, and `gamma`."""

    kind: ClassVar[str]  # of the answer's JSON object
    id_prefix: ClassVar[str]

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    gamma: int | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a request. Raise UserError, one line about the first mistake, if it is not
        valid.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise UserError(_described(error.errors()[0])) from None

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, stop: Any) -> list[str]:
        """Accept a text or a list of texts."""
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("must be a text or a list of texts that are not empty")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings")
        return stops

    def params(self, room: int) -> Params:
        """Return the engine's parameters for a prompt that leaves room for `room` tokens.

        Raise UserError for values out of range.
        """
        sampling = Sampling(
            temperature=self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,  # either keeps every token in vLLM
            top_p=self.top_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
        )
        return Params(self.limit(room), sampling, self.gamma, self.limit_name)

    @property
    def limit_name(self) -> str:
        """Return the field that limits the number of new tokens."""
        return "max_tokens"

    @abstractmethod
    def limit(self, room: int) -> int:
        """Return the largest number of new tokens."""

    @abstractmethod
    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the prompt as tokens. Raise UserError if the tokenizer cannot encode it."""

    @abstractmethod
    def choice(self, text: str, end: str | None) -> dict[str, Any]:
        """Return the answer's choice."""

    @abstractmethod
    def delta(self, text: str, end: str | None, first: bool) -> dict[str, Any]:
        """Return the choice of one event of a stream."""


class Completion(SharedFields):
    """Request to continue a prompt."""

    kind = "text_completion"
    id_prefix = "cmpl"

    prompt: str | list[int]

    @field_validator("prompt", mode="plain")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> str | list[int]:
        """Accept a prompt, or a list of one, as a text or as token ids."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError(f"{len(prompt)} prompts; send one in each request")
            prompt = prompt[0]
        if not (
            isinstance(prompt, str)
            or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
        ):
            raise ValueError("must be a text or a list of token ids")
        return prompt

    @override
    def limit(self, room: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @override
    def token_ids(self, tokenizer: Any) -> list[int]:
        return (
            encode_prompt(tokenizer, self.prompt) if isinstance(self.prompt, str) else self.prompt
        )

    @override
    def choice(self, text: str, end: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": end}

    @override
    def delta(self, text: str, end: str | None, first: bool) -> dict[str, Any]:
        return self.choice(text, end)


class Message(Strict):
    """A message of a chat."""

    role: str
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> str:
        """Accept a text, or a list of parts that are texts."""
        if isinstance(content, str):
            return content
        parts: list[Any] = content if isinstance(content, list) else [None]
        texts = [
            part["text"]
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(parts) or any(part.get("type") != "text" for part in parts):
            raise ValueError("must be a text or a list of parts of type text")
        return "".join(texts)


class Chat(SharedFields):
    """Request to answer messages, formatted by the model's own chat template."""

    kind = "chat.completion"
    id_prefix = "chatcmpl"
    neutral = NEUTRAL | {"logprobs": (False,)}

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    # OpenAI's new name of max_tokens.
    max_completion_tokens: int | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _positive(cls, limit: int | None) -> int | None:
        if limit is not None and limit < 1:
            raise ValueError("must be at least 1")
        return limit

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        """Accept both names of the limit where they agree."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; send one")
        return self

    @override
    def limit(self, room: int) -> int:
        given: int | None = getattr(self, self.limit_name)
        return max(1, room) if given is None else given

    @property
    @override
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @override
    def token_ids(self, tokenizer: Any) -> list[int]:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"model={self.model} has no chat template; send a prompt to /v1/completions"
            )
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return encode_chat(tokenizer, messages, "messages")

    @override
    def choice(self, text: str, end: str | None) -> dict[str, Any]:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": end,
        }

    @override
    def delta(self, text: str, end: str | None, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {
            "index": 0,
            "delta": role | {"content": text},
            "logprobs": None,
            "finish_reason": end,
        }


def _described(mistake: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors in the words of this package."""
    key = ".".join(str(part)[:40] for part in mistake["loc"])
    message = mistake["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = MESSAGES.get(mistake["type"], message)
    if not key:
        return message
    value = "" if mistake["type"] == "missing" else f"={reprlib.repr(mistake['input'])}"
    return f"{key}{value}: {message}"
