"""Every file in conf/ and sweeps/, and what the configuration refuses."""

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from functools import cache

import pytest
from hydra import compose as hydra_compose
from omegaconf import DictConfig, OmegaConf

from magicdec.architectures.model_config import ModelConfig, RopeScaling
from magicdec.config import options
from magicdec.config.checks import refuse_unread, unread, validate, warnings
from magicdec.config.folders import CONF
from magicdec.config.hydra_versions import initialized
from magicdec.config.load import compose, load, to_dict
from magicdec.config.options import complete_model, known_keys, read_keys, values_of
from magicdec.config.registry import DRAFTS, GROUPS, POLICIES
from magicdec.config.schema import Config
from magicdec.config.search_path import add_own_options
from magicdec.costmodel import targets
from magicdec.errors import UserError
from tests import composing
from tests.inputs.test_plugins import written
from tests.programs import ROOT
from tests.runs import one_line

OPTIONS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"
}
TARGETS = OPTIONS["target"]
LEFT_OUT = ("draft", "experiment", "engine")  # composed by tests of their own
# Row i takes option i of every group, so that a few compositions see them all.
ROWS = [
    {
        group: options[i % len(options)]
        for group, options in OPTIONS.items()
        if group not in LEFT_OUT
    }
    for i in range(len(TARGETS))
]
EXPERIMENTS = [
    f"experiment={path.relative_to(CONF / 'experiment').with_suffix('')}"
    for path in sorted((CONF / "experiment").rglob("*.yaml"))
]
PAPER = [choice for choice in EXPERIMENTS if "paper/" in choice]
SWEEPS = sorted(f"+sweeps={path.stem}" for path in (ROOT / "sweeps").glob("*.yaml"))


def plain(*overrides: str, **options: bool) -> DictConfig:
    add_own_options()
    with initialized(CONF):
        return hydra_compose("config", list(overrides), **options)


@cache
def default() -> dict:
    return to_dict(compose([]))


def changed(*keys: str) -> Config:
    """The default configuration with some keys set, without composing it again."""
    cfg, given = OmegaConf.create(default()), OmegaConf.from_dotlist(list(keys))
    if scenario := OmegaConf.select(given, "scenario.name"):
        cfg.scenario = values_of("scenario", scenario)
    return load(OmegaConf.merge(cfg, given))


def test_a_head_from_elsewhere_has_the_name_of_its_folder():
    named = {
        path: compose(["draft=eagle3", f"draft.model.path={path}"]).draft.model.name
        for path in ("a/b/", "org/c")
    }
    assert named == {"a/b/": "b", "org/c": "c"}
    assert compose(["draft=eagle3"]).draft.model.name == "tiny-eagle3"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["target"])
def test_every_option_is_valid_and_every_target_can_be_a_draft(row):
    draft = TARGETS[TARGETS.index(row["target"]) - 1]
    keys = [
        "data.path=somewhere",
        "draft=model",
        f"target@draft.model={draft}",
        "draft.model.path=elsewhere",
    ]
    keys += [
        "draft.synthetic_acceptance=0.8",
        *(["data.prompt=text"] if row["data"] == "jsonl" else []),
    ]
    config = compose([*(f"{group}={option}" for group, option in row.items()), *keys])
    for group in ("target", "hardware", "scenario"):
        assert getattr(config, group).name == row[group]
    assert row["data"] in (config.data.name, config.data.task)
    assert (config.draft.model.name, config.draft.model.path) == (draft, "elsewhere")


@pytest.mark.parametrize("choice", [choice for choice in EXPERIMENTS if choice not in PAPER])
def test_every_experiment_is_valid(choice):
    assert compose([choice]).draft.name != "none"


@pytest.mark.parametrize("name", OPTIONS["draft"])
def test_every_draft_is_valid(name):
    assert compose([f"draft={name}"]).draft.name == name


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("experiment=quick", "cache.budget=32", "draft.gamma=3"),
        ("draft=model", "target@draft.model=llama-3.2-1b", "batch={size: 3}"),
        ("+sweeps=gamma_x_budget", "~draft.gamma", "hydra.verbose=true"),
    ],
)
def test_what_tests_remember_is_what_hydra_composes(overrides):
    def composed():
        return OmegaConf.to_container(plain(*overrides, return_hydra_config=True))

    remembered = [composed(), composed()]
    composing.forget()
    try:
        fresh = composed()
    finally:
        composing.remember()
    assert remembered == [fresh, fresh]
    plain(*overrides).cache.budget = 1
    assert composed() == fresh


def test_options_read_without_hydra_are_what_hydra_composes():
    groups = ("cache", "draft", "data")
    for i in range(max(len(OPTIONS[group]) for group in groups)):
        row = {group: OPTIONS[group][i % len(OPTIONS[group])] for group in groups}
        cfg = plain(*(f"{group}={option}" for group, option in row.items()))
        for group, option in row.items():
            composed = OmegaConf.to_container(cfg[group])
            if model := composed.get("model"):
                complete_model(model, None, [CONF], "draft.model")
            assert composed == values_of(group, option)


@pytest.mark.parametrize("group", GROUPS)
def test_the_files_of_a_group_set_the_keys_that_their_choices_read(group):
    """Keys are found by the classes, and without PyTorch by the files: both have the same."""
    for option in OPTIONS[group]:
        values = values_of(group, option)
        choice = values["policy" if group == "cache" else "name"]
        assert values.keys() == read_keys(group, choice), option


def test_composing_reads_no_file_of_conf_beside_hydra(monkeypatch):
    monkeypatch.setattr(options, "_content", lambda file: pytest.fail(f"reads {file}"))
    assert compose(["experiment=quick", "cache.budget=32", "draft.gamma=3"]).draft.gamma == 3


def test_a_broken_file_that_nobody_chose_breaks_nothing(here):
    texts = {
        "cache": "not: a: yaml\n",
        "draft": "- a\n- list\n",
        "scenario": "name: [\n",
        "data": "a: \t b\n",
    }
    written(here, {f"conf/{group}/half.yaml": text for group, text in texts.items()})
    (here / "conf" / "engine").mkdir()
    (here / "conf" / "engine" / "half.yaml").write_bytes(b"\xff\xfe")
    assert compose(["cache.num_sink=2"]).cache.num_sink == 2
    with pytest.raises(
        UserError, match=r"^unknown key cache.num_sinc; did you mean cache.num_sink"
    ):
        compose(["cache.num_sinc=2"])
    for group in ("cache", "draft", "scenario", "data", "engine"):
        with pytest.raises(UserError, match=rf"^[^\n]*{group}/half"):
            compose([f"{group}=half"])


def test_a_broken_target_that_nobody_chose_is_left_out_with_a_warning(here, capsys):
    written(here, {"conf/target/half.yaml": "not: a: yaml\n"})
    assert "llama-3.1-8b" in {option["name"] for option in targets.options()}
    assert (
        capsys.readouterr().err
        == f"warning: {here}/conf/target/half.yaml, line 1: mapping values are not allowed here;"
        " left out\n"
    )


def test_every_policy_and_draft_has_its_file():
    assert set(POLICIES) <= set(OPTIONS["cache"])
    assert {"none", *DRAFTS} == set(OPTIONS["draft"])


def test_no_key_of_a_scenario_has_the_name_of_a_group():
    keys = {key for name in OPTIONS["scenario"] for key in values_of("scenario", name)}
    assert keys & {*OPTIONS, "attention", "sweeps"} == set()


def test_every_file_opens_with_what_it_is():
    for path in [*CONF.rglob("*.yaml"), *(ROOT / "sweeps").glob("*.yaml")]:
        assert path.read_text().startswith("# "), path


@pytest.mark.extra
@pytest.mark.parametrize("choice", SWEEPS + PAPER)
def test_every_sweep_names_keys_that_exist(choice):
    if "optuna" in choice:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    cfg = plain(choice, return_hydra_config=True)
    params = cfg.hydra.sweeper.params
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    if cfg.data.name == "text":
        cfg.data.path = "books"  # of a user
    assert load(cfg).draft.name != "none"
    assert params
    assert {key for key in params if key not in OPTIONS} <= set(known_keys())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sweeps" / "wandb").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_sweep_of_wandb_gives_commands_that_compose(path):
    """Its command as W&B's own agent writes it, for the first value of every parameter."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None, "not valid by W&B's schema"
    first = {
        key: {"value": p["values"][0] if "values" in p else p["min"]}
        for key, p in sweep["parameters"].items()
    }
    args = utils.create_sweep_command_args({"args": first})["args_no_hyphens"]
    start = sweep["command"].index("${program}")
    config = compose(
        [a for part in sweep["command"][start + 1 :] for a in (args if "args" in part else [part])]
    )
    assert (config.wandb.mode, config.draft.gamma) == ("online", 1)
    assert (ROOT / sweep["program"]).exists()


@pytest.mark.parametrize(
    ("typed", "launcher", "sweeper"),
    [
        ([], "magicdec", "magicdec"),
        (["experiment=mine"], "basic", "magicdec"),
        (["+sweeps=mine"], "magicdec", "basic"),
    ],
)
def test_experiments_and_sweeps_choose_a_launcher_and_a_sweeper(here, typed, launcher, sweeper):
    chosen = "# @package _global_\ndefaults:\n  - override /hydra/{}: basic\n"
    files = {"experiment": chosen.format("launcher"), "sweeps": chosen.format("sweeper")}
    written(here, {f"conf/{group}/mine.yaml": text for group, text in files.items()})
    choices = plain(*typed, return_hydra_config=True).hydra.runtime.choices
    assert (choices["hydra/launcher"], choices["hydra/sweeper"]) == (launcher, sweeper)


def test_an_architecture_is_read_as_the_models_own():
    given = "target.architecture={rope_scaling: {kind: linear, factor: 8}, eos_token_ids: [2]}"
    expected = {"rope_scaling": RopeScaling("linear", 8.0), "eos_token_ids": (2,)}
    assert changed(given).target.architecture == ModelConfig(
        **default()["target"]["architecture"] | expected
    )


def test_a_composed_configuration_can_be_sent_to_another_process():
    cfg = plain("draft=hierarchical")
    assert load(pickle.loads(pickle.dumps(cfg))) == load(cfg)


def test_a_configuration_is_frozen():
    config = changed("draft.name=model", "draft.model=${target}")
    groups = [
        config,
        *(value for value in vars(config).values() if is_dataclass(value)),
        config.draft.model,
    ]
    for group in [*groups, config.target.architecture]:
        with pytest.raises(FrozenInstanceError):
            setattr(group, fields(group)[0].name, None)


def test_plain_dictionaries_are_read_back():
    config = changed("draft.name=model", "draft.model=${target}", "data.seed=7")
    assert load(OmegaConf.create(to_dict(config))) == config


def test_the_first_run_needs_no_warning():
    assert warnings(changed()) == []


# What is said of the last key of each mistake, and the mistakes.
RULES = {
    "must be auto or at least 1": "draft.gamma=0",
    "must be a percentage, as in 2%": "scenario.precision=2 % | scenario.precision=2.0",
    "must be at least 0": "cache.num_sink=-1 | data.seed=-1",
    "must be at least 1": "batch.context_len=-1 | batch.num_batches=0 | sampling.top_k=0",
    "must be at least 2": "batch.generate_len=1",
    "must be above 0": (
        "hardware.memory_gib=0.0 | scenario.name=serve; scenario.latency_ms=-1.0"
        " | engine.name=vllm; engine.time_limit_s=0.0"
    ),
    "must be from 1e-09 to 1e+12": (
        "hardware.tflops=1e-300 | hardware.bandwidth_gbs=1e+308"
        " | scenario.name=serve; scenario.slo_most=1e-10"
    ),
    "must be auto or a whole number from 1 to 1,024": (
        "draft.gamma=-1 | draft.gamma=best | draft.gamma=1025 | draft.gamma=1000000000"
    ),
    "must be auto or a whole number from 1 to 2,147,483,647": (
        "batch.size=0 | batch.size=many | batch.size=2147483648 | batch.prefill_chunk=0"
        " | scenario.repeats=many"
    ),
    "must be at most 2,147,483,647": (
        "cache.budget=2147483648 | cache.num_sink=2147483648 | batch.context_len=2147483648"
        " | cache.policy=quantized; cache.group_size=1000000000000000000"
    ),
    "must be at most 1,024": (
        "scenario.name=predict; scenario.acceptance_rate=0.5; scenario.acceptance_gamma=1025"
        " | draft.name=hierarchical; draft.inner_gamma=1025"
    ),
    "must be below 9,007,199,254,740,992": "data.seed=9007199254740992",
    "must be above cache.num_sink=4": "cache.budget=4 | cache.budget=-1",
    "must be below cache.budget=256": "draft.gamma=256",
    "must be a probability, a mean length above 1": "draft.synthetic_acceptance=-0.5",
    "must be from 1e-30 to 1": "sampling.top_p=0.0 | sampling.top_p=1.01",
    "must be 0 (greedy) or from 0.0001 to 10,000": (
        "sampling.temperature=-0.5 | sampling.temperature=nan | sampling.temperature=1e-40"
    ),
    "must be 8 or 4": "cache.policy=quantized; cache.bits=3",
    "must be an odd number from 1 to 2,147,483,647": "cache.policy=snapkv; cache.kernel=4",
    "must be a whole number from 1 to 2,147,483,647, or null": (
        "sweep.jobs_per_task=0 | sweep.jobs_per_task=3000000000"
    ),
    "must be from 1e-06 to 1": (
        "hardware.efficiency.overlap=0.0 | hardware.efficiency.overlap=1e-07"
        " | hardware.efficiency.overlap=1.5"
    ),
    "must be one of none, int8, int4": "draft.quantization=int2",
    "must be one of checkpoint, random; did you mean random?": "target.weights=randm",
    "must be one of jsonl, pg19, prompts, random, repeat, ruler, stdlib": "data.name=book",
    "must be one of niah_single, niah_multikey, cwe": "data.name=ruler; data.task=qwe",
    "must be one of auto, cpp, flash, flashinfer, sdpa, triton, varlen; did you mean cpp": (
        "attention=cppp"
    ),
    "must be one of none, dflash, eagle3, hierarchical, layer_skip, model, mtp, ngram, self, ": (
        "draft.name=sel"
    ),
    "must be one of auto, cpu, cuda": "hardware.device=gpu",
    "must be one of auto, float32, bfloat16, float16": "hardware.dtype=float8",
    "must be one of offline, online, disabled; did you mean online?": "wandb.mode=onlin",
    "must be one of llamacpp, magicdec, native, openai, openvino, tran": "engine.name=tgi",
    "must be one of f32, u8": "engine.name=openvino; engine.kv_type=i4",
    "must be one of static, dynamic": "engine.name=transformers; engine.kv_cache=paged",
    "must be one of auto, draft_model, eagle, eagle3": "engine.name=vllm; engine.method=medusa",
    "must hold at least one": (
        "scenario.name=profile; scenario.gammas=[] | scenario.name=serve; scenario.length_shares=[]"
    ),
    "must hold numbers from 1e-09 to 1e+12": (
        "scenario.name=serve; scenario.rates=[0.0]"
        " | scenario.name=serve; scenario.replays=[10000000000000.0]"
    ),
    "must hold numbers above 0 and at most 1": "scenario.name=serve; scenario.length_shares=[1.5]",
    "must hold whole numbers from 1 to 1,024": (
        "scenario.name=predict; scenario.gammas=[2, 0] | scenario.name=plan; scenario.gammas=[1025]"
    ),
    "must hold whole numbers from 1 to 2,147,483,647": (
        "scenario.name=serve; scenario.concurrencies=[2, 0]"
    ),
    "scenario=serve needs at least one of them, or of scenario.rates or replays": (
        "scenario.name=serve; scenario.concurrencies=[]"
    ),
    "acceptance cannot be measured on noise": "target.weights=random",
}
MISTAKES = [
    (keys, f"{keys.split('; ')[-1]}: {rule}")
    for rule, every in RULES.items()
    for keys in every.split(" | ")
]
MISTAKES += {
    "hardware.tflops=.inf": "hardware.tflops=inf: must be a finite number",
    "draft.gamma=auto; hardware.tensor_parallel=2": (
        "draft.gamma=auto: goes with one rank only, not with "
        "hardware.tensor_parallel=2; give a number"
    ),
    "scenario.repeats=auto; hardware.tensor_parallel=2": (
        "scenario.repeats=auto: goes with one rank only"
    ),
    "scenario.repeats=auto; draft.name=none; engine.name=transformers": (
        "scenario.repeats=auto: engine=transformers decodes all"
    ),
    "draft.name=model": "draft.model=null: draft.name=model needs one",
    "target.architecture.num_heads=3": "target.architecture: num_heads=3 is not a multiple",
    "data.name=random": "data=random: acceptance cannot be measured on noise",
    "data.name=text": "data.path=null: data=text needs a file or folder",
    "data.name=ruler": "data.task=null: choose one, as in data.task=niah_single",
    "scenario.name=plan; scenario.drafts=[1]": "scenario.drafts.0=1: must be a text",
    "scenario.name=serve; scenario.rates=[1.0, 1e-9]": (
        "scenario.rates=[1.0, 1e-09]: scenario.num_requests=16 would "
        "arrive within 4,444,444.4 hours; at most 24"
    ),
    **{
        f"cache.budget=64; scenario.name={name}; scenario.gammas=[2, 64]": (
            "scenario.gammas=64: must be below cache.budget=64"
        )
        for name in ("profile", "verify")
    },
    **{
        f"engine.name={name}; draft.name=self": "draft.name=self: engine="
        for name in ("transformers", "llamacpp", "openvino")
    },
    **{
        f"{engine}scenario.name=profile; scenario.forward=file": (
            "scenario.forward=file: holds times of vLLM, shown next to those of its server; leave"
            " it null, or choose engine=vllm or engine=openai"
        )
        for engine in (
            "",
            "engine.name=magicdec; ",
            "engine.name=llamacpp; draft.name=none; scenario.repeats=1; ",
        )
    },
    "engine.name=vllm; draft.name=layer_skip": "choose one of none, model, eagle3, ngram, self",
    "engine.name=transformers; draft.name=ngram": (
        "batch.size=auto: engine=transformers speculates on one row"
    ),
    "engine.name=transformers; draft.name=ngram; batch.size=8": "set it to 1, or draft=none",
}.items()


@pytest.mark.parametrize(("keys", "error"), MISTAKES)
def test_mistakes_name_key_value_and_what_is_valid(keys, error):
    with pytest.raises(UserError, match=one_line(error)):
        changed(*keys.split("; "))


@pytest.mark.parametrize(
    "key", ["batch.context_len", "batch.size", "hardware.tensor_parallel", "scenario.repeats"]
)
def test_a_text_where_a_number_is_wanted_is_called_that(key, monkeypatch):
    monkeypatch.setenv("COUNT", "2")
    for value in ('"2"', "${oc.env:COUNT}"):
        with pytest.raises(UserError) as caught:
            compose([f"{key}={value}"])
        assert str(caught.value).startswith(f'{key}="2": must be ')
        assert (
            "; this is a text: write it without quotes, and a variable as '${oc.decode:${oc."
            in str(caught.value)
        )
    group, name = key.split(".")
    assert (
        getattr(getattr(compose([f"{key}='${{oc.decode:${{oc.env:COUNT}}}}'"]), group), name) == 2
    )
    with pytest.raises(UserError) as caught:
        compose([f"{key}=many"])
    assert "quotes" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "a:b", "x" * 129, "''"])
def test_a_project_that_wandb_would_refuse_is_a_mistake(name):
    with pytest.raises(
        UserError, match=r"^wandb.project=.*: must be the name of a project: at most 128 characters"
    ):
        compose([f"wandb.project={name}"])
    assert compose(["wandb.project='long context, 2'"]).wandb.project == "long context, 2"


@pytest.mark.parametrize(
    ("draft", "mistake", "rule"),
    [
        ("model", "draft.model.weights=random", "acceptance cannot"),
        ("hierarchical", "draft.cache.budget=0", "must be above draft.cache.num_sink=4"),
        ("hierarchical", "draft.gamma=6", "must be below draft.cache.budget=6"),
        ("hierarchical", "draft.cache.num_sink=-1", "must be at least 0"),
        ("hierarchical", "draft.cache=streaming", "cannot be set as a whole"),
    ],
)
def test_the_model_and_the_inner_cache_of_a_draft_obey_the_same_rules(draft, mistake, rule):
    keys = [f"draft={draft}", *(["draft.cache.budget=6"] if "gamma" in mistake else [])]
    with pytest.raises(UserError, match=one_line(f"{mistake}: {rule}")):
        compose([*keys, mistake])


@pytest.mark.parametrize(
    "keys",
    [
        "draft.name=none; draft.gamma=0; cache.budget=0",  # nothing of a draft counts without one
        "draft.name=none; target.weights=random; data.name=random",
        "draft.synthetic_acceptance=0.0; target.weights=random",
        "cache.policy=full; cache.budget=0",
        "cache.budget=5",
        "draft.name=ngram; cache.budget=0",
        "draft.gamma=127",
        "draft.gamma=auto; cache.budget=5",
    ],
)
def test_the_edges_of_what_is_valid(keys):
    validate(changed(*keys.split("; ")))


@pytest.mark.parametrize("engine", OPTIONS["engine"])
def test_engines_other_than_ours_do_not_draft_unless_told(engine):
    config = compose([f"engine={engine}"])
    expected = ("none", "full")
    if engine in ("native", "magicdec"):
        expected = ("self", "streaming")
    assert (config.engine.name, config.draft.name, config.cache.policy) == (engine, *expected)


PEERS = ("transformers", "vllm", "llamacpp", "openvino")
ONE_MODEL = "draft.name=model; batch.size=1; cache.policy=full"
NOT_BY_PEERS = [
    "scenario.gammas=[1]; scenario.name=predict",
    "attention=sdpa",
    "hardware.tensor_parallel=2",
    "target.weights=random",
    "draft.name=hierarchical",
    *(
        f"{ONE_MODEL}; {key}"
        for key in ("cache.policy=streaming", "draft.gamma=auto", "draft.quantization=int8")
    ),
    f"{ONE_MODEL}; draft.synthetic_acceptance=0.5",
]


def of_peer(engine: str, keys: str) -> Config:
    return changed(
        f"engine.name={engine}", "draft.name=none", "draft.model=${target}", *keys.split("; ")
    )


@pytest.mark.parametrize("engine", PEERS)
@pytest.mark.parametrize("keys", NOT_BY_PEERS)
def test_what_engines_other_than_ours_cannot_do(engine, keys):
    with pytest.raises(UserError, match=one_line(f"{keys.split('; ')[-1]}: engine=")):
        of_peer(engine, keys)


@pytest.mark.parametrize("keys", [ONE_MODEL, "draft.name=ngram; batch.size=1", "draft.name=none"])
@pytest.mark.parametrize("engine", PEERS)
def test_what_engines_other_than_ours_can_do(engine, keys):
    validate(of_peer(engine, keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], (2,)),
        (["draft.gamma=auto"], (1, 2, 3, 5, 8)),
        (["draft.gamma=auto", "cache.budget=6"], (1, 2, 3, 5)),
        (["draft=hierarchical", "draft.gamma=auto", "draft.cache.budget=6"], (1, 2, 3, 5)),
        (["draft=ngram", "draft.gamma=auto", "cache.budget=6"], (1, 2, 3, 5, 8)),
        (["draft=none", "draft.gamma=auto"], (0,)),
    ],
)
def test_the_gammas_that_a_run_may_use(keys, expected):
    assert compose(keys).gammas == expected


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
        ("cache.budget=32", "draft=ngram"),
        ("scenario.precision=1%", "scenario=verify"),
        ("batch.prefill_chunk=64", "engine=transformers"),
    ],
)
def test_what_has_no_effect_is_told_of_what_was_typed(typed, choice):
    read = [
        "draft=self",
        "cache.budget=64",
        "data.seed=1",
        "batch.generate_len=2",
        "wandb.mode=disabled",
    ]
    grid = (
        "scenario.name=profile",
        "scenario.batch_sizes=[1]",
        "scenario.context_lens=[512]",
        "scenario.gammas=[2]",
    )
    config = changed(*(grid if "profile" in choice else ()))
    if choice in ("draft=ngram", "scenario=verify", "engine=transformers"):
        config, read = compose([choice]), []
    assert unread(config, [*read, typed]) == [f"{typed} has no effect with {choice}"]


PLAN = ["scenario=plan", "target=llama-3.1-8b", "hardware=h100"]
PREDICT = ["scenario=predict", *PLAN[1:]]


@pytest.mark.parametrize(
    ("others", "typed", "remedy"),
    [
        (PLAN, "draft=ngram", "; set scenario.drafts=[ngram]"),
        (PLAN, "cache=snapkv", "; set scenario.policies=[snapkv]"),
        (
            PLAN,
            "cache.budget=300",
            "; it tries budgets of its own: give scenario.alpha to fix one",
        ),
        (PLAN, "draft.gamma=7", "; set scenario.gammas"),
        (PLAN, "batch.num_batches=7", ""),
        (PREDICT, "batch.num_batches=7", ""),
        (["scenario=profile"], "batch.num_batches=7", ""),
        (["scenario=verify"], "batch.num_batches=7", ""),
        (["scenario=serve"], "batch.num_batches=7", "; set scenario.num_requests"),
    ],
)
def test_what_a_scenario_does_not_read_has_no_effect(others, typed, remedy):
    config = compose([*others, typed])
    said = f"{typed} has no effect with {others[0]}{remedy}"
    assert unread(config, [*others, typed]) == [said]


@pytest.mark.parametrize(
    "typed",
    [
        ["draft=ngram", "scenario.drafts=[self,ngram]", "draft.max_ngram=4"],
        ["draft=ngram", "scenario.alpha=0.5"],
        ["cache=snapkv", "scenario.policies=[snapkv]", "cache.kernel=3"],
        ["cache=snapkv", "cache.budget=300", "scenario.alpha=0.5"],
        ["draft=model", "target@draft.model=llama-3.2-1b", "scenario.schedule=vllm"],
        ["draft=model", "target@draft.model=llama-3.2-1b", "scenario.drafts=[llama-3.2-1b]"],
        ["draft=none"],
    ],
)
def test_what_a_search_reads_of_the_runs_own_draft_has_an_effect(typed):
    assert unread(compose([*PLAN, *typed]), typed) == []


@pytest.mark.parametrize("draft", ["self", "none"])
def test_a_share_of_matches_has_no_effect_with_a_draft_that_looks_nothing_up(draft):
    typed = "scenario.match_share=0.5"
    said = f"{typed} has no effect with draft={draft}: it is the share of a lookup's rounds"
    assert unread(compose([*PREDICT, f"draft={draft}", typed]), [typed]) == [said]


def test_a_lookups_share_of_matches_has_an_effect():
    typed = ["draft=ngram", "scenario.match_share=0.5"]
    assert unread(compose([*PREDICT, *typed]), typed) == []


def test_what_has_no_effect_is_a_mistake_but_for_how_much_is_measured():
    told = ["scenario.gammas=[1] has no effect with scenario=compare"]
    assert refuse_unread(changed(), ["cache.budget=64", "scenario.gammas=[1]"]) == told
    with pytest.raises(UserError, match=r"^data.path=FOLDER has no effect with data=stdlib"):
        refuse_unread(changed(), ["scenario.gammas=[1]", "data.path=FOLDER"])


def test_keys_of_what_an_option_brings_along_have_an_effect():
    typed = [
        "draft=hierarchical",
        "draft.model.path=null",
        "draft.cache.budget=64",
        "draft.inner_gamma=1",
    ]
    parts = (
        "draft.name=hierarchical",
        "draft.model=${target}",
        "draft.cache=${cache}",
        "draft.inner_gamma=1",
    )
    assert unread(changed(*parts), typed) == []


@pytest.mark.parametrize(
    ("key", "warning"),
    [
        ("cache.budget=4096", "cache.budget=4096 holds all of batch.context_len=4096"),
        ("cache.policy=full", "cache=full with draft=self"),
        ("sampling.top_k=5", "sampling.top_k=5 has no effect"),
    ],
)
def test_what_is_hardly_meant_is_warned_about(key, warning):
    (found,) = warnings(changed(key))
    assert warning in found
