"""The batches, precision, optimizer and data of a Megatron-LM command as a Workload."""

from __future__ import annotations

from collections.abc import Mapping

from moewright.codec.data_paths import parse_data_paths
from moewright.codec.megatron_options import WORKLOAD_OPTIONS
from moewright.intake.megatron.options import Arguments, ask_missing
from moewright.intake.megatron.trainer import read_batch_schedule, read_muon, read_trainer
from moewright.intake.megatron.unknown import UNKNOWN_VALUE
from moewright.rules.batch_rampup import step_samples
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.workload import (
    AmaxComputeAlgo,
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    DelayedScalingSpec,
    DocumentMasking,
    DropPolicy,
    Dtype,
    Fp8Format,
    LossScalingSpec,
    LossSpec,
    LrDecay,
    MatrixUpdate,
    MuonSpec,
    OptimizerSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    SaveMode,
    TensorScaling,
    Workload,
)

# Megatron-LM's own bucket is the larger of the first and dp * cp times the second.
_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_PER_RANK = 1_000_000
_BALANCE_COEFFICIENTS = {
    "aux_loss": "aux_coeff",
    "seq_aux_loss": "seq_aux_coeff",
    "global_aux_loss": "global_aux_coeff",
}
_MATRIX_UPDATES = {
    "adam": MatrixUpdate.ADAMW,
    "muon": MatrixUpdate.MUON,
    "dist_muon": MatrixUpdate.MUON,
}
# What says nothing where scales are not taken from earlier tensors.
_DELAYED_OPTIONS = ("--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin")
# Recipes with a scale a tensor, in which gradients are E5M2 or E4M3.
_TENSOR_RECIPES = ("delayed", "tensorwise")
_MAX_STEPS = 10**9
_SEED = 1234
_DEFAULT_EVAL_BATCHES = 8
_BALANCING = "--moe-router-load-balancing-type"


def read_workload(
    arguments: Arguments, layout: Layout, global_batch: int, environment: Mapping[str, str]
) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload with its checked global batch, and notes on what it cannot hold.

    `environment` is what the command is started in.

    Raises:
        BadInput: an option is not planned here, or Megatron-LM itself refuses a combination.
    """
    seq_len = arguments.integer(WORKLOAD_OPTIONS["seq_len"])
    seq_len = seq_len or arguments.integer("--encoder-seq-length")
    if not seq_len:
        raise ask_missing(WORKLOAD_OPTIONS["seq_len"], "4096")
    ramp = _read_ramp(arguments, seq_len)
    # This workload is enough to count the steps of a growing batch.
    timed = Workload(seq_len=seq_len, global_batch=global_batch, ramp=ramp)
    steps = arguments.integer("--train-iters")
    # Megatron-LM takes the one or the other; a growing batch makes steps of unequal samples.
    steps = steps or _count_steps(timed, arguments.integer("--train-samples"))
    precision, grad_dtype = _read_precision(arguments)
    # An interval without a folder saves nothing.
    save_interval = arguments.integer("--save-interval") if arguments.has("--save") else 0
    is_async = arguments.has("--async-save") and save_interval
    arguments.ignore("--use-persistent-ckpt-worker")
    data, data_notes = _read_data(arguments)
    eval_batches = arguments.integer("--eval-iters", 100)
    optimizer = _read_optimizer(arguments, timed, layout, steps)
    muon = MuonSpec()
    muon_notes: tuple[str, ...] = ()
    if optimizer.matrix_update is MatrixUpdate.MUON:
        muon, muon_notes = read_muon(arguments)
    workload = Workload(
        seq_len=seq_len,
        global_batch=global_batch,
        steps=steps,
        seed=_read_seed(arguments),
        precision=precision,
        tensor_scaling=_read_tensor_scaling(arguments, precision),
        fp8_format=_read_fp8_format(arguments, precision),
        grad_dtype=grad_dtype,
        eval_every_steps=arguments.integer("--eval-interval") if data.heldout else 0,
        eval_batches=eval_batches if data.heldout and eval_batches else _DEFAULT_EVAL_BATCHES,
        optimizer=optimizer,
        muon=muon,
        loss=_read_losses(arguments),
        router=_read_router(arguments),
        trainer=read_trainer(arguments, environment),
        scaling=_read_scaling(arguments, precision),
        delayed=_read_delayed(arguments, precision),
        ramp=ramp,
        data=data,
        checkpoint=CheckpointSpec(
            every_steps=save_interval, mode=SaveMode.ASYNC if is_async else SaveMode.SYNC
        ),
    )
    return workload, (
        *data_notes,
        *muon_notes,
        *_note_decay_style(arguments),
        *_note_fp8_format(arguments),
    )


def _read_seed(arguments: Arguments) -> int:
    """Return the seed; Megatron-LM's own where only running tells it, for it changes no plan."""
    values = arguments.options.get("--seed", ())
    is_told = not any(UNKNOWN_VALUE.search(value) for value in values)
    arguments.ignore("--seed")
    return arguments.integer("--seed", _SEED) if is_told else _SEED


