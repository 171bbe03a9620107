"""Each kernel for GPUs at one layer's sizes: is it right, and how fast is it next to what else does
the same?

    python benchmarks/gpu_kernels.py --check         # every version against the reference, in fp32
    python benchmarks/gpu_kernels.py --time          # every version and its rivals, next to copying as many bytes
    python benchmarks/gpu_kernels.py --time codes    # the kernels whose name contains this

A kernel is a function that returns its `Case`, and an entry of KERNELS. To compare an old version
with a new one, give both in `ours`. Without a GPU, `TRITON_INTERPRET=1` and `--rehearse` check tiny
sizes in Triton's interpreter. The parts checks and kernels of benchmarks/gpu.py store the same
points.
"""  # noqa: E501

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from gpu_store import Record, outcome
from torch import Tensor, nn

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention import backends
from magicdec.attention.base import Attention, Shape, ends
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.draft_cache import DraftCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import BACKENDS, POLICIES
from magicdec.costmodel.targets import architecture
from magicdec.decoding.timers import Clock
from magicdec.engine.graphs import Captures, Step
from magicdec.errors import UserError
from magicdec.models import quantize
from magicdec.models.kv_cache import KVCache
from magicdec.units import GIB
from magicdec.verification.sampling import Sampling, probabilities

FLUSHED = GIB // 4  # bytes that are written before each run: more than an L2 cache holds
SAMPLED = Sampling(0.8, 50, 0.9)
WARMUP = 2
GAMMA = 4
# Of the largest number. In bf16: the rounding of outputs and of attention weights.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Of the slots selected by the reference. In bf16, slots with about the least score that is selected
# may change places.
MISSED = {torch.float32: 0.0, torch.bfloat16: 0.05}
Call = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """The sizes of one layer of a model, and the cache that it reads."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    rows: int = 24
    context: int = 32768
    budget: int = 512
    model: ModelConfig = field(
        default_factory=lambda: replace(architecture("llama-3.1-8b"), num_layers=1)
    )
    sampling: Sampling = SAMPLED

    def queries(self, tokens: int) -> Tensor:
        """Return random queries (B, T, H, D)."""
        return self.random(self.rows, tokens, self.model.num_heads, self.model.head_dim)

    def random(self, *shape: int) -> Tensor:
        """Return random numbers, the same for the same shape."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)

    @property
    def kv_bytes(self) -> int:
        """The bytes of the layer's keys and values."""
        per_token = 2 * self.model.num_kv_heads * self.model.head_dim * self.dtype.itemsize
        return self.rows * self.context * per_token

    def plan(self, attention: Attention, target: KVCache, tokens: int) -> object:
        """Return a backend's plan of a pass of `tokens` tokens, the last ones in the cache."""
        shape = Shape(
            tokens,
            target.k_LBKSD.shape[3],
            self.model.num_heads // self.model.num_kv_heads,
            self.dtype,
        )
        return attention.plan(target.seqlens_B, shape, None)

    def target(self) -> KVCache:
        """Return a cache filled with noise."""
        slots = self.context + GAMMA + 1
        cache = KVCache(self.model, self.rows, slots, self.dtype, self.device)
        generator = torch.Generator(self.device).manual_seed(1)
        for entries in (cache.k_LBKSD, cache.v_LBKSD):
            entries.normal_(generator=generator)
        cache.rollback(
            torch.full((self.rows,), self.context, dtype=torch.int32, device=self.device)
        )
        return cache

    def draft(self, config: CacheConfig, target: KVCache) -> DraftCache:
        """Return a policy's cache of the target's entries."""
        spec = CacheSpec(config, GAMMA, self.context)
        kind = POLICIES[config.policy].work
        cache = kind.build(spec, self.model, self.rows, self.dtype, self.device, target)
        cache.load(target)
        return cache


@dataclass(frozen=True)
class Case:
    """A kernel and what it is compared with."""

    ours: dict[str, Call]  # by version; the first is what runs use
    reference: Callable[[], Tensor]
    num_bytes: float  # that must be moved
    # Each is made when it is timed.
    rivals: dict[str, Callable[[], Call]] = field(default_factory=dict)
    selects: bool = False  # slots, in any order; otherwise numbers
    called: tuple[str, ...] = ()  # rivals that no graph can capture


