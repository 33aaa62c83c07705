"""RunRecord: what a run left behind, as its files say it."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.ledger import Ledger, Selection, TimeRow
from moewright.spec.plan import Plan
from moewright.spec.workload import RouterForce

# begins the name of a range in a trace, the group's follows: this rank waits for a collective
WAIT_RANGE_PREFIX = "wait:"
SESSION_WARMUP_STEPS = (
    2  # first steps of a session, which are not settled: allocations, thread pools, autotuning
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Tokens per expert of one MoE layer in one step, over all data-parallel ranks, and its
    router's losses with their coefficients: of the micro-batch, of sequences, of the global batch,
    z.
    """

    layer: int
    max_over_mean: float
    dead_experts: int  # experts that got no token
    entropy: float  # of the load, in units of log(experts): 1 is even
    counts: tuple[int, ...]
    p95_over_mean: float = 0.0  # of the expert that 95% of the others do not exceed
    rank_counts: tuple[int, ...] = ()  # tokens of the experts on each EP rank
    dropped_share: float = 0.0  # of the rows chosen, left out for lack of capacity
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWait:
    """Seconds in which this rank did nothing but wait for a collective or a message of one named
    group: for its peers to come, and for the bytes. Work that runs under a collective is not in it.
    Known where collectives run on the host's thread (gloo); on a GPU a trace tells it.
    """

    group: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime:
    """Of a step on this rank's main thread: on a core, ready but without one, in Python's garbage
    collection.

    Asleep is what is left of the step beyond these and the waits: a lock, a disk, a device.
    """

    running_s: float = 0.0
    queued_s: float = 0.0
    collecting_s: float = 0.0
    asleep_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSample:
    """What the driver of a GPU says at the end of a step. `resident_share` is the share of recent
    time in which any kernel was resident, spinning communication included: it says nothing of how
    busy the tensor cores are.
    """

    resident_share: float
    used_bytes: int  # of the whole device, by every process
    peak_allocated_bytes: int  # by torch in this process since its start


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTiming:
    """Medians over the steps of a session on one rank, warm-up and the counted step left out;
    seconds a step.

    `links` is the part of `waits` that even the rank to come last spent: the call itself, all being
    there. The rest was spent waiting for a late rank. Of groups that meet as a whole; () where the
    calls were not kept.
    """

    rank: int
    steps: int
    phases: tuple[TimeRow, ...]
    waits: tuple[GroupWait, ...]
    host: HostTime
    links: tuple[GroupWait, ...] = ()

    @property
    def step_s(self) -> float:
        return sum(row.seconds for row in self.phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of steps.jsonl, kind "step". Rates are per rank; `loss` is nats per valid target of
    the global batch."""

    step: int  # 1 is the first update
    loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    tokens_per_s_per_rank: float
    tflops_per_rank: float
    mfu: float
    skipped: bool
    phases: tuple[TimeRow, ...]
    loads: tuple[LayerLoad, ...]  # () on steps that the job does not log them on
    samples_per_s: float = 0.0  # sequences, of the whole job
    hfu: float = 0.0  # MFU with the planned replays counted too
    waits: tuple[GroupWait, ...] = ()
    host: HostTime = HostTime()
    device: DeviceSample | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """One line of steps.jsonl, kind "eval": mean nats per target over the held-out batches after
    `step` updates."""

    step: int
    heldout_loss: float
    unigram_entropy: float  # of the held-out corpus' tokens under the training unigram distribution
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One process start of the run (a resume opens another)."""

    first_step: int
    started: str  # ISO 8601, UTC
    world_size: int
    torch_version: str
    device_name: str
    threads_per_rank: int
    routing: RouterForce = RouterForce.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run directory, read back. `ledgers` are counted, one a rank, on the step of `selection`."""

    plan: Plan
    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    ledgers: tuple[Ledger, ...]
    selection: Selection | None
    paces: tuple[RankTiming, ...] = ()  # of the last session that ended by itself, one a rank
    notes: tuple[str, ...] = ()  # what had to be left out when reading
