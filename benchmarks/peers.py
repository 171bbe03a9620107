"""Hugging Face transformers as a peer: the same checkpoint and prompts through `generate`, decode timed apart."""

import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

MODES = ("dynamic cache", "static cache")


class Clock(StoppingCriteria):
    """Notes the time of every token (or burst of tokens) that `generate` emits; never stops it."""

    def __init__(self):
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids, scores, **_):
        """Called by generate after each step."""
        self.marks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds_per_token(self) -> float:
        """From the first emission to the last."""
        (first, start), (last, end) = self.marks[0], self.marks[-1]
        return (last - first) / (end - start)


@dataclass
class Peer:
    """A loaded checkpoint."""

    folder: str
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    compiled: bool = False

    def __post_init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).to(self.device).eval()
        if self.compiled:
            self.model.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int, mode: str = "dynamic cache", **options):
        """Greedy; returns (new tokens per row, seconds per token)."""
        clock, ids = Clock(), torch.tensor(prompts, device=self.device)
        if mode == "static cache":
            length = ids.shape[1] + new_tokens
            options["past_key_values"] = StaticCache(config=self.model.config, max_cache_len=length)
        elif mode == "dynamic cache":
            options["past_key_values"] = DynamicCache(config=self.model.config)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
        return out[:, ids.shape[1] :].tolist(), clock.seconds_per_token()
