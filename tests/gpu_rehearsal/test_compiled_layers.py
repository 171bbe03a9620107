"""Layers as torch.compile would emit them for a GPU: few kernels, and none whose configurations are
tried on a cache.

To try configurations of a kernel that writes in place, Inductor first copies what it writes to: a
layer's whole cache.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from magicdec.config.choices import CODE_ROWS
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup
from magicdec.decoding.state import TARGET, State
from magicdec.drafts.self import SelfSpeculation
from magicdec.models import quantize
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.verification.accept import Verdict
from tests.gpu_rehearsal.fake import LLAMA_8B, fake_cuda, fake_model
from tests.gpu_rehearsal.inductor import (
    autotuners,
    calls,
    emitted,
    emitted_with_inputs,
    pretended_gpu,
)
from tests.programs import ROOT
from tests.small import small_model


def halves(model: Transformer, num_new: int, rows: int = 24, capacity: int = 32868):
    """The halves of a model's only layer, and their arguments: memory of its device and type, not
    written.
    """
    one, layer, ops = model.config, model.layers[0], model.operators
    dtype, device = model.dtype, model.norm.weight.device
    cache = KVCache(one, rows, capacity, dtype, device)
    x = torch.empty(rows, num_new, one.hidden_size, dtype=dtype, device=device)
    cos = torch.empty(rows, num_new, 1, one.head_dim // 2, device=device)
    out = torch.empty(rows, num_new, one.num_heads, one.head_dim, dtype=dtype, device=device)
    slots = torch.empty(rows, num_new, dtype=torch.int64, device=device)
    yield (
        layer.before_attention,
        (ops, x, torch.empty_like(x), cos, torch.empty_like(cos), cache.place(0, slots)),
    )
    yield layer.after_attention, (ops, x, out)


def compiled_halves(num_new: int, rows: int = 24, quantization: str = "none", **architecture: bool):
    """What each half launches, and the autotuners of all kernels."""
    with fake_cuda(), pretended_gpu():
        model = fake_model(replace(LLAMA_8B, num_layers=1, **architecture))
        if quantization != "none":
            for name in quantize.MATRICES:
                setattr(
                    model.layers[0],
                    name,
                    quantize.coded(getattr(model.layers[0], name), quantization),
                )
        model.compile_layers()
        sources = [emitted(*half) for half in halves(model, num_new, rows)]
        launched = [
            [call for call in calls(source) if not call.startswith("aten")] for source in sources
        ]
        return launched, autotuners(sources[0]) | autotuners(sources[1])


def check_writing(tuners):
    """Check that one kernel writes keys and values, and has one configuration."""
    (writing,) = (tuner for name, tuner in tuners.items() if "index_put" in name)
    assert len(writing.mutated_arg_names) == 2
    assert len(writing.configs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_new", "architecture", "before"),
    [(1, {}, 4), (5, {}, 4), (5, {"qk_norm": True, "qkv_bias": True}, 7)],
)
def test_few_kernels_and_no_copy_of_a_cache(num_new, architecture, before):
    launched, tuners = compiled_halves(num_new, **architecture)
    assert list(map(len, launched)) == [before, 5]
    assert sum("mm" in call for part in launched for call in part) == 4
    check_writing(tuners)


def fill(memory, generator):
    """Fill memory with random numbers, and slots with those behind each row's entries."""
    for x in memory:
        if x.is_floating_point():
            x.normal_(0, 0.5, generator=generator)
        elif x.shape[1] > 1:
            x.copy_(torch.tensor([3, 17, 30])[:, None] + torch.arange(x.shape[1]))


def tensors(model, half):
    """The tensors that a half reads or writes, in an order that does not depend on the device."""
    return [x for x in [*tree_leaves(half[1]), *model.parameters()] if isinstance(x, torch.Tensor)]


def write(folder, source, config, arguments):
    """Write what `run_emitted` reads."""
    folder.mkdir()
    (folder / "source.py").write_text(source)
    (folder / "configs.json").write_text(json.dumps(config))
    save_file(
        {str(i): x.contiguous() for i, x in enumerate(arguments)}, folder / "arguments.safetensors"
    )


