"""`magicdec doctor`: check a machine before its first run, and describe it for a bug report.

Exit code 0 if everything that is there works, 1 otherwise. A missing GPU, an optional library that
is not installed or a server that cannot be reached is a note, not a failure. Nothing in the output
names a user, a host or a folder.
"""

import argparse
import os
import platform
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from rich.text import Text

from magicdec import threads
from magicdec.attention import backends
from magicdec.attention.definition import HEAD_DIM, TOLERANCES, max_error
from magicdec.config.load import compose
from magicdec.config.registry import BACKENDS
from magicdec.costmodel.hardware import device_in
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.native import warm_up
from magicdec.engine.output_audit import audit
from magicdec.errors import UserError, exit_code, in_one_line
from magicdec.measure import ceilings
from magicdec.measure.memory_use import available_bytes
from magicdec.measure.system import Interference, cpu_name, driver_version
from magicdec.planning import build
from magicdec.planning.as_draft import examine_pair, read_description
from magicdec.planning.before_download import examine as examine_model
from magicdec.planning.resolve import resolve
from magicdec.scenarios.ranks import on_ranks
from magicdec.tracking.cells import markdown_table, new_table
from magicdec.tracking.console import Console
from magicdec.tracking.progress import Stage
from magicdec.tracking.software import PACKAGE_HASH
from magicdec.units import GIB
from magicdec.version import VERSION

OK, NOTE, FAILED = "ok", "note", "FAILED"
STYLES = {OK: "green", NOTE: "yellow", FAILED: "bold red"}
PACKAGES = (
    "torch",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flashinfer-python",
    "torchao",
    "transformers",
    "hydra-core",
    "omegaconf",
    "wandb",
    "numpy",
)
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
SMALL = ("batch.size=2", "batch.context_len=256", "batch.generate_len=16", "cache.budget=64")
SLOW = 0.6  # of the datasheet; healthy GPUs reach 0.75 to 0.95
ALL_REDUCED = 1 << 26  # bytes
STEP_VALUES = 64 * 4096  # summed by a decode step of 64 rows of an 8B model
RANKS_S = 120.0
WANDB_TIMEOUT_S = 3.0
LITTLE_DISK = 5 * GIB


class Finding(NamedTuple):
    """One line of the table."""

    status: str
    check: str
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, or describe a model; print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        "magicdec doctor", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table to paste into a bug report"
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER_OR_CONFIG",
        help="say instead what a model's config.json (a file, a folder, or org/name) will do here",
    )
    parser.add_argument(
        "--draft",
        metavar="FOLDER_OR_CONFIG",
        help="and what another model would do as its draft",
    )
    options = parser.parse_args(arguments)
    if options.draft and not options.model:
        parser.error("--draft needs the target: --model FOLDER_OR_CONFIG")
    if options.model:
        return exit_code(lambda: describe_model(options.model, options.draft, options.markdown))
    with Console(stderr=True).status("checking, about half a minute") as shown:
        examined = examine(lambda check: shown.update(f"checking, about half a minute: {check}"))
        findings = [
            Finding(status, check, without_places(text)) for status, check, text in examined
        ]
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


def describe_model(path: str, draft_path: str | None = None, markdown: bool = False) -> int:
    """Print what a model will do here, and another one as its draft, before weights are downloaded.

    Raise UserError for a model that can be neither run nor predicted, with the reason.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = read_description(path, "--model")
    findings = [*examine_model(model, device, DTYPES[device.type])]
    if draft_path:
        findings += examine_pair(model, read_description(draft_path, "--draft"))
    if markdown:
        print(markdown_table(("", "finding"), findings), end="")
        return 0
    table = new_table("", "finding", num_words=2)
    for check, text in findings:
        table.add_row(Text(check), Text(text))
    Console().print(table)
    return 0


def examine(begin: Callable[[str], None] | None = None) -> Iterator[Finding]:
    """Yield the findings of all checks. An exception within a check is its failure. `begin` is
    called with the name of each check before it runs.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks: dict[str, Callable[[torch.device], Iterator[Finding]]] = {
        "versions": versions,
        "processor": processor,
        "GPU": gpus,
        "attention": attention,
        "round": rounds,
        "speed": speed,
        "NCCL": sums,
        "disk": disk,
        "W&B": wandb_server,
    }
    for name, check in checks.items():
        if begin is not None:
            compiles = ", whose kernels compile at their first use" if name == "attention" else ""
            begin(f"{name}{compiles}")
        try:
            yield from check(device)
        except Exception as error:
            yield Finding(FAILED, name, in_one_line(error))


