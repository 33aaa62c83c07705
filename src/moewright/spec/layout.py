"""Layout: all parallel, memory and overlap choices of a job, over a world of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from moewright.spec.choices import DispatcherFacts, Payload, RegisteredMemory
from moewright.spec.record import format_cell, list_changed_fields
from moewright.spec.stage_string import EVEN_SPLIT, StageString


class Schedule(StrEnum):
    """The pipeline schedules."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"
    V_HALF = "v-half"
    V_MIN = "v-min"
    GIS = "gis"
    DUALPIPEV = "dualpipev"

    @property
    def is_v_shaped(self) -> bool:
        """Whether the second chunk of each rank lies on the way back up.

        Then the first rank holds the first and the last virtual stage.
        """
        return self in _V_SHAPED

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have timetable rows of their own."""
        return self in (Schedule.ZB_H1, Schedule.GIS) or self.is_v_shaped


_V_SHAPED = (Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN, Schedule.DUALPIPEV)


class RankOrder(StrEnum):
    """The axes of both grids from the ones whose ranks are neighbours to the farthest apart."""

    PP_LAST = "tp-cp-ep-dp-pp"
    DP_LAST = "tp-cp-ep-pp-dp"  # replicas of a pipeline are blocks of consecutive ranks


class CpComm(StrEnum):
    """How attention exchanges keys, values and heads under context parallelism."""

    P2P = "p2p"
    ALL_GATHER = "allgather"
    A2A = "a2a"
    A2A_P2P = "a2a+p2p"


class DispatcherKind(StrEnum):
    """How token rows travel to the ranks of their experts and back."""

    facts: DispatcherFacts

    def __new__(cls, value: str, *facts: DispatcherFacts) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        (member.facts,) = facts
        return member

    ALL_GATHER = (
        "allgather",
        DispatcherFacts(title="all-gather", payload=Payload.TOKENS, megatron=("allgather",)),
    )
    ALL_TO_ALL = (
        "alltoall",
        DispatcherFacts(
            title="all-to-all",
            payload=Payload.ROWS,
            pads_rows=True,
            megatron=("alltoall",),
            torchtitan="standard",
        ),
    )
    DEDUP = (
        "dedup",
        DispatcherFacts(title="de-duplication", payload=Payload.COPIES, knows_nodes=True),
    )
    DEEPEP = (
        "deepep",
        DispatcherFacts(
            title="DeepEP",
            payload=Payload.COPIES,
            packages=("deep_ep",),
            home="github.com/deepseek-ai/DeepEP",
            gpu_networks=("nvlink", "xgmi", "ib", "roce"),
            proxy_networks=("efa",),
            registers=RegisteredMemory.RINGS,
            waits_for_counts=True,
            is_searched=True,
            megatron=("flex", "deepep"),
            torchtitan="deepep",
            is_in_bridge=True,
            no_bridge_devices="GB",
        ),
    )
    HYBRIDEP = (
        "hybridep",
        DispatcherFacts(
            title="HybridEP",
            payload=Payload.COPIES,
            packages=("deep_ep", "hybrid_ep_cpp"),
            home="github.com/deepseek-ai/DeepEP",
            gpu_networks=("nvlink", "nvl36", "nvl72", "ib", "roce"),
            registers=RegisteredMemory.EVERY_TOKEN,
            knows_nodes=True,
            pads_rows=True,
            has_static_shapes=True,
            brings_local_probs=True,
            is_searched=True,
            megatron=("flex", "hybridep"),
            torchtitan="hybridep",
            is_in_bridge=True,
        ),
    )
    NCCLEP = (
        "ncclep",
        # Bounds of its high-throughput kernels: its release notes, and a constant of its build.
        # How fast it is nobody has published: it is taken when asked for.
        DispatcherFacts(
            title="NCCL-EP",
            payload=Payload.COPIES,
            packages=("nccl", "nccl.core", "nccl.ep"),
            home="github.com/NVIDIA/nccl-extensions",
            gpu_networks=("nvlink", "ib", "roce"),
            max_ranks=64,
            max_tokens=8192,
            registers=RegisteredMemory.EVERY_TOKEN,
            frees_received_rows=True,
            megatron=("flex", "ncclep"),
        ),
    )

    @property
    def stand_in(self) -> DispatcherKind:
        """The dispatcher of the engine itself that sends the same."""
        return next(
            kind
            for kind in DispatcherKind
            if kind.facts.payload is self.facts.payload and not kind.facts.is_library
        )


class CapacityFill(StrEnum):
    """How many rows an expert with a capacity gets from a source rank."""

    USED = "used"  # the rows that chose it, up to the capacity
    PADDED = "padded"  # always as many as the capacity, so that all sizes are known beforehand


class ExpertPlacement(StrEnum):
    """How experts are assigned to expert-parallel ranks."""

    CONTIGUOUS = "contiguous"  # blocks by number
    # equally many on each rank, packed to even out the load that Workload.load_histogram counts
    BALANCED = "balanced"


class Recompute(StrEnum):
    """What is recomputed in backward; see docs/formulas.md 6.

    Most members are modules of a layer. FULL recomputes whole layers; LOSS recomputes the logits,
    of which only a block of columns exists at a time. FULL goes with no other member but LOSS.
    """

    FULL = "full"
    LAYERNORM = "layernorm"
    MOE_ACT = "moe_act"
    MOE = "moe"
    MLP = "mlp"
    CORE_ATTN = "core_attn"
    SHARED_EXPERTS = "shared_experts"
    MLA_UP_PROJ = "mla_up_proj"
    LOSS = "loss"


class Offload(StrEnum):
    """What is kept in host memory: the optimizer, or the saved activations of a module."""

    OPTIMIZER = "optimizer"
    ATTN_NORM = "attn_norm"
    QKV_LINEAR = "qkv_linear"
    CORE_ATTN = "core_attn"
    ATTN_PROJ = "attn_proj"
    MLP_NORM = "mlp_norm"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"


class Overlap(StrEnum):
    """The communication that runs beside compute."""

    GRAD = "grad"
    PARAM = "param"
    TP = "tp"
    P2P = "p2p"
    EP = "ep"
    WGRAD = "wgrad"  # with ep: weight gradients run after the work that would wait for them
    SHARED = "shared"  # shared experts run while dispatch and combine move rows


class CudaGraphScope(StrEnum):
    """The parts of a layer captured in CUDA graphs; FULL goes with no other member."""

    FULL = "full"
    ATTN = "attn"
    MAMBA = "mamba"  # layers that carry a state along the sequence
    MOE_ROUTER = "moe_router"
    MOE_PREPROCESS = "moe_preprocess"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The parallel degrees and the memory and overlap choices over `world_size` ranks.

    dp and edp follow from the other degrees. Sets are sorted tuples without repeats.
    """

    world_size: int
    tp: int = 1  # tensor-parallel degree
    sp: bool = False  # sequence parallelism; on by default where tp > 1
    cp: int = 1  # context-parallel degree
    pp: int = 1  # pipeline-parallel degree
    vpp: int = 1  # model chunks (virtual stages) on each pipeline rank
    ep: int = 1  # expert-parallel degree
    etp: int = 1  # expert tensor-parallel degree
    order: RankOrder = RankOrder.PP_LAST  # which ranks are neighbours
    mbs: int = 1  # sequences in a micro-batch
    # what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too
    zero: int = 1
    # ranks of dp x cp over which zero shards, the other ranks hold replicas; 0: all
    shard: int = 0
    schedule: Schedule = Schedule.ONE_F_ONE_B  # the pipeline timetable
    # micro-batches in a group of the interleaved timetable (0: pp), or between the chunks of one
    # micro-batch under gis (0: pp / 2, rounded up)
    vpp_group: int = 0
    cp_comm: CpComm = CpComm.P2P  # how context-parallel ranks exchange keys and values
    recompute: tuple[Recompute, ...] = ()  # modules whose activations backward computes again
    recompute_block: int = 0  # first layers of each chunk under full recompute; 0: all layers
    recompute_span: int = 1  # layers that one checkpoint of full recompute covers
    offload: tuple[Offload, ...] = ()  # what is kept in host memory
    offload_fraction: float = 1.0  # of the optimizer, where it is offloaded
    # the fraction of each chunk's layers, its first, whose activations are offloaded
    offload_layers: float = 1.0
    # the chunks of each rank, its first, whose activations are offloaded; 0: all
    offload_chunks: int = 0
    # how rows travel to the ranks of their experts
    dispatcher: DispatcherKind = DispatcherKind.ALL_TO_ALL
    # ranks of ep in one node, for dispatchers that send to a node before they send to a rank;
    # 0: all
    ep_node: int = 0
    expert_placement: ExpertPlacement = ExpertPlacement.CONTIGUOUS  # which rank holds which expert
    # expert replicas that a rank holds besides its own experts; with a balanced placement
    spare: int = 0
    capacity: float = 0.0  # 0: dropless
    # whether experts below capacity are padded to it
    capacity_fill: CapacityFill = CapacityFill.USED
    # rows that a rank sends to another, over the even number, to which they are padded; a step in
    # which some rank has more is run again with all rows. 0: as many as there are
    rank_capacity: float = 0.0
    overlap: tuple[Overlap, ...] = ()  # communication that runs beside compute
    graphs: tuple[CudaGraphScope, ...] = ()  # parts of a layer that CUDA graphs replay
    # pipeline layout string like "Et*3|(tt|)*29,m|L"; "": even split
    stages: StageString = EVEN_SPLIT

    def __str__(self) -> str:
        changed = (f"{name}={format_cell(value)}" for name, value in list_changed_fields(self))
        return "layout " + ", ".join(changed)

    @property
    def has_fixed_rows(self) -> bool:
        """Whether as many rows go to the experts of a rank whatever the router chooses."""
        return self.capacity_fill is CapacityFill.PADDED or self.rank_capacity > 0

    @property
    def dp(self) -> int:
        """Dense data-parallel degree, rounded down where the world does not divide.

        rules.limits.legality reports such a world.
        """
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert data-parallel degree, rounded down like `dp`."""
        return self.world_size // (self.etp * self.ep * self.pp)


DEFAULT_LAYOUT = Layout(world_size=1)
