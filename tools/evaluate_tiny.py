"""Measure the bundled pair on held-out text, and write the numbers into its model card.

    python tools/evaluate_tiny.py --text FOLDER_OF_BOOKS

Writes `evaluation.json` next to the models, and the table between the markers in their README.md.
"""

import argparse
import json
import math
import platform
from pathlib import Path

import torch
from jinja2 import StrictUndefined, Template
from tiny_corpus import HELD_OUT_BOOKS, Corpus
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from magicdec.data import stdlib

TINY = Path(__file__).resolve().parent.parent / "magicdec/models/tiny"
NUM_WINDOWS = 8  # of the full context, spread evenly over each kind of held-out text
SHORT_SHARE = 16  # the short context is the full one's 16th part
# Tokens of an early passage that a window's end repeats, and of its continuation.
CUE, COPIED = 256, 64
MARKERS = ("<!-- evaluation: written by tools/evaluate_tiny.py -->", "<!-- end of evaluation -->")


@torch.no_grad()
def evaluate(folder: Path, corpus: Corpus, device: str) -> dict[str, dict[str, float]]:
    """Return a checkpoint's held-out loss in nats per token and bits per byte, by kind of text.

    `short` and `full` read the same tokens at a short and at the full context; `last_quarter` is
    the loss of the last positions of the full context. `copied_in_sight` and `copied_out_of_sight`
    are the share of tokens continued right where a window ends by repeating its beginning, with
    that beginning in sight or not: their difference is copying.
    """
    model = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        .to(device)
        .eval()
    )
    context = model.config.max_position_embeddings
    results = {}
    for kind, ids in corpus.held_out.items():
        bytes_per_token = corpus.held_out_bytes[kind] / len(ids)
        windows = torch.from_numpy(ids[: len(ids) // context * context]).view(-1, context)
        picked = windows[:: max(1, len(windows) // NUM_WINDOWS)][:NUM_WINDOWS].to(device)
        full = torch.cat([token_losses(model, row[None]) for row in picked])
        short = torch.cat([token_losses(model, row.view(SHORT_SHARE, -1)) for row in picked])
        losses = {"short": short, "full": full, "last_quarter": full[:, -context // 4 :]}
        nats = {name: loss.mean().item() for name, loss in losses.items()}
        nats_per_bit = math.log(2) * bytes_per_token
        results[kind] = {f"{name}_nats_per_token": round(value, 4) for name, value in nats.items()}
        results[kind] |= {
            f"{name}_bits_per_byte": round(value / nats_per_bit, 4) for name, value in nats.items()
        }
        results[kind] |= {"bytes_per_token": round(bytes_per_token, 3), "tokens": picked.numel()}
        again = torch.cat([picked[:, : -CUE - COPIED], picked[:, : CUE + COPIED]], 1)
        results[kind]["copied_in_sight"] = round(share_continued(model, again), 4)
        results[kind]["copied_out_of_sight"] = round(
            share_continued(model, again[:, -CUE - COPIED :]), 4
        )
    return results


def share_continued(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Return the share of each row's last COPIED tokens that are the most likely ones, given all
    before them.
    """
    logits = torch.cat(
        [model(input_ids=row[None], use_cache=False).logits[:, -COPIED - 1 : -1] for row in ids]
    )
    return (logits.argmax(-1) == ids[:, -COPIED:]).float().mean().item()


def token_losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token but the first: (rows, tokens) to (rows, tokens - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


def write_evaluation(names: list[str], corpus: Corpus, out: Path, device: str) -> None:
    """Measure the models called `names` in the folder `out`; bring evaluation.json and the card
    there up to date.
    """
    record = read_record(out)
    for name in names:
        print(f"evaluating {name}", flush=True)
        record.setdefault(name, {})["held_out"] = evaluate(out / name, corpus, device)
    record["corpus"] = {
        "train_tokens": {kind: len(ids) for kind, ids in corpus.train.items()},
        "held_out_tokens": {kind: len(ids) for kind, ids in corpus.held_out.items()},
        "held_out": {"stdlib": sorted(stdlib.HELD_OUT), "books": list(HELD_OUT_BOOKS)},
        "python": platform.python_version(),
    }
    (out / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n")
    write_card(record, out / "README.md")
    print(card_table(record), flush=True)


def read_record(out: Path) -> dict:
    """Return the content of evaluation.json, or {} if there is none."""
    path = out / "evaluation.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record_training(name: str, facts: dict[str, float], out: Path) -> None:
    """Store what a model was trained with; its old measurements no longer hold."""
    record = read_record(out)
    record[name] = {"training": facts}
    (out / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n")


def write_card(record: dict, path: Path) -> None:
    """Replace the text between the markers of the card, if there is a card."""
    if not path.exists():
        return
    before, _, rest = path.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    path.write_text(f"{before}{MARKERS[0]}\n\n{card_table(record)}\n\n{MARKERS[1]}{after}")


def card_table(record: dict) -> str:
    """Return training and held-out loss of both models as Markdown, by the template
    pages/card.md.
    """
    measured = {
        name: record[name]["held_out"]
        for name in ("target", "draft")
        if "held_out" in record.get(name, {})
    }
    trained = {name: record[name].get("training", {}) for name in measured}
    text = (Path(__file__).parent / "pages/card.md").read_text(encoding="utf-8")
    card = Template(text, undefined=StrictUndefined, trim_blocks=True)
    return card.render(measured=measured, trained=trained, cue=CUE, copied=COPIED).rstrip("\n")


def main() -> None:
    """Measure what is in --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="folder of books, as for train_tiny.py")
    parser.add_argument(
        "--models", nargs="+", choices=["target", "draft"], default=["target", "draft"]
    )
    parser.add_argument("--out", type=Path, default=TINY, help="the folder with both models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    # The target's folder serves as the work folder: it holds the tokenizer.
    write_evaluation(
        args.models, Corpus.load(args.text, args.out / "target"), args.out, args.device
    )


if __name__ == "__main__":
    main()