def versions(device: torch.device) -> Iterator[Finding]:
    """Report the versions of magicdec, Python and the libraries that decide results."""
    yield Finding(OK, "magicdec", f"{VERSION}, source {PACKAGE_HASH}")
    yield Finding(
        OK, "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    packages = []
    for package in PACKAGES:
        try:
            packages.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            packages.append(f"no {package}")
    yield Finding(OK, "packages", ", ".join(packages))


def processor(device: torch.device) -> Iterator[Finding]:
    """Report the processor, its threads and the memory."""
    text = (
        f"{cpu_name()}, {os.cpu_count()} logical processors, PyTorch threads:"
        f" {torch.get_num_threads()}"
    )
    yield Finding(OK, "processor", f"{text}; {threads.settings()}")
    yield Finding(OK, "memory", f"{available_bytes(torch.device('cpu')) / GIB:.1f} GiB available")


def gpus(device: torch.device) -> Iterator[Finding]:
    """Report the GPUs and the driver. A driver without a usable GPU is a failure."""
    version = driver_version()
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / GIB:.0f} GiB"
            capability = f"sm_{properties.major}{properties.minor}"
            where = f"CUDA {torch.version.cuda}, driver {version or 'unknown'}"
            yield Finding(OK, f"GPU {index}", f"{properties.name}, {memory}, {capability}, {where}")
    elif version:
        hidden = "sees no GPU (CUDA_VISIBLE_DEVICES, or too new)"
        why = "is built without CUDA" if torch.version.cuda is None else hidden
        remedy = "install a build for this driver (pytorch.org/get-started/locally)"
        yield Finding(
            FAILED,
            "GPU",
            f"driver {version} is loaded, but PyTorch {torch.__version__} {why}; {remedy}",
        )
    else:
        yield Finding(NOTE, "GPU", "none found; runs use the CPU (hardware=cpu)")


def attention(device: torch.device) -> Iterator[Finding]:
    """Compare every backend for this kind of device with a plain softmax; report why others cannot
    be used.
    """
    dtype = DTYPES[device.type]
    for name in BACKENDS:
        if obstacle := backends.obstacle(name, device, dtype, [HEAD_DIM]):
            yield Finding(NOTE, f"attention={name}", obstacle)
            continue
        backend = BACKENDS[name].work
        try:
            with Stopwatch(device) as watch:
                worst = max_error(backend(), device, dtype)
        except Exception as failure:
            yield Finding(FAILED, f"attention={name}", in_one_line(failure))
            continue
        bound = TOLERANCES[dtype]
        status = OK if worst <= bound else FAILED  # a NaN fails too
        text = (
            f"largest error {worst:.1g} of at most {bound:g} in {str(dtype).removeprefix('torch.')}"
        )
        parts = [
            *filter(None, [backend.version()]),
            text,
            f"{watch.seconds:.1f} s with compilation",
        ]
        yield Finding(status, f"attention={name}", "; ".join(parts))
    _, reason = backends.choose("auto", device, dtype, [HEAD_DIM])
    yield Finding(OK, "attention=auto", reason.removeprefix("attention=auto: "))


def rounds(device: torch.device) -> Iterator[Finding]:
    """Decode with the bundled model as a run does: on a GPU with compiled layers and captured
    rounds.
    """
    plan = resolve(compose([*SMALL, f"hardware.device={device.type}"]))
    c = plan.config
    with Stopwatch(device) as watch:
        engine = build.engine(plan, SimpleNamespace(task=Stage))
        batch = engine.open(build.prompts(plan, build.tokenizer(plan)).tokens)
        batch.decoder.prefill(engine.prefill_chunk)
        warm_up(batch)
        plain = batch.decoder.generate()
        fast = batch.decoder.generate(batch.draft)
    verdict = audit(batch.decoder, plain.tokens, fast.tokens)
    how = [f"attention={c.attention}", *(["layers compiled"] if c.hardware.compile else [])]
    how += ["rounds captured"] if engine.hardware.captures else []
    tokens = (
        "the tokens are those without a draft"
        if verdict.passed
        else "the tokens differ from those without a draft"
    )
    yield Finding(
        OK if verdict.passed else FAILED,
        "round",
        f"{', '.join(how)}; {tokens}; {watch.seconds:.1f} s",
    )
    if device.type == "cuda" and not c.hardware.compile:
        yield Finding(NOTE, "torch.compile", plan.reasons)


