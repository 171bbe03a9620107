"""Describe one model as the draft of another: `magicdec doctor --model A --draft B`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig, ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.errors import UserError
from magicdec.models import description
from magicdec.models.checkpoint import CONFIG
from magicdec.models.metadata import read_json
from magicdec.models.vocabulary import TOKENIZER, check_vocabularies


class Described(NamedTuple):
    """A model before its weights are downloaded."""

    path: str  # as it was given
    config: ModelConfig
    folder: Path | None  # None: there is a config.json alone


def read_description(path: str, key: str) -> Described:
    """Read a folder, a config.json or a hub id, of which only the json files are downloaded; `key`
    is what errors call it.
    """
    file = Path(os.path.expanduser(path))
    if file.is_file() and file.name != CONFIG:
        plain: dict[str, Any] = read_json(file, dict[str, Any])
        return Described(path, description.describe(plain, str(file), runs=False), None)
    folder = file.parent if file.is_file() else description.locate(path, key, weights=False)
    return Described(path, description.read_config(folder, runs=False), folder)


def draft_taking(model: ModelConfig) -> str:
    """Return the name of the draft that proposes with such a model alone."""
    alone = [
        name
        for name in DRAFTS
        if DRAFTS[name].facts.needs_model and not DRAFTS[name].facts.shares_target
    ]
    return next(name for name in alone if DRAFTS[name].facts.takes(model))


def check_kind(draft: DraftConfig, model: ModelConfig) -> None:
    """Raise UserError for a draft that cannot propose with a model of this kind."""
    if not draft.takes(model):
        kind = "a head over a target's hidden states" if model.is_head else "a whole model"
        raise UserError(
            f"draft={draft.name}: draft.model is {kind} of another kind than this draft takes;"
            f" choose draft={draft_taking(model)}"
        )


def check_layers(model: ModelConfig, key: str) -> None:
    """Raise UserError for a model with recurrent layers: only a target's go back to the accepted
    tokens.
    """
    if model.recurrence is not None:
        raise UserError(
            f"{key}: it has recurrent layers, and a draft with a cache of its own cannot take back"
            " the tokens that are rejected; choose a model whose layers all have attention"
        )


def examine_pair(target: Described, draft: Described) -> Iterator[tuple[str, str]]:
    """Yield what a model would do as the draft of a target, as checks and their texts."""
    if draft.config == target.config and draft.folder == target.folder:
        yield "as a draft", "the target itself: draft=self, over a cache that `cache` chooses"
        return
    name = draft_taking(draft.config)
    facts = DRAFTS[name].facts
    option = "" if facts.listens else " target@draft.model=custom"
    yield "as a draft", f"draft={name}{option} draft.model.path={draft.path}"
    refusals = [*_refusals(facts, target, draft)]
    yield from (("refused", refusal) for refusal in refusals)
    if not refusals:
        yield "vocabulary", _vocabulary(target, draft)
    usable = [policy for policy in POLICIES if not POLICIES[policy].facts.needs_target]
    yield "its cache", f"cache={', '.join(usable)}"
    if not facts.listens:
        yield "its context", _context(target.config, draft.config)
    share = draft.config.num_parameters / target.config.num_parameters
    yield "its weights", f"{draft.config.num_parameters / 1e9:,.3f}B, {share:.1%} of the target's"


def _refusals(facts: type[DraftConfig], target: Described, draft: Described) -> Iterator[str]:
    """Yield why a run would refuse the pair."""
    for model, config in (("the target", target.config), ("the draft", draft.config)):
        if refusal := getattr(config, "refusal", ""):
            yield f"{model}: {refusal}"
    try:
        check_layers(draft.config, "the draft")
        facts(model=ModelChoice("draft", architecture=draft.config)).check(target.config)
        if not facts.listens:
            where = (target.folder, draft.folder)
            check_vocabularies(target.config, draft.config, *where, key="the draft")
    except UserError as error:
        yield str(error)


def _vocabulary(target: Described, draft: Described) -> str:
    if draft.config.is_head and draft.config.num_logits < target.config.vocab_size:
        return f"proposes {draft.config.num_logits:,} of the target's {target.config.vocab_size:,}"
    if draft.config.is_head:
        return f"the target's own, {target.config.vocab_size:,} entries"
    folders = [target.folder, draft.folder]
    compared = all(folder is not None and (folder / TOKENIZER).exists() for folder in folders)
    how = "token by token" if compared else f"by size alone: no two {TOKENIZER} to compare"
    return f"shared, {target.config.vocab_size:,} entries, compared {how}"


def _context(target: ModelConfig, draft: ModelConfig) -> str:
    """Say how far an independent draft reaches, which may be less far than its target."""
    trained, wanted = draft.max_position_embeddings, target.max_position_embeddings
    if trained >= wanted:
        return f"{trained:,} tokens, as far as the target's {wanted:,}"
    beyond = "refused, because it runs as transformers' modules"
    if draft.implementation == "native":
        bounded = [name for name in POLICIES if POLICIES[name].facts.bounds_positions]
        beyond = f"only over cache={', '.join(bounded)}, which hides the distance"
    return f"{trained:,} tokens of the target's {wanted:,}; beyond them {beyond}"
