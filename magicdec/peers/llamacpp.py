"""llama.cpp as a peer, by way of xllamacpp; it reads GGUF files that gguf_file.py writes."""

import json
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.registry import ENGINES
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT
from magicdec.peers.process import HERE, WorkerEngine, WorkerPeer
from magicdec.peers.started_server import StartedServer

CONVERTER = HERE / "gguf_file.py"
# Of an architecture, what gguf_file.py does not write; each is falsy in plain Llama.
UNWRITTEN = ("rope_scaling", "qkv_bias", "output_bias", "qk_norm", "sliding_window")


@dataclass(frozen=True, config=STRICT)
class LlamacppEngine(WorkerEngine):
    """llama.cpp."""

    name: str = "llamacpp"
    scenarios = ("compare", "serve", "profile")


@ENGINES.register(LlamacppEngine)
class LlamacppPeer(WorkerPeer, StartedServer):
    """llama.cpp's server with a slot for each row: weights and KV cache in hardware.dtype."""

    name, title, worker = "llamacpp", "llama.cpp", "llamacpp_worker.py"
    modules, packages = ("xllamacpp", "gguf"), "xllamacpp gguf"
    converters = (CONVERTER,)
    cpu_only = True
    names_ids = True

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        for key, model in config.models.items():
            assert model.architecture is not None, "it is resolved"
            if model.architecture.implementation != "native":
                raise UserError(
                    f"{key}.name={model.name}: engine=llamacpp takes plain Llama, and this model"
                    " runs as transformers' modules; choose another model or engine, or, for a"
                    f" Llama, {key}.implementation=auto"
                )
            for name in UNWRITTEN:
                if getattr(model.architecture, name):
                    raise UserError(
                        f"{key}.name={model.name}: engine=llamacpp takes plain Llama, not {name}"
                    )
        super().check(config)

    @override
    def options(self, speculative: bool) -> dict[str, Any]:
        return self.converted_options(speculative, ".gguf") | {"dtype": self.spec.hardware.dtype}

    @override
    def server(self, speculative: bool, port: int) -> list[str]:
        options = self.options(speculative) | {"port": port}
        return [self._python, "-I", str(HERE / self.worker), json.dumps(options)]

    @override
    def conversion(self, folder: str, made: Path) -> list[str]:
        return [str(CONVERTER), folder, str(made), self.spec.hardware.dtype]

    @override
    def sampling(self) -> dict[str, Any]:
        """Return fields of a request to llama.cpp's server: our order of samplers, and no
        others.
        """
        sampling = self.spec.sampling
        # The vocabulary of the GGUF file names tokens by their ids, and none of them ends a
        # sequence.
        stops = {"stop": [f"[{token}]" for token in self.spec.eos_token_ids]}
        if sampling.greedy:
            return stops | {"samplers": ["top_k"], "top_k": 1}
        top_k = sampling.top_k or 0
        top_p = sampling.top_p or 1.0
        samplers = ["temperature", "top_k", "top_p"]
        return stops | {
            "samplers": samplers,
            "temperature": sampling.temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