def _read_ramp(arguments: Arguments, seq_len: int) -> BatchRampSpec:
    name = WORKLOAD_OPTIONS["ramp_start"]
    if arguments.has("--step-batch-size-schedule"):
        return read_batch_schedule(arguments, seq_len).ramp
    if not arguments.has(name):
        return BatchRampSpec()
    start, increment, samples = (int(value) for value in arguments.values(name))
    if arguments.has("--train-iters"):
        rule = "goes with --train-samples; --train-iters excludes it"
        raise BadInput(Reason(field=name, rule=rule, nearest="--train-samples"))
    return BatchRampSpec(ramp_start=start, ramp_increment=increment, ramp_samples=samples)


def _count_steps(workload: Workload, samples: int) -> int:
    """Return the number of steps that `samples` sequences last, the last step counted in full."""
    if not workload.ramp.ramp_start:
        return -(-samples // workload.global_batch)
    low = 0
    high = _MAX_STEPS
    # Samples grow with steps, so that the first step past their number is found by halving.
    while low < high:
        middle = (low + high) // 2
        if step_samples(workload, middle).first >= samples:
            high = middle
        else:
            low = middle + 1
    return low


def _read_precision(arguments: Arguments) -> tuple[Dtype, Dtype]:
    """Return the dtype of compute, and the dtype that gradients are reduced in."""
    is_fp16 = arguments.has("--fp16")
    is_bf16 = arguments.has("--bf16")
    fp8_format = arguments.text("--fp8-format")
    if is_fp16 and is_bf16:
        raise BadInput(Reason(field="--fp16", rule="excludes --bf16", nearest="--bf16 alone"))
    fp4_format = arguments.text("--fp4-format")
    fp4_recipe = arguments.text("--fp4-recipe", "nvfp4")
    if fp4_format and (not is_bf16 or fp8_format or fp4_recipe != "nvfp4"):
        rule = "is planned with --bf16, without --fp8-format, in the nvfp4 recipe"
        nearest = "--bf16 --fp4-recipe nvfp4"
        raise BadInput(Reason(field="--fp4-format", value=fp4_format, rule=rule, nearest=nearest))
    sums_in_fp32 = arguments.has("--accumulate-allreduce-grads-in-fp32")
    main_grads = arguments.text("--main-grads-dtype", "fp32")
    sums_in_bf16 = arguments.has("--grad-reduce-in-bf16") or main_grads == "bf16"
    fp8_recipe = arguments.text("--fp8-recipe", "delayed")
    if is_fp16 and fp8_format:
        rule = "is planned with --bf16 alone"
        raise BadInput(Reason(field="--fp8-format", value=fp8_format, rule=rule, nearest="--bf16"))
    # Megatron-LM keeps gradients of fp16 in fp16 unless told otherwise, and those of bf16 in fp32.
    if is_fp16:
        return Dtype.FP16, Dtype.FP32 if sums_in_fp32 else Dtype.FP16
    if not is_bf16:
        if fp8_format:
            raise BadInput(Reason(field="--fp8-format", rule="goes with --bf16", nearest="--bf16"))
        return Dtype.FP32, Dtype.FP32
    grad_dtype = Dtype.BF16 if sums_in_bf16 else Dtype.FP32
    if fp4_format:
        return Dtype.NVFP4, grad_dtype
    if not fp8_format:
        return Dtype.BF16, grad_dtype
    return Dtype.MXFP8 if fp8_recipe == "mxfp8" else Dtype.FP8, grad_dtype


def _note_fp8_format(arguments: Arguments) -> tuple[str, ...]:
    """Note gradients in E5M2 that have a scale a block: such a recipe is planned in E4M3 alone."""
    form = arguments.text("--fp8-format")
    recipe = arguments.text("--fp8-recipe", "delayed")
    if form in ("", "e4m3") or recipe in _TENSOR_RECIPES:
        return ()
    return (
        f"--fp8-format {form} is taken for e4m3 with --fp8-recipe {recipe}: no prediction "
        "depends on it, training here would round gradients otherwise",
    )


def _read_fp8_format(arguments: Arguments, precision: Dtype) -> Fp8Format:
    """Return the format of gradients, where a scale is a tensor's."""
    recipe = arguments.text("--fp8-recipe", "delayed")
    form = arguments.text("--fp8-format")
    has_choice = precision is Dtype.FP8 and recipe in _TENSOR_RECIPES
    return Fp8Format.E4M3 if has_choice and form == "e4m3" else Fp8Format.HYBRID


def _read_tensor_scaling(arguments: Arguments, precision: Dtype) -> TensorScaling:
    """Return where FP8 takes its scales from: Megatron-LM's default are earlier tensors."""
    recipe = arguments.text("--fp8-recipe", "delayed")
    if precision is not Dtype.FP8:
        return TensorScaling.CURRENT
    scalings = {"delayed": TensorScaling.DELAYED, "blockwise": TensorScaling.BLOCKWISE}
    return scalings.get(recipe, TensorScaling.CURRENT)


def _read_delayed(arguments: Arguments, precision: Dtype) -> DelayedScalingSpec:
    """Return how delayed scales are taken: Megatron-LM's default is from the last amax alone."""
    arguments.ignore(*_DELAYED_OPTIONS)
    if _read_tensor_scaling(arguments, precision) is not TensorScaling.DELAYED:
        return DelayedScalingSpec()
    return DelayedScalingSpec(
        amax_history_len=arguments.integer("--fp8-amax-history-len", 1),
        amax_compute_algo=AmaxComputeAlgo(arguments.text("--fp8-amax-compute-algo", "most_recent")),
        fp8_margin=arguments.integer("--fp8-margin"),
    )


def _note_decay_style(arguments: Arguments) -> tuple[str, ...]:
    style = arguments.text("--lr-decay-style", "linear")
    taken = _take_decay_style(arguments)
    if taken.megatron_word != style:
        return (
            f"--lr-decay-style {style} is taken for {taken}: no prediction depends on it, "
            "training here would",
        )
    tail = arguments.text("--lr-wsd-decay-style", "exponential")
    if taken is LrDecay.WSD and tail != "linear":
        return (
            f"--lr-wsd-decay-style {tail} is taken for linear: no prediction depends on it, "
            "training here would",
        )
    return ()


def _take_decay_style(arguments: Arguments) -> LrDecay:
    style = arguments.text("--lr-decay-style", "linear")
    return next((decay for decay in LrDecay if decay.megatron_word == style), LrDecay.COSINE)


def _read_optimizer(
    arguments: Arguments, timed: Workload, layout: Layout, steps: int
) -> OptimizerSpec:
    kind = arguments.text("--optimizer", "adam")
    if kind not in _MATRIX_UPDATES:
        rule = "its states cannot be planned here"
        raise BadInput(Reason(field="--optimizer", value=kind, rule=rule, nearest="adam"))
    lr = arguments.number("--lr", OptimizerSpec().lr)
    decay = arguments.integer("--lr-decay-iters")
    decay = decay or _count_steps(timed, arguments.integer("--lr-decay-samples"))
    warmup = arguments.integer("--lr-warmup-iters")
    warmup = warmup or _count_steps(timed, arguments.integer("--lr-warmup-samples"))
    if arguments.has("--lr-warmup-fraction"):
        # The fraction is of the decay, which is the whole run where no decay is given.
        warmup = int(arguments.number("--lr-warmup-fraction") * (decay or steps))
    lr_decay, wsd_decay = _read_decay(arguments, timed, decay)
    default_bucket = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * layout.dp * layout.cp)
    first_moment = _read_moment_dtype(arguments, "--exp-avg-dtype")
    second_moment = _read_moment_dtype(arguments, "--exp-avg-sq-dtype")
    return OptimizerSpec(
        lr=lr,
        # Ten digits: 3e-6 / 3e-5 is 0.09999999999999999 in binary, and a plan would say so.
        min_lr_fraction=float(f"{arguments.number('--min-lr') / lr:.10g}") if lr else 0.0,
        warmup_steps=warmup,
        decay_steps=0 if decay == steps else decay,
        lr_decay=lr_decay,
        wsd_decay_steps=wsd_decay,
        beta1=arguments.number("--adam-beta1", 0.9),
        beta2=arguments.number("--adam-beta2", 0.999),
        eps=arguments.number("--adam-eps", 1e-8),
        weight_decay=arguments.number("--weight-decay", 0.01),
        clip_norm=arguments.number("--clip-grad", 1.0),
        moment_dtype=first_moment,
        second_moment_dtype=None if second_moment is first_moment else second_moment,
        matrix_update=_MATRIX_UPDATES[kind],
        bucket_elements=arguments.integer("--ddp-bucket-size") or default_bucket,
    )


