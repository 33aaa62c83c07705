"""What a run holds as folders for others, and jobs that go on with what others saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.api.requests import to_job_keys, translate_fields
from moewright.codec import PLAN_FILE, read_json
from moewright.intake.hf import build_config
from moewright.intake.job import read_job
from moewright.rules.adapters import is_frozen
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, MatrixUpdate

if TYPE_CHECKING:
    from moewright.engine.hf.export_adapters import StoredAdapters
    from moewright.engine.torch_dist.import_weights import ResumedJob


Advance = Callable[[int], None]  # takes the bytes of each part as it is written


class ExportForm(StrEnum):
    """The forms in which a run's result is written."""

    WEIGHTS = "weights"  # a Hugging Face folder; adapters are merged into their base
    PEFT = "peft"  # adapters alone


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedExport:
    """An export that was checked: its source, its size, and what writes it into a folder."""

    checkpoint: Path
    nbytes: int
    run: Callable[[Path, Advance], None]


def holds_adapters(path: Path) -> bool:
    """Tell whether a checkpoint, or the newest one of a run, holds adapters alone."""
    from moewright.engine.checkpoint import find_checkpoint
    from moewright.engine.hf.export_adapters import find_adapters

    return find_adapters(find_checkpoint(path)) is not None


def plan_export(
    path: Path,
    *,
    form: ExportForm = ExportForm.WEIGHTS,
    dtype: Dtype | None = None,
    tokenizer: Path | None = None,
) -> PlannedExport:
    """Plan the folder of a checkpoint, or of the newest one of a run.

    Raises:
        BadInput: when there is no checkpoint, Hugging Face has no form of the model, or adapters
            are asked of a run that has none.
    """
    from moewright.engine.checkpoint import find_checkpoint
    from moewright.engine.hf import export_weights
    from moewright.engine.hf.export_adapters import find_adapters
    from moewright.engine.run.companions import plan_companions

    checkpoint = find_checkpoint(path)
    adapters = find_adapters(checkpoint)
    if adapters is not None:
        return _plan_adapters(adapters, form, dtype, tokenizer)
    if form is ExportForm.PEFT:
        rule = "holds whole weights and no adapters"
        raise BadInput(Reason(field=str(checkpoint), rule=rule, nearest="without --adapters"))
    companions = plan_companions(checkpoint, tokenizer)
    plan = export_weights.plan_export(checkpoint, dtype, _config_text, companions)
    return PlannedExport(
        checkpoint=checkpoint,
        nbytes=plan.nbytes,
        run=lambda out, advance: export_weights.run_export(plan, out, advance),
    )


def _plan_adapters(
    adapters: StoredAdapters, form: ExportForm, dtype: Dtype | None, tokenizer: Path | None
) -> PlannedExport:
    from moewright.engine.hf.export_adapters import export_merged, export_peft
    from moewright.engine.run.companions import plan_companions

    checkpoint = adapters.checkpoint
    # RUN/checkpoints/STEP: the plan lies in RUN.
    plan_path = checkpoint.absolute().parent.parent / PLAN_FILE
    base = ""
    if plan_path.is_file():
        base = read_json(Plan, plan_path).workload.weights
    if form is ExportForm.PEFT:
        return PlannedExport(
            checkpoint=checkpoint,
            nbytes=sum(file.nbytes for file in adapters.index.files),
            run=lambda out, _advance: export_peft(adapters, out, base=base),
        )
    if not (Path(base) / "config.json").is_file():
        rule = f"holds adapters, and the folder that they were trained beside is not there: {base}"
        raise BadInput(Reason(field=str(checkpoint), rule=rule, nearest="--adapters"))
    if dtype is not None:
        rule = "adapters are merged in the dtypes of their base"
        raise BadInput(Reason(field="--dtype", value=dtype, rule=rule))
    companions = plan_companions(checkpoint, tokenizer)
    return PlannedExport(
        checkpoint=checkpoint,
        # Adapters are merged: what is written is as large as the base.
        nbytes=sum(file.stat().st_size for file in Path(base).glob("*.safetensors")),
        run=lambda out, advance: export_merged(adapters, Path(base), out, companions, advance),
    )


def _config_text(model: ModelSpec, dtype: Dtype) -> str:
    """Return the config.json of a model whose weights have this dtype."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return json.dumps({**build_config(model), "torch_dtype": names[dtype.value]}, indent=2) + "\n"


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
