"""Ranks that compute slower than their peers: named, with the figures, while the run goes on.

Ranks of a pipeline stage have the same work, but for the rows that are routed to their experts.
Every few steps the medians of their compute times are compared: of the time in which a rank neither
waited for others nor was queued for a core, which was on one or slept. Where the host does not see
that (on a GPU), all ranks time the same product instead.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from moewright.engine.comm import collectives
from moewright.engine.model.router import list_routers
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.run.run_records import note_slow_rank
from moewright.engine.run.train_state import TrainState
from moewright.rules.expert_moves import Placement
from moewright.rules.expert_placement import rank_experts
from moewright.rules.job import Job
from moewright.spec.ledger import StepPhase
from moewright.spec.run import HostTime
from moewright.spec.units import divide

# A rank is slow that takes more than this times the median of its peers, in so many windows of so
# many steps, one after the other.
SLOW_RATIO = 1.3
WINDOWS = 2
WINDOW_STEPS = 10
# The product that ranks time, of square matrices, and how often; the best one counts.
_PROBE_SIZE = 2048
_PROBES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What a rank measured in a step or a window: seconds of compute (or of the product) and rows.

    `queued_s` are the seconds in which it had no core, `rows` those of its experts.
    """

    stage: int
    seconds: float
    queued_s: float
    rows: float


def expert_shares(
    job: Job, placement: Placement, layers: Sequence[int], ep_rank: int
) -> torch.Tensor:
    """Return the share of each expert's rows that an EP rank has, 0 in layers besides `layers`.

    [MoE layers, E] fp64, in the order of a step's expert loads.
    """
    shares = torch.zeros(len(job.model.routed_layers), job.model.expert_count, dtype=torch.float64)
    for layer in layers:
        slots = placement[layer]
        for expert in rank_experts(slots, job.layout.ep, ep_rank):
            shares[job.model.routed_layers.index(layer), expert] += 1 / slots.count(expert)
    return shares


def build_pace(host: HostTime, *, stage: int, rows: float) -> Pace:
    """Build the pace of a step: it computed while it was on a core, and while it slept."""
    seconds = host.running_s + host.asleep_s
    return Pace(stage=stage, seconds=seconds, queued_s=host.queued_s, rows=rows)


def median_pace(steps: Sequence[Pace]) -> Pace:
    """Return the medians of a rank's steps, which a few disturbed steps do not move."""
    return Pace(
        stage=steps[0].stage,
        seconds=median(step.seconds for step in steps),
        queued_s=median(step.queued_s for step in steps),
        rows=median(step.rows for step in steps),
    )


def time_product(device: torch.device, size: int = _PROBE_SIZE) -> float:
    """Return the seconds of one and the same product, the best of a few."""
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    best_s = float("inf")
    for _ in range(_PROBES):
        clock = build_phase_clock(device)
        with clock.phase(StepPhase.FORWARD):
            matrix @ matrix
        seconds = {row.phase: row.seconds for row in clock.time_rows()}
        best_s = min(best_s, seconds[StepPhase.FORWARD])
    return best_s


def find_slow_ranks(paces: Sequence[Pace]) -> dict[int, str]:
    """Return the ranks that are slower than their peers, and the figures that show it.

    More rows than the peers have explain as much more time.
    """
    slow = {}
    for rank, pace in enumerate(paces):
        peers = [
            other for number, other in enumerate(paces) if number != rank and _is_peer(other, pace)
        ]
        if not peers:
            continue
        peer_s = median(peer.seconds for peer in peers)
        peer_rows = median(peer.rows for peer in peers)
        rows_ratio = divide(pace.rows, peer_rows, otherwise=1.0)
        # Fewer rows than its peers lower no bound: most of the work is the same.
        if pace.seconds > SLOW_RATIO * max(1.0, rows_ratio) * peer_s:
            slow[rank] = (
                f"{1e3 * pace.seconds:.1f} ms of compute a step, {pace.seconds / peer_s:.2f} times "
                f"the {1e3 * peer_s:.1f} ms of its peers (median), with {rows_ratio:.2f} times "
                f"their expert rows; without a core for {1e3 * pace.queued_s:.1f} ms"
            )
    return slow


def count_slow_windows(before: Mapping[int, int], slow: Collection[int]) -> dict[int, int]:
    """Return in how many windows in a row ranks are slow, by those `before` and this one's."""
    return {rank: before.get(rank, 0) + 1 for rank in slow}


def _is_peer(other: Pace, pace: Pace) -> bool:
    return other.stage == pace.stage and other.seconds > 0


class StragglerWatch:
    """The watch over the pace of all ranks; every rank of a world makes one and feeds it alike."""

    def __init__(self, job: Job, state: TrainState, placement: Placement) -> None:
        self._job = job
        self._mesh = state.runtime.mesh
        self._device = state.runtime.device
        self._is_alone = job.layout.world_size == 1
        self._layers = [router.layer_number for router in list_routers(state.model)]
        self.place(placement)
        self._window: list[Pace] = []
        self._slow_windows: Mapping[int, int] = {}

    def place(self, placement: Placement) -> None:
        """Take another placement of the experts, from the next step on."""
        ep_rank = self._mesh.coordinate("ep")
        self._shares = expert_shares(self._job, placement, self._layers, ep_rank)

    def add_step(self, expert_loads: torch.Tensor, host: HostTime) -> None:
        """Take a step into the window; a rank that is alone has none to be compared with."""
        if self._is_alone:
            return
        rows = float((expert_loads.cpu() * self._shares).sum())
        stage = self._mesh.coordinate("pp")
        self._window.append(build_pace(host, stage=stage, rows=rows))

    def report(self, run_dir: Path, step: int) -> None:
        """Compare the ranks where a window is full, and tell of those that have become slow.

        Every rank of the world calls this, after the same step.
        """
        if len(self._window) < WINDOW_STEPS:
            return
        layout = self._job.layout
        paces = [Pace(**data) for data in collectives.gather_json(asdict(self._take_pace()))]
        slow = find_slow_ranks(paces)
        self._slow_windows = count_slow_windows(self._slow_windows, slow)
        for rank, count in self._slow_windows.items():
            message = f"rank {rank} is slow at step {step}: {slow[rank]}"
            # A rank is told of once, until it has been as fast as its peers again.
            if count == WINDOWS and self._mesh.rank == 0:
                print(message, file=sys.stderr, flush=True)
                note_slow_rank(run_dir, layout, rank=rank, step=step, message=message)

    def _take_pace(self) -> Pace:
        """Return the pace of the window, and begin another one."""
        pace = median_pace(self._window)
        if self._device.type != "cpu":
            pace = replace(pace, seconds=time_product(self._device))
        self._window = []
        return pace
