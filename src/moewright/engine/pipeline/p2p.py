"""The messages between pipeline ranks, as a rank's actions say (rules.timetable.p2p)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moewright.engine.comm.collectives import Group, TimedWork, receive, send
from moewright.rules.timetable.p2p import PipelineAction, output_stage
from moewright.rules.timetable.timetable_row import RowKind
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
