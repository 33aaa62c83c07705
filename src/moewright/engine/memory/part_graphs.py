"""Graphs of parts of layers: captured once for every micro-batch in flight, and replayed.

A part is captured on tensors of its own: an input, outputs, and what autograd saves between them.
What a forward keeps must last until its backward, so a chunk has a set of graphs for each of its
micro-batches in flight: a slot. A replay copies the input in, and in backward the gradients of the
outputs; what it hands back is a copy of the input's gradient. Gradients of parameters are added to
the optimizer's buffers inside the graph of the backward; none of them waits.

A part whose input is an output of a part of the same slot takes it where it lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import nn

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.memory.graph_capture import (
    WARMUP_STEPS,
    CudaPool,
    GraphCapture,
    build_capture,
    build_pool,
    build_stream,
)
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.torch_private import storage_id
from moewright.spec.layout import CudaGraphScope
from moewright.spec.ledger import Component, MemoryRow, Module

Key = tuple[int, int]  # micro-batch, chunk
PartBody = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class PartGraphs:
    """The graphs of the parts of a rank's layers, and the slots that micro-batches take.

    `scopes` are what the layout captures. The graphs of backward share `gradients`, a buffer for
    each shape of what parts hand on: a backward has read them when the next one begins.
    """

    def __init__(
        self,
        device: torch.device,
        weight_grads: WeightGradStore,
        scopes: Collection[CudaGraphScope] = (),
        gradients: Collection[torch.Tensor] = (),
    ) -> None:
        self._stream = build_stream(device) if scopes else None
        self.weight_grads = weight_grads
        self._scopes = frozenset(scopes) - {CudaGraphScope.FULL}
        self._gradients = {_signature(tensor): tensor for tensor in gradients}
        self._steps = 0
        self.is_active = False  # whether the step that runs replays graphs
        self._slots: dict[int, list[_Slot]] = defaultdict(list)  # by chunk
        self._free_slots: dict[int, list[_Slot]] = defaultdict(list)
        self._taken_slots: dict[Key, _Slot] = {}
        self._forward_slot: _Slot | None = None
        self._held_calls: list[Callable[[], None]] | None = None
        self.replays = 0

    @property
    def slot_counts(self) -> dict[int, int]:
        """How many micro-batches of each chunk have graphs."""
        return {chunk: len(slots) for chunk, slots in self._slots.items()}

    def add_part(self, scope: CudaGraphScope, *modules: nn.Module) -> CapturablePart:
        """Return a part that runs these modules, and is captured where the layout says so."""
        return CapturablePart(self, modules, is_captured=scope in self._scopes)

    def begin_step(self, *, is_counting: bool) -> None:
        """Begin a step: the first ones run as they are, as do those that are counted."""
        self._steps += 1
        is_warm = self._steps > WARMUP_STEPS
        self.is_active = bool(self._scopes) and is_warm and not is_counting

    @contextmanager
    def track_forward(self, key: Key) -> Iterator[None]:
        """Let the forward of `key` (micro-batch, chunk) inside take a slot, until `release`."""
        if not self.is_active:
            yield
            return
        chunk = key[1]
        if not self._free_slots[chunk]:
            slot = _Slot(build_pool(self._stream))
            self._slots[chunk].append(slot)
            self._free_slots[chunk].append(slot)
        self._forward_slot = self._taken_slots[key] = self._free_slots[chunk].pop()
        try:
            yield
        finally:
            self._forward_slot = None

    def release(self, key: Key) -> None:
        """Give the slot of `key` back: its backward has ended."""
        slot = self._taken_slots.pop(key, None)
        if slot is not None:
            self._free_slots[key[1]].append(slot)

    def call_outside(self, call: Callable[[], None]) -> None:
        """Call a function of the host; of a body that is captured, after each of its runs."""
        if self._held_calls is None:
            call()
        else:
            self._held_calls.append(call)

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of which `memory_rows` has the bytes."""
        return tuple(self._gradients.values())

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of what the graphs share."""
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in self._gradients.values())
        return [MemoryRow(component=Component.BUFFERS, module=Module.OTHER, bytes=nbytes)]

    def find_slot(self) -> _Slot | None:
        """Return the slot of the forward that runs; None where nothing is replayed."""
        return self._forward_slot

    def find_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shared buffer for the gradient of a tensor that enters or leaves a part."""
        return self._gradients[_signature(tensor)]

    def hold_calls(self, body: Callable[[], None]) -> list[Callable[[], None]]:
        """Run `body`, and return the calls that it leaves to be made outside."""
        calls: list[Callable[[], None]] = []
        self._held_calls = calls
        try:
            body()
        finally:
            self._held_calls = None
        return calls


class CapturablePart:
    """A part of a layer that runs by its graphs, or as it is where none are captured."""

    def __init__(
        self, graphs: PartGraphs, modules: Collection[nn.Module], *, is_captured: bool
    ) -> None:
        self._graphs = graphs
        self._modules = tuple(modules)
        self._awaits: list[Callable[[], object]] = []
        self.is_captured = is_captured

    def run(self, body: PartBody, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return body(x), which must be the same operations on the same shapes each time."""
        slot = self._graphs.find_slot() if self.is_captured else None
        if slot is None:
            return body(x)
        graph = slot.graphs.get(self)
        if graph is None:
            self._awaits = self._list_awaits()
            graph = slot.graphs[self] = _PartGraph(self._graphs, slot, body, x)
        for await_weight in self._awaits:
            await_weight()
        out: tuple[torch.Tensor, ...] = _RunPart.apply(graph, x)
        return out

    def _list_awaits(self) -> list[Callable[[], object]]:
        """List what waits for weights that are on their way, which no graph can do (Weight)."""
        parts = (part for module in self._modules for part in module.modules())
        awaits = (getattr(part, "ensure_ready", None) for part in parts)
        return [await_weight for await_weight in awaits if await_weight is not None]


class _Slot:
    """The graphs of one micro-batch in flight, by part.

    CUDA graphs may share memory where they always run in the order of their capture, as those of a
    slot do: all forwards of a chunk, then its backwards. So they have a pool in common, in which
    what a backward frees serves the next. Between a slot's forwards and its backwards those of
    other slots run, as the timetable says: each slot has a pool of its own.
    """

    def __init__(self, pool: CudaPool | None) -> None:
        self.pool = pool
        self.graphs: dict[CapturablePart, _PartGraph] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is the output of a part of this slot."""
        return any(graph.has_output(tensor) for graph in self.graphs.values())


class _PartGraph:
    """The graphs of a part's forward and backward in one slot, recorded as they first run."""

    def __init__(self, graphs: PartGraphs, slot: _Slot, body: PartBody, x: torch.Tensor) -> None:
        self._graphs = graphs
        own = x.detach() if slot.owns(x) else x.detach().clone()
        self._input = own.requires_grad_(x.requires_grad)
        self._outputs: tuple[torch.Tensor, ...] = ()
        self.has_gradient: tuple[bool, ...] = ()  # of each output
        self._calls: list[Callable[[], None]] = []
        self._forward = build_capture(slot.pool)
        self._backward = build_capture(slot.pool)
        self._body = body
        self._has_forward = False
        self._has_backward = False

    def has_output(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is an output of this part."""
        return storage_id(tensor) in map(storage_id, self._outputs)

    def run_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the part on x; return its outputs, which stay as they are until its backward."""
        if not self._has_forward:
            self._forward.record(self._compute)
            self._has_forward = True
        else:
            # Else the part before has written it in its place.
            if storage_id(x) != storage_id(self._input):
                self._input.copy_(x)
            self._replay(self._forward)
        return self._outputs

    def run_backward(self, grads: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run the backward of the last forward; return a copy of the input's gradient."""
        for output, grad in compress(zip(self._outputs, grads, strict=True), self.has_gradient):
            self._graphs.find_gradient(output).copy_(grad)
        if not self._has_backward:
            self._calls = self._graphs.hold_calls(
                lambda: self._backward.record(self._compute_gradients)
            )
            self._has_backward = True
            # What autograd has built is in the graphs; it would keep nodes of parameters alive.
            self._outputs = tuple(output.detach() for output in self._outputs)
        else:
            self._replay(self._backward)
        for call in self._calls:
            call()
        # A copy, because other parts share the buffer.
        return self._graphs.find_gradient(self._input).clone()

    def _replay(self, capture: GraphCapture) -> None:
        capture.replay()
        self._graphs.replays += 1

    def _compute(self) -> None:
        with torch.enable_grad():
            self._outputs = self._body(self._input)
        self.has_gradient = tuple(output.requires_grad for output in self._outputs)

    def _compute_gradients(self) -> None:
        roots = list(compress(self._outputs, self.has_gradient))
        grads = [self._graphs.find_gradient(root) for root in roots]
        with self._graphs.weight_grads.compute_at_once():
            torch.autograd.backward(roots, grads)
        assert self._input.grad is not None  # it reaches every part's outputs
        self._graphs.find_gradient(self._input).copy_(self._input.grad)
        self._input.grad = None


class _RunPart(ReleasingFunction):
    """A run of a part by its graphs: its input -> its outputs."""

    @staticmethod
    def forward(ctx: Any, graph: _PartGraph, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        outputs = tuple(output.detach() for output in graph.run_forward(x))
        integers = (not has_gradient for has_gradient in graph.has_gradient)
        ctx.mark_non_differentiable(*compress(outputs, integers))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.graph.run_backward(grads)


def _signature(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
