"""What this engine runs today. Anything else is refused before a process starts, with the
reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType

from moewright.rules.fsdp import is_fsdp_sharded
from moewright.rules.job import Job
from moewright.rules.legality import check_legality
from moewright.rules.routing import LIBRARY_DISPATCHERS
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import CapacityFill, DispatcherKind, Layout, Overlap
from moewright.spec.model import AttentionKind, ModelSpec, NormKind, PositionKind
from moewright.spec.workload import Dtype, Workload

_PACKAGES: Mapping[DispatcherKind, tuple[str, ...]] = MappingProxyType(
    {DispatcherKind.DEEPEP: ("deep_ep",), DispatcherKind.HYBRIDEP: ("deep_ep", "hybrid_ep_cpp")}
)
_GROUPED_ROW_BYTES = 16  # torch's grouped GEMM wants rows that are multiples of this


def require_runnable(job: Job) -> None:
    """Raise BadInput with every reason why a job is not legal or not run by the engine."""
    reasons = (
        *unsupported_model(job.model, job.workload),
        *check_legality(job.model, job.workload, job.layout),
        *unsupported_layout(job.layout, model=job.model, workload=job.workload),
    )
    if reasons:
        raise BadInput(*reasons)


def unsupported_layout(
    layout: Layout, *, model: ModelSpec, workload: Workload
) -> tuple[Reason, ...]:
    """Return the choices of the layout that the engine cannot run yet, or not for this model."""
    runs: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("offload", f"optimizer{layout.offload_fraction:g}", ("optimizer1",)),
        (
            "overlap",
            "+".join(o for o in layout.overlap if o in (Overlap.EP, Overlap.TP, Overlap.WGRAD)),
            ("",),
        ),
        ("graphs", "+".join(layout.graphs), ("",)),
    )
    choices = [
        Reason(
            field=f"layout.{key}",
            value=str(value),
            rule="the engine does not run this yet",
            nearest=str(legal[0]) or "none",
        )
        for key, value, legal in runs
        if value not in legal
    ]
    if layout.zero == 3 and layout.pp > 1:
        rule = "the engine cuts weights without a pipeline alone: it would gather a stage again for every micro-batch"
        choices.append(Reason(field="layout.pp", value=str(layout.pp), rule=rule, nearest="1"))
    return (
        *choices,
        *_library(layout, workload),
        *_replicated(layout),
        *_too_fine(Job(model=model, workload=workload, layout=layout)),
    )


def _library(layout: Layout, workload: Workload) -> Iterator[Reason]:
    """What a library that dispatches lacks here, or does not do."""
    if layout.dispatcher not in LIBRARY_DISPATCHERS:
        return
    kind = layout.dispatcher
    missing = next((name for name in _PACKAGES[kind] if find_spec(name) is None), "")
    if missing:
        rule = (
            f"needs the package {missing} (github.com/deepseek-ai/DeepEP), which is not installed"
        )
        yield Reason(field="layout.dispatcher", value=kind, rule=rule, nearest=DispatcherKind.DEDUP)
    rules = (
        ("layout.etp", layout.etp, layout.etp > 1, "the engine dispatches whole experts", "1"),
        (
            "layout.spare",
            layout.spare,
            layout.spare > 0,
            "the engine dispatches to experts, not to replicas",
            "0",
        ),
        (
            "layout.overlap",
            "shared",
            Overlap.SHARED in layout.overlap,
            "the engine runs nothing",
            "none",
        ),
        (
            "train.precision",
            workload.precision,
            workload.precision is not Dtype.BF16,
            "moves bf16 rows",
            "bf16",
        ),
    )
    for field, value, broken, why, near in rules:
        if broken:
            yield Reason(
                field=field, value=str(value), rule=f"{why} with dispatcher={kind}", nearest=near
            )


def _replicated(layout: Layout) -> Iterator[Reason]:
    """What replicas of experts do not go with: they are no parameters, and send gradients home at a
    step's end."""
    if not layout.spare:
        return
    cut = is_fsdp_sharded(layout, "edp")
    padded = layout.capacity_fill is CapacityFill.PADDED
    rules = (
        (
            "zero",
            str(layout.zero),
            cut,
            "cuts experts over edp ranks, none of which has one to send",
            "1",
        ),
        (
            "capacity_fill",
            layout.capacity_fill,
            padded,
            "gives every rank equally many rows already",
            CapacityFill.USED,
        ),
    )
    for field, value, broken, why, near in rules:
        if broken:
            rule = f"{why}: not with spare={layout.spare}"
            yield Reason(field=f"layout.{field}", value=value, rule=rule, nearest=near)


def _too_fine(job: Job) -> Iterator[Reason]:
    """Yield cuts that leave a rank part of a row, or expert rows that grouped GEMM cannot address."""
    model = job.model
    layout = job.layout
    attention = model.attention
    if attention.kind is AttentionKind.GQA and attention.kv_width % layout.tp:
        rule = f"must divide the {attention.kv_width} rows of the key projection"
        yield Reason(
            field="layout.tp", value=str(layout.tp), rule=rule, nearest=str(attention.kv_heads)
        )
    if model.moe is None or layout.etp == 1:
        return
    if model.moe.expert_bias and model.expert_width % layout.etp:
        rule = f"must divide the {model.expert_width} rows of an expert's output, over which the experts' biases are cut"
        yield Reason(field="layout.etp", value=str(layout.etp), rule=rule, nearest="1")
    step = _GROUPED_ROW_BYTES // job.workload.precision.nbytes
    if model.moe.ffn_size // layout.etp % step:
        rule = f"leaves {model.moe.ffn_size // layout.etp} of an expert's width; must be a multiple of {step}"
        yield Reason(field="layout.etp", value=str(layout.etp), rule=rule, nearest="1")


def unsupported_model(model: ModelSpec, workload: Workload) -> tuple[Reason, ...]:
    """The features of a model or workload that the engine cannot run yet."""
    attention = model.attention
    latent = attention.kind is AttentionKind.MLA
    missing: tuple[tuple[str, object, bool, str], ...] = (
        (
            "attention.qkv_bias",
            True,
            latent and (attention.qkv_bias or attention.out_bias),
            "false",
        ),
        ("attention.rope.interleaved", True, attention.rope.interleaved and not latent, "false"),
        ("position", model.position, model.position is not PositionKind.ROPE, "rope"),
        ("norm", model.norm, model.norm is not NormKind.RMS, "rms"),
        ("gated", False, not model.gated, "true"),
    )
    reasons = [
        _model_reason(f"model.{field}", value, nearest)
        for field, value, bad, nearest in missing
        if bad
    ]
    for field, dtype, runs in (
        ("train.precision", workload.precision, (Dtype.BF16, Dtype.FP16, Dtype.FP32)),
        ("train.grad_dtype", workload.grad_dtype, (Dtype.FP32,)),
        ("train.moment_dtype", workload.optimizer.moment_dtype, (Dtype.FP32, Dtype.BF16)),
    ):
        if dtype not in runs:
            reasons.append(_model_reason(field, dtype, " or ".join(runs)))
    return tuple(reasons)


def _model_reason(field: str, value: object, nearest: str) -> Reason:
    return Reason(
        field=field, value=str(value), rule="the engine does not run this yet", nearest=nearest
    )
