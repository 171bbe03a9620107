"""The types of result.json: a class for each section of docs/reference/metrics.md.

A key is missing where nothing was measured, and a figure is None where it is no number. Keys that
have a name or a number in them, such as `acceptance_rate/position_0` and `category/code/rows`, are
not listed: they hold figures, too.
"""

from typing import Literal

from typing_extensions import TypedDict

from magicdec.tracking.run_files import StoredResult
from magicdec.tracking.unit_files import typed

Figure = float | None
Interval = list[float] | None  # its two ends

SpeedFigures = TypedDict(
    "SpeedFigures",
    {
        "speedup": Figure,
        "speedup_ci95": Interval,
        "speedup_min": Figure,
        "speedup_max": Figure,
        "speedup_spread": Figure,
        "speedup_precision": Figure,
        "speedup_wall": Figure,
        "speedup_wall_ci95": Interval,
        "speedup_wall_min": Figure,
        "speedup_wall_max": Figure,
        "speedup_wall_spread": Figure,
        "speedup_duration": Figure,
        "repeats": int,
        "repeats_minutes": Figure,
        "repeats_disturbed": int,
        "repeats_left_out": int,
        "repeats_left_out_why": str,
        "noisy": bool,
        "disturbed": str,
        "gamma": int,
        "prefill/shared": bool,
        "autoregressive/tokens_per_second": Figure,
        "autoregressive/time_per_output_token_ms": Figure,
        "autoregressive/time_to_first_token_ms": Figure,
        "autoregressive/decode_s": Figure,
        "autoregressive/wall_s": Figure,
        "autoregressive/accuracy": Figure,
        "speculative/tokens_per_second": Figure,
        "speculative/time_per_output_token_ms": Figure,
        "speculative/time_to_first_token_ms": Figure,
        "speculative/decode_s": Figure,
        "speculative/wall_s": Figure,
        "speculative/accuracy": Figure,
    },
    total=False,
)

AcceptanceFigures = TypedDict(
    "AcceptanceFigures",
    {
        "acceptance_rate": Figure,
        "acceptance_rate_ci95": Interval,
        "acceptance_length": Figure,
        "acceptance_length_ci95": Interval,
        "acceptance_rounds": int,
        "alpha": Figure,
        "alpha_ci95": Interval,
        "acceptance/source": Literal["measured", "synthetic", "usage", "/metrics", "unknown"],
        "context/error_of_shortest": Figure,
    },
    total=False,
)

LosslessFigures = TypedDict(
    "LosslessFigures",
    {
        "lossless/identical": bool | None,
        "lossless/passed": bool | None,
        "lossless/reason": str,
        "lossless/prompt_checked": int,
        "lossless/prompt_wrong": int,
        "lossless/prompt_max_error": Figure,
        "lossless/outside_tokens": int,
        "lossless/baseline_outside_tokens": int,
        "lossless/different_rows": int,
        "lossless/excused_rows": int,
        "lossless/max_logit_gap": Figure,
        "lossless/baseline_max_logit_gap": Figure,
        "lossless/power": Figure,
        "lossless/z_score": Figure,
        "lossless/baseline_z_score": Figure,
        "output/fingerprint": str,
        "time/audit_prompts_s": Figure,
    },
    total=False,
)

StepFigures = TypedDict(
    "StepFigures",
    {
        "time/target_decode_ms": Figure,
        "time/draft_ms": Figure,
        "time/verify_ms": Figure,
        "time/select_ms": Figure,
        "time/round_ms": Figure,
        "time/overhead_ms": Figure,
        "time/impossible": bool,
        "agreement/target_decode": Figure,
        "agreement/round": Figure,
        "agreement/earlier": Figure,
        "agreement/prediction": Figure,
        "formula/speedup": Figure,
        "formula/speedup_error": Figure,
        "formula/speedup_wall": Figure,
        "limit/target_decode": Figure,
        "limit/draft": Figure,
        "limit/verify": Figure,
        "limit/prefill": Figure,
        "roofline/bandwidth_gbs": Figure,
        "roofline/target_decode": Figure,
        "roofline/verify": Figure,
        "routing/entropy": Figure,
    },
    total=False,
)

