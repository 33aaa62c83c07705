"""Workload: sequences, batch, precision, optimizer and data of a training job, and its length."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.choices import DescribedName, NameFacts
from moewright.spec.record import Record


class Dtype(StrEnum):
    """The number formats of weights, gradients and products."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # one scale per tensor
    MXFP8 = "mxfp8"  # one scale per block of 32 elements, on parts that multiply these
    NVFP4 = "nvfp4"  # 4 bits; an 8-bit scale every 16 elements, and one scale per tensor

    @property
    def nbytes(self) -> int:
        """Bytes of an element in memory; for a narrow dtype those of a scaled one, rounded up."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 1}[self.value]

    @property
    def is_narrow(self) -> bool:
        """Whether products convert their operands to less than 16 bits; the rest stays in 16."""
        return self in NARROW_FORMATS

    @property
    def wide(self) -> Dtype:
        """The format of what is not converted: bf16 under a narrow one, else the format itself."""
        return Dtype.BF16 if self.is_narrow else self


# Formats of fewer than 16 bits, those with a scale a block first.
NARROW_FORMATS = (Dtype.MXFP8, Dtype.FP8, Dtype.NVFP4)


class TensorScaling(StrEnum):
    """The ways in which FP8 takes the scale of a tensor."""

    CURRENT = "current"  # from the tensor itself: a pass over it comes first
    DELAYED = "delayed"  # from the tensors of earlier steps, as DelayedScalingSpec says
    # a scale for each 128 elements, of weights for 128 x 128 (DeepSeek-V3)
    BLOCKWISE = "blockwise"


class Fp8Format(StrEnum):
    """The number formats of FP8 with a scale a tensor, by Megatron-LM's names."""

    HYBRID = "hybrid"  # E4M3 forward, gradients in E5M2: as wide a range as they may need
    E4M3 = "e4m3"  # gradients too, so that Hopper multiplies those of experts in 8 bits


class AmaxComputeAlgo(StrEnum):
    """Which of the largest magnitudes of earlier steps a delayed scale is for."""

    MAX = "max"  # the largest of the history
    MOST_RECENT = "most_recent"


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScalingSpec:
    """How FP8 with tensor_scaling=delayed takes scales; names are Transformer Engine's.

    An amax is the largest magnitude of a tensor in a step, over all micro-batches and ranks.
    """

    amax_history_len: int = 1024  # steps whose amaxes are remembered
    amax_compute_algo: AmaxComputeAlgo = AmaxComputeAlgo.MAX  # which of them scales are for
    fp8_margin: int = 0  # an amax becomes the format's largest number over 2 to the power of this


class Routing(StrEnum):
    """The load of the experts that a prediction assumes."""

    BALANCED = "balanced"  # every expert gets tokens * top_k / experts
    LEARNED = "learned"  # the router decides; by `load_factor`, else as published runs show
    SKEWED = "skewed"  # experts differ by `load_skew` and lie on the ranks in order
    MEASURED = "measured"  # as many tokens as `load_histogram` counted


class LrDecay(DescribedName):
    """The shapes of the learning rate after its warm-up."""

    # falls all the way along a half cosine
    COSINE = "cosine", NameFacts(torchtitan="cosine")
    # falls all the way in a line
    LINEAR = "linear", NameFacts(torchtitan="linear")
    # stays at its peak, then falls linearly in the last steps (warmup-stable-decay)
    WSD = "wsd", NameFacts(megatron="WSD", torchtitan="linear")


class MatrixUpdate(StrEnum):
    """The optimizers of the matrices of layers; all other parameters are AdamW's."""

    ADAMW = "adamw"
    MUON = "muon"  # one fp32 momentum, made orthogonal (rules.muon)


class MuonScale(StrEnum):
    """The factors by which an orthogonal update grows with the sides of its matrix."""

    SPECTRAL = "spectral"  # max(rows, columns)^0.5
    SHAPE_SCALING = "shape_scaling"  # max(1, rows / columns)^0.5
    UNIT_RMS_NORM = "unit_rms_norm"  # (rows / columns)^0.5


class MuonCoefficients(StrEnum):
    """The coefficients of the Newton-Schulz steps, by their names in Megatron-LM."""

    QUINTIC = "quintic"  # other ones in each of five steps
    SIMPLE = "simple"  # the same in every step


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW with decoupled weight decay, and a schedule of the learning rate.

    The rate warms up linearly, then falls to `lr * min_lr_fraction` at `decay_steps`, as `lr_decay`
    says.
    """

    lr: float = 3e-4  # peak learning rate
    min_lr_fraction: float = 0.1  # learning rate at the end of the decay over the peak
    warmup_steps: int = 0  # steps of linear warm-up from 0
    decay_steps: int = 0  # 0: the run's `steps`
    lr_decay: LrDecay = LrDecay.COSINE  # how the rate falls
    # steps before `decay_steps` in which wsd falls; 0: a tenth of `decay_steps`
    wsd_decay_steps: int = 0
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled decay of matrices; norms and biases never decay
    clip_norm: float = 1.0  # 0: no clipping
    moment_dtype: Dtype = Dtype.FP32  # number format of the moments, in memory
    second_moment_dtype: Dtype | None = None  # of the second, where it has another
    matrix_update: MatrixUpdate = MatrixUpdate.ADAMW  # what updates the matrices of layers
    bucket_elements: int = 40_000_000  # a gradient bucket closes when it holds this many

    @property
    def moment_dtypes(self) -> tuple[Dtype, Dtype]:
        """The number formats of the first and the second moment."""
        return self.moment_dtype, self.second_moment_dtype or self.moment_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSpec:
    """Muon (Jordan et al. 2024), where `matrix_update` asks for it; names are Megatron-LM's.

    Learning rate, weight decay and clipping are those of the other parameters.
    """

    muon_momentum: float = 0.9  # decay of the momentum, an average of gradients
    muon_nesterov: bool = False  # the update looks a step ahead of the momentum
    muon_num_ns_steps: int = 5  # Newton-Schulz steps that make an update orthogonal
    muon_coefficient_type: MuonCoefficients = MuonCoefficients.QUINTIC  # coefficients of the steps
    muon_scale_mode: MuonScale = MuonScale.SPECTRAL  # how an update grows with its matrix
    muon_extra_scale_factor: float = 1.0  # times that; 0.2 fits AdamW's rates (arXiv 2502.16982)


class Objective(StrEnum):
    """What the loss of a job makes of the log-probabilities of targets."""

    NEXT_TOKEN = "next_token"
    DPO = "dpo"  # direct preference optimization (Rafailov et al. 2023), on pairs of answers


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """The objective, and the coefficients of the auxiliary losses (docs/formulas.md 4).

    Auxiliary losses may be combined; 0 switches one off. The three balance losses are over a
    micro-batch, over each sequence, and with the counts of the global batch so far.
    """

    objective: Objective = Objective.NEXT_TOKEN  # what the log-probabilities of targets are to do
    dpo_beta: float = 0.1  # weight of log-ratios to the reference, with objective=dpo
    # probability that a pair's answers are the wrong way round (conservative DPO)
    dpo_label_smoothing: float = 0.0

    aux_coeff: float = 0.0  # load balance over a micro-batch (Switch Transformer)
    seq_aux_coeff: float = 0.0  # load balance over each sequence (DeepSeek-V3)
    global_aux_coeff: float = 0.0  # load balance with the counts of the global batch so far
    z_coeff: float = 0.0  # router z-loss (ST-MoE)
    mtp_coeff: float = 0.1  # weight of the mean loss of the MTP depths, where the model has any
    # Weight of the mean over tokens of the divergence of an indexer's scores from what attention
    # reads, over the keys that it chose, for each layer that has one (DeepSeek-V3.2).
    indexer_coeff: float = 1.0


class RouterForce(StrEnum):
    """Experts that a benchmark dictates instead of the router; every record of a run says so."""

    NONE = "none"
    BALANCED = "balanced"  # every expert gets the same number of rows
    SKEWED = "skewed"  # a fixed random preference for experts, of `force_std`


class RouterAssignment(StrEnum):
    """How training chooses experts by their scores; evaluation always takes the top k."""

    TOP_K = "topk"
    # top k after scaling the scores of a micro-batch to an even load (docs/formulas.md 4)
    SINKHORN = "sinkhorn"


class RouterDtype(StrEnum):
    """The number formats of router logits, scores and losses."""

    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def nbytes(self) -> int:
        """Bytes of an element in memory."""
        return {"fp32": 4, "fp64": 8}[self.value]


class DropPolicy(StrEnum):
    """Which rows an expert keeps when a capacity bounds them."""

    PROBS = "probs"  # the rows of the highest weight
    POSITION = "position"  # the first tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterTraining:
    """How training treats the router, besides its losses."""

    router_dtype: RouterDtype = RouterDtype.FP32  # dtype of the router's logits, scores and losses
    assignment: RouterAssignment = RouterAssignment.TOP_K  # how experts are chosen by their scores
    sinkhorn_iterations: int = 0  # 0: until it converges
    # the router's input is multiplied by noise from 1 - eps to 1 + eps (Switch Transformer);
    # 0: no noise
    jitter_eps: float = 0.0
    # how far a step moves the selection bias, where the model has one (arXiv 2408.15664)
    bias_update_rate: float = 1e-3
    force: RouterForce = RouterForce.NONE  # experts that a benchmark dictates
    force_std: float = 1.0  # spread of the preference of skewed forced routing
    drop_policy: DropPolicy = DropPolicy.PROBS  # where the layout gives a capacity


class DocumentMasking(StrEnum):
    """The ways in which attention, targets and positions treat a document's end in a sequence."""

    JOINED = "joined"  # the end of a document means nothing
    # neither attention nor a target crosses it: Megatron-LM's reset_attention_mask, eod_mask_loss
    BOUNDED = "bounded"
    RESTARTED = "restarted"  # positions start again too: Megatron-LM's reset_position_ids