def _read_decay(arguments: Arguments, timed: Workload, decay: int) -> tuple[LrDecay, int]:
    """Return how the learning rate falls, and in how many steps before `decay` WSD does."""
    taken = _take_decay_style(arguments)
    if taken is not LrDecay.WSD:
        return taken, 0
    steps = arguments.integer("--lr-wsd-decay-iters")
    samples = arguments.integer("--lr-wsd-decay-samples")
    if samples:
        end = arguments.integer("--lr-decay-samples") or arguments.integer("--train-samples")
        steps = decay - _count_steps(timed, max(0, end - samples))
    return taken, steps


def _read_moment_dtype(arguments: Arguments, flag: str) -> Dtype:
    dtype = arguments.text(flag, "fp32")
    is_aware = arguments.has("--use-precision-aware-optimizer")
    if dtype != "fp32" and not is_aware:
        rule = "goes with --use-precision-aware-optimizer"
        raise BadInput(Reason(field=flag, value=dtype, rule=rule, nearest="fp32"))
    return Dtype(dtype)


def _read_losses(arguments: Arguments) -> LossSpec:
    kinds = arguments.values(_BALANCING, "aux_loss")
    coefficients = [float(value) for value in arguments.values("--moe-aux-loss-coeff", "0")]
    if "quantile_balancing" in kinds:
        rule = "this way to balance cannot be planned here"
        raise BadInput(Reason(field=_BALANCING, value=kinds[0], rule=rule, nearest="aux_loss"))
    # One coefficient is enough for one kind; several kinds take one each, in order.
    if len(coefficients) != len(kinds) and len(kinds) > 1:
        rule = f"gives {len(coefficients)} for {len(kinds)} {_BALANCING}"
        raise BadInput(Reason(field="--moe-aux-loss-coeff", rule=rule, nearest="one each"))
    by_field = {
        _BALANCE_COEFFICIENTS[kind]: coefficient
        for kind, coefficient in zip(kinds, coefficients, strict=False)
        if kind in _BALANCE_COEFFICIENTS
    }
    return LossSpec(
        aux_coeff=by_field.get("aux_coeff", 0.0),
        seq_aux_coeff=by_field.get("seq_aux_coeff", 0.0),
        global_aux_coeff=by_field.get("global_aux_coeff", 0.0),
        z_coeff=arguments.number("--moe-z-loss-coeff"),
        mtp_coeff=arguments.number("--mtp-loss-scaling-factor", LossSpec().mtp_coeff),
    )


