"""A CUDA device that is not there: rounds run on fake tensors, where every operator is recorded and
nothing computed.

with fake_cuda() as recording:
    batch = prefilled(engine("self", "streaming"))
    with recording.of() as seen:
        batch.decoder.round(batch.draft, 4, 0)
assert not seen.faults
"""

import ctypes
import functools
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.registry import BACKENDS, DRAFTS
from magicdec.costmodel.targets import architecture
from magicdec.engine.native import Batch, NativeEngine
from magicdec.models import rope
from magicdec.models.heads import HEADS
from magicdec.models.parallel import ALONE, Share
from magicdec.models.transformer import Transformer
from tests.gpu_rehearsal.compile import GPUS, Launch, compiled
from tests.small import new_engine

LLAMA_8B = replace(architecture("llama-3.1-8b"), eos_token_ids=(2,))

# Operators that launch nothing: views, and memory that is not written.
FREE = frozenset(
    (
        "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "transpose", "permute", "select", "slice", "t",  # noqa: E501
        "as_strided", "split", "split_with_sizes", "unbind", "alias", "detach", "_reshape_alias", "unfold", "empty",  # noqa: E501
        "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "diagonal", "narrow", "chunk",  # noqa: E501
        "movedim", "view_as_real",
    )
)  # fmt: skip
# Operators whose result, or the shape of it, has to come to the host first.
SYNCHRONISING = frozenset(
    (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "equal",
    )
)
# Operators that take a number on the CPU as an argument of their kernel, as in `x[:3] = 1.0`.
SCALAR = frozenset(("lift_fresh", "prim::device", "fill_"))
CUDA, META = 1, 14  # c10::DeviceType


def lend_guard() -> None:
    """Let CUDA tensors be indexed without a GPU: PyTorch for CPUs has no guard for their devices,
    and that of PyTorch for CUDA asks the driver. Meta's does nothing.
    """
    library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except ValueError:
        pytest.skip(
            "this PyTorch's libc10 has no table of device guards under the name that is known here"
        )
    assert guards[META]
    if not torch.cuda.is_available():
        guards[CUDA] = guards[META]


@dataclass(frozen=True)
class Op:
    """An operator or a kernel of ours that was launched, and what it moves at least."""

    where: str
    name: str
    read: int
    written: int
    inputs: tuple[tuple[int, ...], ...]
    flops: int


@dataclass
class Seen:
    """What was recorded. `faults`: what a captured round must not do, and where it is done."""

    ops: list[Op] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)

    def count(self, where: str | None = None) -> Counter[str]:
        """How often each operator was launched, in one part of a round or in all."""
        return Counter(op.name for op in self.ops if where in (None, op.where))


class Recording(TorchDispatchMode):
    """Records operators into `seen`; `where` is what they are recorded under."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.where = Seen(), ""

    @contextmanager
    def of(self) -> Iterator[Seen]:
        """Record into a new `Seen`."""
        self.seen = Seen()
        with self:
            yield self.seen

    @contextmanager
    def under(self, where: str) -> Iterator[None]:
        """Record what follows under a name."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def name_calls(self, owner: Any, **names: str) -> None:
        """Record the calls of these methods under these names, as long as `owner` lives."""
        for method, where in names.items():
            setattr(owner, method, self._named(getattr(owner, method), where))

    def _named(self, call: Any, where: str) -> Any:
        @functools.wraps(call)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self.under(where):
                return call(*args, **kwargs)

        return named

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in SYNCHRONISING:
            self.seen.faults.append((f"{name} synchronises", _stack()))
        out = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        on_host = [x for x in inputs + outputs if x.device.type == "cpu"]
        if on_host and not (name in SCALAR and all(x.dim() == 0 for x in on_host)):
            self.seen.faults.append((f"{name} of a tensor on the CPU", _stack()))
        if any(not isinstance(size, int) for x in outputs for size in x.shape):
            self.seen.faults.append((f"{name} has a dynamic shape", _stack()))
        if (
            name not in FREE
            and not name.startswith("prim::")
            and not (name == "copy_" and _same(*inputs[:2]))
        ):
            self.seen.ops.append(self._op(name, inputs, outputs))
        return out

    def _op(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Op:
        read, written = inputs, outputs
        if name in ("index", "gather", "embedding"):  # as much of the source as comes out
            read = outputs + [x for x in inputs if x.dtype == torch.int64]
        elif name in ("index_put_", "scatter_", "scatter", "index_copy_"):
            read = inputs[1:]
            written = inputs[1:2] if name == "index_put_" else inputs[-1:]
        flops = (
            2 * inputs[-2].shape[0] * inputs[-2].shape[1] * inputs[-1].shape[1]
            if name in ("mm", "addmm")
            else 0
        )
        shapes = tuple(tuple(x.shape) for x in inputs)
        return Op(
            self.where, name, sum(map(_bytes, read)), sum(map(_bytes, written)), shapes, flops
        )


class _Kernel:
    """A Triton kernel whose launches are recorded."""

    def __init__(self, kernel: Any, recording: Recording, capability: int | None):
        self.kernel, self.recording, self.capability = kernel, recording, capability

    @property
    def arg_names(self) -> list[str]:
        """As Triton's."""
        return self.kernel.arg_names

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        """Compile for `capability`; return what there is to know about it before it runs."""
        assert self.capability, "nothing is compiled here"
        launch = Launch(self.kernel, grid, dict(zip(self.arg_names, args, strict=True)), options)
        made = compiled(launch, self.capability)
        metadata = SimpleNamespace(shared=made.shared, num_warps=made.warps)
        return SimpleNamespace(n_regs=made.registers, metadata=metadata, _init_handles=lambda: None)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **keywords: Any) -> None:
            name, seen = self.kernel.__name__, self.recording.seen
            arguments, options = dict(zip(self.arg_names, args, strict=False)), {}
            for key, value in keywords.items():
                (arguments if key in self.arg_names else options)[key] = value
            tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
            for key, x in tensors.items():
                if x.device.type != "cuda":
                    seen.faults.append((f"{name}: {key} on {x.device.type}", _stack()))
            seen.launches.append(Launch(self.kernel, grid, arguments, options))
            read, written = _traffic(name, arguments)
            shapes = tuple(tuple(x.shape) for x in tensors.values())
            seen.ops.append(Op(self.recording.where, f"triton:{name}", read, written, shapes, 0))

        return launch


