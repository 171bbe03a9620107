"""Cross-field checks of a configuration: mistakes, and settings that are legal but probably not meant.

Rules for single values are declared with their fields in schema.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from magicdec.config.schema import CONF, Config, ModelChoice
from magicdec.errors import UserError
from magicdec.rules import check

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
# What engines other than ours draft with.
PEER_DRAFTS = {"transformers": ("none", "model", "ngram", "layer_skip"), "vllm": ("none", "model", "ngram")}


def validate(config: Config) -> None:
    """Raise UserError for the first mistake."""
    check(config)
    found = [_run]
    if config.engine.name != "native":
        found = [_peer, _peers_draft, _run] if config.draft.name != "none" else [_peer, _run]
    if config.draft.name != "none":
        found += [_draft, _hierarchical, _ranks, _budget, _noise]
    for mistakes in found:
        for mistake in mistakes(config):
            raise UserError(mistake)


def warnings(config: Config) -> list[str]:
    """What is legal but hardly meant, a line each."""
    found = []
    draft, cache, sampling = config.draft, config.cache, config.sampling
    context_len = config.batch.context_len
    if draft.name == "self" and cache.policy == "full" and draft.quantization == "none":
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
        file = CONF / group / f"{chosen.get(group)}.yaml"
        if instead := INSTEAD.get(config.scenario.name, {}).get(f"{group}.{key}"):
            found.append(f"{override} has no effect with scenario={config.scenario.name}; set {instead}")
        elif key and file.exists() and key.partition(".")[0] not in _keys(yaml.safe_load(file.read_text("utf-8"))):
            found.append(f"{override} has no effect with {group}={file.stem}")
    return found


def _keys(option: dict[str, Any]) -> set[str]:
    """Of a group's option, those included that its defaults bring, as in /target@model: tiny-draft."""
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


def _models(config: Config) -> dict[str, ModelChoice]:
    """The models of a run by the keys that choose them."""
    models = {"target": config.target}
    if config.draft.model is not None:
        models["draft.model"] = config.draft.model
    return models


def _run(config: Config) -> Iterator[str]:
    """Values that are right by themselves and wrong together, wherever the draft has no part in it."""
    data, scenario = config.data, config.scenario
    if data.name in ("text", "prompts") and not data.path:
        yield f"data.path=null: data={data.name} needs a file or folder, as in data.path=FOLDER"
    if (data.name == "ruler") != (data.task is not None):
        valid = "choose one, as in data.task=niah_single" if data.task is None else "a task is for data=ruler alone"
        yield f"data.task={data.task or 'null'}: {valid}"
    for name in NEEDED.get(scenario.name, ()):
        if not getattr(scenario, name):
            yield f"scenario.{name}=[]: scenario={scenario.name} needs at least one"
    if scenario.name == "serve" and not (scenario.concurrencies or scenario.rates):
        yield "scenario.concurrencies=[]: scenario=serve needs at least one of them, or of scenario.rates"
    batches = scenario.critical_batches
    if scenario.name == "predict" and (len(batches) != 2 or batches[0] >= batches[1]):
        yield f"scenario.critical_batches={batches}: must be a smaller and a larger batch"


def _peer(config: Config) -> Iterator[str]:
    """What engines other than ours cannot do, whatever the draft."""
    engine, ranks = f"engine={config.engine.name}", config.hardware.tensor_parallel
    if config.scenario.name != "compare":
        yield f"scenario.name={config.scenario.name}: {engine} goes with scenario=compare only; choose engine=native"
    if config.attention.name != "auto":
        yield f"attention.name={config.attention.name}: {engine} has attention of its own; leave attention=auto"
    if ranks > 1:
        yield f"hardware.tensor_parallel={ranks}: {engine} runs on one device here; set it to 1"
    for key, model in _models(config).items():
        if model.weights == "random":
            yield f"{key}.weights=random: {engine} loads checkpoints only; choose engine=native"


