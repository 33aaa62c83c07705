"""`moewright verify`: run a Hugging Face checkpoint in a layout and write its logits, gradients and
curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from moewright.spec.errors import BadInput, Reason


def verify(
    hf_dir: Path,
    /,
    *,
    batch: Path,
    out: Path,
    layout: str = "",
    nproc: int = 1,
    steps: int = 1,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    lr: float = 0.01,
    betas: str = "0.9,0.95",
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = 0.0,
) -> int:
    """Run a checkpoint on given batches in a layout, in fp32, and write what came out under its own
    names.

    tensors.safetensors holds logits, nll and grad/<name> of the first batch, curve.json loss and
    grad_norm by step.

    Parameters
    ----------
    hf_dir
        A folder with config.json and model.safetensors, or its shards and their index.
    batch
        A safetensors file with input_ids and labels, both integers [N, B, T]; labels unshifted, -100 ignored.
    out
        The folder to write to.
    layout
        The layout, such as "ep2,mbs1"; dp is the rest of --nproc.
    nproc
        Processes to start: the world size.
    steps
        Updates; step s uses batch s mod N.
    optimizer
        Plain SGD or AdamW, at a constant rate.
    lr
        Learning rate.
    betas
        AdamW's two decay rates, as one value: 0.9,0.95.
    eps
        AdamW's epsilon.
    weight_decay
        Decoupled weight decay of matrices; norm weights never decay.
    clip
        Largest gradient norm; 0: no clipping.
    """
    from moewright.codec import parse_layout
    from moewright.engine.run.batch_file import read_batch_workload
    from moewright.engine.run.process_limit import refuse_too_many_processes
    from moewright.intake.hf import read_config
    from moewright.rules.engine_limits import require_runnable
    from moewright.spec.workload import OptimizerSpec

    for field, value, low in (("--nproc", nproc, 1), ("--steps", steps, 1)):
        if value < low:
            raise BadInput(
                Reason(
                    field=field, value=str(value), rule=f"must be at least {low}", nearest=str(low)
                )
            )
    model = read_config(hf_dir)
    chosen = parse_layout(layout, world_size=nproc)
    beta1, beta2 = _betas(betas)

    adjusted = OptimizerSpec(
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, clip_norm=clip
    )
    refuse_too_many_processes(nproc, field="--nproc")
    # Refused before torch is imported, which takes seconds; without MTP layers, which a checkpoint
    # may leave out.
    require_runnable(
        replace(model, mtp_layers=0),
        read_batch_workload(batch, steps=steps, optimizer=adjusted),
        chosen,
    )

    from moewright.engine.run.verify import UpdateKind, VerifyJob
    from moewright.engine.run.verify import verify as run

    job = VerifyJob(
        model=model,
        weights=hf_dir,
        batch=batch,
        layout=chosen,
        steps=steps,
        update_kind=UpdateKind(optimizer),
        lr=lr,
        optimizer=adjusted,
    )
    code = int(run(job, out))
    if code == 0:
        print(f"wrote {out / 'tensors.safetensors'} and {out / 'curve.json'}")
    return code


def _betas(text: str) -> tuple[float, float]:
    try:
        beta1, beta2 = (float(part) for part in text.split(","))
    except ValueError:
        beta1 = beta2 = -1.0
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        rule = "must be two numbers in [0, 1), as one value"
        raise BadInput(Reason(field="--betas", value=text, rule=rule, nearest="0.9,0.95"))
    return beta1, beta2
