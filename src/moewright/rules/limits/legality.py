"""Which layouts are legal for a model and a workload, and the nearest legal value where one is not.

These are the rules of the mathematics and of the schedules, whatever engine runs the job. An
illegal layout yields Reasons, never a bare False.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, inf, lcm

from moewright.rules.batch_rampup import check_batch_samples, check_ramp, deciding_batches
from moewright.rules.expert_placement import check_placement
from moewright.rules.grid import min_world_size
from moewright.rules.job import Job, check_batch
from moewright.rules.limits.compatibility import check_compatibility, has_experts
from moewright.rules.limits.divisibility import divisors, nearest_legal, nearest_multiples
from moewright.rules.routing import check_load_histogram
from moewright.rules.timetable.schedule import check_schedule
from moewright.rules.timetable.stages import check_stages
from moewright.spec.choices import MAX_DEGREE, FieldKind, LayoutField
from moewright.spec.errors import Reason
from moewright.spec.hardware import Device, Hardware
from moewright.spec.layout import DEFAULT_LAYOUT, LAYOUT_FIELDS, DispatcherKind, Layout, RankOrder
from moewright.spec.model import AttentionKind, ModelSpec, PositionKind
from moewright.spec.workload import NARROW_FORMATS, Dtype, Workload

# Larger numbers are typing errors, as beyond the bounds of a layout's own fields.
_MAX_WORLD = 2**20
_MAX_SEQ_LEN = 2**27
_MAX_BATCH = 2**24
# Every layout that is priced is checked: what is legal of each field is built once.
_WHOLE_NUMBERS = tuple(
    (field, field.facts.levels or range(field.least, field.facts.most + 1))
    for field in LAYOUT_FIELDS
    if field.kind is FieldKind.NUMBER
)
# A fraction behind a word is checked beside what it is a fraction of.
_FACTORS = tuple(
    field for field in LAYOUT_FIELDS if field.kind is FieldKind.FACTOR and field.facts.word is None
)


def check_legality(job: Job) -> tuple[Reason, ...]:
    """Return every broken rule with the nearest legal value; () when the layout is legal.

    Numbers beyond all bounds are reported alone, because the other rules calculate with them.
    """
    reasons = list(_check_bounds(job.workload, job.layout))
    if reasons:
        return tuple(reasons)
    reasons += _check_grids(job.model, job.layout)
    # dp and micro-batches follow from the grids: these rules divide by them.
    grid_fits = not reasons
    reasons += _check_experts(job.model, job.layout)
    reasons += _check_nodes(job.layout)
    reasons += _check_tensor_parallelism(job.model, job.layout)
    reasons += check_positions(job.model, job.workload, step=_sequence_step(job.layout))
    reasons += _check_sequence(job)
    reasons += check_stages(job.model, job.layout)
    reasons += tuple(check_batch_samples(job.workload))
    if grid_fits:
        batch_reasons = tuple(check_batch(job.workload, job.layout))
        reasons += batch_reasons
        reasons += _check_shard(job.layout)
        reasons += _check_order(job.layout)
        if not batch_reasons:
            reasons += tuple(check_ramp(job.workload, job.layout)) or _check_timetable(
                job.workload, job.layout
            )
    reasons += check_compatibility(job)
    reasons += check_placement(job) or check_load_histogram(job)
    return tuple(reasons)


def check_positions(model: ModelSpec, workload: Workload, *, step: int = 1) -> tuple[Reason, ...]:
    """Return why a sequence is longer than the model's table of positions; () where it is not.

    A learned position is a row of the table; rotary angles and slopes have no last one. Legal
    lengths are multiples of `step`.
    """
    rows = model.max_position
    if model.position is not PositionKind.LEARNED or workload.seq_len <= rows:
        return ()
    rule = f"the model has {rows} learned positions"
    value = _show(workload.seq_len)
    nearest = str(max(1, rows // step) * step)
    return (Reason(field="workload.seq_len", value=value, rule=rule, nearest=nearest),)


def check_precision(workload: Workload, hardware: Hardware) -> tuple[Reason, ...]:
    """Return why devices cannot compute in the workload's precision; () where they can.

    They cannot where it has less than 16 bits and no units of the device multiply in it
    (`multiplies_in`); nor in bf16 where the units of the device know fp16 alone. A CPU computes in
    every format: the engine converts its numbers there (`describe_untimed`).
    """
    dtype = workload.precision
    device = hardware.device
    if (
        dtype is Dtype.BF16
        and multiplies_in(device, Dtype.FP16)
        and not multiplies_in(device, dtype)
    ):
        rule = f"{device.name} supports fp16 but not bf16"
        return (Reason(field="workload.precision", value=dtype, rule=rule, nearest=Dtype.FP16),)
    if not dtype.is_narrow or not device.kind.is_accelerator or multiplies_in(device, dtype):
        return ()
    formats = [narrow for narrow in NARROW_FORMATS if multiplies_in(device, narrow)]
    rule = f"{device.name} multiplies no numbers of fewer than 16 bits"
    if formats:
        rule = f"{device.name} does not multiply in it, only in {' and '.join(formats)}"
    nearest = next(iter(formats), Dtype.BF16)
    return (Reason(field="workload.precision", value=dtype, rule=rule, nearest=nearest),)


def multiplies_in(device: Device, dtype: Dtype) -> bool:
    """Return whether units of a device multiply numbers of a format.

    A rate without a peak is one too, but for blocks of MX: kernels with a scale for 128 numbers
    are listed as such where no units read the scales of MX, as on Hopper.
    """
    if any(peak.dtype is dtype for peak in device.peaks):
        return True
    return dtype is not Dtype.MXFP8 and any(rate.dtype is dtype for rate in device.rates)


def describe_untimed(workload: Workload, hardware: Hardware) -> str:
    """Return that nothing tells the time of the workload's products on a device; "" where it does.

    That is so in fewer than 16 bits where the device lists neither a peak nor a rate for it.
    """
    dtype = workload.precision
    device = hardware.device
    listed = {peak.dtype for peak in device.peaks} | {rate.dtype for rate in device.rates}
    if not dtype.is_narrow or dtype in listed or (dtype is Dtype.MXFP8 and Dtype.FP8 in listed):
        return ""
    return f"{device.name} has no rates for {dtype}: memory and counts are planned, and no time"


def check_device(layout: Layout, hardware: Hardware) -> tuple[Reason, ...]:
    """Return what a layout asks for that the devices do not have; () where they have all of it.

    CUDA graphs, and libraries of CUDA kernels that move tokens, exist on CUDA devices alone. On a
    CPU the engine has stand-ins for both.
    """
    kind = hardware.device.kind
    if kind.runs_cuda or not kind.is_accelerator:
        return ()
    name = hardware.device.name
    reasons = []
    if layout.graphs:
        value = "+".join(layout.graphs)
        rule = f"{name} has no CUDA graphs"
        reasons.append(Reason(field="layout.graphs", value=value, rule=rule, nearest="none"))
    if layout.dispatcher.facts.is_library:
        rule = f"its library has no kernels for {name}"
        nearest = DEFAULT_LAYOUT.dispatcher
        reasons.append(
            Reason(field="layout.dispatcher", value=layout.dispatcher, rule=rule, nearest=nearest)
        )
    return tuple(reasons)


def _check_timetable(workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """Return the broken rules of the timetable of the first batch size that breaks one.

    A step of batch_samples may have any number of micro-batches.
    """
    sizes: tuple[int, ...] = deciding_batches(workload)
    if workload.batch_samples:
        # No timetable asks for more than 2 pp micro-batches (DualPipeV).
        sizes = tuple(count * layout.dp * layout.mbs for count in range(1, 2 * layout.pp + 2))
    for size in sizes:
        if reasons := check_schedule(layout, size // (layout.dp * layout.mbs)):
            return reasons
    return ()


def _check_bounds(workload: Workload, layout: Layout) -> tuple[Reason, ...]:
    """Return the values that are no whole numbers or beyond all bounds.

    The workload's are checked only where the layout's are sound, because their bounds depend on
    these.
    """
    reasons = [
        *_check_range("layout.world_size", layout.world_size, 1, _MAX_WORLD),
        *(reason for field in _out_of_range(layout) for reason in _check_field(layout, field)),
    ]
    if reasons:
        return tuple(reasons)
    batch_step = layout.mbs * max(1, layout.dp)
    sequence_step = _sequence_step(layout)
    return (
        *_check_range(
            "workload.global_batch", workload.global_batch, 1, _MAX_BATCH, step=batch_step
        ),
        *_check_range("workload.seq_len", workload.seq_len, 1, _MAX_SEQ_LEN, step=sequence_step),
    )


def _check_range(field: str, value: int, low: int, high: int, *, step: int = 1) -> Iterator[Reason]:
    """Yield why a value is not a whole number in a range.

    Legal values are multiples of `step`, apart from a lowest value of 0.
    """
    least = -(-low // step) * step
    # By type: True is an instance of int.
    if type(value) is not int:
        rule = "must be a whole number"
        yield Reason(field=field, value=_show(value), rule=rule, nearest=str(least))
    elif not low <= value <= high:
        near = least
        # Degrees have no highest legal value of their own; 1 is always legal.
        if value > high and high != MAX_DEGREE:
            near = max(least, high // step * step)
        rule = f"must be {low} to {high}"
        yield Reason(field=field, value=_show(value), rule=rule, nearest=str(near))


def _out_of_range(layout: Layout) -> Iterator[LayoutField]:
    """Yield the numbers of a layout that are none or out of their ranges."""
    for field, legal in _WHOLE_NUMBERS:
        value = getattr(layout, field.name)
        if type(value) is not int or value not in legal:
            yield field
    for field in _FACTORS:
        if not _is_factor(getattr(layout, field.name)):
            yield field


def _check_field(layout: Layout, field: LayoutField) -> Iterator[Reason]:
    """Yield the rule that a number of a layout breaks, which is none or out of its range."""
    name = f"layout.{field.name}"
    value = getattr(layout, field.name)
    facts = field.facts
    if facts.levels:
        rule = facts.describe_levels()
        yield Reason(field=name, value=_show(value), rule=rule, nearest=str(field.default))
    elif field.kind is FieldKind.NUMBER:
        yield from _check_range(name, value, field.least, facts.most)
    else:
        rule = "must be a finite number, 0 or more"
        nearest = field.format(field.default)
        yield Reason(field=name, value=_show(value), rule=rule, nearest=nearest)


def _is_factor(value: object) -> bool:
    """Whether a value is a finite number from 0."""
    # The comparison is false for nan too.
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < inf


def _show(value: object) -> str:
    # Python 3.11 refuses to write an int of more than 4,300 digits.
    if type(value) is int and abs(value) >= 10**18:
        return "more than 18 digits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _reason(name: str, value: object, rule: str, nearest: str) -> Reason:
    return Reason(field=f"layout.{name}", value=str(value), rule=rule, nearest=nearest)


def _check_grids(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    """Yield where the world does not divide by both grids: tp cp pp, and etp ep pp."""
    world = layout.world_size
    pp = layout.pp
    if world % pp:
        degrees = nearest_legal(pp, _pp_choices(model, layout))
        near = f"{degrees}, or world_size {nearest_multiples(world, pp)}"
        yield _reason("pp", pp, f"must divide world_size={world}", near)
        return
    stage_ranks = world // pp
    if stage_ranks % (layout.tp * layout.cp):
        choices = {
            "tp": _tp_choices(model, layout),
            "cp": _remaining_degrees(stage_ranks, layout.tp),
        }
        yield _grid_reason(layout, choices)
    if stage_ranks % (layout.etp * layout.ep):
        choices = {"etp": _etp_choices(model, layout), "ep": _ep_choices(model, layout)}
        yield _grid_reason(layout, choices)


def _grid_reason(layout: Layout, choices: dict[str, tuple[int, ...]]) -> Reason:
    """Return a Reason that names the axis whose change makes the grid fit.

    `choices` holds the legal degrees of the fast and of the slow axis of a grid. The Reason names
    the fast axis where its degree is above 1, else the slow one, else the world size.
    """
    fast, slow = choices
    world = layout.world_size
    stage_ranks = world // layout.pp
    product = getattr(layout, fast) * getattr(layout, slow)
    rule = (
        f"{fast} * {slow} = {product} must divide the {stage_ranks} ranks of a pipeline stage "
        "(world_size / pp)"
    )
    fixes = [
        (axis, near)
        for axis, legal in choices.items()
        if getattr(layout, axis) > 1 and (near := nearest_legal(getattr(layout, axis), legal))
    ]
    if not fixes:
        least = min_world_size(layout)
        return _reason("world_size", world, rule, nearest_multiples(world, least))
    axis, near = fixes[0]
    also = "".join(f", or {other} {values}" for other, values in fixes[1:])
    return _reason(axis, getattr(layout, axis), rule, near + also)


def _check_shard(layout: Layout) -> Iterator[Reason]:
    """Yield broken rules of hybrid sharding.

    A block of tp * shard ranks holds the weights once, and whole experts.
    """
    shard = layout.shard
    if not shard:
        return
    if layout.zero == 0:
        rule = "zero=0 shards no states: shard needs zero=1, 2 or 3"
        yield _reason("shard", shard, rule, "0")
        return
    dense_ranks = layout.dp * layout.cp
    expert_ranks = layout.etp * layout.ep
    parts = [n for n in divisors(dense_ranks) if n > 1]
    legal = [n for n in parts if layout.tp * n < expert_ranks or layout.tp * n % expert_ranks == 0]
    near = nearest_legal(shard, legal) or "0"
    if shard not in parts:
        rule = f"must divide the {dense_ranks} ranks of dp * cp, and be more than 1"
        yield _reason("shard", shard, rule, near)
    elif shard not in legal:
        rule = (
            f"tp * shard = {layout.tp * shard} ranks must be a multiple of etp * ep = "
            f"{expert_ranks}, or fewer"
        )
        yield _reason("shard", shard, rule, near)


def _check_order(layout: Layout) -> Iterator[Reason]:
    """Yield why data-parallel axes cannot be the last, as under Megatron's tp-pp-dp mapping."""
    if layout.order is RankOrder.PP_LAST:
        return
    dense_ranks = layout.tp * layout.cp
    rule = ""
    if layout.pp == 1 or layout.dp == 1:
        rule = "needs pp > 1 and dp > 1"
    elif dense_ranks != layout.etp * layout.ep:
        rule = (
            f"needs pipelines of the same ranks in both grids: tp * cp = {dense_ranks} must be "
            f"etp * ep = {layout.etp * layout.ep}"
        )
    elif layout.shard:
        rule = "does not go with shard, whose blocks are neighbours"
    if rule:
        yield _reason("order", layout.order, rule, RankOrder.PP_LAST)


