"""scenario=profile on another engine, or on our own server: the times of its steps from outside.

T_T is the time of a step without speculation. A round with a draft that costs nothing is its
verification, so that it takes T_V; the round of the draft in question takes longer by gamma T_D.
Without the former the two cannot be told apart, and their sum is the time of the round.

All are timed at a steady state (peers/steady.py), as are their 95% intervals.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from magicdec.config.load import to_dict
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.config.scenario_settings import Profile
from magicdec.config.schema import Config
from magicdec.costmodel.diagnosis import Diagnosis
from magicdec.errors import UserError, to_stderr
from magicdec.measure.metrics import Metrics
from magicdec.peers.base import Servable
from magicdec.peers.endpoint import Endpoint
from magicdec.peers.lateness import late_by
from magicdec.peers.openai import is_loopback
from magicdec.peers.steady import LONGER, MIN_ROUNDS, Burst, steady
from magicdec.peers.vllm_forward import read_forward, with_forward
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.scenarios import diagnosed
from magicdec.scenarios.diagnosed import (
    diagnosis_metrics,
    diagnosis_of,
    possible,
    setup_of_profile,
    with_limits,
)
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.outside_lines import AUTOREGRESSIVE, SPECULATIVE, MeasuredPoint, lines
from magicdec.scenarios.peer import load
from magicdec.scenarios.unit_folder import UnitFolder
from magicdec.serving.request import Params
from magicdec.tracking.descriptions import described_models
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import FREE, WAYS
from magicdec.verification.sampling import Sampling

FREE_ALPHA = 0.7  # with which a free draft is accepted where there is no other to compare with
CLIENT_LATE = "cannot be judged: the client was late"
PERIOD = 32  # tokens of a prompt that repeats, so that n-grams are found


def prepare(config: Config) -> Plan:
    """Resolve a run at the largest point of the grid. Raise UserError for a file without times."""
    if forward := config.settings(Profile).forward:
        read_forward(Path(forward))
    rows, context = config.scenario.largest(config.batch)
    return resolve(replace(config, batch=replace(config.batch, size=rows, context_len=context)))


class Started(NamedTuple):
    """A server to measure: its way of decoding, its gamma, and the batches to measure there."""

    way: str
    gamma: int  # 0: it does not speculate
    batches: tuple[int, ...]

    @property
    def label(self) -> str:
        """Return the server in words."""
        words = [f"a {self.way} draft" if self.way == FREE else self.way or "as it is"]
        words += [f"gamma {self.gamma}"] if self.gamma else []
        return ", ".join([*words, f"batch {', '.join(map(str, self.batches))}"])


@dataclass(frozen=True)
class BurstUnit:
    """The steps of a server at one point of the grid."""

    asked: MeasuredPoint
    measured: MeasuredPoint  # a server may decide whether and how far it speculates
    burst: Burst
    served: str  # the model and its address


BURST_UNIT = TypeAdapter(BurstUnit)


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Time what the run lacks of scenario.batch_sizes x context_lens x gammas; a point is a line of
    the history.
    """
    forward_file = plan.config.settings(Profile).forward
    forward_times = read_forward(Path(forward_file)) if forward_file else []
    folder = UnitFolder(run, BURST_UNIT)
    work = Bursts(plan, folder, progress, build.tokenizer(plan))
    urls = getattr(plan.config.engine, "urls", {}).values()
    setup = setup_of_profile(plan, all(map(is_loopback, urls)))  # before a server is busy
    asyncio.run(work.measure_all())
    metrics: Metrics = {"device": plan.device_name, "engine/served": work.served, **plan.sources}
    if plan.config.engine.has_our_drafts:
        metrics["weights/bytes"] = plan.weight_bytes
    if warning := work.lateness():
        to_stderr(f"warning: {warning}")
    history, diagnosis = with_forward(work.history, forward_times), None
    if setup is not None:
        history = with_limits(history, setup, plan.config.speculates)
    history = possible(history)
    if setup is not None and not work.late:
        diagnosis = diagnosis_of(history, setup, plan, plan.config.speculates)
    metrics |= diagnosis_metrics(diagnosis)
    if work.late:
        metrics["diagnosis/sentence"] = CLIENT_LATE
    return Outcome(metrics, history=history, view=view(plan, work, history, diagnosis))


def view(
    plan: Plan, work: "Bursts", history: Sequence[Mapping[str, Any]], diagnosis: Diagnosis | None
) -> RenderableType:
    """Return what the terminal shows: the times of all points next to their limits, and the
    diagnosis.
    """
    described = to_dict(plan.config)
    heading = Text(f"profile from outside: {described_models(described)}", style="bold")
    window = (
        "of rounds in which all requests of a burst decode: without ramp, prefills and the last"
        " requests"
    )
    parts: list[RenderableType] = [heading, Text(f"{work.served}; {window}"), Text()]
    parts.append(diagnosed.view(history, diagnosis, plan.config.batch.generate_len))
    if work.late:
        parts += [Text(), Text(f"diagnosis: {CLIENT_LATE}", style="bold")]
    rounds = [line for line in work.history if "time/round_ms" in line]
    if rounds and not any("time/verify_ms" in line for line in rounds):
        parts.append(
            Text("T_D and T_V cannot be told apart: no draft that costs nothing was timed")
        )
    return Group(*parts)


