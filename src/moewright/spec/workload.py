"""Workload: what is asked of the model: sequences, batch, precision, optimizer, data, and for how
long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Dtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # a scale a tensor
    MXFP8 = "mxfp8"  # a scale a block: of 32 elements on Blackwell, of 128 on Hopper
    NVFP4 = "nvfp4"  # 4 bits, a scale of 8 bits every 16 elements and one a tensor

    @property
    def nbytes(self) -> int:
        """Bytes of an element in memory; of a narrow dtype those of a scaled one, rounded up."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 1}[self.value]

    @property
    def is_narrow(self) -> bool:
        """Whether products take operands of less than 16 bits, converted before; all else stays in
        16 bits."""
        return self in (Dtype.FP8, Dtype.MXFP8, Dtype.NVFP4)


class Routing(StrEnum):
    """Where the load of the experts comes from when a run is predicted."""

    BALANCED = "balanced"  # every expert gets tokens * top_k / experts
    LEARNED = "learned"  # the router decides; the prediction uses `load_factor`
    SKEWED = "skewed"  # experts differ by `load_skew`, and lie on the ranks as they come
    MEASURED = "measured"  # as many tokens as `load_histogram` counted


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW with decoupled decay, linear warm-up, then cosine to `lr * min_lr_fraction` at
    `decay_steps`."""

    lr: float = 3e-4
    min_lr_fraction: float = 0.1
    warmup_steps: int = 0
    decay_steps: int = 0  # 0: the run's `steps`
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # 0: no clipping
    moment_dtype: Dtype = Dtype.FP32
    bucket_elements: int = 40_000_000  # a gradient bucket closes when it holds this many


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """Coefficients of the auxiliary losses (0: off), any of them together; formulas in
    docs/formulas.md 4.

    The balance loss over a micro-batch, over each sequence, and with the counts of the global batch
    so far.
    """

    aux_coeff: float = 0.0
    seq_aux_coeff: float = 0.0
    global_aux_coeff: float = 0.0
    z_coeff: float = 0.0
    mtp_coeff: float = (
        0.1  # of the mean over MTP depths of the loss of each, where the model has any
    )


class RouterForce(StrEnum):
    """Experts given instead of chosen, for benchmarks; a run says so in every record."""

    NONE = "none"
    BALANCED = "balanced"  # every expert the same number of rows
    SKEWED = "skewed"  # a fixed random preference for experts, of `force_std`


class RouterAssignment(StrEnum):
    """How training chooses experts by their scores; evaluation always takes each token's best."""

    TOP_K = "topk"
    # the best after scaling a micro-batch's scores to an even load (docs/formulas.md 4)
    SINKHORN = "sinkhorn"


class RouterDtype(StrEnum):
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def nbytes(self) -> int:
        """Bytes of an element in memory; of a narrow dtype those of a scaled one, rounded up."""
        return {"fp32": 4, "fp64": 8}[self.value]


class DropPolicy(StrEnum):
    """Which rows an expert keeps when a capacity bounds them."""

    PROBS = "probs"  # those of the highest weight
    POSITION = "position"  # the first tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterTraining:
    """What training does to the router besides its losses."""

    router_dtype: RouterDtype = RouterDtype.FP32  # of its logits, scores and losses
    assignment: RouterAssignment = RouterAssignment.TOP_K
    sinkhorn_iterations: int = 0  # 0: until it converges
    jitter_eps: float = (
        0.0  # the router's input times noise in 1 - eps .. 1 + eps (Switch Transformer); 0: none
    )
    bias_update_rate: float = (
        1e-3  # of the selection bias, where the model has one; a step's move (arXiv 2408.15664)
    )
    force: RouterForce = RouterForce.NONE
    force_std: float = 1.0
    drop_policy: DropPolicy = DropPolicy.PROBS  # where the layout gives a capacity


