"""Time the steps of the MagicDec authors' own software, from a checkout of it, next to ours on the
same GPU.

    git clone https://github.com/Infini-AI-Lab/MagicDec
    python benchmarks/gpu_authors.py MagicDec --batch 14 --context 32768 --budget 512 --gamma 4
    python benchmarks/gpu.py --parts authors --magicdec MagicDec

Self-speculation over StreamingLLM's cache, compiled as they do; it needs the packages
flashinfer-python and einops. Weights are random, and caches hold noise of the lengths that a
prefill leaves: verify() and speculate() with `benchmark=True` leave them as they are. A
verification of one token (--gamma 0) is T_T. FlashInfer's functions are called by the names that
the installed version has for them.
"""

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch

from magicdec.measure.ceilings import seconds_of

WARMUP = 5  # the first calls compile, and capture graphs
MARGIN = 96  # tokens of the last page that are free for proposals, as in the authors' commands


def adapt(flashinfer: Any) -> None:
    """Give today's FlashInfer the names and arguments of the one that the authors used."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    append = flashinfer.append_paged_kv_cache
    plan = wrapper.plan
    if "head_dim" not in inspect.signature(plan).parameters:

        @wraps(plan)
        def renamed(self: Any, *args: Any, head_dim: int, **kwargs: Any) -> Any:
            return plan(self, *args, head_dim_qk=head_dim, **kwargs)

        wrapper.plan = renamed
    if "batch_indices" in inspect.signature(append).parameters:

        @wraps(append)
        def located(
            k: Any, v: Any, append_indptr: Any, cache: Any, indices: Any, indptr: Any, last_len: Any
        ) -> None:
            lengths = flashinfer.get_seq_lens(indptr, last_len, cache.shape[2])
            places = flashinfer.get_batch_indices_positions(append_indptr, lengths, len(k))
            append(k, v, *places, cache, indices, indptr, last_len)

        flashinfer.append_paged_kv_cache = located


def backend_of(checkout: Path) -> tuple[Any, Any]:
    """Return the authors' backend and model. They import their package as MagicDec, whatever its
    folder's name is.
    """
    folder = Path(tempfile.mkdtemp(prefix="magicdec-authors-"))
    (folder / "MagicDec").symlink_to(checkout.resolve(), target_is_directory=True)
    sys.path.insert(0, str(folder))
    import flashinfer

    adapt(flashinfer)
    from MagicDec.Engine.StreamingLLM.backend import LMBackend
    from MagicDec.Engine.StreamingLLM.model import Transformer

    return LMBackend, Transformer


def opened(options: argparse.Namespace) -> Any:
    """Return their engine as it is behind a prefill."""
    backend, transformer = backend_of(options.checkout)
    rows, context, budget = options.batch, options.context - MARGIN, options.budget + 1
    engine = backend(dtype=torch.bfloat16, device=options.device, dec_len=options.gamma + 1)
    with torch.device("meta"):
        model = transformer.from_name(options.model).to(torch.bfloat16)
    engine.model = model.to_empty(device=options.device).eval()
    for weight in engine.model.parameters():
        weight.data.normal_(0, 0.02) if weight.dim() > 1 else weight.data.fill_(1.0)
    if not options.eager:
        engine.compile()
    engine.setup_caches(max_batch_size=rows, max_seq_length=options.context, draft_budget=budget)
    engine.clear_kv()
    for layer in engine.model.layers:
        for entries in (layer.attention.kv_cache.kv_cache, layer.attention.kv_cache.draft_cache):
            entries.normal_()
    whole_pages, rest = divmod(context, engine.page_size)
    engine.num_pages_per_request.fill_(whole_pages)
    engine.pre_encode(dec_len=rest)
    engine.cachelens.fill_(context)
    engine.draft_cachelens.fill_(budget)
    engine.pre_draft_encode(dec_len=engine.page_size)
    return engine


@torch.inference_mode()
def measured(options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of a verification of gamma + 1 tokens, and of a draft step where
    gamma is not 0.
    """
    engine, device = opened(options), torch.device(options.device)
    tokens = torch.randint(
        0, engine.model.config.vocab_size, (options.batch, options.gamma + 1), device=device
    )

    def milliseconds(step: Callable[[], object]) -> float:
        return 1e3 * median(seconds_of(step, device, WARMUP + options.repeats)[WARMUP:])

    verify_ms = milliseconds(lambda: engine.verify(tokens, benchmark=True))
    if not options.gamma:
        return {"target_decode_ms": verify_ms}
    return {
        "verify_ms": verify_ms,
        "draft_ms": milliseconds(lambda: engine.speculate(tokens[:, :1], benchmark=True)),
    }


def main() -> None:
    """Print the milliseconds as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name of theirs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    for name, value in (
        ("batch", 14),
        ("context", 32768),
        ("budget", 512),
        ("gamma", 4),
        ("repeats", 10),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    print(json.dumps(measured(parser.parse_args())))


if __name__ == "__main__":
    main()
