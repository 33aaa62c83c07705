"""The layouts worth pricing: every legal combination of degrees, micro-batch, recompute and dispatcher, by divisors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from moewright.codec import given_fields, parse_layout
from moewright.rules.legality import divisors, illegal
from moewright.rules.stages import Split, layout_string, parse_stages, vpp_choices
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import Dispatcher, Layout, Overlap, Recompute, Schedule
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import Workload

MICRO_BATCHES = (1, 2, 4, 8, 16)
MIN_CP_TOKENS = 2048  # a rank's part of a sequence; below it context parallelism only costs
MAX_EXPERT_TP = 8
MAX_UNEVEN_VPP = 4

Allowed = Callable[[Layout], tuple[Reason, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipe:
    """A pipeline shape: stages, virtual stages, and the layout string when there is one."""

    pp: int
    vpp: int
    stages: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Candidates that cut a layer alike: pipeline, recompute and dispatcher differ. `layout` has no pipeline."""

    layout: Layout
    pipes: tuple[Pipe, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What is searched: `base` holds what the user fixed and the defaults of the rest; `fixed` names the former."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    base: Layout
    fixed: frozenset[str]


def space_of(model: ModelSpec, workload: Workload, hardware: Hardware, fixed: str) -> Space:
    """The space around `fixed`, layout text whose keys are pinned. Raises BadInput when the text is wrong."""
    return Space(
        model=model,
        workload=workload,
        hardware=hardware,
        base=parse_layout(fixed, world_size=hardware.count),
        fixed=given_fields(fixed),
    )


def groups(space: Space) -> Iterator[Group]:
    """Every group with a legal pipeline. The last word on a layout is rules.legality's."""
    world, batch = space.hardware.count, space.workload.global_batch
    pipes = tuple(_pipes(space))
    for tp in _axis(space, "tp", _tensor(space)):
        sp = space.base.sp if "sp" in space.fixed else tp > 1
        for cp in _axis(space, "cp", _context(space, tp)):
            for etp in _axis(space, "etp", _expert_tensor(space)):
                for ep in _axis(space, "ep", _experts(space)):
                    fitting = [p for p in pipes if _fits(world, p.pp, tp * cp, etp * ep)]
                    for mbs in _axis(space, "mbs", MICRO_BATCHES):
                        cut = replace(space.base, tp=tp, sp=sp, cp=cp, etp=etp, ep=ep, mbs=mbs)
                        kept = tuple(p for p in fitting if _schedules(p, batch, mbs * world // (tp * cp * p.pp)))
                        if kept:
                            yield Group(layout=cut, pipes=kept)


def choices(space: Space, cut: Layout) -> Iterator[tuple[Layout, ...]]:
    """The choices of a group: for every dispatcher, the recompute sets from the fastest to the smallest."""
    recomputes = [space.base.recompute] if "recompute" in space.fixed else _recomputes(space.model)
    if Overlap.EP in cut.overlap:
        recomputes = [one for one in recomputes if {Recompute.FULL, Recompute.MOE}.isdisjoint(one)]
    dispatchers = [space.base.dispatcher]
    if "dispatcher" not in space.fixed and cut.ep > 1 and space.hardware.device.kind is DeviceKind.CUDA:
        dispatchers.append(Dispatcher.DEEPEP)
    for dispatcher in dispatchers:
        yield tuple(replace(cut, recompute=recompute, dispatcher=dispatcher) for recompute in recomputes)


def with_pipe(layout: Layout, pipe: Pipe, space: Space) -> Layout:
    """The layout on a pipeline, with the schedule that goes with it unless one is fixed."""
    schedule = Schedule.INTERLEAVED if pipe.vpp > 1 else Schedule.ONE_F_ONE_B
    if "schedule" in space.fixed:
        schedule = space.base.schedule
    return replace(layout, pp=pipe.pp, vpp=pipe.vpp, stages=pipe.stages, schedule=schedule)


def _axis(space: Space, field: str, found: Iterable[int]) -> tuple[int, ...]:
    return (getattr(space.base, field),) if field in space.fixed else tuple(found)


def _tensor(space: Space) -> Iterator[int]:
    """Tensor parallelism stays inside the fast domain, and cuts every dim of the model."""
    world = space.hardware.count
    for tp in divisors(world):
        if tp <= space.hardware.fabric.domain_size:
            alone = replace(Layout(world_size=world), tp=tp, sp=tp > 1)
            reasons = illegal(space.model, space.workload, alone)
            if not any(reason.field == "layout.tp" for reason in reasons):
                yield tp


def _context(space: Space, tp: int) -> Iterator[int]:
    seq_len = space.workload.seq_len
    for cp in divisors(space.hardware.count):
        if cp == 1 or (cp * MIN_CP_TOKENS <= seq_len and seq_len % (2 * cp) == 0 and seq_len % (tp * cp) == 0):
            yield cp


def _experts(space: Space) -> tuple[int, ...]:
    moe, world = space.model.moe, space.hardware.count
    return (1,) if moe is None else tuple(ep for ep in divisors(moe.experts) if world % ep == 0)


def _expert_tensor(space: Space) -> tuple[int, ...]:
    moe, most = space.model.moe, min(MAX_EXPERT_TP, space.hardware.fabric.domain_size)
    return (1,) if moe is None else tuple(etp for etp in divisors(moe.ffn_size) if etp <= most)


def _pipes(space: Space) -> Iterator[Pipe]:
    """Every split that comes out even; where none does, layout strings that spread the layers as evenly as they go."""
    world, model, base = space.hardware.count, space.model, space.base
    string_stages = len(parse_stages(base.stages)) if base.stages else 0
    for pp in _axis(space, "pp", divisors(world)):
        found = {(v, base.stages) for split in Split for v in vpp_choices(model.layers, pp, split=split)}
        if string_stages:
            found = {(string_stages // pp, base.stages)} if string_stages % pp == 0 else set()
        elif not found:
            most = min(MAX_UNEVEN_VPP, (model.layers + 2) // pp)
            found = {(v, layout_string(model.layers, mtp=model.mtp_layers, stages=pp * v)) for v in range(1, most + 1)}
        for vpp, text in sorted(found):
            if "vpp" not in space.fixed or vpp == base.vpp:
                yield Pipe(pp=pp, vpp=vpp, stages=text)


def _fits(world: int, pp: int, dense: int, expert: int) -> bool:
    return world % (pp * dense) == 0 and world % (pp * expert) == 0


def _schedules(pipe: Pipe, batch: int, of_pass: int) -> bool:
    """The batch divides into whole micro-batches, and an interleaved table of groups of pp takes that many."""
    if not of_pass or batch % of_pass:
        return False
    count = batch // of_pass
    return pipe.vpp == 1 or (count >= pipe.pp and count % pipe.pp == 0)


def _recomputes(model: ModelSpec) -> list[tuple[Recompute, ...]]:
    """Each replays more than the ones before it and keeps less: none, cheap outputs, whole blocks, everything."""
    has_experts = model.moe is not None and any(model.moe_layers)
    up = {Recompute.MLA_UP_PROJ} if model.attention.kind is AttentionKind.MLA else set()
    cheap = {Recompute.LAYERNORM, Recompute.MOE_ACT} if has_experts else {Recompute.LAYERNORM}
    block = {Recompute.LAYERNORM, Recompute.MOE if has_experts else Recompute.MLP}
    found = [set(), cheap, cheap | up, block, block | up, {Recompute.FULL}]
    return list(dict.fromkeys(tuple(sorted(one)) for one in found))
