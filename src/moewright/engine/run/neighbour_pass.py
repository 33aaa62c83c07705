"""A micro-batch of each rank, run again by another rank, and the bits of both compared.

A device that computes wrongly the same way each time agrees with itself. So the rank next to it
takes its part for one micro-batch: it gets the weights, what came from the stages beside, and what
every collective gave, and computes alone what the first rank sent into each collective, handed on,
and found as gradients. As all that comes from others is played to it, a difference is one of these
two ranks' own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from moewright.engine.comm import collectives
from moewright.engine.comm.tape import DivergedError, Tape
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.router import list_routers, router_states
from moewright.engine.model.transformer import Transformer
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.optim.distributed_optimizer import ignore_gradient
from moewright.engine.pipeline.executor import (
    ChunkResult,
    InFlightChunk,
    Key,
    keep_roots,
    run_chunk_backward,
)
from moewright.engine.run.bit_hash import hash_bits
from moewright.engine.run.build_state import build_model, build_runtime
from moewright.engine.run.micro_batch_passes import MicroBatchPasses, PassSteps, zero_sums
from moewright.engine.run.step import BackwardResult, forward_backward
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.engine.torch_private import storage_id
from moewright.rules.adapters import trains_all
from moewright.rules.low_precision import find_recipe
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.layout import Overlap

# Parts of a package begin at multiples of it, so that any dtype can lie there.
_ALIGNMENT = 16
Noted = tuple[str, int]  # what left a row, and its hash
_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}


def find_obstacle(state: TrainState) -> str:
    """Return what keeps a job's micro-batches from being run again by other ranks; "" if nothing.

    It is what a rank cannot do alone, or what has a state of its own from micro-batch to
    micro-batch.
    """
    runtime = state.runtime
    layout = runtime.mesh.layout
    obstacles = (
        (layout.dispatcher.facts.is_library, f"dispatcher={layout.dispatcher}"),
        (find_recipe(runtime.workload) is not None, f"precision={runtime.workload.precision}"),
        (bool(layout.graphs), "graphs"),
        (Overlap.EP in layout.overlap, "overlap=ep"),
        (runtime.row_budget is not None, "rank_capacity"),
        (state.optimizer.has_replicas, f"expert_placement={layout.expert_placement}"),
        (not trains_all(runtime.workload.fine_tuning), "frozen weights"),
    )
    return next((name for is_met, name in obstacles if is_met), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _PassRow:
    """A row of the timetable of the micro-batch, and whether another stage has given its input."""

    kind: RowKind
    chunk: int
    is_split: bool
    has_input: bool


class PassRecorder:
    """The passes of one micro-batch, with hashes of all that leaves them.

    On the rank whose micro-batch it is, the tape records; on the one that repeats it, it plays.
    """

    def __init__(self, tape: Tape, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.rows: list[_PassRow] = []
        self.inputs: list[torch.Tensor] = []
        self.valid_targets = 0.0
        self._tape = tape
        self._steps: PassSteps | None = None
        self._entries: dict[int, torch.Tensor] = {}
        self._row_name = ""
        self._names: list[str] = []
        self._hashes: list[torch.Tensor] = []

    def wrap(self, passes: MicroBatchPasses) -> PassSteps:
        """Put the notes around the passes of a step."""
        self._steps = passes
        self.valid_targets = float(passes.valid_targets)
        self._tape.note_sent = self.note
        return self

    def forward(self, key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        steps = self._steps
        assert steps is not None  # wrapped
        if key[0] != self.micro_batch:
            return steps.forward(key, hidden)
        self._begin(RowKind.F, key, hidden)
        with self._tape.run():
            result = steps.forward(key, hidden)
        if hidden is not None and not is_handed_on(hidden, result):
            self._entries[key[1]] = hidden
        for name, tensor in (("hidden state", result.hidden), ("loss", result.loss)):
            if tensor is not None:
                self.note(name, tensor)
        return result

    def backward(
        self,
        key: Key,
        roots: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor | None],
        split: bool,
    ) -> None:
        steps = self._steps
        assert steps is not None  # wrapped
        if key[0] != self.micro_batch:
            steps.backward(key, roots, grads, split)
            return
        self._begin(RowKind.B, key, next(iter(grads), None), is_split=split)
        with self._tape.run():
            steps.backward(key, roots, grads, split)
        entry = self._entries.pop(key[1], None)
        if entry is not None and entry.grad is not None:
            self.note("gradient of the hidden state", entry.grad)

    def weight_grad(self, key: Key) -> None:
        steps = self._steps
        assert steps is not None  # wrapped
        if key[0] != self.micro_batch:
            steps.weight_grad(key)
            return
        self._begin(RowKind.W, key, None)
        with self._tape.run():
            steps.weight_grad(key)

    def note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Note a gradient of the micro-batch; those of others are left out."""
        if self._tape.is_running:
            self.note(f"gradient of {name}", gradient)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note the hash of something that leaves the row under way."""
        self._names.append(f"{name} in the {self._row_name}")
        self._hashes.append(hash_bits(tensor).cpu())

    def list_hashes(self) -> list[Noted]:
        """Return what was noted, in its order."""
        values = torch.stack(self._hashes).tolist() if self._hashes else []
        return list(zip(self._names, values, strict=True))

    def _begin(
        self, kind: RowKind, key: Key, tensor: torch.Tensor | None, *, is_split: bool = False
    ) -> None:
        self._row_name = f"{_NAMES[kind]} of chunk {key[1]}"
        row = _PassRow(kind=kind, chunk=key[1], is_split=is_split, has_input=tensor is not None)
        self.rows.append(row)
        if tensor is not None and not self._tape.is_playing:
            self.inputs.append(tensor.detach().clone())


@dataclass(frozen=True, kw_only=True, slots=True)
class _BorrowedWeights:
    """Weights of another rank, which no optimizer holds."""

    loss_scale: float
    storages: frozenset[int]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) in self.storages


@dataclass(frozen=True, kw_only=True, slots=True)
class _BorrowedState:
    """The part of a rank as another plays it."""

    runtime: Runtime
    model: Transformer
    optimizer: _BorrowedWeights


class NeighbourPass:
    """One micro-batch of a step of every rank, recorded, for another rank to run again."""

    def __init__(self, state: TrainState, *, step: int, micro_batch: int) -> None:
        self._state = state
        self._step = step
        self._tape = state.runtime.mesh.tape
        self._recorder = PassRecorder(self._tape, micro_batch)

    def run(self) -> BackwardResult:
        """Run the step, and record the micro-batch."""
        state = self._state
        note = self._recorder.note_gradient
        state.optimizer.before_add = note
        with ExitStack() as after:
            after.callback(setattr, state.optimizer, "before_add", ignore_gradient)
            if state.optimizer.fsdp is not None:
                after.enter_context(state.optimizer.fsdp.watch_gradients(note))
            clock = build_phase_clock(state.runtime.device)
            return forward_backward(state, clock, step=self._step, wrap=self._recorder.wrap)

    def compare(self, distance: int) -> str:
        """Run again the micro-batch of the rank `distance` before this one; all ranks call this.

        Returns the first thing in which this rank's bits are not that rank's; "" for none.
        """
        world = self._state.runtime.mesh.group("world")
        other = world.ranks[(world.index - distance) % world.size]
        recorder = self._recorder
        with ExitStack() as after:
            if self._state.optimizer.fsdp is not None:
                after.enter_context(self._state.optimizer.fsdp.gather_all())
            package = _pack(self._build_header(), self._list_tensors())
        sizes = collectives.gather_json(len(package))
        received = collectives.shift_flat(package, world, count=sizes[other], distance=distance)
        # What was received has to have room beside this rank's own state.
        del package
        header, tensors = _unpack(received)
        expected = [(name, value) for name, value in header["hashes"]]
        try:
            own = self._repeat(other, header, tensors)
        except DivergedError as error:
            return f"the collectives of micro-batch {recorder.micro_batch} ({error})"
        name = find_other_name(expected, own)
        return name and f"{name} of micro-batch {recorder.micro_batch}"

    def close(self) -> None:
        """Let go of what was recorded."""
        self._tape.erase()

    def _build_header(self) -> dict[str, Any]:
        recorder = self._recorder
        return {
            "rows": [[row.kind, row.chunk, row.is_split, row.has_input] for row in recorder.rows],
            "hashes": recorder.list_hashes(),
            "valid_targets": recorder.valid_targets,
            "loss_scale": self._state.optimizer.loss_scale,
            "inputs": len(recorder.inputs),
        }

    def _list_tensors(self) -> list[torch.Tensor]:
        model = self._state.model
        return [
            *(parameter.parameter.detach() for parameter in list_parameters(model)),
            *(state for _, state in router_states(model)),
            *self._recorder.inputs,
            *self._tape.received,
        ]

    def _repeat(
        self, other: int, header: dict[str, Any], tensors: list[torch.Tensor]
    ) -> list[Noted]:
        """Take the part of rank `other` for the micro-batch, and return what leaves it there."""
        own = self._state.runtime
        runtime = build_runtime(
            own.job,
            rank=other,
            device=own.device,
            kernels=own.kernels,
            # No groups: what other ranks send comes from the tape.
            create_groups=lambda groups, rank: None,
        )
        runtime.counters.note = own.counters.note
        model = build_model(runtime)
        # In the order of `_list_tensors`.
        queue = iter(tensors)
        recorder = PassRecorder(runtime.mesh.tape, self._recorder.micro_batch)
        storages = set()
        for parameter in list_parameters(model):
            weight = nn.Parameter(next(queue))
            weight.register_post_accumulate_grad_hook(_build_hook(recorder, parameter.name))
            storages.add(storage_id(weight))
            parameter.owner.weight = weight
        for _, state in router_states(model):
            state.copy_(next(queue))
        inputs = [next(queue) for _ in range(header["inputs"])]
        runtime.mesh.tape.is_playing = True
        runtime.mesh.tape.received = list(queue)
        borrowed = _BorrowedState(
            runtime=runtime,
            model=model,
            optimizer=_BorrowedWeights(
                loss_scale=header["loss_scale"], storages=frozenset(storages)
            ),
        )
        self._run_rows(borrowed, recorder, header, inputs)
        return recorder.list_hashes()

    def _run_rows(
        self,
        borrowed: _BorrowedState,
        recorder: PassRecorder,
        header: dict[str, Any],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        state = self._state
        runtime = borrowed.runtime
        number = recorder.micro_batch
        size = state.step_size(runtime, self._step - 1)
        count = size.sequences // (runtime.mesh.layout.dp * runtime.mesh.layout.mbs)
        batch = state.train_data.micro_batch(runtime, self._step - 1, number).to(runtime.device)
        passes = MicroBatchPasses(
            state=borrowed,
            clock=build_phase_clock(runtime.device),
            batches=[batch] * count,  # of which one is run
            step=self._step,
            size=size,
            valid_targets=header["valid_targets"],
            sums=zero_sums(runtime, count),
        )
        steps = recorder.wrap(passes)
        runtime.products.begin_step(self._step)
        for router in list_routers(borrowed.model):
            router.begin_step()
        queue = iter(inputs)
        in_flight: dict[int, InFlightChunk] = {}
        for kind, chunk, is_split, has_input in header["rows"]:
            key = number, chunk
            received = next(queue) if has_input else None
            if kind == RowKind.F:
                entry = None if received is None else received.requires_grad_()
                in_flight[chunk] = keep_roots(entry, steps.forward(key, entry))
            elif kind == RowKind.B:
                run_chunk_backward(
                    key, in_flight.pop(chunk), received, steps.backward, is_split=is_split
                )
            else:
                steps.weight_grad(key)


def is_handed_on(hidden: torch.Tensor, result: ChunkResult) -> bool:
    """Tell whether a chunk has no layers: it hands on what it got, and the gradient that it gets.

    fully_shard makes a view of it, for which autograd gives a gradient where there is none without.
    """
    if result.hidden is None or result.loss is not None:
        return False
    return storage_id(result.hidden) == storage_id(hidden)


def find_other_name(expected: Sequence[Noted], actual: Sequence[Noted]) -> str:
    """Return the first name in `expected` that has other hashes in `actual`; "" for none.

    Hashes of one name have an order. Names have none: fully_shard puts nodes of its own into the
    graph, and autograd may then come to gradients of one layer in another order.
    """
    before, after = _group_by_name(expected), _group_by_name(actual)
    return next((name for name in {**before, **after} if before.get(name) != after.get(name)), "")


def _group_by_name(noted: Sequence[Noted]) -> dict[str, list[int]]:
    hashes: dict[str, list[int]] = {}
    for name, value in noted:
        hashes.setdefault(name, []).append(value)
    return hashes


def _build_hook(recorder: PassRecorder, name: str) -> Callable[[torch.Tensor], None]:
    def note(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            recorder.note_gradient(name, weight.grad)
            weight.grad = None

    return note


def _pack(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors and what describes them as bytes, on the tensors' device."""
    shapes = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
    text = json.dumps([header, shapes]).encode()
    head = len(text).to_bytes(_ALIGNMENT, "little") + text
    device = tensors[0].device
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)]
    parts += [x.contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    return torch.cat([nn.functional.pad(x, (0, -len(x) % _ALIGNMENT)) for x in parts])


def _unpack(package: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return what `_pack` was given."""
    length = int.from_bytes(bytes(package[:_ALIGNMENT].cpu().numpy()), "little")
    text = bytes(package[_ALIGNMENT : _ALIGNMENT + length].cpu().numpy())
    header, shapes = json.loads(text)
    start = _round_up(_ALIGNMENT + length)
    tensors = []
    for name, shape in shapes:
        dtype = getattr(torch, name)
        stop = start + prod(shape) * dtype.itemsize
        # A copy each, so that the package does not live as long as any of them.
        tensors.append(package[start:stop].view(dtype).view(shape).clone())
        start = _round_up(stop)
    return header, tensors


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
