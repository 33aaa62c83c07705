"""What torchtitan does not start at b5bcd76c6 (2026-08-21), or its configuration cannot say.

It knows models by flavours, and shards weights, gradients and optimizer states together (FSDP) or
not at all. Its expert parallelism takes ranks of data, context and tensor parallelism. A refusal
names the nearest that starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from moewright.families.table import find_family
from moewright.rules.job import Job
from moewright.rules.limits.export_limits import missing_choices, unexported_training
from moewright.spec.errors import Reason
from moewright.spec.hardware import DeviceKind, Hardware
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    LAYOUT_FIELDS,
    CpComm,
    Layout,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    MatrixUpdate,
    RouterAssignment,
    RouterForce,
    TrainerSpec,
    Workload,
)

# Catalogue name -> torchtitan's model and flavour, as its models/*/__init__.py list them.
FLAVOURS = {
    "meta-llama/Meta-Llama-3-8B": ("llama3", "8B"),
    "meta-llama/Meta-Llama-3-70B": ("llama3", "70B"),
    "meta-llama/Llama-3.1-8B": ("llama3", "8B"),
    "meta-llama/Llama-3.1-70B": ("llama3", "70B"),
    "meta-llama/Llama-3.1-405B": ("llama3", "405B"),
    "deepseek-ai/DeepSeek-V2-Lite": ("deepseek_v3", "16B"),
    "deepseek-ai/DeepSeek-V2": ("deepseek_v3", "236B"),
    "deepseek-ai/DeepSeek-V3": ("deepseek_v3", "671B"),
    "openai/gpt-oss-20b": ("gpt_oss", "20b"),
    "openai/gpt-oss-120b": ("gpt_oss", "120b"),
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7B"),
    "Qwen/Qwen3-4B": ("qwen3", "4B"),
    "Qwen/Qwen3-8B": ("qwen3", "8B"),
    "Qwen/Qwen3-14B": ("qwen3", "14B"),
    "Qwen/Qwen3-32B": ("qwen3", "32B"),
    "Qwen/Qwen3-30B-A3B": ("qwen3", "30B-A3B"),
    "Qwen/Qwen3-235B-A22B": ("qwen3", "235B-A22B"),
}
SCHEDULES = tuple(schedule for schedule in Schedule if schedule.facts.torchtitan)
_ONLY_DEFAULTS = tuple(
    (field, field.facts.torchtitan_instead)
    for field in LAYOUT_FIELDS
    if field.facts.torchtitan_instead
)
# Its attention of varying lengths takes no part of a sequence.
_WHOLE_SEQUENCES = "gpt_oss"
_MTP_FAMILY = "deepseek_v3"  # the models that predict further tokens


def _refusal(field: str, value: object, rule: str, nearest: object = "") -> Reason:
    return Reason(field=field, value=str(value), rule=f"torchtitan {rule}", nearest=str(nearest))


def torchtitan_refusals(job: Job, hardware: Hardware) -> Iterator[Reason]:
    """Yield why torchtitan does not train a legal job."""
    model, workload, layout = job.model, job.workload, job.layout
    device = hardware.device
    if not device.kind.runs_cuda:
        rule = "is planned for CUDA and ROCm devices"
        yield _refusal("hardware.device.kind", device.kind, rule, DeviceKind.CUDA)
    if find_family(model.family).torchtitan_with_images:
        rule = "has this model with its images, which no plan holds"
        yield _refusal("model.name", model.name, rule, "Qwen/Qwen3-30B-A3B")
        return
    if model.name not in FLAVOURS:
        yield _refusal(
            "model.name", model.name, "has no flavour of this model", "Qwen/Qwen3-30B-A3B"
        )
        return
    family = FLAVOURS[model.name][0]
    if family == _WHOLE_SEQUENCES and layout.cp > 1:
        yield _refusal("layout.cp", layout.cp, "cuts no sequences of gpt_oss", 1)
    if model.moe and model.moe.latent_size:
        yield _refusal(
            "model.moe_latent_size", model.moe.latent_size, "has no experts in a latent space", 0
        )
    if model.tie_embeddings and layout.pp > 1:
        yield _refusal("layout.pp", layout.pp, "ties no embeddings over a pipeline", 1)
    heads = model.attention.kv_heads
    if model.attention.kind is not AttentionKind.MLA and heads % layout.tp:
        rule = f"cuts {heads} key-value heads over no {layout.tp} ranks"
        # The largest degree below that cuts both.
        yield _refusal("layout.tp", layout.tp, rule, gcd(heads, layout.tp))
    if model.mtp_layers and (family != _MTP_FAMILY or layout.pp > 1):
        rule = "has MTP only in deepseek_v3, and without a pipeline"
        yield _refusal("model.mtp_layers", model.mtp_layers, rule, 0)
    for field, value, rule, nearest in missing_choices(layout, _ONLY_DEFAULTS):
        yield _refusal(f"layout.{field}", value, rule, nearest)
    yield from _check_sharding(layout, model)
    yield from _check_memory(layout)
    yield from _check_overlap(layout)
    yield from _check_workload(workload)


def _check_sharding(layout: Layout, model: ModelSpec) -> Iterator[Reason]:
    if layout.zero in (1, 2) and layout.dp * layout.cp > 1:
        rule = "shards weights and gradients with the optimizer, or nothing"
        yield _refusal("layout.zero", layout.zero, rule, 3)
    if layout.zero == 0 and layout.cp > 1:
        rule = "shards over context-parallel ranks whatever data-parallel ranks do"
        yield _refusal("layout.zero", layout.zero, rule, 3)
    if layout.shard and layout.shard % layout.cp:
        yield _refusal(
            "layout.shard",
            layout.shard,
            "shards only over whole context-parallel groups",
            layout.cp,
        )
    if layout.tp > 1 and not layout.sp:
        yield _refusal(
            "layout.sp", "false", "runs tensor parallelism with sequence parallelism", "true"
        )
    if layout.cp > 1 and layout.cp_comm is not CpComm.ALL_GATHER:
        rule = "gathers keys for its attention"
        yield _refusal("layout.cp_comm", layout.cp_comm, rule, CpComm.ALL_GATHER)
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        yield _refusal(
            "layout.schedule", layout.schedule, f"has {', '.join(SCHEDULES)}", Schedule.ONE_F_ONE_B
        )
    if model.moe is not None:
        yield from _check_experts(layout)


def _check_experts(layout: Layout) -> Iterator[Reason]:
    if not layout.dispatcher.facts.torchtitan:
        yield _refusal(
            "layout.dispatcher",
            layout.dispatcher,
            "dispatches all-to-all, by DeepEP or by HybridEP",
            DEFAULT_LAYOUT.dispatcher,
        )
    if layout.ep == 1:
        if layout.etp != layout.tp:
            yield _refusal(
                "layout.etp", layout.etp, "cuts experts like all else where ep is 1", layout.tp
            )
        return
    if layout.etp != 1:
        yield _refusal("layout.etp", layout.etp, "does not split experts where ep is above 1", 1)
    borrowed = layout.cp * layout.tp
    if layout.ep % borrowed or (layout.dp * borrowed) % layout.ep:
        rule = (
            f"gives experts all {borrowed} ranks of context and tensor parallelism "
            "and some of data parallelism"
        )
        yield _refusal("layout.ep", layout.ep, rule, borrowed)


def _check_memory(layout: Layout) -> Iterator[Reason]:
    layers = tuple(module for module in layout.recompute if module is not Recompute.LOSS)
    if layers != layout.recompute:
        rule = "export has no loss that computes the logits in pieces"
        yield _refusal("layout.recompute", Recompute.LOSS, rule, "+".join(layers) or "none")
    if layers not in ((), (Recompute.FULL,)) or layout.recompute_block or layout.recompute_span > 1:
        value = "+".join(layers)
        yield _refusal(
            "layout.recompute",
            value,
            "recomputes each layer in full, operators of its own choice, or nothing",
            "full",
        )


def _check_overlap(layout: Layout) -> Iterator[Reason]:
    if Overlap.TP in layout.overlap:
        yield _refusal(
            "layout.overlap",
            Overlap.TP,
            "overlaps it in compiled models only, which no plan prices",
            "none",
        )
    if Overlap.EP in layout.overlap:
        rule = "export overlaps no exchange of experts"
        yield _refusal("layout.overlap", Overlap.EP, rule, "none")


def _check_workload(workload: Workload) -> Iterator[Reason]:
    optimizer = workload.optimizer
    loss = workload.loss
    router = workload.router
    if workload.precision not in (Dtype.BF16, Dtype.FP32):
        yield _refusal(
            "workload.precision", workload.precision, "export computes in bf16 or fp32", Dtype.BF16
        )
    if workload.grad_dtype is not Dtype.FP32:
        yield _refusal(
            "workload.grad_dtype", workload.grad_dtype, "reduces gradients in fp32", Dtype.FP32
        )
    narrow_moments = [dtype for dtype in optimizer.moment_dtypes if dtype is not Dtype.FP32]
    if narrow_moments:
        rule = "keeps moments like weights"
        yield _refusal("workload.moment_dtype", narrow_moments[0], rule, Dtype.FP32)
    if not optimizer.clip_norm:
        yield _refusal("workload.clip_norm", 0, "always clips", 1)
    if optimizer.decay_steps not in (0, workload.steps):
        yield _refusal(
            "workload.decay_steps", optimizer.decay_steps, "decays to the last step", workload.steps
        )
    if workload.ramp.ramp_start:
        yield _refusal(
            "workload.ramp_start", workload.ramp.ramp_start, "has batches of one size", 0
        )
    if loss.aux_coeff or loss.seq_aux_coeff or loss.global_aux_coeff or loss.z_coeff:
        yield _refusal("workload.aux_coeff", loss.aux_coeff, "balances by a bias alone", 0)
    if (
        router.force is RouterForce.SKEWED
        or router.assignment is not RouterAssignment.TOP_K
        or router.jitter_eps
    ):
        yield _refusal(
            "workload.router",
            router.force,
            "chooses top-k or gives every expert as much",
            RouterForce.NONE,
        )
    if workload.data.documents is not DocumentMasking.JOINED:
        yield _refusal(
            "data.documents",
            workload.data.documents,
            "masks documents only in its own flavours",
            DocumentMasking.JOINED,
        )
    if workload.data.train:
        yield _refusal(
            "data.train", workload.data.train, "reads datasets, not token files", "no data"
        )
    for field, value, rule, nearest in unexported_training(workload):
        yield _refusal(f"workload.{field}", value, rule, nearest)
    if optimizer.matrix_update is not MatrixUpdate.ADAMW or workload.trainer != TrainerSpec():
        rule = "export writes AdamW and torchtitan's own kernels, without dropout"
        yield _refusal("workload.trainer", "", rule, "its defaults")
    if workload.weights:
        yield _refusal(
            "workload.weights", workload.weights, "starts from checkpoints of its own", "none"
        )
    # Its own rule: the newest may still be being written while older ones are removed.
    if workload.checkpoint.every_steps and workload.checkpoint.keep < 2:
        yield _refusal(
            "checkpoint.keep", workload.checkpoint.keep, "keeps at least the last two", 2
        )