def attention(layer: Layer, tokens: int) -> Case:
    """Attention over a whole cache, by every backend that can be used here."""
    target, q = layer.target(), layer.queries(tokens)
    by = partial(attending, layer, target, q)
    names = backends.usable(layer.device, layer.dtype, [layer.model.head_dim])
    rivals = {name: partial(by, name) for name in names if name != "triton"}
    called = tuple(name for name in names if not BACKENDS[name].facts.captured)
    right = partial(_exact, q, target.k_LBKSD[0], target.v_LBKSD[0], target.seqlens_B)
    return Case({"triton": by("triton")}, right, layer.kv_bytes, rivals, called=called)


def attending(layer: Layer, target: KVCache, q_BTHD: Tensor, name: str) -> Call:
    """Return a backend's attention over a cache."""
    backend: Attention = BACKENDS[name].work()
    plan = layer.plan(backend, target, q_BTHD.shape[1])
    return lambda: backend.attend(q_BTHD, target.k_LBKSD[0], target.v_LBKSD[0], plan)


def scores(layer: Layer, tokens: int) -> Case:
    """Attention that also returns what each slot received; its rival does not."""
    triton, target, q = BACKENDS["triton"].work(), layer.target(), layer.queries(tokens)
    entries, plan = (target.k_LBKSD[0], target.v_LBKSD[0]), layer.plan(triton, target, tokens)
    plain = {"without scores": lambda: lambda: triton.attend(q, *entries, plan)}

    return Case(
        {"triton": lambda: triton.attend_scored(q, *entries, plan)[1]},
        partial(_exact_scores, layer, target, q, None),
        layer.kv_bytes,
        plain,
    )


def verified_scores(layer: Layer, tokens: int) -> Case:
    """Attention with the scores of the first and the last token alone; its rivals are that of all
    tokens, and none.
    """
    triton, target, q = BACKENDS["triton"].work(), layer.target(), layer.queries(tokens)
    entries, plan = (target.k_LBKSD[0], target.v_LBKSD[0]), layer.plan(triton, target, tokens)
    scores_BKS = torch.empty(entries[0].shape[:3], device=layer.device)
    rivals: dict[str, Callable[[], Call]] = {
        "of all tokens": lambda: lambda: triton.attend_scored(q, *entries, plan),
        "without scores": lambda: lambda: triton.attend(q, *entries, plan),
    }

    def observed() -> Tensor:
        triton.attend_observed(q, *entries, plan, scores_BKS)
        return scores_BKS

    right = partial(_exact_scores, layer, target, q, ends(*q.shape[:2], layer.device))
    return Case({"triton": observed}, right, layer.kv_bytes, rivals)


def keys_scored(layer: Layer, tokens: int) -> Case:
    """Scores from queries and keys alone; its rival is attention that returns them, too."""
    triton, target, q = BACKENDS["triton"].work(), layer.target(), layer.queries(tokens)
    entries, plan = (target.k_LBKSD[0], target.v_LBKSD[0]), layer.plan(triton, target, tokens)
    attended = {"with attention": lambda: lambda: triton.attend_scored(q, *entries, plan)}
    return Case(
        {"triton": lambda: triton.score_keys(q, entries[0], plan)},
        partial(_exact_scores, layer, target, q, None),
        layer.kv_bytes,  # of two passes over the keys
        attended,
    )


def _exact_scores(layer: Layer, target: KVCache, q: Tensor, counted: Tensor | None) -> Tensor:
    """Return scores in fp32 by PyTorch."""
    exact = SdpaAttention()
    plan = replace(layer, dtype=torch.float32).plan(exact, target, q.shape[1])
    return exact.score_keys(q.float(), target.k_LBKSD[0].float(), plan, counted)


