"""A plan as torchtitan's TOML configuration (its job_config.py of late 2025, the last with TOML
files).

torchtitan knows models by flavours, shards weights, gradients and states together (FSDP) or not at
all, and gives experts ranks of data, context and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tomli_w

from moewright.codec import format_layout
from moewright.rules.stages import pipeline_chunks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import (
    CpComm,
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    RouterAssignment,
    RouterForce,
    SaveMode,
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
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7B"),
    "Qwen/Qwen3-4B": ("qwen3", "4B"),
    "Qwen/Qwen3-8B": ("qwen3", "8B"),
    "Qwen/Qwen3-14B": ("qwen3", "14B"),
    "Qwen/Qwen3-32B": ("qwen3", "32B"),
    "Qwen/Qwen3-30B-A3B": ("qwen3", "30B-A3B"),
    "Qwen/Qwen3-235B-A22B": ("qwen3", "235B-A22B"),
}
SCHEDULES = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPEV: "DualPipeV",
}
_ROTATE = {
    CpComm.P2P: "alltoall",
    CpComm.ALL_GATHER: "allgather",
}  # keys pass on hop by hop, or all at once
_BACKENDS = {DispatcherKind.ALL_TO_ALL: "standard", DispatcherKind.DEEPEP: "deepep"}


def render_torchtitan_config(plan: Plan) -> str:
    """A TOML file for torchtitan's --job.config_file. Raises BadInput with a Reason for each thing
    it cannot say."""
    reasons = tuple(_refusals(plan))
    if reasons:
        raise BadInput(*reasons)
    name, flavour = FLAVOURS[plan.model.name]
    workload, optimizer = plan.workload, plan.workload.optimizer
    sections: dict[str, dict[str, Any]] = {
        "job": {
            "description": f"{plan.model.name}, {format_layout(plan.layout)}, plan {plan.fingerprint}"
        },
        "model": {"name": name, "flavor": flavour},
        "optimizer": {
            "name": "AdamW",
            "lr": optimizer.lr,
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "lr_scheduler": {
            "warmup_steps": optimizer.warmup_steps,
            "decay_type": "cosine",
            "min_lr_factor": optimizer.min_lr_fraction,
        },
        "training": _training(plan),
        "parallelism": _parallelism(plan),
        "activation_checkpoint": {"mode": "full" if plan.layout.recompute else "none"},
        "checkpoint": _checkpoint(workload),
        "debug": {
            "seed": workload.seed,
            "moe_force_load_balance": workload.router.force is RouterForce.BALANCED,
        },
    }
    return tomli_w.dumps(sections)


def _training(plan: Plan) -> dict[str, Any]:
    """A pipeline takes a rank's whole batch and cuts it; without one, gradients of local batches
    are summed."""
    workload, layout = plan.workload, plan.layout
    local = workload.global_batch // layout.dp if layout.pp > 1 else layout.mbs
    section: dict[str, Any] = {
        "dataset": "c4",
        "seq_len": workload.seq_len,
        "local_batch_size": local,
        "global_batch_size": workload.global_batch,
        "max_norm": workload.optimizer.clip_norm,
        "dtype": "float32",
        "mixed_precision_param": "float32" if workload.precision is Dtype.FP32 else "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    return section | ({"steps": workload.steps} if workload.steps else {})


def _parallelism(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    sharded = (layout.shard // layout.cp or layout.dp) if layout.zero == 3 else 1
    section: dict[str, Any] = {
        "data_parallel_shard_degree": sharded,
        "data_parallel_replicate_degree": layout.dp // sharded,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.cp > 1:
        section["context_parallel_rotate_method"] = _ROTATE[layout.cp_comm]
    if layout.pp > 1:
        section["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        section["pipeline_parallel_microbatch_size"] = layout.mbs
        section["module_fqns_per_model_part"] = [list(part) for part in _parts(plan.model, layout)]
        section["pipeline_parallel_expert_parallel_overlap"] = Overlap.EP in layout.overlap
    if plan.model.moe:
        section["expert_parallel_degree"] = layout.ep
        section["expert_tensor_parallel_degree"] = layout.etp
        section["expert_parallel_comm_backend"] = _BACKENDS[layout.dispatcher]
    return section


def _parts(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, ...]]:
    """Names of the modules on every virtual stage, in model order."""
    for chunk in pipeline_chunks(model, layout):
        layers = (f"layers.{layer}" for layer in chunk.layers)
        yield (
            *(("tok_embeddings",) if chunk.has_embedding else ()),
            *layers,
            *(("norm", "output") if chunk.has_loss else ()),
        )


def _checkpoint(workload: Workload) -> dict[str, Any]:
    checkpoint = workload.checkpoint
    if not checkpoint.every_steps:
        return {"enable": False}
    return {
        "enable": True,
        "interval": checkpoint.every_steps,
        "keep_latest_k": checkpoint.keep,
        "async_mode": "async" if checkpoint.mode is SaveMode.ASYNC else "disabled",
    }


def _no(field: str, value: object, rule: str, nearest: object = "") -> Reason:
    return Reason(field=field, value=str(value), rule=f"torchtitan {rule}", nearest=str(nearest))


def _refusals(plan: Plan) -> Iterator[Reason]:
    model, layout = plan.model, plan.layout
    if plan.hardware.device.kind is not DeviceKind.CUDA:
        yield _no(
            "hardware.device.kind",
            plan.hardware.device.kind,
            "is planned for CUDA devices",
            DeviceKind.CUDA,
        )
    if model.name not in FLAVOURS:
        yield _no("model.name", model.name, "has no flavour of this model", "Qwen/Qwen3-30B-A3B")
        return
    family = FLAVOURS[model.name][0]
    if model.moe and model.moe.latent_size:
        yield _no(
            "model.moe_latent_size", model.moe.latent_size, "has no experts in a latent space", 0
        )
    if model.mtp_layers:
        yield _no("model.mtp_layers", model.mtp_layers, "predicts one token ahead", 0)
    for field, value in (("pp", layout.pp), ("cp", layout.cp)):
        if family == "qwen3" and value > 1:
            yield _no(f"layout.{field}", value, f"runs qwen3 without {field}", 1)
    yield from _shards(layout, model)
    yield from _memory(layout)
    yield from _overlap(layout)
    yield from _work(plan.workload)


def _shards(layout: Layout, model: ModelSpec) -> Iterator[Reason]:
    if layout.zero == 1 and layout.dp * layout.cp > 1:
        yield _no(
            "layout.zero", 1, "shards weights and gradients with the optimizer, or nothing", 3
        )
    if layout.shard and layout.shard % layout.cp:
        yield _no("layout.shard", layout.shard, "shards over whole context groups", layout.cp)
    if layout.tp > 1 and not layout.sp:
        yield _no("layout.sp", "false", "runs tensor parallelism with sequence parallelism", "true")
    if layout.cp > 1 and layout.cp_comm not in _ROTATE:
        yield _no("layout.cp_comm", layout.cp_comm, "rotates or gathers keys", CpComm.P2P)
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        yield _no(
            "layout.schedule", layout.schedule, f"has {', '.join(SCHEDULES)}", Schedule.ONE_F_ONE_B
        )
    if layout.vpp_group:
        yield _no("layout.vpp_group", layout.vpp_group, "groups micro-batches by itself", 0)
    if model.moe is None:
        return
    if layout.dispatcher not in _BACKENDS:
        yield _no(
            "layout.dispatcher",
            layout.dispatcher,
            "dispatches all-to-all or by DeepEP",
            DispatcherKind.ALL_TO_ALL,
        )
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        rule = "keeps experts in blocks by number"
        yield _no(
            "layout.expert_placement", layout.expert_placement, rule, ExpertPlacement.CONTIGUOUS
        )
    if layout.capacity:
        yield _no("layout.capacity", layout.capacity, "drops no rows", 0)
    if layout.ep == 1:
        if layout.etp != layout.tp:
            yield _no(
                "layout.etp", layout.etp, "cuts experts like all else where ep is 1", layout.tp
            )
        return
    if layout.etp not in (1, layout.tp):
        yield _no("layout.etp", layout.etp, "cuts experts over tensor parallelism or not at all", 1)
    borrowed = layout.cp * (layout.tp if layout.etp == 1 else 1)
    if layout.ep % borrowed or (layout.dp * borrowed) % layout.ep:
        rule = f"gives experts all {borrowed} ranks of context and tensor parallelism and some of data parallelism"
        yield _no("layout.ep", layout.ep, rule, borrowed)


def _memory(layout: Layout) -> Iterator[Reason]:
    layers = tuple(one for one in layout.recompute if one is not Recompute.LOSS)
    if layers != layout.recompute:
        rule = "export has no loss that makes its logits in pieces"
        yield _no("layout.recompute", Recompute.LOSS, rule, "+".join(layers) or "none")
    if layers not in ((), (Recompute.FULL,)) or layout.recompute_block or layout.recompute_span > 1:
        value = "+".join(layers)
        yield _no(
            "layout.recompute",
            value,
            "replays each layer in full, operators of its own choice, or nothing",
            "full",
        )
    if layout.offload:
        yield _no(
            "layout.offload",
            "+".join(layout.offload),
            "moves weights, gradients and states together",
            "none",
        )
    if layout.graphs:
        yield _no("layout.graphs", "+".join(layout.graphs), "export captures no graphs", "none")


def _overlap(layout: Layout) -> Iterator[Reason]:
    if Overlap.TP in layout.overlap:
        yield _no(
            "layout.overlap",
            Overlap.TP,
            "overlaps it in compiled models only, which no plan prices",
            "none",
        )
    if Overlap.EP in layout.overlap and (
        layout.schedule is not Schedule.DUALPIPEV or layout.recompute
    ):
        yield _no(
            "layout.overlap", Overlap.EP, "overlaps it under dualpipev without recompute", "none"
        )


def _work(workload: Workload) -> Iterator[Reason]:
    optimizer, loss, router = workload.optimizer, workload.loss, workload.router
    if workload.precision not in (Dtype.BF16, Dtype.FP32):
        yield _no(
            "workload.precision", workload.precision, "export computes in bf16 or fp32", Dtype.BF16
        )
    if workload.grad_dtype is not Dtype.FP32:
        yield _no(
            "workload.grad_dtype", workload.grad_dtype, "reduces gradients in fp32", Dtype.FP32
        )
    if optimizer.moment_dtype is not Dtype.FP32:
        yield _no(
            "workload.moment_dtype",
            optimizer.moment_dtype,
            "keeps moments like weights",
            Dtype.FP32,
        )
    if not optimizer.clip_norm:
        yield _no("workload.clip_norm", 0, "always clips", 1)
    if optimizer.decay_steps not in (0, workload.steps):
        yield _no(
            "workload.decay_steps", optimizer.decay_steps, "decays to the last step", workload.steps
        )
    if workload.ramp.ramp_start:
        yield _no("workload.ramp_start", workload.ramp.ramp_start, "has batches of one size", 0)
    if loss.aux_coeff or loss.seq_aux_coeff or loss.global_aux_coeff or loss.z_coeff:
        yield _no("workload.aux_coeff", loss.aux_coeff, "balances by a bias alone", 0)
    if (
        router.force is RouterForce.SKEWED
        or router.assignment is not RouterAssignment.TOP_K
        or router.jitter_eps
    ):
        yield _no(
            "workload.router",
            router.force,
            "chooses top-k or gives every expert as much",
            RouterForce.NONE,
        )
    if workload.data.documents is not DocumentMasking.JOINED:
        yield _no(
            "data.documents",
            workload.data.documents,
            "bounds documents by flavours of its own",
            DocumentMasking.JOINED,
        )
    if workload.data.train:
        yield _no("data.train", workload.data.train, "reads datasets, not token files", "no data")
    if workload.weights:
        yield _no(
            "workload.weights", workload.weights, "starts from checkpoints of its own", "none"
        )
    if workload.checkpoint.every_steps and workload.checkpoint.keep < 2:
        yield _no("checkpoint.keep", workload.checkpoint.keep, "keeps at least the last two", 2)
