"""Predict from which batch and context on speculation pays, for a model and machines that you do
not have.

python examples/predict.py
"""

import magicdec

BATCHES, CONTEXTS = (8, 32, 128), (4000, 16000, 64000)


def main() -> None:
    """Print the best speedup and gamma of each batch and context, a table for each machine."""
    for hardware in ("8xa100", "8xh100"):
        print(
            f"\n{hardware}, speedup per row (gamma) at alpha 0.8\n{'batch':>8}",
            *(f"{c:>14,}" for c in CONTEXTS),
        )
        for batch in BATCHES:
            cells = []
            for context in CONTEXTS:
                sizes = {"batch_size": batch, "context_len": context}
                found = magicdec.predict("llama-3.1-8b", hardware, budget=512, alpha=0.8, **sizes)
                cells.append(
                    f"{found.best.speedup:.2f}x ({found.best.gamma})" if found.fits else "no memory"
                )
            print(f"{batch:>8}", *(f"{text:>14}" for text in cells))


if __name__ == "__main__":
    main()
