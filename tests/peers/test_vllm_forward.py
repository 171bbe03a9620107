"""Results of `vllm bench forward`, in the layout that vLLM 0.33 writes."""

import json

import pytest

from magicdec.errors import UserError
from magicdec.peers.vllm_forward import ForwardTime, read_forward, with_forward

BATCH = 16


def case(
    name: str, query_len: int, kv_len: int, drafts: int, us: float, scope: str = "target_only"
):
    """A case of equal requests, as `vllm bench forward --output-json` writes it."""
    request = {"query_len": query_len, "kv_len": kv_len, "num_draft_tokens": drafts}
    return {
        "case": name,
        "requests": [request | {"chunked": False}] * BATCH,
        "median_us": us,
        "ranks": [{"num_tokens": BATCH * query_len, "timing_scope": scope}],
    }


def written(tmp_path, *cases):
    """A results file of these cases."""
    path = tmp_path / "forward.json"
    path.write_text(json.dumps(cases))
    return path


def test_decode_steps_and_verifications_of_the_target_alone_are_read(tmp_path):
    path = written(
        tmp_path,
        case("decode", 1, 4097, 0, 8000.0),
        case("verify", 4, 4100, 3, 9500.0),
        case("round", 4, 4100, 3, 12000.0, "target_and_drafter"),
        case("prefill", 512, 512, 0, 90000.0),
        case("hit", 512, 4096, 0, 90000.0),
    )
    assert read_forward(path) == [
        ForwardTime(BATCH, 4096, 0, 8.0),
        ForwardTime(BATCH, 4096, 3, 9.5),
    ]


def test_a_point_has_the_nearest_time_of_its_batch_and_gamma():
    times = [
        ForwardTime(BATCH, 4000, 0, 7.9),
        ForwardTime(BATCH, 4100, 0, 8.0),
        ForwardTime(BATCH, 4300, 0, 8.2),
        ForwardTime(BATCH, 4096, 3, 9.5),
        ForwardTime(BATCH, 4096, 1, 8.5),
        ForwardTime(BATCH, 9000, 3, 20.0),
        ForwardTime(1, 4096, 3, 5.0),
    ]
    point = {"batch_size": BATCH, "context_len": 4080, "decoded": 16.0, "gamma": 3}
    elsewhere = {**point, "context_len": 1024}
    near, far = with_forward([point, elsewhere], times)
    assert near == {**point, "forward/target_decode_ms": 8.0, "forward/verify_ms": 9.5}
    assert far == elsewhere


@pytest.mark.parametrize(
    "text", ["", "{}", '{"case": 1}', "[1]", '[{"case": "a"}]', "[]", "[" * 10**5]
)
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "forward.json"
    path.write_text(text)
    with pytest.raises(UserError, match="vllm bench forward") as refused:
        read_forward(path)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_forward(tmp_path / "nowhere.json")
