"""The audit: scores against a twin without cache or chunks, outputs that must fail, and logits that
are not finite.
"""

import math
import time

import pytest
import torch

from magicdec.config import choices
from magicdec.engine import decoder as decoder_module
from magicdec.engine import output_audit
from magicdec.engine.adaptive import AdaptiveCycle
from magicdec.engine.native import warm_up
from magicdec.engine.output_audit import Audit, LogitGaps, audit
from magicdec.errors import NonFinite
from magicdec.measure import metrics
from magicdec.measure.round_profile import profile_round
from magicdec.models.kv_cache import KVCache
from magicdec.verification import accept
from magicdec.verification.sampling import Sampling, Use, draw, probabilities, uniform_BT
from tests.small import VOCAB, as_on_cpus, noisy_copy, open_batch, random_prompts, small_model

TARGET = as_on_cpus(small_model(spread=0.15))
SAMPLING = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=3)
PROMPTS = random_prompts([30] * 40, seed=1)
PROMPT_METRICS = {"lossless/prompt_checked", "lossless/prompt_wrong", "lossless/prompt_max_error"}
PROMPT_METRICS |= {"time/audit_prompts_s"}
OPTIONS = {
    "draft_name": "model",
    "draft_model": noisy_copy(TARGET, 0.3),
    "gamma": 3,
    "policy": "full",
}


@pytest.fixture(scope="module")
def sampled():
    """A batch, what it wrote both ways, and which tokens are accepted proposals."""
    batch = open_batch(TARGET, PROMPTS, sampling=SAMPLING, **OPTIONS)
    fast = batch.decoder.generate(batch.draft)
    return batch.decoder, batch.decoder.generate().tokens, fast.tokens, fast.accepted


def distribution(tokens: list[int]) -> list[float]:
    """Return the distribution that SAMPLING draws the next token from, in plain Python."""
    hidden = TARGET(
        torch.tensor([tokens]), KVCache(TARGET.config, 1, len(tokens), torch.float32, "cpu")
    )
    logits = [x / SAMPLING.temperature for x in TARGET.logits(hidden[:, -1])[0].double().tolist()]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: SAMPLING.top_k]
    mass = {i: math.exp(logits[i] - logits[order[0]]) for i in order}
    total, before, kept = sum(mass.values()), 0.0, {}
    for i in order:
        if before < SAMPLING.top_p * total:
            kept[i] = mass[i]
        before += mass[i]
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@torch.inference_mode()
def test_a_z_score_is_that_of_a_twin_in_plain_python(sampled, monkeypatch):
    decoder, plain, fast, _ = sampled
    fast = [row[:6] for row in fast]
    excess = variance = outside = 0.0
    for prompt, row in zip(PROMPTS, fast, strict=True):
        for at in range(len(row)):
            p = distribution(prompt + row[:at])
            entropy = -sum(x * math.log(x) for x in p if x)
            variance += sum(x * (math.log(x) + entropy) ** 2 for x in p if x)
            excess += math.log(p[row[at]]) + entropy
    for chunk in (output_audit.CHUNK_LOGITS, 1):  # all at once, and a token at a time
        monkeypatch.setattr(output_audit, "CHUNK_LOGITS", chunk)
        score = audit(decoder, plain, fast).speculative
        assert (score.excess, score.variance) == pytest.approx(
            (excess, variance), rel=1e-3, abs=1e-3
        )
        assert score.outside == outside


def test_samples_of_the_target_pass_both_ways(sampled):
    found = audit(*sampled)
    assert found.passed
    assert (found.speculative.outside, found.baseline.outside) == (0, 0)
    assert found.speculative.z != found.baseline.z  # other random numbers
    assert max(abs(found.speculative.z), abs(found.baseline.z)) < output_audit.MAX_Z
    twice = found + found
    assert twice.speculative.z == pytest.approx(2**0.5 * found.speculative.z)
    assert 0 < found.speculative.power < 1
    names = ("z_score", "outside_tokens", "baseline_z_score", "baseline_outside_tokens", "power")
    assert set(twice.metrics()) == {f"lossless/{name}" for name in names} | PROMPT_METRICS


