"""RunRecord: what a run left behind in its files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.errors import NO_TEXT, Paragraph
from moewright.spec.ledger import Ledger, Selection, TimeRow
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.workload import RouterForce

# In a trace, the names of ranges: this rank waits for a collective, or begins one; each is followed
# by the group and, for a collective, by CALL_MARK and the number of the call.
WAIT_RANGE_PREFIX = "wait:"
BEGIN_RANGE_PREFIX = "begin:"
CALL_MARK = "#"
CALL_NUMBERS = 64  # as many are told apart, so that names are few: more are not under way at once
# A gradient was added to a bucket, and a bucket begins to be reduced: followed by its number.
GRADIENT_RANGE_PREFIX = "gradient:"
REDUCE_RANGE_PREFIX = "reduce:"
# First steps of a session, which are not steady: allocations, thread pools, autotuning.
SESSION_WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """The tokens per expert of one MoE layer in one step, and the losses of its router.

    Tokens are counted over all data-parallel ranks. The four losses (balance over the micro-batch,
    over sequences and over the global batch, and the router z-loss) include their coefficients.
    """

    layer: int
    max_over_mean: float
    dead_experts: int  # experts that got no token
    entropy: float  # entropy of the load in units of log(experts): 1 is even
    counts: tuple[int, ...]
    p95_over_mean: float = 0.0  # 95th percentile of the experts' loads over their mean
    rank_counts: tuple[int, ...] = ()  # tokens of the experts on each EP rank
    dropped_share: float = 0.0  # share of the chosen rows that were dropped for lack of capacity
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWait:
    """The seconds in which this rank only waited for a collective or a message of one named group.

    It waited for its peers to arrive and for the bytes; a collective that other work hides is not
    included. The time is known where collectives run on the host's thread (gloo); on a GPU only a
    trace shows it.
    """

    group: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime:
    """How this rank's main thread spent a step.

    It ran on a core, was queued for one, or was in Python's garbage collection. The rest of the
    step, without the waits for collectives, it was asleep: for a lock, a disk or a device.
    """

    running_s: float = 0.0
    queued_s: float = 0.0
    collecting_s: float = 0.0
    asleep_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSample:
    """What is known of a rank's device at the end of a step.

    Of a GPU its driver reports it: `resident_share` is the share of recent time in which any kernel
    was resident, spinning communication included, and does not tell how busy the tensor cores are.
    Of a CPU it is the share of the step in which the threads of this process ran.
    """

    resident_share: float
    used_bytes: int  # of a GPU by every process; of a CPU by this one
    peak_allocated_bytes: int  # by torch in this process since its start; 0 on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTiming:
    """The medians of one rank over the steps of a session, in seconds per step.

    Warm-up steps and the counted step are left out. `links` is the part of `waits` that the last
    rank to arrive spent as well: the collective itself, with all ranks present. The rest of `waits`
    was spent waiting for a late rank. `links` covers groups whose ranks all take part in each call;
    it is () where the calls were not kept. `device` has the median share and the most memory; None
    where nothing tells.
    """

    rank: int
    steps: int
    phases: tuple[TimeRow, ...]
    waits: tuple[GroupWait, ...]
    host: HostTime
    links: tuple[GroupWait, ...] = ()
    device: DeviceSample | None = None

    @property
    def step_s(self) -> float:
        return sum(row.seconds for row in self.phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRewards:
    """What a step of preferences has of its pairs of answers.

    A reward is beta times the log-ratio of an answer to the reference.
    """

    pairs: int = 0  # 0 where the objective is another
    accuracy: float = 0.0  # share of the pairs whose chosen answer has the greater reward
    margin: float = 0.0  # mean of the chosen answer's reward less the rejected one's


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMoves:
    """The experts that changed their rank between a step and the one before; zeros where none did.

    Bytes are those that all ranks sent together, and what was expected of them. `gain_s` is what
    the step is expected to gain, with the loads before.
    """

    experts: int = 0
    sent_bytes: int = 0
    expected_bytes: int = 0
    seconds: float = 0.0
    expected_s: float = 0.0
    gain_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of steps.jsonl of kind "step".

    Rates are per rank; `loss` is nats per valid target of the global batch, or the mean loss of its
    pairs.
    """

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
    loads: tuple[LayerLoad, ...]  # () on steps without router logging
    samples_per_s: float = 0.0  # sequences, of the whole job
    hfu: float = 0.0  # MFU with the planned recomputation counted too
    waits: tuple[GroupWait, ...] = ()
    host: HostTime = HostTime()
    device: DeviceSample | None = None
    is_repeated: bool = False  # run twice: some rank had more rows than its rank_capacity
    rewards: PairRewards = PairRewards()
    copied_step: int = -1  # of the newest copy elsewhere, 0 before the first; -1: none are made
    moves: ExpertMoves = ExpertMoves()  # before the step

    @property
    def copy_age(self) -> int:
        """The steps that the newest copy elsewhere is behind this one; 0 where none are made."""
        if self.copied_step >= 0:
            return max(0, self.step - self.copied_step)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """One line of steps.jsonl of kind "eval".

    The loss is mean nats per target over the held-out batches after `step` updates, or the mean
    loss of the held-out pairs, of which there are `tokens`.
    """

    step: int
    heldout_loss: float
    unigram_entropy: float  # of the held-out corpus' tokens under the training unigram distribution
    tokens: int
    rewards: PairRewards = PairRewards()


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRecord:
    """One line of steps.jsonl of kind "copy": the newest copy when all of a session had ended."""

    step: int  # the last one of the session
    copied_step: int  # 0 where there is no copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of the processes of a run; a resume opens another session."""

    first_step: int
    started: str  # ISO 8601, UTC
    world_size: int
    torch_version: str
    device_name: str
    threads_per_rank: int
    routing: RouterForce = RouterForce.NONE
    layout: str = ""  # as layout text; "" in the files of earlier versions