PredictedFigures = TypedDict(
    "PredictedFigures",
    {
        "predicted/speedup": Figure,
        "predicted/speedup_error": Figure,
        "predicted/speedup_low": Figure,
        "predicted/speedup_high": Figure,
        "predicted/speedup_wall": Figure,
        "predicted/speedup_wall_error": Figure,
        "predicted/pays": Figure,
        "predicted/gamma": int | None,
        "predicted/alpha": Figure,
        "predicted/acceptance_source": str | None,
        "predicted/break_even_alpha": Figure,
        "predicted/critical_context": Figure,
        "predicted/target_decode_ms": Figure,
        "predicted/draft_ms": Figure,
        "predicted/verify_ms": Figure,
        "predicted/select_ms": Figure,
        "predicted/round_ms": Figure,
        "predicted/overhead_ms": Figure,
        "predicted/target_decode_error": Figure,
        "predicted/draft_error": Figure,
        "predicted/verify_error": Figure,
        "predicted/step_error": Figure,
        "predicted/tokens_per_second": Figure,
        "predicted/batch_size": int | None,
        "predicted/requests_per_second": Figure,
        "predicted/autoregressive_requests_per_second": Figure,
        "predicted/speedup_with_prefill": Figure,
        "predicted/worst_share": Figure,
        "predicted/time_per_output_token_ms": Figure,
        "predicted/memory_gib": Figure,
        "predicted/fits": bool | None,
        "predicted/arithmetic_intensity": Figure,
        "predicted/ridge": Figure,
        "predicted/kv_share": Figure,
        "predicted/calibration": str | None,
        "predicted/kernel_costs": str | None,
    },
    total=False,
)

VerifyFigures = TypedDict(
    "VerifyFigures",
    {
        "verify/worst_share": Figure,
        "verify/median_share": Figure,
        "verify/worst_share_apart": Figure,
        "verify/median_share_apart": Figure,
        "verify/worst_share_by_batch": Figure,
        "verify/median_share_by_batch": Figure,
        "verify/worst_share_by_batch_apart": Figure,
        "verify/median_share_by_batch_apart": Figure,
    },
    total=False,
)

PlaceFigures = TypedDict(
    "PlaceFigures",
    {
        "memory/peak_gib": Figure,
        "memory/estimated_gib": Figure,
        "memory/target_kv_gib": Figure,
        "memory/draft_kv_gib": Figure,
        "gpu/throttled/thermal": Figure,
        "gpu/throttled/power": Figure,
        "gpu/shared": Figure,
        "device": str,
        "data/fingerprint": str,
        "data/context_len_mean": Figure,
        "data/context_len_min": int,
        "data/context_len_max": int,
        "data/rows_left_out": int,
        "weights/source": Literal["checkpoint", "random"],
        "weights/bytes": int,
        "engine/version": str,
        "engine/served": str,
    },
    total=False,
)

LoadFigures = TypedDict(
    "LoadFigures",
    {
        "autoregressive/requests_per_second": Figure,
        "autoregressive/tokens_per_second_per_user": Figure,
        "autoregressive/inter_chunk_latency_ms": Figure,
        "autoregressive/request_latency_ms": Figure,
        "autoregressive/goodput_rps": Figure,
        "autoregressive/failed_requests": int,
        "autoregressive/retried_requests": int,
        "autoregressive/client_late_ms": Figure,
        "autoregressive/slo_concurrency": Figure,
        "autoregressive/slo_rate": Figure,
        "speculative/requests_per_second": Figure,
        "speculative/tokens_per_second_per_user": Figure,
        "speculative/inter_chunk_latency_ms": Figure,
        "speculative/request_latency_ms": Figure,
        "speculative/goodput_rps": Figure,
        "speculative/failed_requests": int,
        "speculative/retried_requests": int,
        "speculative/client_late_ms": Figure,
        "speculative/slo_concurrency": Figure,
        "speculative/slo_rate": Figure,
    },
    total=False,
)

DiagnosisFigures = TypedDict(
    "DiagnosisFigures",
    {
        "diagnosis/cause": str,
        "diagnosis/sentence": str,
        "diagnosis/paying_cells": int,
        "diagnosis/cells": int,
        "diagnosis/residual": Figure,
    },
    total=False,
)


class RunFacts(StoredResult, total=False):
    """The facts of every run: its id, its times, its process and its software."""

    id: str
    attempt: int
    started: str
    resumed: str
    finished: str
    duration_s: float
    host: str
    pid: int
    version: str
    source: str
    commit: str | None
    commit_dirty: bool | None
    python: str
    torch: str
    openmp: str


@typed
class RunResult(
    RunFacts,
    SpeedFigures,
    AcceptanceFigures,
    LosslessFigures,
    StepFigures,
    PredictedFigures,
    VerifyFigures,
    PlaceFigures,
    LoadFigures,
    DiagnosisFigures,
):
    """The contents of result.json."""