@pytest.mark.parametrize(
    ("wrong", "of_z"),
    [
        (Sampling(temperature=0.0), lambda z: z > 6),  # the likeliest token each time
        (Sampling(temperature=1.2, top_k=20, top_p=0.95, seed=3), lambda z: z < -2),
        (Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=3), lambda z: z > 4),
    ],
)
def test_samples_of_another_distribution_fail(sampled, wrong, of_z):
    decoder, plain, *_ = sampled
    other = open_batch(TARGET, PROMPTS, sampling=wrong).decoder.generate().tokens
    found = audit(decoder, plain, other)
    assert not found.passed
    assert of_z(found.speculative.z)


def test_a_token_that_the_target_would_not_draw_fails(sampled):
    decoder, plain, fast, _ = sampled
    p = distribution(PROMPTS[0] + fast[0][:5])
    foreign = [row[:5] for row in fast]
    foreign[0] = [*fast[0][:5], p.index(0.0)]
    found = audit(decoder, plain, foreign)
    assert (found.speculative.outside, found.passed) == (1, False)


@pytest.fixture(scope="module")
def tied():
    """A target to which two tokens are nearly equal, a batch, what it wrote greedily, and where row
    0 has one of the two, and the other.
    """
    target = as_on_cpus(small_model(tie_word_embeddings=False))
    prompts = random_prompts([40, 50])
    row = open_batch(target, prompts[:1]).decoder.generate().tokens[0]
    twins = row[5], next(token for token in range(VOCAB) if token not in prompts[0] + row)
    target.embed.weight.data[twins[1]] = target.embed.weight.data[twins[0]]
    target.head.weight.data[twins[1]] = target.head.weight.data[twins[0]] * (1 - 2e-6)
    batch = open_batch(target, prompts)
    plain = batch.decoder.generate().tokens
    at = next(at for at, token in enumerate(plain[0]) if token in twins)
    return batch.decoder, prompts, plain, at, sum(twins) - plain[0][at]


def gaps(target, prompt: list[int], row: list[int]) -> tuple[list[float], int]:
    """The gap of every token to the largest logit by one pass without a cache before it, and how
    many are no ties.
    """
    cache = KVCache(target.config, 1, len(prompt + row), torch.float32, "cpu")
    logits_NV = target.logits(target(torch.tensor([prompt + row]), cache))[0, len(prompt) - 1 : -1]
    best = logits_NV.max(-1).values.tolist()
    found = [
        most - float(logits[token])
        for most, logits, token in zip(best, logits_NV, row, strict=True)
    ]
    return found, sum(gap > 1e-5 * abs(most) for gap, most in zip(found, best, strict=True))


WRONG = 1  # the target's choice nowhere
CHANGES = {  # of the row, at its tie: is this the target's output, too?
    "nothing": (lambda row, at, twin: row, True),
    "the twin": (lambda row, at, twin: [*row[:at], twin, *row[at + 1 :]], True),
    "wrong behind the twin": (
        lambda row, at, twin: [*row[:at], twin, *[WRONG] * (len(row) - at - 1)],
        False,
    ),
    "wrong at the tie": (lambda row, at, twin: [*row[:at], WRONG, *row[at + 1 :]], False),
    "wrong at first": (lambda row, at, twin: [WRONG, *row[1:]], False),
    "wrong at last": (lambda row, at, twin: [*row[:-1], WRONG], False),
    "a missing end": (lambda row, at, twin: row[:-1], False),
}