@dataclass
class Bursts:
    """The bursts of a run so far."""

    plan: Plan
    folder: UnitFolder[BurstUnit] | None  # in which they are kept
    progress: Progress
    tokenizer: object | None
    units: list[BurstUnit] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.folder is not None:
            self.units += self.folder.units

    @property
    def by_point(self) -> dict[MeasuredPoint, Burst]:
        """Return the bursts by what was measured."""
        return {unit.measured: unit.burst for unit in self.units}

    @property
    def served(self) -> str:
        """Return the last server: its model and address."""
        return self.units[-1].served

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return a line for each point of the grid."""
        return [*lines(self.by_point)]

    @property
    def late(self) -> list[BurstUnit]:
        """Return the points at which the client was late, so that their times are wrong."""
        return [unit for unit in self.units if unit.burst.late_ms is not None]

    def lateness(self) -> str | None:
        """Return at how many points the client was late, with the remedy; None at none."""
        late = self.late
        if not late:
            return None
        mean_ms = fmean(unit.burst.late_ms or 0.0 for unit in late)
        said = late_by(mean_ms, is_single=any(unit.measured.batch == 1 for unit in late))
        return f"at {len(late)} of {len(self.units)} points {said}"

    async def measure_all(self) -> None:
        """Measure all servers that lack a point, one after another."""
        config = self.plan.config
        scenario = self.plan.config.settings(Profile)
        engine = cast(Servable, load(self.plan, gamma=max(scenario.gammas)))
        servers = [server for server in servers_of(engine, scenario) if self._missing(server)]
        room = replace(config.batch, generate_len=LONGER * config.batch.generate_len)
        roomy = replace(self.plan, config=replace(config, batch=room))
        for number, server in enumerate(servers, 1):
            what = f"profiling {server.label}, server {number} of {len(servers)}"
            with self.progress.task(what, total=len(self._missing(server))) as task:
                alpha = self._alpha(server.gamma) if engine.draws_acceptance else None
                rows = max(server.batches)
                started = load(roomy, server.gamma, num_rows=rows, free_acceptance=alpha)
                async with (
                    started.serving(server.way) as address,
                    Endpoint(address, self.tokenizer) as endpoint,
                ):
                    await self._measure(endpoint, server, engine, task.advance)
        if not self.by_point:
            raise UserError(
                f"batch.generate_len={config.batch.generate_len}: no requests decode {MIN_ROUNDS}"
                " rounds together; ask for longer answers"
            )

    def _missing(self, server: Started) -> list[MeasuredPoint]:
        """Return the points at which a server is still to be measured."""
        contexts = self.plan.config.settings(Profile).context_lens
        points = [
            MeasuredPoint(server.way, server.gamma, batch, context)
            for batch, context in product(server.batches, contexts)
        ]
        asked = {unit.asked for unit in self.units}
        return [point for point in points if point not in asked]

    async def _measure(
        self, endpoint: Endpoint, server: Started, engine: Servable, advance: Callable[[int], None]
    ) -> None:
        """Measure a server at the points that the run lacks."""
        config = self.plan.config
        params = Params(config.batch.generate_len, Sampling.of(config.sampling, 0))
        longest = max(config.settings(Profile).context_lens)
        prompts = build.prompts(self.plan, self.tokenizer, max(server.batches), longest).tokens
        speculates = await endpoint.learn(prompts[0], params)
        served = f"{endpoint.model} at {endpoint.address.url}"
        for asked in self._missing(server):
            rows = [row[: asked.context] for row in prompts[: asked.batch]]
            if asked.way == FREE and not engine.draws_acceptance:
                rows = [(row[:PERIOD] * asked.context)[: asked.context] for row in rows]
            burst = await steady(endpoint, rows, params)
            if burst is None:
                to_stderr(
                    f"warning: {asked.batch} requests of {asked.context} tokens do not decode"
                    f" {MIN_ROUNDS} rounds together; left out"
                )
            else:
                way = asked.way or WAYS[speculates]
                gamma = _gamma(asked, burst, engine.has_any_gamma) if way != AUTOREGRESSIVE else 0
                measured = asked._replace(way=way, gamma=gamma)
                self._keep(BurstUnit(asked, measured, burst, served))
            advance(1)

    def _keep(self, unit: BurstUnit) -> None:
        """Add a unit, and write it to disk."""
        self.units.append(unit)
        if self.folder is not None:
            self.folder.add(unit, "point")
            self.folder.run.write_lines("history", self.history)

    def _alpha(self, gamma: int) -> float:
        """Return the acceptance to give a free draft: that of the draft it is compared with."""
        lengths = [
            burst.length
            for point, burst in self.by_point.items()
            if point.way == SPECULATIVE and point.gamma == gamma
        ]
        if not lengths:
            return FREE_ALPHA
        return alpha_from_acceptance_length(min(fmean(lengths), gamma + 1.0), gamma)


def servers_of(engine: Servable, scenario: Profile) -> Iterator[Started]:
    """Yield the servers to measure, each draft before the free one that it is compared with."""
    sizes = sorted(set(scenario.batch_sizes))
    groups = [(size,) for size in sizes] if engine.empty_slots_cost else [tuple(sizes)]
    ways = engine.profiled_ways
    for batches in groups:
        if AUTOREGRESSIVE in ways:
            yield Started(AUTOREGRESSIVE, 0, batches)
        others = [way for way in ways if way != AUTOREGRESSIVE]
        gammas = sorted(set(scenario.gammas))
        for gamma in gammas if engine.has_any_gamma else gammas[:1]:
            yield from (Started(way, gamma, batches) for way in others)


def _gamma(asked: MeasuredPoint, burst: Burst, is_chosen: bool) -> int:
    """Return the gamma of a burst, as the server counts it where nobody has chosen it."""
    return asked.gamma if is_chosen or not burst.gamma else round(burst.gamma)
