"""The messages between pipeline ranks, sent and asked for as the itinerary says
(rules.transfers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from moewright.engine.comm.collectives import Group, receive, send
from moewright.rules.p2p import PipelineAction, output_stage
from moewright.rules.timetable_row import RowKind
from moewright.spec.layout import Layout


class PendingTransfer(Protocol):
    """A transfer under way."""

    def wait(self) -> bool: ...


class P2PChannel:
    """Messages of one rank over one itinerary. Nothing blocks but the wait for the input of the row
    that runs next.

    `group` carries what goes to higher pipeline ranks, `upstream` what goes to lower ones;
    `like(micro_batch)` is an empty tensor of the shape of a micro-batch's messages.
    """

    def __init__(
        self,
        layout: Layout,
        stops: Sequence[PipelineAction],
        group: Group,
        upstream: Group,
        like: NewBuffer,
    ) -> None:
        self._layout, self._stops = layout, stops
        self._group, self._upstream, self._like = group, upstream, like
        self._coming: dict[
            int, tuple[torch.Tensor, PendingTransfer]
        ] = {}  # by the place of the row that needs it
        self._going: dict[
            int, tuple[torch.Tensor, PendingTransfer]
        ] = {}  # by the place of the row that made it
        self._here: dict[
            tuple[RowKind, int, int], torch.Tensor
        ] = {}  # what the next stage, on this rank, will take

    def receive_input(self, place: int) -> torch.Tensor | None:
        """The input of the row at `place`, None where it has none; lets go of what others have
        taken by now."""
        stop = self._stops[place]
        for asked in stop.recvs_to_post:
            self._ask(asked)
        if stop.source is None:
            return None
        if stop.source == self._group.index:
            return self._here.pop((stop.row.kind, stop.row.micro_batch, stop.stage))
        tensor, work = self._coming.pop(place)
        work.wait()
        for taken in stop.sends_completed:
            self._settle(taken)
        return tensor

    def send_output(self, place: int, result: torch.Tensor) -> None:
        """Hand on what the row at `place` made."""
        stop = self._stops[place]
        if stop.target is None:
            return
        if stop.target == self._group.index:
            stage = output_stage(self._layout, stop.row.kind, stop.stage)
            assert stage is not None  # it has a target
            self._here[stop.row.kind, stop.row.micro_batch, stage] = result
            return
        group = self._group if stop.target > self._group.index else self._upstream
        result = result.contiguous()
        self._going[place] = result, send(result, group, to=stop.target)

    def close(self) -> None:
        """Wait until everything sent has been taken."""
        for place in tuple(self._going):
            self._settle(place)

    def _ask(self, place: int) -> None:
        stop = self._stops[place]
        assert stop.source is not None  # only rows with an input are asked for
        group = self._group if stop.source < self._group.index else self._upstream
        out = self._like(stop.row.micro_batch)
        self._coming[place] = out, receive(out, group, source=stop.source)

    def _settle(self, place: int) -> None:
        _, work = self._going.pop(place)
        work.wait()


class NewBuffer(Protocol):
    def __call__(self, micro_batch: int) -> torch.Tensor: ...