class DocumentMasking(StrEnum):
    """What the end of a document inside a sequence means: nothing; that neither attention nor a
    target crosses it (Megatron-LM's reset_attention_mask and eod_mask_loss); or that positions
    start again too (reset_position_ids).
    """

    JOINED = "joined"
    BOUNDED = "bounded"
    RESTARTED = "restarted"


class FusedKernels(StrEnum):
    """Who works on what lies between products and attention, chains of small operations: norms,
    rotation, rows (permute, unpermute), router scores, gated activations, cross-entropy.
    """

    AUTO = "auto"  # Triton on CUDA devices where the package is installed, else plain
    TRITON = "triton"  # a kernel each
    PLAIN = "plain"  # operations of torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalingSpec:
    """Dynamic loss scaling, in fp16 alone: the loss is multiplied so that small gradients do not
    vanish.

    The scale halves after a step whose gradients are not finite, which is skipped, and doubles
    after `loss_scale_window` finite ones in a row (Micikevicius et al. 2018).
    """

    initial_loss_scale: float = 65536.0
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampSpec:
    """Global batches that grow: from `ramp_start` in steps of `ramp_increment` up to the
    workload's, over the first `ramp_samples` sequences, as Megatron-LM's --rampup-batch-size does.
    ramp_start 0: none.
    """

    ramp_start: int = 0
    ramp_increment: int = 0
    ramp_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Megatron .bin/.idx prefixes (no suffix) and the tokenizer file beside them; "" means none.

    `attended_share`: of the pairs of tokens that whole sequences attend, those that documents leave
    where they bound attention; plans and MFU count these.
    """

    train: str = ""
    heldout: str = ""
    tokenizer: str = ""
    documents: DocumentMasking = DocumentMasking.JOINED
    attended_share: float = 1.0


class SaveMode(StrEnum):
    """Who waits while a checkpoint is written: training; or nobody, once a copy of the state is in
    host memory."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    every_steps: int = 0  # 0: only at the end and on SIGTERM
    mode: SaveMode = SaveMode.SYNC
    keep: int = 2  # the newest so many
    keep_every_steps: int = 0  # and all whose step is a multiple of this; 0: no more than those


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSpec:
    """A window of steps that `ranks` write down kernel by kernel: steps start <= step < end,
    counted from 1; end 0: none. On a GPU a snapshot of the allocator's history goes with it.
    """

    start: int = 0
    end: int = 0
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training job on a model. Batch sizes count sequences of `seq_len` tokens; plans are for
    the whole `global_batch`, whatever the ramp.
    """

    seq_len: int
    global_batch: int
    steps: int = 0
    seed: int = 1234
    precision: Dtype = Dtype.BF16  # compute and stored weights
    grad_dtype: Dtype = Dtype.FP32  # accumulation and reduction
    fused_kernels: FusedKernels = FusedKernels.AUTO
    routing: Routing = Routing.BALANCED
    load_factor: float = 1.0  # load of the hottest expert rank over the mean
    load_skew: float = 0.0  # standard deviation of an expert's load over the mean
    load_histogram: tuple[
        tuple[int, ...], ...
    ] = ()  # tokens an expert, of each layer that has experts
    eval_every_steps: int = 0  # 0: only at the end
    router_log_every_steps: int = (
        1  # loads and losses of every layer's router in the record; 0: never
    )
    eval_batches: int = 8  # global batches of held-out data
    ledger_step: int = 2  # the step, counted in a session from 0, on which every op is counted
    # collect garbage after every so many steps, on all ranks at once, and never between; 0:
    # Python's own way
    gc_every_steps: int = 0
    profile: ProfileSpec = ProfileSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    loss: LossSpec = LossSpec()
    router: RouterTraining = RouterTraining()
    scaling: LossScalingSpec = LossScalingSpec()
    ramp: BatchRampSpec = BatchRampSpec()
    data: DataSpec = DataSpec()
    # a folder, of checkpoints or of Hugging Face, whose weights the first step starts from; "":
    # fresh
    weights: str = ""
    checkpoint: CheckpointSpec = CheckpointSpec()

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch
