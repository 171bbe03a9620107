"""Threads of the C++ kernels that wait for each other: as they are, and in a build in which they
run far apart.
"""

import pytest
import torch

from magicdec.attention.cpp import CppAttention
from magicdec.kernels import library
from magicdec.models import passes
from magicdec.models.kv_cache import KVCache
from tests.attention.twins import attend_scored, case
from tests.small import small_model
from tests.threads import threads

if library.compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

THREADS, TIMES = 3, 10
TAKEN = "fetch_add(1)"  # how a thread takes a task, or notes that it has done one
SLEEP = " + usleep(rand() % 1000)"  # meanwhile, others run ahead


@pytest.fixture(scope="module", params=["as it is", "staggered"])
def attention(request, tmp_path_factory):
    """The backend of a build, which `passes` uses too. The second one takes a second or two to
    compile.
    """
    cached = (library.path, library.load, passes._calls)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "staggered":
            folder = tmp_path_factory.mktemp("kernels")
            sources = {file.name: file.read_text() for file in library.FOLDER.glob("*.[ch]*")}
            assert TAKEN in sources["attention.cpp"]
            assert TAKEN in sources["matmul.h"]
            for name, text in sources.items():
                (folder / name).write_text(text.replace(TAKEN, TAKEN + SLEEP))
            patch.setattr(library, "FOLDER", folder)
            patch.setattr(library, "SOURCES", sorted(folder.glob("*.cpp")))
            patch.setattr(
                library,
                "FLAGS",
                (*library.FLAGS, "-O0", "-include", "cstdlib", "-include", "unistd.h"),
            )
        for function in cached:
            function.cache_clear()
        yield CppAttention()
    for function in cached:
        function.cache_clear()


def check(calls):
    """Call each in turn, so that what one leaves behind is wrong for the next; compare with one
    thread, bit for bit.
    """
    with threads(1):
        right = [call() for call in calls]
    with threads(THREADS):
        for _ in range(TIMES):
            for call, expected in zip(calls, right, strict=True):
                assert all(map(torch.equal, call(), expected))


@torch.inference_mode()
def test_a_thread_waits_for_the_room_of_a_head_that_is_still_merged(attention):
    """Many more KV heads than threads, so that they share rooms; one split each, and several."""
    cases = [
        [x.repeat_interleave(4, dim=0) for x in case(2, 2, 8, longest)] for longest in (500, 1300)
    ]
    check([lambda case=case: attend_scored(attention, *case) for case in cases])


@torch.inference_mode()
def test_a_layer_s_steps_wait_for_each_other(attention):
    model = small_model(num_layers=3, intermediate_size=77)
    model.attention = attention
    model._layer_by_layer = None  # all layers are one call

    def hidden(tokens_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = KVCache(model.config, len(tokens_BT), 8, model.dtype, "cpu")
        return model(tokens_BT, cache), cache.k_LBKSD, cache.v_LBKSD

    check(
        [
            lambda first=first: hidden(torch.arange(first, first + 18).view(3, 6))
            for first in (0, 20)
        ]
    )
