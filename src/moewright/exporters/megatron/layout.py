"""The layout and the workload as Megatron-LM's flags.

The flags are those of degrees, memory savers, overlaps, batches, optimizer and data.
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.codec.data_paths import parse_data_paths
from moewright.codec.megatron_options import (
    LAYOUT_OPTIONS,
    OVERLAP_OPTIONS,
    PLAIN_FIELDS,
    WORKLOAD_OPTIONS,
    dispatcher_options,
)
from moewright.exporters.megatron.model import Flag, format_number
from moewright.exporters.torchrun import RunFiles
from moewright.rules.batch_rampup import batch_sizes, step_samples, wsd_decay_steps
from moewright.rules.context_parallel import cp_factors
from moewright.rules.job import Job
from moewright.rules.low_precision import megatron_recipe
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.choices import FieldKind
from moewright.spec.hardware import Hardware
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    CudaGraphScope,
    Layout,
    Offload,
    RankOrder,
    Recompute,
)
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    LrDecay,
    MatrixUpdate,
    MuonSpec,
    SaveMode,
    Workload,
)

# The length of training where the plan gives none: long enough to see its speed.
DEFAULT_STEPS = 100
GC_STEPS = 100  # as in the release runs of Megatron-LM's tests/functional_tests
# A skipped step halves our loss scale at once; Megatron-LM's default waits for a second one.
HYSTERESIS = 1


def layout_flags(job: Job) -> Iterator[Flag]:
    """Yield the flags of a layout."""
    yield from _degree_flags(job)
    yield from _memory_flags(job.layout)
    yield from _overlap_flags(job.layout)


def workload_flags(
    workload: Workload, layout: Layout, hardware: Hardware, files: RunFiles
) -> Iterator[Flag]:
    """Yield the flags of a workload, and of where its run keeps its files."""
    yield from _training_flags(workload, layout, files)
    yield from _precision_flags(workload, hardware)
    yield from _optimizer_flags(workload, layout)
    yield from _data_flags(workload)


def _degree_flags(job: Job) -> Iterator[Flag]:
    yield LAYOUT_OPTIONS["tp"], str(job.layout.tp)
    if job.layout.sp:
        yield (LAYOUT_OPTIONS["sp"],)
    yield LAYOUT_OPTIONS["cp"], str(job.layout.cp)
    if job.layout.cp > 1:
        yield (
            LAYOUT_OPTIONS["cp_comm"],
            job.layout.cp_comm.megatron_word,
        )
    if job.layout.cp_comm is CpComm.A2A_P2P:
        yield "--hierarchical-context-parallel-sizes", *map(str, cp_factors(job.layout))
    yield LAYOUT_OPTIONS["pp"], str(job.layout.pp)
    if job.layout.order is RankOrder.DP_LAST:
        yield ("--use-tp-pp-dp-mapping",)
    if job.layout.stages:
        yield LAYOUT_OPTIONS["stages"], job.layout.stages
    elif job.layout.pp > 1:
        if job.layout.vpp > 1:
            yield LAYOUT_OPTIONS["vpp"], str(job.layout.vpp)
        sizes = {len(chunk.layers) for chunk in pipeline_chunks(job.model, job.layout)}
        if len(sizes) > 1:  # embedding and loss count as layers
            yield ("--account-for-embedding-in-pipeline-split",)
            yield ("--account-for-loss-in-pipeline-split",)
    yield from _plain_flags(job.layout)
    if job.model.moe:
        yield LAYOUT_OPTIONS["ep"], str(job.layout.ep)
        yield LAYOUT_OPTIONS["etp"], str(job.layout.etp)  # always: left out, it would be tp
        yield from dispatcher_options(job.layout.dispatcher)
        if job.layout.capacity:
            yield LAYOUT_OPTIONS["capacity"], format_number(job.layout.capacity)
            yield "--moe-token-drop-policy", job.workload.router.drop_policy.value
        if job.layout.capacity_fill is CapacityFill.PADDED:
            yield (LAYOUT_OPTIONS["capacity_fill"],)
        if job.layout.rank_capacity:
            yield LAYOUT_OPTIONS["rank_capacity"], format_number(job.layout.rank_capacity)
            yield ("--moe-use-grouped-tensor",)  # experts whose sizes the host does not read


def _plain_flags(layout: Layout) -> Iterator[Flag]:
    """Yield the flags of choices that one option says where they are not the default."""
    for field in PLAIN_FIELDS:
        value = getattr(layout, field.name)
        if value == field.default:
            continue
        if field.kind is FieldKind.SWITCH:
            yield (field.facts.megatron,)
        elif field.kind is FieldKind.NAME:
            yield field.facts.megatron, value.value
        else:
            yield field.facts.megatron, format_number(value)


def _memory_flags(layout: Layout) -> Iterator[Flag]:
    if layout.zero:
        yield ("--use-distributed-optimizer",)
    if layout.zero == 1 and layout.shard:
        # Copies of the sharded states.
        instances = layout.dp * layout.cp // layout.shard
        yield "--num-distributed-optimizer-instances", str(instances)
    if layout.zero >= 2:
        strategy = "optim_grads_params" if layout.zero == 3 else "optim_grads"
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", strategy
        yield "--ckpt-format", "fsdp_dtensor"
    if Recompute.FULL in layout.recompute:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block" if layout.recompute_block else "uniform"
        yield "--recompute-num-layers", str(layout.recompute_block or layout.recompute_span)
    elif layout.recompute:
        yield "--recompute-granularity", "selective"
        yield (LAYOUT_OPTIONS["recompute"], *(module.value for module in layout.recompute))
    activations = [module.value for module in layout.offload if module is not Offload.OPTIMIZER]
    if activations:
        yield ("--fine-grained-activation-offloading",)
        yield (LAYOUT_OPTIONS["offload"], *activations)
        if layout.offload_layers < 1:
            yield LAYOUT_OPTIONS["offload_layers"], format_number(layout.offload_layers)
        if CudaGraphScope.FULL in layout.graphs:
            yield "--fine-grained-offloading-max-inflight-offloads", "1"


def _overlap_flags(layout: Layout) -> Iterator[Flag]:
    """Yield the flags of overlaps; that of point-to-point transfers is on with virtual stages."""
    for overlap in layout.overlap:
        if overlap in OVERLAP_OPTIONS:
            yield (OVERLAP_OPTIONS[overlap],)
    if CudaGraphScope.FULL in layout.graphs:
        yield "--cuda-graph-impl", "full_iteration"
        # Captured steps cannot look at their own values.
        yield ("--no-check-for-nan-in-loss-and-grad",)
    elif layout.graphs:
        yield "--cuda-graph-impl", "transformer_engine"
        yield (LAYOUT_OPTIONS["graphs"], *(scope.value for scope in layout.graphs))
    if layout.graphs:
        yield ("--te-rng-tracker",)


def _training_flags(workload: Workload, layout: Layout, files: RunFiles) -> Iterator[Flag]:
    yield WORKLOAD_OPTIONS["seq_len"], str(workload.seq_len)
    yield LAYOUT_OPTIONS["mbs"], str(layout.mbs)
    yield from _duration_flags(workload)
    yield "--seed", str(workload.seed)
    if workload.checkpoint.every_steps:
        yield "--save", files.save
        yield "--load", files.save
        if files.weights:  # of a first start; later ones find what was saved
            yield "--pretrained-checkpoint", files.weights
        yield "--save-interval", str(workload.checkpoint.every_steps)
        if workload.checkpoint.mode is SaveMode.ASYNC:
            yield ("--async-save",)
            yield ("--use-persistent-ckpt-worker",)
        yield ("--exit-signal-handler",)  # SIGTERM saves and ends
    elif files.weights:
        yield "--load", files.weights
        yield ("--finetune",)
    # Pauses of one rank at a time are in no prediction: all ranks collect in the same step.
    yield ("--manual-gc",)
    yield "--manual-gc-interval", str(workload.gc_every_steps or GC_STEPS)
    # Readers of logs compare single steps.
    yield "--log-interval", "1"
    yield ("--log-throughput",)
    if files.tracker:  # what goes there goes through the writer of TensorBoard
        yield "--tensorboard-dir", f"{files.save}/tensorboard"
        yield "--wandb-project", files.tracker
        yield "--wandb-exp-name", files.save.rstrip("/").rpartition("/")[2]
        yield "--wandb-save-dir", f"{files.save}/wandb"


def training_steps(workload: Workload) -> int:
    """Return the steps to train; where the plan gives none, enough to see the speed."""
    optimizer = workload.optimizer
    if workload.steps:
        return workload.steps
    return optimizer.decay_steps or max(DEFAULT_STEPS, 2 * optimizer.warmup_steps)


def _duration_flags(workload: Workload) -> Iterator[Flag]:
    """Yield the flags of the batch, the length of training, and the learning rate's schedule.

    Lengths are in steps, or in sequences where the batch grows.
    """
    optimizer = workload.optimizer
    steps = training_steps(workload)
    # 0 is the whole run.
    decay = optimizer.decay_steps or steps
    if not workload.ramp.ramp_start:
        yield WORKLOAD_OPTIONS["global_batch"], str(workload.global_batch)
        yield "--train-iters", str(steps)
        yield "--lr-warmup-iters", str(optimizer.warmup_steps)
        yield "--lr-decay-iters", str(decay)
        if optimizer.lr_decay is LrDecay.WSD:
            yield "--lr-wsd-decay-iters", str(wsd_decay_steps(optimizer, steps))
        return
    schedule = (
        f"{first_sample * workload.seq_len}:{size}" for first_sample, size in batch_sizes(workload)
    )
    yield "--step-batch-size-schedule", " ".join(schedule)
    yield "--train-samples", str(step_samples(workload, steps).first)
    yield "--lr-warmup-samples", str(step_samples(workload, optimizer.warmup_steps).first)
    yield "--lr-decay-samples", str(step_samples(workload, decay).first)
    if optimizer.lr_decay is LrDecay.WSD:
        start = max(0, decay - wsd_decay_steps(optimizer, steps))
        samples = step_samples(workload, decay).first - step_samples(workload, start).first
        yield "--lr-wsd-decay-samples", str(samples)


def _precision_flags(workload: Workload, hardware: Hardware) -> Iterator[Flag]:
    precision = workload.precision
    scaling = workload.scaling
    if precision is Dtype.FP32:
        return
    yield (f"--{precision.wide}",)
    if precision is Dtype.NVFP4:
        yield "--fp4-format", "e2m1"
        yield "--fp4-recipe", "nvfp4"
    elif precision.is_narrow:
        fp8_format, recipe = megatron_recipe(workload)
        yield "--fp8-format", fp8_format
        yield "--fp8-recipe", recipe
        if recipe == "delayed":
            delayed = workload.delayed
            yield "--fp8-amax-history-len", str(delayed.amax_history_len)
            yield "--fp8-amax-compute-algo", delayed.amax_compute_algo.value
            yield "--fp8-margin", str(delayed.fp8_margin)
    if workload.grad_dtype is Dtype.BF16:
        yield ("--grad-reduce-in-bf16",)
    else:
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if precision is Dtype.FP16:
        yield "--initial-loss-scale", format_number(scaling.initial_loss_scale)
        yield "--min-loss-scale", format_number(scaling.min_loss_scale)
        yield "--loss-scale-window", str(scaling.loss_scale_window)
        yield "--hysteresis", str(HYSTERESIS)


def _optimizer_flags(workload: Workload, layout: Layout) -> Iterator[Flag]:
    optimizer = workload.optimizer
    is_offloaded = Offload.OPTIMIZER in layout.offload
    first, second = optimizer.moment_dtypes
    if optimizer.matrix_update is MatrixUpdate.MUON:
        yield "--optimizer", "muon"
        yield from _muon_flags(workload.muon)
    if is_offloaded:
        yield ("--optimizer-cpu-offload",)
        if layout.offload_fraction < 1:
            yield LAYOUT_OPTIONS["offload_fraction"], format_number(layout.offload_fraction)
    # Megatron-LM offloads with this optimizer alone.
    if is_offloaded or (first, second) != (Dtype.FP32, Dtype.FP32):
        yield ("--use-precision-aware-optimizer",)
        yield "--exp-avg-dtype", first.value
        yield "--exp-avg-sq-dtype", second.value
    yield "--lr", format_number(optimizer.lr)
    # A rate there, a part of the highest rate here.
    yield "--min-lr", format_number(optimizer.lr * optimizer.min_lr_fraction)
    yield "--lr-decay-style", optimizer.lr_decay.megatron_word
    if optimizer.lr_decay is LrDecay.WSD:
        yield "--lr-wsd-decay-style", "linear"
    yield "--adam-beta1", format_number(optimizer.beta1)
    yield "--adam-beta2", format_number(optimizer.beta2)
    yield "--adam-eps", format_number(optimizer.eps)
    yield "--weight-decay", format_number(optimizer.weight_decay)
    yield "--clip-grad", format_number(optimizer.clip_norm)
    yield "--ddp-bucket-size", str(optimizer.bucket_elements)


def _muon_flags(muon: MuonSpec) -> Iterator[Flag]:
    yield "--muon-momentum", format_number(muon.muon_momentum)
    if muon.muon_nesterov:
        yield ("--muon-nesterov",)
    yield "--muon-num-ns-steps", str(muon.muon_num_ns_steps)
    yield "--muon-coefficient-type", muon.muon_coefficient_type
    yield "--muon-scale-mode", muon.muon_scale_mode
    yield "--muon-extra-scale-factor", format_number(muon.muon_extra_scale_factor)


def _split_blend(text: str) -> Iterator[str]:
    """Yield the words of a blend, weights and paths by turns, or its one path."""
    parts = parse_data_paths(text)
    for part in parts:
        if len(parts) > 1:
            yield part.weight
        yield part.path


def _data_flags(workload: Workload) -> Iterator[Flag]:
    data = workload.data
    if data.train and data.heldout:
        yield "--train-data-path", *_split_blend(data.train)
        yield "--valid-data-path", *_split_blend(data.heldout)
    elif data.train:
        yield "--data-path", *_split_blend(data.train)
        # All of the corpus trains.
        yield "--split", "1,0,0"
    else:
        yield ("--mock-data",)
    if data.documents is not DocumentMasking.JOINED:
        yield ("--reset-attention-mask",)
        # What follows the end of a document is of another one.
        yield ("--eod-mask-loss",)
    if data.documents is DocumentMasking.RESTARTED:
        yield ("--reset-position-ids",)
    if data.heldout and workload.eval_every_steps:
        yield "--eval-interval", str(workload.eval_every_steps)
    # 0 is written: left out, Megatron-LM would evaluate.
    yield "--eval-iters", str(workload.eval_batches if data.heldout else 0)