class FusedKernels(StrEnum):
    """The implementations of the operations between matrix products and attention.

    These are norms, rotary embedding, permute and unpermute of rows, router scores, gated
    activations and cross-entropy.
    """

    AUTO = "auto"  # Triton on CUDA devices where the package is installed, else plain
    TRITON = "triton"  # one fused kernel per chain
    COMPILED = "compiled"  # what torch.compile makes of each chain
    PLAIN = "plain"  # operations of torch


class AttentionBackend(StrEnum):
    """The implementations of attention, which differ in what they keep of the scores.

    Scores are those of every query with every key, [heads, queries, keys].
    """

    FLASH = "flash"  # in tiles; keeps a log-sum of each query (FlashAttention)
    FUSED = "fused"  # the same in cuDNN
    UNFUSED = "unfused"  # whole matrices of scores, in Transformer Engine
    LOCAL = "local"  # whole matrices of scores, in Megatron-LM's own layers

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of a whole sequence lie in memory."""
        return self in (AttentionBackend.UNFUSED, AttentionBackend.LOCAL)


class ExpertKernels(StrEnum):
    """The ways in which the products of a rank's experts are computed."""

    GROUPED = "grouped"  # all experts of a rank in one call
    SEQUENTIAL = "sequential"  # one expert after the other
    FUSED = "fused"  # as grouped, with activation and quantisation inside (Transformer Engine)


class Fusion(StrEnum):
    """Chains of operations that a trainer may compute in one kernel."""

    ACTIVATION = "activation"  # an MLP's activation, with the router's weights
    WEIGHT_GRAD = "weight_grad"  # weight gradients are summed by the product that makes them
    PERMUTE = "permute"  # token rows go to experts and back, summed, by a kernel each
    EXPERT_BIAS = "expert_bias"  # gradients of experts' biases are summed in a kernel


