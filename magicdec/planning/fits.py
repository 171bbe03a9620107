"""Check that the work fits into the memory: weights and caches by their sizes, the rest by a
rehearsal without storage.
"""

from dataclasses import replace

from magicdec.config.groups import BatchConfig
from magicdec.config.registry import BACKENDS
from magicdec.config.scenario_settings import Profile
from magicdec.costmodel.memory_estimate import Memory
from magicdec.errors import UserError
from magicdec.measure import memory_use
from magicdec.measure.footprint import Footprint, UniformAttention, footprint, largest_batch
from magicdec.models.parallel import Share
from magicdec.models.transformer import Transformer
from magicdec.planning import shared
from magicdec.planning.build import assembled, without_weights
from magicdec.planning.resolve import batch_on
from magicdec.planning.resolved import Plan, PlannedModel
from magicdec.planning.setup import held, setup_of
from magicdec.units import GIB

# Memory that suffices without a look at activations: so many times what weights and caches take,
# and more bytes.
AMPLE, SPARE = 2, 4 * GIB
# Tokens of a pass of the prefill on a GPU with room for its activations: so many times what the
# matmuls of a layer write.
LONGEST_PASS, ACTIVATIONS = 16384, 2
FILLED = 0.9  # of a device's memory, with what batch.size=auto holds: activations need some, too


def estimate(plan: Plan, num_rows: int, context_len: int) -> Memory:
    """Estimate the memory that the work takes on each device; with several ranks, on that of rank
    0.

    To serve requests, `num_rows` slots take part in rounds while one more row is prefilled.
    """
    plan = _with_largest_gamma(plan)
    batch = held(plan, num_rows, context_len)
    if plan.predicts:
        return batch
    workspace = memory_use.workspace_bytes(plan.device)
    caches = batch.target_kv + batch.draft_kv
    if not plan.config.scenario.serves:
        rehearsed = _footprint(plan, num_rows, context_len)
        captured = rehearsed.of_rounds if plan.config.hardware.captures else 0
        return replace(batch, transient=rehearsed.peak - caches + workspace, captured=captured)
    slots = _footprint(plan, num_rows, context_len, prefills=False)
    single = _footprint(plan, 1, context_len)
    row = held(plan, 1, context_len)
    batch = replace(
        batch, target_kv=batch.target_kv + row.target_kv, draft_kv=batch.draft_kv + row.draft_kv
    )
    transient = single.peak - row.target_kv - row.draft_kv + workspace
    if plan.config.hardware.captures:  # captured graphs have memory of their own
        return replace(batch, transient=transient, captured=slots.of_rounds)
    # A round may come between two chunks.
    return replace(batch, transient=transient + slots.peak - caches + workspace)


def _with_largest_gamma(plan: Plan) -> Plan:
    """Return a plan whose rounds have the largest gamma of its grid, if it has one."""
    scenario = plan.config.scenario
    if not isinstance(scenario, Profile) or not plan.config.speculates:
        return plan
    draft = replace(plan.config.draft, gamma=max(scenario.gammas))
    return replace(plan, config=replace(plan.config, draft=draft))


def _footprint(plan: Plan, num_rows: int, context_len: int, prefills: bool = True) -> Footprint:
    on_cpu = plan.device.type == "cpu"
    attention = UniformAttention() if on_cpu else BACKENDS[plan.config.attention].work()

    def load(model: PlannedModel) -> Transformer:
        part = Share(0, model.num_ranks, 0, plan.num_ranks)
        return without_weights(model, plan, attention, part)

    audited = plan.is_audited and plan.config.scenario.audits
    return footprint(assembled(plan, load), num_rows, context_len, audited, prefills)


