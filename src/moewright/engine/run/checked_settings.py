"""The settings of a job that must change its training, each with another value.

A setting that is lost on its way is lost in every layout alike: no comparison of layouts shows it.
So one process trains with another value of each, and some figure must change. Every field of a
workload that holds no other record is here, or in `NOT_CHANGED` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from moewright.rules.adapters import trains_indexer, trains_module
from moewright.rules.job import Job
from moewright.spec.ledger import Module
from moewright.spec.workload import (
    MatrixUpdate,
    MuonCoefficients,
    MuonScale,
    Task,
    Workload,
)

# What a number is raised by: in any job, with any value, more than rounding.
_MORE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """Whether training reads a setting at all, and its other value.

    `from_step` is the first update that it changes: moments decay from the second on.
    """

    is_read: Callable[[Job], bool]
    other: Callable[[Any], Any]
    from_step: int = 1


def _raise(value: float) -> float:
    return value + _MORE


def _halve(value: float) -> float:
    return value / 2


def _enlarge(value: float) -> float:
    return value * 1.5


def _always(job: Job) -> bool:
    return True


def _routes(job: Job) -> bool:
    return job.model.moe is not None and trains_module(job.workload.fine_tuning, Module.ROUTER)


def _moves_bias(job: Job) -> bool:
    moe = job.model.moe
    return moe is not None and moe.router.selection_bias and _routes(job)


def _has_depths(job: Job) -> bool:
    return job.model.mtp_layers > 0 and trains_module(job.workload.fine_tuning, Module.MTP)


def _has_indexer(job: Job) -> bool:
    return job.model.attention.indexer is not None and trains_indexer(job.workload)


def _is_muon(job: Job) -> bool:
    return job.workload.optimizer.matrix_update is MatrixUpdate.MUON


def _has_adapters(job: Job) -> bool:
    return job.workload.fine_tuning.task is Task.LORA


_BALANCE = _Use(is_read=_routes, other=_raise)
# Sizes that AdamW divides out of a single update.
_FROM_SECOND = 2

USES: Mapping[str, _Use] = MappingProxyType(
    {
        "aux_coeff": _BALANCE,
        "seq_aux_coeff": _BALANCE,
        "global_aux_coeff": _BALANCE,
        "z_coeff": _BALANCE,
        "mtp_coeff": _Use(is_read=_has_depths, other=_raise),
        "indexer_coeff": _Use(is_read=_has_indexer, other=_raise),
        "bias_update_rate": _Use(is_read=_moves_bias, other=_raise),
        "jitter_eps": _Use(is_read=lambda job: job.model.moe is not None, other=_halve),
        "lr": _Use(is_read=_always, other=_enlarge),
        "beta1": _Use(is_read=_always, other=_halve, from_step=_FROM_SECOND),
        "beta2": _Use(is_read=_always, other=_halve, from_step=_FROM_SECOND),
        "eps": _Use(is_read=_always, other=_raise),
        "weight_decay": _Use(is_read=_always, other=_raise),
        "clip_norm": _Use(is_read=_always, other=lambda norm: 0.0, from_step=_FROM_SECOND),
        "muon_momentum": _Use(is_read=_is_muon, other=_halve, from_step=_FROM_SECOND),
        "muon_nesterov": _Use(
            is_read=_is_muon, other=lambda is_on: not is_on, from_step=_FROM_SECOND
        ),
        "muon_num_ns_steps": _Use(is_read=_is_muon, other=lambda steps: steps + 1),
        "muon_coefficient_type": _Use(
            is_read=_is_muon,
            other=lambda kind: next(other for other in MuonCoefficients if other is not kind),
        ),
        # The other two agree for square matrices.
        "muon_scale_mode": _Use(
            is_read=_is_muon,
            other=lambda mode: (
                MuonScale.UNIT_RMS_NORM if mode is MuonScale.SPECTRAL else MuonScale.SPECTRAL
            ),
        ),
        "muon_extra_scale_factor": _Use(is_read=_is_muon, other=_enlarge),
        "lora_alpha": _Use(is_read=_has_adapters, other=_enlarge),
        "seed": _Use(is_read=lambda job: not job.workload.weights, other=lambda seed: seed + 1),
    }
)
# Sizes of the job; without them it is another one.
_SIZES = "seq_len global_batch batch_samples steps ramp_start ramp_increment ramp_samples"
# Where the numbers come from, and what of the model trains.
_SOURCES = (
    "train heldout tokenizer documents weights record_routes replay_routes "
    "task lora_rank lora_targets lora_experts lora_router quantize_base freeze objective"
)
# The rate is constant in a check.
_SCHEDULE = "min_lr_fraction warmup_steps decay_steps lr_decay wsd_decay_steps"
# Ways to the same numbers, in another format or order; a check compares formats by rounding.
_FORMATS = (
    "precision tensor_scaling fp8_format grad_dtype fused_kernels router_dtype moment_dtype "
    "second_moment_dtype bucket_elements attention_backend expert_kernels cublas_workspace_bytes "
    "cross_entropy unfused bf16_first_layers bf16_last_layers bf16_products narrowed "
    "initial_loss_scale min_loss_scale loss_scale_window amax_history_len amax_compute_algo "
    "fp8_margin prefetch"
)
# What decides which experts, which is the same for many values; or which optimizer.
_CHOICES = "assignment sinkhorn_iterations force force_std drop_policy matrix_update"
# Refused in a check, or by the engine.
_REFUSED = "dpo_beta dpo_label_smoothing attention_dropout hidden_dropout"
# What plans assume, and when a run looks at itself, saves and tells.
_BESIDE = (
    "routing load_factor load_skew load_histogram attended_share eval_every_steps "
    "router_log_every_steps eval_batches ledger_step gc_every_steps hang_timeout_s "
    "start_timeout_s first_step_timeout_s compile_timeout_s check_every rebalance_every trackers "
    "every_steps mode keep keep_every_steps copy_to copy_keep peer_every_steps start end ranks"
)
NOT_CHANGED: frozenset[str] = frozenset(
    name
    for names in (_SIZES, _SOURCES, _SCHEDULE, _FORMATS, _CHOICES, _REFUSED, _BESIDE)
    for name in names.split()
)


def list_settings(job: Job, *, steps: int, clipped_steps: int) -> dict[str, Job]:
    """Return the job with another value of each setting that must change some of so many steps.

    A setting that is 0 is off, and no step without clipping reads its bound.
    """
    changed = {}
    for name, use in USES.items():
        value = _read(job.workload, name)
        is_idle = name == "clip_norm" and not clipped_steps
        if use.is_read(job) and value and steps >= use.from_step and not is_idle:
            workload = _change(job.workload, name, use.other(value))
            changed[f"train.{name}"] = replace(job, workload=workload)
    return changed


def list_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record and of the records in it, by name; no two have one name."""
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        values |= list_fields(value) if is_dataclass(value) else {field.name: value}
    return values


def _read(workload: Workload, name: str) -> Any:
    return list_fields(workload)[name]


def _change(record: Any, name: str, value: Any) -> Any:
    """Return a record with another value of a field, in whichever record of it that is."""
    for field in fields(record):
        own = getattr(record, field.name)
        if field.name == name:
            return replace(record, **{name: value})
        if is_dataclass(own) and name in list_fields(own):
            return replace(record, **{field.name: _change(own, name, value)})
    return record
