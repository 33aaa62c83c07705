"""The layouts worth pricing, lazily: degrees and pipelines by divisors, and the choices that go
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from moewright.codec import explicit_fields, parse_layout
from moewright.cost.activations import ActivationPolicy
from moewright.rules.compatibility import check_compatibility
from moewright.rules.legality import check_legality, divisors
from moewright.rules.schedule import check_schedule
from moewright.rules.stages import EvenSplit, even_layout_string, parse_stages, vpp_choices
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import (
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Recompute,
    Schedule,
)
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import Workload

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
# Beyond these no published run has been, and the prices leave out what would decide: the many small
# kernels of a ring
# over short parts, the launches of every transfer between ever shorter chunks. A user may still ask
# for them.
MIN_CP_TOKENS = 4096  # a rank's part of a sequence
MAX_VPP = 24
MAX_EXPERT_TP = 8
MAX_UNEVEN_VPP = 4

_EXPERTS_AWAY = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_ATTENTION_AWAY = (Offload.ATTN_PROJ, Offload.CORE_ATTN)
_ACTIVATIONS = ((Offload.MOE_ACT,), _EXPERTS_AWAY, _ATTENTION_AWAY)

Objections = Callable[[Layout], tuple[Reason, ...]]


def no_objections(_: Layout) -> tuple[Reason, ...]:
    """The predicate that allows every layout."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """A pipeline shape: stages, virtual stages, and the layout string when there is one."""

    pp: int
    vpp: int
    stages: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineShapes:
    """Pipelines that go together; one object for each such set, which stands for it in tables."""

    shapes: tuple[PipelineShape, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeGroup:
    """Candidates that cut a layer alike and take the same micro-batch. `layout` has no pipeline and
    no choices.
    """

    layout: Layout
    pipelines: PipelineShapes


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePolicy:
    """How the states are held."""

    zero: int
    offload: tuple[Offload, ...]

    def is_searched_on(self, pipe: PipelineShape, space: SearchSpace) -> bool:
        """Whether it is searched on that pipeline."""
        return self.zero < 3 or pipe.pp == 1 or "zero" in space.fixed


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What is searched: `base` holds what the user fixed and the defaults of the rest; `fixed`
    names the former; `allowed` gives the reasons against a layout that is legal but cannot be run.
    """

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    base: Layout
    fixed: frozenset[str]
    allowed: Objections = no_objections

    def permits(self, **fields: Any) -> bool:
        """Whether nothing speaks against these values of themselves, whatever else a layout
        holds.
        """
        if self.allowed is no_objections:
            return True
        reasons = self.allowed(Layout(world_size=self.hardware.count, **fields))
        names = {"layout" if name == "stages" else name for name in fields}
        return not any(reason.field.removeprefix("layout.") in names for reason in reasons)


def build_search_space(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    fixed: str,
    *,
    allowed: Objections = no_objections,
) -> SearchSpace:
    """The space around `fixed`, layout text whose keys are pinned. Raises BadInput when the text is
    wrong.
    """
    return SearchSpace(
        allowed=allowed,
        model=model,
        workload=workload,
        hardware=hardware,
        base=parse_layout(fixed, world_size=hardware.count),
        fixed=explicit_fields(fixed),
    )


