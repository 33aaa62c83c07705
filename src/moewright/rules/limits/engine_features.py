"""What the engine computes of a model's features, and what of a step it captures in graphs."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.families.table import find_family
from moewright.rules.job import Job
from moewright.rules.routing import counts_copies
from moewright.spec.choices import Payload
from moewright.spec.errors import Reason
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CapacityFill,
    CudaGraphScope,
    Layout,
    Offload,
    Overlap,
    Recompute,
    plain_schedule,
)
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    MixerKind,
    ModelSpec,
    MoeSpec,
    PositionKind,
    QkNorm,
    RecurrentKind,
    ScoreFunction,
)
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    RouterAssignment,
    RouterForce,
    Task,
)

# A field of the model, its value, whether the engine cannot compute it, and what it can.
Feature = tuple[str, object, bool, str]

_RECURRENCES = (RecurrentKind.GATED_DELTA, RecurrentKind.MAMBA2)
_COMPUTED_MIXERS = (
    MixerKind.ATTENTION,
    MixerKind.LOCAL_ATTENTION,
    MixerKind.SHARED_INDEX,
    MixerKind.COMPRESSED_SPARSE,
    MixerKind.HEAVILY_COMPRESSED,
    MixerKind.NONE,
)
_ROPE_SCALINGS = ("default", "linear", "yarn", "llama3", "longrope")


def unsupported_features(model: ModelSpec) -> Iterator[Feature]:
    """Yield the features that the engine may lack, each with whether this model has it."""
    yield from _attention_features(model.attention)
    missing = "+".join(sorted(set(map(str, _missing_mixers(model)))))
    yield "mixers", missing, bool(missing), "attention"
    spec = model.attention
    # The eight columns that carry a bias lie beside a head's, in kernels of at most 256. They leave
    # log-sum-exps that grow with the position, which sinks must not be compared with.
    is_wide = spec.head_dim > 248
    is_plain = spec.qk_norm in (QkNorm.NONE, QkNorm.PER_HEAD, QkNorm.FULL)
    positions = [PositionKind.ROPE]
    if spec.kind is AttentionKind.GQA and is_plain:
        positions.append(PositionKind.NONE)
        if not is_wide and not spec.sinks:
            positions.append(PositionKind.ALIBI)
    yield "position", model.position, model.position not in positions, "rope"
    # Parallel streams mix around the output of a block as it is.
    placement = model.norm_placement
    has_both = placement.is_after and model.residual_streams > 1
    yield "norm_placement", placement, has_both, "before"
    # The two forms of an MLP: a gate, or the square of a ReLU.
    activation = Activation.SILU if model.gated else Activation.RELU_SQUARED
    yield "activation", model.activation, model.activation is not activation, activation
    family = find_family(model.family)
    scaling = spec.rope.scaling
    has_two = family.scales_full_layers_alone and scaling != "default" and model.max_window > 0
    yield "attention.rope.scaling", scaling, has_two, "default"
    attention = model.multipliers.attention
    # There 1 is a factor of scores, which the record has as "none".
    nearest = f"{model.attention.head_dim**-0.5:g}"
    yield "multipliers.attention", attention, family.has_score_factor and attention == 1, nearest
    # A head that is the embedding has no tensors of its own.
    yield "head_bias", True, model.head_bias and model.tie_embeddings, "false"
    yield "score_cap", model.score_cap, model.score_cap > 0, "0"
    has_streams = model.residual_streams > 1
    is_plain_stream = spec.kind is not AttentionKind.COMPRESSED
    yield "residual_streams", model.residual_streams, has_streams and is_plain_stream, "1"
    factor = model.multipliers.residual
    yield "multipliers.residual", factor, has_streams and factor != 1, "1"
    limit = model.activation_limit
    yield "activation_limit", limit, limit > 0 and not model.gated, "0"
    if model.moe is not None:
        yield from _expert_features(model.moe)


def _missing_mixers(model: ModelSpec) -> Iterator[MixerKind | RecurrentKind]:
    for mixer in model.mixers:
        if mixer is MixerKind.RECURRENT and model.recurrent is not None:
            if model.recurrent.kind not in _RECURRENCES:
                yield model.recurrent.kind
        elif mixer not in _COMPUTED_MIXERS:
            yield mixer


def _attention_features(spec: AttentionSpec) -> Iterator[Feature]:
    is_mla = spec.kind is AttentionKind.MLA
    is_compressed = spec.kind is AttentionKind.COMPRESSED
    yield "attention.qkv_bias", True, is_mla and (spec.qkv_bias or spec.out_bias), "false"
    scaling = spec.rope.scaling
    yield "attention.rope.scaling", scaling, scaling not in _ROPE_SCALINGS, "default"
    is_gated = spec.output_gate and spec.kind is not AttentionKind.GQA
    yield "attention.output_gate", True, is_gated, "false"
    # An indexer's queries come from those of latent attention, before they are expanded.
    top_k = spec.indexer.top_k if spec.indexer else 0
    has_latent = (is_mla or is_compressed) and spec.q_lora_rank > 0
    yield "attention.indexer.top_k", top_k, top_k > 0 and not has_latent, "none"


def _expert_features(spec: MoeSpec) -> Iterator[Feature]:
    router = spec.router
    is_biased = router.selection_bias or router.top_groups < router.groups
    is_mixed = router.score is ScoreFunction.SPARSE_MIXER
    yield "moe.router.score", router.score, is_mixed and is_biased, "softmax"


# A field, its value, whether the engine refuses it in a graph, and what it takes.
_Choice = tuple[str, object, bool, str]

_MIXERS = frozenset((CudaGraphScope.ATTN, CudaGraphScope.MAMBA))
_MIXER_OFFLOADS = frozenset(
    (Offload.ATTN_NORM, Offload.QKV_LINEAR, Offload.CORE_ATTN, Offload.ATTN_PROJ)
)


def check_graphs(job: Job) -> Iterator[Reason]:
    """Yield what keeps the engine from capturing the graphs that a layout asks for.

    A graph repeats the same operations on the same tensors: the host may read no size, and nothing
    but the tokens may change from step to step. A graph of a part of a layer asks that of the part
    alone.
    """
    graphs = job.layout.graphs
    if not graphs:
        return
    rule = (
        "the engine captures steps of computation and collectives that differ in their tokens "
        "alone: not with graphs=full"
    )
    choices = (*_layout_choices(job), *_workload_choices(job))
    if CudaGraphScope.FULL not in graphs:
        yield from _check_scopes(job)
        rule = (
            "the engine captures parts of layers whose work differs in its tokens alone, forward "
            f"and backward: not with graphs={'+'.join(graphs)}"
        )
        choices = (*_part_choices(job), *_mixer_choices(job), *_router_choices(job))
    for field, value, is_refused, nearest in choices:
        if is_refused:
            yield Reason(field=field, value=str(value), rule=rule, nearest=nearest)


def _check_scopes(job: Job) -> Iterator[Reason]:
    """Yield the parts of layers that the engine does not capture at all, or not of this model."""
    layout = job.layout
    graphs = layout.graphs
    model = job.model
    value = "+".join(graphs)
    is_direct = layout.dispatcher.facts.payload is Payload.ROWS and not layout.rank_capacity
    is_partial = layout.capacity > 0 and layout.capacity_fill is not CapacityFill.PADDED
    if CudaGraphScope.MOE_PREPROCESS in graphs and (not is_direct or is_partial):
        rule = (
            "the engine captures how rows of a plain all-to-all are mapped, where all slots have "
            "rows or capacities are padded"
        )
        nearest = "+".join(part for part in graphs if part is not CudaGraphScope.MOE_PREPROCESS)
        yield Reason(field="layout.graphs", value=value, rule=rule, nearest=nearest or "none")
    if model.residual_streams > 1 or model.attention.indexer is not None:
        rule = (
            "the engine captures parts that take and give one hidden state: not beside parallel "
            "streams, nor where keys are chosen for other layers"
        )
        yield Reason(field="layout.graphs", value=value, rule=rule, nearest="none")


def _part_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of a part of a layer."""
    layout = job.layout
    outside = [kept for kept in layout.offload if kept not in _captured_offloads(layout)]
    captured = [kept for kept in layout.offload if kept not in outside]
    precision = job.workload.precision
    task = job.workload.fine_tuning.task
    # Until weight gradients are computed, a slot would be held that is free without graphs.
    whole = plain_schedule(layout.vpp)
    yield "layout.schedule", layout.schedule, layout.schedule.splits_backward, whole
    # Gathered weights lie elsewhere each time, and gradients in shards.
    yield "layout.zero", layout.zero, layout.zero >= 2, "1"
    # A graph holds what it keeps and what it hands on, wherever copies of it lie.
    yield "layout.offload", "+".join(captured), bool(captured), "+".join(outside) or "none"
    # Scales of the steps before, and rounding that a step's number seeds.
    is_wide = precision in (Dtype.BF16, Dtype.FP32)
    yield "train.precision", precision, not is_wide, Dtype.BF16
    # Chats fill micro-batches unevenly: which tokens count is a number of the host.
    yield "train.task", task, task is not Task.PRETRAIN, Task.PRETRAIN