def _read_router(arguments: Arguments) -> RouterTraining:
    default = RouterTraining()
    is_sinkhorn = "sinkhorn" in arguments.values(_BALANCING)
    force = RouterForce.NONE
    if arguments.has("--moe-router-force-load-balancing"):
        force = RouterForce.BALANCED
    if arguments.has("--moe-router-force-biased"):
        force = RouterForce.SKEWED
    return RouterTraining(
        bias_update_rate=arguments.number(
            "--moe-router-bias-update-rate", default.bias_update_rate
        ),
        force=force,
        force_std=arguments.number("--moe-router-force-biased", default.force_std),
        drop_policy=DropPolicy(arguments.text("--moe-token-drop-policy", "probs")),
        router_dtype=RouterDtype(arguments.text("--moe-router-dtype", "fp32")),
        assignment=RouterAssignment.SINKHORN if is_sinkhorn else RouterAssignment.TOP_K,
        jitter_eps=arguments.number("--moe-input-jitter-eps"),
    )


def _read_scaling(arguments: Arguments, precision: Dtype) -> LossScalingSpec:
    """Return how the loss is scaled, which fp16 alone needs; Megatron-LM starts from 2**32."""
    if precision is not Dtype.FP16:
        return LossScalingSpec()
    arguments.ignore("--hysteresis")
    return LossScalingSpec(
        initial_loss_scale=arguments.number("--initial-loss-scale", 2.0**32),
        min_loss_scale=arguments.number("--min-loss-scale", 1.0),
        loss_scale_window=int(arguments.number("--loss-scale-window", 1000.0)),
    )


