"""Finding: which wall holds a run back, the evidence, and what to change next; and where a step's
seconds go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Wall(StrEnum):
    MEMORY = "memory"
    COMMUNICATION = "communication"
    HOST = "host"
    COMPUTE = "compute"


class Cause(StrEnum):
    """What a wall consists of; fixes go by it."""

    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    TP = "tensor parallelism"
    CP = "context parallelism"
    EP = "expert dispatch"
    PP = "pipeline"  # its bubble and its messages
    DP = "gradients and weights"
    STRAGGLER = "late rank"
    DATA = "data loading"
    GARBAGE_COLLECTION = "garbage collection"
    SYNC = "synchronisation"
    LAUNCH = "launches"
    HOST_OTHER = "host work"
    RECOMPUTE = "recompute"
    IMBALANCE = "expert load"
    FEW_ROWS = "few rows an expert"
    KERNEL_RATES = "rates of kernels"


class Basis(StrEnum):
    """How a number was come by."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedChange:
    """What the planner expects of a fix. `layout` is how we say it; negative seconds and bytes are
    savings."""

    layout: str
    step_s: float  # change of the predicted step
    step_share: float  # the same over the predicted step
    peak_bytes: int  # change of the predicted peak
    verdict: str  # fits, uncertain, oom


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """One thing to change. `excluded` says why it cannot be taken here; "" when it can, or when
    nobody can tell."""

    text: str
    megatron: str = ""  # flags
    excludes: str = ""  # what cannot stand beside it
    excluded: str = ""
    price: PredictedChange | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`share` is the part of the step (or of the device's memory) behind the finding; fixes come in
    order of trying."""

    wall: Wall
    cause: Cause
    title: str
    share: float
    evidence: tuple[str, ...]
    fixes: tuple[Fix, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterfallDrop:
    """Seconds a step loses to one thing."""

    name: str
    seconds: float
    basis: Basis
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waterfall:
    """ideal + drops = measured; the last drop is what nothing explains. `ideal_s` is model FLOPs at
    the peak rate."""

    ideal_s: float
    ideal_note: str
    drops: tuple[WaterfallDrop, ...]
    measured_s: float
