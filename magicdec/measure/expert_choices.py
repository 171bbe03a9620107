"""Which experts the tokens of a run choose: how unevenly, and how much consecutive tokens agree.

A verification reads the experts of gamma + 1 consecutive tokens of each row, so that their overlap
decides what it costs. Predictions take it with scenario.routing=RUN.

L layers with experts, B rows, T consecutive new tokens of a row, K experts that a token takes, X
experts of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from magicdec.engine.decoder import Decoder
from magicdec.measure.metrics import Metrics

RECORDED, AT_ONCE = 64, 16  # new tokens of a row, and those of one pass


@torch.inference_mode()
def layer_lines(decoder: Decoder, outputs: list[list[int]], most: int) -> list[dict[str, Any]]:
    """Feed the first new tokens of each row through the target again, behind its prompt. Return a
    line for each layer with experts: see `line_of`, with windows of up to `most` tokens.
    """
    target = decoder.target.plain() if decoder.target.is_compiled else decoder.target
    experts: list[Any] = target.experts()
    num_tokens = min(RECORDED, *map(len, outputs))
    if not experts or num_tokens < 2:
        return []
    tokens_BT = torch.tensor([row[:num_tokens] for row in outputs], device=decoder.device)
    decoder.cache.rollback(decoder.state.prompt_len_B)
    with recording(experts, len(outputs)) as chosen:
        for part_BT in tokens_BT.split(AT_ONCE, dim=1):
            target(part_BT, decoder.cache)
    decoder.cache.rollback(decoder.state.prompt_len_B)
    return [
        {"layer": layer} | line_of(torch.cat(parts, dim=1), module.num_experts, most)
        for layer, (module, parts) in enumerate(zip(experts, chosen, strict=True))
    ]


@contextmanager
def recording(experts: list[Any], num_rows: int) -> Iterator[list[list[Tensor]]]:
    """Record what each of these modules is asked for within a block: a list (B, T, K) per pass."""
    chosen: list[list[Tensor]] = [[] for _ in experts]

    def listener(into: list[Tensor]) -> Any:
        def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            index_NK = given[1]
            into.append(index_NK.view(num_rows, -1, index_NK.shape[-1]).cpu())

        return note

    handles = [
        module.register_forward_pre_hook(listener(into))
        for module, into in zip(experts, chosen, strict=True)
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def line_of(chosen_BTK: Tensor, num_experts: int, most: int) -> dict[str, Any]:
    """Return what choices of a layer show: how popular its experts are, in descending shares; their
    entropy over that of a uniform choice; and how many distinct ones 1, 2, ... `most` consecutive
    tokens of a row touch on average.
    """
    counts_X = chosen_BTK.flatten().bincount(minlength=num_experts).double()
    share_X = counts_X.sort(descending=True).values / counts_X.sum()
    largest = torch.tensor(float(num_experts)).log()
    entropy = -(share_X * share_X.clamp(min=1e-300).log()).sum() / largest
    lengths = range(1, min(most, chosen_BTK.shape[1]) + 1)
    return {
        "experts": num_experts,
        "experts_per_token": chosen_BTK.shape[-1],
        "entropy": float(entropy),
        "popularity": share_X.tolist(),
        "distinct": [distinct_of(chosen_BTK, length) for length in lengths],
    }


def distinct_of(chosen_BTK: Tensor, length: int) -> float:
    """Return the mean number of distinct experts that so many consecutive tokens choose."""
    windows = chosen_BTK.unfold(1, length, 1).flatten(2).sort(dim=-1).values
    return float((windows.diff(dim=-1) != 0).sum(-1).double().mean()) + 1


def metrics_of(lines: list[dict[str, Any]]) -> Metrics:
    """Return means over layers: the entropy, and the shares of the experts that consecutive tokens
    of a row touch.
    """
    if not lines:
        return {}
    figures: Metrics = {"routing/entropy": fmean(line["entropy"] for line in lines)}
    for index in range(len(lines[0]["distinct"])):
        share = fmean(line["distinct"][index] / line["experts"] for line in lines)
        figures[f"routing/experts_of_{index + 1}"] = share
    return figures
