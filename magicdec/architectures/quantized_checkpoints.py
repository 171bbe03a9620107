"""Refuse quantized checkpoints, with what to do for each kind."""

from collections.abc import Mapping
from typing import Any

QUANTIZED = ("quantization_config", "compression_config")
# What to do with a quantized checkpoint, by its quant_method.
USUAL_REMEDY = "take the unquantized one that it was made of (base_model on its page)"
REMEDIES = {
    "fp8": "take the one in bfloat16: the same name without -FP8, or base_model on its page",
    "mxfp4": (
        "write a copy in bfloat16 once, four times as large, where the memory suffices:"
        " AutoModelForCausalLM.from_pretrained(NAME, dtype='bfloat16', quantization_config="
        "Mxfp4Config(dequantize=True)).save_pretrained(FOLDER), or take somebody else's copy"
    ),
}


def refusal_of_quantized(plain: Mapping[str, Any]) -> str:
    """Return why a quantized checkpoint cannot run, with what to do for its kind; "" for others."""
    for key in QUANTIZED:
        if settings := plain.get(key):
            method = settings.get("quant_method") if isinstance(settings, Mapping) else None
            remedy = REMEDIES.get(str(method), USUAL_REMEDY)
            return f"quantized checkpoints ({method or key}) are not supported; {remedy}"
    return ""