def _mixer_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of attention or of a recurrence."""
    if not _MIXERS & set(job.layout.graphs):
        return
    documents = job.workload.data.documents
    # Documents are cut elsewhere in each micro-batch.
    is_bounded = documents is not DocumentMasking.JOINED
    yield "data.documents", documents, is_bounded, DocumentMasking.JOINED


def _captured_offloads(layout: Layout) -> frozenset[Offload]:
    """Return the activations that lie in graphs of a layout."""
    captured = {Offload.MLP_NORM}  # the output of a mixer, the input of a router
    if _MIXERS & set(layout.graphs):
        captured |= _MIXER_OFFLOADS
    return frozenset(captured)


def _router_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of a router."""
    layout = job.layout
    if CudaGraphScope.MOE_ROUTER not in layout.graphs:
        return
    router = job.workload.router
    recomputes = Recompute.LAYERNORM in layout.recompute
    others = [part for part in layout.recompute if part is not Recompute.LAYERNORM]
    # The norm's output leaves the graph, which holds it anyway.
    yield "layout.recompute", Recompute.LAYERNORM, recomputes, "+".join(others) or "none"
    yield from _routing_choices(job)
    # Drawn on the host.
    yield "train.force", router.force, router.force is RouterForce.SKEWED, RouterForce.NONE


