"""Cross-field checks of a configuration: mistakes, and settings that are legal but probably not meant.

Rules for single values are declared with their fields in schema.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from magicdec.config.schema import Config, option_file
from magicdec.errors import UserError
from magicdec.registry import CORPORA
from magicdec.rules import check, did_you_mean

# Lists that must not be empty, by scenario.
NEEDED = {
    "profile": ("batch_sizes", "context_lens", "gammas"),
    "predict": ("gammas",),
    "plan": ("gammas", "drafts", "policies"),
    "serve": ("length_shares",),
}
# Keys that a scenario does not read, and what it reads instead.
INSTEAD = {
    "profile": {
        "batch.size": "scenario.batch_sizes",
        "batch.context_len": "scenario.context_lens",
        "draft.gamma": "scenario.gammas",
    }
}


def validate(config: Config) -> None:
    """Raise UserError for the first mistake."""
    check(config)
    is_peer = config.engine.name != "native"
    found = [*([_peer] if is_peer else []), *([_peers_draft] if is_peer and config.speculates else []), _run]
    if config.speculates:
        found += [_draft, _budget, _noise]
    for mistakes in found:
        for mistake in mistakes(config):
            raise UserError(mistake)


def warnings(config: Config) -> list[str]:
    """Return a line for each setting that is legal but probably not meant."""
    found = []
    draft, cache, sampling = config.draft, config.cache, config.sampling
    context_len = config.batch.context_len
    if draft.is_target and not cache.has_budget and draft.quantization == "none":
        found.append("cache=full with draft=self: the target drafts for itself over its own cache, which saves nothing")
    for key, one in config.budgeted.items():
        if one.budget >= context_len:
            found.append(f"{key}.budget={one.budget} holds all of batch.context_len={context_len}: it saves nothing")
    for name, value in (("top_k", sampling.top_k), ("top_p", sampling.top_p)):
        if sampling.temperature == 0 and value is not None:
            found.append(
                f"sampling.{name}={value} has no effect: at sampling.temperature=0 the likeliest token is taken"
            )
    return found


def refuse_unread(config: Config, overrides: Sequence[str]) -> list[str]:
    """Raise UserError for an override without effect; return a line for each that only says how much is measured.

    Keys of `scenario` are of that kind: one command line may serve several scenarios.
    """
    found = unread(config, overrides)
    for line in found:
        if not line.lstrip("+").startswith("scenario."):
            raise UserError(line)
    return found


def unread(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return a line for each override without effect: on keys that the chosen options do not have or read."""
    chosen = {"cache": config.cache.policy}
    chosen |= {group: getattr(config, group).name for group in ("draft", "data", "engine", "scenario")}
    found = []
    for override in overrides:
        group, _, key = override.lstrip("+").partition("=")[0].partition(".")
        file = option_file(group, str(chosen.get(group)))
        if instead := INSTEAD.get(config.scenario.name, {}).get(f"{group}.{key}"):
            found.append(f"{override} has no effect with scenario={config.scenario.name}; set {instead}")
        elif key and file and key.partition(".")[0] not in _keys(yaml.safe_load(file.read_text("utf-8"))):
            found.append(f"{override} has no effect with {group}={file.stem}")
    return found


def _keys(option: dict[str, Any]) -> set[str]:
    """Return the keys of an option, with those that its defaults add, as in /target@model: tiny-draft."""
    defaults = (line for line in option.get("defaults", []) if isinstance(line, dict))
    return option.keys() | {name.partition("@")[2] for line in defaults for name in line}


def check_length(config: Config, longest: int) -> None:
    """Raise UserError where sequences become longer than the target's `longest`."""
    batch = config.batch
    length = batch.context_len + batch.generate_len
    if length > longest:
        raise UserError(
            f"batch.context_len={batch.context_len} + batch.generate_len={batch.generate_len} = {length} exceeds the "
            f"target's maximum of {longest} tokens; batch.context_len={longest - batch.generate_len} would fit"
        )