def codes(layer: Layer, bits: int) -> Case:
    """Attention over codes; its rival reads all entries in full."""
    triton, target, q = BACKENDS["triton"].work(), layer.target(), layer.queries(1)
    config = POLICIES["quantized"].facts(budget=layer.budget, bits=bits)
    cache, entries = layer.draft(config, target), (target.k_LBKSD[0], target.v_LBKSD[0])
    (plan,) = cache.plan(triton, 1, layer.dtype)
    coded, whole = cache.coded(0), layer.plan(triton, target, 1)
    share = config.element_bytes(layer.model, layer.dtype.itemsize) / layer.dtype.itemsize
    return Case(
        {"triton": lambda: triton.attend_coded(q, *entries, plan, coded)},
        lambda: _exact(q, *coded.mixed(*entries), plan.seqlens_B),
        share * layer.kv_bytes,
        {"in full": lambda: lambda: triton.attend(q, *entries, whole)},
    )


def selection(layer: Layer, policy: str) -> Case:
    """One selection of slots by a dynamic policy; its rival is torch.topk over a score of each
    slot, alone.
    """
    triton, target, q = BACKENDS["triton"].work(), layer.target(), layer.queries(1)
    cache = layer.draft(POLICIES[policy].facts(budget=layer.budget), target)
    (plan,), exact = cache.plan(triton, 1, layer.dtype), SdpaAttention()

    def reference() -> Tensor:
        single = replace(layer, dtype=torch.float32)
        wide = KVCache(
            layer.model, layer.rows, target.k_LBKSD.shape[3], torch.float32, layer.device
        )
        for ours, theirs in ((wide.k_LBKSD, target.k_LBKSD), (wide.v_LBKSD, target.v_LBKSD)):
            ours.copy_(theirs)
        wide.rollback(target.seqlens_B)
        twin = single.draft(cache.settings, wide)
        (its_plan,) = twin.plan(exact, 1, torch.float32)
        return twin.select(0, q.float(), exact, its_plan)

    moved = (
        cache.settings.selection_bytes(cache.spec, layer.model, layer.dtype.itemsize) * layer.rows
    )
    random = torch.rand(layer.rows, layer.model.num_kv_heads, layer.context, device=layer.device)
    rival = {"torch.topk": lambda: lambda: random.topk(layer.budget, sorted=False)}
    before = operators()
    return Case(
        {
            "triton": lambda: cache.select(0, q, triton, plan),
            "operators": lambda: cache.select(0, q, before, plan),
        },
        reference,
        moved,
        rival,
        selects=True,
    )


def operators() -> Attention:
    """Return Triton's attention with what selected before it had kernels for that: PyTorch's
    operators.
    """

    class Operators(BACKENDS["triton"].work):
        select_largest = Attention.select_largest
        select_slots = Attention.select_slots
        select_pages = Attention.select_pages

    return Operators()


def ranking(layer: Layer) -> Case:
    """A selection by scores that are there, of as many layers as a model has; its rival is
    torch.topk.
    """
    triton, size = BACKENDS["triton"].work(), (layer.rows, layer.model.num_kv_heads, layer.context)
    scores = torch.rand(min(32, layer.rows * 2), *size, device=layer.device)
    last = torch.full((layer.rows, 1), layer.context, device=layer.device)
    first, before = torch.zeros_like(last), operators()
    return Case(
        {
            "triton": lambda: triton.select_largest(scores, first, last, layer.budget),
            "operators": lambda: before.select_largest(scores, first, last, layer.budget),
        },
        lambda: SdpaAttention().select_largest(scores, first, last, layer.budget),
        scores.nbytes,
        {"torch.topk": lambda: lambda: scores.topk(layer.budget, sorted=False)},
        selects=True,
    )


def matmul(layer: Layer, bits: int) -> Case:
    """The largest matrix of a layer in few bits, with a token of each row."""
    inputs, outputs = layer.model.hidden_size, 2 * layer.model.intermediate_size
    linear = nn.Linear(
        inputs, outputs, bias=False, dtype=layer.dtype, device=layer.device
    ).requires_grad_(False)
    linear.weight.copy_(layer.random(outputs, inputs))
    x, exact = layer.random(layer.rows, inputs), linear.weight.clone()
    ours = quantize.coded(linear, f"int{bits}")
    rivals: dict[str, Callable[[], Call]] = {"bf16": lambda: lambda: F.linear(x, exact)}
    if bits == 4 and layer.device.type == "cuda":
        rivals |= {
            "_weight_int4pack_mm": partial(_tinygemm, x, outputs),
            "torchao": partial(_torchao, x, exact),
        }
    moved = outputs * inputs * (bits / 8 + layer.dtype.itemsize / quantize.CODE_GROUP)
    return Case(
        {"triton": lambda: ours(x)}, lambda: F.linear(x.float(), ours.weight.float()), moved, rivals
    )


