"""vLLM behind a pipe: reads a JSON object per line and writes one. Runs in an environment that has vLLM and need not
have magicdec: nothing of it is imported here.

The first line says what to load; the answer is {"version"}. Every later line is a batch; the answer is its tokens and
times. After an error the answer is {"error"}, and the process ends. It also ends with its input.
"""

import json
import os
import queue
import sys
import threading


def peak_bytes(before: int) -> int:
    """Return the largest memory use: of tensors on a GPU; on a CPU of the process, less `before` and mapped files."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM") - status_bytes("RssFile") - before


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Worker:
    """A loaded model."""

    def __init__(self, options: dict):
        from vllm import LLM, __version__

        self.version = __version__
        self._before = status_bytes("VmRSS") - status_bytes("RssFile")
        self._llm = LLM(
            **options,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            generation_config="vllm",  # not the checkpoint's own temperature
            disable_log_stats=False,  # times of requests, counters of speculation
        )

    def generate(self, prompts: list, generate_len: int, seed: int, sampling: dict) -> dict:
        """Decode the batch twice: up to its first tokens, and then from the cached prompts up to its last ones.

        In one pass the first rows would decode while others are prefilled, and neither could be timed.
        """
        self._llm.reset_prefix_cache()
        first = [request.metrics.first_token_latency for request in self._run(prompts, 1, seed, sampling)]
        before = self._counts()
        requests = self._run(prompts, generate_len, seed, sampling)
        counts = {name: now - before.get(name, 0) for name, now in self._counts().items()}
        positions = sorted(name for name in counts if isinstance(name, int))
        return {
            "tokens": [list(request.outputs[0].token_ids) for request in requests],
            "first": first,
            "decode": [request.metrics.last_token_ts - request.metrics.first_token_ts for request in requests],
            "rounds": counts.get("num_drafts", 0),
            "proposed": counts.get("num_draft_tokens", 0),
            "accepted": [counts[position] for position in positions],
            "peak_bytes": peak_bytes(self._before),
        }

    def _run(self, prompts: list, max_tokens: int, seed: int, sampling: dict) -> list:
        from vllm import SamplingParams

        each = [
            SamplingParams(max_tokens=max_tokens, seed=seed + row, detokenize=False, **sampling)
            for row in range(len(prompts))
        ]
        return self._llm.generate([{"prompt_token_ids": row} for row in prompts], each, use_tqdm=False)

    def _counts(self) -> dict:
        """Return vLLM's counters of speculation so far. Keys that are numbers are positions, with accepted tokens."""
        prefix = "vllm:spec_decode_"
        counts: dict = {}
        for metric in self._llm.get_metrics():
            if metric.name == prefix + "num_accepted_tokens_per_pos":
                counts |= dict(enumerate(metric.values))
            elif metric.name.startswith(prefix):
                counts[metric.name.removeprefix(prefix)] = metric.value
        return counts


def listen(requests: queue.Queue) -> None:
    """Queue the lines of the input. Exit when it ends, because nobody reads the answers any more."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints
    requests: queue.Queue = queue.Queue()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        worker = Worker(requests.get())
        answer({"version": worker.version})
        while True:
            answer(worker.generate(**requests.get()))
    except ImportError as error:
        answer({"error": f"{type(error).__name__}: {error}", "kind": "import"})
        raise
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
