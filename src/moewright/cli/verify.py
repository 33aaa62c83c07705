"""`moewright verify`: run a Hugging Face checkpoint in a layout, and write what came out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import Count, UpdateOptions
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.workload import OptimizerSpec

_DEFAULT_UPDATE = UpdateOptions()


def verify(
    hf_dir: Path,
    /,
    *,
    batch: Path,
    out: Path,
    layout: str = "",
    nproc: Count = 1,
    steps: Count = 1,
    update: UpdateOptions = _DEFAULT_UPDATE,
) -> int:
    """Run a checkpoint on the batches of a file in a layout, in fp32, and write what came out.

    tensors.safetensors holds logits, nll and grad/<name> of the first batch, curve.json loss and
    grad_norm by step. Tensors have the names of the checkpoint.

    Parameters
    ----------
    hf_dir
        A folder with config.json and model.safetensors, or its shards and their index; or the id of
        a model of the hub.
    batch
        A safetensors file with input_ids and labels, both integers [N, B, T]; labels unshifted,
        -100 ignored.
    out
        The folder to write to.
    layout
        The layout, such as "ep2,mbs1"; dp is the rest of --nproc.
    nproc
        Processes to start: the world size.
    steps
        Updates; step s uses batch s mod N.
    """
    from moewright.codec import parse_layout
    from moewright.engine.run.batch_file import read_batch_workload
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.intake.hf import read_config
    from moewright.intake.hub import locate_folder
    from moewright.rules.job import Job
    from moewright.rules.limits.engine_limits import require_runnable

    _check_at_least_one("--nproc", nproc)
    _check_at_least_one("--steps", steps)
    optimizer = _read_optimizer(update)
    hf_dir = locate_folder(hf_dir, "hf_dir")
    model = read_config(hf_dir)
    parsed_layout = parse_layout(layout, world_size=nproc)
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
    code = int(run_verify(job, out))
    if code == 0:
        print(f"wrote {out / 'tensors.safetensors'} and {out / 'curve.json'}")
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
        beta1 = beta2 = -1.0
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        rule = "must be two numbers in [0, 1), as one value"
        raise BadInput(Reason(field="--betas", value=text, rule=rule, nearest="0.9,0.95"))
    return beta1, beta2
