"""The state of the optimizer in Megatron-LM's checkpoints: its names, and what is no tensor of it.

Main weights and moments have the names and shapes of the weights, behind `optimizer.state.`: so
write --dist-ckpt-optim-fully-reshardable, the optimizer that is not distributed, and releases up to
0.14. What --use-distributed-optimizer writes without that option are buckets of one layout,
which say nothing of the tensors in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moewright.codec import from_data
from moewright.engine.checkpoint import CheckpointIndex, PayloadReader, read_tensor_box
from moewright.rules.batch_rampup import step_samples
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import BatchRampSpec, OptimizerSpec, Workload

STATE_PREFIX = "optimizer.state."
# By the state in Megatron-LM: what our checkpoints put before the name of the tensor.
OWN_PREFIXES: Mapping[str, str] = MappingProxyType(
    {"param": "", "exp_avg": "optim/exp_avg/", "exp_avg_sq": "optim/exp_avg_sq/"}
)
_MAIN_WEIGHTS = ("param", "fp32_param", "master_param")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
UPDATES = "optim/updates"
LOSS_SCALE = "optim/loss_scale"
_HYSTERESIS = 2  # --hysteresis, as it is when not given
_MATRICES = 1.0  # the factor of their weight decay; norms and biases have none


class ChainedOptimizers(StrEnum):
    """How the run that loads a checkpoint cuts its optimizer."""

    JOINT = "joint"  # one for all parameters: no expert parallelism
    SPLIT = "split"  # one for dense parameters, one for experts: with expert parallelism


def find_states(folder: Path, names: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Return by our prefix of a state the names that its tensors have, by those of the weights.

    Raises:
        BadInput: the checkpoint has no state of AdamW that any layout could read.
    """
    states: dict[str, dict[str, str]] = {prefix: {} for prefix in OWN_PREFIXES.values()}
    has_buckets = False
    for name in names:
        has_buckets |= _BUCKET.match(name) is not None
        match = _STATE.fullmatch(name)
        if match is None:
            continue
        state, weight = match.groups()
        key = "param" if state in _MAIN_WEIGHTS else state
        if key not in OWN_PREFIXES:
            raise BadInput(Reason(field=f"{folder}: {name}", rule="is no state of AdamW"))
        states[OWN_PREFIXES[key]][weight] = name
    if not states[OWN_PREFIXES["exp_avg"]]:
        nearest = "import the weights alone"
        rule = "holds no state of the optimizer"
        if has_buckets:
            rule = "holds the optimizer in buckets of the layout that saved it (dp_reshardable)"
            nearest = "load it in that layout with --dist-ckpt-optim-fully-reshardable, and save"
        raise BadInput(Reason(field=str(folder), rule=rule, nearest=nearest))
    return states


def describe_weights(step: int) -> dict[str, Any]:
    """Return the content of common.pt beside weights alone."""
    return {
        "iteration": step,
        "checkpoint_version": 3.0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def describe_optimizer(
    index: CheckpointIndex, checkpoint: Path, optimizer: ChainedOptimizers, *, is_moe: bool
) -> dict[str, Any]:
    """Return the content of common.pt beside weights and the state of AdamW.

    Raises:
        BadInput: the checkpoint is not of a run.
    """
    train = index.extra.get("train")
    if not isinstance(train, dict):
        rule = "is not of a run: it has no state of the optimizer"
        raise BadInput(Reason(field=str(checkpoint), rule=rule, nearest="leave --optimizer out"))
    spec = from_data(OptimizerSpec, train["optimizer"], where=f"{checkpoint}: train.optimizer")
    ramp = from_data(BatchRampSpec, train.get("ramp", {}), where=f"{checkpoint}: train.ramp")
    workload = Workload(
        seq_len=train["seq_len"], global_batch=train["global_batch"], optimizer=spec, ramp=ramp
    )
    common = describe_weights(index.step)
    common["content_metadata"] |= {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    common["opt_param_scheduler"] = _describe_schedule(workload, train["decay_steps"], index.step)
    counts = _read_counts(index, checkpoint)
    whole = _describe_groups(spec, counts, is_expert=False)
    if optimizer is ChainedOptimizers.JOINT or not is_moe:
        common["optimizer"] = whole
    else:
        common["optimizer"] = {0: whole, 1: _describe_groups(spec, counts, is_expert=True)}
    return common


def _read_counts(index: CheckpointIndex, checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Read the number of updates, and the scale of the loss where there is one."""
    names = (UPDATES, LOSS_SCALE)
    with PayloadReader(checkpoint) as reader:
        return {
            entry.name: read_tensor_box(reader, entry, (0,), entry.shape)
            for entry in index.tensors
            if entry.name in names
        }


def _describe_schedule(workload: Workload, decay: int, step: int) -> dict[str, Any]:
    """Return the state of the learning rate's schedule, which counts samples."""
    spec = workload.optimizer
    return {
        "max_lr": spec.lr,
        "min_lr": _min_lr(spec),
        "lr_warmup_steps": step_samples(workload, spec.warmup_steps).first,
        "num_steps": step_samples(workload, step).first,
        "lr_decay_style": spec.lr_decay.megatron_word,
        "lr_decay_steps": step_samples(workload, decay).first,
    }


def _min_lr(spec: OptimizerSpec) -> float:
    """Return the last learning rate as an export's --min-lr says it."""
    return float(f"{spec.lr * spec.min_lr_fraction:.12g}")


def _describe_groups(
    spec: OptimizerSpec, counts: Mapping[str, torch.Tensor], *, is_expert: bool
) -> dict[str, Any]:
    """Return what is no tensor of an optimizer: the groups of parameters that it decays, or not.

    A group is looked up by what distinguishes it, so that one too many does no harm.
    """
    groups = [
        {
            "is_expert_parallel": is_expert,
            "default_config": True,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": spec.lr,
            "min_lr": _min_lr(spec),
            "lr": spec.lr,
            "betas": (spec.beta1, spec.beta2),
            "eps": spec.eps,
            "weight_decay": spec.weight_decay * wd_mult,
            "bias_correction": True,
            "amsgrad": False,
            "step": int(counts[UPDATES]),
        }
        for wd_mult in (_MATRICES, 0.0)
    ]
    described: dict[str, Any] = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": "fully_reshardable",
    }
    if LOSS_SCALE in counts:
        scale, finite_steps = counts[LOSS_SCALE].tolist()
        described["grad_scaler"] = {
            "scale": torch.tensor([scale]),
            "growth_tracker": int(finite_steps),
            "hysteresis_tracker": _HYSTERESIS,
        }
    return described
