"""The layouts worth pricing: groups of degrees and pipelines, and the policies for each group.

Degrees and pipelines follow from divisors; groups are yielded lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product
from typing import Any

from moewright.codec import explicit_fields, parse_layout
from moewright.codec.layout_text import FIELD_OF_KEY
from moewright.cost.memory.activations import ActivationPolicy
from moewright.cost.time.collective_time import group_span
from moewright.rules.batch_rampup import deciding_batches
from moewright.rules.job import Job
from moewright.rules.limits.compatibility import check_compatibility
from moewright.rules.limits.divisibility import divisors
from moewright.rules.limits.legality import check_legality
from moewright.rules.routing import runs_on
from moewright.rules.timetable.schedule import check_schedule
from moewright.rules.timetable.stages import (
    EvenSplit,
    even_layout_string,
    vpp_choices,
)
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Recompute,
    Schedule,
    plain_schedule,
)
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.record import copy_with
from moewright.spec.stage_string import StageString, parse_stages
from moewright.spec.workload import Workload

# No published run lies beyond these limits (find_unsearched, asked of every row in
# tests/published/test_searched_layouts.py), and the prices leave out what would decide there: the
# many small kernels of a ring over short parts, the launches of each transfer between ever shorter
# chunks. A user may still ask for such a layout.
MIN_CP_TOKENS = 4096  # a rank's part of a sequence
MAX_VPP = 24
UNEVEN_VPP = (1, 2, 3, 4, 8)  # virtual stages of an uneven split
_MANY_VPP = 4  # from more virtual stages on, only the splits that trainers' recipes have are tried
# Besides powers of two, those that batches have which three divides.
MICRO_BATCHES = tuple(sorted({*FIELD_OF_KEY["mbs"].facts.tried, 3, 6, 12}))

_OFFLOADED_EXPERTS = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_OFFLOADED_ATTENTION = (Offload.ATTN_PROJ, Offload.CORE_ATTN)
_SEARCHED_LIBRARIES = tuple(kind for kind in DispatcherKind if kind.facts.is_searched)
_OFFLOADED_ACTIVATIONS = ((Offload.MOE_ACT,), _OFFLOADED_EXPERTS, _OFFLOADED_ATTENTION)

Objections = Callable[[Layout], tuple[Reason, ...]]


def no_objections(_: Layout) -> tuple[Reason, ...]:
    """Object to no layout."""
    return ()


def layout_objections(
    model: ModelSpec, workload: Workload, refuse: Callable[[Job], tuple[Reason, ...]]
) -> Objections:
    """Return what a trainer's refusals say against layouts of one model and workload."""
    return lambda layout: refuse(Job(model=model, workload=workload, layout=layout))


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """A pipeline shape: stages, virtual stages, and the layout string when there is one."""

    pp: int
    vpp: int
    stages: StageString


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineShapes:
    """The pipelines of a group.

    Equal sets share one object, whose identity is the key of caches.
    """

    shapes: tuple[PipelineShape, ...]

    @cached_property
    def members(self) -> frozenset[PipelineShape]:
        """The pipelines as a set."""
        return frozenset(self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeGroup:
    """Candidates with the same tp, cp, ep, etp and micro-batch size.

    `layout` has these degrees and the base's other choices, without a pipeline; `pipelines` are
    those that a candidate may run on.
    """

    layout: Layout
    pipelines: PipelineShapes


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePolicy:
    """A choice for the model states: a level of ZeRO, and whether the optimizer is offloaded."""

    zero: int
    offload: tuple[Offload, ...]

    def is_searched_on(self, shape: PipelineShape, space: SearchSpace) -> bool:
        """Return whether the policy is searched on that pipeline."""
        if self.zero < 3 or shape.pp == 1 or "zero" in space.fixed or space.combines_savings:
            return True
        return not space.permits(zero=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """The space of layouts that is searched for a job on some hardware.

    `base` has the user's values in the fields that `fixed` names, and defaults in the others.
    `allowed` returns the reasons against a layout that is legal but cannot be run. With
    `combines_savings` what saves memory of model states is searched together and in pipelines,
    where each alone is faster wherever it fits.
    """

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    base: Layout
    fixed: frozenset[str]
    allowed: Objections = no_objections
    combines_savings: bool = False

    def job(self, layout: Layout) -> Job:
        """Return the job in a layout."""
        return Job(model=self.model, workload=self.workload, layout=layout)

    def permits(self, **fields: Any) -> bool:
        """Return whether `allowed` has no reason against these values of a layout's fields."""
        if self.allowed is no_objections:
            return True
        reasons = self.allowed(Layout(world_size=self.hardware.count, **fields))
        names = {*fields, *(["layout"] if "stages" in fields else ())}
        return not any(reason.field.removeprefix("layout.") in names for reason in reasons)


def build_search_space(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    fixed: str,
    *,
    allowed: Objections = no_objections,
) -> SearchSpace:
    """Build the space around `fixed`, layout text whose keys are pinned.

    Raises:
        BadInput: The text is no layout.
    """
    if allowed is not no_objections:
        allowed = cache(allowed)  # a choice is asked about again beside every set of degrees
    return SearchSpace(
        allowed=allowed,
        model=model,
        workload=workload,
        hardware=hardware,
        base=parse_layout(fixed, world_size=hardware.count),
        fixed=explicit_fields(fixed),
    )


def degree_groups(space: SearchSpace) -> Iterator[DegreeGroup]:
    """Yield every group that has a pipeline.

    Ranks divide over the degrees of a group, and its batch over micro-batches; whether a layout of
    it is legal in full is for rules.limits.legality to say.
    """
    world = space.hardware.count
    # Pipelines that are alike in what decides whether a group may run on them are asked about once.
    shapes = tuple(list_pipelines(space))
    alike: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        alike.setdefault((shape.pp, min(shape.vpp, 2)), []).append(place)
    by_schedule = not space.fixed.isdisjoint(("schedule", "vpp_group"))
    classes = [[place] for place in range(len(shapes))] if by_schedule else list(alike.values())
    by_places: dict[tuple[int, ...], PipelineShapes] = {}
    batches = deciding_batches(space.workload)
    for cut in list_degrees(space):
        dense, expert = cut.tp * cut.cp, cut.etp * cut.ep
        fitting = [
            (shapes[places[0]], places)
            for places in classes
            if _fits(world, shapes[places[0]].pp, dense, expert)
        ]
        for mbs in _axis(space, "mbs", MICRO_BATCHES):
            kept = tuple(
                sorted(
                    chain.from_iterable(
                        places
                        for shape, places in fitting
                        if has_timetable(space, shape, mbs * world // (dense * shape.pp), batches)
                    )
                )
            )
            if kept:
                if kept not in by_places:
                    members = tuple(shapes[place] for place in kept)
                    by_places[kept] = PipelineShapes(shapes=members)
                yield DegreeGroup(layout=copy_with(cut, mbs=mbs), pipelines=by_places[kept])


def list_degrees(space: SearchSpace) -> Iterator[Layout]:
    """Yield the base with every combination of tp, cp, etp and ep."""
    for tp in _axis(space, "tp", _tensor_degrees(space)):
        sp = space.base.sp if "sp" in space.fixed else tp > 1
        for cp in _axis(space, "cp", _context_degrees(space, tp)):
            for etp in _axis(space, "etp", _expert_tensor_degrees(space)):
                for ep in _axis(space, "ep", _expert_degrees(space)):
                    yield copy_with(space.base, tp=tp, sp=sp, cp=cp, etp=etp, ep=ep)


def activation_policies(space: SearchSpace) -> tuple[ActivationPolicy, ...]:
    """Return the choices of recompute and offload of activations; the first does neither.

    Each policy takes the widest CUDA graphs that are legal with it; where the trainer captures none
    beside sharded weights, there is one more without. A field that the user fixed keeps its value.
    """
    base = space.base
    choices = [base.recompute]
    if "recompute" not in space.fixed:
        choices = [
            recompute
            for recompute in _recompute_choices(space.model)
            if space.permits(recompute=recompute)
        ]
    policies: list[ActivationPolicy] = []
    for recompute in choices:
        for offload in _offload_choices(space, recompute):
            graphs_choices: Iterable[tuple[CudaGraphScope, ...]] = (base.graphs,)
            if "graphs" not in space.fixed:
                graphs_choices = _graphs_choices(space, recompute, offload)
            policies += [
                ActivationPolicy(recompute=recompute, offload=offload, graphs=graphs)
                for graphs in graphs_choices
            ]
    return tuple(policies)


def _offload_choices(
    space: SearchSpace, recompute: tuple[Recompute, ...]
) -> Iterator[tuple[Offload, ...]]:
    """Yield sets of activations to offload: none, then large ones of the experts or of attention.

    A set whose activations the recompute drops already is left out.
    """
    if "offload" in space.fixed:
        yield tuple(item for item in space.base.offload if item is not Offload.OPTIMIZER)
        return
    yield ()
    if not space.hardware.device.kind.is_accelerator:
        return
    for offload in _OFFLOADED_ACTIVATIONS:
        layout = Layout(world_size=1, recompute=recompute, offload=offload)
        if space.permits(offload=offload) and _is_compatible(space, layout, "offload"):
            yield offload


def _is_compatible(space: SearchSpace, layout: Layout, field: str) -> bool:
    """Return whether nothing in a layout excludes its value of a field."""
    reasons = check_compatibility(space.job(layout))
    return not any(reason.field == f"layout.{field}" for reason in reasons)


def _graphs_choices(
    space: SearchSpace, recompute: tuple[Recompute, ...], offload: tuple[Offload, ...]
) -> Iterator[tuple[CudaGraphScope, ...]]:
    """Yield the widest legal CUDA graphs, and none where sharded weights are left without.

    Graphs of whole iterations come first, where a dispatcher of the space has static shapes.
    """
    if _captures_iterations(space, recompute, offload):
        yield (CudaGraphScope.FULL,)
    graphs = _widest_graphs(space, recompute, offload)
    yield graphs
    shards = "zero" not in space.fixed and space.permits(zero=3)
    if graphs and shards and not space.permits(zero=3, graphs=graphs):
        yield ()


def _widest_graphs(
    space: SearchSpace, recompute: tuple[Recompute, ...], offload: tuple[Offload, ...]
) -> tuple[CudaGraphScope, ...]:
    """Return the widest legal CUDA graphs of parts of layers.

    They save host time and cost nothing that is priced. On ROCm they are taken only when asked for:
    nobody published a run with any.
    """
    if space.hardware.device.kind is not DeviceKind.CUDA:
        return ()
    mixers = [CudaGraphScope.ATTN]
    if space.model.recurrent is not None:
        mixers.append(CudaGraphScope.MAMBA)
    choices: dict[str, Any] = {"recompute": recompute, "offload": offload}
    for field in ("schedule", "zero", "overlap", "cp_comm"):
        if field in space.fixed:
            choices[field] = getattr(space.base, field)
    for graphs in ((*mixers, CudaGraphScope.MOE_ROUTER), tuple(mixers)):
        layout = Layout(world_size=1, recompute=recompute, graphs=graphs)
        is_permitted = space.permits(**choices, graphs=graphs)
        if is_permitted and _is_compatible(space, layout, "graphs"):
            return graphs
    return ()


def _captures_iterations(
    space: SearchSpace, recompute: tuple[Recompute, ...], offload: tuple[Offload, ...]
) -> bool:
    """Return whether graphs of whole iterations are searched beside those of parts.

    They are where the library that moves tokens here pads them to a budget of each rank, or the
    user's rank_capacity does. A capacity that fixes the rows of an expert changes what is trained,
    and is taken only when asked for. All experts on each rank have fixed rows too: such layouts
    have memory to spare or none at all, so that they are searched without savings alone.
    """
    if space.hardware.device.kind is not DeviceKind.CUDA or space.model.moe is None:
        return False
    libraries = _list_libraries(space, domains=1)
    if "dispatcher" in space.fixed:
        libraries = [space.base.dispatcher]
    static = [library for library in libraries[:1] if library.facts.has_static_shapes]
    if not static and space.base.rank_capacity:
        static = [space.base.dispatcher]  # the user's, or the plain all-to-all, which pads rows
    if not (static or recompute or offload) and 1 in _axis(space, "ep", _expert_degrees(space)):
        static = [DEFAULT_LAYOUT.dispatcher]
    if not static:
        return False
    choices: dict[str, Any] = {
        "graphs": (CudaGraphScope.FULL,),
        "recompute": recompute,
        "offload": offload,
        "dispatcher": static[0],
        "rank_capacity": space.base.rank_capacity,
    }
    layout = Layout(world_size=1, **choices)
    is_permitted = space.permits(**choices)
    return is_permitted and _is_compatible(space, layout, "graphs")


def _list_libraries(space: SearchSpace, *, domains: int) -> list[DispatcherKind]:
    """List the libraries that move tokens over so many domains here, the one to take first."""
    fabric = space.hardware.fabric
    return [library for library in _SEARCHED_LIBRARIES if runs_on(fabric, library, domains=domains)]


def state_policies(space: SearchSpace) -> tuple[StatePolicy, ...]:
    """Return the choices for the model states, the usual one first.

    zero=0 is never smaller nor faster than zero=1 (it reduces the same bytes in two rounds and
    updates every parameter on every rank), so it is taken only when asked for. Unless the space
    combines what saves memory, so is zero=3 in a pipeline, which gathers every stage anew for every
    micro-batch (`StatePolicy.is_searched_on`), and beside an optimizer on the host.
    """
    on_host = (Offload.OPTIMIZER,)
    levels = [zero for zero in FIELD_OF_KEY["zero"].facts.tried if space.permits(zero=zero)]
    if "zero" in space.fixed:
        levels = [space.base.zero]
    if space.base.shard and "zero" not in space.fixed:  # searched with zero=3 alone
        levels = [zero for zero in levels if zero == 3]
    base_offload = on_host if Offload.OPTIMIZER in space.base.offload else ()
    policies = [StatePolicy(zero=zero, offload=base_offload) for zero in levels]
    may_offload = "offload" not in space.fixed and space.permits(offload=on_host)
    if may_offload and space.hardware.device.kind.is_accelerator:
        offloaded_levels = (1, 3) if space.combines_savings else (1,)
        policies += [
            StatePolicy(zero=zero, offload=on_host) for zero in offloaded_levels if zero in levels
        ]
    return tuple(policies)


def dispatcher_choices(space: SearchSpace, cut: Layout) -> tuple[DispatcherKind, ...]:
    """Return the plain all-to-all, and the dispatcher that removes duplicates on this fabric.

    That is DeepEP, or HybridEP where DeepEP does not run (GB200 and GB300), which is as fast and
    holds more memory; none where neither runs, as over PCIe or TCP, or on ROCm without a fork. An
    all-gather holds the tokens of the whole group, which memory does not price: it is taken only
    when asked for.
    """
    if "dispatcher" in space.fixed:
        return (space.base.dispatcher,)
    if cut.ep == 1 or space.hardware.device.kind is not DeviceKind.CUDA:
        return (DEFAULT_LAYOUT.dispatcher,)
    domains = group_span(cut, "ep", space.hardware.fabric.domain_size).domains
    libraries = _list_libraries(space, domains=domains)
    dispatchers = (DEFAULT_LAYOUT.dispatcher, *libraries[:1])
    if space.base.has_fixed_rows:
        padding = [kind for kind in dispatchers if kind.facts.pads_rows]
        dispatchers = tuple(padding) or dispatchers
    elif CudaGraphScope.FULL in space.base.graphs and not space.base.capacity:
        static = [kind for kind in dispatchers if kind.facts.has_static_shapes]
        dispatchers = tuple(static) or dispatchers
    return tuple(kind for kind in dispatchers if space.permits(dispatcher=kind))


def cp_comm_choices(space: SearchSpace, cut: Layout) -> tuple[CpComm, ...]:
    """Return the legal ways to exchange keys and values under context parallelism.

    No trainer has rings for sinks or sliding windows, nor a gather for sinks: these are taken where
    nothing else is legal.
    """
    if "cp_comm" in space.fixed or cut.cp == 1:
        return (space.base.cp_comm,)
    choices = tuple(
        cp_comm
        for cp_comm in CpComm
        if space.permits(cp_comm=cp_comm)
        and _is_compatible(space, replace(cut, cp_comm=cp_comm), "cp_comm")
    )
    attention = space.model.attention
    startable = tuple(CpComm)
    if attention.sinks:
        startable = (CpComm.A2A,)
    elif attention.sliding_window:
        startable = (CpComm.A2A, CpComm.ALL_GATHER)
    return tuple(cp_comm for cp_comm in choices if cp_comm in startable) or choices


def with_pipeline(layout: Layout, shape: PipelineShape, space: SearchSpace) -> Layout:
    """Return the layout on a pipeline, with the schedule that goes with it unless one is fixed."""
    schedule = plain_schedule(shape.vpp)
    if "schedule" in space.fixed:
        schedule = space.base.schedule
    return copy_with(layout, pp=shape.pp, vpp=shape.vpp, stages=shape.stages, schedule=schedule)


def without_policies(layout: Layout) -> Layout:
    """Return a layout of the degrees and overlaps alone of this one."""
    return copy_with(
        layout,
        pp=1,
        vpp=1,
        schedule=Schedule.ONE_F_ONE_B,
        zero=1,
        recompute=(),
        offload=(),
        graphs=(),
    )


def _axis(space: SearchSpace, field: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return the values of a field to search: the one that is fixed, or these."""
    if field in space.fixed:
        return (getattr(space.base, field),)
    return tuple(values)


def _tensor_degrees(space: SearchSpace) -> Iterator[int]:
    """Yield the tp sizes that stay inside the fast domain and divide every dimension."""
    world = space.hardware.count
    for tp in divisors(world):
        if tp <= space.hardware.fabric.domain_size:
            # Without other degrees, so that a reason that names tp is about the model's widths.
            alone = replace(Layout(world_size=world), tp=tp, sp=tp > 1)
            reasons = check_legality(space.job(alone))
            if not any(reason.field == "layout.tp" for reason in reasons):
                yield tp


def _context_degrees(space: SearchSpace, tp: int) -> Iterator[int]:
    """Yield the cp sizes that leave each rank a part long enough, and equal work."""
    seq_len = space.workload.seq_len
    for cp in divisors(space.hardware.count):
        is_long = cp * MIN_CP_TOKENS <= seq_len
        if cp == 1 or (is_long and seq_len % (2 * cp) == 0 and seq_len % (tp * cp) == 0):
            yield cp


def _expert_degrees(space: SearchSpace) -> tuple[int, ...]:
    if space.model.moe is None:
        return (1,)
    world = space.hardware.count
    return tuple(ep for ep in divisors(space.model.moe.experts) if world % ep == 0)


def _expert_tensor_degrees(space: SearchSpace) -> tuple[int, ...]:
    moe = space.model.moe
    if moe is None or moe.expert_bias:  # no trainer that is planned for cuts experts with biases
        return (1,)
    most = min(max(FIELD_OF_KEY["etp"].facts.tried), space.hardware.fabric.domain_size)
    return tuple(etp for etp in divisors(moe.ffn_size) if etp <= most)


def list_pipelines(space: SearchSpace) -> Iterator[PipelineShape]:
    """Yield every even split, and layout strings whose ends hold more or fewer layers."""
    base = space.base
    for pp in _axis(space, "pp", divisors(space.hardware.count)):
        # Sorted: the order of a set of strings differs from process to process.
        for vpp, stages in sorted(_splits(space, pp)):
            shape = PipelineShape(pp=pp, vpp=vpp, stages=stages)
            if ("vpp" not in space.fixed or vpp == base.vpp) and _is_permitted(space, shape):
                yield shape


def _splits(space: SearchSpace, pp: int) -> set[tuple[int, StageString]]:
    """Return (vpp, layout string) of every way to split the model over so many pipeline ranks."""
    model, base = space.model, space.base
    if base.stages:
        vpp, rest = divmod(len(parse_stages(base.stages)), pp)
        return set() if rest else {(vpp, base.stages)}
    splits = {
        (vpp, StageString(""))
        for split in EvenSplit
        for vpp in vpp_choices(model.layers, pp, split=split)
        if vpp <= MAX_VPP or "vpp" in space.fixed
    }
    if "stages" not in space.fixed:
        splits.update(_uneven_splits(model, pp))
    return splits


def _is_permitted(space: SearchSpace, shape: PipelineShape) -> bool:
    schedule = with_pipeline(space.base, shape, space).schedule
    return space.permits(pp=shape.pp, vpp=shape.vpp, stages=shape.stages, schedule=schedule)


def _uneven_splits(model: ModelSpec, pp: int) -> Iterator[tuple[int, StageString]]:
    """Yield (vpp, layout string) of splits that count embedding and head as layers.

    The head counts as one or two layers, which leaves the last stage fewer; or as many as are left
    over where the stages before have equally many, as recipes of DeepSeek-V3 have it. The embedding
    counts as one or none, which gives the first stage more; where the first layers are dense, as
    one or minus one; as two without virtual stages, whose first stage holds most micro-batches. MTP
    layers may stand in a stage of their own.
    """
    if pp == 1:
        return
    begins_dense = model.moe is not None and not model.moe_layers[0]
    embeddings = (1, -1) if begins_dense else (1, 0)
    for vpp in UNEVEN_VPP:
        stages = pp * vpp
        if stages > model.layers + 2:
            return
        ends = [(1, False), (2, False)]
        if model.mtp_layers and pp > 2 and vpp <= _MANY_VPP:
            ends.append((1, True))
        loads = list(product(embeddings if vpp <= _MANY_VPP else (1,), ends))
        left_over = -model.layers % stages - model.mtp_layers
        if left_over > 2:
            loads.append((1, (left_over, False)))
        if vpp == 1:
            loads += [(2, (1, False)), (2, (2, False))]
        for embedding, (loss, mtp_apart) in loads:
            is_even = (model.layers + embedding + loss) % stages == 0
            if model.mtp_layers or not is_even or (embedding, loss) != (1, 1):
                text = even_layout_string(
                    model.layers,
                    mtp=model.mtp_layers,
                    stages=stages,
                    embedding=embedding,
                    loss=loss,
                    mtp_apart=mtp_apart,
                )
                yield vpp, text


def _fits(world: int, pp: int, dense: int, expert: int) -> bool:
    return world % (pp * dense) == 0 and world % (pp * expert) == 0


def has_timetable(
    space: SearchSpace, shape: PipelineShape, pass_sequences: int, batches: Sequence[int]
) -> bool:
    """Return whether the batch divides into micro-batches, and their number has a timetable.

    `pass_sequences` are the sequences of one micro-batch over all data-parallel ranks, `batches`
    the batch sizes that decide.
    """
    if not pass_sequences or any(size % pass_sequences for size in batches):
        return False
    counts = [size // pass_sequences for size in batches]
    if not space.fixed.isdisjoint(("schedule", "vpp_group")):
        layout = with_pipeline(space.base, shape, space)
        return not any(check_schedule(layout, count) for count in counts)
    # The default interleaved timetable takes micro-batches in groups of pp.
    return shape.vpp == 1 or not any(count % shape.pp for count in counts)


def _recompute_choices(model: ModelSpec) -> list[tuple[Recompute, ...]]:
    """Return the choices of what to recompute, from nothing to the whole layer.

    They combine norms, the up-projections of latent attention (MLA), and more and more of the MLP;
    the dense MLPs of a model with experts may be recomputed alone.
    Core attention alone is no choice: flash attention keeps next to nothing.
    """
    has_experts = model.moe is not None and any(model.moe_layers)
    blocks: list[set[Recompute]] = [set()]
    if has_experts:
        blocks.append({Recompute.MOE_ACT})
        if model.moe is not None and model.moe.shared_ffn_size:
            blocks.append({Recompute.MOE_ACT, Recompute.SHARED_EXPERTS})
        blocks.append({Recompute.MOE})
    if not has_experts and model.dense_layer_count:
        blocks.append({Recompute.MLP})
    elif model.dense_layer_count:
        blocks.append({Recompute.MLP, Recompute.MOE})
    norms: list[set[Recompute]] = [set(), {Recompute.LAYERNORM}]
    ups: list[set[Recompute]] = [set()]
    if model.attention.kind is AttentionKind.MLA:
        ups.append({Recompute.MLA_UP_PROJ})
    choices = [block | norm | up for block in blocks for up in ups for norm in norms]
    if has_experts and model.dense_layer_count:
        choices += [
            {Recompute.MLP} | up for up in ups
        ]  # of the first stage, whose layers are dense
    return [tuple(sorted(choice)) for choice in (*choices, {Recompute.FULL})]
