"""llama.cpp's server in a worker's process (see worker.py), or for requests under load (see
started_server.py).
"""

import http.client
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import xllamacpp
from xllamacpp import common_speculative_type as kinds

# Instructions that speed up a decode step, by llama.cpp's names and the processor's.
INSTRUCTIONS = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def features() -> str:
    """Return the instructions that llama.cpp was built with, and those of the processor that it was
    built without.
    """
    built = set(xllamacpp.get_system_info().replace("|", " ").split())
    with open("/proc/cpuinfo") as lines:
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
    with_ = [name for name in INSTRUCTIONS if name in built]
    without = [name for name in INSTRUCTIONS if name not in built]
    left_out = [name for name in without if INSTRUCTIONS[name] in flags]
    return " ".join(with_) + (
        f"; built without this processor's {' '.join(left_out)}" if left_out else ""
    )


class LlamaCppWorker:
    """The loaded models, with a slot of the server for each row."""

    version = f"{xllamacpp.__version__} ({features()})"

    def __init__(
        self,
        target: str,
        dtype: str,
        rows: int,
        max_len: int,
        threads: int,
        port: int = 0,
        **speculation,
    ):
        params = xllamacpp.CommonParams()
        params.model.path = target
        params.n_parallel, params.n_ctx = rows, rows * max_len
        params.kv_unified = False
        params.fit_params = False
        params.cache_ram_mib = 0
        params.cache_type_k = params.cache_type_v = getattr(
            xllamacpp.ggml_type, f"GGML_TYPE_{TYPES[dtype]}"
        )
        if dtype == "float32":  # flash attention converts K and V to float16, in every pass
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.ui = False
        params.n_threads_http = rows + 1  # each row may be a request
        params.verbosity = 1
        params.port = port
        if speculation:
            self._speculate(params, **speculation)
        self._server = xllamacpp.Server(params)
        self._address = self._server.listening_address.rpartition("/")[2]

    @staticmethod
    def _speculate(params, gamma: int, draft: str | None = None, ngram: int = 0) -> None:
        """Propose gamma tokens a round by a draft, or after the last n-gram wherever it occurred
        before.
        """
        if draft is None:
            params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = (
                ngram,
                gamma,
            )
            return
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafts = params.speculative.draft
        drafts.mparams.path = draft
        drafts.n_max = gamma
        drafts.n_min = 0
        drafts.p_min = 0.0
        drafts.cache_type_k = drafts.cache_type_v = params.cache_type_k
        drafts.cpuparams.n_threads = drafts.cpuparams_batch.n_threads = params.cpuparams.n_threads

    def generate(self, prompts: list, generate_len: int, seed: int, sampling: dict) -> dict:
        """Decode the batch twice: up to its first tokens, and then from the cached prompts up to
        its last ones.
        """
        requests = _requests(prompts, seed, sampling)
        with ThreadPoolExecutor(len(requests)) as pool:
            start = time.perf_counter()
            firsts = list(pool.map(partial(self._first, start), requests))
            answers = list(pool.map(partial(self._decoded, generate_len), requests))
        first = [seconds for rows in firsts for seconds in rows]
        rows = [row for answer in answers for row in answer]
        tokens = [row["tokens"] for row in rows]
        timings = [row["timings"] for row in rows]
        accepted = sum(row.get("draft_n_accepted", 0) for row in timings)
        proposed = sum(row.get("draft_n", 0) for row in timings)
        return {
            "tokens": tokens,
            "first": first,
            "decode": [row["predicted_ms"] / 1e3 for row in timings],
            # A round emits a token more than it accepts; the first token is the prefill's.
            "rounds": sum(len(row) - 1 for row in tokens) - accepted if proposed else 0,
            "proposed": proposed,
            "accepted": [],
            "unplaced": accepted,
        }

    def _first(self, start: float, request: dict) -> list:
        """Return the seconds from `start` to the first token of each row of a request."""
        seconds = [0.0] * len(request["prompt"])
        options = {"n_predict": 1, "cache_prompt": False, "stream": True}
        with self._post(request | options) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    seconds[json.loads(line[6:])["index"]] = time.perf_counter() - start
        return seconds

    def _decoded(self, generate_len: int, request: dict) -> list:
        """Return the server's answer to each row of a request."""
        with self._post(request | {"n_predict": generate_len, "cache_prompt": True}) as response:
            answer = json.load(response)
        if not isinstance(answer, list):
            return [answer]
        return sorted(answer, key=lambda row: row["index"])

    def _post(self, request: dict) -> http.client.HTTPResponse:
        """Send a request to the server. It takes several prompts at once, and its slots know the
        prompts they hold.
        """
        connection = http.client.HTTPConnection(self._address)
        connection.request(
            "POST", "/completion", json.dumps(request), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read().decode()[:500]}")
        return response


def _requests(prompts: list, seed: int, sampling: dict) -> list:
    """Return a request for all rows, or where they are sampled, one for each row with a seed of its
    own: the server draws the same numbers for all prompts of a request.
    """
    common = sampling | {"return_tokens": True}
    if "temperature" not in sampling:
        return [common | {"prompt": prompts, "seed": seed}]
    return [common | {"prompt": [ids], "seed": seed + row} for row, ids in enumerate(prompts)]


WORKER = LlamaCppWorker

if __name__ == "__main__":
    _worker = LlamaCppWorker(**json.loads(sys.argv[1]))
    threading.Event().wait()
