"""`magicdec doctor`: check a machine before its first run, and describe it for a bug report.

Exit code 0 if everything that is there works, 1 otherwise. A missing GPU, an optional library that is not installed or
a server that cannot be reached is a note, not a failure. Nothing in the output names a user, a host or a folder.
"""

import argparse
import os
import platform
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from magicdec import fingerprint, threads
from magicdec.attention import choice
from magicdec.attention.base import Attention, Shape
from magicdec.costmodel.hardware import device_in
from magicdec.decoding.timers import Stopwatch
from magicdec.errors import in_one_line
from magicdec.measure import ceilings
from magicdec.measure.memory import available_bytes
from magicdec.measure.system import cpu_name
from magicdec.scenarios.ranks import on_ranks
from magicdec.tracking.cells import markdown_table, new_table
from magicdec.units import GIB
from magicdec.version import VERSION

OK, NOTE, FAILED = "ok", "note", "FAILED"
STYLES = {OK: "green", NOTE: "yellow", FAILED: "bold red"}
PACKAGES = (
    *("torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python", "torchao", "transformers"),
    *("hydra-core", "omegaconf", "wandb", "numpy"),
)
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
HEAD_DIM, KV_HEADS, GROUP, CONTEXT = 128, 2, 4, 2048
NEW_TOKENS = (1, 5, 64)  # decode, verify, a chunk of a prefill
WINDOW = 512
DRIVER = Path("/proc/driver/nvidia/version")
SLOW = 0.6  # of the datasheet; healthy GPUs reach 0.75 to 0.95
ALL_REDUCED = 1 << 26  # bytes
NCCL_TIMEOUT_S = 120.0
WANDB_TIMEOUT_S = 3.0
LITTLE_DISK = 5 * GIB


