"""Schedules as engines take them: a file, and the command that reads it.

Names and forms are those of the engines' own sources in September 2026:

- vLLM: `num_speculative_tokens_per_batch_size` (vllm-project/vllm#32374), entries of batch range
  and gamma. With a context range between them in vllm-project/vllm#48944, which is proposed, not
  released.
- SGLang: `--speculative-adaptive-config` (sgl-project/sglang#24055), by the lower bound of the
  batch; EAGLE heads only, as which it runs the modules of a checkpoint, too.
- TensorRT-LLM: `draft_len_schedule` (NVIDIA/TensorRT-LLM#10860), by the upper bound of the batch.
  The first entry must hold the largest gamma, and beyond the last entry there is no speculation.
- llama.cpp: one number for all batches, and `--spec-type` for drafts other than models.

Modules that a checkpoint ships with need no name of a model: engines find them there.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import yaml

from magicdec.config.choices import DraftConfig
from magicdec.costmodel.round import Setup
from magicdec.costmodel.schedules import Entry, Schedule
from magicdec.errors import UserError
from magicdec.shell import ContentOf, command_line

FILE = "{file}"
SHORTEST_NGRAM = 1  # tokens: the shortest suffix that our own lookup matches


@dataclass(frozen=True)
class Settings:
    """The settings of an engine: the content of a file (None where flags say everything), and the
    command.
    """

    content: str | None
    words: Sequence[str]  # of the command, with FILE where the file's path belongs
    note: str = ""

    def command(self, file: str) -> str:
        """Return the command that serves with the settings of a file."""
        return command_line(
            [type(word)(file) if word == FILE else word for word in self.words], indent="    "
        )


@dataclass(frozen=True)
class EngineForm:
    """An engine that can be given a schedule: what it calls our drafts, and what its gamma can
    depend on.
    """

    label: str
    methods: Mapping[str, str]
    write: Callable[[Schedule, Setup, str], Settings]
    suffix: str = ""  # of its file
    by_batch: bool = True
    by_context: bool = False
    # What happens in rounds of a schedule whose gamma is 0; "": they are decode steps.
    pauses: str = ""

    def settings(self, schedule: Schedule, setup: Setup) -> Settings:
        """Return a schedule as settings of this engine. Raise UserError for a draft that it cannot
        run.
        """
        return self.write(schedule, setup, self.method(setup))

    def method(self, setup: Setup) -> str:
        """Return the engine's name of the draft. Raise UserError for a draft that it does not
        have.
        """
        if setup.draft.name not in self.methods:
            drafts = " or ".join(f"draft={name}" for name in self.methods)
            raise UserError(
                f"draft={setup.draft.name}: {self.label} cannot be set to it; choose {drafts}"
            )
        return self.methods[setup.draft.name]


def _vllm(schedule: Schedule, setup: Setup, method: str) -> Settings:
    command = ["vllm", "serve", _target(setup), *_ranks("--tensor-parallel-size", setup)]
    if schedule.max_gamma == 0:
        return Settings(None, command, NEVER)
    entries = [
        [*entry.batch, *(entry.context if schedule.by_context else ()), entry.gamma]
        for entry in schedule.entries
    ]
    config: dict[str, Any] = {"method": method} | _model("model", setup)
    config["num_speculative_tokens"] = schedule.max_gamma
    if setup.draft.name == "ngram":
        config |= vllm_lookup(setup.draft)
    config["num_speculative_tokens_per_batch_size"] = entries
    flags = ["--max-num-seqs", str(schedule.max_batch), "--speculative-config", ContentOf(FILE)]
    return Settings(_json(config), [*command, *flags])


def vllm_lookup(draft: DraftConfig) -> dict[str, int]:
    """Return vLLM's keys for the suffixes that `draft`, a lookup of n-grams, matches. Without a
    minimum vLLM matches those of the maximum length alone.
    """
    return {"prompt_lookup_min": SHORTEST_NGRAM, "prompt_lookup_max": asdict(draft)["max_ngram"]}


def read_vllm(config: Any) -> Schedule:
    """Return the schedule of a speculative config of vLLM, without its cells. Raise ValueError
    where it holds none.
    """
    table = (
        config.get("num_speculative_tokens_per_batch_size") if isinstance(config, dict) else None
    )
    if not isinstance(table, list) or not table or any(not _is_entry(row) for row in table):
        raise ValueError(
            "num_speculative_tokens_per_batch_size must hold [low, high, gamma], or with a context"
            " range before it"
        )
    everywhere = (1, sys.maxsize)
    rows = [
        Entry((row[0], row[1]), (row[2], row[3]) if len(row) == 5 else everywhere, row[-1])
        for row in table
    ]
    return Schedule((), tuple(sorted(rows, key=lambda entry: (entry.context, entry.batch))))


def _is_entry(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) in (3, 5)
        and all(isinstance(n, int) and n >= 0 for n in row)
    )


def _sglang(schedule: Schedule, setup: Setup, method: str) -> Settings:
    command = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        _target(setup),
        *_ranks("--tp", setup),
    ]
    if schedule.max_gamma == 0:
        return Settings(None, command, NEVER)
    slots = {str(entry.batch[0]): {"candidate_steps": [entry.gamma]} for entry in schedule.entries}
    most = schedule.max_gamma
    options = {"--max-running-requests": str(schedule.max_batch), "--speculative-algorithm": method}
    options |= _model("--speculative-draft-model-path", setup)
    options |= {"--speculative-num-steps": str(most), "--speculative-eagle-topk": "1"}
    options |= {"--speculative-num-draft-tokens": str(most + 1)}
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", FILE]
    return Settings(_json(slots), [*command, *chain(*options.items()), *adaptive])


def _tensorrt_llm(schedule: Schedule, setup: Setup, method: str) -> Settings:
    command = ["trtllm-serve", _target(setup), *_ranks("--tp_size", setup)]
    command += ["--max_batch_size", str(schedule.max_batch)]
    first = schedule.entries[0].gamma
    if first == 0:
        return Settings(None, command, FROM_LARGER if schedule.max_gamma else NEVER)
    lengths = {entry.batch[1]: min(entry.gamma, first) for entry in schedule.entries}
    # Beyond the last entry it does not speculate anyway.
    while len(lengths) > 1 and lengths[max(lengths)] == 0:
        del lengths[max(lengths)]
    config: dict[str, Any] = {"decoding_type": method, "max_draft_len": first} | _model(
        "speculative_model", setup
    )
    if setup.draft.name == "ngram":
        config |= _tensorrt_llm_lookup(setup.draft)
    config["draft_len_schedule"] = lengths
    note = ""
    if schedule.max_gamma > first:
        note = (
            f"gamma is at most {first}, that of the smallest batch: a limit of draft_len_schedule"
        )
    content = yaml.safe_dump({"speculative_config": config}, sort_keys=False)
    return Settings(content, [*command, "--extra_llm_api_options", FILE], note)


def _tensorrt_llm_lookup(draft: DraftConfig) -> dict[str, Any]:
    """Return TensorRT-LLM's keys for the lookup that `draft` is: of the latest match, and within
    the request's own text.
    """
    return {
        "max_matching_ngram_size": asdict(draft)["max_ngram"],
        "is_use_oldest": False,
        "is_public_pool": False,
    }


def _llamacpp(schedule: Schedule, setup: Setup, method: str) -> Settings:
    command = ["llama-server", "-m", "TARGET.gguf", "--parallel", str(schedule.max_batch)]
    if schedule.max_gamma == 0:
        return Settings(None, command, NEVER)
    words = [*command, *method.split(), "--spec-draft-n-max", str(schedule.max_gamma)]
    return Settings(None, words, "one gamma for all batches")


FROM_LARGER = (
    "it pays with larger batches only, which draft_len_schedule cannot say: its first entry is the"
    " largest"
)
NEVER = "speculation is not predicted to pay: serve without it"
VLLM_PAUSES = "the drafter runs all the same, for 4% to 11% of a step (vllm-project/vllm#51575)"
TENSORRT_LLM_PAUSES = (
    "the drafter's cache is not written meanwhile, and acceptance collapses for all requests that"
    " go on (NVIDIA/TensorRT-LLM#16888)"
)
VLLM_METHODS = {
    "model": "draft_model",
    "ngram": "ngram",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "dflash": "dflash",
}
FORMS = {
    "vllm": EngineForm(
        "vLLM",
        VLLM_METHODS | {"suffix": "suffix"},
        _vllm,
        ".json",
        pauses=VLLM_PAUSES,
    ),
    "vllm_by_context": EngineForm(
        "vLLM",
        VLLM_METHODS,
        _vllm,
        ".json",
        by_context=True,
        pauses=VLLM_PAUSES,
    ),
    "sglang": EngineForm(
        "SGLang's adaptive speculation", {"eagle3": "EAGLE3", "mtp": "EAGLE"}, _sglang, ".json"
    ),
    "tensorrt_llm": EngineForm(
        "TensorRT-LLM",
        {
            "model": "Draft_Target",
            "ngram": "NGram",
            "eagle3": "Eagle3",
            "mtp": "MTP",
            "dflash": "DFlash",
        },
        _tensorrt_llm,
        ".yaml",
        pauses=TENSORRT_LLM_PAUSES,
    ),
    "llamacpp": EngineForm(
        "llama.cpp",
        {
            "model": "-md DRAFT.gguf",
            "eagle3": "--spec-type draft-eagle3 -md DRAFT.gguf",
            "mtp": "--spec-type draft-mtp",
            "dflash": "--spec-type draft-dflash -md DRAFT.gguf",
        },
        _llamacpp,
        by_batch=False,
    ),
}


def _target(setup: Setup) -> str:
    return setup.target_path or setup.target_name


def _ranks(flag: str, setup: Setup) -> list[str]:
    return [flag, str(setup.ranks)] if setup.ranks > 1 else []


def _model(key: str, setup: Setup) -> dict[str, str]:
    """Return the draft's own model under an engine's key; {} for a draft without one, or whose
    model is in the target's checkpoint.
    """
    draft = setup.draft
    model = draft.model if draft.needs_model else None
    if model is None or (draft.ships_with_target and model.path is None):
        return {}
    return {key: model.path or model.name}


def _json(value: Any) -> str:
    return json.dumps(value) + "\n"