def degree_groups(space: SearchSpace) -> Iterator[DegreeGroup]:
    """Every group with a legal pipeline. The last word on a layout is rules.legality's."""
    world, batch = space.hardware.count, space.workload.global_batch
    pipes = tuple(_pipes(space))
    known: dict[tuple[PipelineShape, ...], PipelineShapes] = {}
    for tp in _axis(space, "tp", _tensor(space)):
        sp = space.base.sp if "sp" in space.fixed else tp > 1
        for cp in _axis(space, "cp", _context(space, tp)):
            for etp in _axis(space, "etp", _expert_tensor(space)):
                for ep in _axis(space, "ep", _experts(space)):
                    fitting = [p for p in pipes if _fits(world, p.pp, tp * cp, etp * ep)]
                    for mbs in _axis(space, "mbs", MICRO_BATCH_SIZES):
                        cut = replace(space.base, tp=tp, sp=sp, cp=cp, etp=etp, ep=ep, mbs=mbs)
                        kept = tuple(
                            p
                            for p in fitting
                            if _schedules(space, p, batch, mbs * world // (tp * cp * p.pp))
                        )
                        if kept:
                            yield DegreeGroup(
                                layout=cut,
                                pipelines=known.setdefault(kept, PipelineShapes(shapes=kept)),
                            )


def activation_policies(space: SearchSpace) -> tuple[ActivationPolicy, ...]:
    """What a layer may keep, send to the host and replay, none first. Each takes the widest graphs
    that its recompute leaves legal.
    """
    base = space.base
    recomputes = [base.recompute]
    if "recompute" not in space.fixed:
        recomputes = [one for one in _recomputes(space.model) if space.permits(recompute=one)]
    found = []
    for recompute in recomputes:
        graphs = base.graphs if "graphs" in space.fixed else _widest_graphs(space, recompute)
        found += [
            ActivationPolicy(recompute=recompute, offload=away, graphs=graphs)
            for away in _sent_away(space, recompute)
        ]
    return tuple(found)


def _sent_away(
    space: SearchSpace, recompute: tuple[Recompute, ...]
) -> Iterator[tuple[Offload, ...]]:
    """Activations on the host: none, or of the largest that the recompute leaves, of experts or of
    attention.
    """
    if "offload" in space.fixed:
        yield tuple(item for item in space.base.offload if item is not Offload.OPTIMIZER)
        return
    yield ()
    if space.hardware.device.kind is not DeviceKind.CUDA:
        return
    for away in _ACTIVATIONS:
        one = Layout(world_size=1, recompute=recompute, offload=away)
        reasons = check_compatibility(space.model, space.workload, one)
        if space.permits(offload=away) and not any(
            reason.field == "layout.offload" for reason in reasons
        ):
            yield away


def _widest_graphs(
    space: SearchSpace, recompute: tuple[Recompute, ...]
) -> tuple[CudaGraphScope, ...]:
    """Graphs take host time away and cost nothing that is priced. Those of a whole iteration need a
    fixed number of rows an expert, which changes what is trained: only when asked for.
    """
    if space.hardware.device.kind is not DeviceKind.CUDA:
        return ()
    for graphs in ((CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER), (CudaGraphScope.ATTN,)):
        one = Layout(world_size=1, recompute=recompute, graphs=graphs)
        reasons = check_compatibility(space.model, space.workload, one)
        if space.permits(graphs=graphs) and not any(
            reason.field == "layout.graphs" for reason in reasons
        ):
            return graphs
    return ()


def state_policies(space: SearchSpace) -> tuple[StatePolicy, ...]:
    """Ways to hold the states, the usual one first. zero=0 is never smaller nor faster than zero=1
    (it reduces the same bytes in two rounds and updates every parameter on every rank), so it is
    taken only when asked for; so is zero=3 in a pipeline, which gathers every stage anew for every
    micro-batch (`Keep.suits`).
    """
    away, pinned = (Offload.OPTIMIZER,), "offload" in space.fixed
    levels = (
        [space.base.zero]
        if "zero" in space.fixed
        else [zero for zero in (1, 3) if space.permits(zero=zero)]
    )
    if space.base.shard:  # goes with zero=3 alone
        levels = [zero for zero in levels if zero == 3]
    found = [
        StatePolicy(zero=zero, offload=away if away[0] in space.base.offload else ())
        for zero in levels
    ]
    if (
        not pinned
        and 1 in levels
        and space.hardware.device.kind is DeviceKind.CUDA
        and space.permits(offload=away)
    ):
        found.append(StatePolicy(zero=1, offload=away))
    return tuple(found)


def dispatcher_choices(space: SearchSpace, cut: Layout) -> tuple[DispatcherKind, ...]:
    """The plain all-to-all, and the fastest that removes duplicates. An all-gather holds the tokens
    of the whole group, which memory does not price: only when asked for.
    """
    if "dispatcher" in space.fixed:
        return (space.base.dispatcher,)
    if cut.ep == 1 or space.hardware.device.kind is not DeviceKind.CUDA:
        return (DispatcherKind.ALL_TO_ALL,)
    return tuple(
        each
        for each in (DispatcherKind.ALL_TO_ALL, DispatcherKind.DEEPEP)
        if space.permits(dispatcher=each)
    )


def cp_comm_choices(space: SearchSpace, cut: Layout) -> tuple[CpComm, ...]:
    """The legal ways to exchange keys and values."""
    if "cp_comm" in space.fixed or cut.cp == 1:
        return (space.base.cp_comm,)
    legal = [
        way
        for way in CpComm
        if space.permits(cp_comm=way)
        and not any(
            reason.field == "layout.cp_comm"
            for reason in check_compatibility(
                space.model, space.workload, replace(cut, cp_comm=way)
            )
        )
    ]
    return tuple(legal)


def with_pipeline(layout: Layout, pipe: PipelineShape, space: SearchSpace) -> Layout:
    """The layout on a pipeline, with the schedule that goes with it unless one is fixed."""
    schedule = Schedule.INTERLEAVED if pipe.vpp > 1 else Schedule.ONE_F_ONE_B
    if "schedule" in space.fixed:
        schedule = space.base.schedule
    return replace(layout, pp=pipe.pp, vpp=pipe.vpp, stages=pipe.stages, schedule=schedule)


def _axis(space: SearchSpace, field: str, found: Iterable[int]) -> tuple[int, ...]:
    return (getattr(space.base, field),) if field in space.fixed else tuple(found)


def _tensor(space: SearchSpace) -> Iterator[int]:
    """Tensor parallelism stays inside the fast domain, and cuts every dim of the model."""
    world = space.hardware.count
    for tp in divisors(world):
        if tp <= space.hardware.fabric.domain_size:
            alone = replace(Layout(world_size=world), tp=tp, sp=tp > 1)
            reasons = check_legality(space.model, space.workload, alone)
            if not any(reason.field == "layout.tp" for reason in reasons):
                yield tp


def _context(space: SearchSpace, tp: int) -> Iterator[int]:
    seq_len = space.workload.seq_len
    for cp in divisors(space.hardware.count):
        if cp == 1 or (
            cp * MIN_CP_TOKENS <= seq_len and seq_len % (2 * cp) == 0 and seq_len % (tp * cp) == 0
        ):
            yield cp


def _experts(space: SearchSpace) -> tuple[int, ...]:
    moe, world = space.model.moe, space.hardware.count
    return (1,) if moe is None else tuple(ep for ep in divisors(moe.experts) if world % ep == 0)


def _expert_tensor(space: SearchSpace) -> tuple[int, ...]:
    moe, most = space.model.moe, min(MAX_EXPERT_TP, space.hardware.fabric.domain_size)
    return (1,) if moe is None else tuple(etp for etp in divisors(moe.ffn_size) if etp <= most)


def _pipes(space: SearchSpace) -> Iterator[PipelineShape]:
    """Every split that comes out even, and layout strings whose ends hold more or fewer layers than
    the middle.
    """
    world, model, base = space.hardware.count, space.model, space.base
    string_stages = len(parse_stages(base.stages)) if base.stages else 0
    for pp in _axis(space, "pp", divisors(world)):
        if string_stages:
            found = {(string_stages // pp, base.stages)} if string_stages % pp == 0 else set()
        else:
            found = {
                (v, "") for split in EvenSplit for v in vpp_choices(model.layers, pp, split=split)
            }
            found = {(v, text) for v, text in found if v <= MAX_VPP or "vpp" in space.fixed}
            found |= set() if "stages" in space.fixed else set(_uneven(model, pp))
        for vpp, text in sorted(found):
            pipe = PipelineShape(pp=pp, vpp=vpp, stages=text)
            if ("vpp" not in space.fixed or vpp == base.vpp) and _permitted(space, pipe):
                yield pipe


def _permitted(space: SearchSpace, pipe: PipelineShape) -> bool:
    layout = with_pipeline(space.base, pipe, space)
    return space.permits(pp=pipe.pp, vpp=pipe.vpp, stages=pipe.stages, schedule=layout.schedule)


def _uneven(model: ModelSpec, pp: int) -> Iterator[tuple[int, str]]:
    """(vpp, layout string) where embedding and head count as none, one or two layers. A head that
    counts two leaves the last stage fewer layers; an embedding that counts none, or less where the
    first layers are dense, gives the first stage more. MTP layers may stand in a stage of their
    own.
    """
    if pp == 1:
        return
    first = (1, 0) if model.moe is None or model.moe_layers[0] else (1, -1)
    for vpp in range(1, MAX_UNEVEN_VPP + 1):
        stages = pp * vpp
        if stages > model.layers + 2:
            return
        ends = [(1, False), (2, False), *([(1, True)] if model.mtp_layers and pp > 2 else [])]
        for embedding, (loss, apart) in product(first, ends):
            counted = model.layers + embedding + loss
            if model.mtp_layers or counted % stages or (embedding, loss) != (1, 1):
                text = even_layout_string(
                    model.layers,
                    mtp=model.mtp_layers,
                    stages=stages,
                    embedding=embedding,
                    loss=loss,
                    mtp_apart=apart,
                )
                yield vpp, text


def _fits(world: int, pp: int, dense: int, expert: int) -> bool:
    return world % (pp * dense) == 0 and world % (pp * expert) == 0


def _schedules(space: SearchSpace, pipe: PipelineShape, batch: int, of_pass: int) -> bool:
    """Whether the batch divides into whole micro-batches, and there is a timetable for so many."""
    if not of_pass or batch % of_pass:
        return False
    if not space.fixed.isdisjoint(("schedule", "vpp_group")):
        return not check_schedule(with_pipeline(space.base, pipe, space), batch // of_pass)
    # An interleaved table in groups of pp, the default.
    return pipe.vpp == 1 or batch // of_pass % pipe.pp == 0


def _recomputes(model: ModelSpec) -> list[tuple[Recompute, ...]]:
    """Norms, the up-projections of latent attention, and ever more of the MLP; last the whole
    layer. Attention is not made again alone: flash attention keeps next to nothing.
    """
    has_experts = model.moe is not None and any(model.moe_layers)
    blocks: list[set[Recompute]] = [set()]
    if has_experts:
        blocks.append({Recompute.MOE_ACT})
        if model.moe is not None and model.moe.shared_ffn_size:
            blocks.append({Recompute.MOE_ACT, Recompute.SHARED_EXPERTS})
        blocks.append({Recompute.MOE})
    if not has_experts or not all(model.moe_layers):
        blocks.append({Recompute.MLP, *({Recompute.MOE} if has_experts else ())})
    norms: list[set[Recompute]] = [set(), {Recompute.LAYERNORM}]
    ups: list[set[Recompute]] = (
        [set(), {Recompute.MLA_UP_PROJ}] if model.attention.kind is AttentionKind.MLA else [set()]
    )
    found = [block | norm | up for block in blocks for up in ups for norm in norms]
    return [tuple(sorted(one)) for one in (*found, {Recompute.FULL})]
