"""Settings that `verify` changes: every field of a workload is one, or is left out by name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import tiny_jobs
from moewright.codec import parse_layout
from moewright.engine.run.checked_settings import NOT_CHANGED, USES, list_fields, list_settings
from moewright.rules.job import Job
from moewright.spec.workload import (
    DataSpec,
    FineTuningSpec,
    LossSpec,
    MatrixUpdate,
    MuonSpec,
    RouterTraining,
    Task,
    Workload,
)

WORKLOAD = tiny_jobs.build_workload(DataSpec())


def count_fields(record: Any) -> int:
    values = (getattr(record, field.name) for field in fields(record))
    return sum(count_fields(value) if is_dataclass(value) else 1 for value in values)


def build_job(**changes: Any) -> Job:
    workload = replace(WORKLOAD, **changes)
    layout = parse_layout("mbs2", world_size=1)
    return Job(model=tiny_jobs.MODEL, workload=workload, layout=layout)


def test_every_field_of_a_workload_is_changed_or_left_out_by_name() -> None:
    names = list_fields(WORKLOAD)
    assert len(names) == count_fields(WORKLOAD)  # no two have one name
    assert names.keys() == USES.keys() | NOT_CHANGED
    assert not USES.keys() & NOT_CHANGED


def test_each_setting_is_changed_where_training_reads_it_and_nothing_else_is() -> None:
    optimizer = replace(WORKLOAD.optimizer, clip_norm=1.0, matrix_update=MatrixUpdate.MUON)
    job = build_job(
        optimizer=optimizer,
        muon=MuonSpec(muon_nesterov=True),
        loss=LossSpec(aux_coeff=0.1, seq_aux_coeff=0.1, global_aux_coeff=0.1, z_coeff=0.1),
        router=RouterTraining(jitter_eps=0.1),
    )
    changed = list_settings(job, steps=2, clipped_steps=1)
    without_model = {"mtp_coeff", "indexer_coeff", "bias_update_rate", "lora_alpha"}
    assert changed.keys() == {f"train.{name}" for name in USES.keys() - without_model}
    before = list_fields(job.workload)
    for name, other in changed.items():
        values = list_fields(other.workload)
        (field,) = (key for key, value in values.items() if value != before[key])
        assert name == f"train.{field}"
        assert isinstance(other.workload, Workload)


def test_what_one_update_or_a_job_does_not_read_is_not_changed() -> None:
    one_step = list_settings(build_job(), steps=1, clipped_steps=0)
    assert "train.beta1" not in one_step
    assert "train.clip_norm" not in one_step
    adapters = build_job(fine_tuning=FineTuningSpec(task=Task.LORA))
    names = list_settings(adapters, steps=3, clipped_steps=3)
    assert "train.lora_alpha" in names
    assert "train.aux_coeff" not in names  # routers are frozen
