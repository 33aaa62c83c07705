"""Estimate and Plan: what is expected of a layout, and the whole job that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger
from moewright.spec.model import ModelSpec
from moewright.spec.options import SearchOptions
from moewright.spec.record import OMIT_EMPTY, Record, Row
from moewright.spec.units import GIB, SourceKind, divide
from moewright.spec.workload import Dtype, Workload


class Verdict(StrEnum):
    """Whether a layout fits in memory, allowing for the error of the prediction."""

    FITS = "fits"
    UNCERTAIN = "uncertain"
    OOM = "oom"


class TimePart(StrEnum):
    """The parts of a predicted step on the slowest pipeline rank; they sum to the step."""

    ATTENTION = "attention"
    DENSE = "dense"  # projections, dense MLP, shared experts, router
    EXPERTS = "experts"
    ELEMENTWISE = "elementwise"
    HEAD = "head"  # embedding, logits, loss
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"  # waits for activations from or to the host
    EP_COMM = "ep_comm"
    TP_COMM = "tp_comm"
    CP_COMM = "cp_comm"
    PP_COMM = "pp_comm"
    DP_COMM = "dp_comm"
    BUBBLE = "bubble"
    HOST = "host"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """The seconds of one part of a step."""

    part: TimePart
    seconds: float  # exposed on the critical path
    hidden_s: float = 0.0  # overlapped by other work


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A default or constant that went into an estimate."""

    name: str
    value: str
    kind: SourceKind
    source: str


class EvidenceGrade(StrEnum):
    """How near measured runs come to an estimate, best first."""

    MEASURED = "measured"  # a run made every choice of the job together
    COMBINED = "combined"  # runs made every pair of its choices, but none all of them
    STACKED = "stacked"  # runs made every choice, but not every pair of them
    FORMULA = "formula"  # some choice was made by no run: a formula prices it


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The choices of a job that measured runs support, and those that rest on a formula.

    A choice is what decides how work is priced: a part, a precision, an overlap, a recomputed
    module. `runs` counts the runs that made all choices of the job. `formula` names choices that no
    run made, and pairs ("a with b") of choices that no run made together.
    """

    grade: EvidenceGrade
    runs: int = 0
    measured: tuple[str, ...] = ()
    formula: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """What uneven routing does to a step and a peak; loads are over those of even routing.

    `load` and `peak_load` are the rows of the hottest expert rank that the predicted step and peak
    go by. Of ten runs, one has a longer step than `step_p90_s` and one a higher peak than
    `peak_p90_bytes`, by the spread of loads alone. Zeros: routing is even.
    """

    load: float = 1.0
    peak_load: float = 1.0
    even_step_s: float = 0.0  # seconds of the step under even routing
    cost: float = 0.0  # share of those seconds that uneven routing adds
    step_p90_s: float = 0.0
    peak_p90_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpread:
    """The seconds of a step that waits for the slowest of its ranks and links, over jobs and steps.

    Of ten steps, one is longer than `p90_s`.
    """

    mean_s: float
    median_s: float
    p90_s: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Estimate(Record):
    """The expected memory and time of one layout.

    `ledgers` holds one predicted Ledger for each pipeline rank, of the worst rank of that stage.
    MFU counts model FLOPs only; HFU adds recomputation. Intervals are (low, high), each with its
    nominal share of outcomes inside.
    """

    ledgers: tuple[Ledger, ...]
    peak_rank: int  # the pipeline rank with the highest peak
    peak_bytes: int
    capacity_bytes: int
    verdict: Verdict
    margin_bytes: int  # capacity - peak
    peak_sd_bytes: int  # standard deviation of the peak
    largest: str  # the largest contributor, "component of module"
    step_s: float
    step_sd: float  # standard deviation of the step over the step
    shares: tuple[TimeShare, ...]
    micro_batches: int
    bubble_fraction: float
    tokens_per_s_per_device: float
    model_flops_per_step: float
    tflops_per_device: float
    mfu: float
    hfu: float
    assumptions: tuple[Assumption, ...]
    # Rows of the hottest expert rank over the rows of an even load at which the device is full;
    # 0: no load fills it.
    load_limit: float = 0.0
    step_interval_80: tuple[float, float] = (0.0, 0.0)  # seconds
    step_interval_95: tuple[float, float] = (0.0, 0.0)
    peak_interval_80: tuple[float, float] = (0.0, 0.0)  # bytes
    peak_interval_95: tuple[float, float] = (0.0, 0.0)
    fit_probability: float = 0.0  # that the peak stays within capacity
    evidence: Evidence = Evidence(grade=EvidenceGrade.FORMULA)
    imbalance: Imbalance = Imbalance()
    # None: the network carries what all ports send, and has no links to wait for.
    spread: StepSpread | None = field(default=None, metadata={OMIT_EMPTY: True})
    # Why there is no time; "" where there is. Seconds are then those of wide products, by which
    # layouts are ordered, and say nothing of a step.
    untimed: str = ""
    host_bytes: int = 0  # the most that a rank keeps in host memory
    host_capacity_bytes: int = 0  # a rank's part of its node's host memory; 0: nobody says
    host_verdict: Verdict = Verdict.FITS  # on host memory alone

    @property
    def host_shortage(self) -> str:
        """What a rank keeps in host memory and may have of it; "" where that decides nothing."""
        if self.host_verdict is Verdict.FITS:
            return ""
        return (
            f"{self.host_bytes / GIB:,.4g} GiB a device in host memory, of "
            f"{self.host_capacity_bytes / GIB:,.4g}"
        )

    def title(self) -> str:
        """Return the verdict with the peak, and the speed."""
        peak = f"peak {self.peak_bytes / GIB:.4g} of {self.capacity_bytes / GIB:.4g} GiB"
        if self.host_shortage:
            peak = f"{peak}; {self.host_shortage}"
        if self.untimed:
            return f"{self.verdict.value}: {peak}; {self.untimed}"
        speed = f"{self.tokens_per_s_per_device:,.4g} tokens/s/device, MFU {self.mfu:.1%}"
        return f"{self.verdict.value}: {peak}; {self.step_s:.4g} s a step, {speed}"

    def to_rows(self) -> list[Row]:
        """Return a row for each part of the step, the largest first."""
        shares = sorted(self.shares, key=lambda share: -share.seconds)
        return [
            {
                "part": share.part.value,
                "seconds": share.seconds,
                "share": divide(share.seconds, self.step_s),
                "hidden_s": share.hidden_s,
            }
            for share in shares
            if share.seconds or share.hidden_s
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The best layout under one change of the job, and the seconds of its step in closed form."""

    change: str
    layout: Layout
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRule:
    """The risks that a ranking of layouts takes.

    Layouts that fit with at least `fit_probability` are safe and come first. They are ranked by
    their bound: the seconds that a step exceeds with a probability of `risk`. At a risk of 0.5 that
    is the predicted step itself.
    """

    fit_probability: float = SearchOptions().fit_probability
    risk: float = SearchOptions().risk


DEFAULT_RULE = RankingRule()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout that a plan was chosen over, in short."""

    layout: Layout
    step_s: float
    step_bound_s: float  # what it is ranked by
    peak_bytes: int
    fit_probability: float
    grade: EvidenceGrade


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChoice:
    """A job that a plan chose among, with the best layout that is safe in it.

    It is a format, a batch and the `switches` that are set beyond the job's own (their names on the
    command line). `runs` counts the published runs on the part in the format; the plan is of the
    one that `is_chosen`. Without a `layout` the `refusal` says why there is none, and the figures
    are zeros.
    """

    precision: Dtype
    global_batch: int
    runs: int
    switches: tuple[str, ...] = ()
    is_chosen: bool = False
    layout: Layout | None = None
    refusal: str = ""
    step_s: float = 0.0
    bound_s: float = 0.0  # what it is ranked by
    tokens_per_s_per_device: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFigure:
    """The published run that is most like a layout, and how the layout stands to what ran.

    Speeds are tokens/s a device. `ratio` is the layout's expected speed over this run's,
    `ratio_of_best` over that of the fastest published run of the model on the part in the
    precision, 0 where there is none. `even_ratio` is the ratio with an even load of the experts,
    where the run was forced to have one and the layout is not, else 0. `differs` says in what the
    run is another job.
    """

    id: str
    model: str
    device: str
    devices: int
    layout: str
    tokens_per_s_per_device: float
    ratio: float
    differs: str = ""
    source: str = ""
    best_tokens_per_s_per_device: float = 0.0
    ratio_of_best: float = 0.0
    even_ratio: float = 0.0

    @property
    def is_exceeded(self) -> bool:
        """Return whether the layout is expected to be faster than anything published of its job."""
        return self.ratio_of_best > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A layout that a search recommends, and what to expect of it.

    `step_s` is as estimated; `expected_step_s` is the median given that the layout was picked from
    many, where the search finds what the model prices too low (the winner's curse), and the speed
    is of that. `runs` counts the published runs on the part that made all choices of the layout
    together. `trainers` are those that start it.
    """

    layout: Layout
    step_s: float
    expected_step_s: float
    tokens_per_s_per_device: float
    peak_bytes: int
    fit_probability: float
    grade: EvidenceGrade
    runs: int = 0
    trainers: tuple[str, ...] = ()
    published: PublishedFigure | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Record):
    """A whole job, as the engine runs it, with the estimate that it was chosen by.

    `fingerprint` covers model, workload, hardware and layout. A plan that a search chose has the
    rule of the ranking, the next best safe layouts (`runners_up`), and those ranked before it that
    fit less probably than the rule asks for (`gambles`). `fast` is what a search expects of this
    plan, its fastest; `proven` of the fastest layout whose combination of choices somebody ran on
    the part, None where nobody ran any that fits.
    """

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    estimate: Estimate
    fingerprint: str
    gains: tuple[WhatIf, ...] = ()
    schema: int = 1
    rule: RankingRule = DEFAULT_RULE
    runners_up: tuple[RankedLayout, ...] = ()
    gambles: tuple[RankedLayout, ...] = ()
    fast: Recommendation | None = None
    proven: Recommendation | None = None

    def title(self) -> str:
        """Return model, hardware, workload, layout and the line of the estimate."""
        workload = self.workload
        batch = f"sequence {workload.seq_len:,}, global batch {workload.global_batch:,}"
        job = f"{self.model.name} on {self.hardware.count:,} x {self.hardware.device.name}"
        return "\n".join(
            (f"{job}, {workload.precision.value}, {batch}", str(self.layout), self.estimate.title())
        )

    def to_rows(self) -> list[Row]:
        """Return a row for each part of the predicted step."""
        return self.estimate.to_rows()
