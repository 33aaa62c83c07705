"""Layout: all parallel, memory and overlap choices of a job, over a world of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    @property
    def is_v_shaped(self) -> bool:
        """Whether the second of two chunks a rank lies on the way back, so that the first rank
        holds both ends."""
        return self in (Schedule.ZBV, Schedule.DUALPIPEV)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have rows of their own."""
        return self in (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPEV)


class CpComm(StrEnum):
    P2P = "p2p"
    ALL_GATHER = "allgather"
    A2A = "a2a"
    A2A_P2P = "a2a+p2p"


class DispatcherKind(StrEnum):
    ALL_GATHER = "allgather"
    ALL_TO_ALL = "alltoall"
    DEDUP = "dedup"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"


class CapacityFill(StrEnum):
    """What an expert with a capacity gets from a source."""

    USED = "used"  # the rows that chose it, as far as there is room
    PADDED = "padded"  # as many rows as there is room for, so that all sizes are known beforehand


class ExpertPlacement(StrEnum):
    """Which expert-parallel rank holds which expert."""

    CONTIGUOUS = "contiguous"  # blocks by number
    # equally many a rank, packed to even the load that Workload.load_histogram counts
    BALANCED = "balanced"


class Recompute(StrEnum):
    """What is made again in backward: modules of a layer, FULL for layers whole, or LOSS, the
    logits, of which no more than a piece is ever there. FULL stands alone, or beside LOSS. See
    docs/formulas.md 6.
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
    OPTIMIZER = "optimizer"
    ATTN_NORM = "attn_norm"
    QKV_LINEAR = "qkv_linear"
    CORE_ATTN = "core_attn"
    ATTN_PROJ = "attn_proj"
    MLP_NORM = "mlp_norm"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"


class Overlap(StrEnum):
    GRAD = "grad"
    PARAM = "param"
    TP = "tp"
    P2P = "p2p"
    EP = "ep"
    WGRAD = "wgrad"  # with ep: weight gradients after what would wait for them
    SHARED = "shared"  # shared experts run while dispatch and combine move rows


class CudaGraphScope(StrEnum):
    """Parts of a layer captured in CUDA graphs; FULL stands alone."""

    FULL = "full"
    ATTN = "attn"
    MOE_ROUTER = "moe_router"
    MOE_PREPROCESS = "moe_preprocess"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees over `world_size` ranks; dp and edp are what is left. Sets are sorted tuples without
    repeats."""

    world_size: int
    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    mbs: int = 1
    zero: int = 1
    shard: int = 0  # ranks of dp x cp that zero=3 cuts over, the rest hold copies; 0: all
    schedule: Schedule = Schedule.ONE_F_ONE_B
    vpp_group: int = 0  # micro-batches a group of the interleaved table; 0: pp
    cp_comm: CpComm = CpComm.P2P
    recompute: tuple[Recompute, ...] = ()
    recompute_block: int = 0  # full recompute of so many first layers of each chunk; 0: of all
    recompute_span: int = 1  # layers that one checkpoint of full recompute covers
    offload: tuple[Offload, ...] = ()
    offload_fraction: float = 1.0  # of the optimizer, where it is offloaded
    dispatcher: DispatcherKind = DispatcherKind.ALL_TO_ALL
    # ranks of ep in one node, for dispatchers that cross to a node before they cross to a rank; 0:
    # all
    ep_node: int = 0
    expert_placement: ExpertPlacement = ExpertPlacement.CONTIGUOUS
    # experts that a rank holds beside its own, for replicas of hot ones; with a balanced placement
    spare: int = 0
    capacity: float = 0.0  # 0: dropless
    capacity_fill: CapacityFill = CapacityFill.USED
    overlap: tuple[Overlap, ...] = ()
    graphs: tuple[CudaGraphScope, ...] = ()
    stages: str = ""  # pipeline layout string, e.g. "Et*3|(tt|)*29,m|L"; "": even split

    @property
    def dp(self) -> int:
        """Dense data-parallel degree (rounded down when the world does not divide; legality reports
        that)."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert data-parallel degree (same remark)."""
        return self.world_size // (self.etp * self.ep * self.pp)
