"""Layout: all parallel, memory and overlap choices of a job, over a world of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from moewright.spec.choices import (
    FACTS,
    MAX_MICRO_BATCH,
    DescribedName,
    DispatcherFacts,
    FieldFacts,
    FieldGroup,
    FieldKind,
    NameFacts,
    Payload,
    RegisteredMemory,
    SetWord,
    list_fields,
)
from moewright.spec.record import Record, Row, format_cell, list_changed_fields
from moewright.spec.stage_string import EVEN_SPLIT, StageString
from moewright.spec.units import plural


class Schedule(DescribedName):
    """The pipeline schedules."""

    ONE_F_ONE_B = "1f1b", NameFacts(torchtitan="1F1B")
    INTERLEAVED = "interleaved", NameFacts(torchtitan="Interleaved1F1B")
    ZB_H1 = "zb-h1"
    ZBV = "zbv", NameFacts(torchtitan="ZBVZeroBubble")
    V_HALF = "v-half"
    V_MIN = "v-min"
    GIS = "gis"
    DUALPIPEV = "dualpipev", NameFacts(torchtitan="DualPipeV")

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


def plain_schedule(vpp: int) -> Schedule:
    """Return 1F1B, which is interleaved where a rank has several chunks."""
    return Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B


_V_SHAPED = (Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN, Schedule.DUALPIPEV)


class RankOrder(StrEnum):
    """The axes of both grids from the ones whose ranks are neighbours to the farthest apart."""

    PP_LAST = "tp-cp-ep-dp-pp"
    DP_LAST = "tp-cp-ep-pp-dp"  # replicas of a pipeline are blocks of consecutive ranks


class CpComm(DescribedName):
    """How attention exchanges keys, values and heads under context parallelism."""

    P2P = "p2p"
    # Transformer Engine's spelling, which Megatron-LM hands on; its own help has another.
    ALL_GATHER = "allgather", NameFacts(megatron="all_gather")
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
            gpu_networks=("nvlink", "nvl4", "nvl36", "nvl72", "ib", "roce"),
            registers=RegisteredMemory.EVERY_TOKEN,
            knows_nodes=True,
            pads_rows=True,
            has_static_shapes=True,
            brings_local_probs=True,
            permutes_rows=True,
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


class Overlap(DescribedName):
    """The communication that runs beside compute."""

    GRAD = "grad", NameFacts(megatron="--overlap-grad-reduce", column="overlap_grad_reduce")
    PARAM = "param", NameFacts(megatron="--overlap-param-gather", column="overlap_param_gather")
    TP = "tp", NameFacts(megatron="--tp-comm-overlap", column="tp_comm_overlap")
    P2P = "p2p"
    EP = (
        "ep",
        NameFacts(megatron="--overlap-moe-expert-parallel-comm", column="overlap_moe_ep_comm"),
    )
    # with ep: weight gradients run after the work that would wait for them
    WGRAD = "wgrad", NameFacts(megatron="--delay-wgrad-compute", column="delay_wgrad_compute")
    # shared experts run while dispatch and combine move rows
    SHARED = (
        "shared",
        NameFacts(megatron="--moe-shared-expert-overlap", column="moe_shared_expert_overlap"),
    )


class CudaGraphScope(StrEnum):
    """The parts of a layer captured in CUDA graphs; FULL goes with no other member."""

    FULL = "full"
    ATTN = "attn"
    MAMBA = "mamba"  # layers that carry a state along the sequence
    MOE_ROUTER = "moe_router"
    MOE_PREPROCESS = "moe_preprocess"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(Record):
    """The parallel degrees and the memory and overlap choices over `world_size` ranks.

    dp and edp follow from the other degrees. Sets are sorted tuples without repeats.
    """

    world_size: int
    # tensor-parallel degree
    tp: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                is_always_shown=True,
                megatron="--tensor-model-parallel-size",
                label="Tensor parallel",
            )
        },
    )
    # sequence parallelism; on by default where tp > 1
    sp: bool = field(
        default=False,
        metadata={FACTS: FieldFacts(group=FieldGroup.DEGREES, megatron="--sequence-parallel")},
    )
    # context-parallel degree
    cp: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                megatron="--context-parallel-size",
                label="Context parallel",
            )
        },
    )
    # pipeline-parallel degree
    pp: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                is_always_shown=True,
                megatron="--pipeline-model-parallel-size",
                label="Pipeline stages",
            )
        },
    )
    # model chunks (virtual stages) on each pipeline rank
    vpp: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                megatron="--num-virtual-stages-per-pipeline-rank",
                label="Virtual stages",
                tried=(1, 2, 3, 4),
            )
        },
    )
    # expert-parallel degree
    ep: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                is_always_shown=True,
                needs_experts=True,
                megatron="--expert-model-parallel-size",
                label="Expert parallel",
            )
        },
    )
    # expert tensor-parallel degree
    etp: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                needs_experts=True,
                megatron="--expert-tensor-parallel-size",
                label="Expert tensor",
                tried=(1, 2, 4, 8),
            )
        },
    )
    # which ranks are neighbours
    order: RankOrder = field(
        default=RankOrder.PP_LAST,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES, torchtitan_instead="puts pipeline stages farthest apart"
            )
        },
    )
    # sequences in a micro-batch
    mbs: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.DEGREES,
                least=1,
                most=MAX_MICRO_BATCH,
                is_always_shown=True,
                megatron="--micro-batch-size",
                label="Micro-batch",
                tried=(1, 2, 4, 8, 16),
            )
        },
    )
    # what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too
    zero: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY, levels=(0, 1, 2, 3), label="ZeRO", tried=(1, 3)
            )
        },
    )
    # ranks of dp x cp over which zero shards, the other ranks hold replicas; 0: all
    shard: int = field(default=0, metadata={FACTS: FieldFacts(group=FieldGroup.MEMORY)})
    # the pipeline timetable
    schedule: Schedule = field(
        default=Schedule.ONE_F_ONE_B,
        metadata={FACTS: FieldFacts(group=FieldGroup.PIPELINE, label="Schedule")},
    )
    # micro-batches in a group of the interleaved timetable (0: pp), or between the chunks of one
    # micro-batch under gis (0: pp / 2, rounded up)
    vpp_group: int = field(
        default=0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.PIPELINE,
                most=MAX_MICRO_BATCH,
                megatron="--microbatch-group-size-per-virtual-pipeline-stage",
                is_plain_option=True,
                torchtitan_instead="groups micro-batches by itself",
            )
        },
    )
    # how context-parallel ranks exchange keys and values
    cp_comm: CpComm = field(
        default=CpComm.P2P,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE,
                megatron="--cp-comm-type",
                label="Context exchange",
                tried=tuple(CpComm),
            )
        },
    )
    # modules whose activations backward computes again
    recompute: tuple[Recompute, ...] = field(
        default=(),
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                whole=Recompute.FULL,
                beside_whole=(Recompute.LOSS,),
                megatron="--recompute-modules",
                label="Recompute",
            )
        },
    )
    # first layers of each chunk under full recompute; 0: all layers
    recompute_block: int = field(
        default=0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                word=SetWord(field="recompute", word="block", member=Recompute.FULL),
                least=1,
            )
        },
    )
    # layers that one checkpoint of full recompute covers
    recompute_span: int = field(
        default=1,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                word=SetWord(field="recompute", word="uniform", member=Recompute.FULL),
                least=1,
            )
        },
    )
    # what is kept in host memory
    offload: tuple[Offload, ...] = field(
        default=(),
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                megatron="--offload-modules",
                torchtitan_instead="moves weights, gradients and states together",
                label="Offload",
            )
        },
    )
    # of the optimizer, where it is offloaded
    offload_fraction: float = field(
        default=1.0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                word=SetWord(field="offload", word="optimizer", member=Offload.OPTIMIZER),
                megatron="--optimizer-offload-fraction",
            )
        },
    )
    # the fraction of each chunk's layers, its first, whose activations are offloaded
    offload_layers: float = field(
        default=1.0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY,
                word=SetWord(field="offload", word="layers"),
                megatron="--activation-offload-fraction",
            )
        },
    )
    # the chunks of each rank, its first, whose activations are offloaded; 0: all
    offload_chunks: int = field(
        default=0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.MEMORY, word=SetWord(field="offload", word="chunks"), least=1
            )
        },
    )
    # how rows travel to the ranks of their experts
    dispatcher: DispatcherKind = field(
        default=DispatcherKind.ALL_TO_ALL,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE,
                needs_experts=True,
                megatron="--moe-token-dispatcher-type",
                label="Dispatcher",
                tried=tuple(DispatcherKind),
            )
        },
    )
    # ranks of ep in one node, for dispatchers that send to a node before they send to a rank;
    # 0: all
    ep_node: int = field(default=0, metadata={FACTS: FieldFacts(group=FieldGroup.EXCHANGE)})
    # which rank holds which expert
    expert_placement: ExpertPlacement = field(
        default=ExpertPlacement.CONTIGUOUS,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE,
                megatron_instead="holds experts in contiguous blocks",
                torchtitan_instead="keeps experts in blocks by number",
            )
        },
    )
    # expert replicas that a rank holds besides its own experts; with a balanced placement
    spare: int = field(default=0, metadata={FACTS: FieldFacts(group=FieldGroup.EXCHANGE)})
    # 0: dropless
    capacity: float = field(
        default=0.0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE,
                needs_experts=True,
                megatron="--moe-expert-capacity-factor",
                torchtitan_instead="drops no rows",
                is_priced=True,
            )
        },
    )
    # whether experts below capacity are padded to it
    capacity_fill: CapacityFill = field(
        default=CapacityFill.USED,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE, megatron="--moe-pad-expert-input-to-capacity"
            )
        },
    )
    # rows that a rank sends to another, over the even number, to which they are padded; a step in
    # which some rank has more is run again with all rows. 0: as many as there are
    rank_capacity: float = field(
        default=0.0,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.EXCHANGE,
                needs_experts=True,
                megatron="--moe-expert-rank-capacity-factor",
                torchtitan_instead="sends as many rows as there are",
                is_priced=True,
            )
        },
    )
    # communication that runs beside compute
    overlap: tuple[Overlap, ...] = field(
        default=(), metadata={FACTS: FieldFacts(group=FieldGroup.KERNELS, label="Overlap")}
    )
    # parts of a layer that CUDA graphs replay
    graphs: tuple[CudaGraphScope, ...] = field(
        default=(),
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.KERNELS,
                whole=CudaGraphScope.FULL,
                megatron="--cuda-graph-modules",
                torchtitan_instead="export captures no graphs",
            )
        },
    )
    # pipeline layout string like "Et*3|(tt|)*29,m|L"; "": even split
    stages: StageString = field(
        default=EVEN_SPLIT,
        metadata={
            FACTS: FieldFacts(
                group=FieldGroup.PIPELINE, key="layout", megatron="--pipeline-model-parallel-layout"
            )
        },
    )

    def __str__(self) -> str:
        changed = (f"{name}={format_cell(value)}" for name, value in list_changed_fields(self))
        return "layout " + ", ".join(changed)

    def __repr__(self) -> str:
        changed = (f"{name}={format_cell(value)}" for name, value in list_changed_fields(self))
        return f"Layout({', '.join(changed)})"

    def title(self) -> str:
        """Return over how many ranks it is."""
        return f"layout over {plural(self.world_size, 'rank')}"

    def to_rows(self) -> list[Row]:
        """Return a row for each choice that is not the default."""
        names = {field.name: field for field in LAYOUT_FIELDS}
        return [
            {"key": names[name].key or name, "value": value}
            for name, value in list_changed_fields(self)
            if name in names
        ]

    @property
    def has_fixed_rows(self) -> bool:
        """Whether as many rows go to the experts of a rank whatever the router chooses."""
        return self.capacity_fill is CapacityFill.PADDED or self.rank_capacity > 0

    @property
    def sp_degree(self) -> int:
        """Over how many ranks sequence parallelism splits the tokens of a TP group."""
        return self.tp if self.sp else 1

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
LAYOUT_FIELDS = list_fields(Layout)
# The degrees and the micro-batch: the numbers that layout text begins with.
DEGREES = tuple(
    field.name
    for field in LAYOUT_FIELDS
    if field.facts.group is FieldGroup.DEGREES and field.kind is FieldKind.NUMBER
)