@pytest.mark.parametrize("one_way", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_every_token_must_be_the_targets_choice(tied, change, one_way):
    """Change the speculative output or both, and compare with gaps without a cache."""
    decoder, prompts, plain, at, twin = tied
    changed, is_right = CHANGES[change]
    fast = [changed(plain[0], at, twin), plain[1]]
    found = audit(decoder, plain if one_way else fast, fast)
    every, outside = zip(
        *(gaps(decoder.target, *pair) for pair in zip(prompts, fast, strict=True)), strict=True
    )
    assert found.speculative.outside == sum(outside)
    assert found.speculative.max_logit_gap == pytest.approx(max(map(max, every)), abs=1e-4)
    assert found.different == (one_way and change != "nothing")
    assert found.excused == (found.different and is_right)
    # Equal rows may end early.
    assert found.passed == (is_right or (change == "a missing end" and not one_way))


@pytest.mark.parametrize("change", ["the twin", "wrong behind the twin"])
@torch.inference_mode()
def test_a_row_is_excused_only_if_the_baseline_is_right_as_well(tied, change):
    decoder, _, plain, at, twin = tied
    changed, is_right = CHANGES[change]
    found = audit(decoder, [changed(plain[0], at, twin), plain[1]], plain)
    assert (found.different, found.excused, found.passed) == (1, is_right, is_right)
    assert (found.speculative.outside, found.baseline.outside) == (
        0,
        0 if is_right else len(plain[0]) - at - 1,
    )
    assert found.speculative.max_logit_gap == 0 < found.baseline.max_logit_gap


@pytest.mark.parametrize("best", [20.0, -20.0])
@pytest.mark.parametrize(
    ("dtype", "tie"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-4), (torch.float16, 2**-7)]
)
def test_a_near_tie_is_a_share_of_the_largest_logit(dtype, tie, best):
    logits = torch.tensor([best, best - 0.9 * tie * 20, best - 1.1 * tie * 20, best - 50])
    scores = output_audit.greedy_scores(
        logits.expand(1, 4, 4), torch.arange(4)[None, :, None], output_audit.near_tie(dtype)
    )
    outside, gap, ties = scores
    assert outside.tolist() == [[0, 0, 1, 1]]
    assert torch.equal(gap[0], logits[0] - logits)
    assert ties[0, :3].tolist() == pytest.approx([0, 0.9, 1.1], rel=0.05)


def test_outcomes_of_batches_add_up():
    assert Audit(True, 2, 2).passed
    assert not Audit(True, 2, 1).passed
    assert not Audit(True, speculative=LogitGaps(outside=1)).passed
    one = Audit(True, 2, 2, LogitGaps(0, 0.5), LogitGaps(1, 0.1))
    other = Audit(True, 1, 0, LogitGaps(4, 0.2), LogitGaps(2, 0.3))
    expected = {"different_rows": 3, "excused_rows": 2, "outside_tokens": 4, "max_logit_gap": 0.5}
    expected |= {"baseline_outside_tokens": 3, "baseline_max_logit_gap": 0.3}
    found = (one + other).metrics()
    assert {key: found[f"lossless/{key}"] for key in expected} == expected
    assert found["lossless/reason"] == "tokens that the target would not write"
    assert set(found) == {f"lossless/{key}" for key in (*expected, "reason")} | PROMPT_METRICS


CONTROL = LogitGaps(outside=0, max_ties=0.5)


@pytest.mark.parametrize(
    ("speculative", "control", "exact", "reduced"),
    [
        (LogitGaps(0, max_ties=0.9), CONTROL, True, True),
        (LogitGaps(1, max_ties=1.5), CONTROL, False, None),
        # Far above the control's and a near-tie.
        (LogitGaps(1, max_ties=4.5), CONTROL, False, False),
        (LogitGaps(1, max_ties=4.5), LogitGaps(1, max_ties=1.2), False, None),
        (LogitGaps(1, max_ties=9.0), LogitGaps(1, max_ties=1.2), False, False),
    ],
)
def test_a_gap_far_above_the_controls_fails_in_reduced_precision_too(
    speculative, control, exact, reduced
):
    for is_exact, passed in ((True, exact), (False, reduced)):
        assert (
            Audit(
                True, 1, int(not speculative.outside), speculative, control, is_exact=is_exact
            ).passed
            is passed
        )
        assert Audit(True, 1, 0, speculative, control, cut=1, is_exact=is_exact).passed is False


