"""Every file in conf/ and sweeps/, and what the configuration refuses."""

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from magicdec.architectures import ModelConfig, RopeScaling
from magicdec.config.checks import refuse_unread, unread, validate, warnings
from magicdec.config.load import load, to_dict
from magicdec.config.options import known_keys, values_of
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import Config
from magicdec.errors import UserError

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"
}
TARGETS = OPTIONS["target"]
LEFT_OUT = ("draft", "experiment", "engine")  # composed by tests of their own
# Row i takes option i of every group, so that a few compositions see them all.
ROWS = [
    {group: options[i % len(options)] for group, options in OPTIONS.items() if group not in LEFT_OUT}
    for i in range(len(TARGETS))
]

EXPERIMENTS = sorted(
    str(path.relative_to(CONF / "experiment").with_suffix("")) for path in (CONF / "experiment").rglob("*.yaml")
)


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load(compose("config", list(overrides)))


@pytest.fixture(scope="module")
def default() -> dict:
    return to_dict(composed())


def changed(default: dict, **changes) -> Config:
    """The default configuration with some keys set: changed(default, draft__gamma=2)."""
    cfg = OmegaConf.create(default)
    if scenario := changes.pop("scenario__name", None):
        cfg.scenario = OmegaConf.load(CONF / "scenario" / f"{scenario}.yaml")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return load(cfg)


def test_a_head_from_elsewhere_has_the_name_of_its_folder():
    named = {path: composed("draft=eagle3", f"draft.model.path={path}").draft.model.name for path in ("a/b/", "org/c")}
    assert named == {"a/b/": "b", "org/c": "c"}
    assert composed("draft=eagle3").draft.model.name == "tiny-eagle3"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["target"])
def test_every_option_is_valid_and_every_target_can_be_a_draft(row):
    draft = TARGETS[TARGETS.index(row["target"]) - 1]
    config = composed(
        *(f"{group}={option}" for group, option in row.items()),
        "data.path=somewhere",
        *(["data.prompt=text"] if row["data"] == "jsonl" else []),
        "draft=model",
        f"target@draft.model={draft}",
        "draft.model.path=elsewhere",
        "draft.synthetic_acceptance=0.8",
    )
    for group in ("target", "hardware", "scenario"):
        assert getattr(config, group).name == row[group]
    assert row["data"] in (config.data.name, config.data.task)
    assert config.draft.model is not None
    assert (config.draft.model.name, config.draft.model.path) == (draft, "elsewhere")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "paper/" not in name])
def test_every_experiment_is_valid(name):
    assert composed(f"experiment={name}").draft.name != "none"


@pytest.mark.parametrize("group", ["cache", "draft", "data"])
def test_an_option_read_without_hydra_is_what_hydra_composes(group):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for option in OPTIONS[group]:
            assert OmegaConf.to_container(compose("config", [f"{group}={option}"])[group]) == values_of(group, option)


@pytest.mark.parametrize("name", OPTIONS["draft"])
def test_every_draft_is_valid(name):
    assert composed(f"draft={name}").draft.name == name


def test_every_policy_and_draft_has_its_file():
    assert set(POLICIES) <= set(OPTIONS["cache"])
    assert {"none", *DRAFTS} == set(OPTIONS["draft"])


def test_no_key_of_a_scenario_has_the_name_of_a_group():
    keys = {key for name in OPTIONS["scenario"] for key in values_of("scenario", name)}
    assert keys & {*OPTIONS, "attention", "sweeps"} == set()


def test_every_file_opens_with_what_it_is():
    for path in [*CONF.rglob("*.yaml"), *(ROOT / "sweeps").glob("*.yaml")]:
        assert path.read_text().startswith("# "), path


SWEEPS = [f"+sweeps={path.stem}" for path in (ROOT / "sweeps").glob("*.yaml")]


