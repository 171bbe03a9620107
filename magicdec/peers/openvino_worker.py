"""OpenVINO GenAI in a worker's process (see worker.py)."""

import time

import numpy as np
import openvino
import openvino_genai

BLOCK = 32  # tokens of a block of its KV cache


class OpenvinoWorker:
    """The loaded models, in a pipeline of continuous batching."""

    version = f"{openvino_genai.__version__}"

    def __init__(
        self, target: str, kv_type: str, rows: int, max_len: int, threads: int, **speculation
    ):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = rows
        scheduler.num_kv_blocks = rows * (-(-max_len // BLOCK) + 1)
        # All prompts are prefilled in one step: otherwise the first rows decode meanwhile, and
        # neither could be timed.
        scheduler.max_num_batched_tokens = rows * max_len
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": kv_type,
        }
        options = dict(settings)
        self._speculation = {}
        if speculation:
            self._speculation = {"num_assistant_tokens": speculation["gamma"]}
            if "draft" in speculation:
                options["draft_model"] = openvino_genai.draft_model(
                    speculation["draft"], "CPU", **settings
                )
            else:
                options["prompt_lookup"] = True
                self._speculation["max_ngram_size"] = speculation["ngram"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            target, scheduler, "CPU", options
        )
        self._requests = 0

    def generate(self, prompts: list, generate_len: int, seed: int, sampling: dict) -> dict:
        """Decode the batch in one pass."""
        rows = self._run(prompts, generate_len, seed, sampling)
        accepted = [len(tokens) - 1 for bursts in rows for _, tokens in bursts[1:]]
        positions = range(self._speculation.get("num_assistant_tokens", 0))
        prefilled = max(bursts[0][0] for bursts in rows)
        return {
            "tokens": [[token for _, tokens in bursts for token in tokens] for bursts in rows],
            "first": [bursts[0][0] for bursts in rows],
            "decode": [max(0.0, bursts[-1][0] - prefilled) for bursts in rows],
            "rounds": len(accepted) if self._speculation else 0,
            "proposed": 0,  # it does not count them by request
            "accepted": [sum(count > position for count in accepted) for position in positions],
        }

    def _run(self, prompts: list, max_tokens: int, seed: int, sampling: dict) -> list:
        """Return the bursts of each row: seconds since the start, and the tokens that came at
        once.
        """
        start = time.perf_counter()
        handles = []
        for row, prompt in enumerate(prompts):
            options = sampling | self._speculation
            options["stop_token_ids"] = set(options["stop_token_ids"])
            config = openvino_genai.GenerationConfig(
                max_new_tokens=max_tokens, rng_seed=seed + row, **options
            )
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        bursts: list = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for row, handle in enumerate(handles):
                if handle.can_read():
                    bursts[row].append(
                        (now, [t for out in handle.read().values() for t in out.generated_ids])
                    )
        return bursts


WORKER = OpenvinoWorker
