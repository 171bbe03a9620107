"""The final table: the right figures, nothing invented, readable at 80 columns and without a
terminal.
"""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.style import Style

from magicdec.tracking import run_table
from magicdec.tracking.trackers import Logged
from tests.tracking.sample import CONFIG, METRICS, with_changes

FOLDER = Path("runs/2f0c1a9b7e31")
COMMAND = "wandb sync runs/2f0c1a9b7e31/wandb/offline-run-20261104_115500-2f0c1a9b7e31-1"
NOT_AUDITED = {"lossless/identical": None, "lossless/passed": None}
OFFLINE = Logged("W&B", FOLDER, command=COMMAND)


def printed(
    config=CONFIG, metrics=METRICS, logged=(OFFLINE,), history=(), width=80, encoding="utf-8"
):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    run_table.show(Console(file=file, width=width), config, metrics, FOLDER, logged, history)
    file.flush()
    return raw.getvalue().decode(encoding)


def row(text, label):
    """The cells of the line that starts with a label, as words."""
    return next(
        line.removeprefix(label).split() for line in text.splitlines() if line.startswith(label)
    )


def test_figures_of_both_ways():
    text = printed()
    assert row(text, "tokens/s") == ["433", "813"]
    assert row(text, "time per output token (TPOT), ms") == ["18.4", "9.81"]
    assert row(text, "time to first token (TTFT), ms") == ["4,213", "4,220"]
    assert row(text, "decoding the batch, s") == ["1.17", "0.682"]
    assert row(text, "the same with its prefill, s") == ["5.38", "4.90"]
    # The headline has the ratios of what is shown.
    per_row, per_batch = (float(word[:-1]) for word in row(text, "speedup") if word.endswith("x"))
    assert (per_row, per_batch) == pytest.approx((18.4 / 9.81, 1.17 / 0.682), abs=0.01)


def test_intervals_are_next_to_their_figures():
    ends = {"speedup": [1.8, 1.961], "speedup_wall": [1.65, 1.8], "acceptance_rate": [0.7, 0.75]}
    ends |= {"acceptance_length": [3.6, 4.1], "alpha": [0.8, 0.9]}
    text = printed(
        metrics=METRICS | {f"{name}_ci95": pair for name, pair in ends.items()}, width=100
    )
    assert "1.88x [1.80, 1.96] per row and 1.71x [1.65, 1.80] per batch, spread" in text
    assert "72.3% [70.0%, 75.0%] of proposals" in text
    assert "3.89 [3.60, 4.10] tokens per round" in text
    assert "in brackets       95% intervals" in text
    assert "in brackets" not in printed()


def test_lines():
    lines = [line.rstrip() for line in printed().splitlines()]
    for line in (
        "compare: tiny, self-speculation, gamma 4, streaming cache, budget 128, 4 sinks",
        "8 rows x 4,096 tokens of context, 64 new tokens each, greedy",
        "data: stdlib; float32 on Some CPU @ 2.90GHz, attention by sdpa",
        "speedup           1.88x per row and 1.71x per batch, spread 3% over repeats",
        "acceptance rate   72.3% of proposals, by position 85% 76% 68% 60%",
        "acceptance length 3.89 tokens per round, of at most 5",
        "lossless          yes, identical to autoregressive; max logit gap 1.2e-06",
        "step times, ms    target T_T 18.1, draft T_D 3.21, verify T_V 21.0, round 34.0",
        "formula speedup   2.08x per row and 1.75x per batch, from step times and",
        "                  acceptance, +11% off",
        "memory, GiB       peak 1.23, target's KV cache 0.2, draft's 0.0061",
        "results           runs/2f0c1a9b7e31",
        f"send to W&B       {COMMAND}",
    ):
        assert line in lines
    assert "synthetic" not in printed().lower()


@pytest.mark.parametrize("width", [80, 120])
def test_only_commands_are_longer_than_the_terminal(width):
    too_long = [line for line in printed(width=width).splitlines() if len(line) > width]
    assert all(COMMAND in line for line in too_long)


def test_without_unicode():
    printed(encoding="ascii").encode("ascii")