def _run(config: Config) -> Iterator[str]:
    """Yield values that are right by themselves and wrong together, apart from those of the draft."""
    data, scenario, corpus = config.data, config.scenario, CORPORA[config.data.name].facts
    if corpus.needs_path and not data.path:
        yield f"data.path=null: data={data.name} needs a file or folder, as in data.path=FOLDER"
    if corpus.tasks and data.task is None:
        yield f"data.task=null: choose one, as in data.task={corpus.tasks[0]}"
    if data.task is not None and data.task not in corpus.tasks:
        valid = f"must be one of {', '.join(corpus.tasks)}" if corpus.tasks else f"data={data.name} has no tasks"
        yield f"data.task={data.task}: {valid}{did_you_mean(data.task, corpus.tasks)}"
    for name in NEEDED.get(scenario.name, ()):
        if not getattr(scenario, name):
            yield f"scenario.{name}=[]: scenario={scenario.name} needs at least one"
    if scenario.name == "serve" and not (scenario.concurrencies or scenario.rates):
        yield "scenario.concurrencies=[]: scenario=serve needs at least one of them, or of scenario.rates"
    batches = scenario.critical_batches
    if scenario.name == "predict" and (len(batches) != 2 or batches[0] >= batches[1]):
        yield f"scenario.critical_batches={batches}: must be a smaller and a larger batch"


def _peer(config: Config) -> Iterator[str]:
    """Yield what engines other than ours cannot do, with any draft or none."""
    engine, ranks = f"engine={config.engine.name}", config.hardware.tensor_parallel
    if config.scenario.name != "compare":
        yield f"scenario.name={config.scenario.name}: {engine} goes with scenario=compare only; choose engine=native"
    if config.attention.name != "auto":
        yield f"attention.name={config.attention.name}: {engine} has attention of its own; leave attention=auto"
    if ranks > 1:
        yield f"hardware.tensor_parallel={ranks}: {engine} runs on one device here; set it to 1"
    for key, model in config.models.items():
        if model.weights == "random":
            yield f"{key}.weights=random: {engine} loads checkpoints only; choose engine=native"


def _peers_draft(config: Config) -> Iterator[str]:
    """Yield what engines other than ours cannot do with this draft."""
    draft, engine, drafts = config.draft, f"engine={config.engine.name}", ("none", *config.engine.drafts)
    if draft.name not in drafts:
        yield f"draft.name={draft.name}: {engine} has no such draft; choose one of {', '.join(drafts)}"
    if config.engine.one_row and config.batch.size != 1:
        yield f"batch.size={config.batch.size}: {engine} speculates on one row at a time; set it to 1, or draft=none"
    if draft.is_model and config.cache.has_budget:
        yield f"cache.policy={config.cache.policy}: {engine} keeps all of a draft's KV cache; choose cache=full"
    if draft.gamma == "auto":
        yield f"draft.gamma=auto: {engine} proposes as many tokens in every round; give a number"
    if draft.quantization != "none":
        yield f"draft.quantization={draft.quantization}: {engine} drafts with the weights as they are; choose none"
    if draft.synthetic_acceptance is not None:
        yield f"draft.synthetic_acceptance={draft.synthetic_acceptance}: {engine} measures acceptance; leave it null"


def _draft(config: Config) -> Iterator[str]:
    """Yield values that do not go together with this draft."""
    draft, ranks = config.draft, config.hardware.tensor_parallel
    yield from draft.mistakes()
    if config.scenario.name == "serve" and draft.gamma == "auto":
        yield "draft.gamma=auto: scenario=serve needs a number, at least 1"
    if ranks > 1 and draft.gamma == "auto":  # each would choose by its own clock
        yield f"draft.gamma=auto: goes with one rank only, not with hardware.tensor_parallel={ranks}; give a number"
    if ranks > 1 and draft.one_rank:
        yield f"hardware.tensor_parallel={ranks}: draft={draft.name} goes with one rank only; set it to 1"


def _budget(config: Config) -> Iterator[str]:
    """Yield budgets that are too small for what they must hold."""
    key, gamma = "draft.gamma", max(config.gammas)
    if config.scenario.name == "profile":
        key, gamma = "scenario.gammas", max(config.scenario.gammas)
    for name, cache in config.budgeted.items():
        yield from cache.mistakes(name)
        if gamma >= cache.budget:
            yield f"{key}={gamma}: must be below {name}.budget={cache.budget}"


def _noise(config: Config) -> Iterator[str]:
    """Yield what acceptance cannot be measured on."""
    if config.scenario.name not in ("compare", "serve") or config.draft.synthetic_acceptance is not None:
        return
    sources = [f"{key}.weights=random" for key, model in config.models.items() if model.weights == "random"]
    for source in [*sources, f"data={config.data.name}"] if CORPORA[config.data.name].facts.is_noise else sources:
        valid = "set draft.synthetic_acceptance to a number from 0 to 1, or draft=none"
        yield f"{source}: acceptance cannot be measured on noise; {valid}"
