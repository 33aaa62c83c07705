"""Ledger: what the planner predicts and the engine counts, under the same names and units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.hardware import Collective


class Module(StrEnum):
    """The parts of a model that rows of a ledger are booked to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    NORM = "norm"
    HEAD = "head"
    MTP = "mtp"
    OTHER = "other"  # what belongs to no module: padding of flat buffers, allowances


def saved_component(module: Module) -> Component:
    """Return what the activations that a module keeps are: of the head, logits."""
    return Component.LOGITS if module is Module.HEAD else Component.ACTIVATIONS


class Component(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    MASTER = "master"
    MOMENTS = "moments"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    # what stays all step long beside states: workspaces of libraries, gathered tensors
    BUFFERS = "buffers"
    TRANSIENT = "transient"  # the largest short-lived working set of backward
    COMMUNICATION = "communication"  # dispatcher and collective buffers, communicators
    FRAGMENTATION = "fragmentation"
    # in host memory: offloaded optimizer state and activations, and the copy for checkpoints; not
    # part of the peak of a device
    HOST = "host"

    def placed(self, *, on_host: bool) -> Component:
        """Return what it is booked to, where it may be kept in host memory."""
        return Component.HOST if on_host else self


class FlopOp(StrEnum):
    """The operations whose FLOPs are counted."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    SCAN = "scan"  # of a state along the sequence, with the convolution before it


class StepPhase(StrEnum):
    """Where the wall time of a training step goes; the parts do not overlap and sum to the step."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRAD_REDUCE = "grad_reduce"
    OPTIMIZER = "optimizer"
    PARAM_GATHER = "param_gather"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """The bytes of one component of one module."""

    component: Component
    module: Module
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRow:
    """The collectives of one operation over one named group of rules.grid.GROUPS.

    `bytes` is the payload that the rank hands in.
    """

    op: Collective
    group: str
    bytes: int
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopRow:
    """The FLOPs of one operation of one module."""

    op: FlopOp
    module: Module
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """The seconds of one phase of a step."""

    phase: StepPhase
    seconds: float


class StorageMoment(StrEnum):
    """The moments of a step at which all storages of a rank's device are weighed."""

    RESIDENT = "resident"  # before the step
    KEPT = "kept"  # the fullest between two rows of the timetable, when nothing runs
    PEAK = "peak"  # the fullest of all
    REDUCED = "reduced"  # between the reduction of the gradients and the update
    UPDATE = "update"  # the fullest from the reduction of the gradients on
    LEFT = "left"  # after the step


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageBytes:
    """The bytes of all storages alive on a rank's device in a step, whoever holds them.

    The fields are the moments of StorageMoment. Files of earlier versions have the first three; the
    others are 0.
    """

    resident: int
    kept: int
    peak: int
    reduced: int = 0
    update: int = 0
    left: int = 0

    def at(self, moment: StorageMoment) -> int:
        """Return the bytes of one moment."""
        nbytes: int = getattr(self, moment.value)
        return nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRow:
    """The bytes at a moment of storages that no other row of a ledger lists, by their place.

    `place` is where a storage was made in a step: the line of the engine and the operation; or for
    one from before the step the object that holds it.
    """

    moment: StorageMoment
    module: Module
    place: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The memory, communication, FLOPs and time of one rank.

    `memory` is bytes held; `comm`, `flops` and `time` are for one training step. Rows are sorted
    and unique by their keys; a row of zero is left out. `in_flight` is the highest number of
    (micro-batch, chunk) pairs between their forward and the end of their backward.

    `storages` are the bytes of a counted step; in a prediction, what its rows list at the same
    moments, and `allowance` is the most that may live beside that. `unlisted` are the largest
    storages of a counted step that no row of `memory` lists.
    """

    rank: int
    pp_rank: int
    memory: tuple[MemoryRow, ...] = ()
    comm: tuple[CommRow, ...] = ()
    flops: tuple[FlopRow, ...] = ()
    time: tuple[TimeRow, ...] = ()
    in_flight: int = 0
    storages: StorageBytes | None = None
    allowance: StorageBytes | None = None
    unlisted: tuple[StorageRow, ...] = ()
    # peculiarities of this device that the other ledger (predicted or counted) cannot contain
    notes: tuple[str, ...] = ()

    @property
    def device_rows(self) -> tuple[MemoryRow, ...]:
        """The memory rows that lie on the device."""
        return tuple(row for row in self.memory if row.component is not Component.HOST)

    @property
    def device_bytes(self) -> int:
        return sum(row.bytes for row in self.device_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The choices of the routers in one step, and the attention that documents left.

    counts[micro_batch][moe_layer][source_rank][expert] holds the rows of all dense data-parallel
    ranks; rows that a capacity dropped are in no count. Under dedup
    copies[...][...][source_rank][ep_rank] counts the tokens that crossed, each once per rank; ()
    otherwise. Where tokens cross to a node first, nodes[...][...][source_rank][node] counts them,
    each once per node; () otherwise.

    Where documents bound attention, attended[rank] is twice the number of causal (query, key) pairs
    of the step, over all heads: for the queries of the rank's tokens, or of the tokens of all ranks
    that exchange heads with it; () otherwise. near[rank] is the same number for layers with a
    sliding window, if there are any.

    A repeated step was over a rank_capacity and was run again with all rows; the counts are of
    that second run.

    Where experts were moved, slots[moe_layer] is the expert of every slot; () otherwise.
    """

    step: int
    counts: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    copies: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    nodes: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = ()
    attended: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    is_repeated: bool = False
    slots: tuple[tuple[int, ...], ...] = ()
