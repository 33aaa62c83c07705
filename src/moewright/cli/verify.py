"""Verbs that check the engine: a layout beside one process, and a rank that is counted dry."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.answers import print_now, reserve_stdout, write_answer
from moewright.cli.exit_codes import exit_code
from moewright.cli.option_types import Count, JsonOption, SetOption
from moewright.cli.options import AnswerOptions, UpdateOptions, VerifiedRun
from moewright.cli.progress import show_share
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.api.verifying import TrainingCheckRequest
    from moewright.spec.workload import OptimizerSpec


_DEFAULT_UPDATE = UpdateOptions()
_DEFAULT_RUN = VerifiedRun()


def verify(
    what: Path,
    /,
    *,
    out: Path,
    batch: Path | None = None,
    run: VerifiedRun = _DEFAULT_RUN,
    set_: SetOption = None,
    update: UpdateOptions = _DEFAULT_UPDATE,
    json: JsonOption = None,
) -> int:
    """Compare a job's training with one process, or run a checkpoint on the batches of a file.

    Of a job or a plan the first steps are trained in its layout and in one process, with its
    auxiliary losses, clipping and update, in fp32 and in its own format; gradients, norms and
    weights are compared, each with its bound. Of a checkpoint tensors.safetensors gets logits, nll
    and `grad/<name>` of the first batch, curve.json loss and grad_norm by step, in fp32; tensors
    have the names of the checkpoint.

    Parameters
    ----------
    what
        A job file, or a plan as `plan --json` wrote it; or a folder with config.json and
        model.safetensors, or its shards and their index; or the id of a model of the hub.
    out
        The folder to write to.
    batch
        Of a checkpoint: a safetensors file with input_ids and labels, both integers [N, B, T];
        labels unshifted, -100 ignored.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    json
        Write what was compared (checks, or of a checkpoint its curve) to this file; "-": to
        standard output, and the text to standard error.
    """
    if what.is_file():
        if batch is not None or update != _DEFAULT_UPDATE:
            rule = "are for a checkpoint: a job has data and an update rule of its own"
            raise BadInput(Reason(field="--batch, --optimizer, --lr, ...", rule=rule))
        request = _read_request(what, out, run, tuple(set_ or ()))
        return _verify_training(request, json)
    if set_:
        rule = "is for a job file"
        raise BadInput(Reason(field="--set", value=set_[0], rule=rule, nearest="leave it out"))
    if batch is None:
        rule = "is needed with a checkpoint: the file of its batches"
        raise BadInput(Reason(field="--batch", rule=rule))
    return _verify_checkpoint(what, batch=batch, out=out, run=run, update=update, json=json)


def _read_request(
    path: Path, out: Path, run: VerifiedRun, overrides: tuple[str, ...]
) -> TrainingCheckRequest:
    from moewright.api.verifying import CHECKED_STEPS, TrainingCheckRequest

    steps = CHECKED_STEPS if run.steps is None else run.steps
    _check_at_least_one("--steps", steps)
    if run.nproc is not None:
        _check_at_least_one("--nproc", run.nproc)
    return TrainingCheckRequest(
        path=path, out=out, layout=run.layout, nproc=run.nproc, steps=steps, overrides=overrides
    )


def _verify_training(request: TrainingCheckRequest, json: Path | None) -> int:
    from moewright.api.verifying import CHECK_FILE, verify_training
    from moewright.report.document_text import print_sections
    from moewright.report.training_check_document import build_training_check

    # Ranks print too, as processes of their own.
    with reserve_stdout(json):
        answer = verify_training(request, print_now)
    written = () if answer.code else (request.out / CHECK_FILE,)
    with write_answer(answer, json, written=written) as console:
        print_sections(console, map(build_training_check, answer.checks), verbose=True)
    return answer.code or exit_code(holds=answer.holds)


def _verify_checkpoint(
    hf_dir: Path,
    *,
    batch: Path,
    out: Path,
    run: VerifiedRun,
    update: UpdateOptions,
    json: Path | None,
) -> int:
    from moewright.codec import parse_layout, read_json_data
    from moewright.engine.run.early_checks import read_batch_workload, refuse_too_many_processes
    from moewright.intake.hf import read_config
    from moewright.intake.hub import locate_folder
    from moewright.rules.job import Job
    from moewright.rules.limits.engine_limits import require_runnable

    # Not `or`: 0 is refused.
    nproc = 1 if run.nproc is None else run.nproc
    steps = 1 if run.steps is None else run.steps
    _check_at_least_one("--nproc", nproc)
    _check_at_least_one("--steps", steps)
    optimizer = _read_optimizer(update)
    hf_dir = locate_folder(hf_dir, "hf_dir")
    model = read_config(hf_dir)
    parsed_layout = parse_layout(run.layout, world_size=nproc)
    refuse_too_many_processes(nproc, field="--nproc")
    # Refused before torch is imported, which takes seconds; without MTP layers, which a checkpoint
    # may leave out.
    workload = read_batch_workload(batch, steps=steps, optimizer=optimizer)
    model_without_mtp = replace(model, mtp_layers=0)
    require_runnable(Job(model=model_without_mtp, workload=workload, layout=parsed_layout))

    from moewright.engine.run.verify import UpdateKind, VerifyJob
    from moewright.engine.run.verify import verify as run_verify

    job = VerifyJob(
        model=model,
        weights=hf_dir,
        batch=batch,
        layout=parsed_layout,
        steps=steps,
        update_kind=UpdateKind(update.optimizer),
        lr=update.lr,
        optimizer=optimizer,
    )
    with reserve_stdout(json):
        code = int(run_verify(job, out))
    if code == 0:
        files = (out / "tensors.safetensors", out / "curve.json")
        answer = {"curve": read_json_data(files[1]), "tensors": files[0]}
        with write_answer(answer, json, written=files):
            pass
    return code


def _check_at_least_one(option: str, value: int) -> None:
    if value < 1:
        rule = "must be at least 1"
        raise BadInput(Reason(field=option, value=str(value), rule=rule, nearest="1"))


def _read_optimizer(update: UpdateOptions) -> OptimizerSpec:
    from moewright.spec.workload import OptimizerSpec

    beta1, beta2 = _parse_betas(update.betas)
    numbers = {
        "--lr": (update.lr, _DEFAULT_UPDATE.lr),
        "--eps": (update.eps, _DEFAULT_UPDATE.eps),
        "--weight-decay": (update.weight_decay, _DEFAULT_UPDATE.weight_decay),
        "--clip": (update.clip, _DEFAULT_UPDATE.clip),
    }
    for option, (value, default) in numbers.items():
        if not 0 <= value < inf:
            rule = "must be a number from 0"
            nearest = "0" if value < 0 else f"{default:g}"
            raise BadInput(Reason(field=option, value=f"{value:g}", rule=rule, nearest=nearest))
    return OptimizerSpec(
        lr=update.lr,
        beta1=beta1,
        beta2=beta2,
        eps=update.eps,
        weight_decay=update.weight_decay,
        clip_norm=update.clip,
    )


def _parse_betas(text: str) -> tuple[float, float]:
    try:
        beta1, beta2 = (float(part) for part in text.split(","))
    except ValueError:
        # Refused below, as numbers out of range are.
        beta1 = beta2 = -1.0
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        rule = "must be two numbers in [0, 1), as one value"
        raise BadInput(Reason(field="--betas", value=text, rule=rule, nearest="0.9,0.95"))
    return beta1, beta2


_SHORT = AnswerOptions()


def dryrun(
    job: Path,
    /,
    *,
    rank: Count,
    set_: SetOption = None,
    answer: AnswerOptions = _SHORT,
    json: JsonOption = None,
) -> int:
    """Count what one rank of a job would hold, send and compute in a step.

    The planner's prediction for the rank stands beside. Every layer, collective and update of the
    rank runs, on tensors without data; routing is even. What the job leaves open of the layout
    takes its default.

    Parameters
    ----------
    job
        The job file, whose layout is over train.nproc ranks; or a plan, as `plan --json` wrote it.
    rank
        The rank to become, from 0.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    json
        Write what was counted and predicted to this file, with rule and verdict of every row; "-":
        to standard output, and the tables to standard error.
    """
    from moewright.api.verifying import count_rank
    from moewright.codec import format_layout
    from moewright.report.document import DocumentSection
    from moewright.report.document_text import print_document
    from moewright.report.ledger_document import build_dry_run_document

    work = f"running rank {rank} on tensors without data"
    with reserve_stdout(json), show_share(work) as show:
        counts = count_rank(job, rank, tuple(set_ or ()), show)
    counted = counts.counted
    document = build_dry_run_document(
        counts.comparison,
        subject=(
            f"{counts.model.name or 'model'}, rank {rank} of {counts.layout.world_size} "
            f"(pipeline rank {counted.ledger.pp_rank})"
        ),
        introduction=DocumentSection(
            facts=(("layout", format_layout(counts.layout)),),
            notes=(
                f"{counts.run_micro_batches} of the step's {counts.step_micro_batches} "
                "micro-batches were run: the peak does not grow after them, and the other figures "
                "count them alone",
            ),
        ),
        states_bytes=counted.states_bytes,
        tensor_bytes=counted.peak_by_module,
        planned=counts.planned,
    )
    with write_answer(
        counts.to_record(), json, html=answer.html, views=lambda: [document]
    ) as console:
        print_document(console, document, verbose=answer.verbose)
    return exit_code(holds=counts.comparison.keeps_rules)
