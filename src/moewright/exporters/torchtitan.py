"""A plan as a configuration of torchtitan: a Python module with a function that returns it.

The module is for main at b5bcd76c6 (2026-08-21); TOML files ended in February 2026. torchtitan
knows models by flavours, and shards weights, gradients and optimizer states together (FSDP) or not
at all. Its expert parallelism takes ranks of data, context and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moewright.codec import format_layout
from moewright.exporters.megatron.layout import training_steps
from moewright.exporters.torchrun import NO_FILES, RunFiles, trainer_command
from moewright.rules.batch_rampup import wsd_decay_steps
from moewright.rules.job import micro_batches, plan_job
from moewright.rules.limits.torchtitan_limits import FLAVOURS, torchtitan_refusals
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    Layout,
)
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.quoting import Python
from moewright.spec.workload import (
    Dtype,
    LrDecay,
    RouterForce,
    SaveMode,
    Workload,
)

_HEAD = """from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size"""


def render_torchtitan_config(plan: Plan, files: RunFiles = NO_FILES) -> Python:
    """Return a Python module for torchtitan's --module; its --config is `config`.

    Raises:
        BadInput: one Reason for each thing that torchtitan cannot say.
    """
    reasons = tuple(torchtitan_refusals(plan_job(plan), plan.hardware))
    if reasons:
        raise BadInput(*_point_to_search(reasons))
    return Python.lines((*_head_lines(plan, files), *_config_lines(plan, files)))


def _point_to_search(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """Name the search that plans for torchtitan, where nothing but the layout is in its way."""
    if not all(reason.field.startswith("layout.") for reason in reasons):
        return reasons
    *others, last = reasons
    rule = f"{last.rule}; `plan --runs-on torchtitan` finds layouts that it starts"
    return (*others, replace(last, rule=rule))


def _head_lines(plan: Plan, files: RunFiles) -> Iterator[Python]:
    family = Python.name(FLAVOURS[plan.model.name][0])
    layout_text = format_layout(plan.layout)
    yield Python.comment("{}, {}, plan {}", plan.model.name, layout_text, plan.fingerprint)
    if not plan.workload.steps:
        steps = training_steps(plan.workload)
        yield Python.comment("The plan has no length: {} steps are written.", steps)
    yield from (Python.comment("{}", remark) for remark in files.remarks)
    yield Python.comment("Save as moewright_plan.py and start on every node, in its folder:")
    start = "-m torchtitan.train --module moewright_plan --config config"
    yield Python.comment("{} {}", trainer_command(plan), start)
    yield from map(Python.write, _HEAD.splitlines())
    yield Python.write("from torchtitan.models.{} import model_registry", family)
    if plan.model.mtp_layers:
        yield Python.write("from torchtitan.models.{} import MTPLoss", family)
    if files.tracker:
        yield Python.write("from torchtitan.components.metrics import MetricsProcessor")
    yield Python.write("from torchtitan.trainer import Trainer")
    yield Python.write("")
    yield Python.write("")


def _config_lines(plan: Plan, files: RunFiles) -> Iterator[Python]:
    """Yield the function that builds the configuration."""
    _, flavour = FLAVOURS[plan.model.name]
    optimizer = plan.workload.optimizer
    vocabulary = Python.write("global_vocab_size=decoder_vocab_size(model_spec)")
    yield Python.write("def config() -> Trainer.Config:")
    yield Python.write("    model_spec = model_registry({}{})", flavour, _registry_options(plan))
    yield Python.write("    return Trainer.Config(")
    yield Python.write("        model_spec=model_spec,")
    if plan.model.mtp_layers:
        yield Python.write("        loss=MTPLoss.Config({}),", vocabulary)
    else:
        loss = Python.write("CrossEntropyLoss.Config({})", vocabulary)
        yield Python.write("        loss=ChunkedLossWrapper.Config(loss_fn={}),", loss)
    assets = files.tokenizer or f"./assets/hf/{plan.model.name.rpartition('/')[2]}"
    yield Python.write("        hf_assets_path={},", assets)
    yield Python.write("        dataloader=GrainDataLoader.Config(")
    yield Python.write('            dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"]),')
    yield Python.write("        ),")
    yield Python.write("        optimizer=default_adamw(")
    yield Python.write(
        "            lr={}, betas=({}, {}),", optimizer.lr, optimizer.beta1, optimizer.beta2
    )
    yield Python.write(
        "            eps={}, weight_decay={},", optimizer.eps, optimizer.weight_decay
    )
    yield Python.write("        ),")
    yield from _call(
        "lr_scheduler", "LRSchedulersContainer.Config", _schedule_fields(plan.workload)
    )
    yield from _call("training", "TrainingConfig", _training_fields(plan))
    yield from _call("parallelism", "ParallelismConfig", _parallelism_fields(plan))
    yield from _call(
        "checkpoint", "CheckpointManager.Config", _checkpoint_fields(plan.workload, files)
    )
    if files.tracker:
        yield from _call("metrics", "MetricsProcessor.Config", {"enable_wandb": True})
    replays = Python.name("None")
    if plan.layout.recompute:
        replays = Python.write("FullAC.Config()")
    yield Python.write("        activation_checkpoint={},", replays)
    debug = {
        "seed": plan.workload.seed,
        "moe_force_load_balance": plan.workload.router.force is RouterForce.BALANCED,
    }
    yield from _call("debug", "DebugConfig", debug)
    yield Python.write("    )")


def _call(field: str, function: str, values: dict[str, Any]) -> Iterator[Python]:
    yield Python.write("        {}={}(", Python.name(field), Python.name(function))
    for name, value in values.items():
        yield Python.write("            {}={},", Python.name(name), value)
    yield Python.write("        ),")


def _registry_options(plan: Plan) -> Python:
    """Return what is said of the model besides its flavour."""
    options: dict[str, Any] = {}
    if plan.model.moe and plan.layout.ep > 1:
        options["moe_comm_backend"] = plan.layout.dispatcher.facts.torchtitan
    if plan.model.mtp_layers:
        options["num_mtp_layers"] = plan.model.mtp_layers
    return Python.concat(
        Python.write(", {}={}", Python.name(name), value) for name, value in options.items()
    )


def _schedule_fields(workload: Workload) -> dict[str, Any]:
    optimizer = workload.optimizer
    fields: dict[str, Any] = {
        "warmup_steps": optimizer.warmup_steps,
        "decay_type": optimizer.lr_decay.facts.torchtitan,
        "min_lr_factor": optimizer.min_lr_fraction,
    }
    if optimizer.lr_decay is LrDecay.WSD:
        steps = workload.steps or optimizer.decay_steps
        # The part of all steps in which the rate falls, after a stable one.
        ratio = wsd_decay_steps(optimizer, steps) / max(1, steps)
        fields["decay_ratio"] = round(ratio, 6)
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
        # Of what the optimizer updates; the two below are of passes and of sums.
        "dtype": "float32",
        "mixed_precision_param": "float32" if is_fp32 else "bfloat16",
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,
    }


def _parallelism_fields(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    sharded = 1
    if layout.zero == 3:
        # 0 is over all of dp; cp is counted apart there.
        sharded = layout.shard // layout.cp or layout.dp
    fields: dict[str, Any] = {
        "data_parallel_shard_degree": sharded,
        "data_parallel_replicate_degree": layout.dp // sharded,
        # torchtitan's default keeps weights gathered in a pipeline.
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.pp > 1:
        fields["pipeline_parallel_schedule"] = layout.schedule.facts.torchtitan
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


def _checkpoint_fields(workload: Workload, files: RunFiles) -> dict[str, Any]:
    checkpoint = workload.checkpoint
    if not checkpoint.every_steps:
        return {"enable": False}
    start = {"initial_load_path": files.weights} if files.weights else {}
    return {
        "enable": True,
        "folder": files.save,
        **start,
        "interval": checkpoint.every_steps,
        "keep_latest_k": checkpoint.keep,
        "async_mode": "async" if checkpoint.mode is SaveMode.ASYNC else "disabled",
    }
