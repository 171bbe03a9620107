"""The known acceptances, and the drafts and caches that a search compares."""

from dataclasses import fields

from magicdec.config.choices import CacheConfig, DraftConfig, ModelChoice
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.config.options import values_of
from magicdec.config.prediction_settings import Assumed
from magicdec.config.registry import CORPORA, DRAFTS, POLICIES
from magicdec.config.schema import Config
from magicdec.costmodel import acceptance, comparison
from magicdec.costmodel.acceptance import AlphaEstimate, Curves
from magicdec.costmodel.head_lengths import published_alpha
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import setup_of
from magicdec.tracking.reader import iter_runs, latest


def cache_named(config: Config, policy: str) -> CacheConfig:
    """Return the run's own cache if it has this policy, otherwise the one of conf/cache."""
    if config.cache.policy == policy:
        return config.cache
    try:
        facts = POLICIES[policy].facts
    except UserError as error:
        raise UserError(f"scenario.policies: {error}") from None
    given = values_of("cache", policy)
    return facts(
        **{entry.name: given[entry.name] for entry in fields(facts) if entry.name in given}
    )


def draft_named(config: Config, name: str) -> DraftConfig:
    """Return a draft by its name in scenario.drafts: the run's own if that, or its model, has this
    name; otherwise one without a model of its own, or a target. Raise UserError for another name.
    """
    own = config.draft
    if config.speculates and name in (own.name, own.model and own.model.name):
        return own
    if name in DRAFTS and not DRAFTS[name].facts.needs_model:
        return DRAFTS[name].facts()
    if name in DRAFTS:
        raise UserError(
            f"scenario.drafts: {name} has a model of its own; choose it with draft={name}"
        )
    try:
        model = ModelChoice(name, architecture=architecture(name))
    except UserError as error:
        raise UserError(f"scenario.drafts: {error}") from None
    return DRAFTS["model"].facts(model=model, tensor_parallel=own.tensor_parallel)


def curves(config: Config) -> Curves:
    """Return the known acceptances, from the runs in the store and from publications."""
    measured = acceptance.measured(latest(iter_runs(config.runs_dir)))
    return Curves([*measured, *acceptance.published_points()], acceptance.task_of(config))


def warning(plan: Plan) -> str | None:
    """Return a warning about a run that is predicted not to pay; None where nothing can be
    predicted.
    """
    config = plan.config
    if (
        not (config.compares_natively and config.speculates)
        or CORPORA[config.data.name].facts.own_lengths
    ):
        return None
    try:
        setup = setup_of(plan)
    except UserError:  # a machine without a datasheet
        return None
    # Runs in the store would take long to read.
    rates = Curves(acceptance.published_points(), acceptance.task_of(config))
    alpha, generate_len = config.draft.drawn_alpha, config.batch.generate_len
    return comparison.warning(setup, config.gammas, rates, alpha, generate_len)


def assumed_alpha(config: Config, scenario: Assumed) -> AlphaEstimate | None:
    """Return the alpha that a prediction assumes: given, reported by an engine, published of a
    head, or drawn; None to look it up.
    """
    alpha = scenario.alpha
    if alpha is None and scenario.length is not None and scenario.acceptance_gamma is not None:
        alpha = alpha_from_acceptance_length(scenario.length, scenario.acceptance_gamma)
    if alpha is None and config.draft.acceptance is not None:
        return published_alpha(config.draft.acceptance)
    if alpha is None:
        alpha = config.draft.drawn_alpha
    return None if alpha is None else AlphaEstimate(alpha, "given")
