"""Experts that change their ranks while a run goes on, by the loads that its routers have had.

Every rank counts the same loads and so plans the same moves. The master weights and moments of a
moved expert go from one rank of its group to another as boxes that a checkpoint would hold; the
weights are then rounded and gathered as after an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from moewright.codec import from_data, to_data
from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm import collectives
from moewright.engine.comm.collectives import Group, start_all_to_all
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.moe import MoeLayer
from moewright.engine.run.train_state import TrainState
from moewright.rules.expert_moves import (
    Placement,
    PlannedMoves,
    job_placement,
    plan_moves,
    price_moves,
)
from moewright.rules.job import plan_job
from moewright.spec.plan import Plan
from moewright.spec.run import ExpertMoves

# Of what a checkpoint says besides its tensors: the placement, and the latest moves with the step
# before which they were.
_PLACEMENT_KEY = "expert_placement"
_MOVES_KEY = "expert_moves"
MOVER_KEYS = frozenset({_PLACEMENT_KEY, _MOVES_KEY})


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerMove:
    """The parameters of a layer's experts, and the experts in all slots before and after a move."""

    names: frozenset[str]
    before: tuple[int, ...]
    after: tuple[int, ...]


class ExpertMover:
    """The placement of a run's experts; all ranks make one and call it alike, after each step.

    `placement` is that of the steps to come; without `train.rebalance_every` it stays the job's.
    """

    def __init__(self, plan: Plan, state: TrainState) -> None:
        self._job = plan_job(plan)
        self._state = state
        self._every = plan.workload.rebalance_every
        self._price = price_moves(plan, self._job) if self._every else None
        self._loads: torch.Tensor | None = None
        self.placement: Placement = job_placement(self._job)
        self._moves = ExpertMoves()
        self._moved_before = 0  # the step that the latest moves were before; 0: there were none
        if self._every:
            self._place(self.placement)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return what a checkpoint says of the placement, for a run that goes on from it."""
        if not self._every:
            return {}
        return {
            _PLACEMENT_KEY: [list(slots) for slots in self.placement.values()],
            _MOVES_KEY: {"step": self._moved_before, "moves": to_data(self._moves)},
        }

    def moves_before(self, step: int) -> ExpertMoves:
        """Return the moves before a step, also where a run stopped between both."""
        return self._moves if step == self._moved_before else ExpertMoves()

    @property
    def moved_slots(self) -> tuple[tuple[int, ...], ...]:
        """Return the experts in the slots of each layer where they may have moved; () else."""
        return tuple(self.placement.values()) if self._every else ()

    def take_saved(self, extra: Mapping[str, Any]) -> None:
        """Take the placement that a checkpoint was saved with, before its tensors are read."""
        saved = extra.get(_PLACEMENT_KEY)
        if self._every and saved is not None:
            self._place(dict(zip(self.placement, map(tuple, saved), strict=True)))
        if self._every and (latest := extra.get(_MOVES_KEY)) is not None:
            self._moves = from_data(ExpertMoves, latest["moves"], where=_MOVES_KEY)
            self._moved_before = latest["step"]

    def add_step(self, step: int, expert_loads: torch.Tensor) -> bool:
        """Count the loads of a step, and move experts where that is due and pays; tell if it was.

        `expert_loads` [MoE layers, E] are those of all ranks.
        """
        if self._price is None:
            return False
        loads = expert_loads.double().cpu()
        self._loads = loads if self._loads is None else self._loads + loads
        if step % self._every:
            return False
        counts = dict(zip(self.placement, self._loads.tolist(), strict=True))
        self._loads = None
        planned = plan_moves(self.placement, counts, self._job.layout.ep, self._price)
        if not planned.experts:
            return False
        self._moves = self._move(planned)
        self._moved_before = step + 1
        return True

    @torch.no_grad()
    def _move(self, planned: PlannedMoves) -> ExpertMoves:
        state = self._state
        begin_s = perf_counter()
        state.optimizer.finish_pending()
        changed = {
            layer: slots
            for layer, slots in planned.placement.items()
            if slots != self.placement[layer]
        }
        exchanges = self._list_exchanges(changed)
        sent: list[int] = []
        # The boxes are those of the new placement, and hold what the old one had there.
        self._place({**self.placement, **changed})
        group = state.runtime.mesh.group("ep")
        state.load(partial(_exchange_all, exchanges, group, state.runtime.device, sent))
        state.optimizer.all_gather_params()
        # What a move takes is measured until its weights are there.
        state.optimizer.finish_pending()
        return ExpertMoves(
            experts=planned.experts,
            sent_bytes=sum(collectives.gather_json(sum(sent))),
            expected_bytes=planned.sent_bytes,
            seconds=perf_counter() - begin_s,
            expected_s=planned.move_s,
            gain_s=planned.gain_s,
        )

    def _list_exchanges(self, changed: Placement) -> list[_LayerMove]:
        names = {named.owner: named.name for named in list_parameters(self._state.model)}
        return [
            _LayerMove(
                names=frozenset(names[part] for part in layer.experts.parts),
                before=self.placement[layer.number],
                after=changed[layer.number],
            )
            for layer in self._state.model.modules()
            if isinstance(layer, MoeLayer) and layer.number in changed
        ]

    def _place(self, placement: Placement) -> None:
        self.placement = placement
        for module in self._state.model.modules():
            if isinstance(module, MoeLayer):
                module.place_experts(placement[module.number])


def _exchange_all(
    exchanges: Sequence[_LayerMove],
    group: Group,
    device: torch.device,
    sent: list[int],
    shards: Sequence[LocalShard],
) -> None:
    """Give every expert's part to the rank that has its slot now; add the bytes sent to `sent`.

    `shards` are boxes of the placement to come, in the same order on every rank of the group, with
    what they held before.
    """
    for exchange in exchanges:
        own = [shard for shard in shards if shard.name.rpartition("/")[2] in exchange.names]
        sent.append(_exchange_layer(exchange, group, device, own))


def _exchange_layer(
    exchange: _LayerMove, group: Group, device: torch.device, shards: Sequence[LocalShard]
) -> int:
    """Exchange the boxes of a layer's moved experts; return the bytes that this rank has sent."""
    local = len(exchange.after) // group.size
    slot_before = {expert: slot for slot, expert in enumerate(exchange.before)}
    slot_after = {expert: slot for slot, expert in enumerate(exchange.after)}
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
    # A swap keeps the place on a rank (rules.expert_moves), so that both sides have one order.
    for shard in shards:
        expert = shard.offsets[0]
        source = slot_before[expert] // local
        if source == group.index or not shard.tensor.numel():
            continue
        # The place of a moved expert still has the one from before, which leaves.
        leaving = exchange.before[slot_after[expert]]
        outgoing[slot_after[leaving] // local].append(shard.tensor)
        incoming[source].append(shard.tensor)
    pieces = [
        tensor.contiguous().view(-1).view(torch.uint8).to(device)
        for tensors in outgoing
        for tensor in tensors
    ]
    data = torch.cat((torch.empty(0, dtype=torch.uint8, device=device), *pieces))
    received = start_all_to_all(
        data,
        group,
        send=tuple(sum(tensor.nbytes for tensor in tensors) for tensors in outgoing),
        receive=tuple(sum(tensor.nbytes for tensor in tensors) for tensors in incoming),
    ).wait()
    offset = 0
    for tensors in incoming:
        for tensor in tensors:
            # A copy, because a part may begin at no multiple of its dtype's width.
            part = received[offset : offset + tensor.nbytes].clone()
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            offset += tensor.nbytes
    return data.nbytes
