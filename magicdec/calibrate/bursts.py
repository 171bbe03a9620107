"""Time a server with OpenAI's API: bursts of requests that decode together, at each number of users
and context.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import NamedTuple, cast

from magicdec.calibrate.steps import ELEMENT_BYTES, Measured, measured, rates_of, this_machine
from magicdec.config.load import compose, override
from magicdec.config.scenario_settings import Serve
from magicdec.costmodel.hardware import CPU
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError, to_stderr
from magicdec.peers.base import Servable
from magicdec.peers.endpoint import PROBE_TOKENS, Endpoint
from magicdec.peers.openai import is_loopback
from magicdec.peers.steady import MIN_ROUNDS, steady
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.scenarios.diagnosed import diagnosis_of, setup_of_profile
from magicdec.scenarios.outside import CLIENT_LATE, Bursts, prepare
from magicdec.scenarios.peer import load
from magicdec.serving.request import Params
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling

REPEATS = 3


class Timed(NamedTuple):
    """Medians over bursts."""

    first_ms: float  # to the first token, the fastest
    step_ms: float  # of a decode step, while all requests decode
    decoded: float  # tokens of a request in the middle of that time


def measure_server(url: str, overrides: Sequence[str]) -> Measured:
    """Time the server at an address at scenario.concurrencies x scenario.length_shares of
    batch.context_len.

    A server that speculates needs one that does not (engine.baseline_url), which is timed; then
    both are profiled from outside and diagnosed. Raise UserError for what engine=openai refuses,
    for a server that speculates alone, and for a machine without a datasheet.
    """
    data = [] if any(text.startswith("data=") for text in overrides) else ["data=random"]
    plan = resolve(compose(["engine=openai", override("engine.url", url), *data, *overrides]))
    hardware, rates = asdict(plan.config.hardware), None
    device_name = ""
    if hardware["name"] in ("auto", CPU) and not (hardware["bandwidth_gbs"] and hardware["tflops"]):
        if not is_loopback(url):
            raise UserError(
                f"hardware={hardware['name']}: name the server's machine, as in hardware=h200"
            )
        here = this_machine([text for text in overrides if text.startswith("hardware")])
        hardware = asdict(here.config.hardware)
        rates = rates_of(here)
        device_name = here.device_name
    dtype = hardware["dtype"] if hardware["dtype"] != "auto" else "bfloat16"
    rows, served = asyncio.run(_time_all(plan, ELEMENT_BYTES[dtype]))
    models = {plan.config.target.name: plan.target.config}
    timed = measured(rows, models, hardware, served, device_name, rates, is_served=True)
    if getattr(plan.config.engine, "baseline_url", None) is None:
        return timed
    given = ["engine=openai", "scenario=profile", override("engine.url", url), *data, *overrides]
    return timed._replace(diagnosis=_diagnosis(given, plan))


def _diagnosis(given: Sequence[str], plan: Plan) -> str:
    """Profile a server that speculates from outside, at the points of a plan for scenario=serve.
    Return the sentence.
    """
    users = sorted(set(plan.config.settings(Serve).concurrencies))
    grid = [
        override("scenario.batch_sizes", users),
        override("scenario.context_lens", _contexts(plan)),
    ]
    profile = prepare(compose([*given, *grid]))
    setup = setup_of_profile(profile)
    with progress() as bars:
        work = Bursts(profile, None, bars, build.tokenizer(profile))
        asyncio.run(work.measure_all())
    if warning := work.lateness():
        return f"{CLIENT_LATE}; {warning}"
    diagnosis = diagnosis_of(work.history, setup, profile, knows_draft=False) if setup else None
    return diagnosis.sentence if diagnosis else "nothing: no round of speculation was timed"


def _contexts(plan: Plan) -> list[int]:
    """Return the lengths of prompts, in order."""
    shares = plan.config.settings(Serve).length_shares
    longest = plan.config.batch.context_len
    return sorted({max(1, round(share * longest)) for share in shares})


async def _time_all(plan: Plan, element_bytes: float) -> tuple[list[Row], str]:
    """Return the points of a server, and its description."""
    scenario = plan.config.settings(Serve)
    batch = plan.config.batch
    target = plan.config.target.name
    tokenizer = build.tokenizer(plan)
    points = list(product(sorted(set(scenario.concurrencies)), _contexts(plan)))
    # No server has seen any of them before.
    number = 1 + REPEATS * (1 + sum(users for users, _ in points))
    prompts = iter(build.prompts(plan, tokenizer, number, batch.context_len).tokens)
    servers = cast(Servable, load(plan))
    rows = []
    async with (
        servers.serving(servers.ways[0]) as address,
        Endpoint(address, tokenizer) as endpoint,
    ):
        params = Params(batch.generate_len, Sampling.of(plan.config.sampling, 0))
        if await endpoint.learn(next(prompts), params):
            raise UserError(
                f"{address.name}: the server speculates; a calibration needs one that does not, as"
                " in engine.baseline_url=http://127.0.0.1:8001/v1"
            )
        with progress() as bars, bars.task("timing the server", total=len(points)) as task:
            short = await _time(
                endpoint, [[next(prompts)[:PROBE_TOKENS]] for _ in range(REPEATS)], params
            )
            for users, context in points:
                bursts = [[next(prompts)[:context] for _ in range(users)] for _ in range(REPEATS)]
                timed = await _time(endpoint, bursts, params) if short else None
                if short is None or timed is None:
                    to_stderr(
                        f"warning: {users} requests of {context} tokens do not decode together;"
                        " left out"
                    )
                    continue
                rows.append(_row(target, users, context, timed, short, element_bytes))
                task.advance(1)
        if not rows:
            raise UserError(
                f"{address.name}: answers have too few chunks; set batch.generate_len above"
                f" {MIN_ROUNDS}"
            )
        return rows, f"{endpoint.model} at {address.url}"


async def _time(
    endpoint: Endpoint, bursts: Sequence[Sequence[list[int]]], params: Params
) -> Timed | None:
    """Return the medians of the bursts whose requests decode together for long enough; None if none
    does.
    """
    bursts_seen = [await steady(endpoint, prompts, params) for prompts in bursts]
    timed = [Timed(burst.first_ms, burst.step_ms, burst.decoded) for burst in bursts_seen if burst]
    return Timed(*(median(values) for values in zip(*timed, strict=True))) if timed else None


def _row(
    target: str, users: int, context: int, timed: Timed, short: Timed, element_bytes: float
) -> Row:
    """Return a point as a row to fit.

    The first token of a request alone comes after its prefill, and after what the network and the
    server add. That is known from a prompt so short that its prefill takes as long as a decode
    step.
    """
    prefill_ms = timed.first_ms - short.first_ms + short.step_ms if users == 1 else None
    return Row(
        target=target,
        draft="self",
        policy="full",
        hardware="",
        context_len=round(context + timed.decoded),
        batch_size=users,
        gamma=1,
        autoregressive_ms=timed.step_ms,
        prompt_len=context,
        prefill_ms=prefill_ms if prefill_ms and prefill_ms > 0 else None,
        element_bytes=element_bytes,
    )