class CrossEntropyKernel(StrEnum):
    """The implementations of the loss, by what they keep of the logits."""

    FP32 = "fp32"  # their softmax in fp32, whose gradient takes its place
    COMPILED = "compiled"  # the same by torch.compile, which copies it for the gradient
    IN_PLACE = "in_place"  # their gradient in their own place and dtype


class Bf16Products(StrEnum):
    """The products that a run in 8 or 4 bits may leave in 16; each value begins their rows."""

    ATTENTION = "attention"  # the linears around attention
    LATENT = "latent"  # into and out of the latent space of experts
    MTP = "mtp"  # MTP depths, with their layers


class NarrowedProducts(StrEnum):
    """The products that recipes of 8 bits leave in 16, and that a run may narrow too."""

    HEAD = "head"  # the logits


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The choices of a training framework that decide what it keeps and which kernels it starts.

    This engine takes all of them at their defaults; those of other trainers are planned.
    """

    # how attention is computed, and whether it keeps the scores of whole sequences
    attention_backend: AttentionBackend = AttentionBackend.FLASH
    attention_dropout: float = 0.0  # share of attention's probabilities that is dropped
    hidden_dropout: float = 0.0  # share of what a block adds to the residual stream that is dropped
    # how the products of a rank's experts are computed
    expert_kernels: ExpertKernels = ExpertKernels.GROUPED
    # bytes of a cuBLAS workspace, of which forward and backward have one each; 0: PyTorch's own
    cublas_workspace_bytes: int = 0
    cross_entropy: CrossEntropyKernel = CrossEntropyKernel.FP32  # what the loss keeps of logits
    unfused: tuple[Fusion, ...] = ()  # chains of operations that run one by one
    bf16_first_layers: int = 0  # so many first layers stay in 16 bits under a narrower precision
    bf16_last_layers: int = 0  # so many last layers stay in 16 bits under a narrower precision
    bf16_products: tuple[Bf16Products, ...] = ()  # products that stay in 16 bits, in every layer
    narrowed: tuple[NarrowedProducts, ...] = ()  # products that are narrowed beyond the recipe

    def is_wide_layer(self, layer: int, layers: int) -> bool:
        """Return whether a layer of `layers` stays in 16 bits; MTP depths are numbered above."""
        if layer > layers:
            return Bf16Products.MTP in self.bf16_products
        return layer < self.bf16_first_layers or layer >= layers - self.bf16_last_layers


class Tracker(StrEnum):
    """The known services that follow a run besides TensorBoard."""

    WANDB = "wandb"  # Weights & Biases
    MLFLOW = "mlflow"


class Task(StrEnum):
    """What a job trains a model for."""

    PRETRAIN = "pretrain"
    SFT = "sft"  # supervised fine-tuning: a step of pre-training on packed samples
    LORA = "lora"  # low-rank adapters beside frozen weights (Hu et al. 2021)


class FrozenPart(StrEnum):
    """The parts of a model that may be left as they are while the others train."""

    EMBEDDINGS = "embeddings"  # tables of tokens and positions, and the output head
    ATTENTION = "attention"  # what mixes tokens, with the norms inside
    MLP = "mlp"  # dense MLPs
    ROUTER = "router"
    EXPERTS = "experts"  # routed experts
    SHARED_EXPERTS = "shared_experts"


class AdapterTarget(StrEnum):
    """The linears of attention and of dense and shared MLPs that may have an adapter."""

    QKV = "qkv"  # what attention and recurrent mixers read their input with
    PROJ = "proj"  # what attention and recurrent mixers write their output with
    MLP = "mlp"  # dense MLPs
    SHARED_EXPERTS = "shared_experts"


class BaseQuantization(StrEnum):
    """The forms in which the frozen weights under adapters are held."""

    NONE = "none"  # in the precision of the job
    NF4 = "nf4"  # in 4 bits, with scales of blocks that are quantised too (QLoRA)
    FP8 = "fp8"  # in e4m3, with a scale for 128 rows and columns (DeepSeek-V3)


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuningSpec:
    """What of a model is trained.

    Parts in `freeze` have no gradients and no optimizer state; norms between blocks always train.
    Under LoRA every weight is frozen, and linears of `lora_targets` have an adapter: two matrices
    of a low rank, whose product times `lora_alpha` / `lora_rank` is added to the weight.
    """

    task: Task = Task.PRETRAIN  # what the job trains for
    lora_rank: int = 16  # rank of the adapters of task=lora
    lora_alpha: float = 32.0  # factor of the adapters' product, over their rank
    # the linears that have an adapter: all of attention and of dense and shared MLPs, unless named
    lora_targets: tuple[AdapterTarget, ...] = tuple(AdapterTarget)
    lora_experts: bool = False  # whether routed experts have adapters too
    lora_router: bool = False  # whether routers have adapters too
    # the form of the frozen linears of attention, MLPs and experts under adapters
    quantize_base: BaseQuantization = BaseQuantization.NONE
    freeze: tuple[FrozenPart, ...] = ()  # parts that do not train


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesSpec:
    """Folders of routes, the experts that every token of a run took; "" for none."""

    record_routes: str = ""  # a folder that gets the routes of this run
    # a folder whose routes this run takes, in place of what its routers choose
    replay_routes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalingSpec:
    """Dynamic loss scaling (Micikevicius et al. 2018), for fp16 only.

    The loss is multiplied so that small gradients do not vanish. The scale halves after a step
    whose gradients are not finite, which is skipped, and doubles after `loss_scale_window` finite
    steps in a row.
    """

    initial_loss_scale: float = 65536.0  # scale of the first step
    min_loss_scale: float = 1.0  # the scale never falls below this
    loss_scale_window: int = 1000  # finite steps in a row after which the scale doubles


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampSpec:
    """Global batches that grow, as Megatron-LM's --rampup-batch-size makes them.

    They grow from `ramp_start` in steps of `ramp_increment` to the global batch of the workload,
    over the first `ramp_samples` sequences. A `ramp_start` of 0 means no ramp.
    """

    ramp_start: int = 0  # sequences of the first batches; 0: no ramp
    ramp_increment: int = 0  # sequences by which a batch grows
    ramp_samples: int = 0  # sequences over which the batch grows to the full one


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Megatron .bin/.idx prefixes (without suffix) and the tokenizer file; "" means none.

    Where documents bound attention, fewer (query, key) pairs are attended than over whole
    sequences: `attended_share` is the share that remains. Plans and MFU count these pairs.
    """

    # prefix of the training .bin/.idx pair, without suffix; or a blend: "0.7 a/train 0.3 b/train"
    train: str = ""
    heldout: str = ""  # prefix of the held-out pair, or a blend; "": no evaluation
    tokenizer: str = ""  # the tokenizer.json beside the data; "": none
    # what the end of a document inside a sequence means
    documents: DocumentMasking = DocumentMasking.JOINED
    # token pairs attended within documents over those of whole sequences; 1: counted in the data
    attended_share: float = 1.0
    prefetch: bool = True  # whether a step's data are read while the step before trains