def of_z(z: float, outside: int = 0) -> LogitGaps:
    return LogitGaps(outside, excess=10 * z, variance=100.0)


@pytest.mark.parametrize(
    ("speculative", "control", "exact", "reduced"),
    [
        (of_z(1), of_z(-1), True, True),
        (of_z(4.5), of_z(1), False, None),
        (of_z(-4.9), of_z(-4.9), None, None),  # the control fails alike
        (of_z(1), of_z(-4.9), None, None),
        (of_z(9), of_z(1), False, False),
        (of_z(-12), of_z(-4.9), False, False),
        (of_z(0, outside=1), of_z(0, outside=1), None, None),
        (of_z(0, outside=1), of_z(0), False, None),
        (of_z(0, outside=30), of_z(0, outside=1), False, False),
    ],
)
def test_samples_are_held_against_their_control(speculative, control, exact, reduced):
    for is_exact, passed in ((True, exact), (False, reduced)):
        found = Audit(False, speculative=speculative, baseline=control, is_exact=is_exact)
        assert found.passed is passed
        assert bool(found.verdict[1]) == (passed is not True)


def whole_instead_of_residual(proposed_BG, q_BGV, logits_BTV, positions_BT, sampling):
    """Accept as one should, but draw what replaces a rejected proposal from the target's whole
    distribution.
    """
    verdict = accept.accept_sampled(proposed_BG, q_BGV, logits_BTV, positions_BT, sampling)
    p_BTV = probabilities(logits_BTV, sampling)
    at_BT1 = verdict.num_accepted_B[:, None, None].expand(-1, 1, p_BTV.shape[-1])
    u_B = uniform_BT(sampling, positions_BT, Use.DECIDE).gather(1, verdict.num_accepted_B[:, None])[
        :, 0
    ]
    bonus_B1 = draw(p_BTV.gather(1, at_BT1)[:, 0], u_B)[:, None]
    return verdict._replace(
        tokens_BT=verdict.tokens_BT.scatter(1, verdict.num_accepted_B[:, None], bonus_B1)
    )


def flagged(noise: float, seeds: range, rows: int = 24) -> tuple[float, float]:
    """Return the share of runs of a sampler without the residual that fail, and the mean power that
    they report.
    """
    target, failed, power = as_on_cpus(small_model()), [], []
    for seed in seeds:
        sampling = Sampling(temperature=1.0, seed=seed)
        options = {
            "draft_name": "model",
            "draft_model": noisy_copy(target, noise),
            "policy": "full",
            "gamma": 3,
        }
        prompts = random_prompts([40] * rows, seed)
        batch = open_batch(target, prompts, sampling=sampling, generate_len=64, **options)
        fast = batch.decoder.generate(batch.draft)
        found = audit(batch.decoder, batch.decoder.generate().tokens, fast.tokens, fast.accepted)
        failed.append(found.passed is False)
        power.append(found.speculative.power)
    return sum(failed) / len(failed), sum(power) / len(power)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("noise", "rows"), [(0.15, 24), (0.15, 64), (0.5, 24)])
def test_the_power_of_the_sampled_test_is_the_share_of_runs_that_it_finds(noise, rows, monkeypatch):
    """Within 0.2, which is 2.5 standard deviations of 40 runs at most. A right sampler reports the
    same power.
    """
    right, expected = flagged(noise, range(40), rows)
    monkeypatch.setattr(decoder_module, "accept_sampled", whole_instead_of_residual)
    found, reported = flagged(noise, range(40), rows)
    assert right == 0
    assert found == pytest.approx(expected, abs=0.2)
    assert reported == pytest.approx(expected, abs=0.15)


