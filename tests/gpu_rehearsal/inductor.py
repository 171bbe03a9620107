"""Code that torch.compile would emit for an absent GPU: the Triton kernels around each matmul, and
their launches.

with pretended_gpu(), FakeTensorMode():
    source = emitted(layer.before_attention, arguments)
names, tuners = kernels(source), autotuners(source)
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.gpu_rehearsal.compile import GPUS

ACTIVE = "_active"  # where Triton keeps the driver


def compiling_driver(capability: int) -> SimpleNamespace:
    """What Triton asks the driver of a GPU before it compiles."""
    gpu = GPUS[capability]
    found = {"max_shared_mem": gpu.program_shared, "multiprocessor_count": gpu.sms}
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: found),
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )


def _properties(capability: int) -> SimpleNamespace:
    gpu = GPUS[capability]
    return SimpleNamespace(
        name=gpu.name, major=capability // 10, minor=capability % 10, multi_processor_count=gpu.sms,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=32 * gpu.warps, max_threads_per_block=1024,  # noqa: E501
        warp_size=32, total_memory=80 << 30, shared_memory_per_block=48 << 10, L2_cache_size=gpu.l2,
        shared_memory_per_block_optin=gpu.program_shared, shared_memory_per_multiprocessor=gpu.shared,  # noqa: E501
        gcnArchName=f"sm_{capability}", memory_clock_rate=2619000, memory_bus_width=5120, clock_rate=1980000,  # noqa: E501
        is_integrated=0, is_multi_gpu_board=0, uuid="0", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,  # noqa: E501
    )  # fmt: skip


@contextmanager
def pretended_gpu(capability: int = 90) -> Iterator[None]:
    """Make torch.compile generate code for a GPU. Leans on Inductor's insides: skips where they
    have other names.
    """
    try:
        import torch._inductor.fx_passes.fuse_attention as attention_patterns
        import torch._inductor.fx_passes.misc_patterns as other_patterns
        import torch._inductor.fx_passes.pad_mm as padding
        import torch.utils._triton as probes
        from torch._dynamo.device_interface import CudaInterface
        from triton.runtime.driver import driver
    except ImportError as error:
        pytest.skip(f"this PyTorch's Inductor is built in another way: {error}")
    found = _properties(capability)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": found,  # noqa: E501
        "get_device_capability": (found.major, found.minor), "get_device_name": found.name, "is_bf16_supported": True,  # noqa: E501
        "_lazy_init": None, "is_initialized": False, "_exchange_device": 0, "_maybe_exchange_device": 0,  # noqa: E501
        "synchronize": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,  # noqa: E501
    }  # fmt: skip
    caches = [
        getattr(probes, name)
        for name in ("has_triton", "triton_backend", "triton_hash_with_backend")
    ]
    with ExitStack() as stack:

        def answer(owner: Any, name: str, value: Any, wrap: Callable = lambda call: call) -> None:
            try:
                stack.enter_context(patch.object(owner, name, wrap(lambda *_, **__: value)))
            except AttributeError as error:
                pytest.skip(f"this PyTorch is built in another way: {error}")

        for name, value in answers.items():
            answer(torch.cuda, name, value)
        for name in ("current_device", "device_count", "get_device_properties"):
            answer(CudaInterface, name, answers[name], staticmethod)
        for name in ("current_device", "get_device_properties"):
            answer(CudaInterface.Worker, name, answers[name], staticmethod)
        answer(CudaInterface, "get_raw_stream", 0, staticmethod)
        for owner, name in ((attention_patterns, "_sfdp_init"), (padding, "_pad_mm_init")):
            answer(owner, name, None)  # they run kernels to learn patterns
        answer(other_patterns, "_misc_patterns_init", None)
        stack.enter_context(patch.object(driver, ACTIVE, compiling_driver(capability)))
        settings = {
            "force_disable_caches": True,
            "compile_threads": 1,
            "joint_graph_constant_folding": False,
        }
        stack.enter_context(torch._inductor.config.patch(settings))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


class _Emitted(Exception):
    """Ends a call once its source is known: there is nothing that could run it."""


def emitted(function: Callable, arguments: tuple) -> str:
    """Return the source that torch.compile emits for `function`, which may be compiled already, on
    fake tensors.
    """
    return emitted_with_inputs(function, arguments)[0]


def emitted_with_inputs(function: Callable, arguments: tuple) -> tuple[str, list[Tensor]]:
    """Return the source that torch.compile emits, and the fake tensors that its `call` would
    get.
    """
    from torch._inductor.graph import GraphLowering

    if not hasattr(GraphLowering, "_compile_to_module_lines"):
        pytest.skip("this PyTorch's Inductor turns its source into a module in another way")
    sources: list[str] = []
    inputs: list[Tensor] = []

    def call(args: list[Tensor]) -> None:
        inputs.extend(args)
        raise _Emitted

    def keep(self: Any, code: Any) -> SimpleNamespace:
        sources.append(code.value)
        self.cache_key, self.cache_path, self.cache_linemap = "", "", []
        return SimpleNamespace(call=call, __file__="")

    with patch.object(GraphLowering, "_compile_to_module_lines", keep):
        torch._dynamo.reset()
        with suppress(_Emitted):
            function(*arguments)
    return sources[-1], inputs


def kernels(source: str) -> dict[str, str]:
    """Return the Triton kernels of a compiled function: names, and sources of their modules."""
    return dict(
        re.findall(
            r"(\w+) = async_compile\.triton\('\w+', '''\n(.*?)''', device_str='cuda'\)",
            source,
            re.S,
        )
    )


def calls(source: str) -> list[str]:
    """Return what a compiled function launches, in order: kernels as `NAME.run`, and the rest by
    their names.
    """
    body = source[source.index("def call(") :]
    return re.findall(r"(extern_kernels\.\w+|\w+\.run|torch\.ops\.[\w.]+|aten\.[\w.]+)\(", body)


def autotuners(source: str) -> dict[str, Any]:
    """Return Inductor's autotuner of each kernel, within `pretended_gpu`: `configs` are what it
    would choose among, `mutated_arg_names` what it writes in place.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    with patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        return {
            name: getattr(PyCodeCache.load(module), name)
            for name, module in kernels(source).items()
        }