def _remaining_degrees(stage_ranks: int, other_degree: int) -> tuple[int, ...]:
    """Return the degrees that fit beside an axis of `other_degree` ranks on a stage."""
    if stage_ranks % other_degree:
        return ()
    return divisors(stage_ranks // other_degree)


def _stage_ranks(layout: Layout) -> int:
    """Return the ranks of a pipeline stage.

    1 when pp does not divide the world, so that degrees of 1 remain.
    """
    if layout.world_size % layout.pp:
        return 1
    return layout.world_size // layout.pp


def _pp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline degrees that both grids and the layers allow.

    If there is none, return those that divide the world.
    """
    least = min_world_size(replace(layout, pp=1))
    legal = tuple(
        pp
        for pp in _remaining_degrees(layout.world_size, least)
        if not check_stages(model, replace(layout, pp=pp))
    )
    return legal or divisors(layout.world_size)


def _tp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    degrees = _remaining_degrees(_stage_ranks(layout), layout.cp)
    return tuple(tp for tp in degrees if not any(_broken_tp_rules(model, tp)))


def _etp_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    ffn = model.moe.ffn_size if model.moe else 1
    degrees = _remaining_degrees(_stage_ranks(layout), layout.ep)
    return tuple(etp for etp in degrees if ffn % etp == 0)


def _ep_choices(model: ModelSpec, layout: Layout) -> tuple[int, ...]:
    experts = model.expert_count or 1
    degrees = _remaining_degrees(_stage_ranks(layout), layout.etp)
    return tuple(ep for ep in degrees if experts % ep == 0)


def _broken_tp_rules(model: ModelSpec, tp: int) -> Iterator[str]:
    """Yield, in words, the dims of the model that a degree of tensor parallelism cannot shard."""
    attention = model.attention
    if attention.heads % tp:
        yield f"must divide the {attention.heads} attention heads"
    if attention.output_groups % tp:
        yield f"must divide the {attention.output_groups} groups of attention's output"
    recurrent = model.recurrent
    if recurrent is not None and (recurrent.heads % tp or recurrent.key_heads % tp):
        yield (
            f"must divide the {recurrent.heads} heads and the {recurrent.key_heads} key heads of "
            "recurrent layers"
        )
    if attention.kind is AttentionKind.GQA and attention.kv_heads % tp and tp % attention.kv_heads:
        yield f"must divide the {attention.kv_heads} kv heads or be a multiple of them"
    if model.dense_layer_count and model.dense_ffn_size % tp:
        yield f"must divide the dense ffn width {model.dense_ffn_size}"
    if model.moe is not None and model.moe.shared_ffn_size % tp:
        yield f"must divide the shared experts' ffn width {model.moe.shared_ffn_size}"


def _check_tensor_parallelism(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    for rule in _broken_tp_rules(model, layout.tp):
        near = nearest_legal(layout.tp, _tp_choices(model, layout) or (1,))
        yield _reason("tp", layout.tp, rule, near)
    if layout.sp and layout.tp == 1:
        yield _reason("sp", "true", "sequence parallelism needs tp > 1", "false")
    if has_experts(model) and layout.tp > 1 and not layout.sp:
        rule = f"experts with tp={layout.tp} need sequence parallelism"
        yield _reason("sp", "false", rule, "true")


def _check_experts(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    if not has_experts(model):
        for field in LAYOUT_FIELDS:
            value = getattr(layout, field.name)
            if field.facts.needs_experts and value != field.default:
                nearest = field.format(field.default)
                yield _reason(field.name, value, "the model has no experts", nearest)
        return
    assert model.moe is not None  # has_experts
    experts = model.moe.experts
    ffn = model.moe.ffn_size
    stage_ranks = _stage_ranks(layout)
    if experts % layout.ep:
        legal = _ep_choices(model, layout) or divisors(gcd(experts, stage_ranks))
        rule = f"must divide the {experts} experts"
        yield _reason("ep", layout.ep, rule, nearest_legal(layout.ep, legal))
    if ffn % layout.etp:
        legal = _etp_choices(model, layout) or divisors(gcd(ffn, stage_ranks))
        rule = f"must divide the expert ffn width {ffn}"
        yield _reason("etp", layout.etp, rule, nearest_legal(layout.etp, legal))


def _check_nodes(layout: Layout) -> Iterator[Reason]:
    """Yield broken rules of the nodes that a token crosses to before it crosses to a rank.

    There are several nodes, of several ranks each.
    """
    if not layout.ep_node:
        return
    if not layout.dispatcher.facts.knows_nodes:
        legal_kinds = " or ".join(kind for kind in DispatcherKind if kind.facts.knows_nodes)
        rule = f"goes with dispatcher={legal_kinds}, not {layout.dispatcher}"
        yield _reason("ep_node", layout.ep_node, rule, "0")
        return
    legal = [n for n in divisors(layout.ep) if 1 < n < layout.ep]
    if layout.ep_node not in legal:
        rule = f"must divide ep={layout.ep} into several nodes of several ranks"
        near = nearest_legal(layout.ep_node, legal) or "0"
        yield _reason("ep_node", layout.ep_node, rule, near)


def _sequence_step(layout: Layout) -> int:
    """Return the number that sequence lengths must be multiples of."""
    cp_chunks = 2 * layout.cp if layout.cp > 1 else 1
    sp_parts = layout.tp * layout.cp if layout.sp else 1
    return lcm(cp_chunks, sp_parts)


def _check_sequence(job: Job) -> Iterator[Reason]:
    """Yield why the sequence cannot be cut.

    Context parallelism cuts it in 2 cp chunks, and sequence parallelism cuts a CP rank's part of it
    in tp parts.
    """
    layout = job.layout
    seq_len = job.workload.seq_len
    tp = layout.tp
    cp = layout.cp
    also = f", or seq_len {nearest_multiples(seq_len, _sequence_step(layout))}"
    if cp > 1 and seq_len % (2 * cp):
        degrees = _remaining_degrees(_stage_ranks(layout), tp)
        legal = [n for n in degrees if n == 1 or seq_len % (2 * n) == 0]
        rule = f"2 * cp must divide seq_len={seq_len}"
        yield _reason("cp", cp, rule, nearest_legal(cp, legal or [1]) + also)
    elif layout.sp and seq_len % (tp * cp):
        degrees = _tp_choices(job.model, layout)
        legal = [n for n in degrees if n == 1 or seq_len % (n * cp) == 0]
        rule = f"with sequence parallelism tp * cp = {tp * cp} must divide seq_len={seq_len}"
        yield _reason("tp", tp, rule, nearest_legal(tp, legal or [1]) + also)