def test_a_bad_draft_without_the_residual_is_found_with_the_power_that_a_right_one_reports(
    monkeypatch,
):
    assert flagged(0.5, range(2))[1] > 0.99
    monkeypatch.setattr(decoder_module, "accept_sampled", whole_instead_of_residual)
    assert flagged(0.5, range(2))[0] == 1


def poisoned(model, token: int | None = None):
    """A copy that fails on a token, or on all."""
    copy = noisy_copy(model, 0.0)
    copy.embed.weight.data[slice(None) if token is None else token] = math.nan
    return copy


def test_the_first_logits_that_are_not_finite_are_named():
    """They are in the prefill, or behind the first token that the model cannot read."""
    batch = open_batch(poisoned(TARGET), random_prompts([9, 7]))
    with pytest.raises(NonFinite, match=r"target: .* first for token 9 of row 0, in the prefill"):
        batch.decoder.state.check_finite("in the prefill")
    prompts = random_prompts([20, 31])
    plain = open_batch(TARGET, prompts).decoder.generate().tokens
    places = [(row, at) for at in range(1, 20) for row in (0, 1)]
    read = [[*prompts[0], *prompts[1], *plain[0][:at], *plain[1][: at + row]] for row, at in places]
    row, at = next(
        place
        for place, before in zip(places, read, strict=True)
        if plain[place[0]][place[1]] not in before
    )
    token = plain[row][at]
    batch = open_batch(poisoned(TARGET, token), prompts, draft_name="ngram", gamma=2)
    where = f"token {len(prompts[row]) + at + 1} of row {row}"
    with pytest.raises(
        NonFinite, match=f"target: .* first for {where}, in autoregressive decoding"
    ):
        batch.decoder.generate()
    batch = open_batch(poisoned(TARGET, token), prompts, draft_name="ngram", gamma=2)
    with pytest.raises(NonFinite, match=f"target: .* of row {row}, in speculative decoding"):
        batch.decoder.generate(batch.draft)


def test_a_draft_a_profile_and_an_audit_demand_finite_logits():
    batch = open_batch(TARGET, PROMPTS[:2], **OPTIONS | {"draft_model": poisoned(TARGET)})
    batch.decoder.generate()
    with pytest.raises(NonFinite, match=r"draft.model: .* first for token 31 of row 0"):
        batch.decoder.generate(batch.draft)
    batch = open_batch(TARGET, PROMPTS[:2], draft_name="self", gamma=2, policy="full")
    plain = batch.decoder.generate().tokens
    batch.decoder.target = poisoned(TARGET)
    with pytest.raises(NonFinite, match="new token 1 of row 0, in the audit"):
        audit(batch.decoder, plain, plain)
    batch.simulate_prefill()
    warm_up(batch)
    with pytest.raises(NonFinite, match="in the profile"):
        profile_round(batch, 1)


def test_what_a_draft_sets_up_is_a_part_of_the_first_token(monkeypatch):
    """Its prefill, and with several gammas the rounds that are timed beforehand; in every pass."""
    monkeypatch.setattr(choices, "AUTO_GAMMAS", (1, 3))
    batch = open_batch(TARGET, PROMPTS[:2], **(OPTIONS | {"gamma": "auto"}))
    prefill = batch.draft.prefill
    monkeypatch.setattr(batch.draft, "prefill", lambda *a: [time.sleep(0.1), prefill(*a)])
    timed = {0: 1.0, 1: 1.0, 3: 1.0}
    monkeypatch.setattr(AdaptiveCycle, "_timed_rounds", lambda _: [time.sleep(0.2), timed][1])
    for _ in range(2):
        fast = batch.decoder.generate(batch.draft)
        speed = metrics.speed_metrics([metrics.row_times(fast, 1.0)])
        assert speed["time_to_first_token_ms"] >= 1300.0
    plain = metrics.speed_metrics([metrics.row_times(batch.decoder.generate(), 1.0)])
    assert plain["time_to_first_token_ms"] == 1000.0