def _layout_choices(job: Job) -> Iterator[_Choice]:
    layout = job.layout
    is_even = job.workload.router.force is RouterForce.BALANCED and not layout.capacity
    is_fixed = job.model.moe is None or layout.has_fixed_rows or is_even
    overlaps = "+".join(overlap for overlap in layout.overlap if overlap is not Overlap.SHARED)
    offloads = "+".join(kept for kept in layout.offload if kept is not Offload.OPTIMIZER)
    yield "layout.rank_capacity", 0, not is_fixed, "2"
    yield "layout.dispatcher", layout.dispatcher, counts_copies(layout), DEFAULT_LAYOUT.dispatcher
    yield "layout.pp", layout.pp, layout.pp > 1, "1"
    yield "layout.zero", layout.zero, layout.zero >= 2, "1"
    yield "layout.spare", layout.spare, layout.spare > 0, "0"
    yield "layout.overlap", overlaps, bool(overlaps), "none"
    yield "layout.offload", offloads, bool(offloads), "none"


def _workload_choices(job: Job) -> Iterator[_Choice]:
    workload = job.workload
    router = workload.router
    task = workload.fine_tuning.task
    documents = workload.data.documents
    precision = workload.precision
    is_wide = precision in (Dtype.BF16, Dtype.FP32)
    yield "train.precision", precision, not is_wide, Dtype.BF16
    yield "train.force", router.force, router.force is RouterForce.SKEWED, RouterForce.NONE
    yield from _routing_choices(job)
    yield "train.task", task, task is not Task.PRETRAIN, Task.PRETRAIN
    frozen = "+".join(workload.fine_tuning.freeze)
    yield "train.freeze", frozen, bool(frozen), "[]"
    is_bounded = documents is not DocumentMasking.JOINED
    yield "data.documents", documents, is_bounded, DocumentMasking.JOINED


def _routing_choices(job: Job) -> Iterator[_Choice]:
    """Yield the ways to choose experts for which the host reads or draws numbers."""
    router = job.workload.router
    yield "train.jitter_eps", router.jitter_eps, router.jitter_eps > 0, "0"
    is_sinkhorn = router.assignment is RouterAssignment.SINKHORN
    yield "train.assignment", router.assignment, is_sinkhorn, RouterAssignment.TOP_K
    for key in ("record_routes", "replay_routes"):
        folder = getattr(job.workload.routes, key)
        yield f"train.{key}", folder, bool(folder), "no routes"