def _traffic(name: str, arguments: dict[str, Any]) -> tuple[int, int]:
    """Bytes that one of our kernels reads and writes, if K and V are read once and nothing but
    valid slots is.
    """
    if name == "merge_splits":
        return _bytes(arguments["partial"]) + _bytes(arguments["lse"]), _bytes(arguments["out"])
    if name == "score_keys":
        read = sum(_bytes(arguments[key]) for key in ("q", "k", "lse"))
        return read, _bytes(arguments["out"])
    if name == "sum_keys":
        return _bytes(arguments["q"]) + _bytes(arguments["k"]), _bytes(arguments["lse"])
    if name == "sum_scores":
        return _bytes(arguments["raw"]) + _bytes(arguments["lse"]), _bytes(arguments["out"])
    if written := {"weigh_places": ("raw", "lse"), "select_places": ("out",)}.get(name):
        tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
        moved = sum(map(_bytes, tensors.values()))
        return moved - sum(_bytes(tensors[key]) for key in written), sum(
            _bytes(tensors[key]) for key in written
        )
    if name != "attend_split":
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        return sum(map(_bytes, tensors)), 0
    k = arguments["k"]
    reach = k.shape[2] if arguments["reach"] is None else arguments["reach"]
    slots = (
        arguments["num_indices"]
        if arguments["SELECTED"]
        else min(k.shape[2], reach + arguments["T"])
    )
    cache = 2 * k.shape[0] * k.shape[1] * slots * k.shape[3] * k.element_size()
    written = [arguments[key] for key in (("partial", "lse") if arguments["SPLIT"] else ("out",))]
    written += [arguments["raw"]] if arguments["SCORED"] else []
    return cache + _bytes(arguments["q"]), sum(map(_bytes, written))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _same(to: Tensor, source: Any = None) -> bool:
    """Return whether a copy is one onto itself, as functional code leaves them."""
    if source is None or to.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return False
    return (to.storage_offset(), to.shape, to.stride()) == (
        source.storage_offset(),
        source.shape,
        source.stride(),
    )


