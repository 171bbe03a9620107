"""Compose in a tenth of the time. Hydra reads thirty files for each of the thousand
configurations that tests compose, though most choose the same options and set other keys: here, it
reads a file once and merges the files of a choice once.
"""

import copy
import pickle
from dataclasses import replace
from functools import cache
from os.path import abspath

import omegaconf._utils
import omegaconf.base
from hydra._internal import config_loader_impl
from hydra._internal import defaults_list as hydra_defaults
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf.grammar_parser import parse

from magicdec.config.folders import CONF

create_defaults_list = config_loader_impl.create_defaults_list
create_interpolation_map = hydra_defaults._create_interpolation_map
merge_files = ConfigLoaderImpl._compose_config_from_defaults_list
OURS = {str(CONF), str(CONF.parent)}
LISTS = {}  # by what was chosen
# What is composed is changed by whoever asks for it: pickled, it is copied five times as fast.
MERGED = {}  # by the files of the list, and where they are searched
load_file = ConfigRepository.load_config
load_single = ConfigLoaderImpl._load_single_config
open_repository = CachingConfigRepository.__init__
read_rule = OverridesParser.parse_rule
FILES = {}  # by their names, and where they are searched
PLACED = {}  # the same by the package, too, into which a file goes
READ = {}  # what was typed, by the rule of the grammar


def reads_ours(repo):
    """Return whether the files are those of conf/, which stay as they are."""
    folders = (source.path for source in repo.get_sources() if source.scheme() == "file")
    return all(abspath(folder) in OURS for folder in folders)


def sources_of(repo):
    """Return where files are searched, in this order."""
    return [(source.provider, source.path) for source in repo.get_sources()]


def defaults_list(repo, config_name, overrides_list, **settings):
    """Return what `create_defaults_list` does: the files of the chosen options, and the keys."""
    if not reads_ours(repo):
        return create_defaults_list(repo, config_name, overrides_list, **settings)
    keys = Overrides(repo, overrides_list).config_overrides
    choices = [each for each in overrides_list if each not in keys]
    chosen = (config_name, *(each.input_line for each in choices), *settings.items())
    if chosen not in LISTS:
        LISTS[chosen] = create_defaults_list(repo, config_name, choices, **settings)
    return replace(LISTS[chosen], config_overrides=keys)


def merged(loader, defaults, repo):
    """Return what `_compose_config_from_defaults_list` does: the files, before any key is set."""
    if not reads_ours(repo):
        return merge_files(loader, defaults, repo)
    files = ((each.config_path, each.package, each.primary) for each in defaults)
    asked = (*files, *sources_of(repo))
    if asked not in MERGED:
        MERGED[asked] = pickle.dumps(merge_files(loader, defaults, repo))
    return pickle.loads(MERGED[asked])


def loaded(repo, config_path):
    """Return what `load_config` does: a file and its list of defaults."""
    if not reads_ours(repo):
        return load_file(repo, config_path)
    asked = (config_path, *sources_of(repo))
    if asked not in FILES:
        FILES[asked] = pickle.dumps(load_file(repo, config_path))
    return pickle.loads(FILES[asked])


def placed(loader, default, repo):
    """Return what `_load_single_config` does: a file below its package."""
    if not reads_ours(repo):
        return load_single(loader, default, repo)
    asked = (default.config_path, default.package, default.primary, *sources_of(repo))
    if asked not in PLACED:
        PLACED[asked] = pickle.dumps(load_single(loader, default, repo))
    return pickle.loads(PLACED[asked])


def interpolation_map(overrides, defaults, self_added):
    """Return what `_create_interpolation_map` does, where a default is an interpolation."""
    if any(default.is_interpolation() for default in defaults):
        return create_interpolation_map(overrides, defaults, self_added)
    return None


def repository(caching, delegate):
    """Begin with a copy, as `__init__` does, but for the store of all structured options, which it
    copies, too.
    """
    caching.delegate, caching.cache = copy.copy(delegate), {}


def rule(parser, text, name):
    """Return what `parse_rule` does: an override, or a part of one."""
    if (text, name) not in READ:
        READ[text, name] = read_rule(parser, text, name)
    return copy.copy(READ[text, name])


def remember():
    """Remember from now on what was read, merged and parsed."""
    ConfigRepository.load_config = loaded
    CachingConfigRepository.__init__ = repository
    config_loader_impl.create_defaults_list = defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = merged
    ConfigLoaderImpl._load_single_config = placed
    hydra_defaults._create_interpolation_map = interpolation_map
    OverridesParser.parse_rule = rule
    omegaconf.base.parse = omegaconf._utils.parse = cache(parse)


def forget():
    """Compose as Hydra does."""
    ConfigRepository.load_config = load_file
    CachingConfigRepository.__init__ = open_repository
    config_loader_impl.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_files
    ConfigLoaderImpl._load_single_config = load_single
    hydra_defaults._create_interpolation_map = create_interpolation_map
    OverridesParser.parse_rule = read_rule
    omegaconf.base.parse = omegaconf._utils.parse = parse
