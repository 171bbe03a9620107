"""The results of `vllm bench forward` (vLLM 0.33 and later), next to steps timed from outside.

    vllm bench forward --model MODEL --kv-len-jitter 0 --exclude-drafter \\
        --case decode=16*1@4096 --case verify=16*4@4096:3 --output-json forward.json

It runs exact batches through the model as CUDA graphs: without scheduling, sampling and acceptance.
A server's step takes longer by what it does around the model.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from magicdec.errors import UserError
from magicdec.inputs.others import from_json, read_regular

COMMAND = "vllm bench forward --exclude-drafter --output-json FILE"
NEAR_CONTEXT = 0.1  # of a point's context, by which that of its case may differ


class ForwardTime(NamedTuple):
    """The time of the target's forward over a batch of decode steps or of verifications."""

    batch: int
    context: float  # tokens of a request before the step, in the mean
    gamma: int  # 0: a decode step
    ms: float


def read_forward(path: Path) -> list[ForwardTime]:
    """Return the times of a results file. Prefills, mixed batches and forwards with a drafter are
    left out.

    Raise UserError if the file cannot be read, or has no time of a decode step or a verification.
    """
    try:
        cases = from_json(read_regular(path))
        times = list(filter(None, map(_forward_time, cases)))
    except OSError as error:
        raise UserError(f"scenario.forward={path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise UserError(f"scenario.forward={path}: not a file of {COMMAND}") from None
    if not times:
        raise UserError(
            f"scenario.forward={path}: no decode step or verification of the target alone; write it"
            f" with {COMMAND} --case verify=16*4@4096:3"
        )
    return times


def _forward_time(case: Mapping[str, Any]) -> ForwardTime | None:
    requests = case["requests"]
    ms = case["median_us"] / 1e3
    query_lens = {request["query_len"] for request in requests}
    gammas = {request["num_draft_tokens"] for request in requests}
    contexts = [request["kv_len"] - request["query_len"] for request in requests]
    gamma = min(gammas)
    is_step = gammas == {gamma} and query_lens == {1 + gamma} and min(contexts) > 0
    is_alone = case["ranks"][0].get("timing_scope", "target_only") == "target_only"
    return ForwardTime(len(requests), fmean(contexts), gamma, ms) if is_step and is_alone else None


def with_forward(
    lines: Iterable[Mapping[str, Any]], times: Iterable[ForwardTime]
) -> list[dict[str, Any]]:
    """Return the lines of a profile with `forward/target_decode_ms` and `forward/verify_ms`, where
    there is a time of the same batch and gamma at nearly the same context.
    """
    times = list(times)
    extended = []
    for line in lines:
        context = line["context_len"] + line.get("decoded", 0.0)
        near = [
            time
            for time in times
            if time.batch == line["batch_size"]
            and abs(time.context - context) <= NEAR_CONTEXT * context
        ]
        near.sort(key=lambda time: abs(time.context - context), reverse=True)  # the nearest wins
        steps = {0: "target_decode", line.get("gamma"): "verify"}
        forward = {
            f"forward/{steps[time.gamma]}_ms": time.ms for time in near if time.gamma in steps
        }
        extended.append({**line, **forward})
    return extended
