"""What `magicdec doctor --model A --draft B` says of a pair, and pairs that no run takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from magicdec.commands import doctor
from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.planning.as_draft import examine_pair, read_description
from magicdec.planning.resolve import resolve
from tests.checkpoints import make_checkpoint

TINY = Path(__file__).parents[2] / "magicdec" / "models" / "tiny"
TARGET, DRAFT, HEAD = TINY / "target", TINY / "draft", TINY / "eagle3"


def said(target: Path, draft: Path) -> dict[str, str]:
    pair = (read_description(str(path), "--model") for path in (target, draft))
    return dict(examine_pair(*pair))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a checkpoint, changed as it is told."""

    def make(family: str, **changes: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, **changes)

    return make


def test_an_independent_model_of_the_same_tokens():
    findings = said(TARGET, DRAFT)
    command = f"draft=model target@draft.model=custom draft.model.path={DRAFT}"
    assert findings["as a draft"] == command
    assert findings["vocabulary"] == "shared, 1,024 entries, compared token by token"
    assert findings["its context"] == "8,448 tokens, as far as the target's 8,448"
    assert "verify_guided" not in findings["its cache"]
    assert "refused" not in findings


def test_the_target_itself():
    assert said(TARGET, TARGET) == {
        "as a draft": "the target itself: draft=self, over a cache that `cache` chooses"
    }


def test_a_head_over_the_targets_hidden_states():
    findings = said(TARGET, HEAD / "config.json")
    assert findings["as a draft"] == f"draft=eagle3 draft.model.path={HEAD / 'config.json'}"
    assert findings["vocabulary"] == "proposes 832 of the target's 1,024"
    assert "its context" not in findings


def test_a_head_of_another_target(small):
    findings = said(small("llama"), HEAD)
    assert "made for another target: a hidden size of 256" in findings["refused"]
    assert "vocabulary" not in findings


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"vocab_size": 90}, "its vocabulary has 90 entries against the target's 96"),
        ("qwen3-moe", {"vocab_size": 90}, "its vocabulary has 90 entries against the target's 96"),
    ],
)
def test_a_model_of_other_tokens(small, family, changes, reason):
    assert reason in said(small("llama"), small(family, **changes))["refused"]


def test_a_model_whose_layers_keep_states(small, tmp_path):
    plain = json.loads((small("llama") / "config.json").read_text())
    config = tmp_path / "hybrid.json"
    layers = ["linear_attention", "linear_attention", "full_attention"]
    config.write_text(json.dumps(plain | {"model_type": "qwen3_next", "layer_types": layers}))
    assert said(small("llama"), config)["refused"].startswith(
        "the draft: it has recurrent layers, and a draft with a cache of its own cannot take back"
    )


@pytest.mark.parametrize(
    ("family", "beyond"),
    [
        ("llama", "only over cache=streaming, window, which"),
        ("olmo2", "refused"),
    ],
)
def test_a_model_that_was_trained_on_shorter_texts(small, family, beyond):
    shown = said(small("llama"), small(family, max_position_embeddings=64))["its context"]
    assert shown.startswith(f"64 tokens of the target's 256; beyond them {beyond}")


def test_a_home_directory_of_nobody_is_no_folder():
    with pytest.raises(UserError, match=r"^--model=~no-such-user/config is not a folder; valid: "):
        read_description("~no-such-user/config", "--model")


def test_the_doctor_shows_both_models(capsys):
    assert doctor.main(["--model", str(TARGET), "--draft", str(DRAFT)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "native: our own transformer" in shown
    assert "as a draft draft=model" in shown
    with pytest.raises(SystemExit):
        doctor.main(["--draft", str(DRAFT)])
    capsys.readouterr()
    assert doctor.main(["--model", str(TARGET), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("|  | finding |\n")


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        (
            ["draft=model", "target@draft.model=custom", f"draft.model.path={HEAD}"],
            r"^draft=model: draft.model is a head .* choose draft=eagle3$",
        ),
        (
            ["draft=eagle3", f"draft.model.path={DRAFT}"],
            r"^draft=eagle3: draft.model is a whole model .* choose draft=model$",
        ),
        (
            ["draft=dflash", f"draft.model.path={HEAD}"],
            r"^draft=dflash: draft.model is a head .* choose draft=eagle3$",
        ),
    ],
)
@pytest.mark.parametrize("scenario", ["compare", "predict"])
def test_a_draft_with_a_model_of_another_kind_is_refused(keys, refusal, scenario):
    hardware = "h100" if scenario == "predict" else "cpu"
    with pytest.raises(UserError, match=refusal):
        resolve(compose([*keys, f"scenario={scenario}", f"hardware={hardware}"]))