@pytest.mark.extra
@pytest.mark.parametrize("choice", sorted(SWEEPS) + [f"experiment={name}" for name in EXPERIMENTS if "paper/" in name])
def test_every_sweep_names_keys_that_exist(choice, monkeypatch):
    if "optuna" in choice:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [choice], return_hydra_config=True)
    params = cfg.hydra.sweeper.params
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    if cfg.data.name == "text":
        cfg.data.path = "books"  # of a user
    assert load(cfg).draft.name != "none"
    assert params
    assert {key for key in params if key not in OPTIONS} <= set(known_keys())


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps" / "wandb").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_of_wandb_gives_commands_that_compose(path, monkeypatch):
    """Its command as W&B's own agent writes it, for the first value of every parameter."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None, "not valid by W&B's schema"
    first = {key: {"value": p["values"][0] if "values" in p else p["min"]} for key, p in sweep["parameters"].items()}
    args = utils.create_sweep_command_args({"args": first})["args_no_hyphens"]
    start = sweep["command"].index("${program}")
    overrides = [a for part in sweep["command"][start + 1 :] for a in (args if "args" in part else [part])]
    config = composed(*overrides)
    assert (config.wandb.mode, config.draft.gamma) == ("online", 1)
    assert (ROOT / sweep["program"]).exists()


def test_an_architecture_is_read_as_the_models_own(default):
    given = {"rope_scaling": {"kind": "linear", "factor": 8}, "eos_token_ids": [2]}
    read = changed(default, target__architecture=given).target.architecture
    as_yaml = default["target"]["architecture"]
    assert read == ModelConfig(**as_yaml | {"rope_scaling": RopeScaling("linear", 8.0), "eos_token_ids": (2,)})


def test_a_composed_configuration_can_be_sent_to_another_process():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", ["draft=hierarchical"])
    assert load(pickle.loads(pickle.dumps(cfg))) == load(cfg)


def test_a_configuration_is_frozen(default):
    config = changed(default, draft__name="model", draft__model=default["target"])
    groups = [config, *(value for value in vars(config).values() if is_dataclass(value)), config.draft.model]
    for group in [*groups, config.target.architecture]:
        with pytest.raises(FrozenInstanceError):
            setattr(group, fields(group)[0].name, None)


def test_plain_dictionaries_are_read_back(default):
    config = changed(default, draft__name="model", draft__model=default["target"], data__seed=7)
    assert load(OmegaConf.create(to_dict(config))) == config


def test_the_first_run_needs_no_warning(default):
    assert warnings(changed(default)) == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch__size": 0}, "batch.size=0: must be auto or at least 1"),
        ({"batch__size": "many"}, "batch.size=many: must be auto or at least 1"),
        ({"batch__context_len": -1}, "batch.context_len=-1: must be at least 1"),
        ({"batch__generate_len": 1}, "batch.generate_len=1: must be at least 2"),
        ({"batch__num_batches": 0}, "batch.num_batches=0: must be at least 1"),
        ({"batch__prefill_chunk": 0}, "batch.prefill_chunk=0: must be auto or at least 1"),
        (
            {"draft__gamma": "auto", "hardware__tensor_parallel": 2},
            "draft.gamma=auto: goes with one rank only, not with hardware.tensor_parallel=2; give a number",
        ),
        ({"draft__gamma": 0}, "draft.gamma=0: must be auto or at least 1"),
        ({"draft__gamma": -1}, "draft.gamma=-1: must be auto or at least 1"),
        ({"draft__gamma": "best"}, "draft.gamma=best: must be auto or at least 1"),
        ({"draft__gamma": 256}, "draft.gamma=256: must be below cache.budget=256"),
        ({"draft__quantization": "int2"}, "draft.quantization=int2: must be one of none, int8, int4"),
        ({"cache__budget": 4}, "cache.budget=4: must be above cache.num_sink=4"),
        ({"cache__budget": -1}, "cache.budget=-1: must be above cache.num_sink=4"),
        ({"cache__policy": "quantized", "cache__bits": 3}, "cache.bits=3: must be 8 or 4"),
        ({"cache__policy": "snapkv", "cache__kernel": 4}, "cache.kernel=4: must be an odd number of at least 1"),
        ({"cache__num_sink": -1}, "cache.num_sink=-1: must be at least 0"),
        ({"draft__synthetic_acceptance": 1.5}, "draft.synthetic_acceptance=1.5: must be between 0 and 1"),
        ({"draft__name": "model"}, "draft.model=null: draft.name=model needs one"),
        ({"target__weights": "random"}, "target.weights=random: acceptance cannot be measured on noise"),
        ({"target__weights": "randm"}, "must be one of checkpoint, random; did you mean random?"),
        ({"target__architecture__num_heads": 3}, "target.architecture: num_heads=3 is not a multiple"),
        ({"data__name": "random"}, "data=random: acceptance cannot be measured on noise"),
        ({"data__name": "text"}, "data.path=null: data=text needs a file or folder"),
        (
            {"data__name": "book"},
            "data.name=book: must be one of jsonl, pg19, prompts, random, repeat, ruler, stdlib",
        ),
        ({"data__name": "ruler"}, "data.task=null: choose one, as in data.task=niah_single"),
        ({"data__name": "ruler", "data__task": "qwe"}, "data.task=qwe: must be one of niah_single, niah_multikey, cwe"),
        ({"data__seed": -1}, "data.seed=-1: must be at least 0"),
        ({"sampling__temperature": -0.5}, "sampling.temperature=-0.5: must be 0 (greedy) or from 0.0001 to 10,000"),
        (
            {"sampling__temperature": float("nan")},
            "sampling.temperature=nan: must be 0 (greedy) or from 0.0001 to 10,000",
        ),
        ({"sampling__temperature": 1e-40}, "sampling.temperature=1e-40: must be 0 (greedy) or from 0.0001 to 10,000"),
        ({"hardware__tflops": float("inf")}, "hardware.tflops=inf: must be a finite number"),
        ({"sampling__top_k": 0}, "sampling.top_k=0: must be at least 1"),
        ({"sampling__top_p": 0.0}, "sampling.top_p=0.0: must be from 1e-30 to 1"),
        ({"sampling__top_p": 1.01}, "sampling.top_p=1.01: must be from 1e-30 to 1"),
        (
            {"attention": "cppp"},
            "attention=cppp: must be one of auto, cpp, flash, flashinfer, sdpa, triton; did you mean cpp",
        ),
        (
            {"draft__name": "sel"},
            "draft.name=sel: must be one of none, eagle3, hierarchical, layer_skip, model, ngram, self, suffix;",
        ),
        ({"hardware__device": "gpu"}, "hardware.device=gpu: must be one of auto, cpu, cuda"),
        ({"hardware__dtype": "float8"}, "hardware.dtype=float8: must be one of auto, float32, bfloat16, float16"),
        ({"hardware__memory_gib": 0.0}, "hardware.memory_gib=0.0: must be above 0"),
        ({"scenario__name": "serve", "scenario__latency_ms": -1.0}, "scenario.latency_ms=-1.0: must be above 0"),
        ({"wandb__mode": "onlin"}, "must be one of offline, online, disabled; did you mean online?"),
        ({"scenario__name": "profile", "scenario__gammas": []}, "scenario.gammas=[]: must hold at least one"),
        (
            {"scenario__name": "serve", "scenario__length_shares": []},
            "scenario.length_shares=[]: must hold at least one",
        ),
        ({"scenario__name": "serve", "scenario__length_shares": [1.5]}, "must hold numbers above 0 and at most 1"),
        ({"scenario__name": "serve", "scenario__rates": [0.0]}, "scenario.rates=[0.0]: must hold numbers above 0"),
        (
            {"scenario__name": "serve", "scenario__rates": [1.0, 1e-9]},
            "scenario.rates=[1.0, 1e-09]: scenario.num_requests=16 would arrive within 4,444,444.4 hours; at most 24",
        ),
        (
            {"scenario__name": "serve", "scenario__concurrencies": []},
            "scenario.concurrencies=[]: scenario=serve needs at least one of them, or of scenario.rates or replays",
        ),
        (
            {"scenario__name": "predict", "scenario__gammas": [2, 0]},
            "scenario.gammas=[2, 0]: must hold numbers of at least 1",
        ),
    ],
)
def test_mistakes_name_key_value_and_what_is_valid(default, changes, error):
    with pytest.raises(UserError) as raised:
        changed(default, **changes)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mistakes_in_a_draft_model_and_a_profile(default):
    with pytest.raises(UserError, match=r"draft.model.weights=random: acceptance cannot"):
        changed(default, draft__name="model", draft__model=default["target"] | {"weights": "random"})
    grid = {"scenario__batch_sizes": [1], "scenario__context_lens": [512], "scenario__gammas": [2, 64]}
    with pytest.raises(UserError, match=r"scenario.gammas=64: must be below cache.budget=64"):
        changed(default, scenario__name="profile", cache__budget=64, **grid)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft__name": "none", "draft__gamma": 0, "cache__budget": 0},  # nothing of a draft counts without one
        {"draft__name": "none", "target__weights": "random", "data__name": "random"},
        {"draft__synthetic_acceptance": 0.0, "target__weights": "random"},
        {"cache__policy": "full", "cache__budget": 0},
        {"cache__budget": 5},
        {"draft__name": "ngram", "cache__budget": 0},
        {"draft__gamma": 127},
        {"draft__gamma": "auto", "cache__budget": 5},
    ],
)
def test_the_edges_of_what_is_valid(default, changes):
    validate(changed(default, **changes))


@pytest.mark.parametrize("engine", OPTIONS["engine"])
def test_engines_other_than_ours_do_not_draft_unless_told(engine):
    config = composed(f"engine={engine}")
    expected = ("self", "streaming") if engine == "native" else ("none", "full")
    assert (config.engine.name, config.draft.name, config.cache.policy) == (engine, *expected)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("draft.cache.budget=0", "draft.cache.budget=0: must be above draft.cache.num_sink=4"),
        ("draft.cache.budget=6", "draft.gamma=6: must be below draft.cache.budget=6"),
        ("draft.cache.num_sink=-1", "draft.cache.num_sink=-1: must be at least 0"),
    ],
)
def test_the_inner_cache_of_a_hierarchical_draft_obeys_the_same_rules(override, error):
    with pytest.raises(UserError, match=error):
        composed("draft=hierarchical", override)
    assert composed("draft=hierarchical", "draft.cache.budget=6", "draft.gamma=auto").gammas == (1, 2, 3, 5)


PEERS = ("transformers", "vllm", "llamacpp", "openvino")
ONE_MODEL = {"draft__name": "model", "batch__size": 1, "cache__policy": "full"}


@pytest.mark.parametrize(
    ("engines", "changes", "error"),
    [
        (PEERS, {"scenario__name": "predict", "scenario__gammas": [1]}, "scenario.name=predict: engine="),
        (PEERS, {"attention": "sdpa"}, "attention=sdpa: engine="),
        (PEERS, {"hardware__tensor_parallel": 2}, "hardware.tensor_parallel=2: engine="),
        (PEERS, {"target__weights": "random"}, "target.weights=random: engine="),
        (["transformers", "llamacpp", "openvino"], {"draft__name": "self"}, "draft.name=self: engine="),
        (PEERS, {"draft__name": "hierarchical"}, "draft.name=hierarchical: engine="),
        (["vllm"], {"draft__name": "layer_skip"}, "choose one of none, model, eagle3, ngram, self"),
        (["transformers"], {"draft__name": "ngram"}, "batch.size=auto: engine=transformers speculates on one row"),
        (["transformers"], {"draft__name": "ngram", "batch__size": 8}, "set it to 1, or draft=none"),
        (PEERS, ONE_MODEL | {"cache__policy": "streaming"}, "cache.policy=streaming: engine="),
        (PEERS, ONE_MODEL | {"draft__gamma": "auto"}, "draft.gamma=auto: engine="),
        (PEERS, ONE_MODEL | {"draft__quantization": "int8"}, "draft.quantization=int8: engine="),
        (PEERS, ONE_MODEL | {"draft__synthetic_acceptance": 0.5}, "draft.synthetic_acceptance=0.5: engine="),
        (
            ["native"],
            {"engine__name": "tgi"},
            "engine.name=tgi: must be one of llamacpp, native, openai, openvino, transformers, vllm",
        ),
        (["openvino"], {"engine__kv_type": "i4"}, "engine.kv_type=i4: must be one of f32, u8"),
        (["transformers"], {"engine__kv_cache": "paged"}, "engine.kv_cache=paged: must be one of static, dynamic"),
        (
            ["vllm"],
            {"engine__method": "medusa"},
            "engine.method=medusa: must be one of auto, draft_model, eagle, eagle3",
        ),
        (["vllm"], {"engine__time_limit_s": 0.0}, "engine.time_limit_s=0.0: must be above 0"),
    ],
)
def test_what_engines_other_than_ours_cannot_do(default, engines, changes, error):
    for engine in engines:
        plain = {"engine__name": engine, "draft__name": "none", "draft__model": default["target"]}
        with pytest.raises(UserError) as raised:
            changed(default, **plain | changes)
        assert error in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("changes", [ONE_MODEL, {"draft__name": "ngram", "batch__size": 1}, {"draft__name": "none"}])
def test_what_engines_other_than_ours_can_do(default, changes):
    for engine in PEERS:
        validate(changed(default, engine__name=engine, draft__model=default["target"], **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2,)),
        ({"draft__gamma": "auto"}, (1, 2, 3, 5, 8)),
        ({"draft__gamma": "auto", "cache__budget": 6}, (1, 2, 3, 5)),
        ({"draft__gamma": "auto", "draft__name": "ngram", "cache__budget": 6}, (1, 2, 3, 5, 8)),
        ({"draft__gamma": "auto", "draft__name": "none"}, (0,)),
    ],
)
def test_the_gammas_that_a_run_may_use(default, changes, expected):
    assert changed(default, **changes).gammas == expected


@pytest.mark.parametrize(
    ("typed", "choice"),
    [
        ("cache.page_size=8", "cache=streaming"),
        ("draft.num_layers=3", "draft=self"),
        ("+draft.inner_gamma=3", "draft=self"),
        ("data.path=FOLDER", "data=stdlib"),
        ("scenario.gammas=[1]", "scenario=compare"),
        ("batch.size=4", "scenario=profile; set scenario.batch_sizes"),
        ("batch.context_len=512", "scenario=profile; set scenario.context_lens"),
        ("draft.gamma=2", "scenario=profile; set scenario.gammas"),
        ("engine.python=python3", "engine=native"),
    ],
)
def test_what_has_no_effect_is_told_of_what_was_typed(default, typed, choice):
    read = ["draft=self", "cache.budget=64", "data.seed=1", "batch.generate_len=2", "wandb.mode=disabled"]
    grid = {"scenario__batch_sizes": [1], "scenario__context_lens": [512], "scenario__gammas": [2]}
    config = changed(default, scenario__name="profile", **grid) if "profile" in choice else changed(default)
    assert unread(config, [*read, typed]) == [f"{typed} has no effect with {choice}"]


def test_what_has_no_effect_is_a_mistake_but_for_how_much_is_measured(default):
    assert refuse_unread(changed(default), ["cache.budget=64", "scenario.gammas=[1]"]) == [
        "scenario.gammas=[1] has no effect with scenario=compare"
    ]
    with pytest.raises(UserError, match=r"^data.path=FOLDER has no effect with data=stdlib"):
        refuse_unread(changed(default), ["scenario.gammas=[1]", "data.path=FOLDER"])


def test_keys_of_what_an_option_brings_along_have_an_effect(default):
    typed = ["draft=hierarchical", "draft.model.path=null", "draft.cache.budget=64", "draft.inner_gamma=1"]
    parts = {"draft__model": default["target"], "draft__cache": default["cache"], "draft__inner_gamma": 1}
    assert unread(changed(default, draft__name="hierarchical", **parts), typed) == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"cache__budget": 4096}, "cache.budget=4096 holds all of batch.context_len=4096"),
        ({"cache__policy": "full"}, "cache=full with draft=self"),
        ({"sampling__top_k": 5}, "sampling.top_k=5 has no effect"),
    ],
)
def test_what_is_hardly_meant_is_warned_about(default, changes, warning):
    found = warnings(changed(default, **changes))
    assert len(found) == 1
    assert warning in found[0]
