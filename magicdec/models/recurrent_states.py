"""Recurrent states, which have one size however long a sequence is, and how a verification of which
a part is rejected is taken back.

A layer with a gated delta rule keeps two states: the columns that its convolution reads of earlier
tokens, and a matrix per head (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464). Neither
can be cut like entries. So a tentative pass leaves both as they are, and notes what `commit` makes
the states behind the accepted tokens of:

- `KeptStates` keep the matrices behind each token of the pass. Committing copies one of them.
- `ReplayedStates` keep what the rule has read of the tokens, which is much smaller. Committing
  applies the rule to the accepted tokens again.

L recurrent layers, B rows, R of them that a pass computes, T tokens of the pass, F features of the
convolution, C columns that it reads of earlier tokens, H heads, K and V sizes of a key and a value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.layer_facts import Recurrence
from magicdec.models.computed_rows import active_rows


class RuleInputs(NamedTuple):
    """The inputs of the gated delta rule for T tokens, with G heads of queries and keys."""

    q_RTGK: Tensor
    k_RTGK: Tensor
    v_RTHV: Tensor
    decay_RTH: Tensor  # its logarithm
    rate_RTH: Tensor

    def token(self, index: int) -> "RuleInputs":
        """Return those of one token."""
        return RuleInputs(*(x[:, index : index + 1] for x in self))

    def first(self, count_R: Tensor) -> "RuleInputs":
        """Let only the first `count_R` tokens of each row change the state: without decay and with
        a rate of 0 a token leaves it as it is.
        """
        place_T = torch.arange(self.rate_RTH.shape[1], device=count_R.device)
        behind_RT1 = (place_T >= count_R[:, None])[..., None]
        return self._replace(
            decay_RTH=self.decay_RTH.masked_fill(behind_RT1, 0.0),
            rate_RTH=self.rate_RTH.masked_fill(behind_RT1, 0.0),
        )


# Takes T tokens and the state before them. Returns the outputs (R, T, H, V) and the state behind.
Rule = Callable[[RuleInputs, Tensor], tuple[Tensor, Tensor]]


class Computed(NamedTuple):
    """The rows that a pass computes, and how many tokens each of them has; None: all."""

    rows_R: Tensor | None = None
    count_R: Tensor | None = None

    def of(self, x_B: Tensor) -> Tensor:
        """Return the part of a tensor that belongs to the rows."""
        return x_B if self.rows_R is None else x_B[self.rows_R]

    def put(self, x_B: Tensor, x_R: Tensor) -> None:
        """Write the part of a tensor that belongs to the rows."""
        if self.rows_R is None:
            x_B.copy_(x_R)
        else:
            x_B.index_copy_(0, self.rows_R, x_R.to(x_B.dtype))


class States(ABC):
    """The states of all recurrent layers and rows."""

    per_row: ClassVar[dict[str, int]] = {"columns_LBFC": 1, "matrix_LBHKV": 1}

    def __init__(
        self,
        recurrence: Recurrence,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """Allocate empty states. Matrices are in fp32, as the rule computes them."""
        r, layers = recurrence, len(recurrence.layers)
        self.place_of = {layer: place for place, layer in enumerate(r.layers)}
        self.columns_LBFC = torch.zeros(
            layers, num_rows, r.conv_features, r.conv_width - 1, dtype=dtype, device=device
        )
        self.matrix_LBHKV = torch.zeros(
            layers, num_rows, r.heads, r.key_dim, r.value_dim, device=device
        )
        # The states that the next pass begins with, where they are not these: those of the target,
        # in a draft's cache.
        self.source: States | None = None
        self._marked: tuple[Tensor, Tensor] | None = None
        self._is_tentative = False
        self._num_noted = 0  # tokens of the tentative pass that `commit` was not called for yet
        # By the tokens of a pass: the columns of a tentative pass, earlier ones included. Captured
        # rounds write there: none is replaced before `forget_passes`, which is called when those
        # rounds are over.
        self._columns_of: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of states, of those at the mark, and of what tentative passes note."""
        noted = self._columns_of.values()
        return sum(x.nbytes for x in (*self.now, *(self._marked or ()), *noted))

    @property
    def now(self) -> tuple[Tensor, Tensor]:
        """Return the columns and the matrices."""
        return self.columns_LBFC, self.matrix_LBHKV

    @property
    def marked(self) -> tuple[Tensor, Tensor]:
        """Return the columns and the matrices as they were when `mark` was called. Raise
        RuntimeError if it never was.
        """
        if self._marked is None:
            raise RuntimeError("recurrent states cannot return: none were marked")
        return self._marked

    def forget_passes(self) -> None:
        """Free what tentative passes note. No captured round that writes there may run
        afterwards.
        """
        self._columns_of.clear()

    def clear(self) -> None:
        """Set the states of all rows as before their first token."""
        for mine in self.now:
            mine.zero_()

    def simulate(self) -> None:
        """Set random states, for timing only, and mark them."""
        for mine in self.now:
            mine.normal_()
        self.mark()

    def mark(self) -> None:
        """Keep the states as they are now, for `return_to_mark`."""
        if self._marked is None:
            self._marked = torch.empty_like(self.columns_LBFC), torch.empty_like(self.matrix_LBHKV)
        for mine, marked in zip(self.now, self._marked, strict=True):
            marked.copy_(mine)

    def return_to_mark(self) -> None:
        """Set the states as they were when `mark` was called."""
        for mine, marked in zip(self.now, self.marked, strict=True):
            mine.copy_(marked)

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Let the pass within leave the states as they are until `commit`."""
        self._is_tentative = True
        try:
            yield
        finally:
            self._is_tentative = False

    def end_pass(self) -> None:
        """Begin the next pass with these states, unless this one was tentative: then with what
        `commit` makes of it.
        """
        if not self._is_tentative:
            self.source, self._num_noted = None, 0

    def extended(self, layer: int, new_RFT: Tensor, computed: Computed) -> Tensor:
        """Return the columns of new tokens behind those of earlier ones (R, F, C + T), which a
        layer's convolution reads.
        """
        place = self.place_of[layer]
        num_new = new_RFT.shape[2]
        before_RFC = computed.of((self.source or self).columns_LBFC[place])
        columns_RFN = torch.cat((before_RFC, new_RFT), dim=2)
        if self._is_tentative:
            noted_LBFN = self._noted_columns(num_new, columns_RFN.shape[2])
            computed.put(noted_LBFN[place], columns_RFN)
        else:
            count_R = computed.count_R
            behind_RFC = columns_RFN[:, :, num_new:]
            if count_R is not None:
                behind_RFC = _behind(columns_RFN, count_R, before_RFC.shape[2])
            computed.put(self.columns_LBFC[place], behind_RFC)
        return columns_RFN

    def _noted_columns(self, num_new: int, num_columns: int) -> Tensor:
        """Return room for the columns of a tentative pass."""
        self._num_noted = num_new
        if num_new not in self._columns_of:
            shape = (*self.columns_LBFC.shape[:3], num_columns)
            self._columns_of[num_new] = self.columns_LBFC.new_zeros(shape)
        return self._columns_of[num_new]

    def apply(self, layer: int, rule: Rule, inputs: RuleInputs, computed: Computed) -> Tensor:
        """Return a layer's outputs (R, T, H, V) for new tokens, and change its state unless the
        pass is tentative.
        """
        place = self.place_of[layer]
        before_RHKV = computed.of((self.source or self).matrix_LBHKV[place])
        if self._is_tentative:
            return self.note(place, rule, inputs, before_RHKV, computed)
        if computed.count_R is not None:
            inputs = inputs.first(computed.count_R)
        out_RTHV, matrix_RHKV = rule(inputs, before_RHKV)
        computed.put(self.matrix_LBHKV[place], matrix_RHKV)
        return out_RTHV

    @abstractmethod
    def note(
        self, place: int, rule: Rule, inputs: RuleInputs, before_RHKV: Tensor, computed: Computed
    ) -> Tensor:
        """Return the outputs (R, T, H, V) of a tentative pass, and note what `committed` needs."""

    @abstractmethod
    def committed(
        self, place: int, num_appended: int, before_RHKV: Tensor, committing: Computed
    ) -> Tensor:
        """Return a layer's matrices (R, H, K, V) behind the tokens that each row commits."""

    def commit(self, num_appended: int, count_B: Tensor) -> None:
        """Set the states behind the first `count_B` of the tokens of a tentative pass.

        After another pass, of one token, they are there already.
        """
        if self._num_noted != num_appended:
            return
        self._num_noted = 0
        rows_R = active_rows(count_B == 0)
        before = self.source or self
        self.source = None
        committing = Computed(rows_R, count_B if rows_R is None else count_B[rows_R])
        assert committing.count_R is not None
        if not len(committing.count_R):
            return
        for place, columns_BFN in enumerate(self._columns_of[num_appended]):
            before_RHKV = committing.of(before.matrix_LBHKV[place])
            matrix_RHKV = self.committed(place, num_appended, before_RHKV, committing)
            committing.put(self.matrix_LBHKV[place], matrix_RHKV)
            columns_RFN = committing.of(columns_BFN)
            columns_BFC = self.columns_LBFC[place]
            behind_RFC = _behind(columns_RFN, committing.count_R, columns_BFC.shape[2])
            committing.put(columns_BFC, behind_RFC)


