"""ModelSpec: the shape of a decoder-only language model, dense or Mixture-of-Experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.record import Record


class AttentionKind(StrEnum):
    """The families of attention."""

    GQA = "gqa"  # multi-head and multi-query attention are its extremes
    MLA = "mla"


class QkNorm(StrEnum):
    """How queries and keys are normalised."""

    NONE = "none"
    PER_HEAD = "per_head"  # one weight of head_dim, shared by the heads (Qwen3)
    FULL = "full"  # one weight over all heads (OLMoE)


class NormKind(StrEnum):
    """The kinds of normalisation layer."""

    RMS = "rms"
    LAYER = "layer"  # with bias


class PositionKind(StrEnum):
    """How positions enter the model."""

    ROPE = "rope"
    LEARNED = "learned"
    NONE = "none"


class ScoreFunction(StrEnum):
    """The functions that turn router logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """The rotary embedding.

    `scaling` is the HF rope type ("default", "yarn", "llama3", ...); the factors are HF's.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    For GQA, heads of q, k and v are `head_dim` wide. For MLA, `head_dim` is nope + rope for q and
    k, and v has `v_head_dim`.
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

    @property
    def q_width(self) -> int:
        """Width of all queries (and of all keys, for MLA) after the up-projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys; values of GQA have the same."""
        return self.kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output before its projection."""
        return self.heads * self.v_head_dim


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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ModelSpec(Record):
    """A decoder-only transformer.

    `moe_layers[i]` tells whether layer i has experts or a dense MLP.
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

    @property
    def expert_count(self) -> int:
        """Routed experts of a layer that has them; 0 for a dense model."""
        return 0 if self.moe is None else self.moe.experts

    @property
    def expert_width(self) -> int:
        """Width of a row that travels to an expert and comes back."""
        if self.moe is None or not self.moe.latent_size:
            return self.hidden_size
        return self.moe.latent_size

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
        return self.attention.sliding_window if self.attention.window_every else 0

    def layer_window(self, layer: int) -> int:
        """Return the sliding window of a layer in tokens, the query's own included; 0 for none.

        MTP depths (`layer` >= layers) have no window.
        """
        spec = self.attention
        if not spec.window_every or layer >= self.layers or layer % spec.window_every:
            return 0
        return spec.sliding_window

    @property
    def moe_layer_count(self) -> int:
        return sum(self.moe_layers)
