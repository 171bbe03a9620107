"""From a typed configuration to what the cost model predicts: no weights, no device, no PyTorch."""

from dataclasses import dataclass, field, fields, replace

import yaml

from magicdec.architectures import ModelConfig
from magicdec.config.checks import check_length
from magicdec.config.schema import ROWS_ON, Config, option_file
from magicdec.costmodel import acceptance
from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.hardware import CPU, OWN_STACK, Hardware, configured, device_in
from magicdec.costmodel.round import Setup, memory
from magicdec.costmodel.targets import architecture
from magicdec.drafting import DraftConfig, IndependentModel, ModelChoice, SelfSpeculation
from magicdec.errors import UserError
from magicdec.planning.identity import identify
from magicdec.policies import CacheConfig
from magicdec.registry import DRAFTS, POLICIES
from magicdec.tracking.reader import iter_runs, latest


@dataclass(frozen=True)
class PredictionPlan:
    """A run that predicts: like resolve.Plan, as far as the frame of a run needs it."""

    config: Config
    setup: Setup
    fingerprints: dict[str, str] = field(default_factory=dict)
    num_ranks = 1  # predicting takes no devices

    @property
    def device_name(self) -> str:
        """Return the name of the machine to predict for."""
        return self.setup.hardware.name

    def doubts(self) -> list[str]:
        """Return no warnings: the prediction itself is the result."""
        return []


def num_bytes(plan: PredictionPlan) -> float:
    """Return the memory that the run would take of each GPU."""
    return memory(plan.setup, max(plan.config.gammas), plan.config.batch.generate_len).total


def plan_prediction(config: Config) -> PredictionPlan:
    """Resolve `auto` and find the mistakes that a prediction would meet."""
    if config.batch.size == "auto":
        config = replace(config, batch=replace(config.batch, size=ROWS_ON["cuda"]))
    target, architecture = _identified("target", config.target)
    config = replace(config, target=target)
    if config.draft.model is not None:
        model, _ = _identified("draft.model", config.draft.model)
        config = replace(config, draft=replace(config.draft, model=model))
    check_length(config, architecture.max_position_embeddings)
    setup = Setup(
        target=architecture,
        hardware=_machine(config),
        batch=int(config.batch.size),
        context=config.batch.context_len,
        draft=_draft(config),
        cache=config.cache,
        target_name=config.target.name,
    )
    return PredictionPlan(config, setup)


def setup_of_run(
    config: Config,
    target: ModelConfig,
    draft: ModelConfig | None,
    device_name: str,
    element_bytes: float,
    bandwidth_gbs: float | None = None,
    tflops: float | None = None,
    weight_bytes: float | None = None,
) -> Setup:
    """Return the setup to predict for a run of this software on the device it runs on.

    `bandwidth_gbs` and `tflops` are measured figures for a device without a known datasheet, `weight_bytes` those of a
    weight that is kept in fewer than `element_bytes`. Raise UserError where there is nothing to predict with, or a
    draft that has no cost model.
    """
    hardware, known = config.hardware, device_in(device_name)
    machine = configured(
        known.name if known else CPU if hardware.device == "cpu" else device_name,
        hardware.tensor_parallel,
        hardware.bandwidth_gbs or (None if known else bandwidth_gbs),
        hardware.tflops or (None if known else tflops),
        hardware.memory_gib,
        hardware.efficiency,
        OWN_STACK,
    )
    return Setup(
        target,
        machine,
        int(config.batch.size),
        config.batch.context_len,
        _with_architecture(config.draft, draft),
        config.cache,
        config.target.name,
        element_bytes,
        weight_bytes,
    )


def cache_named(config: Config, policy: str) -> CacheConfig:
    """Return the run's own cache where it has this policy, or else the one that conf/cache describes."""
    if config.cache.policy == policy:
        return config.cache
    file = option_file("cache", policy)
    given = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    facts = POLICIES[policy].facts
    return facts(**{entry.name: given[entry.name] for entry in fields(facts) if entry.name in given})


def draft_named(name: str, ranks: int | None) -> DraftConfig:
    """Return a draft by its name in scenario.drafts: one without a model of its own, or a target on `ranks` GPUs."""
    if name in DRAFTS and not DRAFTS[name].facts.needs_model:
        return DRAFTS[name].facts()
    return IndependentModel(model=ModelChoice(name, architecture=architecture(name)), tensor_parallel=ranks)


def curves(config: Config) -> Curves:
    """Return the known acceptances, of the runs in the store and of publications."""
    return Curves([*acceptance.measured(latest(iter_runs(config.runs_dir))), *acceptance.published()], task_of(config))


def task_of(config: Config) -> str:
    """Return the name of the text that the models continue."""
    return acceptance.task_name(config.data.name, config.data.task, config.sampling.temperature)


def _draft(config: Config) -> DraftConfig:
    if config.scenario.name == "plan":  # which has drafts of its own
        return SelfSpeculation()
    if not config.speculates:
        raise UserError("draft=none: there is no speculation to predict; choose draft=self or draft=model")
    return config.draft


def _identified(key: str, choice: ModelChoice) -> tuple[ModelChoice, ModelConfig]:
    choice, _ = identify(key, choice, loads=False)
    assert choice.architecture is not None, "identify has read it"
    return choice, choice.architecture


def _with_architecture(draft: DraftConfig, model: ModelConfig | None) -> DraftConfig:
    return draft if draft.model is None else replace(draft, model=replace(draft.model, architecture=model))


def _machine(config: Config) -> Hardware:
    h = config.hardware
    return configured(h.name, h.tensor_parallel, h.bandwidth_gbs, h.tflops, h.memory_gib, h.efficiency)
