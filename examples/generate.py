"""Generate text with speculation, and compare the time per token with that of autoregressive
decoding.

python examples/generate.py
"""

import magicdec

PROMPT = "def __init__(self, name):\n    self.name = "


def main() -> None:
    """Decode one prompt both ways."""
    with magicdec.load(
        "tiny", draft="self", cache="streaming", budget=256, progress=False
    ) as model:
        fast = model.generate(PROMPT, max_tokens=48)[0]
        plain = model.generate(PROMPT, max_tokens=48, gamma=0)[0]
    print(fast.text)
    assert fast.ids == plain.ids  # a draft changes the speed, never the text
    print(f"{fast.stats.acceptance_length:.2f} tokens per round")
    for name, out in (("autoregressive", plain), ("speculative", fast)):
        print(f"{name}: {1e3 * out.stats.time_per_output_token_s:.2f} ms per token")


if __name__ == "__main__":
    main()
