"""Which layouts are legal for a model and a workload, and the nearest legal value where one is not.

These are the rules of the mathematics and of the schedules, whatever engine runs the job. An
illegal layout yields Reasons, never a bare False.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, isfinite, lcm

from moewright.rules.batch_rampup import check_ramp, workload_at_step
from moewright.rules.compatibility import check_compatibility, has_experts
from moewright.rules.divisibility import divisors as divisors
from moewright.rules.divisibility import nearest_legal, nearest_multiples
from moewright.rules.expert_placement import check_placement
from moewright.rules.grid import NODE_AWARE_DISPATCHERS, min_world_size
from moewright.rules.job import Job
from moewright.rules.micro_batches import check_batch
from moewright.rules.micro_batches import micro_batches as micro_batches
from moewright.rules.routing import check_load_histogram
from moewright.rules.schedule import check_schedule
from moewright.rules.stages import check_stages
from moewright.spec.errors import Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import DispatcherKind, Layout
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import Dtype, Workload

# Beyond these a number is a slip of the pen; refusing it keeps every later search for a nearest
# value short.
_MAX_WORLD = 2**20
_MAX_SEQ_LEN = 2**27
_MAX_BATCH = 2**24
_MAX_DEGREE = 10**15
_ZERO_LEVELS = (0, 1, 3)


def check_legality(model: ModelSpec, workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """Every rule that is broken, each with the nearest legal value; () when the layout is legal.

    Numbers that are not sane are reported alone, for the other rules calculate with them.
    """
    reasons = list(_insane(workload, layout))
    if reasons:
        return tuple(reasons)
    reasons += _grid_reasons(model, layout)
    grid_fits = not reasons
    reasons += _expert_reasons(model, layout)
    reasons += _node_reasons(layout)
    reasons += _tensor_reasons(model, layout)
    reasons += _sequence_reasons(model, workload, layout)
    reasons += check_stages(model, layout)
    batch = list(check_batch(workload, layout)) if grid_fits else []
    reasons += batch
    reasons += _shard_reasons(layout) if grid_fits else ()
    if grid_fits and not batch:
        ramp = list(check_ramp(workload, layout))
        least = workload_at_step(
            workload, 0
        )  # the fewest micro-batches; () without a ramp is the workload itself
        reasons += ramp or check_schedule(layout, micro_batches(least, layout))
    reasons += check_compatibility(model, workload, layout)
    job = Job(model=model, workload=workload, layout=layout)
    reasons += check_placement(job) or check_load_histogram(job)
    return tuple(reasons)


def check_precision(workload: Workload, hardware: Hardware) -> tuple[Reason, ...]:
    """Why devices cannot compute in the workload's precision: one of less than 16 bits that they
    list no rate for."""
    dtype, device = workload.precision, hardware.device
    listed = {peak.dtype for peak in device.peaks} | {rate.dtype for rate in device.rates}
    if not dtype.is_narrow or dtype in listed or (dtype is Dtype.MXFP8 and Dtype.FP8 in listed):
        return ()
    rule = f"{device.name} has no rates for it"
    best = next((str(one) for one in (Dtype.MXFP8, Dtype.FP8) if one in listed), str(Dtype.BF16))
    return (Reason(field="workload.precision", value=dtype, rule=rule, nearest=best),)


def _insane(workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """Numbers that are not numbers, or beyond all bounds; the workload's only once the layout's can
    be counted with."""
    degrees = ("tp", "cp", "pp", "vpp", "ep", "etp")
    reasons = [
        *_bounded("layout.world_size", layout.world_size, 1, _MAX_WORLD),
        *(
            reason
            for name in degrees
            for reason in _bounded(f"layout.{name}", getattr(layout, name), 1, _MAX_DEGREE)
        ),
        *_bounded("layout.mbs", layout.mbs, 1, _MAX_BATCH),
        *_bounded("layout.vpp_group", layout.vpp_group, 0, _MAX_BATCH),
        *_bounded("layout.shard", layout.shard, 0, _MAX_DEGREE),
        *_bounded("layout.spare", layout.spare, 0, _MAX_DEGREE),
        *_bounded("layout.ep_node", layout.ep_node, 0, _MAX_DEGREE),
        *_zero_and_capacity(layout),
    ]
    if not reasons:
        batch_step = layout.mbs * max(1, layout.dp)
        reasons += _bounded(
            "workload.global_batch", workload.global_batch, 1, _MAX_BATCH, batch_step
        )
        reasons += _bounded(
            "workload.seq_len", workload.seq_len, 1, _MAX_SEQ_LEN, _sequence_step(layout)
        )
    return tuple(reasons)


def _bounded(field: str, value: int, low: int, high: int, step: int = 1) -> Iterator[Reason]:
    """`step`: what legal values are multiples of, apart from a lowest value of 0."""
    least = -(-low // step) * step
    if type(value) is not int:
        yield Reason(
            field=field, value=_show(value), rule="must be a whole number", nearest=str(least)
        )
    elif not low <= value <= high:
        # Degrees have no highest legal value of their own; 1 is always legal.
        most = least if high == _MAX_DEGREE else max(least, high // step * step)
        near = str(least if value < low else most)
        yield Reason(field=field, value=_show(value), rule=f"must be {low} to {high}", nearest=near)


def _zero_and_capacity(layout: Layout) -> Iterator[Reason]:
    if type(layout.zero) is not int or layout.zero not in _ZERO_LEVELS:
        yield Reason(
            field="layout.zero", value=_show(layout.zero), rule="must be 0, 1 or 3", nearest="1"
        )
    capacity = layout.capacity
    if type(capacity) not in (int, float) or not isfinite(capacity) or capacity < 0:
        rule = "must be a finite number, 0 (dropless) or more"
        yield Reason(field="layout.capacity", value=_show(capacity), rule=rule, nearest="0")


def _show(value: object) -> str:
    text = repr(value) if type(value) is not int or abs(value) < 10**18 else "more than 18 digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _grid_reasons(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    """The world divides by both grids: tp cp pp, and etp ep pp."""
    world, pp = layout.world_size, layout.pp
    if world % pp:
        rule = f"must divide world_size={world}"
        near = f"{nearest_legal(pp, _pp_choices(model, layout))}, or world_size {nearest_multiples(world, pp)}"
        yield Reason(field="layout.pp", value=str(pp), rule=rule, nearest=near)
        return
    stage = world // pp
    if stage % (layout.tp * layout.cp):
        yield _grid_reason(
            "tp", "cp", layout, (_tp_choices(model, layout), _quotients(stage, layout.tp))
        )
    if stage % (layout.etp * layout.ep):
        yield _grid_reason(
            "etp", "ep", layout, (_etp_choices(model, layout), _ep_choices(model, layout))
        )


def _grid_reason(
    fast: str, slow: str, layout: Layout, choices: tuple[tuple[int, ...], tuple[int, ...]]
) -> Reason:
    """Blames the axis that one change mends: the fast one when it is above 1, then the slow one,
    then the world."""
    stage = layout.world_size // layout.pp
    product = getattr(layout, fast) * getattr(layout, slow)
    rule = f"{fast} * {slow} = {product} must divide the {stage} ranks of a pipeline stage (world_size / pp)"
    fixes = [
        (axis, near)
        for axis, legal in zip((fast, slow), choices, strict=True)
        if getattr(layout, axis) > 1 and (near := nearest_legal(getattr(layout, axis), legal))
    ]
    if not fixes:
        least = min_world_size(
            tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep, etp=layout.etp
        )
        world = layout.world_size
        return Reason(
            field="layout.world_size",
            value=str(world),
            rule=rule,
            nearest=nearest_multiples(world, least),
        )
    axis, near = fixes[0]
    also = "".join(f", or {other} {values}" for other, values in fixes[1:])
    return Reason(
        field=f"layout.{axis}", value=str(getattr(layout, axis)), rule=rule, nearest=near + also
    )


def _shard_reasons(layout: Layout) -> Iterator[Reason]:
    """Hybrid sharding: blocks of tp * shard ranks that hold the weights once, experts whole."""
    dense, expert, shard = layout.dp * layout.cp, layout.etp * layout.ep, layout.shard
    if not shard:
        return
    if layout.zero != 3:
        rule = f"zero={layout.zero} cuts no weights: shard goes with zero=3"
        yield Reason(field="layout.shard", value=str(shard), rule=rule, nearest="0")
        return
    parts = [n for n in divisors(dense) if n > 1]
    legal = [n for n in parts if layout.tp * n < expert or layout.tp * n % expert == 0]
    if shard not in parts:
        rule = f"must divide the {dense} ranks of dp * cp, and be more than 1"
        yield Reason(
            field="layout.shard",
            value=str(shard),
            rule=rule,
            nearest=nearest_legal(shard, legal) or "0",
        )
    elif shard not in legal:
        rule = f"tp * shard = {layout.tp * shard} ranks must be a multiple of etp * ep = {expert}, or fewer"
        yield Reason(
            field="layout.shard",
            value=str(shard),
            rule=rule,
            nearest=nearest_legal(shard, legal) or "0",
        )


def _quotients(stage: int, taken: int) -> tuple[int, ...]:
    """Sizes that fit beside an axis of `taken` ranks on a stage of `stage`."""
    return () if stage % taken else divisors(stage // taken)


def _stage_ranks(layout: Layout) -> int:
    """Ranks of a pipeline stage; 1 when pp does not divide the world, so that degrees of 1
    remain."""
    return 1 if layout.world_size % layout.pp else layout.world_size // layout.pp


def _pp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Degrees that both grids and the layers allow; if there is none, those that divide the
    world."""
    least = min_world_size(tp=layout.tp, cp=layout.cp, pp=1, ep=layout.ep, etp=layout.etp)
    divide = divisors(layout.world_size)
    fit = tuple(
        pp
        for pp in _quotients(layout.world_size, least)
        if not check_stages(model, replace(layout, pp=pp))
    )
    return fit or divide


