"""vLLM in a worker's process (see worker.py)."""

import torch
from vllm import LLM, SamplingParams, __version__


class VllmWorker:
    """A loaded model."""

    version = __version__

    def __init__(self, **options):
        self._llm = LLM(
            **options,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            generation_config="vllm",  # not the checkpoint's own temperature
            disable_log_stats=False,  # times of requests, counters of speculation
        )

    def generate(self, prompts: list, generate_len: int, seed: int, sampling: dict) -> dict:
        """Decode the batch twice: up to its first tokens, and then from the cached prompts up to
        its last ones.

        In one pass the first rows would decode while others are prefilled, and neither could be
        timed.
        """
        self._llm.reset_prefix_cache()
        first = [
            request.metrics.first_token_latency for request in self._run(prompts, 1, seed, sampling)
        ]
        before = self._counts()
        requests = self._run(prompts, generate_len, seed, sampling)
        counts = {name: now - before.get(name, 0) for name, now in self._counts().items()}
        positions = sorted(name for name in counts if isinstance(name, int))
        answer = {
            "tokens": [list(request.outputs[0].token_ids) for request in requests],
            "first": first,
            "decode": [
                request.metrics.last_token_ts - request.metrics.first_token_ts
                for request in requests
            ],
            "rounds": counts.get("num_drafts", 0),
            "proposed": counts.get("num_draft_tokens", 0),
            "accepted": [counts[position] for position in positions],
        }
        if torch.cuda.is_available():
            answer["peak_bytes"] = torch.cuda.max_memory_allocated()
        return answer

    def _run(self, prompts: list, max_tokens: int, seed: int, sampling: dict) -> list:
        each = [
            SamplingParams(max_tokens=max_tokens, seed=seed + row, detokenize=False, **sampling)
            for row in range(len(prompts))
        ]
        return self._llm.generate(
            [{"prompt_token_ids": row} for row in prompts], each, use_tqdm=False
        )

    def _counts(self) -> dict:
        """Return vLLM's counters of speculation so far. Keys that are numbers are positions, with
        accepted tokens.
        """
        prefix = "vllm:spec_decode_"
        counts: dict = {}
        for metric in self._llm.get_metrics():
            if metric.name == prefix + "num_accepted_tokens_per_pos":
                counts |= dict(enumerate(metric.values))
            elif metric.name.startswith(prefix):
                counts[metric.name.removeprefix(prefix)] = metric.value
        return counts


WORKER = VllmWorker
