"""Check the policies and drafts of a plugin as the built-in ones are checked.

Their output must be the target's own, for rows of different lengths. They must select and propose
what exists, within their budget and gamma, and draw from the distributions that they return. They
must allocate the bytes that they declare. A row that serving copies must accept what it would
alone. A small random model decodes, in seconds.

The package's own tests use the same models and the same comparisons.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magicdec.attention import backends
from magicdec.config.choices import ModelChoice
from magicdec.config.groups import SamplingConfig
from magicdec.config.options import values_of
from magicdec.config.registry import BACKENDS, DRAFTS, POLICIES, Registry
from magicdec.conformance.contracts import Broken, WatchedDraft, drawn_otherwise
from magicdec.conformance.small_models import (
    VOCAB,
    new_engine,
    random_prompts,
    small_drafter,
    small_model,
)
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.round import Setup
from magicdec.engine.decoder import Generation
from magicdec.engine.native import Batch, NativeEngine
from magicdec.engine.output_audit import audit
from magicdec.errors import UserError, in_one_line
from magicdec.inputs import plugins
from magicdec.measure.footprint import Allocations
from magicdec.measure.metrics import Rounds, rounds_of
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots

LENGTHS, GENERATE_LEN = (50, 57, 64), 24  # of the rows' prompts, and of what is generated
COPIED = 3, 12  # the gamma and the budget at which rows are copied
SIZES = ((1, 40), COPIED, (5, 6), (8, 400))  # gammas and budgets
UNCOUNTED = 64  # bytes of a row's lengths in each layer of a cache, which no fact counts
SAMPLED = SamplingConfig(temperature=1.0)
OURS = "magicdec"  # the package whose choices are many, and checked by its own tests
# Keys of an option that a trial sets.
NOT_OWN = ("policy", "name", "gamma", "budget", "model", "cache")


class ChoiceCheck(NamedTuple):
    """A check of one choice, and what is wrong; empty where it holds."""

    choice: str
    check: str
    wrong: str


def examine(module: str) -> Iterator[ChoiceCheck]:
    """Yield the findings of all policies and drafts that a module registers, or else the package
    around it. Raise UserError if there are none.
    """
    plugins.load([module], are_arguments=True)
    policies, drafts = _made_in(POLICIES, module), _made_in(DRAFTS, module)
    package = module.partition(".")[0]
    if not policies and not drafts and package != OURS:
        # A plugin may only import the modules that register.
        policies, drafts = _made_in(POLICIES, package), _made_in(DRAFTS, package)
    if not policies and not drafts:
        raise UserError(f"{module}: registers neither a cache policy nor a draft")
    for policy in policies:
        users = ["self"] if POLICIES[policy].facts.needs_target else ["self", "model"]
        yield from _findings("cache", policy, [(user, policy, f"draft={user}") for user in users])
    for draft in drafts:
        caches = ["full", "streaming"] if DRAFTS[draft].facts.is_model else ["full"]
        yield from _findings("draft", draft, [(draft, cache, f"cache={cache}") for cache in caches])


def _made_in(registry: Registry[Any], module: str) -> list[str]:
    """Return the names of the choices that a module registers, or a module within it."""
    return [
        name for name in registry if f"{registry[name].work.__module__}.".startswith(f"{module}.")
    ]


def _findings(
    group: str, name: str, pairs: Sequence[tuple[str, str, str]]
) -> Iterator[ChoiceCheck]:
    """Yield the findings of a choice, tried in these pairs of a draft and a policy."""
    choice = f"{group}={name}"
    keys = values_of(group, name)
    yield ChoiceCheck(
        choice, "has an option", "" if keys else f"conf/{group}/{name}.yaml is missing"
    )
    options = {key: value for key, value in keys.items() if key not in NOT_OWN}
    for draft, policy, other in pairs:
        checks = {
            "is lossless": wrong_tokens,
            "stays within its limits": wrong_calls,
            "takes the bytes it declares": wrong_bytes,
        }
        if DRAFTS[draft].facts.serves:
            checks["serves"] = wrong_rows
        for name, check in checks.items():
            yield ChoiceCheck(
                choice, f"{name} with {other}", _first(partial(check, draft, policy, options))
            )


def _first(mistakes: Callable[[], Iterator[str]]) -> str:
    try:
        return next(mistakes(), "")
    except Exception as error:  # a plugin may fail in any way
        return in_one_line(error)


def wrong_tokens(draft: str, policy: str, keys: dict[str, Any]) -> Iterator[str]:
    """Yield where rows of different lengths are not decoded as the target alone would."""
    for gamma, budget in SIZES:
        engine = _trial(draft, policy, gamma, budget, keys, attention="auto")
        batch = engine.open(random_prompts(LENGTHS, seed=gamma))
        batch.decoder.prefill(engine.prefill_chunk)
        if not both_ways(batch)[0]:
            yield f"its output is not the target's at gamma {gamma}, budget {budget}"


def wrong_calls(draft: str, policy: str, keys: dict[str, Any]) -> Iterator[str]:
    """Yield what a draft or its caches do that the round would clamp, mask or ignore."""
    ranks: list[float] = []
    for gamma, budget in SIZES:
        engine = _trial(draft, policy, gamma, budget, keys)
        sampling = replace(engine, sampling=replace(SAMPLED, seed=gamma))
        try:
            _decode_again(engine)
            ranks += _decoded(sampling)[1].ranks.values()
        except Broken as error:
            yield f"{error}, at gamma {gamma}, budget {budget}"
    if drawn_otherwise(ranks):
        yield "q_BGV: the tokens are not drawn from the distributions that it returns"


def _decoded(engine: NativeEngine) -> tuple[Batch, WatchedDraft, Rounds]:
    """Decode a batch, and return it with what its draft did and the rounds."""
    batch = engine.open(random_prompts(LENGTHS, seed=engine.gamma))
    assert batch.draft is not None
    watch = WatchedDraft(batch.draft, engine.gamma, VOCAB)
    batch.decoder.prefill(engine.prefill_chunk)
    return batch, watch, rounds_of(batch.decoder.generate(batch.draft))


def _decode_again(engine: NativeEngine) -> None:
    """Decode a batch, then again, with other tokens behind those that count, and with a smaller
    gamma. Raise Broken.
    """
    batch, watch, rounds = _decoded(engine)
    if rounds != rounds_of(batch.decoder.generate(batch.draft)):
        raise Broken(
            "prefill: leaves something of an earlier pass: the same prompts have other proposals"
            " accepted"
        )
    watch.junk = True
    if rounds != rounds_of(batch.decoder.generate(batch.draft)):
        raise Broken(
            "propose: reads tokens behind the end of a row, which are left over from earlier rounds"
        )
    watch.junk = False
    if engine.gamma > 1:
        batch.decoder.generate(batch.draft, gamma=engine.gamma - 1)


def wrong_bytes(draft: str, policy: str, keys: dict[str, Any]) -> Iterator[str]:
    """Yield where a draft's cache takes other bytes than its facts declare, as PyTorch hands them
    out.
    """
    for gamma, budget in SIZES:
        engine = _trial(draft, policy, gamma, budget, keys, "meta")
        decoder = engine.open(random_prompts(LENGTHS)).decoder
        parts = [
            decoder.cache,
            decoder.state,
            engine.target,
            *([engine.draft_model] if engine.draft_model else []),
        ]
        with Allocations(tensor for part in parts for tensor in _tensors(part)) as allocations:
            made = engine.draft_for(decoder)
            made.watch(decoder.cache, 0)
            held = allocations.live
        model = (
            ModelChoice("draft", architecture=engine.draft_model.config)
            if engine.draft_model
            else None
        )
        config, machine = engine.target.config, hardware_named("h100")
        setup = Setup(
            config,
            machine,
            len(LENGTHS),
            max(LENGTHS),
            replace(engine.draft, model=model),
            engine.cache,
        )
        declared = memory(replace(setup, element_bytes=4), gamma, GENERATE_LEN).draft_kv
        most = declared + len(LENGTHS) * config.num_layers * UNCOUNTED
        if made.cache_bytes != declared or not declared <= held <= most:
            sizes = (
                f"declared {declared:,.0f}, reported {made.cache_bytes:,}, allocated {held:,} bytes"
            )
            yield f"{sizes} at gamma {gamma}, budget {budget}"


def wrong_rows(draft: str, policy: str, keys: dict[str, Any]) -> Iterator[str]:
    """Yield where a request that is copied into a slot has other proposals accepted than one that
    is decoded alone.
    """
    gamma, budget = COPIED
    engine = _trial(draft, policy, gamma, budget, keys, attention="auto")
    requests = [Request(prompt, Params(GENERATE_LEN)) for prompt in random_prompts(LENGTHS)]
    scheduler = Scheduler(Slots(engine, 2, max(LENGTHS) + GENERATE_LEN))
    for request in requests:
        scheduler.submit(request)
    while not scheduler.idle:
        scheduler.step()
    for request in requests:
        alone = engine.open([request.prompt])
        alone.decoder.prefill(engine.prefill_chunk)
        if request.rounds != rounds_of(alone.decoder.generate(alone.draft)):
            yield f"copy_row leaves out what proposals depend on, at gamma {gamma}, budget {budget}"


def _trial(
    draft: str,
    policy: str,
    gamma: int,
    budget: int,
    keys: dict[str, Any],
    device: str = "cpu",
    attention: str = "sdpa",
) -> NativeEngine:
    """Return an engine with a small model, and one like it where the draft needs one.

    By default they attend by PyTorch's operators, through which each read can be checked.
    """
    target = small_model()
    name, _ = backends.choose(
        attention, torch.device("cpu"), torch.float32, [target.config.head_dim]
    )
    target.attention = BACKENDS[name].work()
    model = small_drafter(draft, target, 0.15)
    model = model and model.to(device)
    options = keys | {
        "policy": policy,
        "gamma": gamma,
        "budget": budget,
        "generate_len": GENERATE_LEN,
    }
    return new_engine(target.to(device), draft_name=draft, draft_model=model, **options)


def _tensors(part: Any) -> list[Tensor]:
    values = part.parameters() if isinstance(part, torch.nn.Module) else vars(part).values()
    return [value for value in values if isinstance(value, Tensor)]


def both_ways(batch: Batch) -> tuple[bool, Generation, Generation]:
    """Return whether a prefilled batch is decoded with its draft as without it, and both
    outputs.
    """
    plain = batch.decoder.generate()
    fast = batch.decoder.generate(batch.draft)
    return audit(batch.decoder, plain.tokens, fast.tokens).passed is True, plain, fast
