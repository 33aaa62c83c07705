"""The facts of a plan as lists of names and values, and every constant with its source."""

from __future__ import annotations

from moewright.codec import format_layout
from moewright.report.document import DocumentSection, Extent, build_table, numbers, words
from moewright.report.estimate_document import (
    describe_imbalance,
    describe_load_limit,
    describe_spread,
    format_flops,
)
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, Plan
from moewright.spec.units import (
    SourceKind,
    format_bytes,
    format_count,
    format_figures,
    format_seconds,
)
from moewright.spec.workload import (
    LossSpec,
    MatrixUpdate,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    Workload,
)


def build_plan_facts(plan: Plan) -> tuple[DocumentSection, ...]:
    """Build the lists that describe the job as planned: layout, workload, model, expectations."""
    return (
        DocumentSection(title="Layout", facts=_layout_facts(plan)),
        DocumentSection(title="Workload", facts=_workload_facts(plan.workload)),
        DocumentSection(title="Model", facts=_model_facts(plan.model)),
        DocumentSection(title="Expected", facts=_estimate_facts(plan.estimate)),
    )


def _layout_facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    layout = plan.layout
    estimate = plan.estimate
    micro_batch = f"{layout.mbs} x {plan.workload.seq_len:,} tokens"
    return (
        ("layout", format_layout(layout)),
        ("ranks", f"{layout.world_size:,}: dp {layout.dp}, expert dp {layout.edp}"),
        ("micro-batches", f"{estimate.micro_batches} of {micro_batch}"),
        ("bubble", f"{estimate.bubble_fraction:.2%}"),
        ("device", plan.hardware.device.name),
        ("plan", plan.fingerprint),
    )


def _workload_facts(workload: Workload) -> tuple[tuple[str, str], ...]:
    optimizer = workload.optimizer
    # Whatever updates the matrices of layers, AdamW updates the rest.
    is_muon = optimizer.matrix_update is MatrixUpdate.MUON
    update = "Muon for matrices of layers, AdamW" if is_muon else "AdamW"
    batch = f"{workload.global_batch:,} sequences, {workload.tokens_per_step:,} tokens"
    return (
        ("sequence length", f"{workload.seq_len:,} tokens"),
        ("global batch", batch),
        ("steps", f"{workload.steps:,}"),
        ("precision", f"{workload.precision}, gradients {workload.grad_dtype}"),
        ("optimizer", f"{update}, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"),
        ("auxiliary losses", _list_losses(workload.loss)),
        ("routing", _describe_routing(workload.router)),
        ("seed", str(workload.seed)),
    )


def _model_facts(model: ModelSpec) -> tuple[tuple[str, str], ...]:
    attention = model.attention
    params = count_parameters(model)
    parameters = f"{format_count(params.total)}, {format_count(params.active)} active a token"
    heads = f"{attention.heads} heads, {attention.kv_heads} key-value heads"
    facts = [
        ("name", model.name or "unnamed"),
        ("parameters", parameters),
        ("layers", f"{model.layers}, {model.moe_layer_count} with experts"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("attention", f"{attention.kind}, {heads}"),
        ("vocabulary", f"{model.vocab_size:,}"),
    ]
    if model.moe:
        moe = model.moe
        facts.append(("experts", f"{moe.experts}, top {moe.router.top_k}, width {moe.ffn_size:,}"))
    return tuple(facts)


def _estimate_facts(estimate: Estimate) -> tuple[tuple[str, str], ...]:
    peak = f"{format_bytes(estimate.peak_bytes)}, margin {format_bytes(estimate.margin_bytes)}"
    facts = [
        ("step", format_seconds(estimate.step_s)),
        ("speed", f"{format_figures(estimate.tokens_per_s_per_device)} tokens/s/rank"),
        (
            "arithmetic",
            f"{format_figures(estimate.tflops_per_device)} TFLOP/s/rank, MFU {estimate.mfu:.1%}",
        ),
        ("model FLOPs", f"{format_flops(estimate.model_flops_per_step)} a step"),
        ("peak memory", peak),
        ("verdict", f"{estimate.verdict}; largest: {estimate.largest}"),
    ]
    if estimate.host_shortage:
        facts.append(("host memory", estimate.host_shortage))
    if estimate.imbalance.even_step_s:
        facts.append(("imbalance", describe_imbalance(estimate)))
    if estimate.spread is not None:
        facts.append(("stragglers", describe_spread(estimate)))
    if estimate.load_limit > 1:
        facts.append(("routing", describe_load_limit(estimate)))
    return tuple(facts)


def build_source_section(plan: Plan) -> DocumentSection:
    """Build a row for each default and constant behind the estimate, the least certain first."""
    order = list(reversed(SourceKind))
    sources = sorted(plan.estimate.assumptions, key=lambda assumption: order.index(assumption.kind))
    rows = ((item.name, item.value, item.kind.value, item.source) for item in sources)
    columns = (*words("constant"), *numbers("value"), *words("kind", "source"))
    return DocumentSection(
        title=f"{len(sources)} constants and rates, with their sources",
        table=build_table(columns, rows),
        extent=Extent.WHOLE,
    )


def _describe_routing(router: RouterTraining) -> str:
    """Say who chooses the experts, and how, where that is not the default."""
    if router.force is not RouterForce.NONE:
        return f"forced: {router.force}"
    texts = ["by the router"]
    if router.assignment is not RouterAssignment.TOP_K:
        texts.append(router.assignment.value)
    if router.jitter_eps > 0:
        texts.append(f"jitter {router.jitter_eps:g}")
    if router.router_dtype is not RouterDtype.FP32:
        texts.append(router.router_dtype.value)
    return ", ".join(texts)


def _list_losses(loss: LossSpec) -> str:
    """List the coefficients that are on: micro-batch, sequence and global-batch balance, z."""
    coefficients = (
        ("", loss.aux_coeff),
        ("sequence ", loss.seq_aux_coeff),
        ("global ", loss.global_aux_coeff),
        ("z ", loss.z_coeff),
    )
    return ", ".join(f"{name}{value:g}" for name, value in coefficients if value) or "none"
