"""Cross-field checks of a configuration: mistakes, and settings that are legal but probably not
meant.

Rules for single values are declared with their fields: in groups.py, scenario_settings.py and the
modules of choices.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from magicdec.config.options import read_keys
from magicdec.config.prediction_settings import Assumed
from magicdec.config.registry import CORPORA, has_cache
from magicdec.config.scenario_settings import LOWEST_RATE, Compare, Profile, Serve, Verify
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.inputs.rules import did_you_mean

# Names of environment variables with a value that nothing stores, such as HF_TOKEN; HF_TOKEN_PATH
# is none of them. A shorter value may be anything.
SECRET = re.compile(
    r"(?!.*_(PATH|FILE|DIR)$).*(KEY|TOKEN|SECRET|PASSWORD|PASSWD)S?(_|$)", re.IGNORECASE
)
SHORTEST_SECRET = 8
# A name or a password in the address of a server, as in http://me:password@host.
LOGIN = re.compile(r"://[^/?#\s]*@")
# The same in a key that is an address: whoever has not escaped a password may have any character
# in it.
LOGIN_IN_ADDRESS = re.compile(r"://\S*@")
MOST_HOURS = 24  # of the requests of one level of load
ONLY_AUTO = ("scenario.precision", "scenario.max_minutes")  # read with scenario.repeats=auto


def validate(config: Config) -> None:
    """Raise UserError for the first mistake."""
    rules = [
        *([_peer] if config.engine.name != "native" else []),
        *([_peers_draft] if config.speculates and not config.engine.has_our_drafts else []),
        _scenario,
        _data,
    ]
    if isinstance(config.scenario, Serve):
        rules.append(_load)
    if config.speculates:
        rules += [_draft, _budget, _noise]
    for mistakes in rules:
        for mistake in mistakes(config):
            raise UserError(mistake)


def warnings(config: Config) -> list[str]:
    """Return a line for each setting that is legal but probably not meant."""
    lines = []
    draft = config.draft
    cache = config.cache
    sampling = config.sampling
    context_len = config.scenario.longest(config.batch)
    context_key = config.scenario.key_of("batch.context_len")
    is_ours = config.engine.name == "native"
    if is_ours and draft.is_target and not cache.has_budget and draft.quantization == "none":
        lines.append(
            "cache=full with draft=self: the target drafts for itself over its own cache, which"
            " saves nothing"
        )
    lines += [
        f"{budget} holds all of {context_key}={context_len}: it saves nothing"
        for budget in config.budgets_of_at_least(context_len)
    ]
    for name, value in (("top_k", sampling.top_k), ("top_p", sampling.top_p)):
        if sampling.temperature == 0 and value is not None:
            why = "at sampling.temperature=0 the likeliest token is taken"
            lines.append(f"sampling.{name}={value} has no effect: {why}")
    return lines


def refuse_unread(config: Config, overrides: Sequence[str]) -> list[str]:
    """Raise UserError for an override without effect; return a line for each that only says how
    much is measured.

    Keys of `scenario` are of that kind: one command line may serve several scenarios.
    """
    lines = unread(config, overrides)
    for line in lines:
        if not line.lstrip("+").startswith("scenario."):
            raise UserError(line)
    return lines


def unread(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return a line for each override without effect: on keys that the chosen options do not have
    or read.
    """
    chosen = {"cache": config.cache.policy}
    chosen |= {
        group: getattr(config, group).name for group in ("draft", "data", "engine", "scenario")
    }
    replaced = config.scenario.replaced(config.draft, config.cache)
    lines = []
    for override in overrides:
        group, _, key = override.lstrip("+").partition("=")[0].partition(".")
        option = chosen.get(group)
        reason = replaced.get(f"{group}.{key}" if key else group)
        if reason is not None:
            lines.append(f"{override} has no effect with {reason}")
        elif (
            f"{group}.{key}" in ONLY_AUTO
            and isinstance(config.scenario, Compare)
            and config.scenario.repeats != "auto"
        ):
            lines.append(f"{override} has no effect without scenario.repeats=auto")
        elif f"{group}.{key}" == "batch.prefill_chunk" and not config.engine.has_our_drafts:
            lines.append(f"{override} has no effect with engine={config.engine.name}")
        elif group == "cache" and not has_cache(config.draft.name):
            lines.append(f"{override} has no effect with draft={config.draft.name}")
        elif key and option and key.partition(".")[0] not in read_keys(group, option):
            lines.append(f"{override} has no effect with {group}={option}")
    return lines


def refuse_group(group: str, overrides: Sequence[str], reason: str) -> None:
    """Raise UserError for an override of a group that has no effect, for this reason."""
    for override in overrides:
        if re.match(rf"[+~]*{group}[.=]", override):
            raise UserError(f"{override} has no effect: {reason}; leave it out")


def refuse_secrets(given: Any, key: str = "") -> None:
    """Raise UserError for a text that holds the value of an environment variable with the name of a
    secret, or an address with a name or a password.

    `given` is what a run stores and logs: nested dictionaries and lists of texts, or overrides.
    """
    secrets = {
        name: value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST_SECRET and SECRET.match(name)
    }
    _refuse_secrets(given, key, secrets)


def _refuse_secrets(given: Any, key: str, secrets: Mapping[str, str]) -> None:
    if isinstance(given, Mapping):
        for name, value in given.items():
            _refuse_secrets(value, f"{key}.{name}" if key else str(name), secrets)
    elif isinstance(given, list):
        for value in given:
            _refuse_secrets(value, key or str(value).partition("=")[0], secrets)
    elif isinstance(given, str):
        is_address = "engine." in key
        if (LOGIN_IN_ADDRESS if is_address else LOGIN).search(given):
            remedy = "use engine.key_variable" if is_address else "leave it out"
            raise UserError(f"{key}: a name or password in the address would be stored; {remedy}")
        for name, secret in secrets.items():
            if secret in given:
                raise UserError(f"{key} holds the value of {name}, and is stored: leave it out")


def check_length(config: Config, longest: int) -> None:
    """Raise UserError where sequences become longer than the target's `longest`."""
    key = config.scenario.key_of("batch.context_len")
    new = config.batch.generate_len
    context_len = config.scenario.longest(config.batch)
    if context_len + new > longest:
        raise UserError(
            f"{key}={context_len} + batch.generate_len={new} = {context_len + new} exceeds the"
            f" target's maximum of {longest} tokens; {key}={longest - new} would fit"
        )


def _scenario(config: Config) -> Iterator[str]:
    """Yield values of a scenario that do not go together, or not with the hardware."""
    scenario = config.scenario
    ranks = config.hardware.tensor_parallel
    if isinstance(scenario, Compare) and scenario.repeats == "auto" and ranks > 1:
        # Each would stop by its own clock.
        yield (
            "scenario.repeats=auto: goes with one rank only, not with"
            f" hardware.tensor_parallel={ranks}; give a number"
        )
    if isinstance(scenario, Assumed):
        yield from scenario.mistakes()
    is_vllm = config.engine.name in ("vllm", "openai")  # the latter may be one
    if isinstance(scenario, Profile) and scenario.forward and not is_vllm:
        yield (
            f"scenario.forward={scenario.forward}: holds times of vLLM, shown next to those of its"
            " server; leave it null, or choose engine=vllm or engine=openai"
        )


def _data(config: Config) -> Iterator[str]:
    """Yield what a corpus lacks or does not have."""
    data = config.data
    corpus = CORPORA[data.name].facts
    if corpus.needs_path and not data.path:
        yield f"data.path=null: data={data.name} needs a file or folder, as in data.path=FOLDER"
    if corpus.tasks and data.task is None:
        yield f"data.task=null: choose one, as in data.task={corpus.tasks[0]}"
    if data.task is not None and corpus.tasks is not None and data.task not in corpus.tasks:
        valid = (
            f"must be one of {', '.join(corpus.tasks)}"
            if corpus.tasks
            else f"data={data.name} has no tasks"
        )
        yield f"data.task={data.task}: {valid}{did_you_mean(data.task, corpus.tasks)}"
    yield from data.mistakes()


def _load(config: Config) -> Iterator[str]:
    """Yield what is missing, or out of proportion, in the load of scenario=serve."""
    scenario = config.scenario
    assert isinstance(scenario, Serve)
    if scenario.replays and not getattr(config.data, "arrival", None):
        yield (
            f"scenario.replays={scenario.replays}: data={config.data.name} has no times of arrival;"
            " set data.arrival=FIELD"
        )
    if scenario.slo and not any(scenario.bounds.values()):
        yield (
            f"scenario.slo={scenario.slo}: needs a bound, scenario.latency_ms or"
            " scenario.first_token_ms"
        )
    least, of_what = (
        (1, "fewest users") if scenario.slo == "concurrency" else (2 * LOWEST_RATE, "lowest rates")
    )
    if scenario.slo and scenario.slo_most < least:
        yield f"scenario.slo_most={scenario.slo_most}: must be at least {least:g}, the {of_what}"
    if scenario.slo and config.hardware.tensor_parallel > 1 and not config.engine.parallel:
        yield f"scenario.slo={scenario.slo}: goes with one device; set hardware.tensor_parallel=1"
    if not any((scenario.concurrencies, scenario.rates, scenario.replays, scenario.slo)):
        yield (
            "scenario.concurrencies=[]: scenario=serve needs at least one of them, or of"
            " scenario.rates or replays"
        )
    hours = scenario.num_requests / min(scenario.rates, default=math.inf) / 3600
    if hours > MOST_HOURS:
        yield (
            f"scenario.rates={scenario.rates}: scenario.num_requests={scenario.num_requests} would"
            f" arrive within {hours:,.1f} hours; at most {MOST_HOURS}"
        )