def check(plan: Plan, num_rows: int, context_len: int) -> Memory | None:
    """Raise UserError, with the largest batch that fits, if the work exceeds the memory.

    Return the estimate; None where weights and caches leave so much room that activations need no
    rehearsal.
    """
    shared.SHARED.keep_only(shared.keys(plan))
    available = memory_use.available_bytes(plan.device) + shared.SHARED.num_bytes
    if plan.device.type == "cpu":
        available //= plan.num_ranks
    available -= memory_use.reserved_bytes(plan.device)
    if AMPLE * held(_with_largest_gamma(plan), num_rows, context_len).total + SPARE <= available:
        return None
    estimated = estimate(plan, num_rows, context_len)
    if estimated.needed <= available:
        return estimated
    fits = largest_batch(lambda rows: estimate(plan, rows, context_len).needed, num_rows, available)
    rows_key, context_key = map(plan.config.scenario.key_of, ("batch.size", "batch.context_len"))
    smaller = f"the target, {context_key}, batch.prefill_chunk or hardware.dtype"
    advice = (
        f"{rows_key}={fits} would fit"
        if fits
        else f"not even one row fits: choose a smaller one of {smaller}"
    )
    parts = {
        "weights": estimated.weights,
        "KV cache": estimated.target_kv,
        "draft's cache": estimated.draft_kv,
    }
    parts["activations"] = estimated.transient + estimated.captured
    raise UserError(
        f"{rows_key}={num_rows} at {context_key}={context_len} needs about"
        f" {estimated.needed / GIB:.2f} GiB"
        f" ({', '.join(f'{name} {size / GIB:.2f}' for name, size in parts.items())}), but"
        f" {available / GIB:.2f} GiB are available{' to each rank' if plan.num_ranks > 1 else ''};"
        f" {advice}"
    )


def num_bytes(plan: Plan) -> float:
    """Return the memory that the work needs on each device, for the largest batch."""
    return estimate(plan, *plan.config.scenario.largest(plan.config.batch)).needed


def fitting(plan: Plan, asked: BatchConfig) -> Plan:
    """Return the plan with what `asked` leaves to the memory: fewer rows than usual where these do
    not fit, and longer passes of the prefill where a GPU has room.
    """
    return _in_long_passes(_with_rows(plan, asked), asked)


def _in_long_passes(plan: Plan, asked: BatchConfig) -> Plan:
    batch = plan.config.batch
    if asked.prefill_chunk != "auto" or plan.device.type != "cuda" or plan.config.has_slots:
        return plan
    rows = int(batch.size)
    target = plan.target.config
    features = 3 * target.intermediate_size // plan.num_ranks + 8 * target.hidden_size
    of_token = ACTIVATIONS * plan.dtype.itemsize * features
    left = _memory_bytes(plan) - held(plan, rows, batch.context_len).total
    tokens = LONGEST_PASS
    while tokens > 1 and tokens * of_token > left:
        tokens //= 2
    chunk = max(int(batch.prefill_chunk), tokens // rows)
    return replace(plan, config=replace(plan.config, batch=replace(batch, prefill_chunk=chunk)))


def _with_rows(plan: Plan, asked: BatchConfig) -> Plan:
    is_grid = "batch.size" in plan.config.scenario.at  # which is asked for
    if asked.size != "auto" or is_grid or plan.fills:
        return plan
    config, context_len = plan.config, plan.config.batch.context_len
    usual = int(config.batch.size)
    # Serving prefills one more row while the others decode.
    prefilled = int(config.scenario.serves)

    def total(rows: int) -> float:
        return held(plan, rows + prefilled, context_len).total

    memory_bytes = _memory_bytes(plan)
    if total(usual) <= memory_bytes:
        return plan
    batch = replace(asked, size=max(1, largest_batch(total, usual, memory_bytes)))
    return replace(
        plan, config=replace(config, batch=batch_on(replace(config, batch=batch), plan.device))
    )


def _memory_bytes(plan: Plan) -> float:
    """Return the memory for weights and caches of each rank, free or not: a run's id must not
    depend on other programs.
    """
    if plan.predicts:
        return setup_of(plan).hardware.device.memory
    ranks = plan.num_ranks if plan.device.type == "cpu" else 1  # which share the memory
    return FILLED * memory_use.total_bytes(plan.device) / ranks
