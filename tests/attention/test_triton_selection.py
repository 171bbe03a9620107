"""The selecting kernels without a GPU: how many are launched, and what they take as compiled."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton (Linux only)")

from magicdec.attention.base import PageBounds, Shape
from magicdec.attention.cuda import triton as ours
from magicdec.attention.sdpa import SdpaAttention
from tests.attention import twins
from tests.gpu_rehearsal.compile import compiled
from tests.gpu_rehearsal.fake import engine, fake_cuda, prefilled
from tests.gpu_rehearsal.sass import BYTES_A_CYCLE, CLOCK_HZ, cycles, loops

ROWS, HEADS, DIM, CONTEXT, PAGE, LAYERS = 14, 8, 128, 32768, 16, 32
SMS = 132
CAPABILITIES = pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100, 120))]
)


def launches(kind, capability=90, num_new=1):
    """Return the kernels that select once for the heads of Llama-3.1-8B."""
    attention = ours.TritonAttention()
    with fake_cuda(capability) as recording, recording.of() as seen:
        q = torch.empty(ROWS, num_new, 32, DIM, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(ROWS, HEADS, CONTEXT + 5, DIM, dtype=torch.bfloat16, device="cuda")
        lengths_B = torch.empty(ROWS, dtype=torch.int32, device="cuda")
        if kind == "pages":
            pages = k[:, :, : CONTEXT // PAGE + 1].contiguous()
            bounds = PageBounds(pages, pages, PAGE)
            attention.select_pages(q, bounds, lengths_B, lengths_B, 32)
        elif kind == "slots":
            plan = attention.plan(lengths_B, Shape(num_new, k.shape[2], 4, q.dtype), None)
            attention.select_slots(q, k, k, plan, lengths_B, 512)
        else:
            scores = torch.empty(LAYERS, ROWS, HEADS, k.shape[2], device="cuda")
            attention.select_largest(scores, lengths_B[:, None], lengths_B[:, None], 384)
    return seen.launches


def selecting_cycles(launch):
    """Return the cycles that a multiprocessor needs at least to issue one program of select_places,
    where what is copied fits into one turn.
    """
    arguments, made = launch.arguments, compiled(launch, 90)
    turns = -(-arguments["P"] // arguments["GROUPS"])
    written = -(-arguments["num_out"] // arguments["GROUPS"])
    # Largest numbers, counting, copying; 31 bits, and two loops over what does not fit; choosing.
    return cycles(made, loops(made), [1, turns, turns, turns, 31, 0, 0, 1, written])


@CAPABILITIES
@pytest.mark.parametrize(("kind", "num_new"), [("pages", 1), ("slots", 2), ("largest", 1)])
def test_compiled(kind, num_new, capability):
    """Two launches, or one over scores that are there. Nothing is spilled, but for two numbers on
    an A100.
    """
    seen = launches(kind, capability, num_new)
    assert [launch.name for launch in seen] == ["weigh_places", "select_places"][
        kind == "largest" :
    ]
    for launch in seen:
        made = compiled(launch, capability)
        assert made.spilled <= (8 if capability == 80 else 0)
        # Whose shared memory holds a single program.
        if launch.name == "weigh_places" and capability != 120:
            assert made.programs >= 2


@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_what_is_read_takes_longer_than_what_is_issued(kind):
    """Of a whole layer on an H100, where a selecting program has a multiprocessor for itself."""
    weigh, select = launches(kind)
    made, P = compiled(weigh, 90), weigh.arguments["P"]
    _, loop = loops(made)
    read = sum(
        weigh.arguments[name].nbytes
        for name in ("keys", "least")
        if weigh.arguments[name] is not None
    )
    blocks = ROWS * HEADS * P / weigh.arguments["BLOCK"] / SMS
    reading = read / SMS / BYTES_A_CYCLE[90]
    assert cycles(made, [loop], [blocks]) <= 0.5 * reading
    assert selecting_cycles(select) <= 0.25 * reading


def test_a_selection_of_all_layers_is_issued_in_a_fifth_of_a_millisecond():
    """Of a round of verify_guided."""
    (select,) = launches("largest")
    assert LAYERS * ROWS * HEADS / SMS * selecting_cycles(select) / CLOCK_HZ <= 0.2e-3


@pytest.mark.parametrize("policy", ["quest", "topk"])
def test_a_layer_launches_four_kernels(policy):
    """Those that select, that add the proposals, and that attend, but for merging splits."""
    with fake_cuda() as recording:
        batch = prefilled(engine("self", policy, num_layers=1), ROWS, 2048)
        cache, attention = batch.draft.cache, batch.draft.model.attention
        q = torch.empty(ROWS, 1, 32, DIM, dtype=torch.bfloat16, device="cuda")
        (plan,) = cache.plan(attention, 1, q.dtype)
        with recording.of() as seen:
            cache.select(0, q, attention, plan)
        assert len(seen.ops) == 2
        with recording.of() as seen:
            cache.attend(0, q, attention, plan)
    names = [op.name for op in seen.ops if op.name != "triton:merge_splits"]
    assert names == ["triton:weigh_places", "triton:select_places", "cat", "triton:attend_split"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_on_a_gpu(kind, dtype):
    """As many selected, and of about the same worth, as by PyTorch's operators in fp32."""
    q, k, v, seqlens = [x.cuda() for x in twins.case(1, 4, DIM, 30_000, dtype)]
    length, first = seqlens - 1, torch.zeros_like(seqlens)
    exact, triton = SdpaAttention(), ours.TritonAttention()
    wide = q.float(), k.float(), v.float()
    if kind == "pages":
        pages = k[:, :, : k.shape[2] // PAGE * PAGE].unflatten(2, (-1, PAGE))
        selected = triton.select_pages(
            q, PageBounds(pages.amin(3), pages.amax(3), PAGE), first, length, 32
        )
        pages = pages.float()
        right = exact.select_pages(
            wide[0], PageBounds(pages.amin(3), pages.amax(3), PAGE), first, length, 32
        )
    else:
        plan = twins.plan_of(triton, q, k, seqlens, None)
        selected = triton.select_slots(q, k, v, plan, length, 512)
        plan = twins.plan_of(exact, *wide[:2], seqlens, None)
        right = exact.select_slots(*wide, plan, length, 512)
    scores = twins.attend_scored(exact, *wide, seqlens)[1]
    mass, most = twins.at(selected, scores).sum(2), twins.at(right, scores).sum(2)
    assert torch.equal((selected >= 0).sum(2), (right >= 0).sum(2))
    torch.testing.assert_close(mass, most, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 384, 5000])
@pytest.mark.parametrize("equal", [False, True])
def test_largest_on_a_gpu(count, equal):
    generator = torch.Generator("cuda").manual_seed(count)
    scores = torch.rand(4, 6, 8, 32_773, device="cuda", generator=generator)
    if equal:
        scores = (3 * scores).round()
    last = torch.tensor([32_773, 0, 300, 20_000, 9000, 4097], device="cuda")[:, None]
    first = torch.zeros_like(last)
    selected = ours.TritonAttention().select_largest(scores, first, last, count)
    right = SdpaAttention().select_largest(scores, first, last, count)
    for slots in selected.flatten(0, -2):
        taken = slots[slots >= 0]
        assert len(taken.unique()) == len(taken)
    values = twins.at(selected, scores).sort(-1).values
    assert torch.equal(values, twins.at(right, scores).sort(-1).values)
