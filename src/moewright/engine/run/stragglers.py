"""Ranks that compute slower than their peers: named, with the figures, while the run goes on.

Ranks of a pipeline stage have the same work, but for the rows that are routed to their experts.
Every few steps the medians of their compute times are compared: of the time in which a rank neither
waited for others nor was queued for a core. Where the host does not see that (on a GPU), all ranks
time the same product instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from moewright.engine.comm import collectives
from moewright.engine.model.router import list_routers
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.run.incidents import note_slow_rank
from moewright.engine.run.step import StepResult
from moewright.engine.run.train_state import TrainState
from moewright.rules.expert_placement import rank_experts, slot_experts
from moewright.rules.job import Job
from moewright.spec.ledger import StepPhase
from moewright.spec.run import GroupWait, HostTime

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
    """What a rank measured in a window: seconds of compute (a step's, or the product's) and rows.

    `queued_s` are the seconds a step in which it had no core, `rows` those of its experts.
    """

    stage: int
    seconds: float
    queued_s: float
    rows: float


def compute_seconds(result: StepResult, waits: Sequence[GroupWait], host: HostTime) -> float:
    """Return the time of a step in which this rank neither waited nor was queued for a core."""
    step_s = sum(row.seconds for row in result.phases if row.phase is not StepPhase.OTHER)
    return max(0.0, step_s - sum(wait.seconds for wait in waits) - host.queued_s)


def expert_shares(job: Job, layers: Sequence[int], ep_rank: int) -> torch.Tensor:
    """Return the share of each expert's rows that an EP rank has, 0 in layers besides `layers`.

    [MoE layers, E] fp64, in the order of a step's expert loads.
    """
    shares = torch.zeros(len(job.model.routed_layers), job.model.expert_count, dtype=torch.float64)
    for layer in layers:
        slots = slot_experts(job, layer)
        for expert in rank_experts(slots, job.layout.ep, ep_rank):
            shares[job.model.routed_layers.index(layer), expert] += 1 / slots.count(expert)
    return shares


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
        rows_ratio = pace.rows / peer_rows if peer_rows else 1.0
        if pace.seconds > SLOW_RATIO * max(1.0, rows_ratio) * peer_s:
            slow[rank] = (
                f"{1e3 * pace.seconds:.1f} ms of compute a step, {pace.seconds / peer_s:.2f} times "
                f"the {1e3 * peer_s:.1f} ms of its peers (median), with {rows_ratio:.2f} times "
                f"their expert rows; without a core for {1e3 * pace.queued_s:.1f} ms"
            )
    return slow


def _is_peer(other: Pace, pace: Pace) -> bool:
    return other.stage == pace.stage and other.seconds > 0


class StragglerWatch:
    """The watch over the pace of all ranks; every rank of a world makes one and feeds it alike."""

    def __init__(self, job: Job, state: TrainState) -> None:
        self._job = job
        self._mesh = state.runtime.mesh
        self._device = state.runtime.device
        self._is_alone = job.layout.world_size == 1
        layers = [router.layer_number for router in list_routers(state.model)]
        self._shares = expert_shares(job, layers, self._mesh.coordinate("ep"))
        self._seconds: list[float] = []
        self._queued: list[float] = []
        self._rows: list[float] = []
        self._windows_slow: dict[int, int] = {}

    def add_step(self, result: StepResult, waits: Sequence[GroupWait], host: HostTime) -> None:
        """Take a step into the window; a rank that is alone has none to be compared with."""
        if self._is_alone:
            return
        self._seconds.append(compute_seconds(result, waits, host))
        self._queued.append(host.queued_s)
        self._rows.append(float((result.expert_loads.cpu() * self._shares).sum()))

    def report(self, run_dir: Path, step: int) -> None:
        """Compare the ranks where a window is full, and tell of those that have become slow.

        Every rank of the world calls this, after the same step.
        """
        if len(self._seconds) < WINDOW_STEPS:
            return
        layout = self._job.layout
        paces = [Pace(**data) for data in collectives.gather_json(asdict(self._take_pace()))]
        for rank, figures in self.judge(paces).items():
            message = f"rank {rank} is slow at step {step}: {figures}"
            if self._mesh.rank == 0:
                print(message, file=sys.stderr, flush=True)
                note_slow_rank(run_dir, layout, rank=rank, step=step, message=message)

    def _take_pace(self) -> Pace:
        """Return the medians of the window, and begin another one."""
        on_host = self._device.type == "cpu"
        pace = Pace(
            stage=self._mesh.coordinate("pp"),
            seconds=median(self._seconds) if on_host else time_product(self._device),
            queued_s=median(self._queued),
            rows=median(self._rows),
        )
        self._seconds.clear()
        self._queued.clear()
        self._rows.clear()
        return pace

    def judge(self, paces: Sequence[Pace]) -> Mapping[int, str]:
        """Return the ranks that have become slow with this window, with the figures.

        A rank is told of once, until it has been as fast as its peers again.
        """
        slow = find_slow_ranks(paces)
        self._windows_slow = {rank: self._windows_slow.get(rank, 0) + 1 for rank in slow}
        return {rank: slow[rank] for rank, count in self._windows_slow.items() if count == WINDOWS}
