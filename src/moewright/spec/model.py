"""ModelSpec: the shape of a decoder-only language model, dense or Mixture-of-Experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from moewright.spec.record import Record


class AttentionKind(StrEnum):
    """The families of attention."""

    GQA = "gqa"  # multi-head and multi-query attention are its extremes
    MLA = "mla"
    # one head that is key and value, compressed over time, and a grouped output (DeepSeek-V4)
    COMPRESSED = "compressed"


class MixerKind(StrEnum):
    """What mixes the tokens of a layer, besides its MLP or experts."""

    ATTENTION = "attention"  # over the whole sequence
    LOCAL_ATTENTION = "local_attention"  # within the sliding window, or within its chunk
    # sparse attention over the keys that the indexer of an earlier layer has chosen
    SHARED_INDEX = "shared_index"
    COMPRESSED_SPARSE = "compressed_sparse"  # a window, and chosen keys of compressed blocks
    HEAVILY_COMPRESSED = "heavily_compressed"  # a window, and all keys of long compressed blocks
    RECURRENT = "recurrent"  # a state space or linear attention: ModelSpec.recurrent
    NONE = "none"  # the layer is an MLP or experts alone


class RecurrentKind(StrEnum):
    """The families of mixers that carry a state along the sequence."""

    MAMBA = "mamba"  # a decay for each channel and element of its state (Jamba)
    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta"  # a decay for each head (Qwen3-Next)
    KIMI_DELTA = "kimi_delta"  # a decay for each channel (Kimi Linear)


class QkNorm(StrEnum):
    """How queries and keys are normalised."""

    NONE = "none"
    PER_HEAD = "per_head"  # one weight of head_dim, shared by the heads (Qwen3)
    FULL = "full"  # one weight over all heads (OLMoE)
    PER_HEAD_ROTATED = "per_head_rotated"  # as PER_HEAD, after the rotation (Hunyuan)
    UNWEIGHTED = "unweighted"  # of each head after the rotation, without a weight (Llama 4)


class NormKind(StrEnum):
    """The kinds of normalisation layer."""

    RMS = "rms"
    LAYER = "layer"  # with bias


class NormPlacement(StrEnum):
    """Where the norms of a layer stand: around what mixes tokens, and around its MLP."""

    BEFORE = "before"
    AFTER = "after"  # OLMo 2 and 3
    AROUND = "around"  # before and after (Grok-1)

    @property
    def is_before(self) -> bool:
        """Whether a norm stands before what mixes tokens, and one before the MLP."""
        return self is not NormPlacement.AFTER

    @property
    def is_after(self) -> bool:
        """Whether a norm stands after what mixes tokens, and one after the MLP."""
        return self is not NormPlacement.BEFORE


class Activation(StrEnum):
    """The nonlinearity of an MLP."""

    SILU = "silu"
    GELU = "gelu"
    RELU_SQUARED = "relu_squared"


class PositionKind(StrEnum):
    """How positions enter the model."""

    ROPE = "rope"
    LEARNED = "learned"
    ALIBI = "alibi"  # scores fall linearly with distance, in each head by its own slope
    NONE = "none"


class ScoreFunction(StrEnum):
    """The functions that turn router logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"
    SPARSE_MIXER = "sparse_mixer"  # choices one after the other, each by its own softmax

    @property
    def is_distribution(self) -> bool:
        """Whether the scores of all experts sum to 1."""
        return self in (ScoreFunction.SOFTMAX, ScoreFunction.SPARSE_MIXER)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """The rotary embedding.

    `scaling` is the HF rope type ("default", "yarn", "llama3", ...); the factors are HF's.
    `rotary_share` is the part of a head that turns. Longrope divides each frequency by a factor of
    its own, and multiplies cosines and sines by a magnitude; those of sequences longer than
    `original_max_position` are the long ones.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0  # of llama3 scaling
    high_freq_factor: float = 4.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False
    rotary_share: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    short_magnitude: float = 1.0
    long_magnitude: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """The light scorer that chooses the keys of sparse attention (DeepSeek-V3.2).

    The first columns of its heads are rotated, in interleaved pairs where `interleaved` says so.
    """

    heads: int
    head_dim: int
    top_k: int  # keys that a query attends to
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    For GQA, heads of q, k and v are `head_dim` wide. For MLA, `head_dim` is nope + rope for q and
    k, and v has `v_head_dim`. For compressed attention, one head of `head_dim` is key and value;
    the output passes through `output_groups` products of rank `output_lora_rank`; a compressed
    sparse layer makes a key of every `sparse_rate` tokens, a heavily compressed one of every
    `heavy_rate`, and both rotate by `compressed_rope`.
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    qk_norm: QkNorm = QkNorm.NONE
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False  # one learned logit per head (gpt-oss)
    sliding_window: int = 0  # 0: none
    window_every: int = 0  # n: every n-th layer, from layer 0, has the window; 1: all; 0: none
    q_lora_rank: int = 0  # 0: q is projected directly
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    rope: RopeSpec = RopeSpec()
    output_gate: bool = False  # a gate as wide as the queries, from the same projection
    chunked: bool = False  # the window does not slide: it is the chunk that the query lies in
    # Queries of layers that do not rotate grow by `temperature_scale` times the log of so many
    # positions as floors lie before them (Llama 4); 0: they do not.
    temperature_floor: float = 0.0
    temperature_scale: float = 0.0
    indexer: IndexerSpec | None = None
    output_groups: int = 0
    output_lora_rank: int = 0
    sparse_rate: int = 0
    heavy_rate: int = 0
    compressed_rope: RopeSpec = RopeSpec()

    @property
    def q_width(self) -> int:
        """Width of all queries (and of all keys, for MLA) after the up-projection."""
        return self.heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Width of the gate of the output; 0 without one."""
        return self.q_width if self.output_gate else 0

    @property
    def q_matrices(self) -> int:
        """Matrices as wide as the queries in their projection: their own, and the gate's."""
        return 2 if self.output_gate else 1

    @property
    def kv_width(self) -> int:
        """Width of all keys; values of GQA have the same."""
        return self.kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output before its projection."""
        return self.heads * self.v_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSpec:
    """The mixer of the layers that carry a state along the sequence.

    Values have `heads` heads of `head_dim`; keys and queries `key_heads` of `key_dim` (Mamba-2
    calls them groups, and `key_dim` the state's size). In Mamba's first version a head is one
    channel, and `step_rank` the rank through which all channels make their steps. `short_conv` is
    the width of the depthwise convolution before, and `chunk_size` the tokens that one product
    takes at a time.
    """

    kind: RecurrentKind
    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    short_conv: int = 4
    conv_bias: bool = False
    chunk_size: int = 64
    step_rank: int = 0

    @property
    def value_width(self) -> int:
        """Width of all values, which is that of the output before its projection."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def conv_width(self) -> int:
        """Width of what the convolution takes: queries, keys and values.

        Mamba's first version makes queries and keys of what the convolution gives.
        """
        if self.kind is RecurrentKind.MAMBA:
            return self.value_width
        return self.value_width + 2 * self.key_width

    @property
    def projected_width(self) -> int:
        """Width of what the projections before give: the convolution's part, gates and rates."""
        rates = 1
        if self.kind is RecurrentKind.GATED_DELTA:
            rates = 2
        return self.conv_width + self.value_width + rates * self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiplierSpec:
    """Constant factors on the stream of a model (Granite, Grok-1); 1 for none."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float = 1.0  # of scores, in place of 1 / sqrt(head_dim); 1 for that
    logits: float = 1.0  # what logits are divided by


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """The way in which tokens choose experts; docs/formulas.md 4 has the formulas."""

    top_k: int
    score: ScoreFunction = ScoreFunction.SOFTMAX
    pre_softmax: bool = False  # softmax over all experts, then top-k
    renormalize: bool = True  # selected probabilities sum to 1
    scaling_factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    # a group's score is the sum of so many highest scores of its experts; 0: top_k // top_groups
    group_scores: int = 0
    selection_bias: bool = False  # aux-loss-free expert bias, selection only
    logit_bias: bool = False  # a trained bias on the router linear (gpt-oss)
    scales_input: bool = False  # scores weight the rows before the experts (Llama 4)
    hash_layers: int = 0  # so many first layers choose by the token's number (DeepSeek-V4)
    # The softmax of a sparse mixer's choice is over the experts whose logits lie less than twice
    # this share below the highest (Phi-3.5-MoE).
    mixer_eps: float = 0.01

    @property
    def scores_per_group(self) -> int:
        """How many of a group's highest scores add up to the score of the group."""
        return self.group_scores or max(1, self.top_k // self.top_groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The routed experts of a layer, and the shared experts beside them."""

    experts: int
    ffn_size: int  # hidden width of one expert
    router: RouterSpec
    shared_ffn_size: int = 0  # total over all shared experts
    shared_gate: bool = False
    expert_bias: bool = False  # biases on the expert linears (gpt-oss)
    # rows are projected to this width before dispatch, and experts work in it; 0: hidden_size
    latent_size: int = 0


# The mixers that attend to a window of the latest tokens.
_WINDOWED = (
    MixerKind.LOCAL_ATTENTION,
    MixerKind.COMPRESSED_SPARSE,
    MixerKind.HEAVILY_COMPRESSED,
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ModelSpec(Record):
    """A decoder-only language model.

    `moe_layers[i]` tells whether layer i has experts. Where `mixers` is given, `mixers[i]` is what
    mixes the tokens of layer i, and where `mlp_layers` is, `mlp_layers[i]` tells whether the layer
    has an MLP or experts at all; else every layer has attention and one of them.
    """

    name: str
    family: str  # the HF model_type, "" when there is none
    hidden_size: int
    layers: int
    vocab_size: int
    attention: AttentionSpec
    dense_ffn_size: int
    moe: MoeSpec | None
    moe_layers: tuple[bool, ...]
    gated: bool = True  # SwiGLU-like: gate and up projections
    mlp_bias: bool = False
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-6
    position: PositionKind = PositionKind.ROPE
    max_position: int = 0
    tie_embeddings: bool = False
    mtp_layers: int = 0
    initializer_range: float = 0.02
    mixers: tuple[MixerKind, ...] = ()
    mlp_layers: tuple[bool, ...] = ()
    recurrent: RecurrentSpec | None = None
    mtp_shared: bool = False  # all MTP depths have the same weights
    activation: Activation = Activation.SILU
    norm_placement: NormPlacement = NormPlacement.BEFORE
    rope_layers: tuple[bool, ...] = ()  # which layers rotate; (): all
    head_bias: bool = False
    multipliers: MultiplierSpec = MultiplierSpec()
    score_cap: float = 0.0  # attention's scores pass through cap * tanh(score / cap); 0: none
    residual_streams: int = 1  # parallel residual streams (hyper-connections, DeepSeek-V4)
    stream_iterations: int = 20  # of Sinkhorn and Knopp, on the matrix that mixes the streams
    stream_eps: float = 1e-6  # added to what mixes the streams, and to the sums of its rows
    zero_centered_norms: bool = False  # norms scale by 1 + weight (Qwen3-Next)
    # Gates of SwiGLU are this at most, and what they multiply within it (DeepSeek-V4); 0: no bound.
    activation_limit: float = 0.0

    @property
    def expert_count(self) -> int:
        """Routed experts of a layer that has them; 0 for a dense model."""
        return 0 if self.moe is None else self.moe.experts

    @property
    def top_k(self) -> int:
        """Experts that a token goes to; 0 for a dense model."""
        return 0 if self.moe is None else self.moe.router.top_k

    @property
    def fc1_stack(self) -> tuple[int, ...]:
        """Leading dims of the weight that holds the matrices of `fc1_matrices`."""
        return (2,) if self.gated else ()

    @property
    def fc1_matrices(self) -> int:
        """Matrices that read the input of an MLP or expert: gate and up, or up alone."""
        return prod(self.fc1_stack)

    @property
    def ffn_matrices(self) -> int:
        """Matrices of an MLP or expert: those of `fc1_matrices`, and down."""
        return self.fc1_matrices + 1

    @property
    def fc1_name(self) -> str:
        """Name of the weight that holds the matrices of `fc1_matrices`."""
        return "gate_up" if self.gated else "up"

    @property
    def expert_width(self) -> int:
        """Width of a row that travels to an expert and comes back."""
        if self.moe is None or not self.moe.latent_size:
            return self.hidden_size
        return self.moe.latent_size

    @property
    def joins_mtp_inputs(self) -> bool:
        """Whether an MTP depth projects its two inputs side by side, not each by itself."""
        return self.residual_streams == 1

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts; MTP depths follow, from layers + 1 on."""
        layers = tuple(layer for layer, is_moe in enumerate(self.moe_layers) if is_moe)
        if not self.moe_layers[-1]:
            return layers
        return (*layers, *range(self.layers + 1, self.layers + 1 + self.mtp_layers))

    @property
    def max_window(self) -> int:
        """The sliding window of the layers that have one; 0 where no layer has."""
        return max(map(self.layer_window, range(self.layers)))

    def layer_window(self, layer: int) -> int:
        """Return the sliding window of a layer in tokens, the query's own included; 0 for none.

        MTP depths (`layer` >= layers) have no window.
        """
        spec = self.attention
        if self.mixers:
            if self.mixer(layer) in _WINDOWED:
                return spec.sliding_window
            return 0
        if not spec.window_every or layer >= self.layers or layer % spec.window_every:
            return 0
        return spec.sliding_window

    def mixer(self, layer: int) -> MixerKind:
        """Return what mixes the tokens of a layer; MTP depths (`layer` >= layers) have attention.

        That of a model with compressed attention is local.
        """
        if layer >= self.layers:
            is_compressed = self.attention.kind is AttentionKind.COMPRESSED
            if is_compressed:
                return MixerKind.LOCAL_ATTENTION
            return MixerKind.ATTENTION
        if self.mixers:
            return self.mixers[layer]
        return MixerKind.ATTENTION

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts; MTP depths (`layer` >= layers) are like the last."""
        return self.moe_layers[min(layer, self.layers - 1)]

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts; MTP depths have."""
        return not self.mlp_layers or layer >= self.layers or self.mlp_layers[layer]

    @property
    def dense_layer_count(self) -> int:
        """The layers that have a dense MLP."""
        if not self.mlp_layers:
            return self.layers - self.moe_layer_count
        return sum(
            has_mlp and not is_moe
            for has_mlp, is_moe in zip(self.mlp_layers, self.moe_layers, strict=True)
        )

    @property
    def moe_layer_count(self) -> int:
        return sum(self.moe_layers)
