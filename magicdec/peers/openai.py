"""Any server with OpenAI's API, under load: vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp's,
OpenVINO's, or ours.
"""

import importlib.util
import ipaddress
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import EngineConfig
from magicdec.config.registry import ENGINES
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT, Size
from magicdec.peers.base import Address, Servable
from magicdec.units import FREE

INSTALL = "pip install 'magicdec[openai]'"


@dataclass(frozen=True, config=STRICT)
class OpenaiEngine(EngineConfig):
    """A server that is running already."""

    name: str = "openai"
    url: str | None = None
    model: str | None = None
    baseline_url: str | None = None
    free_url: str | None = None
    key_variable: str | None = None
    allow_remote: bool = False
    time_limit_s: Annotated[float, Field(gt=0)] = 600.0
    retries: Size = 2
    scenarios: ClassVar[tuple[str, ...]] = ("serve", "profile")
    is_remote: ClassVar[bool] = True

    @property
    def urls(self) -> dict[str, str]:
        """Return the servers' addresses by key. That of a server alone becomes that of its API,
        /v1.
        """
        named = {
            "engine.url": self.url,
            "engine.baseline_url": self.baseline_url,
            "engine.free_url": self.free_url,
        }
        given = {key: url.rstrip("/") for key, url in named.items() if url is not None}
        return {key: of_api(url) for key, url in given.items()}


@ENGINES.register(OpenaiEngine)
class OpenaiServer(Servable):
    """A server that others have started, and its baseline if there is one."""

    in_turns = True

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        engine = config.engine
        assert isinstance(engine, OpenaiEngine)
        if not all(map(importlib.util.find_spec, ("openai", "aiohttp"))):
            raise UserError(f"engine=openai needs OpenAI's client: {INSTALL}")
        if engine.url is None:
            raise UserError(
                "engine.url=null: give a server's address, as in engine.url=http://127.0.0.1:8000/v1"
            )
        for key, url in engine.urls.items():
            _check_url(key, at_gamma(url, 1), engine.allow_remote)
        if engine.key_variable and not os.environ.get(engine.key_variable):
            raise UserError(
                f"engine.key_variable={engine.key_variable}: the environment has no such variable"
            )

    @classmethod
    @override
    def installed(cls, engine: EngineConfig) -> str:
        return f"openai {metadata.version('openai')}"

    @property
    @override
    def ways(self) -> tuple[str, ...]:
        return tuple(self._keys)

    @property
    @override
    def has_any_gamma(self) -> bool:
        engine = self.spec.engine
        assert isinstance(engine, OpenaiEngine)
        return any(at_gamma(url, 1) != url for url in engine.urls.values())

    @property
    @override
    def profiled_ways(self) -> tuple[str, ...]:
        engine = self.spec.engine
        assert isinstance(engine, OpenaiEngine)
        return (*self.ways, *([FREE] if engine.free_url else []))

    @property
    def _keys(self) -> dict[str, str]:
        engine = self.spec.engine
        assert isinstance(engine, OpenaiEngine)
        if engine.baseline_url is None:
            return {"": "engine.url"}
        return {"autoregressive": "engine.baseline_url", "speculative": "engine.url"}

    @asynccontextmanager
    @override
    async def serving(self, way: str) -> AsyncIterator[Address]:
        engine = self.spec.engine
        key = "engine.free_url" if way == FREE else self._keys[way]
        assert isinstance(engine, OpenaiEngine)
        url = at_gamma(engine.urls[key], self.spec.gamma)
        yield Address(
            f"{key}={url}",
            url,
            engine.model,
            os.environ.get(engine.key_variable or "", "none"),
            engine.time_limit_s,
            engine.retries,
            proxied=not is_loopback(url),
        )


def of_api(url: str) -> str:
    """Return the address of a server's API: that of a server alone with /v1, any other as it is."""
    place = url.partition("://")[2]
    return f"{url}/v1" if place and "/" not in place else url


def at_gamma(url: str, gamma: int) -> str:
    """Return the address of the server that proposes `gamma` tokens a round: in place of
    {gamma}.
    """
    return url.replace("{gamma}", str(gamma))


def _check_url(key: str, url: str, allow_remote: bool) -> None:
    """Raise UserError for what is not an address, or one that holds a password, or is on another
    machine without permission.
    """
    mistake = UserError(f"{key}={url}: must be an address such as http://127.0.0.1:8000/v1")
    try:
        parts = urlsplit(url)
        _ = parts.port  # which may be no number
    except ValueError:
        raise mistake from None
    if parts.username or parts.password:
        raise UserError(
            f"{key}: a name or password in the address would be stored; use engine.key_variable"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise mistake
    if not (allow_remote or is_loopback(url)):
        raise UserError(
            f"{key}={url} is another machine, which gets all prompts; set engine.allow_remote=true"
        )


def is_loopback(url: str) -> bool:
    """Return whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
