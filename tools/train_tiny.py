"""Train the bundled pair: `magicdec/models/tiny/target` and `.../draft`.

    python tools/train_tiny.py --text FOLDER_OF_BOOKS            # both models, 100 minutes
    python tools/train_tiny.py --text FOLDER_OF_BOOKS --resume   # continue from the work folder
    python tools/train_tiny.py --text FOLDER_OF_BOOKS --start-from magicdec/models/tiny --lr-share 0.5   # train further

The text is the standard library's source and, with --text, books; what is held out is held out by
name. Context grows in stages, because short sequences teach most of the language at a fraction of
the cost, and the last stage makes the full context a trained one. Some windows read their beginning
again and again: without these, so small a model does not learn to look back. The draft is
distilled: it learns what the target makes of each text, which is what it will be asked for
(DistillSpec, arXiv 2310.08461). Hidden matrices are trained with Muon (Jordan et al. 2024),
everything else with AdamW, in float32 on a CPU and under bfloat16 autocast on a GPU. At the end
evaluate_tiny.py measures the result.
"""  # noqa: E501

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from evaluate_tiny import TINY, read_record, record_training, write_evaluation
from tiny_corpus import CODE_SHARE, END_OF_TEXT, VOCAB_SIZE, Corpus
from tokenizers import Tokenizer
from torch.nn import functional as F
from training import Trainer, parser
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_CONTEXT = 8448  # 8,192 tokens of prompt and 256 new ones
# Share of the budget at which a stage starts, its context.
STAGES = "0:256 0.4:1024 0.6:4096 0.75:8448"
ADAM_LR = 4e-3
# Tokens per forward pass: a good fit for a CPU's caches.
MICRO_TOKENS = {"cpu": 4096, "cuda": 65536}
COPY_SHARE = 0.4  # of the windows, which read passages of their beginning again
SHORTEST_COPY, LONGEST_COPY = 16, 512  # tokens

SHAPES = {  # in the order of training: the draft learns from the target
    "target": {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
    },
    "draft": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 2,
    },
}
DEFAULT_MINUTES = {"target": 60.0, "draft": 40.0}


