"""OpenVINO GenAI as a peer; it reads an IR that optimum-intel exports from the checkpoint."""

from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.registry import ENGINES
from magicdec.inputs.rules import STRICT
from magicdec.peers.process import WorkerEngine, WorkerPeer


@dataclass(frozen=True, config=STRICT)
class OpenvinoEngine(WorkerEngine):
    """OpenVINO GenAI; `kv_type` is that of its KV cache."""

    name: str = "openvino"
    kv_type: Literal["f32", "u8"] = "f32"


@ENGINES.register(OpenvinoEngine)
class OpenvinoPeer(WorkerPeer):
    """OpenVINO's pipeline of continuous batching, in float32."""

    name, title, worker = "openvino", "OpenVINO GenAI", "openvino_worker.py"
    modules = ("openvino_genai", "optimum")
    packages = "openvino-genai optimum-intel"
    converters = (Path(__file__),)  # which chooses the options of the export
    cpu_only, dtypes = True, ("float32",)

    @override
    def options(self, speculative: bool) -> dict[str, Any]:
        assert isinstance(self.spec.engine, OpenvinoEngine)
        return self.converted_options(speculative, "-ir") | {"kv_type": self.spec.engine.kv_type}

    @override
    def conversion(self, folder: str, made: Path) -> list[str]:
        """Export the tokenizer too, because a draft model needs it."""
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", folder]
        return [
            *export,
            "--task",
            "text-generation-with-past",
            "--weight-format",
            "fp32",
            str(made),
        ]

    @override
    def sampling(self) -> dict[str, Any]:
        """Return fields of OpenVINO's GenerationConfig."""
        sampling, ends = self.spec.sampling, self.spec.eos_token_ids
        settings: dict[str, Any] = {
            "do_sample": not sampling.greedy,
            "ignore_eos": not ends,
            "stop_token_ids": ends,
        }
        if not sampling.greedy:
            settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
            settings |= {"top_k": sampling.top_k} if sampling.top_k else {}
        return settings
