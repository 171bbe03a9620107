"""`magicdec audit`: outputs of engines that are right, that are wrong in known ways, and that are
not the target's.
"""

import json
import re
import shutil

import pytest

from magicdec.commands import audit
from magicdec.config.load import compose
from magicdec.engine.decoder import Decoder
from magicdec.engine.native import NativeEngine
from magicdec.models.kv_cache import KVCache
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress
from tests.runs import TINY, run_here

KEYS = [
    "hardware=cpu",
    "batch.context_len=160",
    "batch.generate_len=40",
    "cache.budget=48",
    "draft.gamma=3",
]


def recorded(folder, *overrides: str, rows=6, fault=lambda patch: None, again: bool = False) -> str:
    """Decode both ways, speculatively with a fault, and record it as any engine would."""
    plan = resolve(compose([*KEYS, f"batch.size={rows}", *overrides]))
    with progress() as bars:
        engine: NativeEngine = build.engine(plan, bars)
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    batch = engine.open(prompts)
    batch.decoder.prefill(64)
    plain = batch.decoder.generate().tokens
    second = batch.decoder.generate().tokens if again else [None] * rows
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        fast = batch.decoder.generate(batch.draft).tokens
    names = ("prompt", "autoregressive", "speculative", "again")
    lines = [
        dict(zip(names, row, strict=True)) for row in zip(prompts, plain, fast, second, strict=True)
    ]
    path = folder / "outputs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def wrong_bonus(patch):
    """The second choice ends a round whose first proposal was accepted."""
    accept = Decoder.accept

    def wrong(decoder, proposal, logits_BTV):
        verdict = accept(decoder, proposal, logits_BTV)
        at = verdict.num_accepted_B == 1
        verdict.tokens_BT[at, 1] = logits_BTV[at, 1].topk(2).indices[:, 1]
        return verdict

    patch.setattr(Decoder, "accept", wrong)


def rollback_off_by_one(patch):
    commit = KVCache.commit
    patch.setattr(
        KVCache, "commit", lambda cache, n, count_B: commit(cache, n, count_B - int(n > 1))
    )


def stale_entries(patch):
    """The last committed token keeps the entry of the proposal behind it, which was rejected."""
    commit = KVCache.commit

    def stale(cache, num_appended, count_B):
        commit(cache, num_appended, count_B)
        for row, end in enumerate(cache.seqlens_B.tolist()):
            for entries in (cache.k_LBKSD, cache.v_LBKSD):
                entries[:, row, :, end - 1] = entries[:, row, :, end]

    patch.setattr(KVCache, "commit", stale)