def llama_config(name: str) -> LlamaConfig:
    """Return the model's shape: two query heads per KV head, plain rotary embeddings, tied
    embeddings.
    """
    shape = SHAPES[name]
    return LlamaConfig(
        **shape,
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def training_batch(
    corpus: Corpus, step: int, rows: int, context: int, copy_share: float
) -> torch.Tensor:
    """Return random windows, (rows, context + 1) token ids: inputs and, shifted by one, their
    targets.

    They depend on the number of the step alone, so that a resumed run reads the same windows.
    """
    generator = np.random.default_rng([17, step])
    windows = []
    for is_code in generator.random(rows) < CODE_SHARE:
        window = corpus.training_window(generator, is_code, context + 1)
        windows.append(
            with_copies(window, generator) if generator.random() < copy_share else window
        )
    return torch.from_numpy(np.stack(windows))


def with_copies(ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the window's beginning, followed by repeated passages of it.

    In every second window the beginning is shuffled: then only looking back tells what comes next.
    """
    length = generator.integers(2 * SHORTEST_COPY, len(ids) // 2)
    beginning = generator.permutation(ids[:length]) if generator.random() < 0.5 else ids[:length]
    parts, missing = [beginning], len(ids) - length
    while missing > 0:
        copied = min(generator.integers(SHORTEST_COPY, min(LONGEST_COPY, length)), missing)
        start = generator.integers(length - copied)
        parts.append(beginning[start : start + copied])
        missing -= copied
    return np.concatenate(parts)


class ModelTrainer(Trainer):
    """One model's training."""

    warmup, decay_from, final_rate = 0.01, 0.45, 0.02
    kept = (*Trainer.kept, "before")

    def __init__(self, name: str, corpus: Corpus, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.name, self.corpus, self.device = name, corpus, torch.device(args.device)
        self.max_tokens = args.tokens or math.inf
        pairs = [stage.split(":") for stage in args.stages]
        self.stages = [(float(start), int(context)) for start, context in pairs]
        self.minutes = args.minutes or (math.inf if args.tokens else DEFAULT_MINUTES[name])
        model = LlamaForCausalLM._from_config(llama_config(name), attn_implementation="sdpa").to(
            self.device
        )
        # What the weights had seen that it starts from.
        self.before = {"tokens": 0, "steps": 0, "minutes": 0.0}
        if args.start_from:
            model.load_state_dict(
                LlamaForCausalLM.from_pretrained(args.start_from / name).float().state_dict()
            )
            self.before = {
                key: read_record(args.start_from)[name]["training"][key] for key in self.before
            }
        self.teacher = teacher(args.out, self.device) if name == "draft" else None
        self.forward = torch.compile(model) if args.compile else model
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        self.others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        adam = torch.optim.AdamW(
            self.others, lr=ADAM_LR, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )
        super().__init__(args, model, matrices, adam, args.work / f"{name}.pt")

    @property
    def progress(self) -> float:
        """Return the share of the budget that is spent."""
        return max(self.seconds / 60 / self.minutes, self.tokens / self.max_tokens)

    @property
    def num_parameters(self) -> int:
        """Return the number of weights; tied embeddings count once."""
        return sum(p.numel() for p in self.model.parameters())

    def run(self) -> None:
        """Train to the end of the budget, saving on the way."""
        print(
            f"{self.name}: {self.num_parameters:,} parameters, {self.progress:.0%} done", flush=True
        )
        for loss, context in self.rest_of_training():
            if self.is_due(self.args.log_every):
                self.log(loss, context)
            if self.is_due(60 * self.args.save_every):
                self.save()
            # A model that has not seen the full context yet is no better for its user than the one
            # before it.
            if context == MAX_CONTEXT and self.is_due(60 * self.args.export_every):
                self.export()
        self.save()
        self.export()

    def train_step(self) -> tuple[float, int]:
        """Do one optimiser step. Return the mean loss in nats, and the context."""
        context = next(
            context for start, context in reversed(self.stages) if self.progress >= start
        )
        rows = max(1, self.args.batch_tokens // context)
        ids = training_batch(self.corpus, self.steps, rows, context, self.args.copy_share).to(
            self.device
        )
        total = 0.0
        for part in ids.split(max(1, MICRO_TOKENS[self.device.type] // context)):
            loss = self.loss(part) * (len(part) / rows)
            loss.backward()
            total += loss.item()
        # Muon's updates have a fixed norm as they are.
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.optimise(rows * context)
        return total, context

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss against each next token, or against the teacher's distribution of
        it.
        """
        inputs, wanted = ids[:, :-1], ids[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.forward(input_ids=inputs, use_cache=False).logits
        if self.teacher:
            with torch.no_grad():
                wanted = self.teacher(input_ids=inputs, use_cache=False).logits.float().softmax(-1)
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(0, 1))

    def log(self, loss: float, context: int) -> None:
        """Print one line of progress."""
        left = self.seconds / max(self.progress, 1e-9) * (1 - self.progress) / 60
        print(
            f"{self.name} {self.progress:6.1%} step {self.steps} tokens {self.tokens / 1e6:.2f}M"
            f" context {context} loss {loss:.3f} {self.tokens / self.seconds:,.0f} tokens/s,"
            f" {left:.0f} min left",
            flush=True,
        )

    def export(self) -> None:
        """Put model and tokenizer where they are used from, and note what the model was trained
        with.
        """
        export(self.model, self.corpus.tokenizer, self.args.out / self.name)
        facts = {"parameters": self.num_parameters, "tokens": self.tokens, "steps": self.steps}
        facts |= {
            "minutes": round(self.seconds / 60, 1),
            "complete": self.progress >= 1,
            "device": self.device.type,
        }
        facts |= {key: round(facts[key] + before, 1) for key, before in self.before.items()}
        record_training(self.name, facts, self.args.out)


def teacher(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """Return the exported target, in bfloat16 as it is stored."""
    if not (folder / "target").exists():
        raise SystemExit(
            f"The draft learns from the target, and there is none in {folder}: add --models target"
            " draft."
        )
    return LlamaForCausalLM.from_pretrained(folder / "target", attn_implementation="sdpa").to(
        device
    )


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in bfloat16 and the tokenizer, file by file, each complete before it takes
    its name.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(temporary)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, model_max_length=MAX_CONTEXT
    )
    fast.save_pretrained(temporary)
    # transformers 5 writes names that 4.x does not know, and 4.x would then fall back to another
    # rotary base.
    edit_json(temporary / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])
    edit_json(temporary / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    folder.mkdir(parents=True, exist_ok=True)
    for path in temporary.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone
        os.replace(path, folder / path.name)
    temporary.rmdir()
    print(f"exported {folder}", flush=True)


def edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    found = parser(__doc__, "build/train_tiny", save_every=3.0)
    add = found.add_argument
    add(
        "--models",
        nargs="+",
        choices=list(SHAPES),
        default=list(SHAPES),
        help="which ones, in this order",
    )
    add(
        "--minutes",
        type=float,
        help="time for each model; default: 60 for the target, 40 for the draft",
    )
    add("--tokens", type=float, help="tokens for each model, instead of minutes")
    add("--batch-tokens", type=int, default=2048, help="tokens per optimiser step")
    add("--out", type=Path, default=TINY, help="where the checkpoints go")
    add(
        "--start-from",
        type=Path,
        metavar="FOLDER",
        help="exported models to train further, instead of new ones",
    )
    add(
        "--stages",
        nargs="+",
        default=STAGES.split(),
        help=f"SHARE:CONTEXT, from which share on; default: {STAGES}",
    )
    add(
        "--copy-share",
        type=float,
        default=COPY_SHARE,
        help="of windows that read passages again (%(default)g)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add(
        "--compile",
        action="store_true",
        help="torch.compile: faster once it has started, needs a C++ compiler",
    )
    add(
        "--export-every",
        type=float,
        default=5.0,
        metavar="MINUTES",
        help="how often to export (%(default)g)",
    )
    return found.parse_args()


def main() -> None:
    """Train the models one after another and measure them."""
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.load(args.text, args.work)
    for name in args.models:
        ModelTrainer(name, corpus, args).run()
    write_evaluation(args.models, corpus, args.out, args.device)


if __name__ == "__main__":
    main()
