"""OpenVINO GenAI as a peer; it reads an IR that optimum-intel exports from the checkpoint."""

from pathlib import Path
from typing import Any

import torch

from magicdec.drafting import PromptLookup
from magicdec.peers.process import WorkerPeer
from magicdec.registry import OpenvinoEngine


class OpenvinoPeer(WorkerPeer):
    """OpenVINO's pipeline of continuous batching, in float32."""

    name, title, worker = "openvino", "OpenVINO GenAI", "openvino_worker.py"
    modules = ("openvino_genai", "optimum")
    packages = "openvino-genai optimum-intel"
    cpu_only, dtypes = True, ("float32",)

    def options(self, speculative: bool) -> dict[str, Any]:
        """See WorkerPeer.options."""
        spec = self.spec
        assert isinstance(spec.engine, OpenvinoEngine)
        options = {
            "target": str(self.converted(spec.target, "-ir")),
            "kv_type": spec.engine.kv_type,
            "rows": spec.num_rows,
            "max_len": spec.max_len,
            "threads": torch.get_num_threads(),
        }
        if not speculative:
            return options
        if isinstance(spec.draft, PromptLookup):
            return options | {"gamma": spec.gamma, "ngram": spec.draft.max_ngram}
        return options | {"gamma": spec.gamma, "draft": str(self.converted(str(spec.draft_folder), "-ir"))}

    def conversion(self, folder: str, made: Path) -> list[str]:
        """See WorkerPeer.conversion. A draft model needs the tokenizers, which are exported as well."""
        export = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", folder]
        return [*export, "--task", "text-generation-with-past", "--weight-format", "fp32", str(made)]

    def sampling(self) -> dict[str, Any]:
        """Return fields of OpenVINO's GenerationConfig."""
        sampling, ends = self.spec.sampling, self.spec.eos_token_ids
        found: dict[str, Any] = {"do_sample": not sampling.greedy, "ignore_eos": not ends, "stop_token_ids": ends}
        if not sampling.greedy:
            found |= {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
            found |= {"top_k": sampling.top_k} if sampling.top_k else {}
        return found