class IncidentKind(StrEnum):
    """The kinds of incident: what ended the ranks of a run, slows it down, or puts it at risk."""

    CRASH = "crash"
    HANG = "hang"
    NOT_FINITE = "not finite"  # a weight, the loss, or what a checkpoint would have held
    CORRUPTION = "corruption"  # of bits of the state
    RETURN = "return"  # of ranks that were gone: the others were stopped for them
    SLOW = "slow rank"  # whose compute takes longer than that of its peers: the run goes on
    COPY = "no copy"  # of a checkpoint elsewhere could be made: the run goes on

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks have ended, and somebody has to start them again."""
        return self not in (IncidentKind.SLOW, IncidentKind.COPY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """An event that ended the ranks of a run, and how the run went on; or a rank that is slow.

    The fields from `resumed_step` on are those of the way on; `resumed_step` is 0 where the run did
    not go on.
    """

    kind: IncidentKind
    time: str  # ISO 8601, UTC, at which it was noticed
    unix_s: float  # the same
    message: Paragraph
    layout: str  # as layout text
    world_size: int
    rank: int = -1  # -1 where it is not known
    step: int = 0  # begun last; 0 before the first
    resumed_step: int = 0  # the first that was done after
    next_layout: str = ""
    next_world_size: int = 0
    repeated_steps: int = 0
    repeated_s: float = 0.0  # that the repeated steps had taken
    down_s: float = 0.0  # from the notice to the end of the first step after
    gave_up: Paragraph = NO_TEXT  # why the supervisor did not start the ranks again

    @property
    def lost_s(self) -> float:
        """The time that it cost."""
        return self.down_s + self.repeated_s


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunRecord(Record):
    """The content of a run folder.

    Each rank counted one of the `ledgers`, on the step of `selection`. The layout may have changed
    from one session to the next. What a step learned, it learned under any layout: `steps` are all
    of them. What it took, and what each rank got, is of its layout: `planned_steps` are those of
    the layout that the plan states, from `planned_from` on, and so are `ledgers` and `paces`.
    """

    plan: Plan
    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    ledgers: tuple[Ledger, ...]
    selection: Selection | None
    paces: tuple[RankTiming, ...] = ()  # one per rank, of the last session that ended by itself
    incidents: tuple[Incident, ...] = ()
    notes: tuple[str, ...] = ()  # what had to be left out when reading
    planned_from: int = 1
    copied_step: int = -1  # of the newest copy elsewhere, 0 before the first; -1: none are made

    def to_rows(self) -> list[Row]:
        """Return what was trained, how many steps, and the losses."""
        facts: list[tuple[str, object]] = [("model", self.plan.model.name)]
        facts.append(("steps", len(self.steps)))
        if self.steps:
            facts.append(("first loss", self.steps[0].loss))
            facts.append(("last loss", self.steps[-1].loss))
        if self.evals:
            facts.append(("held-out loss", self.evals[-1].heldout_loss))
        return [{"field": name, "value": value} for name, value in facts]

    def frame_rows(self) -> list[Row]:
        """Return a row for each step."""
        return [
            {
                "step": step.step,
                "loss": step.loss,
                "aux_loss": step.aux_loss,
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "step_s": step.step_s,
                "tokens_per_s_per_rank": step.tokens_per_s_per_rank,
                "mfu": step.mfu,
                "skipped": step.skipped,
            }
            for step in self.steps
        ]

    @property
    def planned_steps(self) -> tuple[StepRecord, ...]:
        """The steps under the plan's layout; () where it has changed since the last step."""
        return tuple(step for step in self.steps if step.step >= self.planned_from)
