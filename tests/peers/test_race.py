"""The race of engines (benchmarks/peers.py): what is made of its measurements."""

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.programs import ROOT

FIGURES = {"tokens_per_second": 100.0, "time_to_first_token_ms": 1e3, "acceptance_length": None, "version": "one 1.0"}
FIGURES |= {"wall_s": 2.5, "decode_s": 0.5}
TOKENS = [[1, 2, 3], [4, 5, 6]]
SECOND = [[(9, 0.5), (9, 0.25), (9, 1e-6)], [(9, 0.5), (9, 0.25), (9, 0.125)]]


@pytest.fixture
def race(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers_rows

    monkeypatch.setattr(peers_rows, "FOLDER", tmp_path)
    monkeypatch.setattr(peers_rows.render, "write", lambda name: None)
    return peers_rows


def written(race, found, wanted):
    """The rows of both CSV files: each way of decoding, and ours against the best of the others."""
    race.write(found, wanted)
    return [race.render.read_csv(race.FOLDER / f"peers-cpu{name}.csv") for name in ("", "-races")]


def cell(**times):
    """A measured cell: milliseconds per token by the first word of a way."""
    found = {
        way.replace("_", ", "): FIGURES | {"time_per_output_token_ms": ms, "tokens": TOKENS}
        for way, ms in times.items()
    }
    found["native"] |= {"limit_ms": 5.0, "second_choices": SECOND}
    return found


def test_other_tokens_are_judged_by_the_targets_gap(race):
    own = cell(native=10.0)["native"]
    assert race.agreement(TOKENS, own) == ("2/2", "")
    assert race.agreement([[1, 2, 9], [4, 5, 6]], own) == ("1/2", "1.0e-06")
    assert race.agreement([[1, 2, 9], [4, 9, 8]], own) == ("0/2", "2.5e-01")  # from there on, rows are not compared
    assert race.agreement([[1, 2, 8], [4, 5, 6]], own) == ("1/2", "> 1.0e-06")  # not the target's second choice


def test_only_like_is_compared_with_like(race):
    plain = cell(native=10.0, native_self=5.0, llamacpp=8.0, transformers=12.0)
    assert race.fastest(plain, race.PLAIN) == "llamacpp"
    assert race.others(plain) == []  # ours would speculate against others that do not
    fast = plain | cell(native=10.0, vllm_ngram=4.0) | {"llamacpp, F16": FIGURES | {"time_per_output_token_ms": 1.0}}
    assert race.fastest(fast, race.others(fast)) == "vllm, ngram"
    assert race.mine(fast) == "native, self"
    plain["transformers"] |= {"wall_s": 1.5}  # its first tokens come after 1 s, those of the others after 2
    assert race.race(("tiny", 8, 10), plain)["prefill_to_best"] == 0.5


def test_cells_without_an_engine_are_not_in_the_race(race):
    wanted = {("tiny", rows, 1024): ["native", "llamacpp", "vllm"] for rows in (1, 8, 16)}
    found = {
        "tiny, 8 x 1,024": cell(native=10.0, llamacpp=20.0, vllm=15.0),
        "tiny, 1 x 1,024": cell(native=9.0, llamacpp=1.0),
    }
    every, races = written(race, found, wanted)
    assert [(row["batch"], row["best_peer"], row["native_to_it"]) for row in races] == [(8, "vllm", 1.5)]
    (line,) = (row for row in every if (row["batch"], row["engine"]) == (8, "llamacpp"))
    assert (line["to_native"], line["of_limit"], line["time_to_first_token_s"], line["last_row_s"]) == (0.5, 0.25, 1, 2)


def test_others_at_their_best_count_where_all_their_ways_were_measured(race):
    ways = ["native", "llamacpp", "openvino", "llamacpp, ngram", "openvino, prompt lookup", "openvino, 8-bit KV"]
    wanted = {("tiny", 4, 8000): ways}
    measured = cell(native=10.0, native_ngram=5.0, llamacpp=20.0, openvino=12.0, llamacpp_ngram=24.0)
    every, (line,) = written(race, {"tiny, 4 x 8,000": measured}, wanted)
    assert (line["native_to_it"], line["ours_to_it"]) == (1.2, None)  # OpenVINO's may be the way that is missing
    assert "llamacpp, ngram" in [row["engine"] for row in every]
    measured |= {"openvino, prompt lookup": measured["openvino"] | {"time_per_output_token_ms": 6.0}}
    _, (line,) = written(race, {"tiny, 4 x 8,000": measured}, wanted)
    assert (line["our_best_way"], line["ours_to_it"]) == ("native, ngram", 1.2)


def test_llamacpp_takes_part_up_to_a_size(race, monkeypatch):
    import peers

    for name in ("LLAMACPP", "OPENVINO"):
        monkeypatch.setenv(f"MAGICDEC_{name}_PYTHON", "python")
    monkeypatch.delenv("MAGICDEC_VLLM_PYTHON", raising=False)
    engines = ["native", "openvino", "transformers"]
    assert list(peers.ways_of((peers.SMOL, 8, 2048), race.PLAIN)) == engines
    for where in ((peers.SMOL, 8, 1024), (peers.TINY, 8, 2048)):
        assert sorted(peers.ways_of(where, race.PLAIN)) == ["llamacpp", *engines]


def test_second_choices_are_the_targets(race):
    import peers

    plan = peers.prepared("tiny", 2, 64, "draft=self")
    prompts = peers.build.prompts(plan, peers.build.tokenizer(plan)).tokens
    with peers.progress() as bars:
        opened = peers.build.engine(plan, bars).open(prompts)
    opened.decoder.prefill(64)
    outputs = opened.decoder.generate().tokens
    found = torch.tensor(peers.second_choices(opened.decoder, outputs))
    target = AutoModelForCausalLM.from_pretrained(plan.target.folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + row for prompt, row in zip(prompts, outputs, strict=True)])).logits
    best = logits[:, 63:-1].topk(2, dim=-1)
    assert best.indices[..., 0].tolist() == outputs
    assert found[..., 0].tolist() == best.indices[..., 1].tolist()
    gaps = (best.values[..., 0] - best.values[..., 1]) / best.values[..., 0].abs()
    torch.testing.assert_close(found[..., 1], gaps, rtol=1e-2, atol=1e-5)


def test_figures_are_kept_until_a_commit_changes_what_is_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import page

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", name)

    monkeypatch.setattr(page, "ROOT", tmp_path)
    git("init")
    write("magicdec/one.py", "1")
    git("commit", "-m", "one")
    first, cells = page.commit(), page.Cells("race")
    cells["cell"] = {"tokens": [1]}
    cells.save()
    for name in ("docs/page.md", "benchmarks/render.py"):
        write(name, "text")
        assert page.commit() == first
        git("commit", "-m", name)
        assert page.commit() == first
    assert page.Cells("race") == cells
    write("magicdec/one.py", "2")
    assert page.commit() == f"{first}-dirty"
    assert page.Cells("race") == {}
    git("commit", "-m", "two")
    assert page.commit() not in (first, f"{first}-dirty")
    assert page.Cells("race") == {}
