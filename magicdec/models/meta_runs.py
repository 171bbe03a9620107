"""Runs on tensors without storage, on PyTorch's meta device. Its operators are slow, and most
layers and steps of a run are alike.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class EachOnce(TorchDispatchMode):
    """A mode in which an operator that makes a tensor runs once for arguments that are alike. Later
    ones get a new tensor like that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[object, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or make a tensor like the one that it has made."""
        kwargs = kwargs or {}
        if not _makes(func):
            return func(*args, **kwargs)
        call = func, _likeness(args), _likeness(tuple(kwargs.items()))
        if call in self._made:
            size, strides, dtype = self._made[call]
            return torch.empty_strided(size, strides, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_meta and _is_new(out, (args, kwargs)):
            self._made[call] = out.size(), out.stride(), out.dtype
        return out


@cache
def _makes(func: Any) -> bool:
    """Return whether an operator neither changes what it is given nor returns a view of it."""
    schema = func._schema
    return not schema.is_mutable and not any(result.alias_info for result in schema.returns)


def _is_new(out: Tensor, arguments: Any) -> bool:
    """Return whether a result is none of the tensors that were given."""
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    return type(out) is Tensor and out.untyped_storage()._cdata not in storages


def _likeness(argument: Any) -> object:
    """Return what an operator on the meta device sees of an argument: equal for those that are
    alike. A tensor with values, or of a kind of its own, is like no other.
    """
    if isinstance(argument, Tensor):
        if not argument.is_meta or type(argument) not in (Tensor, Parameter):
            return object()
        return argument.size(), argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_likeness, argument))
    return type(argument), argument
