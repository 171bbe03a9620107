"""Record in golden.json what some forty commands do: their errors, and the runs that they store.

    python -m tests.golden.record

Of a run: its id, configuration, tokens, counts and predictions. Of times and of all else that
depends on the machine, only the names are kept. Each lists its differences from an earlier one.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from magicdec.tracking.reader import iter_runs
from tests.programs import ROOT, python
from tests.runs import lines

GOLDEN = Path(__file__).parent / "golden.json"
LAUNCH = Path(__file__).parent / "launch.py"
LIKE, ABSENT = "(like)", "(absent)"
Record = dict[str, Any]

TINY = (
    "hardware=cpu hardware.dtype=float32 attention=sdpa scenario.repeats=1"
    " scenario.profile_repeats=1"
)
TINY += " batch.size=2 batch.context_len=80 batch.generate_len=12"
TEXT = f"{TINY} data=text data.path=LICENSE"
SELF = f"{TEXT} draft.gamma=3 cache.budget=24"
LLAMA = "target=llama-3.1-8b hardware=8xa100 batch.size=64 batch.context_len=32000"
MISTAKES = (
    "cache.budgt=3",
    "cache=steaming",
    "draft.gamma=0",
    "cache.budget=2",
    "batch.context_len=99999",
    "data=random",
    "target.path=/nowhere",
    "data.task=x",
    "draft.synthetic_acceptance=9",
    "batch.size=two",
    "draft=model cache=quantized",
    "scenario=predict",
    "engine=transformers scenario=serve",
    "scenario.repeats=true",
)
CASES = {
    "streaming": SELF,
    **{
        policy: f"{SELF} cache={policy}"
        for policy in ("window", "snapkv", "h2o", "topk", "quantized", "random")
    },
    "full": f"{TEXT} draft.gamma=3 cache=full",
    "pyramidkv": f"{SELF} cache=pyramidkv cache.observation_window=8",
    "quest": f"{SELF} cache=quest cache.page_size=4",
    "verify_guided": f"{SELF} cache=verify_guided cache.refresh=2",
    "none": f"{TEXT} draft=none",
    "model": f"{SELF} draft=model",
    "model over h2o": f"{SELF} draft=model cache=h2o draft.gamma=2",
    "ngram": f"{TEXT} draft=ngram draft.gamma=3",
    "layer_skip": f"{TEXT} draft=layer_skip draft.num_layers=3 cache=full",
    "hierarchical": f"{SELF} draft=hierarchical draft.cache.budget=32",
    "sampled": f"{SELF} sampling=sample sampling.seed=3",
    "sampled model": f"{SELF} draft=model sampling=sample sampling.top_k=20 sampling.top_p=0.9",
    "suffix": f"{TEXT} draft=suffix draft.gamma=3",
    "sampled ngram": f"{TEXT} draft=ngram sampling=sample",
    "end of sequence": f"{SELF} sampling.ignore_eos=false batch.num_batches=2",
    "ruler": f"{SELF} data=ruler data.task=niah_single batch.context_len=300",
    "repeat": f"{SELF} data=repeat",
    "synthetic": (
        f"{TINY} target.weights=random data=random cache.budget=24 draft.synthetic_acceptance=0.7"
    ),
    "profile": (
        "hardware=cpu attention=sdpa cache.budget=24 scenario=profile scenario.profile_repeats=1 "
        "scenario.batch_sizes=[1,2] scenario.context_lens=[64] scenario.gammas=[2]"
    ),
    "serve": f"{SELF} scenario=serve scenario.concurrencies=[1,2] scenario.num_requests=4",
    "serve sampled": (
        f"{SELF} draft=model sampling=sample scenario=serve scenario.concurrencies=[2]"
    ),
    "sweep": f"{SELF} -m cache.budget=16,24",
    "intervals": f"{SELF} batch.size=4 scenario.repeats=3",
    "predict": f"scenario=predict {LLAMA} cache.budget=512",
    "predict unknown": f"scenario=predict {LLAMA} cache=quest cache.budget=700",
    "predict alpha": (
        f"scenario=predict {LLAMA} draft=model target@draft.model=llama-3.2-1b scenario.alpha=0.8"
    ),
    "predict paper": "scenario=predict experiment=paper/table6_snapkv batch.size=128",
    "plan": (
        f"scenario=plan {LLAMA} scenario.save_as=null scenario.drafts=[self,ngram]"
        " scenario.batch_sizes=[32,64]"
    ),
    **{f"refused: {mistake}": f"{TINY} {mistake}" for mistake in MISTAKES},
}
FAST = ("streaming", "sampled model", "predict", "refused: cache=steaming")  # in the default suite
# Results that depend on neither machine nor time; in a run that predicts, the predictions too.
# Another processor rounds logit gaps and z-scores differently.
KEPT = (
    r"(status|id|attempt|device|gamma|alpha|alpha_ci95)$|(acceptance|data|output|weights)[/_]|.*/accuracy$|lossless/(?!.*(gap|z_score|error|power))|"
    r"memory/\w+_kv_gib"
)
PREDICTED = rf"{KEPT}|(predicted|published)/"
# Missing in an installation, and on a machine without other work.
IGNORED = ("commit", "commit_dirty", "disturbed")


def recorded(name: str) -> dict[str, Record]:
    """Run a case; return how it failed, or the runs that it stored."""
    with tempfile.TemporaryDirectory() as folder:
        done = python(LAUNCH, *CASES[name].split(), "tracker=[]", f"runs_dir={folder}")
        found = {
            f"{name}, run {number}": dict(_run(run)) for number, run in enumerate(iter_runs(folder))
        }
        if done.returncode:
            found[name] = {"exit code": done.returncode, "error": done.stderr.strip()}
        return json.loads(json.dumps(found).replace(folder, "RUNS").replace(str(ROOT), "ROOT"))


def case_of(record: str) -> str:
    """Return the case that a record is of."""
    return record.partition(", run ")[0]


def _run(run: Record) -> Iterator[tuple[str, Any]]:
    folder, config = run.pop("folder"), run.pop("config")
    predicts = config["scenario"]["name"] in ("predict", "plan")
    yield from _flat("config", config)
    for key, value in run.items():
        if key not in IGNORED:
            yield (
                key,
                _rounded(value) if re.match(PREDICTED if predicts else KEPT, key) else _kind(value),
            )
    for name in ("generations", "samples", "history"):
        rows = lines(folder, name)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        yield name, f"{len(rows)} x {' '.join(keys)}"
        hashed = [key for key in keys if key != "decode_s"]  # which are times
        for key in hashed if predicts or name != "history" else ():
            column = json.dumps([_rounded(row.get(key)) for row in rows])
            yield (
                f"{name}, {key}",
                column if predicts else hashlib.sha256(column.encode()).hexdigest()[:12],
            )


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(f"{key}.{name}", part)
    else:
        yield key, value


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _kind(value: Any) -> str:
    is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return "number or null" if is_number else type(value).__name__


def read() -> dict[str, Record]:
    found: dict[str, Record] = {"": {}}
    for name, own in json.loads(GOLDEN.read_text()).items():
        whole = found[own.pop(LIKE)] | own
        found[name] = {key: value for key, value in whole.items() if value != ABSENT}
    del found[""]
    return found


def main() -> None:
    """Record all cases again."""
    found: dict[str, Record] = {"": {}}
    written = {}
    with ThreadPoolExecutor(2) as pool:
        for records in pool.map(recorded, CASES):
            for name, record in records.items():
                differences = [{LIKE: other} | _difference(record, found[other]) for other in found]
                written[name] = min(differences, key=len)
                found[name] = record
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")


def _difference(record: Record, other: Record) -> Record:
    own = dict.fromkeys(other.keys() - record.keys(), ABSENT) | record
    return {key: own[key] for key in sorted(own) if other.get(key, ABSENT) != own[key]}


if __name__ == "__main__":
    main()