@pytest.mark.parametrize("fault", [wrong_bonus, rollback_off_by_one, stale_entries])
def test_faults_of_an_engine_are_found(fault, tmp_path, capsys):
    assert audit.main([recorded(tmp_path, fault=fault), "target=tiny", "--rows=4"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"speculative, 6 rows:.* [1-6] defect", told)
    assert "would not write the baseline" not in told


def test_an_engine_that_is_right_passes_with_its_control(tmp_path, capsys):
    assert audit.main([recorded(tmp_path, again=True)]) == 0
    told = "speculative, 6 rows: 6 equal\ncontrol, without speculation again, 6 rows: 6 equal\n"
    assert capsys.readouterr().out == told


def test_outputs_of_other_weights_are_no_defect_but_told(tmp_path, capsys):
    assert audit.main([recorded(tmp_path), "target=tiny-draft"]) == 0
    assert (
        "in 6 of 6 rows the target would not write the baseline itself" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("tokens", "before", "after", "verdict", "at"),
    [
        ([5, 8, 7], [0, 0, 0], [0, 0, 0], audit.NEAR_TIE, 1),
        ([5, 8, 7], [0, 0, 0], [0, 1, 0], audit.DEFECT, 1),
        ([5, 8, 7], [0, 0, 0], [0, 0, 1], audit.DEFECT, 1),
        ([5, 8, 7], [0, 1, 0], [0, 0, 0], audit.UNKNOWN, 1),
        ([5, 8, 7], [0, 0, 1], [0, 1, 0], audit.DEFECT, 1),
        ([5, 6], [0, 0, 0], [0, 0, 0], audit.DEFECT, 2),
    ],
)
def test_verdicts(tokens, before, after, verdict, at):
    judged = (audit.Judged(list(map(float, outside)), [0.0] * 3) for outside in (before, after))
    found = audit.compared([5, 6, 7], tokens, *judged)
    assert (found.verdict, found.at) == (verdict, at)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no row"),
        ('{"autoregressive": [1], "speculative": [1]}', "data.save_prompts=true"),
        ('{"prompt": [], "autoregressive": [1], "speculative": [1]}', "holds no row"),
        ('{"prompt": "", "autoregressive": [1], "speculative": [1]}', "row 0: its prompt has no"),
        (
            '{"prompt": [1], "autoregressive": [1], "speculative": [9999]}',
            "row 0: holds a token outside",
        ),
    ],
)
def test_what_cannot_be_audited_is_told_in_one_line(text, said, tmp_path, capsys):
    (tmp_path / "outputs.jsonl").write_text(text)
    assert audit.main([str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl: no such file or folder; name a run's folder" in capsys.readouterr().err
    assert audit.main([str(tmp_path / "outputs.jsonl")]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert audit.main([str(tmp_path / "outputs.jsonl"), "--rows=0"]) == 2
    assert capsys.readouterr().err == "error: --rows=0: must be at least 1\n"


def test_a_run_is_decoded_again_by_its_own_target_and_in_its_own_type(tmp_path, capsys):
    """A target that is no option, and bfloat16."""
    keys = ["hardware.dtype=bfloat16", "data.save_prompts=true"]
    keys += ["target=custom", "target.name=mine", f"target.path={TINY / 'target'}"]
    folder = str(run_here(tmp_path, *keys).folder)
    assert audit.main([folder]) == 0
    assert "would not write the baseline" not in capsys.readouterr().out
    # The tokens are judged as those of bfloat16.
    assert audit.main([folder, "hardware.dtype=float32"]) == 0
    assert "would not write the baseline" not in capsys.readouterr().out


def test_a_run_of_transformers_modules_is_decoded_again(tmp_path, capsys):
    keys = ["target.implementation=transformers", "data.save_prompts=true"]
    folder = str(run_here(tmp_path, *keys).folder)
    capsys.readouterr()
    assert audit.main([folder]) == 0
    assert capsys.readouterr().out == "speculative, 2 rows: 2 equal\n"


def test_lengths_are_those_of_the_run_and_of_the_prompts(tmp_path, capsys):
    """A target of 128 tokens, which the usual length of a context exceeds."""
    short = shutil.copytree(TINY / "target", tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 128}
    (short / "config.json").write_text(json.dumps(config))
    target = ["target=custom", "target.name=short", f"target.path={short}"]
    sizes = ["data.save_prompts=true", "batch.context_len=96"]
    folder = str(run_here(tmp_path / "runs", *target, *sizes).folder)
    assert audit.main([folder]) == 0
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": [1] * 200, "autoregressive": [1], "speculative": [1]})
    )
    capsys.readouterr()
    assert audit.main([str(tmp_path / "long.jsonl"), *target]) == 2
    assert "exceeds the target's maximum of 128" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_rows_of_bfloat16_raise_no_alarm(tmp_path, capsys):
    """They are decoded again in float32, whose order of sums is another."""
    short = ["hardware.dtype=bfloat16", "batch.context_len=64", "batch.generate_len=12"]
    path = recorded(tmp_path, *short, rows=1000)
    assert (
        audit.main([path, "hardware.dtype=float32", "--engine-dtype=bfloat16", "--rows=100"]) == 0
    )
    told = capsys.readouterr().out
    assert "1,000 rows" in told
    assert "would not write the baseline" not in told