def _read_data(arguments: Arguments) -> tuple[DataSpec, tuple[str, ...]]:
    """Return where data lies and how documents are kept apart, and notes on what is not taken."""
    notes: list[str] = []
    train = _read_prefix(arguments, "--train-data-path", notes)
    train = train or _read_prefix(arguments, "--data-path", notes)
    heldout = _read_prefix(arguments, "--valid-data-path", notes)
    arguments.ignore("--split", "--mock-data", "--eod-mask-loss")
    is_bounded = arguments.has("--reset-attention-mask") or arguments.has(
        "--dataloader-inter-document-masking"
    )
    documents = DocumentMasking.BOUNDED if is_bounded else DocumentMasking.JOINED
    if arguments.has("--reset-position-ids") and is_bounded:
        documents = DocumentMasking.RESTARTED
    return DataSpec(train=train, heldout=heldout, documents=documents), tuple(notes)


def _read_prefix(arguments: Arguments, name: str, notes: list[str]) -> str:
    """Return the prefix of a dataset, or a blend; none, and a note on it, where it is not known.

    Where data lies changes no prediction.
    """
    if not arguments.has(name):
        return ""
    words = tuple(word for word in arguments.options[name] if "\0" not in word)
    try:
        parts = parse_data_paths(" ".join(words), name)
    except BadInput:
        parts = ()
    if len(words) == 1 or len(parts) > 1:
        return " ".join(words)
    reason = "a blend without weights" if words else "its value is only known when the script runs"
    notes.append(f"{name} is not taken: {reason}")
    return ""