def _bytes(x: Tensor) -> int:
    """Bytes of a tensor, an expanded dimension counted once."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count


def _stack(depth: int = 4) -> str:
    """Return the lines of the package that were called, the innermost first."""
    frame, lines = sys._getframe(2), []
    while frame and len(lines) < depth:
        path = frame.f_code.co_filename
        if "/magicdec/" in path:
            lines.append(f"{path.split('/magicdec/')[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


@contextmanager
def fake_cuda(capability: int | None = None) -> Iterator[Recording]:
    """Tensors on "cuda" that hold nothing, and kernels of ours that are only recorded. How many of
    their programs run at once is known where they are compiled for a `capability`, and two to a
    multiprocessor of an H100 otherwise.
    """
    lend_guard()
    from magicdec.attention.cuda import triton_grid as grid
    from magicdec.kernels import (
        coded_kv,
        received_scores,
        selected_slots,
        split_kv,
        triton_sampling,
    )
    from magicdec.models import code_matmul

    recording, card = Recording(), GPUS[capability or 90]
    launched = (
        (split_kv, ("attend_split", "merge_splits")),
        (received_scores, ("sum_scores", "score_keys", "sum_keys")),
        (coded_kv, ("attend_coded",)),
        (selected_slots, ("weigh_places", "select_places")),
        (triton_sampling, ("collect", "find_cut", "write", "draw_numbers")),
        (code_matmul, ("multiply_codes",)),
    )
    with ExitStack() as stack:
        for module, names in launched:
            for name in names:
                stack.enter_context(
                    patch.object(
                        module, name, _Kernel(getattr(module, name), recording, capability)
                    )
                )
        gpu = grid.Gpu(capability or 90, card.sms, card.shared, card.warps)
        stack.enter_context(patch.object(grid, "gpu", lambda: gpu))
        stack.enter_context(patch.object(grid, "_programs", {}))
        if capability is None:
            stack.enter_context(patch.object(grid, "programs_at_once", lambda *_: 2 * gpu.sms))
        rope.frequencies_on.cache_clear()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        try:
            yield recording
        finally:
            rope.frequencies_on.cache_clear()


def fake_model(
    config: ModelConfig = LLAMA_8B,
    attention: str = "triton",
    dtype: torch.dtype = torch.bfloat16,
    share: Share = ALONE,
) -> Transformer:
    """A model with fake weights on CUDA, one rank's share of it; to be called within
    `fake_cuda`.
    """
    with unset_fake_temporarily(), torch.device("meta"):
        kind = HEADS[type(config)] if config.is_head else Transformer
        model = kind(share.config(config), BACKENDS[attention].work(), share).to(dtype)
        model.eval().requires_grad_(False)
        shapes = {key: weight.shape for key, weight in model.named_parameters()}
    if isinstance(config, HeadConfig):
        model.target_ids_V = torch.zeros(config.num_logits, dtype=torch.int64, device="cuda")
    for key, shape in shapes.items():
        *path, last = key.split(".")
        weight = torch.empty(shape, dtype=dtype, device="cuda")
        model.get_submodule(".".join(path))._parameters[last] = torch.nn.Parameter(
            weight, requires_grad=False
        )
    return model


def engine(
    draft: str = "self",
    policy: str = "streaming",
    num_layers: int = 2,
    attention: str = "triton",
    model: ModelConfig = LLAMA_8B,
    share: Share = ALONE,
    **options: Any,
) -> NativeEngine:
    """An engine of a model cut to `num_layers`, on the fake device; `options` as in
    `tests.small.new_engine`.
    """
    config, facts = replace(model, num_layers=num_layers), DRAFTS[draft].facts
    target, drafter = fake_model(config, attention, share=share), None
    if facts.listens:
        drafter = fake_model(facts().assumed_model(config), attention)
    elif facts.needs_model:
        drafter = fake_model(replace(config, num_layers=max(1, num_layers // 4)), attention)
    defaults = {
        "gamma": 4,
        "budget": 512,
        "num_sink": 4,
        "refresh": 2,
        "generate_len": 96,
        "prefill_chunk": 128,
    }
    return new_engine(
        target, draft, policy=policy, draft_model=drafter, ignore_eos=False, **(defaults | options)
    )


def prefilled(engine: NativeEngine, rows: int = 4, context: int = 2048) -> Batch:
    """A batch whose prefill is simulated, and each of whose rounds has run once, as before a
    capture.
    """
    batch = engine.open([[0] * context] * rows)
    decoder, draft = batch.decoder, batch.draft
    decoder.simulate_prefill()
    decoder.restart()
    draft.prefill(decoder.state, lambda _: None)
    decoder.prefilled = draft
    for phase in range(len(draft.phases)):
        decoder.round(draft, draft.gamma, phase)
    return batch


def rounds(batch: Batch, recording: Recording) -> Seen:
    """A round of each phase, its operators recorded under the part of the round that they belong
    to.
    """
    decoder, draft = batch.decoder, batch.draft
    recording.name_calls(draft, propose="propose", commit="draft commit")
    recording.name_calls(decoder, verify="verify", accept="accept")
    recording.name_calls(decoder.state, commit="state commit")
    recording.name_calls(decoder.cache, commit="cache commit")
    with recording.of() as seen:
        for phase in range(len(draft.phases)):
            decoder.round(draft, draft.gamma, phase)
    return seen