def speed(device: torch.device) -> Iterator[Finding]:
    """Measure bandwidth and matmul rate, and the work of other programs meanwhile. On a GPU that
    the cost model knows, compare the rates with the datasheet.
    """
    dtype = DTYPES[device.type]
    listed = device_in(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    interference = Interference(device)
    bandwidth = ceilings.read_bandwidth(device)
    rate = ceilings.matmul_rate(device, dtype)
    name = f"matmul {str(dtype).removeprefix('torch.')}"
    unit, unit_name = (1e12, "TFLOP/s") if device.type == "cuda" else (1e9, "GFLOP/s")
    figures = [
        ("bandwidth", bandwidth, 1e9, "GB/s", listed.bandwidth if listed else 0.0),
        (name, rate, unit, unit_name, listed.flops if listed else 0.0),
    ]
    for check, value, unit, unit_name, sheet in figures:
        text = f"{value / unit:.3g} {unit_name}"
        slow = value < SLOW * sheet
        if listed:
            share = f"{value / sheet:.0%} of the {sheet / unit:,.0f}"
            text += f", {share} in the datasheet of {listed.name}"
        if slow:
            text += "; is another process using the GPU, or is it throttled?"
        yield Finding(NOTE if slow else OK, check, text)
    if disturbed := interference.description():
        yield Finding(NOTE, "other work", f"{disturbed} meanwhile: stop them before you measure")


def sums(device: torch.device) -> Iterator[Finding]:
    """Sum over all GPUs, a process each: a large tensor, and a decode step's by NCCL and in
    symmetric memory.
    """
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        text = "not needed with one GPU" if count else "not needed without GPUs"
        yield Finding(NOTE, "NCCL", f"{text} (hardware.tensor_parallel=1)")
        return
    large = f"{ALL_REDUCED >> 20} MiB"
    small = f"{2 * STEP_VALUES >> 10} KiB"

    def rate(bytes_per_s: float) -> str:
        return f"{count} GPUs sum {large} at {bytes_per_s / 1e9:.3g} GB/s a GPU"

    def seconds(duration: float) -> str:
        return f"{count} GPUs sum {small} in {duration * 1e6:.0f} us, in a captured graph"

    yield _on_ranks(count, "NCCL", rate, ceilings.all_reduce_rate, ALL_REDUCED)
    for way in ("nccl", "symmetric"):
        yield _on_ranks(
            count, f"all_reduce={way}", seconds, ceilings.captured_sum_s, way, STEP_VALUES
        )


def _on_ranks(
    count: int,
    check: str,
    shown: Callable[[float], str],
    function: Callable[..., float],
    *arguments: object,
) -> Finding:
    """Return the ranks' measurement as `shown`, or the reason for its failure: NCCL hangs on a
    broken link.
    """
    try:
        return Finding(
            OK, check, shown(on_ranks(count, "cuda", function, *arguments, time_limit_s=RANKS_S))
        )
    except UserError as error:
        return Finding(NOTE, check, str(error))
    except TimeoutError as error:
        return Finding(FAILED, check, f"{error}; try NCCL_P2P_DISABLE=1")
    except Exception as error:
        return Finding(FAILED, check, in_one_line(error))


def disk(device: torch.device) -> Iterator[Finding]:
    """Report the free space for runs, which are small, and for checkpoints, which are not."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for name, folder in (("this folder", Path.cwd()), ("Hugging Face's cache", Path(HF_HUB_CACHE))):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        yield Finding(
            OK if free > LITTLE_DISK else NOTE, "disk", f"{free / GIB:,.0f} GiB free for {name}"
        )


def wandb_server(device: torch.device) -> Iterator[Finding]:
    """Check that W&B's server answers. Runs are recorded without it."""
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(server, timeout=WANDB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # an answer, too
        pass
    except (OSError, ValueError) as error:
        why = f"the server cannot be reached ({type(error).__name__})"
        yield Finding(
            NOTE, "W&B", f"{why}; runs are stored here, and magicdec sync sends them later"
        )
        return
    yield Finding(OK, "W&B", "the server answers; wandb.mode=online sends runs at once")


def without_places(text: str) -> str:
    """Return the text without the paths of this machine, which may name users and projects."""
    home = os.path.expanduser("~")  # "~" itself where there is none
    for folder, name in ((sys.prefix, "$PREFIX"), (str(Path.cwd()), "."), (home, "~")):
        if len(folder) > 1:
            text = text.replace(folder, name)
    return text


if __name__ == "__main__":
    sys.exit(main())