class SaveMode(StrEnum):
    """Whether training waits while a checkpoint is written."""

    SYNC = "sync"
    ASYNC = "async"  # training goes on once a copy of the state is in host memory


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    """When checkpoints are written and which are kept."""

    every_steps: int = 0  # 0: only at the end and on SIGTERM
    mode: SaveMode = SaveMode.SYNC  # whether training waits while a checkpoint is written
    keep: int = 2  # how many of the newest are kept
    # checkpoints at multiples of so many steps are kept for good; 0: none besides `keep`
    keep_every_steps: int = 0
    # a folder elsewhere for copies, as a path or a URL that fsspec knows (s3://..., gs://...)
    copy_to: str = ""
    copy_keep: int = 2  # how many of the newest copies are kept
    # every so many steps each rank copies its state to its own host memory and to that of the next
    # rank, from which a supervised run goes on in place; 0: never
    peer_every_steps: int = 0

    def keeps_for_good(self, step: int) -> bool:
        """Return whether the checkpoint of a step is kept, however many are newer."""
        return self.keep_every_steps > 0 and step % self.keep_every_steps == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSpec:
    """The window of steps that `ranks` trace kernel by kernel: start <= step < end, from 1.

    An `end` of 0 means no window. On a GPU a snapshot of the allocator's history goes with it.
    """

    start: int = 0  # first step that is traced
    end: int = 0  # first step that is traced no more; 0: none is traced
    ranks: tuple[int, ...] = (0,)  # ranks that trace


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Workload(Record):
    """One training job on a model.

    Batch sizes count sequences of `seq_len` tokens; plans are for the full `global_batch`, whatever
    the ramp.
    """

    seq_len: int  # tokens in a sequence
    global_batch: int  # sequences in a step, over all ranks
    # chats in a step, packed into as many sequences as they fill, so that a step has as many
    # micro-batches as its tokens need; plans are for global_batch. 0: global_batch sequences
    batch_samples: int = 0
    steps: int = 0  # optimizer steps to train
    seed: int = 1234  # seed of initial weights and of the order of samples
    precision: Dtype = Dtype.BF16  # compute and stored weights
    # where the scales of a tensor come from, with precision fp8
    tensor_scaling: TensorScaling = TensorScaling.CURRENT
    # of fp8 with a scale a tensor; scales of blocks go with E4M3 throughout
    fp8_format: Fp8Format = Fp8Format.HYBRID
    grad_dtype: Dtype = Dtype.FP32  # accumulation and reduction
    # what runs the operations between matrix products
    fused_kernels: FusedKernels = FusedKernels.AUTO
    routing: Routing = Routing.LEARNED  # the expert load that plans assume
    # load of the hottest expert rank over the mean; 0: not known
    load_factor: float = 0.0
    load_skew: float = 0.0  # standard deviation of an expert's load over the mean
    # tokens of each expert, for each layer that has experts
    load_histogram: tuple[tuple[int, ...], ...] = ()
    eval_every_steps: int = 0  # 0: only at the end
    # steps between records of the loads and losses of every layer's router; 0: never
    router_log_every_steps: int = 1
    eval_batches: int = 8  # global batches of held-out data
    ledger_step: int = 2  # step of a session, counted from 0, on which every op is counted
    # all ranks collect garbage after every so many steps and never between; 0: as Python does
    gc_every_steps: int = 0
    # seconds without a sign of life after which a rank is taken to hang; 0: 20 predicted steps, at
    # least 60
    hang_timeout_s: float = 0.0
    # the same before the first step of a start, while data and weights are read; at least
    # hang_timeout_s
    start_timeout_s: float = 120.0
    # the same in the first step of a start; at least hang_timeout_s
    first_step_timeout_s: float = 30.0
    # in place of first_step_timeout_s where kernels are compiled in that step: on a GPU, and with
    # fused_kernels = triton or compiled
    compile_timeout_s: float = 600.0
    # steps between checks that no bit of the state has changed but by updates; 0: none
    check_every: int = 0
    # experts change their ranks after every so many steps, by the loads of these, where that pays;
    # 0: never
    rebalance_every: int = 0
    # where scalars of a run go besides TensorBoard
    trackers: tuple[str, ...] = ()  # of Tracker, or names of those that packages add
    profile: ProfileSpec = ProfileSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    muon: MuonSpec = MuonSpec()  # where it updates the matrices of layers
    loss: LossSpec = LossSpec()
    router: RouterTraining = RouterTraining()
    trainer: TrainerSpec = TrainerSpec()
    fine_tuning: FineTuningSpec = FineTuningSpec()
    routes: RoutesSpec = RoutesSpec()
    scaling: LossScalingSpec = LossScalingSpec()
    delayed: DelayedScalingSpec = DelayedScalingSpec()
    ramp: BatchRampSpec = BatchRampSpec()
    data: DataSpec = DataSpec()
    # folder of checkpoints or of Hugging Face weights that the first step starts from; "": fresh
    weights: str = ""
    checkpoint: CheckpointSpec = CheckpointSpec()

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch
