"""The basic launcher composes a job as Hydra does, which is the oracle here, and says what Hydra says."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

import launch
from hydra_plugins.basic_launcher import Composer
from magicdec.config.explain import explain


@pytest.fixture(scope="module")
def loader():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGICDEC_ROOT", str(launch.ROOT))
        setup_globals()
        yield ConfigLoaderImpl(create_config_search_path(str(launch.CONF)))


@pytest.fixture(scope="module")
def composer(loader):
    return Composer(loader)


@pytest.fixture(scope="module")
def master(loader):
    typed = ["draft.gamma=1,2", "hydra.job.name=launch", "hydra.job.config.override_dirname.exclude_keys=[batch.size]"]
    config = loader.load_configuration("config", typed, RunMode.MULTIRUN)
    assert config.hydra.sweep.dir, "whose time stands for all jobs, once it has been asked for"
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["draft.gamma=1"],
        ["draft.gamma=2", "batch.size=auto", "batch.context_len=64"],
        ["draft=model", "draft.gamma=2", "draft.model.path=somewhere"],
        ["draft.gamma=3", "draft=none"],
        ["target=llama-3.1-8b", "target@draft.model=llama-3.2-1b", "draft=model", "draft.gamma=3"],
        ["+sweeps=gamma_x_budget", "scenario=predict", "draft.gamma=4", "cache.budget=64"],
        ["experiment=quick", "draft.gamma=4", "runs_dir=elsewhere"],
        ["wandb.tags=[a,b]", "scenario.gammas=[1,2]", "wandb.project='a project, with a comma'"],
        ["wandb.project=${target.name}", "batch.size=2", "++batch.size=3", "+draft.unheard=1"],
        ["sweep.name=one", "sweep={name: another}"],
        ["draft.gamma=1", "++draft={gamma: 2}"],
        ["target.architecture={vocab_size: 8, rope_theta: 3}", "target.architecture.num_layers=2"],
        ["draft.gamma=1", "hydra.job.chdir=false"],
    ],
)
def test_as_hydra_composes_it(loader, composer, master, overrides):
    expected = loader.load_sweep_config(master, overrides)
    for _ in range(2):  # composed, and copied
        found = composer.load_sweep_config(master, overrides)
        assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)
        assert OmegaConf.get_type(found) is OmegaConf.get_type(expected)
        assert OmegaConf.is_struct(found)
        assert found.hydra.sweep.dir == expected.hydra.sweep.dir == master.hydra.sweep.dir
        found.batch.size = 99  # which is not the next job's


@pytest.mark.parametrize(
    "overrides",
    [
        ["draft.gama=1"],
        ["batch.context_len=many"],
        ["draft.gamma=1,2"],
        ["draft=unheard", "draft.gamma=1"],
        ["draft.gamma"],
        ["draft.model.path=somewhere"],
        ["+batch.size=1"],
    ],
)
def test_mistakes_are_hydras(loader, composer, master, overrides):
    with pytest.raises((HydraException, AssertionError)) as expected:
        loader.load_sweep_config(master, overrides)
    with pytest.raises((HydraException, AssertionError)) as found:
        composer.load_sweep_config(master, overrides)
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
    assert explain(found.value, overrides) == explain(expected.value, overrides)


def test_options_are_composed_once(composer, master, monkeypatch):
    asked = []
    compose = composer.loader.load_sweep_config
    monkeypatch.setattr(composer.loader, "load_sweep_config", lambda *args: asked.append(args) or compose(*args))
    for gamma in range(1, 9):
        composer.load_sweep_config(master, ["draft=ngram", "cache=full", f"draft.gamma={gamma}"])
    assert len(asked) == 1
