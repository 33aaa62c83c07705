"""FP8 products by scales of earlier steps, and the amaxes that the scales of later ones are from.

Casts are Transformer Engine's with DelayedScaling: a number times the scale, saturated at the
largest of the format and rounded to it. So is the rule of scales: the format's largest number over
2^margin and over the amax; a tensor that was not seen, or whose amax is not finite, keeps history
and scale; the first scale is 1. rules.delayed_scaling says when a history moves on.

Shapes: R rows, K in, N out, E experts of a linear (1 for none), L steps of history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from moewright.engine.kernels.columns import NarrowGradient, NarrowInput
from moewright.engine.kernels.low_precision import Groups, NarrowTensor, NarrowWeight, cast_groups
from moewright.engine.kernels.products import (
    NOTHING_KEPT,
    Gradient,
    HeldInput,
    Input,
    KeptInputs,
    multiply_by_weights,
    multiply_columns,
)
from moewright.engine.kernels.weight_copies import WeightCopies
from moewright.rules.delayed_scaling import SCALES_OF_LINEAR, ScaledLinear
from moewright.rules.low_precision import OperandKind, Recipe
from moewright.spec.ledger import Component, MemoryRow
from moewright.spec.workload import AmaxComputeAlgo, DelayedScalingSpec

_KINDS = tuple(OperandKind)
_FP32_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScales:
    """The scales of a linear and the amaxes [E,3] of the step that runs, as views of all.

    `scales` [groups,3] are of the groups of rows and weights that come, and `experts` the numbers
    of their experts; None for all E in order.
    """

    name: str
    scales: torch.Tensor
    amaxes: torch.Tensor
    experts: torch.Tensor | None

    def scales_of(self, kind: OperandKind) -> torch.Tensor:
        """Return the scale of each group of rows."""
        return self.scales[:, _KINDS.index(kind)]

    def note_largest(self, kind: OperandKind, largest: torch.Tensor) -> None:
        """Note the largest magnitude of each group of rows."""
        amaxes = self.amaxes[:, _KINDS.index(kind)]
        if self.experts is None:
            # The largest of all micro-batches of the step.
            torch.maximum(amaxes, largest, out=amaxes)
        else:
            amaxes.scatter_reduce_(0, self.experts, largest, "amax")


class DelayedProducts:
    """Products of operands that are converted by the scales of a linear.

    A forward notes the amaxes of input and weight, the product for the input's gradient that of the
    output's gradient; all other conversions are of tensors that have been noted. A weight whose
    copies a step keeps is noted once a step. A recomputed forward may start from an input that was
    rounded already, and notes nothing.
    """

    def __init__(
        self,
        recipe: Recipe,
        scales: LinearScales,
        is_first_forward: Callable[[], bool],
        copies: WeightCopies,
        kept: KeptInputs,
    ) -> None:
        self._recipe = recipe
        self._scales = scales
        self._copies = copies
        self._kept = kept
        self._is_first_forward = is_first_forward

    def forward(
        self, x_RK: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.forward_each(x_RK, [w], ends)[0]

    def forward_each(
        self,
        x_RK: torch.Tensor,
        weights: Sequence[torch.Tensor],
        ends: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        is_new = self._is_first_forward()
        x = self._kept.find_converted(x_RK, self)
        if x is None:
            x = self._cast(OperandKind.INPUT, x_RK, Groups(ends=ends), is_new=is_new)
        elif is_new:
            self._scales.note_largest(OperandKind.INPUT, Groups(ends=ends).largest(x_RK.float()))
        products = []
        for w in weights:
            copies = self._find_copies(w)
            narrow = self._cast_weights(w, is_new=is_new) if copies is None else copies.forward
            products.append(multiply_by_weights(x, narrow, w.shape, ends, x_RK.dtype))
        return products

    def begin_backward(
        self, g_RN: torch.Tensor, x_RK: Input, ends: torch.Tensor | None = None
    ) -> Gradient:
        g = self._cast(OperandKind.GRADIENT, g_RN, Groups(ends=ends), is_new=True)
        return NarrowGradient(dtype=g_RN.dtype, rows=g, columns=None, padding=None)

    def input_grad(
        self, g_RN: Gradient, w: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        g = self._take_rows(g_RN, ends, is_new=True)
        kept = self._find_copies(w)
        weights = self._cast_weights(w.mT, is_new=False) if kept is None else kept.transposed
        return multiply_by_weights(g, weights, w.mT.shape, ends, g_RN.dtype)

    def weight_grad(
        self, g_RN: Gradient, x_RK: Input, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.weight_grad_each([g_RN], x_RK, ends)[0]

    def weight_grad_each(
        self,
        gradients: Sequence[Gradient],
        x_RK: Input,
        ends: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        dtype = x_RK.dtype
        if isinstance(x_RK, NarrowInput):
            x = x_RK.rows
        else:
            x = self._cast(OperandKind.INPUT, x_RK, Groups(ends=ends), is_new=False)
        products = []
        for g_RN in gradients:
            g = self._take_rows(g_RN, ends, is_new=False)
            products.append(multiply_columns(g, x, ends, dtype))
        return products

    def convert_input(self, x_RK: torch.Tensor, ends: torch.Tensor | None = None) -> NarrowTensor:
        return self._cast(OperandKind.INPUT, x_RK, Groups(ends=ends), is_new=False)

    def hold_input(self, x_RK: torch.Tensor) -> HeldInput | None:
        return self._kept.hold_converted(x_RK, self)

    def begin_step(self, step: int) -> None:
        pass

    def _take_rows(
        self, g_RN: Gradient, ends: torch.Tensor | None, *, is_new: bool
    ) -> NarrowTensor:
        """Return a gradient as it was converted for both products, or convert it."""
        if isinstance(g_RN, NarrowGradient):
            return g_RN.rows
        return self._cast(OperandKind.GRADIENT, g_RN, Groups(ends=ends), is_new=is_new)

    def _cast(
        self, kind: OperandKind, x: torch.Tensor, groups: Groups, *, is_new: bool
    ) -> NarrowTensor:
        scales = self._scales
        if not len(scales.scales):
            raise ValueError(f"{scales.name} has no scales in rules.delayed_scaling")
        wide = x.float()
        if is_new:
            scales.note_largest(kind, groups.largest(wide))
        return cast_groups(wide, self._recipe.operand(kind), groups, scales.scales_of(kind))

    def _find_copies(self, w: torch.Tensor) -> NarrowWeight | None:
        """Return the copies of a weight that a step keeps; the step's first forward makes them."""

        def convert() -> NarrowWeight:
            return NarrowWeight(
                forward=self._cast_weights(w, is_new=True),
                transposed=self._cast_weights(w.mT, is_new=False),
            )

        return self._copies.find(w, convert)

    def _cast_weights(self, w: torch.Tensor, *, is_new: bool) -> NarrowTensor:
        """Convert weights [N,K] or [E,N,K] as rows, each expert's by its own scale."""
        kind = OperandKind.WEIGHT
        if w.dim() == 2:
            return self._cast(kind, w, Groups(), is_new=is_new)
        ends = torch.arange(1, len(w) + 1, device=w.device) * w.shape[1]
        return self._cast(kind, w.flatten(0, 1), Groups(ends=ends), is_new=is_new)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleState:
    """A part of the scales or histories of a linear, of so many `experts`, by its name in files.

    `tensor` [slots,...] is of the experts `numbers`.
    """

    name: str
    tensor: torch.Tensor
    numbers: tuple[int, ...]
    experts: int


class DelayedScaling:
    """Histories [slots,3,L], newest first, scales [slots,3] and amaxes of a stage's linears.

    A rank holds those of the experts in its slots, but the amaxes [E,3] of all, whose maximum over
    the stage moves the histories on: all that hold an expert hold the same of it.
    `is_first_forward` tells a forward from its recomputation.
    """

    def __init__(
        self,
        spec: DelayedScalingSpec,
        recipe: Recipe,
        linears: Sequence[ScaledLinear],
        device: torch.device,
        is_first_forward: Callable[[], bool],
        copies: WeightCopies | None = None,
        kept: KeptInputs = NOTHING_KEPT,
    ) -> None:
        self._copies = copies or WeightCopies()
        self._kept = kept
        self._is_first_forward = is_first_forward
        self._spec = spec
        self._recipe = recipe
        self._linears = tuple(linears)
        slots = sum(len(linear.slot_experts) for linear in linears)
        experts = sum(linear.experts for linear in linears)
        self._scales = torch.ones(slots, SCALES_OF_LINEAR, device=device)
        self._amaxes = torch.zeros(experts, SCALES_OF_LINEAR, device=device)
        self._history = torch.zeros(slots, SCALES_OF_LINEAR, spec.amax_history_len, device=device)
        tops = [recipe.operand(kind).number.largest * 2.0**-spec.fp8_margin for kind in _KINDS]
        self._tops = torch.tensor(tops, device=device)
        # Of each linear: its rows of what is held, and of the amaxes of all experts.
        self._places: dict[str, slice] = {}
        self._amax_places: dict[str, slice] = {}
        amax_rows: list[int] = []
        first = 0
        for linear in linears:
            self._places[linear.name] = slice(
                len(amax_rows), len(amax_rows) + len(linear.slot_experts)
            )
            self._amax_places[linear.name] = slice(first, first + linear.experts)
            amax_rows += [first + number for number in linear.slot_experts]
            first += linear.experts
        self._amax_rows = torch.tensor(amax_rows, dtype=torch.int64, device=device)

    def products_of(self, name: str) -> DelayedProducts:
        """Return the products of a linear by the name of its first weight, of what a rank owns.

        Those of any other weight raise ValueError when they are used.
        """
        linear = self._find_linear(name)
        place = self._places.get(name, slice(0, 0))
        numbers = () if linear is None else linear.owned
        return self._build_products(name, slice(place.start, place.start + len(numbers)), numbers)

    def products_of_replicas(self, name: str) -> DelayedProducts:
        """Return the products of a rank's replicas of experts by the name of their weight."""
        linear = self._find_linear(name)
        numbers = () if linear is None else linear.replicated
        place = self._places.get(name, slice(0, 0))
        return self._build_products(name, slice(place.stop - len(numbers), place.stop), numbers)

    def _find_linear(self, name: str) -> ScaledLinear | None:
        return next((linear for linear in self._linears if linear.name == name), None)

    def _build_products(self, name: str, place: slice, numbers: tuple[int, ...]) -> DelayedProducts:
        amaxes = self._amaxes[self._amax_places.get(name, slice(0, 0))]
        experts: torch.Tensor | None = None
        if numbers != tuple(range(len(amaxes))):
            experts = torch.tensor(numbers, dtype=torch.int64, device=amaxes.device)
        scales = LinearScales(name=name, scales=self._scales[place], amaxes=amaxes, experts=experts)
        return DelayedProducts(
            self._recipe, scales, self._is_first_forward, self._copies, self._kept
        )

    def begin_step(self) -> None:
        """Forget the amaxes of what ran since the last update."""
        self._amaxes.zero_()

    def step_amaxes(self) -> torch.Tensor:
        """Return this rank's amaxes of the step, whose maximum over ranks is that of the step."""
        # Ranks would not agree on a NaN, which a maximum may leave out.
        return self._amaxes.nan_to_num_(nan=torch.inf, posinf=torch.inf)

    @torch.no_grad()
    def update(self, amaxes: torch.Tensor) -> None:
        """Move the histories on by the amaxes [E,3] of a step, and set the scales of the next."""
        amaxes = amaxes[self._amax_rows]
        # By these, not by the history: a tensor that was not seen keeps scale and history.
        is_seen = (amaxes > 0) & amaxes.isfinite()
        for place in self._places.values():  # not all at once, which would take as much again
            history = self._history[place]
            moved = torch.cat((amaxes[place][:, :, None], history[:, :, :-1]), 2)
            history.copy_(torch.where(is_seen[place][:, :, None], moved, history))
        if self._spec.amax_compute_algo is AmaxComputeAlgo.MAX:
            amaxes = self._history.amax(2)
        # An amax near 0 would make it infinite.
        scales = (self._tops / amaxes).clamp(max=_FP32_LARGEST)
        self._scales.copy_(torch.where(is_seen, scales, self._scales))

    def owned_states(self) -> Iterator[ScaleState]:
        """Yield the histories and scales of what the rank owns, which checkpoints hold."""
        for linear in self._linears:
            yield from self._states_of(linear, 0, linear.owned)

    def held_states(self) -> Iterator[ScaleState]:
        """Yield the histories and scales of what the rank owns, and of its replicas."""
        yield from self.owned_states()
        for linear in self._linears:
            yield from self._states_of(linear, len(linear.owned), linear.replicated)

    def _states_of(
        self, linear: ScaledLinear, first: int, numbers: tuple[int, ...]
    ) -> Iterator[ScaleState]:
        """Yield the states of the experts `numbers`, whose slots begin at `first`."""
        start = self._places[linear.name].start + first
        place = slice(start, start + len(numbers))
        kinds = (("amax_history", self._history), ("fp8_scale", self._scales))
        for kind, tensor in kinds if numbers else ():
            yield ScaleState(
                name=f"optim/{kind}/{linear.name}",
                tensor=tensor[place],
                numbers=numbers,
                experts=linear.experts,
            )

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of which `memory_rows` has the bytes."""
        return self._history, self._scales, self._amaxes

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes held, in a row for each linear."""
        return [
            MemoryRow(
                component=Component.BUFFERS,
                module=linear.module,
                bytes=self._history[self._places[linear.name]].nbytes
                + self._scales[self._places[linear.name]].nbytes
                + self._amaxes[self._amax_places[linear.name]].nbytes,
            )
            for linear in self._linears
        ]