def test_terminal_has_colours_and_the_same_words(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    run_table.show(
        Console(file=file, width=80, force_terminal=True), CONFIG, METRICS, FOLDER, [OFFLINE]
    )
    assert "\x1b[" in file.getvalue()
    assert "1.88x" in file.getvalue()


def test_synthetic_is_said_loudly():
    config = with_changes(draft={"synthetic_acceptance": 0.8})
    metrics = METRICS | {"acceptance/source": "synthetic"} | NOT_AUDITED
    text = printed(config, metrics)
    assert "SYNTHETIC acceptance (0.8)" in text
    assert "1.88x per row and 1.71x per batch, synthetic, " in text
    assert "72.3% of proposals, synthetic, " in text
    assert row(text, "lossless") == ["n/a", "(synthetic)"]


def test_sampling_without_an_audit_has_no_verdict():
    """On another engine; ours audits its samples."""
    text = printed(with_changes(sampling={"temperature": 0.8}), METRICS | NOT_AUDITED)
    assert row(text, "lossless") == ["n/a", "(sampling)"]
    assert "sampled at temperature 0.8" in text


def test_samples_are_judged_next_to_the_autoregressive_ones():
    config = with_changes(sampling={"temperature": 0.8})
    scores = {
        "lossless/z_score": -0.42,
        "lossless/baseline_z_score": 1.3,
        "lossless/outside_tokens": 0,
    }
    text = " ".join(
        printed(config, METRICS | NOT_AUDITED | scores | {"lossless/passed": True}).split()
    )
    assert (
        "lossless yes, sampled from the target: z -0.4 (autoregressive +1.3), all tokens within"
        in text
    )
    scores |= {"lossless/outside_tokens": 3, "lossless/passed": False}
    text = " ".join(printed(config, METRICS | NOT_AUDITED | scores).split())
    assert (
        "lossless NO, sampled from the target: z -0.4 (autoregressive +1.3), 3 tokens that the"
        " target" in text
    )


def test_a_difference_is_an_alarm_in_full_precision_only():
    differs = METRICS | {
        "lossless/identical": False,
        "lossless/passed": False,
        "lossless/max_logit_gap": 0.03125,
    }
    assert row(printed(metrics=differs), "lossless")[0] == "NO,"
    text = " ".join(
        printed(
            with_changes(hardware={"dtype": "bfloat16"}), differs | {"lossless/passed": None}
        ).split()
    )
    assert "undecided, not identical to autoregressive in bfloat16; max logit gap 0.0312" in text
    assert "(autoregressive 9e-07)" in text
    ties = differs | {
        "lossless/passed": True,
        "lossless/different_rows": 2,
        "lossless/excused_rows": 2,
    }
    assert "yes, identical but for 2 rows in a tie" in printed(metrics=ties)


@pytest.mark.parametrize("speedup", [0.83, 1.44])
def test_the_headline_can_be_read_in_a_notebook(speedup):
    """A notebook shows styles as HTML, where text without a colour is black or white, by its own
    theme.
    """
    (text,) = (
        text
        for label, text in run_table._verdict(CONFIG, METRICS | {"speedup": speedup})
        if label == "speedup"
    )
    styles = [Style.parse(str(span.style)).get_html_style() for span in text.spans]
    assert len(styles) == 2
    for style in styles:
        background, colour = (
            re.search(rf"(?:^|; ){name}: #(\w+)", style)[1]
            for name in ("background-color", "color")
        )
        assert max(bytes.fromhex(background)) < 0x90
        assert min(bytes.fromhex(colour)) > 0xE0


def test_slower_and_noisy_are_named():
    text = printed(metrics=METRICS | {"speedup": 0.83, "speedup_spread": 0.23})
    assert "0.83x per row and 1.71x per batch, slower than autoregressive" in " ".join(text.split())
    assert "NOISY" in text
    # A single repeat.
    alone = {key: value for key, value in METRICS.items() if key != "speedup_spread"}
    assert "NOISY" not in printed(
        metrics=alone | {"agreement/target_decode": 1.3, "agreement/round": 0.8}
    )
    lines = printed(metrics=alone | {"agreement/target_decode": 37.4}).splitlines()
    assert "speedup           1.88x per row and 1.71x per batch, NOISY" in [
        line.rstrip() for line in lines
    ]
    words = " ".join(" ".join(lines).split())
    assert (
        "NOISY an autoregressive step took 37 times as long as in the profile: measure it again"
        in words
    )
    text = printed(
        metrics=METRICS
        | {
            "gpu/throttled/thermal": 0.3,
            "gpu/throttled/power": 0.01,
            "gpu/shared": 2,
        }
    )
    words = (
        "throttled (thermal) for 30% of the time, shared with 2 other processes: measure it again"
    )
    assert words in " ".join(text.split())


def test_without_a_draft_there_is_one_column():
    parts = (
        "speculative",
        "speedup",
        "accept",
        "lossless",
        "formula",
        "time/draft",
        "time/verify",
        "memory/draft",
    )
    metrics = {key: value for key, value in METRICS.items() if not key.startswith(parts)}
    text = printed(
        with_changes(draft={"name": "none", "gamma": 0}), metrics | {"memory/draft_kv_gib": 0.0}
    )
    assert "compare: tiny, autoregressive alone" in text
    assert row(text, "tokens/s") == ["433"]
    for absent in ("speculative", "speedup", "acceptance", "lossless", "draft", "nan", "None"):
        assert absent not in text


def test_nothing_but_the_header_where_nothing_was_measured():
    text = printed(metrics={"speedup": None, "acceptance_rate": float("nan")}, logged=())
    assert "speedup" not in text
    assert "nan" not in text
    assert text.splitlines()[-1].startswith("results ")


def test_independent_draft_full_cache_and_several_batches():
    draft = {"name": "model", "model": {"name": "tiny-draft"}}
    text = printed(with_changes(draft=draft, cache={"policy": "full"}, batch={"num_batches": 3}))
    assert "compare: tiny, draft tiny-draft, gamma 4, full cache\n" in text
    assert "3 batches of 8 rows" in text


def test_prediction_is_set_against_the_measurement():
    errors = {
        "speedup": -0.095,
        "target_decode": -0.95,
        "draft": 0.02,
        "verify": -0.9,
        "round": -0.88,
    }
    predicted = {"predicted/speedup": 1.7} | {
        f"predicted/{step}_error": error for step, error in errors.items()
    }
    text = printed(metrics=METRICS | predicted)
    words = (
        "1.70x per row, by the cost model, -10% off; steps off: T_T -95%, T_D +2%, T_V -90%, round"
        " -88%"
    )
    assert words in " ".join(text.split())


@pytest.mark.parametrize(
    ("overhead", "is_marked"), [(-188.0, True), (-3.0, True), (-0.5, False), (2.0, False)]
)
def test_an_impossible_overhead_is_marked(overhead, is_marked):
    text = printed(metrics=METRICS | {"time/overhead_ms": overhead})
    assert ("overhead, ms" in text) == is_marked
    if is_marked:
        assert f"{overhead:#.3g}"[:4] in row(text, "overhead, ms")[0]
        assert "impossible" in text


def test_profile_shows_its_points():
    point = {
        "batch_size": 8,
        "gamma": 2,
        "time/target_decode_ms": 3.3,
        "time/draft_ms": 1.1,
        "time/verify_ms": 4.1,
    }
    history = [point | {"context_len": length} for length in (1024, 4096)]
    text = printed(
        with_changes(scenario={"name": "profile"}), {"memory/peak_gib": 1.2}, history=history
    )
    assert row(text, "batch") == ["context", "gamma", "T_T,", "ms", "T_D,", "ms", "T_V,", "ms"]
    lines = [line.split() for line in text.splitlines() if "1.10" in line]
    assert lines == [["8", length, "2", "3.30", "1.10", "4.10"] for length in ("1,024", "4,096")]


def test_an_engine_that_counts_no_positions_has_the_limit_of_its_gamma():
    metrics = {key: value for key, value in METRICS.items() if "position_" not in key}
    text = printed(metrics=metrics | {"gamma": 3, "acceptance_length": 2.9})
    limit = "2.90 tokens per round, of at most 4"
    assert row(text, "acceptance length") == limit.split()


def test_where_to_see_it_in_wandb():
    url, warning = "https://wandb.ai/x/y/runs/abc-1", "W&B failed, it is down"
    failed = f"W&B               {warning}"
    for logged, expected in (
        ({"url": url}, [f"W&B               {url}"]),
        ({"warning": warning}, [failed]),
        ({"warning": warning, "command": COMMAND}, [failed, f"send to W&B       {COMMAND}"]),
        ({}, []),
    ):
        text = printed(logged=[Logged("W&B", **logged)])
        assert [line.rstrip() for line in text.splitlines() if "W&B" in line] == expected


def test_another_engine_is_named_with_its_draft():
    """Prompt lookup has no cache to describe."""
    config = with_changes(draft={"name": "ngram"})
    text = printed(config, METRICS | {"engine/version": "vllm 0.32.0"})
    assert "data: stdlib; float32 on Some CPU @ 2.90GHz, by vllm 0.32.0\n" in text
    assert "compare: tiny, draft ngram, gamma 4\n" in text
