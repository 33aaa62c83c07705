"""What a diagnosis says: what limits a run, the evidence, what to change, and where time goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Wall(StrEnum):
    """The resource that limits a run."""

    MEMORY = "memory"
    COMMUNICATION = "communication"
    HOST = "host"
    COMPUTE = "compute"


class Cause(StrEnum):
    """What a wall consists of; fixes are listed by cause."""

    CAPACITY = "capacity"
    FRAGMENTATION = "fragmentation"
    UNLISTED = "unlisted storages"  # that live although no row of the ledger lists them
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
    COPIES = "copies"  # between host and device
    DEVICE_COPIES = "copies within a device"
    QUEUED = "queued work"  # the device is idle although the host has launched its next kernel
    COLLECTIVES = "collectives"  # of no known parallelism
    GROWING = "growing steps"  # each takes longer than those before
    RECOMPUTE = "recompute"
    IMBALANCE = "expert load"
    FEW_ROWS = "few rows an expert"
    KERNEL_RATES = "rates of kernels"


class Basis(StrEnum):
    """How a number was obtained."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedChange:
    """What the planner expects of a fix; negative seconds and bytes are savings.

    `layout` is the layout with the fix, as layout text.
    """

    layout: str
    step_s: float  # change of the predicted step
    step_share: float  # the same over the predicted step
    peak_bytes: int  # change of the predicted peak
    verdict: str  # fits, uncertain, oom


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """One thing to change.

    `megatron` holds flags of Megatron-LM, for runs of it; `setting` the fields of a job file, for
    runs of this engine, or variables of the environment, which hold for any trainer. `excluded`
    says why this run cannot take it, or that it has it; "" where it can, or where that is unknown.
    """

    text: str
    megatron: str = ""
    setting: str = ""
    excludes: str = ""  # choices that cannot be combined with it
    excluded: str = ""
    price: PredictedChange | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A wall of a run with its cause, its evidence, and fixes, the most gainful first.

    `share` is the part of the step, or of the device's memory, that the finding explains.
    """

    wall: Wall
    cause: Cause
    title: str
    share: float
    evidence: tuple[str, ...]
    fixes: tuple[Fix, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterfallDrop:
    """The seconds that a step loses to one thing."""

    name: str
    seconds: float
    basis: Basis
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waterfall:
    """The way from the ideal step to the measured one: ideal + drops = measured.

    `ideal_s` is model FLOPs at the peak rate; the last drop is what nothing explains.
    """

    ideal_s: float
    ideal_note: str
    drops: tuple[WaterfallDrop, ...]
    measured_s: float