def _tinygemm(x: Tensor, outputs: int) -> Call:
    """Return PyTorch's own matmul by random codes."""
    group, packed = quantize.CODE_GROUP, torch.ops.aten._convert_weight_to_int4pack
    codes = torch.randint(0, 256, (outputs, x.shape[1] // 2), dtype=torch.uint8, device=x.device)
    scales = torch.rand(x.shape[1] // group, outputs, 2, dtype=x.dtype, device=x.device)
    weights = packed(codes, 8)
    return lambda: torch.ops.aten._weight_int4pack_mm(x, weights, group, scales)


def _torchao(x: Tensor, weight: Tensor) -> Call:
    """Return torchao's linear layer in the format of its fastest kernel for few rows."""
    quantize.quiet_torchao()
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layer = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device
    )
    layer.requires_grad_(False).weight.copy_(weight)
    quantize_(
        layer, Int4WeightOnlyConfig(quantize.CODE_GROUP, int4_packing_format="tile_packed_to_4d")
    )
    return lambda: layer(x)


def truncation(layer: Layer, tokens: int) -> Case:
    """The distribution that sampling draws from; its rivals are one torch.topk, and FlashInfer's
    two kernels.
    """
    logits, chosen = 4 * layer.random(layer.rows, tokens, layer.model.vocab_size), layer.sampling

    def flashinfer() -> Call:
        from flashinfer import sampling

        def call() -> Tensor:
            p = (logits.flatten(0, 1).float() / chosen.temperature).softmax(-1)
            return sampling.top_p_renorm_probs(
                sampling.top_k_renorm_probs(p, chosen.top_k), chosen.top_p
            )

        return call

    rivals = {"torch.topk": lambda: lambda: logits.topk(chosen.top_k), "flashinfer": flashinfer}
    moved = logits.numel() * (2 * layer.dtype.itemsize + torch.float32.itemsize)
    ours = {
        "triton": (
            lambda: _kernels().truncated(logits, chosen.temperature, chosen.top_k, chosen.top_p)
        )
    }
    return Case(ours, lambda: probabilities(logits.cpu(), chosen).to(layer.device), moved, rivals)


def _kernels():
    from magicdec.kernels import triton_sampling  # imports Triton

    return triton_sampling


KERNELS: dict[str, Callable[[Layer], Case]] = {
    **{f"attention, T={tokens}": partial(attention, tokens=tokens) for tokens in (1, 2, 4, 5, 8)},
    "scores, T=5": partial(scores, tokens=5),
    "scores, T=32": partial(scores, tokens=32),
    "scores of a verification, T=5": partial(verified_scores, tokens=5),
    "scores from keys, T=32": partial(keys_scored, tokens=32),
    "codes, 4 bits": partial(codes, bits=4),
    "codes, 8 bits": partial(codes, bits=8),
    "quest": partial(selection, policy="quest"),
    "topk": partial(selection, policy="topk"),
    "ranking": ranking,
    "int4 matmul": partial(matmul, bits=4),
    "int8 matmul": partial(matmul, bits=8),
    "truncation, T=1": partial(truncation, tokens=1),
    "truncation, T=5": partial(truncation, tokens=5),
}


def _exact(q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seqlens_B: Tensor) -> Tensor:
    """Return attention in fp32 by PyTorch."""
    backend = SdpaAttention()
    shape = Shape(
        q_BTHD.shape[1], k_BKSD.shape[2], q_BTHD.shape[2] // k_BKSD.shape[1], torch.float32
    )
    return backend.attend(
        q_BTHD.float(), k_BKSD.float(), v_BKSD.float(), backend.plan(seqlens_B, shape, None)
    )


def checked(name: str, layer: Layer) -> Record:
    """Return how far each version is from the reference; `failed` if one is too far."""
    case = KERNELS[name](layer)
    right, allowed = case.reference(), (MISSED if case.selects else ALLOWED)[layer.dtype]
    distance = missed if case.selects else largest_error
    errors = {version: distance(call(), right) for version, call in case.ours.items()}
    wrong = [
        f"{version} is off by {error:.2g}"
        for version, error in errors.items()
        if not error <= allowed
    ]
    return {"failed": "; ".join(wrong)} if wrong else errors | {"allowed": allowed}


def largest_error(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    right = right.float()
    found = F.pad(found.float(), (0, right.shape[-1] - found.shape[-1]))
    return float((found - right).abs().max() / right.abs().max())


def missed(found: Tensor, right: Tensor) -> float:
    """Return the share of the right slots that are not in `found`. All are distinct, and negative
    ones are none.
    """
    size = int(max(found.max(), right.max())) + 2

    def marked(slots: Tensor) -> Tensor:
        marks = torch.zeros(*slots.shape[:-1], size, dtype=torch.bool, device=slots.device)
        return marks.scatter_(-1, slots.clamp(min=-1) + 1, True)[..., 1:]

    wanted = marked(right)
    return float((wanted & ~marked(found)).sum() / wanted.sum())


def timed(name: str, layer: Layer, repeats: int, copy_bandwidth: float | None = None) -> Record:
    """Return the microseconds of each version and rival, and the first version's speed as a share
    of a copy's.
    """
    case = KERNELS[name](layer)
    found: Record = {
        f"{version}_us": 1e6 * seconds(call, layer.device, repeats)
        for version, call in case.ours.items()
    }
    first = next(iter(found.values()))
    for rival, make in case.rivals.items():
        captured = rival not in case.called
        known = outcome(lambda: {"us": 1e6 * seconds(make(), layer.device, repeats, captured)})  # noqa: B023
        found[f"{rival}_us"] = known.get("us") or known.get("skipped") or known["failed"]
    of_copy = copy_bandwidth and 1e6 * case.num_bytes / first / copy_bandwidth
    return {"mib": case.num_bytes / 2**20} | found | {"of_copy": of_copy}


def seconds(call: Call, device: torch.device, repeats: int, captured: bool = True) -> float:
    """Return the median seconds of a call whose inputs are not in the L2 cache: on a GPU, of a
    replayed graph.
    """
    on_gpu = device.type == "cuda"
    step = Step(call, Captures(device) if on_gpu and captured else None)
    flushed = torch.empty(FLUSHED if on_gpu else 0, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(WARMUP + repeats):
        flushed.zero_()
        clock = Clock(device)
        clock.mark()
        step()
        clock.mark()
        samples += clock.seconds()
    return median(samples[WARMUP:])


def tiny() -> Layer:
    """Return sizes for Triton's interpreter. Raise UserError without it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("needs a GPU, or Triton's interpreter: set TRITON_INTERPRET=1")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    model = replace(architecture("llama-3.1-8b"), num_layers=1, vocab_size=300, **sizes)
    return Layer(torch.device("cpu"), torch.float32, 2, 160, 48, model)


def main() -> int:
    """Run the command line. Return 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", default="", help="a part of the names of kernels")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--check", action="store_true", help="compare with the references, at two rows"
    )
    what.add_argument("--time", action="store_true", help="time every version and its rivals")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    options = parser.parse_args()
    layer = tiny() if options.rehearse else Layer(torch.device("cuda"))
    if options.check and not options.rehearse:
        layer = replace(layer, rows=2)
    work = (
        partial(checked, layer=layer)
        if options.check
        else partial(timed, layer=layer, repeats=options.repeats)
    )
    failed = False
    for name in (name for name in KERNELS if options.name in name):
        with torch.inference_mode():
            found = outcome(partial(work, name))
        failed |= "failed" in found
        shown = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in found.items()
        )
        print(f"{name}: {', '.join(shown)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
