"""Refuse models, drafts and caches that do not go together, before weights are loaded."""

import torch

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.checks import check_length
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.models.checkpoint import files_of
from magicdec.models.last_queries import MOST_KEPT
from magicdec.models.unread import check_output_matrix
from magicdec.planning.as_draft import check_layers
from magicdec.planning.resolved import PlannedModel


def check_vocabulary(
    target: ModelConfig, draft: ModelConfig | None, key: str = "draft.model"
) -> None:
    """Raise UserError for a predicted draft of another vocabulary, as far as its size tells. Heads
    map theirs.
    """
    from magicdec.models.vocabulary import PADDING, check_vocabularies

    if draft is not None and not draft.is_head:
        check_vocabularies(target, draft, key=key, padding=PADDING)


def check_draft(
    config: Config, device: torch.device, target: PlannedModel, draft: PlannedModel | None
) -> None:
    """Raise UserError for a draft that does not go with the target, the device or its own
    options.
    """
    if draft is not None and not config.draft.listens:
        from magicdec.models.vocabulary import check_vocabularies

        check_vocabularies(target.config, draft.config, target.folder, draft.folder)
    if draft is not None and config.draft.listens:
        _check_output_matrix(target, draft)
    if config.draft.quantization != "none":
        from magicdec.models import quantize

        quantize.check(config.draft.quantization, device)
    config.draft.check(target.config)


def _check_output_matrix(target: PlannedModel, draft: PlannedModel) -> None:
    """Raise UserError for a draft with an output matrix that would not be used."""
    if isinstance(draft.config, HeadConfig) or draft.folder is None or target.folder is None:
        return
    if draft.folder != target.folder:
        check_output_matrix(files_of(draft.folder), files_of(target.folder))


def check_modules(config: Config, target: PlannedModel, draft: PlannedModel | None) -> None:
    """Raise UserError for what transformers' modules cannot do."""
    models = [model for model in (target, draft) if model is not None]
    for model in models:
        if model.config.implementation == "native":
            continue
        if refusal := getattr(model.config, "refusal", ""):
            raise UserError(f"{model.key}: {refusal}; it can be predicted (scenario=predict)")
        if model.config.recurrence is not None:
            _check_recurrent(config, model)
        key = f"{model.key}.implementation=transformers"
        if config.hardware.tensor_parallel > 1:
            ranks = config.hardware.tensor_parallel
            raise UserError(
                f"hardware.tensor_parallel={ranks}: {key} runs on one device, because our ranks"
                " divide our own transformer's weights; set it to 1"
            )
        if config.draft.quantization != "none" and model is models[-1]:
            raise UserError(
                f"draft.quantization={config.draft.quantization}: our kernels for codes replace"
                f" layers of our own transformer, not of {key}; choose none"
            )


def _check_recurrent(config: Config, model: PlannedModel) -> None:
    """Raise UserError for what recurrent layers cannot do."""
    if model.key != "target":
        check_layers(model.config, model.key)
    if not config.draft.shares_target:
        return
    if config.cache.replays:
        raise UserError(
            f"cache.policy={config.cache.policy} scores the context by running it again, and"
            " recurrent layers cannot go back; choose cache.policy=snapkv"
        )
    observed = getattr(config.cache, "observation_window", 0)
    if observed > MOST_KEPT:
        raise UserError(
            f"cache.observation_window={observed}: beyond {MOST_KEPT} tokens, the end of the prompt"
            f" runs again, and recurrent layers cannot go back; choose {MOST_KEPT} or less"
        )


def check_lengths(config: Config, target: PlannedModel, draft: PlannedModel | None) -> None:
    """Raise UserError for sequences longer than the target takes, or longer than the draft was
    trained for, unless its cache hides the distance.
    """
    check_length(config, target.config.max_position_embeddings)
    context_len = config.scenario.longest(config.batch)
    length = context_len + config.batch.generate_len
    key = config.draft.own_cache_key
    trained = (
        length if draft is None or config.draft.listens else draft.config.max_position_embeddings
    )
    if length <= trained:
        return
    cache = config.draft.caches(config.cache)[key]
    if draft is not None and draft.config.implementation != "native":
        raise UserError(
            f"{config.scenario.key_of('batch.context_len')}={context_len} shows the draft {length}"
            f" tokens, but it was trained for {trained}; hiding the distance takes rotary"
            " embeddings of our own, and draft.model runs as transformers' modules"
        )
    if not cache.bounds_positions:
        raise UserError(
            f"{key}.policy={cache.policy} shows the draft {length} tokens, but it was trained for"
            f" {trained}; use {key}.policy=streaming, which hides the distance"
        )
    slots = config.draft.round_slots(max(config.gammas))
    if cache.budget + slots >= trained:
        raise UserError(
            f"{key}.budget={cache.budget} and the {slots} tokens of a round"
            f" (draft.gamma={max(config.gammas)}) do not fit into the draft's trained context of"
            f" {trained} tokens; {key}.budget={(trained - slots) // 2} would"
        )