def interpret(folders):
    """Run what was written to folders in Triton's interpreter, in a new process: it does not mix
    with the compiler.
    """
    command = [sys.executable, "-m", "tests.gpu_rehearsal.run_emitted", *folders]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [{"hidden_size": 96}, {"hidden_size": 1536}, {"qk_norm": True, "qkv_bias": True}],
    ids=["norm at once", "norm in a loop", "norms of heads"],
)
def test_the_kernels_compute_what_pytorch_does(architecture, tmp_path):
    """In the first and the last configuration that a GPU would choose among; in float32, as the
    interpreter multiplies no bfloat16.
    """
    real, sizes = small_model(num_layers=1, **architecture), (2, 3, 40)
    compared = []
    with fake_cuda(), pretended_gpu():
        fake = fake_model(real.config, dtype=torch.float32)
        fake.compile_layers()
        for half in halves(fake, *sizes):
            source, inputs = emitted_with_inputs(*half)
            storages = [x.untyped_storage()._cdata for x in tensors(fake, half)]
            places = [storages.index(x.untyped_storage()._cdata) for x in inputs]
            compared.append((source, autotuners(source), places))
    generator, expected = torch.Generator().manual_seed(0), {}
    for number, ((source, tuners, places), half) in enumerate(
        zip(compared, halves(real, *sizes), strict=True)
    ):
        fill(memory := tensors(real, half), generator)
        for choice in (0, -1):
            config = {name: tuner.configs[choice].kwargs for name, tuner in tuners.items()}
            write(
                tmp_path / f"{number}{choice}", source, config, [memory[place] for place in places]
            )
        outputs = half[0](*half[1])
        found = {f"output {i}": x for i, x in enumerate(outputs)}
        found |= {f"argument {i}": memory[place].clone() for i, place in enumerate(places)}
        expected |= {tmp_path / f"{number}{choice}": found for choice in (0, -1)}
    interpret(expected)
    for folder, found in expected.items():
        torch.testing.assert_close(
            load_file(folder / "results.safetensors"), found, atol=1e-5, rtol=2e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers_move_what_the_cost_model_counts(quantization):
    """Up to CODE_ROWS rows codes alone; beyond, one kernel writes each decoded weight, and its
    matmul reads it.
    """
    pytest.importorskip("torchao")
    for rows, decoding in ((CODE_ROWS, 0), (CODE_ROWS + 1, 4)):
        launched, tuners = compiled_halves(1, rows, quantization)
        called = [*launched[0], *launched[1]]
        by_codes, by_weights = (
            sum(word in call for call in called) for word in ("code_matmul.default", "kernels.mm")
        )
        assert (by_codes, by_weights) == ((0, 4) if decoding else (4, 0))
        assert len(called) == 9 + decoding
        check_writing(tuners)
        setup = Setup(
            LLAMA_8B, hardware_named("H100"), rows, 4096, SelfSpeculation(quantization=quantization)
        )
        assert setup.moved_weight_bytes(rows) == setup.draft_weight_bytes + decoding


@pytest.mark.slow
def test_a_round_beside_its_layers_copies_no_tokens():
    """Three kernels that look for infinite logits up to the last accepted proposal (two sum the
    logits of each position), three that commit, all in place; no operator is left as it is.
    """
    with fake_cuda():
        state = State([[0] * 32768] * 24, 96, 5, (2,), "cuda:0")
        logits = torch.empty(24, 5, LLAMA_8B.vocab_size, dtype=torch.bfloat16, device="cuda")
        tokens = torch.empty(24, 5, dtype=torch.int64, device="cuda")
        accepted = torch.empty(24, dtype=torch.int64, device="cuda")
        with pretended_gpu():
            inspecting = emitted(torch.compile(state.inspect), (logits, TARGET, accepted))
            committing = emitted(torch.compile(state.commit), (Verdict(accepted, tokens),))
            tuners = autotuners(committing)
    assert list(map(len, map(calls, (inspecting, committing)))) == [3, 3]
    assert all(call.endswith(".run") for call in calls(inspecting) + calls(committing))
    numels = [tuner.size_hints["x"] for tuner in tuners.values()]
    assert max(numels) < state.tokens_BS.shape[1]
