"""Batches, precision, optimizer and data of a Megatron-LM command as a Workload."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.intake.megatron.arguments import Arguments
from moewright.rules.batch_rampup import step_samples
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    DocumentMasking,
    DropPolicy,
    Dtype,
    LossScalingSpec,
    LossSpec,
    OptimizerSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    SaveMode,
    Workload,
)

_BUCKET, _BUCKET_A_RANK = (
    40_000_000,
    1_000_000,
)  # Megatron-LM's own bucket: the larger of the first and dp * cp * this
_LOSSES = {
    "aux_loss": "aux_coeff",
    "seq_aux_loss": "seq_aux_coeff",
    "global_aux_loss": "global_aux_coeff",
}
_MOST_STEPS = 10**9


def read_workload(
    arguments: Arguments, layout: Layout, global_batch: int
) -> tuple[Workload, tuple[str, ...]]:
    """The workload, its global batch as checked, and notes on what it cannot hold. BadInput as for
    the layout."""
    notes: list[str] = []
    seq_len = arguments.integer("--seq-length") or arguments.integer("--encoder-seq-length")
    if not seq_len:
        raise BadInput(
            Reason(field="--seq-length", rule="is missing, and Megatron-LM has no default for it")
        )
    ramp = BatchRampSpec()
    if arguments.has("--rampup-batch-size"):
        start, more, samples = map(int, arguments.values("--rampup-batch-size"))
        ramp = BatchRampSpec(ramp_start=start, ramp_increment=more, ramp_samples=samples)
        if arguments.has("--train-iters"):
            rule = "goes with --train-samples; --train-iters excludes it"
            raise BadInput(
                Reason(field="--rampup-batch-size", rule=rule, nearest="--train-samples")
            )
    timed = Workload(seq_len=seq_len, global_batch=global_batch, ramp=ramp)
    steps = arguments.integer("--train-iters") or _steps(
        timed, arguments.integer("--train-samples")
    )
    precision, grad_dtype = _precision(arguments)
    every = arguments.integer("--save-interval") if arguments.has("--save") else 0
    data, eval_batches = _data(arguments, notes)
    workload = Workload(
        seq_len=seq_len,
        global_batch=global_batch,
        steps=steps,
        seed=arguments.integer("--seed", 1234),
        precision=precision,
        grad_dtype=grad_dtype,
        eval_every_steps=arguments.integer("--eval-interval") if data.heldout else 0,
        eval_batches=eval_batches,
        optimizer=_optimizer(arguments, timed, layout, steps, notes),
        loss=_loss(arguments),
        router=_router(arguments),
        scaling=_scaling(arguments, precision),
        ramp=ramp,
        data=data,
        checkpoint=CheckpointSpec(
            every_steps=every,
            mode=SaveMode.ASYNC if arguments.has("--async-save") and every else SaveMode.SYNC,
        ),
    )
    return workload, tuple(notes)


def _steps(workload: Workload, samples: int) -> int:
    """Steps that so many sequences last, the last one whole."""
    low, high = 0, _MOST_STEPS
    if not workload.ramp.ramp_start:
        return -(-samples // workload.global_batch)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if step_samples(workload, middle).first >= samples else (middle + 1, high)
        )
    return low


def _precision(given: Arguments) -> tuple[Dtype, Dtype]:
    """What is computed in, and what gradients are summed in."""
    half, brain, eight = given.has("--fp16"), given.has("--bf16"), given.text("--fp8-format")
    if half and brain:
        raise BadInput(Reason(field="--fp16", rule="excludes --bf16", nearest="--bf16 alone"))
    four, blocks = given.text("--fp4-format"), given.text("--fp4-recipe", "nvfp4")
    if four and (not brain or eight or blocks != "nvfp4"):
        rule = "is planned with --bf16, without --fp8-format, in the nvfp4 recipe"
        raise BadInput(
            Reason(field="--fp4-format", value=four, rule=rule, nearest="--bf16 --fp4-recipe nvfp4")
        )
    wide = given.has("--accumulate-allreduce-grads-in-fp32")
    narrow = (
        given.has("--grad-reduce-in-bf16") or given.text("--main-grads-dtype", "fp32") == "bf16"
    )
    recipe = given.text("--fp8-recipe", "delayed")
    if half:
        return Dtype.FP16, Dtype.FP32 if wide else Dtype.FP16
    if not brain:
        if eight:
            raise BadInput(Reason(field="--fp8-format", rule="goes with --bf16", nearest="--bf16"))
        return Dtype.FP32, Dtype.FP32
    gradients = Dtype.BF16 if narrow else Dtype.FP32
    if four:
        return Dtype.NVFP4, gradients
    if not eight:
        return Dtype.BF16, gradients
    return (Dtype.MXFP8 if recipe in ("mxfp8", "blockwise") else Dtype.FP8), gradients


def _optimizer(
    given: Arguments, timed: Workload, layout: Layout, steps: int, notes: list[str]
) -> OptimizerSpec:
    kind = given.text("--optimizer", "adam")
    if kind != "adam":
        rule = "its states cannot be planned here"
        raise BadInput(Reason(field="--optimizer", value=kind, rule=rule, nearest="adam"))
    style = given.text("--lr-decay-style", "linear")
    if style != "cosine":
        notes.append(
            f"--lr-decay-style {style} is taken for cosine: no prediction depends on it, training here would"
        )
    usual = OptimizerSpec()
    lr = given.number("--lr", usual.lr)
    decay = given.integer("--lr-decay-iters") or _steps(timed, given.integer("--lr-decay-samples"))
    warmup = given.integer("--lr-warmup-iters") or _steps(
        timed, given.integer("--lr-warmup-samples")
    )
    if given.has("--lr-warmup-fraction"):
        warmup = int(given.number("--lr-warmup-fraction") * (decay or steps))
    moments = given.text("--exp-avg-dtype", "fp32")
    if moments != given.text("--exp-avg-sq-dtype", "fp32"):
        rule = "both moments are planned in one type"
        raise BadInput(Reason(field="--exp-avg-sq-dtype", rule=rule, nearest=moments))
    if moments != "fp32" and not given.has("--use-precision-aware-optimizer"):
        rule = "goes with --use-precision-aware-optimizer"
        raise BadInput(Reason(field="--exp-avg-dtype", value=moments, rule=rule, nearest="fp32"))
    given.has("--use-precision-aware-optimizer")
    bucket = given.integer("--ddp-bucket-size") or max(
        _BUCKET, _BUCKET_A_RANK * layout.dp * layout.cp
    )
    return OptimizerSpec(
        lr=lr,
        min_lr_fraction=float(f"{given.number('--min-lr') / lr:.10g}") if lr else 0.0,
        warmup_steps=warmup,
        decay_steps=0 if decay == steps else decay,
        beta1=given.number("--adam-beta1", 0.9),
        beta2=given.number("--adam-beta2", 0.999),
        eps=given.number("--adam-eps", 1e-8),
        weight_decay=given.number("--weight-decay", 0.01),
        clip_norm=given.number("--clip-grad", 1.0),
        moment_dtype=Dtype(moments),
        bucket_elements=bucket,
    )


def _loss(given: Arguments) -> LossSpec:
    kinds = given.values("--moe-router-load-balancing-type", "aux_loss")
    coeffs = [float(value) for value in given.values("--moe-aux-loss-coeff", "0")]
    if "quantile_balancing" in kinds:
        rule = "this way to balance cannot be planned here"
        raise BadInput(
            Reason(
                field="--moe-router-load-balancing-type",
                value=kinds[0],
                rule=rule,
                nearest="aux_loss",
            )
        )
    if len(coeffs) != len(kinds) and len(kinds) > 1:
        rule = f"gives {len(coeffs)} for {len(kinds)} --moe-router-load-balancing-type"
        raise BadInput(Reason(field="--moe-aux-loss-coeff", rule=rule, nearest="one each"))
    on = {
        _LOSSES[kind]: coeff for kind, coeff in zip(kinds, coeffs, strict=False) if kind in _LOSSES
    }
    usual = LossSpec()
    return LossSpec(
        aux_coeff=on.get("aux_coeff", 0.0),
        seq_aux_coeff=on.get("seq_aux_coeff", 0.0),
        global_aux_coeff=on.get("global_aux_coeff", 0.0),
        z_coeff=given.number("--moe-z-loss-coeff"),
        mtp_coeff=given.number("--mtp-loss-scaling-factor", usual.mtp_coeff),
    )


def _router(given: Arguments) -> RouterTraining:
    usual = RouterTraining()
    force = (
        RouterForce.BALANCED if given.has("--moe-router-force-load-balancing") else RouterForce.NONE
    )
    skewed = given.has("--moe-router-force-biased")
    balance = given.values("--moe-router-load-balancing-type")
    return RouterTraining(
        bias_update_rate=given.number("--moe-router-bias-update-rate", usual.bias_update_rate),
        force=RouterForce.SKEWED if skewed else force,
        force_std=given.number("--moe-router-force-biased", usual.force_std),
        drop_policy=DropPolicy(given.text("--moe-token-drop-policy", "probs")),
        router_dtype=RouterDtype(given.text("--moe-router-dtype", "fp32")),
        assignment=RouterAssignment.SINKHORN if "sinkhorn" in balance else RouterAssignment.TOP_K,
        jitter_eps=given.number("--moe-input-jitter-eps"),
    )


def _scaling(given: Arguments, precision: Dtype) -> LossScalingSpec:
    """fp16 alone scales its loss; Megatron-LM starts from 2**32."""
    if precision is not Dtype.FP16:
        return LossScalingSpec()
    given.has("--hysteresis")
    return LossScalingSpec(
        initial_loss_scale=given.number("--initial-loss-scale", 2.0**32),
        min_loss_scale=given.number("--min-loss-scale", 1.0),
        loss_scale_window=int(given.number("--loss-scale-window", 1000.0)),
    )


def _data(given: Arguments, notes: list[str]) -> tuple[DataSpec, int]:
    """Prefixes of data, one each, and batches of an evaluation."""
    train = _prefix(given, "--train-data-path", notes) or _prefix(given, "--data-path", notes)
    heldout = _prefix(given, "--valid-data-path", notes)
    given.has("--split")
    given.has("--mock-data")
    bounded = given.has("--reset-attention-mask") or given.has(
        "--dataloader-inter-document-masking"
    )
    given.has("--eod-mask-loss")
    documents = DocumentMasking.BOUNDED if bounded else DocumentMasking.JOINED
    if given.has("--reset-position-ids") and bounded:
        documents = DocumentMasking.RESTARTED
    batches = given.integer("--eval-iters", 100)
    return DataSpec(
        train=train, heldout=heldout, documents=documents
    ), batches if heldout and batches else 8


def _prefix(given: Arguments, name: str, notes: list[str]) -> str:
    """One prefix; of a blend none, and a word on it. Where data lies changes no prediction."""
    if not given.has(name):
        return ""
    words = tuple(_known(given.options[name]))
    if len(words) == 1:
        return words[0]
    notes.append(
        f"{name} is not taken: {'a blend' if words else 'its value is only known when the script runs'}"
    )
    return ""


def _known(values: tuple[str, ...]) -> Iterator[str]:
    yield from (value for value in values if "\0" not in value)
