"""Jobs that go on here with what another trainer saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moewright.api.requests import to_job_keys, translate_fields
from moewright.intake.job import read_job
from moewright.rules.adapters import is_frozen
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import MatrixUpdate

if TYPE_CHECKING:
    from moewright.engine.torch_dist.import_weights import ResumedJob


def read_resumed_job(path: Path) -> tuple[ModelSpec, ResumedJob]:
    """Read the model of a job, and what a checkpoint says that the job is to go on with.

    Raises:
        BadInput: its data cannot be read, or its optimizer is not AdamW alone.
    """
    from moewright.engine.data.preflight import check_data
    from moewright.engine.run.restore import describe_job
    from moewright.engine.torch_dist.import_weights import ResumedJob

    job = read_job(path)
    with translate_fields(to_job_keys(path)):
        if job.workload.optimizer.matrix_update is MatrixUpdate.MUON:
            rule = "of another trainer has no momentum of Muon that can be read"
            raise BadInput(Reason(field="train.matrix_update", rule=rule, nearest="adamw"))
        if is_frozen(job.workload):
            rule = "goes on with a whole model, not with adapters"
            raise BadInput(Reason(field="train.task", rule=rule, nearest="pretrain or sft"))
        fingerprint = check_data(job.model, job.workload)
    identity = describe_job(job.model, job.workload, fingerprint)
    return job.model, ResumedJob(identity=identity, workload=job.workload)