def _peer(config: Config) -> Iterator[str]:
    """Yield what engines other than ours cannot do, with any draft or none."""
    engine = f"engine={config.engine.name}"
    ranks = config.hardware.tensor_parallel
    if config.scenario.name not in config.engine.scenarios:
        valid = " and ".join(f"scenario={name}" for name in config.engine.scenarios)
        yield (
            f"scenario.name={config.scenario.name}: {engine} goes with {valid} only; choose"
            " engine=native"
        )
    elif isinstance(config.scenario, Compare) and config.scenario.repeats == "auto":
        yield (
            f"scenario.repeats=auto: {engine} decodes all repeats of one way after the other; give"
            " a number"
        )
    if config.attention != "auto":
        yield f"attention={config.attention}: {engine} has attention of its own; leave it auto"
    if ranks > 1 and not (config.engine.parallel and config.scenario.serves):
        yield f"hardware.tensor_parallel={ranks}: {engine} runs on one device here; set it to 1"
    for key, model in config.models.items():
        if model.weights == "random":
            yield f"{key}.weights=random: {engine} loads checkpoints only; choose engine=native"


def _peers_draft(config: Config) -> Iterator[str]:
    """Yield what engines other than ours cannot do with this draft."""
    draft = config.draft
    engine = f"engine={config.engine.name}"
    drafts = ("none", *config.engine.drafts)
    if draft.name not in drafts:
        yield (
            f"draft.name={draft.name}: {engine} has no such draft; choose one of"
            f" {', '.join(drafts)}"
        )
    if config.engine.one_row and config.batch.size != 1:
        yield (
            f"batch.size={config.batch.size}: {engine} speculates on one row at a time; set it to"
            " 1, or draft=none"
        )
    if draft.is_model and config.cache.has_budget:
        yield (
            f"cache.policy={config.cache.policy}: {engine} keeps all of a draft's KV cache; choose"
            " cache=full"
        )
    if draft.gamma == "auto":
        yield f"draft.gamma=auto: {engine} proposes as many tokens in every round; give a number"
    if draft.quantization != "none":
        yield (
            f"draft.quantization={draft.quantization}: {engine} drafts with the weights as they"
            " are; choose none"
        )
    if draft.synthetic_acceptance is not None:
        yield (
            f"draft.synthetic_acceptance={draft.synthetic_acceptance}: {engine} measures"
            " acceptance; leave it null"
        )


def _draft(config: Config) -> Iterator[str]:
    """Yield values that do not go together with this draft."""
    draft, ranks = config.draft, config.hardware.tensor_parallel
    yield from draft.mistakes()
    if draft.acceptance is not None and not config.scenario.predicts:
        yield (
            f"draft.acceptance={draft.acceptance}: what others have measured is for"
            " scenario=predict and scenario=plan; leave it null"
        )
    if ranks > 1 and draft.gamma == "auto":  # each would choose by its own clock
        yield (
            f"draft.gamma=auto: goes with one rank only, not with hardware.tensor_parallel={ranks};"
            " give a number"
        )
    if ranks > 1 and draft.one_rank:
        yield (
            f"hardware.tensor_parallel={ranks}: draft={draft.name} goes with one rank only; set it"
            " to 1"
        )


def _budget(config: Config) -> Iterator[str]:
    """Yield budgets that are too small for what they must hold."""
    key, gamma = "draft.gamma", max(config.gammas)
    if isinstance(config.scenario, Profile | Verify):
        key, gamma = "scenario.gammas", max(config.scenario.gammas)
    for name, cache in config.budgeted.items():
        yield from cache.mistakes(name)
        if gamma >= cache.budget:
            yield f"{key}={gamma}: must be below {name}.budget={cache.budget}"


def _noise(config: Config) -> Iterator[str]:
    """Yield what acceptance cannot be measured on."""
    if not config.scenario.measures_acceptance or config.draft.synthetic_acceptance is not None:
        return
    sources = [
        f"{key}.weights=random" for key, model in config.models.items() if model.weights == "random"
    ]
    for source in (
        [*sources, f"data={config.data.name}"]
        if CORPORA[config.data.name].facts.is_noise
        else sources
    ):
        valid = "set draft.synthetic_acceptance to a number from 0 to 1, or draft=none"
        yield f"{source}: acceptance cannot be measured on noise; {valid}"
