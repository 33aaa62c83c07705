"""The executor of one rank's rows of the timetable, which knows no schedule, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moewright.engine.comm.collectives import Group, TimedWork, receive, send
from moewright.rules.timetable.p2p import PipelineAction, output_stage
from moewright.rules.timetable.schedule import split_backwards
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout

# Makes an empty tensor of the shape of a micro-batch's messages.
NewBuffer = Callable[[int], torch.Tensor]


class P2PChannel:
    """The channel of one rank's messages over its actions.

    It blocks only to wait for the input of the row that runs next. `group` carries messages to
    higher pipeline ranks, `upstream` those to lower ones. Rows are counted from 0.
    """

    def __init__(
        self,
        layout: Layout,
        actions: Sequence[PipelineAction],
        group: Group,
        upstream: Group,
        new_buffer: NewBuffer,
    ) -> None:
        self._layout = layout
        self._actions = actions
        self._group = group
        self._upstream = upstream
        self._new_buffer = new_buffer
        # Buffers by the row that needs them.
        self._receiving: dict[int, tuple[torch.Tensor, TimedWork]] = {}
        # Sent tensors by the row that made them.
        self._sending: dict[int, tuple[torch.Tensor, TimedWork]] = {}
        # Results for the next virtual stage, where that is on this rank too.
        self._local: dict[tuple[RowKind, int, int], torch.Tensor] = {}

    def receive_input(self, index: int) -> torch.Tensor | None:
        """Return the input of row `index`, None where it has none.

        This frees the sent tensors that others have received by now.
        """
        action = self._actions[index]
        for row in action.recvs_to_post:
            self._post_receive(row)
        if action.source is None:
            return None
        if action.source == self._group.index:
            return self._local.pop((action.row.kind, action.row.micro_batch, action.stage))
        tensor, work = self._receiving.pop(index)
        work.wait()
        # After the wait: what has come proves that others have received these.
        for row in action.sends_completed:
            self._finish_send(row)
        return tensor

    def send_output(self, index: int, result: torch.Tensor) -> None:
        """Send the result of row `index` to the rank that needs it."""
        action = self._actions[index]
        if action.target is None:
            return
        if action.target == self._group.index:
            stage = output_stage(self._layout, action.row.kind, action.stage)
            assert stage is not None  # it has a target
            self._local[action.row.kind, action.row.micro_batch, stage] = result
            return
        # A direction has a group of its own (Mesh), or messages of a pair would wait for each
        # other.
        group = self._group if action.target > self._group.index else self._upstream
        result = result.contiguous()
        self._sending[index] = result, send(result, group, to=action.target)

    def close(self) -> None:
        """Wait until everything sent has been received."""
        for index in tuple(self._sending):
            self._finish_send(index)

    def _post_receive(self, index: int) -> None:
        action = self._actions[index]
        assert action.source is not None  # only rows with an input are received for
        group = self._group if action.source < self._group.index else self._upstream
        out = self._new_buffer(action.row.micro_batch)
        self._receiving[index] = out, receive(out, group, source=action.source)

    def _finish_send(self, index: int) -> None:
        _, work = self._sending.pop(index)
        work.wait()


Key = tuple[int, int]  # micro-batch, chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkResult:
    """The result of a chunk's forward: a hidden state and a share of the loss.

    `hidden` is for the next stage, None on the last. `loss`, a scalar, is None where the chunk has
    no share of the loss that depends on a weight.
    """

    hidden: torch.Tensor | None
    loss: torch.Tensor | None


ForwardStep = Callable[[Key, torch.Tensor | None], ChunkResult]
BackwardStep = Callable[[Key, Sequence[GradientEdge], Sequence[torch.Tensor | None], bool], None]
WeightGradStep = Callable[[Key], None]
# Runs a forward and a backward, given with their keys, beside each other.
RunPair = Callable[[Key, Callable[[], None], Key, Callable[[], None]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """The forwards that run beside the backward in the next row, by index, and how both run."""

    forwards: frozenset[int]
    run: RunPair


@dataclass(frozen=True, kw_only=True, slots=True)
class RowHooks:
    """Calls around rows.

    They come before a row begins, by its index; before a backward waits for its input; and when a
    result is on its way.
    """

    before_row: Callable[[int], None] = lambda index: None
    before_backward: Callable[[Key], None] = lambda key: None
    after_row: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlightChunk:
    """A chunk between its forward and its backward.

    `entry` is the hidden state that it received. The tensors that it handed on are not kept, only
    their edges in the graph, the `roots`; that of the loss is the last. A chunk that does nothing
    has no roots: gradients pass through it.
    """

    entry: torch.Tensor | None
    has_output: bool
    roots: tuple[GradientEdge, ...]


def execute_timetable(
    actions: Sequence[PipelineAction],
    channel: P2PChannel,
    *,
    forward: ForwardStep,
    backward: BackwardStep,
    weight_grad: WeightGradStep,
    hooks: RowHooks = RowHooks(),
    pairing: Pairing | None = None,
) -> None:
    """Run the rows in order, those that `pairing` names beside the next.

    Activations live exactly as long as the timetable says; under no_grad none do. `forward` gets
    the hidden state of the stage before (None on the first stage); `backward` gets the roots of a
    chunk's graph, the gradient of each root (None for the loss), and whether the weight gradients
    are left to `weight_grad`.
    """
    split = split_backwards([action.row for action in actions])
    in_flight: dict[Key, InFlightChunk] = {}

    def prepare_row(index: int, row: TimetableRow) -> tuple[Callable[[], None], Outbox]:
        """Return what runs the row once its input is here, and where its result then lies."""
        key = row.micro_batch, row.chunk
        if row.kind is RowKind.B:
            hooks.before_backward(key)
        received = channel.receive_input(index)
        outbox: Outbox = []

        def run_forward() -> None:
            if received is not None and torch.is_grad_enabled():
                # So that backward leaves the gradient that the stage before waits for.
                received.requires_grad_()
            result = forward(key, received)
            if torch.is_grad_enabled():
                in_flight[key] = keep_roots(received, result)
            if result.hidden is not None:
                # What waits to be sent must not keep the graph.
                outbox.append(result.hidden.detach())

        def run_backward() -> None:
            chunk = in_flight.pop(key)
            grad = run_chunk_backward(key, chunk, received, backward, is_split=key in split)
            if grad is not None:
                outbox.append(grad)

        runs = {
            RowKind.F: run_forward,
            RowKind.B: run_backward,
            RowKind.W: lambda: weight_grad(key),
        }
        return runs[row.kind], outbox

    def run_row(index: int) -> None:
        run, outbox = prepare_row(index, actions[index].row)
        run()
        send_result(index, outbox)

    def run_pair(index: int, pairing: Pairing) -> None:
        row = actions[index].row
        after = actions[index + 1].row
        run, outbox = prepare_row(index, row)
        run_after, outbox_after = prepare_row(index + 1, after)
        pairing.run(_key(row), run, _key(after), run_after)
        send_result(index, outbox)
        send_result(index + 1, outbox_after)

    def send_result(index: int, outbox: Outbox) -> None:
        while outbox:
            channel.send_output(index, outbox.pop())

    index = 0
    while index < len(actions):
        hooks.before_row(index)
        if pairing is not None and index in pairing.forwards:
            run_pair(index, pairing)
            index += 2
        else:
            run_row(index)
            index += 1
        hooks.after_row()
    channel.close()


# The result of a row, until it is sent.
Outbox = list[torch.Tensor]


def _key(row: TimetableRow) -> Key:
    return row.micro_batch, row.chunk


def keep_roots(entry: torch.Tensor | None, result: ChunkResult) -> InFlightChunk:
    """Return what backward needs of a chunk that received `entry`."""
    hidden = result.hidden
    if hidden is not None and hidden is entry:
        if result.loss is None:
            return InFlightChunk(entry=None, has_output=False, roots=())
        # A chunk of MTP depths alone: the gradient of its output enters the graph at this view.
        hidden = entry.view_as(entry)
    roots = tuple(get_gradient_edge(root) for root in (hidden, result.loss) if root is not None)
    return InFlightChunk(entry=entry, has_output=hidden is not None, roots=roots)


def run_chunk_backward(
    key: Key,
    chunk: InFlightChunk,
    received: torch.Tensor | None,
    backward: BackwardStep,
    *,
    is_split: bool,
) -> torch.Tensor | None:
    """Run the backward of a chunk and return the gradient of its input."""
    output_grads = (received,) if chunk.has_output else ()
    loss_grads = (None,) * (len(chunk.roots) - len(output_grads))
    backward(key, chunk.roots, output_grads + loss_grads, is_split)
    if chunk.entry is None:  # the first stage, which received nothing, or a chunk without roots
        return received
    return chunk.entry.grad