def _tp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    legal = _quotients(_stage_ranks(layout), layout.cp)
    return tuple(tp for tp in legal if not any(_tp_broken(model, tp)))


def _etp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    ffn = model.moe.ffn_size if model.moe else 1
    return tuple(etp for etp in _quotients(_stage_ranks(layout), layout.ep) if ffn % etp == 0)


def _ep_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    experts = model.moe.experts if model.moe else 1
    return tuple(ep for ep in _quotients(_stage_ranks(layout), layout.etp) if experts % ep == 0)


def _tp_broken(model: ModelSpec, tp: int) -> Iterator[str]:
    """Dims of the model that tensor parallelism of that degree cannot cut, in words."""
    attention = model.attention
    if attention.heads % tp:
        yield f"must divide the {attention.heads} attention heads"
    if attention.kind is AttentionKind.GQA and attention.kv_heads % tp and tp % attention.kv_heads:
        yield f"must divide the {attention.kv_heads} kv heads or be a multiple of them"
    if model.moe_layer_count < model.layers and model.dense_ffn_size % tp:
        yield f"must divide the dense ffn width {model.dense_ffn_size}"
    if model.moe is not None and model.moe.shared_ffn_size % tp:
        yield f"must divide the shared experts' ffn width {model.moe.shared_ffn_size}"