class Finding(NamedTuple):
    """One line of the table."""

    status: str
    check: str
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print the table, and return the exit code."""
    parser = argparse.ArgumentParser("magicdec doctor", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--markdown", action="store_true", help="print the table to paste into a bug report")
    options = parser.parse_args(arguments)
    progress = Console(stderr=True)
    with progress.status("checking, about half a minute"):
        findings = [Finding(status, check, without_places(text)) for status, check, text in examine()]
    if options.markdown:
        print(markdown_table(("", "check", "finding"), findings), end="")
    else:
        table = new_table("", "check", "finding", num_words=3)
        for status, check, text in findings:
            table.add_row(Text(status, STYLES[status]), Text(check), Text(text))
        Console().print(table)
    num_failed = sum(finding.status == FAILED for finding in findings)
    if not options.markdown:
        print(f"Checks that failed: {num_failed}." if num_failed else "This machine is ready.")
        print("For a bug report, paste the output of: magicdec doctor --markdown")
    return 1 if num_failed else 0


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks. An exception within a check is its failure."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks: dict[str, Callable[[torch.device], Iterator[Finding]]] = {
        "versions": versions,
        "processor": processor,
        "GPU": gpus,
        "attention": attention,
        "speed": speed,
        "NCCL": nccl,
        "disk": disk,
        "W&B": wandb_server,
    }
    for name, check in checks.items():
        try:
            yield from check(device)
        except Exception as error:
            yield Finding(FAILED, name, in_one_line(error))


def versions(device: torch.device) -> Iterator[Finding]:
    """Report the versions of magicdec, Python and the libraries that decide results."""
    source = fingerprint.of_code(Path(__file__).parent)
    yield Finding(OK, "magicdec", f"{VERSION}, source {source}")
    yield Finding(OK, "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    yield Finding(OK, "packages", ", ".join(found))


def processor(device: torch.device) -> Iterator[Finding]:
    """Report the processor, its threads and the memory."""
    text = f"{cpu_name()}, {os.cpu_count()} logical processors, PyTorch threads: {torch.get_num_threads()}"
    yield Finding(OK, "processor", f"{text}; {threads.settings()}")
    yield Finding(OK, "memory", f"{available_bytes(torch.device('cpu')) / GIB:.1f} GiB available")


def gpus(device: torch.device) -> Iterator[Finding]:
    """Report the GPUs and the driver. A driver without a usable GPU is a failure."""
    driver = DRIVER.read_text().split("\n")[0] if DRIVER.exists() else ""
    version = next((word for word in driver.split() if word[0].isdigit()), "")
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            known = torch.cuda.get_device_properties(index)
            memory, capability = f"{known.total_memory / GIB:.0f} GiB", f"sm_{known.major}{known.minor}"
            where = f"CUDA {torch.version.cuda}, driver {version or 'unknown'}"
            yield Finding(OK, f"GPU {index}", f"{known.name}, {memory}, {capability}, {where}")
    elif version:
        hidden = "sees no GPU (CUDA_VISIBLE_DEVICES, or too new)"
        why = "is built without CUDA" if torch.version.cuda is None else hidden
        remedy = "install a build for this driver (pytorch.org/get-started/locally)"
        yield Finding(FAILED, "GPU", f"driver {version} is loaded, but PyTorch {torch.__version__} {why}; {remedy}")
    else:
        yield Finding(NOTE, "GPU", "none found; runs use the CPU (hardware=cpu)")


def attention(device: torch.device) -> Iterator[Finding]:
    """Compare every backend that is for this kind of device with a plain softmax; say why others cannot be used."""
    dtype = DTYPES[device.type]
    for name in choice.BACKENDS:
        try:
            backend = choice.backend(name)
            obstacle = backend.obstacle(device, dtype, HEAD_DIM)
        except ImportError as error:
            obstacle = f"cannot be imported ({error}); install it: {choice.INSTALL[name]}"
        if obstacle:
            yield Finding(NOTE, f"attention={name}", obstacle)
            continue
        try:
            with Stopwatch(device) as watch:
                worst = max_error(backend(), device, dtype)
        except Exception as failure:
            yield Finding(FAILED, f"attention={name}", in_one_line(failure))
            continue
        bound = TOLERANCES[dtype]
        status = OK if worst <= bound else FAILED  # a NaN fails, too
        text = f"largest error {worst:.1g} of at most {bound:g} in {str(dtype).removeprefix('torch.')}"
        yield Finding(status, f"attention={name}", f"{text}; {watch.seconds:.1f} s with compilation")
    yield Finding(OK, "attention=auto", choice.choose("auto", device, dtype, [HEAD_DIM])[1])


def max_error(backend: Attention, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference from softmax attention: decode, verify and prefill, each over all slots, within a
    window, over selected slots (all of them, out of order), and with scores.
    """
    errors = []
    for num_new in NEW_TOKENS:
        generator = torch.Generator().manual_seed(num_new)
        q_BTHD = torch.randn(3, num_new, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
        k_BKSD, v_BKSD = torch.randn(2, 3, KV_HEADS, CONTEXT + 16, HEAD_DIM, generator=generator)
        indices_BKN = torch.randperm(CONTEXT + 16, generator=generator).expand(3, KV_HEADS, -1).to(device)
        q, k, v = (x.to(device, dtype) for x in (q_BTHD, k_BKSD, v_BKSD))
        seqlens_B = torch.tensor([num_new, CONTEXT // 2, CONTEXT], dtype=torch.int32, device=device)
        shape = Shape(num_new, k.shape[2], GROUP, dtype)
        plan, windowed = (backend.plan(seqlens_B, shape, window) for window in (None, WINDOW))
        right, scores_BKS = softmax_attention(q, k, v, seqlens_B)
        scored, received_BKS = backend.attend_scored(q, k, v, plan)
        pairs = [
            (backend.attend(q, k, v, plan), right),
            (backend.attend(q, k, v, plan, indices_BKN), right),
            (scored, right),
            (received_BKS, scores_BKS[..., : received_BKS.shape[-1]]),
            (backend.attend(q, k, v, windowed), softmax_attention(q, k, v, seqlens_B, WINDOW)[0]),
        ]
        errors += [(ours.float() - theirs).abs().max() for ours, theirs in pairs]
    return float(torch.stack(errors).max())  # NaN if there is one


def softmax_attention(
    q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, seqlens_B: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention in fp32 by its definition, and the weights that each slot receives (B, K, S)."""
    T, S = q_BTHD.shape[1], k_BKSD.shape[2]
    q_BKGTD = q_BTHD.float().transpose(1, 2).unflatten(1, (k_BKSD.shape[1], -1))
    own_BT1 = (seqlens_B[:, None] - T + torch.arange(T, device=seqlens_B.device))[..., None]
    slot_S = torch.arange(S, device=seqlens_B.device)
    hidden_BTS = (slot_S > own_BT1) | (slot_S <= own_BT1 - (window or S))
    scores_BKGTS = q_BKGTD @ k_BKSD.float()[:, :, None].mT * q_BTHD.shape[-1] ** -0.5
    weights_BKGTS = scores_BKGTS.masked_fill(hidden_BTS[:, None, None], float("-inf")).softmax(-1)
    out_BKGTD = weights_BKGTS @ v_BKSD.float()[:, :, None]
    return out_BKGTD.flatten(1, 2).transpose(1, 2), weights_BKGTS.sum((2, 3))


def speed(device: torch.device) -> Iterator[Finding]:
    """Measure bandwidth and matmul rate. On a GPU that the cost model knows, compare them with the datasheet."""
    dtype = DTYPES[device.type]
    known = device_in(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    bandwidth, rate = ceilings.read_bandwidth(device), ceilings.matmul_rate(device, dtype)
    name = f"matmul {str(dtype).removeprefix('torch.')}"
    unit, unit_name = (1e12, "TFLOP/s") if device.type == "cuda" else (1e9, "GFLOP/s")
    figures = [
        ("bandwidth", bandwidth, 1e9, "GB/s", known.bandwidth if known else 0.0),
        (name, rate, unit, unit_name, known.flops if known else 0.0),
    ]
    for check, value, unit, unit_name, sheet in figures:
        text, slow = f"{value / unit:.3g} {unit_name}", value < SLOW * sheet
        if known:
            text += f", {value / sheet:.0%} of the {sheet / unit:,.0f} in the datasheet of {known.name}"
        if slow:
            text += "; is another process using the GPU, or is it throttled?"
        yield Finding(NOTE if slow else OK, check, text)


def nccl(device: torch.device) -> Iterator[Finding]:
    """Sum a tensor over all GPUs, a process each."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        text = "not needed with one GPU" if count else "not needed without GPUs"
        yield Finding(NOTE, "NCCL", f"{text} (hardware.tensor_parallel=1)")
        return
    answers: list[float | Exception] = []

    def work() -> None:
        try:
            answers.append(on_ranks(count, "cuda", ceilings.all_reduce_rate, ALL_REDUCED))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, daemon=True)  # a broken link makes NCCL wait for ever
    thread.start()
    thread.join(NCCL_TIMEOUT_S)
    answer = answers[0] if answers else TimeoutError(f"no answer within {NCCL_TIMEOUT_S:.0f} s; try NCCL_P2P_DISABLE=1")
    if isinstance(answer, Exception):
        yield Finding(FAILED, "NCCL", in_one_line(answer))
    else:
        yield Finding(OK, "NCCL", f"{count} GPUs sum {ALL_REDUCED >> 20} MiB at {answer / 1e9:.3g} GB/s a GPU")


def disk(device: torch.device) -> Iterator[Finding]:
    """Report the free space for runs, which are small, and for checkpoints, which are not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for name, folder in (("this folder", Path.cwd()), ("Hugging Face's cache", Path(HF_HUB_CACHE))):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        yield Finding(OK if free > LITTLE_DISK else NOTE, "disk", f"{free / GIB:,.0f} GiB free for {name}")


def wandb_server(device: torch.device) -> Iterator[Finding]:
    """Ask W&B's server for a sign of life. Runs are recorded without it."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(server, timeout=WANDB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # an answer, too
        pass
    except (OSError, ValueError) as error:
        why = f"the server cannot be reached ({type(error).__name__})"
        yield Finding(NOTE, "W&B", f"{why}; runs are stored here, and magicdec sync sends them later")
        return
    yield Finding(OK, "W&B", "the server answers; wandb.mode=online sends runs at once")


def without_places(text: str) -> str:
    """Return the text without the paths of this machine, which may name users and projects."""
    for folder, name in ((sys.prefix, "$PREFIX"), (str(Path.cwd()), "."), (str(Path.home()), "~")):
        if len(folder) > 1:
            text = text.replace(folder, name)
    return text


if __name__ == "__main__":
    sys.exit(main())