def _behind(columns_RFN: Tensor, count_R: Tensor, width: int) -> Tensor:
    """Return the last `width` columns of the earlier tokens and the first `count_R` new ones."""
    index_RC = count_R.long()[:, None] + torch.arange(width, device=count_R.device)
    return columns_RFN.take_along_dim(index_RC[:, None], dim=2)


class KeptStates(States):
    """The matrices behind each token of a tentative pass are kept."""

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self._matrices_of: dict[int, Tensor] = {}  # (L, B, T, H, K, V)

    @property
    @override
    def num_bytes(self) -> int:
        return super().num_bytes + sum(x.nbytes for x in self._matrices_of.values())

    @override
    def forget_passes(self) -> None:
        super().forget_passes()
        self._matrices_of.clear()

    @override
    def note(
        self, place: int, rule: Rule, inputs: RuleInputs, before_RHKV: Tensor, computed: Computed
    ) -> Tensor:
        num_new = inputs.k_RTGK.shape[1]
        if num_new not in self._matrices_of:
            layers, rows, *sizes = self.matrix_LBHKV.shape
            self._matrices_of[num_new] = self.matrix_LBHKV.new_zeros(layers, rows, num_new, *sizes)
        kept_BTHKV = self._matrices_of[num_new][place]
        outputs, matrix_RHKV = [], before_RHKV
        for token in range(num_new):
            out_R1HV, matrix_RHKV = rule(inputs.token(token), matrix_RHKV)
            computed.put(kept_BTHKV[:, token], matrix_RHKV)
            outputs.append(out_R1HV)
        return torch.cat(outputs, dim=1)

    @override
    def committed(
        self, place: int, num_appended: int, before_RHKV: Tensor, committing: Computed
    ) -> Tensor:
        kept_RTHKV = committing.of(self._matrices_of[num_appended][place])
        assert committing.count_R is not None
        count_R1111 = committing.count_R.long()[:, None, None, None, None]
        last_RHKV = kept_RTHKV.take_along_dim((count_R1111 - 1).clamp(min=0), dim=1)[:, 0]
        return torch.where(count_R1111[:, 0] > 0, last_RHKV, before_RHKV)


