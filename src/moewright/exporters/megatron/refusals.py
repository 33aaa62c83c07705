"""Refusals of what Megatron-LM's flags cannot express, each with the nearest that they can."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.engine_features import unsupported_features
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import (
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    PositionKind,
    QkNorm,
    ScoreFunction,
)
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, RouterAssignment, Workload

# Features that the engine lacks and this export writes, or refuses by a rule of its own.
_WRITTEN = frozenset(
    {
        "activation",
        "attention.qkv_bias",
        "attention.rope.interleaved",
        "attention.rope.scaling",
        "gated",
        "norm",
        "position",
    }
)
# The original positions, beta_fast and beta_slow of Megatron-LM's MLA configuration.
MLA_YARN_DEFAULTS = (4096, 32.0, 1.0)
# The original length that its llama3 scaling is written for.
LLAMA3_POSITIONS = 8192


def find_refusals(plan: Plan) -> tuple[Reason, ...]:
    """Return a Reason for everything in the plan that has no Megatron-LM flag; () for none."""
    return (
        *_check_device(plan),
        *_check_model(plan.model),
        *_check_features(plan.model),
        *_check_attention(plan.model.attention, plan.model.position),
        *_check_router(plan.model),
        *_check_layout(plan.layout, plan.workload),
        *_check_latent_experts(plan),
        *_check_precision(plan),
        *_check_training(plan.workload, plan.layout),
    )


def _refusal(field: str, value: object, rule: str, nearest: object = "") -> Reason:
    return Reason(field=field, value=str(value), rule=f"Megatron-LM {rule}", nearest=str(nearest))


def _check_device(plan: Plan) -> Iterator[Reason]:
    kind = plan.hardware.device.kind
    if kind is not DeviceKind.CUDA:
        yield _refusal("hardware.device.kind", kind, "trains on CUDA devices", DeviceKind.CUDA)


def _check_model(model: ModelSpec) -> Iterator[Reason]:
    if model.mlp_bias != model.attention.out_bias:
        rule = "has one switch for the biases of the MLP and of the attention output"
        yield _refusal("model.mlp_bias", model.mlp_bias, rule, model.attention.out_bias)
    if model.mlp_bias and not model.attention.qkv_bias:
        yield _refusal(
            "model.attention.qkv_bias", False, "adds it whenever linear layers have a bias", True
        )
    if model.moe and model.moe.expert_bias != model.mlp_bias:
        rule = "has one switch for the biases of experts and of the MLP"
        yield _refusal("model.moe.expert_bias", model.moe.expert_bias, rule, model.mlp_bias)


def _check_features(model: ModelSpec) -> Iterator[Reason]:
    """Yield the features of newer architectures, for which this export writes no flags."""
    if model.activation is Activation.RELU_SQUARED:
        rule = "export writes no flags for it"
        yield _refusal("model.activation", model.activation, rule, Activation.SILU)
    for field, value, is_new, nearest in unsupported_features(model):
        if is_new and field not in _WRITTEN:
            rule = "export writes no flags for it"
            yield _refusal(f"model.{field}", value, rule, nearest)


def _check_attention(attention: AttentionSpec, position: PositionKind) -> Iterator[Reason]:
    if attention.qk_norm is QkNorm.FULL:
        rule = "normalises queries and keys per head"
        yield _refusal("model.attention.qk_norm", attention.qk_norm, rule, QkNorm.PER_HEAD)
    if attention.sinks:
        yield _refusal("model.attention.sinks", True, "export has no attention sinks", False)
    if attention.sliding_window:
        yield _refusal(
            "model.attention.sliding_window",
            attention.sliding_window,
            "export has no sliding windows",
            0,
        )
    if position is PositionKind.ROPE:
        yield from _check_rope(attention)


def _check_rope(attention: AttentionSpec) -> Iterator[Reason]:
    rope = attention.rope
    is_mla = attention.kind is AttentionKind.MLA
    if is_mla and not rope.interleaved:
        yield _refusal(
            "model.attention.rope.interleaved",
            False,
            "rotates neighbouring elements in latent attention",
            True,
        )
    field = "model.attention.rope.scaling"
    if rope.theta != int(rope.theta):
        yield _refusal(
            "model.attention.rope.theta", rope.theta, "takes a whole rotary base", round(rope.theta)
        )
    if rope.scaling == "yarn" and is_mla:
        settings = (rope.original_max_position, rope.beta_fast, rope.beta_slow)
        if settings != MLA_YARN_DEFAULTS:
            rule = "fixes original positions, beta_fast and beta_slow of MLA's yarn"
            yield _refusal(field, f"yarn {settings}", rule, f"yarn {MLA_YARN_DEFAULTS}")
    elif rope.scaling == "llama3" and not is_mla:
        if rope.original_max_position not in (0, LLAMA3_POSITIONS):
            rule = "scales llama3 positions from a fixed length"
            yield _refusal(
                "model.attention.rope.original_max_position",
                rope.original_max_position,
                rule,
                LLAMA3_POSITIONS,
            )
    elif rope.scaling != "default":
        yield _refusal(
            field, rope.scaling, "export has no such scaling for this attention", "default"
        )


def _check_router(model: ModelSpec) -> Iterator[Reason]:
    if model.moe is None:
        return
    router = model.moe.router
    if router.logit_bias:
        yield _refusal(
            "model.moe.router.logit_bias", True, "export has no bias on the router's logits", False
        )
    if router.groups > 1 and router.scores_per_group != max(1, router.top_k // router.top_groups):
        nearest = router.top_k // router.top_groups
        rule = f"rates a group by its top_k // top_groups = {nearest} highest scores"
        yield _refusal("model.moe.router.group_scores", router.scores_per_group, rule, nearest)
    if router.score is ScoreFunction.SOFTMAX:
        if router.selection_bias:
            rule = "corrects the selection of sigmoid-like scores only"
            yield _refusal("model.moe.router.selection_bias", True, rule, False)
    elif not router.renormalize and router.top_k > 1:
        rule = f"always renormalises {router.score} scores of more than one expert"
        yield _refusal("model.moe.router.renormalize", False, rule, True)


def _check_latent_experts(plan: Plan) -> Iterator[Reason]:
    if plan.model.moe and plan.model.moe.latent_size and Overlap.SHARED in plan.layout.overlap:
        rule = "trains experts in a latent space without shared experts beside their exchange"
        yield _refusal("layout.overlap", Overlap.SHARED, rule, "none")


def _check_layout(layout: Layout, workload: Workload) -> Iterator[Reason]:
    if layout.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        nearest = Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
        yield _refusal("layout.schedule", layout.schedule, "has 1f1b and interleaved", nearest)
    if layout.dispatcher is DispatcherKind.DEDUP:
        rule = "de-duplicates tokens in DeepEP and HybridEP only"
        yield _refusal("layout.dispatcher", layout.dispatcher, rule, DispatcherKind.DEEPEP)
    if layout.shard:
        yield _refusal("layout.shard", layout.shard, "export has no hybrid sharding", "all ranks")
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        rule = "holds experts in contiguous blocks"
        yield _refusal(
            "layout.expert_placement", layout.expert_placement, rule, ExpertPlacement.CONTIGUOUS
        )
    if layout.zero == 3 and layout.pp > 1 and layout.vpp > 1:
        yield _refusal("layout.zero", 3, "export has no ZeRO-3 with virtual pipeline stages", 1)
    if Recompute.LOSS in layout.recompute:
        others = [module for module in layout.recompute if module is not Recompute.LOSS]
        yield _refusal(
            "layout.recompute",
            Recompute.LOSS,
            "export has no loss that makes its logits in pieces",
            "+".join(others) or "none",
        )
    if Offload.OPTIMIZER in layout.offload and workload.precision is Dtype.FP32:
        yield _refusal(
            "layout.offload",
            Offload.OPTIMIZER,
            "offloads the optimizer of mixed precision",
            Dtype.BF16,
        )
    moments = workload.optimizer.moment_dtype
    if not layout.zero and (Offload.OPTIMIZER in layout.offload or moments is not Dtype.FP32):
        rule = "moves and narrows moments in its distributed optimizer alone"
        yield _refusal("layout.zero", 0, rule, 1)
    yield from _check_overlap(layout)


def _check_overlap(layout: Layout) -> Iterator[Reason]:
    overlap = layout.overlap
    if Overlap.PARAM in overlap and Overlap.GRAD not in overlap:
        yield _refusal(
            "layout.overlap",
            Overlap.PARAM,
            "gathers under forward only with overlap=grad",
            "grad+param",
        )
    if Overlap.PARAM in overlap and not layout.zero:
        yield _refusal(
            "layout.overlap", Overlap.PARAM, "has weights to gather only with zero above 0", "zero1"
        )
    if Overlap.TP in overlap and not layout.sp:
        yield _refusal(
            "layout.overlap",
            Overlap.TP,
            "overlaps tensor parallelism with sequence parallelism on",
            "sp",
        )
    if Overlap.P2P in overlap and layout.vpp == 1:
        yield _refusal(
            "layout.overlap", Overlap.P2P, "overlaps p2p with virtual stages only", "vpp above 1"
        )
    if Overlap.P2P not in overlap and layout.vpp > 1 and layout.pp < 3:
        yield _refusal(
            "layout.overlap", "", "needs p2p overlap for virtual stages at pp2", Overlap.P2P
        )


def _check_training(workload: Workload, layout: Layout) -> Iterator[Reason]:
    router = workload.router
    loss = workload.loss
    if router.assignment is RouterAssignment.SINKHORN:
        if router.sinkhorn_iterations:
            yield _refusal(
                "workload.sinkhorn_iterations",
                router.sinkhorn_iterations,
                "scales until it converges",
                0,
            )
        if loss.aux_coeff or loss.seq_aux_coeff or loss.global_aux_coeff:
            yield _refusal(
                "workload.assignment",
                RouterAssignment.SINKHORN,
                "has it instead of balance losses",
                RouterAssignment.TOP_K,
            )
        if layout.capacity:
            yield _refusal("layout.capacity", layout.capacity, "drops no rows under sinkhorn", 0)
    if workload.weights:
        yield _refusal(
            "workload.weights",
            workload.weights,
            "starts from checkpoints of its own; convert them first",
            "none",
        )


def _check_precision(plan: Plan) -> Iterator[Reason]:
    workload = plan.workload
    layout = plan.layout
    precision = workload.precision
    if precision.is_narrow and not any(peak.dtype.is_narrow for peak in plan.hardware.device.peaks):
        rule = f"needs 8-bit tensor cores, which {plan.hardware.device.name} has not"
        yield _refusal("workload.precision", precision, rule, Dtype.BF16)
    if precision is Dtype.FP16 and layout.ep > 1:
        yield _refusal(
            "workload.precision", Dtype.FP16, "has no expert parallelism in fp16", Dtype.BF16
        )
    if Recompute.MOE_ACT in layout.recompute and precision in (Dtype.FP32, Dtype.FP16):
        rule = "replays moe_act of grouped experts, which it runs in bf16 alone"
        yield _refusal("layout.recompute", Recompute.MOE_ACT, rule, Recompute.MOE)
    if workload.grad_dtype not in (Dtype.FP32, Dtype.BF16):
        yield _refusal(
            "workload.grad_dtype",
            workload.grad_dtype,
            "reduces gradients in fp32 or bf16",
            Dtype.FP32,
        )
    if workload.grad_dtype is Dtype.BF16 and precision in (Dtype.FP32, Dtype.FP16):
        yield _refusal(
            "workload.grad_dtype", Dtype.BF16, "reduces in bf16 only in bf16 training", Dtype.FP32
        )