def _tensor_reasons(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    for rule in _tp_broken(model, layout.tp):
        near = nearest_legal(layout.tp, _tp_choices(model, layout) or (1,))
        yield Reason(field="layout.tp", value=str(layout.tp), rule=rule, nearest=near)
    if layout.sp and layout.tp == 1:
        yield Reason(
            field="layout.sp",
            value="true",
            rule="sequence parallelism needs tp > 1",
            nearest="false",
        )
    if has_experts(model) and layout.tp > 1 and not layout.sp:
        rule = f"experts with tp={layout.tp} need sequence parallelism"
        yield Reason(field="layout.sp", value="false", rule=rule, nearest="true")


def _expert_reasons(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    if not has_experts(model):
        settings = (
            ("ep", layout.ep, 1),
            ("etp", layout.etp, 1),
            ("capacity", layout.capacity, 0),
            ("dispatcher", layout.dispatcher, DispatcherKind.ALL_TO_ALL),
        )
        for name, value, only in settings:
            if value != only:
                rule = "the model has no experts"
                yield Reason(field=f"layout.{name}", value=str(value), rule=rule, nearest=str(only))
        return
    assert model.moe is not None  # has_experts
    experts, ffn = model.moe.experts, model.moe.ffn_size
    if experts % layout.ep:
        near = nearest_legal(
            layout.ep, _ep_choices(model, layout) or divisors(gcd(experts, _stage_ranks(layout)))
        )
        rule = f"must divide the {experts} experts"
        yield Reason(field="layout.ep", value=str(layout.ep), rule=rule, nearest=near)
    if ffn % layout.etp:
        near = nearest_legal(
            layout.etp, _etp_choices(model, layout) or divisors(gcd(ffn, _stage_ranks(layout)))
        )
        rule = f"must divide the expert ffn width {ffn}"
        yield Reason(field="layout.etp", value=str(layout.etp), rule=rule, nearest=near)


def _node_reasons(layout: Layout) -> Iterator[Reason]:
    """Nodes that a token crosses to before it crosses to a rank: several, of several ranks each."""
    if not layout.ep_node:
        return
    legal = [n for n in divisors(layout.ep) if 1 < n < layout.ep]
    rule, near = "", nearest_legal(layout.ep_node, legal) or "0"
    if layout.dispatcher not in NODE_AWARE_DISPATCHERS:
        rule, near = (
            f"goes with dispatcher={' or '.join(NODE_AWARE_DISPATCHERS)}, not {layout.dispatcher}",
            "0",
        )
    elif layout.ep_node not in legal:
        rule = f"must divide ep={layout.ep} into several nodes of several ranks"
    if rule:
        yield Reason(field="layout.ep_node", value=str(layout.ep_node), rule=rule, nearest=near)


def _sequence_step(layout: Layout) -> int:
    """What sequence lengths must be multiples of."""
    return lcm(2 * layout.cp if layout.cp > 1 else 1, layout.tp * layout.cp if layout.sp else 1)


def _sequence_reasons(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Context parallelism cuts a sequence in 2 cp chunks, sequence parallelism a rank's part of it
    in tp."""
    seq_len, tp, cp = workload.seq_len, layout.tp, layout.cp
    also = f", or seq_len {nearest_multiples(seq_len, _sequence_step(layout))}"
    if cp > 1 and seq_len % (2 * cp):
        legal = [
            n for n in _quotients(_stage_ranks(layout), tp) if n == 1 or seq_len % (2 * n) == 0
        ]
        rule = f"2 * cp must divide seq_len={seq_len}"
        yield Reason(
            field="layout.cp",
            value=str(cp),
            rule=rule,
            nearest=nearest_legal(cp, legal or [1]) + also,
        )
    elif layout.sp and seq_len % (tp * cp):
        legal = [n for n in _tp_choices(model, layout) if seq_len % (n * cp) == 0 or n == 1]
        rule = f"with sequence parallelism tp * cp = {tp * cp} must divide seq_len={seq_len}"
        yield Reason(
            field="layout.tp",
            value=str(tp),
            rule=rule,
            nearest=nearest_legal(tp, legal or [1]) + also,
        )