class ReplayedStates(States):
    """States that are replayed from what the rule has read in a tentative pass."""

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self._inputs_of: dict[int, list[RuleInputs]] = {}  # of all rows, by layer

    @property
    @override
    def num_bytes(self) -> int:
        layers = (inputs for layers in self._inputs_of.values() for inputs in layers)
        return super().num_bytes + sum(x.nbytes for inputs in layers for x in inputs)

    @override
    def forget_passes(self) -> None:
        super().forget_passes()
        self._inputs_of.clear()

    @override
    def note(
        self, place: int, rule: Rule, inputs: RuleInputs, before_RHKV: Tensor, computed: Computed
    ) -> Tensor:
        self._rule = rule
        num_new = inputs.k_RTGK.shape[1]
        if num_new not in self._inputs_of:
            layers, rows = self.matrix_LBHKV.shape[:2]
            self._inputs_of[num_new] = [
                RuleInputs(*(x.new_zeros(rows, *x.shape[1:]) for x in inputs))
                for _ in range(layers)
            ]
        for noted_B, x_R in zip(self._inputs_of[num_new][place], inputs, strict=True):
            computed.put(noted_B, x_R)
        out_RTHV, _ = rule(inputs, before_RHKV)
        return out_RTHV

    @override
    def committed(
        self, place: int, num_appended: int, before_RHKV: Tensor, committing: Computed
    ) -> Tensor:
        noted = RuleInputs(*(committing.of(x_B) for x_B in self._inputs_of[num_appended][place]))
        assert committing.count_R is not None
        _, matrix_RHKV = self._rule(noted.first(committing.count_R), before_RHKV)
        return matrix_RHKV


def new_states(
    recurrence: Recurrence, num_rows: int, dtype: torch.dtype, device: torch.device | str
) -> States:
    """Allocate empty states, with the way to take back a part of a pass that `recurrence` names."""
    kind = KeptStates if recurrence.rollback == "keep" else ReplayedStates
    return kind(recurrence, num_rows, dtype, device)