def _peers_draft(config: Config) -> Iterator[str]:
    """Drafts that engines other than ours do not have."""
    name, draft = config.engine.name, config.draft
    engine, drafts = f"engine={name}", PEER_DRAFTS[name]
    if draft.name not in drafts:
        yield f"draft.name={draft.name}: {engine} has no such draft; choose one of {', '.join(drafts)}"
    if name == "transformers" and config.batch.size != 1:
        yield f"batch.size={config.batch.size}: {engine} speculates on one row at a time; set it to 1, or draft=none"
    if draft.name != "ngram" and config.cache.policy != "full":
        yield f"cache.policy={config.cache.policy}: {engine} keeps all of a draft's KV cache; choose cache=full"
    if draft.gamma == "auto":
        yield f"draft.gamma=auto: {engine} proposes as many tokens in every round; give a number"
    if draft.quantization != "none":
        yield f"draft.quantization={draft.quantization}: {engine} drafts with the weights as they are; choose none"
    if draft.synthetic_acceptance is not None:
        yield f"draft.synthetic_acceptance={draft.synthetic_acceptance}: {engine} measures acceptance; leave it null"


def _draft(config: Config) -> Iterator[str]:
    """Values that do not go together with this draft."""
    draft = config.draft
    if draft.gamma == 0:
        yield f"draft.gamma=0: must be auto or at least 1 with draft={draft.name}"
    if config.scenario.name == "serve" and draft.gamma == "auto":
        yield "draft.gamma=auto: scenario=serve needs a number, at least 1"
    if draft.name in ("model", "hierarchical") and draft.model is None:
        yield f"draft.model=null: draft.name={draft.name} needs one; choose draft={draft.name} target@draft.model=NAME"
    if draft.name == "ngram" and draft.quantization != "none":
        yield f"draft.quantization={draft.quantization}: draft=ngram has no weights; choose none"


def _hierarchical(config: Config) -> Iterator[str]:
    """What a draft with a draft of its own needs, and no other takes."""
    draft = config.draft
    if draft.name == "hierarchical" and draft.cache is None:
        yield "draft.cache=null: draft.name=hierarchical needs one; choose draft=hierarchical cache@draft.cache=NAME"
    if (draft.name == "hierarchical") != (draft.inner_gamma > 0):
        valid = "must be at least 1" if draft.name == "hierarchical" else "is for draft=hierarchical alone"
        yield f"draft.inner_gamma={draft.inner_gamma}: {valid}"


def _ranks(config: Config) -> Iterator[str]:
    """What one rank alone can do."""
    ranks = f"hardware.tensor_parallel={config.hardware.tensor_parallel}"
    if config.hardware.tensor_parallel > 1 and config.draft.gamma == "auto":  # each would choose by its own clock
        yield f"draft.gamma=auto: goes with one rank only, not with {ranks}; give a number"
    if config.hardware.tensor_parallel > 1 and config.draft.name == "hierarchical":
        yield f"{ranks}: draft=hierarchical goes with one rank only; set it to 1"


def _budget(config: Config) -> Iterator[str]:
    """Yield budgets that are too small for what they must hold."""
    key, gamma = "draft.gamma", max(config.gammas)
    if config.scenario.name == "profile":
        key, gamma = "scenario.gammas", max(config.scenario.gammas)
    for name, cache in config.budgeted.items():
        if cache.budget <= cache.num_sink:
            sinks = f"{name}.num_sink={cache.num_sink}"
            yield f"{name}.budget={cache.budget}: must be above {sinks}, to hold the sinks and a window of at least 1"
        if gamma >= cache.budget:
            yield f"{key}={gamma}: must be below {name}.budget={cache.budget}"


def _noise(config: Config) -> Iterator[str]:
    """Acceptance that would mean nothing."""
    if config.scenario.name not in ("compare", "serve") or config.draft.synthetic_acceptance is not None:
        return
    sources = [f"{key}.weights=random" for key, model in _models(config).items() if model.weights == "random"]
    for source in [*sources, "data=random"] if config.data.name == "random" else sources:
        valid = "set draft.synthetic_acceptance to a number from 0 to 1, or draft=none"
        yield f"{source}: acceptance cannot be measured on noise; {valid}"
