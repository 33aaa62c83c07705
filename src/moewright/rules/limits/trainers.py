"""Which trainers start a job, by the refusals that their exports and the engine itself raise."""

from __future__ import annotations

from enum import StrEnum

from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import (
    unsupported_device,
    unsupported_layout,
    unsupported_model,
)
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.rules.limits.torchtitan_limits import torchtitan_refusals
from moewright.spec.errors import Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_LAYOUT = "layout."


class TargetTrainer(StrEnum):
    """The trainers that a search can be bound to."""

    ENGINE = "engine"  # this package's own
    MEGATRON = "megatron"  # Megatron-LM
    TORCHTITAN = "torchtitan"


def trainer_refusals(trainer: TargetTrainer, job: Job, hardware: Hardware) -> tuple[Reason, ...]:
    """Return why a trainer does not train a legal job; () where it does."""
    if trainer is TargetTrainer.MEGATRON:
        return megatron_refusals(job, hardware)
    if trainer is TargetTrainer.TORCHTITAN:
        return tuple(torchtitan_refusals(job, hardware))
    return (
        *unsupported_device(hardware),
        *unsupported_model(job.model, job.workload),
        *unsupported_layout(job),
    )


def job_refusals(
    trainer: TargetTrainer, model: ModelSpec, workload: Workload, hardware: Hardware
) -> tuple[Reason, ...]:
    """Return why a trainer does not train a job in any layout; () where it may."""
    job = Job(model=model, workload=workload, layout=Layout(world_size=hardware.count))
    reasons = trainer_refusals(trainer, job, hardware)
    return tuple(reason for reason in reasons if not reason.field.startswith(_LAYOUT))
