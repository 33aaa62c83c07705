"""A plan as a configuration of torchtitan: a Python module with a function that returns it.

The module is for main at b5bcd76c6 (2026-08-21); TOML files ended in February 2026. torchtitan
knows models by flavours, and shards weights, gradients and optimizer states together (FSDP) or not
at all. Its expert parallelism takes ranks of data, context and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moewright.codec import format_layout
from moewright.exporters.megatron.layout import training_steps
from moewright.exporters.torchrun import torchrun_command
from moewright.rules.batch_rampup import wsd_decay_steps
from moewright.rules.micro_batches import micro_batches
from moewright.rules.stages import pipeline_chunks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import NETWORKS_WITHOUT_CUDA, DeviceKind, NetworkKind
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
    LrDecay,
    MatrixUpdate,
    RouterAssignment,
    RouterForce,
    SaveMode,
    Task,
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
# The communication of its experts: its own, or those of libraries.
_BACKENDS = {
    DispatcherKind.ALL_TO_ALL: "standard",
    DispatcherKind.DEEPEP: "deepep",
    DispatcherKind.HYBRIDEP: "hybridep",
}
_MTP_FAMILY = "deepseek_v3"  # the models that predict further tokens
_HEAD = """from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size"""


def render_torchtitan_config(plan: Plan) -> str:
    """Return a Python module for torchtitan's --module; its --config is `config`.

    Raises:
        BadInput: one Reason for each thing that torchtitan cannot say.
    """
    reasons = tuple(torchtitan_refusals(plan))
    if reasons:
        raise BadInput(*reasons)
    return "\n".join((*_head_lines(plan), *_config_lines(plan))) + "\n"


def _head_lines(plan: Plan) -> Iterator[str]:
    family, _ = FLAVOURS[plan.model.name]
    layout_text = format_layout(plan.layout)
    yield f"# {plan.model.name}, {layout_text}, plan {plan.fingerprint}".replace("\n", " ")
    if not plan.workload.steps:
        yield f"# The plan has no length: {training_steps(plan.workload)} steps are written."
    yield "# Save as moewright_plan.py and start on every node, in its folder:"
    start = "-m torchtitan.train --module moewright_plan --config config"
    yield f"# {torchrun_command(plan)} {start}"
    yield from _HEAD.splitlines()
    yield f"from torchtitan.models.{family} import model_registry"
    if plan.model.mtp_layers:
        yield f"from torchtitan.models.{family} import MTPLoss"
    yield "from torchtitan.trainer import Trainer"
    yield ""
    yield ""


def _config_lines(plan: Plan) -> Iterator[str]:
    """Yield the function that builds the configuration."""
    _, flavour = FLAVOURS[plan.model.name]
    optimizer = plan.workload.optimizer
    vocabulary = "global_vocab_size=decoder_vocab_size(model_spec)"
    yield "def config() -> Trainer.Config:"
    yield f"    model_spec = model_registry({flavour!r}{_registry_options(plan)})"
    yield "    return Trainer.Config("
    yield "        model_spec=model_spec,"
    if plan.model.mtp_layers:
        yield f"        loss=MTPLoss.Config({vocabulary}),"
    else:
        loss = f"CrossEntropyLoss.Config({vocabulary})"
        yield f"        loss=ChunkedLossWrapper.Config(loss_fn={loss}),"
    yield f"        hf_assets_path={'./assets/hf/' + plan.model.name.rpartition('/')[2]!r},"
    yield "        dataloader=GrainDataLoader.Config("
    yield '            dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"]),'
    yield "        ),"
    yield "        optimizer=default_adamw("
    yield f"            lr={optimizer.lr!r}, betas=({optimizer.beta1!r}, {optimizer.beta2!r}),"
    yield f"            eps={optimizer.eps!r}, weight_decay={optimizer.weight_decay!r},"
    yield "        ),"
    yield from _call(
        "lr_scheduler", "LRSchedulersContainer.Config", _schedule_fields(plan.workload)
    )
    yield from _call("training", "TrainingConfig", _training_fields(plan))
    yield from _call("parallelism", "ParallelismConfig", _parallelism_fields(plan))
    yield from _call("checkpoint", "CheckpointManager.Config", _checkpoint_fields(plan.workload))
    replays = "FullAC.Config()" if plan.layout.recompute else "None"
    yield f"        activation_checkpoint={replays},"
    debug = {
        "seed": plan.workload.seed,
        "moe_force_load_balance": plan.workload.router.force is RouterForce.BALANCED,
    }
    yield from _call("debug", "DebugConfig", debug)
    yield "    )"


def _call(field: str, function: str, values: dict[str, Any]) -> Iterator[str]:
    yield f"        {field}={function}("
    yield from (f"            {name}={value!r}," for name, value in values.items())
    yield "        ),"


def _registry_options(plan: Plan) -> str:
    """Return what is said of the model besides its flavour."""
    options: dict[str, Any] = {}
    if plan.model.moe and plan.layout.ep > 1:
        options["moe_comm_backend"] = _BACKENDS[plan.layout.dispatcher]
    if plan.model.mtp_layers:
        options["num_mtp_layers"] = plan.model.mtp_layers
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _schedule_fields(workload: Workload) -> dict[str, Any]:
    optimizer = workload.optimizer
    fields: dict[str, Any] = {
        "warmup_steps": optimizer.warmup_steps,
        "decay_type": "cosine",
        "min_lr_factor": optimizer.min_lr_fraction,
    }
    if optimizer.lr_decay is LrDecay.WSD:
        steps = workload.steps or optimizer.decay_steps
        # The part of all steps in which the rate falls, after a stable one.
        ratio = wsd_decay_steps(optimizer, steps) / max(1, steps)
        fields |= {"decay_type": "linear", "decay_ratio": round(ratio, 6)}
    return fields


def _training_fields(plan: Plan) -> dict[str, Any]:
    workload = plan.workload
    is_fp32 = workload.precision is Dtype.FP32
    return {
        "num_tokens_per_microbatch_per_dp_rank": plan.layout.mbs * workload.seq_len,
        "num_tokens_per_train_step": workload.tokens_per_step,
        "max_context_length": workload.seq_len,
        "max_norm": workload.optimizer.clip_norm,
        "steps": training_steps(workload),
        "dtype": "float32",
        "mixed_precision_param": "float32" if is_fp32 else "bfloat16",
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,
    }


def _parallelism_fields(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    sharded = 1
    if layout.zero == 3:
        sharded = layout.shard // layout.cp or layout.dp
    fields: dict[str, Any] = {
        "data_parallel_shard_degree": sharded,
        "data_parallel_replicate_degree": layout.dp // sharded,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.pp > 1:
        fields["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        fields["num_pp_microbatches"] = micro_batches(plan.workload, layout)
        fields["module_fqns_per_model_part"] = [
            list(names) for names in _module_names(plan.model, layout)
        ]
    return fields


def _module_names(model: ModelSpec, layout: Layout) -> Iterator[tuple[str, ...]]:
    """Yield the names of the modules on every virtual stage, in model order."""
    for chunk in pipeline_chunks(model, layout):
        names = [f"layers.{layer}" for layer in chunk.layers]
        if chunk.has_embedding:
            names.insert(0, "tok_embeddings")
        if chunk.has_loss:
            names += ["norm", "lm_head"]
        yield tuple(names)


def _checkpoint_fields(workload: Workload) -> dict[str, Any]:
    checkpoint = workload.checkpoint
    if not checkpoint.every_steps:
        return {"enable": False}
    return {
        "enable": True,
        "interval": checkpoint.every_steps,
        "keep_latest_k": checkpoint.keep,
        "async_mode": "async" if checkpoint.mode is SaveMode.ASYNC else "disabled",
    }


def _refusal(field: str, value: object, rule: str, nearest: object = "") -> Reason:
    return Reason(field=field, value=str(value), rule=f"torchtitan {rule}", nearest=str(nearest))


def torchtitan_refusals(plan: Plan) -> Iterator[Reason]:
    """Yield what torchtitan does not start."""
    model = plan.model
    layout = plan.layout
    if plan.hardware.device.kind is not DeviceKind.CUDA:
        yield _refusal(
            "hardware.device.kind",
            plan.hardware.device.kind,
            "is planned for CUDA devices",
            DeviceKind.CUDA,
        )
    domain = plan.hardware.fabric.domain
    if domain in NETWORKS_WITHOUT_CUDA:
        rule = "is planned for CUDA and ROCm devices"
        yield _refusal("hardware.fabric.domain", domain, rule, NetworkKind.NVLINK)
    if model.name not in FLAVOURS:
        yield _refusal(
            "model.name", model.name, "has no flavour of this model", "Qwen/Qwen3-30B-A3B"
        )
        return
    family = FLAVOURS[model.name][0]
    if model.moe and model.moe.latent_size:
        yield _refusal(
            "model.moe_latent_size", model.moe.latent_size, "has no experts in a latent space", 0
        )
    if model.mtp_layers and (family != _MTP_FAMILY or layout.pp > 1):
        rule = "predicts further tokens in deepseek_v3 alone, without a pipeline"
        yield _refusal("model.mtp_layers", model.mtp_layers, rule, 0)
    yield from _check_sharding(layout, model)
    yield from _check_memory(layout)
    yield from _check_overlap(layout)
    yield from _check_workload(plan.workload)


def _check_sharding(layout: Layout, model: ModelSpec) -> Iterator[Reason]:
    if layout.zero == 1 and layout.dp * layout.cp > 1:
        yield _refusal(
            "layout.zero", 1, "shards weights and gradients with the optimizer, or nothing", 3
        )
    if layout.shard and layout.shard % layout.cp:
        yield _refusal("layout.shard", layout.shard, "shards over whole context groups", layout.cp)
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
    if layout.vpp_group:
        yield _refusal("layout.vpp_group", layout.vpp_group, "groups micro-batches by itself", 0)
    if model.moe is not None:
        yield from _check_experts(layout)


def _check_experts(layout: Layout) -> Iterator[Reason]:
    if layout.dispatcher not in _BACKENDS:
        yield _refusal(
            "layout.dispatcher",
            layout.dispatcher,
            "dispatches all-to-all, by DeepEP or by HybridEP",
            DispatcherKind.ALL_TO_ALL,
        )
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        rule = "keeps experts in blocks by number"
        yield _refusal(
            "layout.expert_placement", layout.expert_placement, rule, ExpertPlacement.CONTIGUOUS
        )
    if layout.capacity:
        yield _refusal("layout.capacity", layout.capacity, "drops no rows", 0)
    if layout.ep == 1:
        if layout.etp != layout.tp:
            yield _refusal(
                "layout.etp", layout.etp, "cuts experts like all else where ep is 1", layout.tp
            )
        return
    if layout.etp != 1:
        yield _refusal("layout.etp", layout.etp, "keeps experts whole where ep is above 1", 1)
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
        rule = "export has no loss that makes its logits in pieces"
        yield _refusal("layout.recompute", Recompute.LOSS, rule, "+".join(layers) or "none")
    if layers not in ((), (Recompute.FULL,)) or layout.recompute_block or layout.recompute_span > 1:
        value = "+".join(layers)
        yield _refusal(
            "layout.recompute",
            value,
            "replays each layer in full, operators of its own choice, or nothing",
            "full",
        )
    if layout.offload:
        yield _refusal(
            "layout.offload",
            "+".join(layout.offload),
            "moves weights, gradients and states together",
            "none",
        )
    if layout.graphs:
        yield _refusal(
            "layout.graphs", "+".join(layout.graphs), "export captures no graphs", "none"
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
    if optimizer.moment_dtype is not Dtype.FP32:
        yield _refusal(
            "workload.moment_dtype",
            optimizer.moment_dtype,
            "keeps moments like weights",
            Dtype.FP32,
        )
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
            "bounds documents by flavours of its own",
            DocumentMasking.JOINED,
        )
    if workload.data.train:
        yield _refusal(
            "data.train", workload.data.train, "reads datasets, not token files", "no data"
        )
    if workload.fine_tuning.task is not Task.PRETRAIN:
        rule = "export writes pre-training alone"
        yield _refusal("workload.task", workload.fine_tuning.task, rule, Task.PRETRAIN)
    if optimizer.matrix_update is not MatrixUpdate.ADAMW or workload.trainer != TrainerSpec():
        rule = "export writes AdamW and torchtitan's own kernels, without dropout"
        yield _refusal("workload.trainer", "", rule, "its defaults")
    if workload.weights:
        yield _refusal(
            "workload.weights", workload.weights, "starts from checkpoints of its own", "none"
        )
    if workload.checkpoint.every_steps and workload.checkpoint.keep < 2:
        yield _refusal(
            "checkpoint.keep", workload.checkpoint.keep, "keeps at least the last two", 2
        )
