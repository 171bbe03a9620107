"""From a typed configuration to what the cost model predicts: no weights, no device, no PyTorch."""

from dataclasses import dataclass, field, fields, replace

from magicdec.config.checks import check_length
from magicdec.config.choices import CacheConfig, DraftConfig, ModelChoice
from magicdec.config.options import values_of
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import ROWS_ON, Config, HardwareConfig
from magicdec.costmodel import acceptance
from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.hardware import CPU, OWN_STACK, Hardware, configured, device_in
from magicdec.costmodel.round import Setup, memory
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.planning.identity import identify
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
    target, _ = identify("target", config.target, loads=False)
    assert target.architecture is not None, "identify has read it"
    config = replace(config, target=target)
    if config.draft.model is not None:
        model, _ = identify("draft.model", config.draft.model, loads=False)
        config = replace(config, draft=replace(config.draft, model=model))
    check_length(config, target.architecture.max_position_embeddings)
    return PredictionPlan(config, _setup(config, _machine(config.hardware), _draft(config)))


def setup_of_run(
    config: Config,
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
    own, known = config.hardware, device_in(device_name)
    machine = replace(
        own,
        name=known.name if known else CPU if own.device == "cpu" else device_name,
        bandwidth_gbs=own.bandwidth_gbs or (None if known else bandwidth_gbs),
        tflops=own.tflops or (None if known else tflops),
    )
    setup = _setup(config, _machine(machine, OWN_STACK), config.draft)
    return replace(setup, element_bytes=element_bytes, stored_weight_bytes=weight_bytes)


def cache_named(config: Config, policy: str) -> CacheConfig:
    """Return the run's own cache where it has this policy, or else the one that conf/cache describes."""
    if config.cache.policy == policy:
        return config.cache
    given, facts = values_of("cache", policy), POLICIES[policy].facts
    return facts(**{entry.name: given[entry.name] for entry in fields(facts) if entry.name in given})


def draft_named(name: str, ranks: int | None) -> DraftConfig:
    """Return a draft by its name in scenario.drafts: one without a model of its own, or a target on `ranks` GPUs."""
    if name in DRAFTS and not DRAFTS[name].facts.needs_model:
        return DRAFTS[name].facts()
    return DRAFTS["model"].facts(model=ModelChoice(name, architecture=architecture(name)), tensor_parallel=ranks)


def curves(config: Config) -> Curves:
    """Return the known acceptances, of the runs in the store and of publications."""
    return Curves([*acceptance.measured(latest(iter_runs(config.runs_dir))), *acceptance.published()], task_of(config))


def task_of(config: Config) -> str:
    """Return the name of the text that the models continue."""
    return acceptance.task_name(config.data.name, config.data.task, config.sampling.temperature)


def _draft(config: Config) -> DraftConfig:
    if config.scenario.name == "plan":  # which has drafts of its own
        return DRAFTS["self"].facts()
    if not config.speculates:
        raise UserError("draft=none: there is no speculation to predict; choose draft=self or draft=model")
    return config.draft


def _setup(config: Config, hardware: Hardware, draft: DraftConfig) -> Setup:
    """Return the setup of a configuration whose models are identified."""
    assert config.target.architecture is not None, "identify has read it"
    return Setup(
        target=config.target.architecture,
        hardware=hardware,
        batch=int(config.batch.size),
        context=config.batch.context_len,
        draft=draft,
        cache=config.cache,
        target_name=config.target.name,
        target_path=config.target.path,
    )


def _machine(h: HardwareConfig, stack: str | None = None) -> Hardware:
    return configured(h.name, h.tensor_parallel, h.bandwidth_gbs, h.tflops, h.memory_gib, h.efficiency, stack)
