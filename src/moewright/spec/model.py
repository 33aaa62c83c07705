"""ModelSpec: the shape of a decoder-only language model, dense or Mixture-of-Experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AttentionKind(StrEnum):
    GQA = "gqa"  # multi-head and multi-query attention are its extremes
    MLA = "mla"


class QkNorm(StrEnum):
    NONE = "none"
    PER_HEAD = "per_head"  # one weight of head_dim, shared by the heads (Qwen3)
    FULL = "full"  # one weight over all heads (OLMoE)


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"  # with bias


class PositionKind(StrEnum):
    ROPE = "rope"
    LEARNED = "learned"
    NONE = "none"


class ScoreFunction(StrEnum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding; `scaling` is the HF rope type ("default", "yarn", "llama3", ...), factors
    as in HF."""

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
    """Attention of one layer. For GQA q and v have `head_dim`; for MLA q/k have nope+rope and v
    `v_head_dim`."""

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    qk_norm: QkNorm = QkNorm.NONE
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False  # one learned logit a head (gpt-oss)
    sliding_window: int = 0  # 0: none
    window_every: int = 0  # n: every n-th layer, from layer 0, is windowed; 1: all; 0: none
    q_lora_rank: int = 0  # 0: q is projected directly
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    rope: RopeSpec = RopeSpec()

    @property
    def q_width(self) -> int:
        """Width of all queries (and keys, for MLA), after the up-projection."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys; GQA values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output before its projection."""
        return self.heads * self.v_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """How tokens choose experts; see docs/formulas.md 4 for the formulas."""

    top_k: int
    score: ScoreFunction = ScoreFunction.SOFTMAX
    pre_softmax: bool = False  # softmax over all experts, then top-k
    renormalize: bool = True  # selected probabilities sum to 1
    scaling_factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_scores: int = (
        0  # the highest scores of a group that make the group's; 0: top_k // top_groups
    )
    selection_bias: bool = False  # aux-loss-free expert bias, selection only
    logit_bias: bool = False  # a trained bias on the router linear (gpt-oss)

    @property
    def scores_per_group(self) -> int:
        """How many of a group's highest scores add up to the group's own."""
        return self.group_scores or max(1, self.top_k // self.top_groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The routed experts, and the shared one beside them."""

    experts: int
    ffn_size: int  # hidden width of one expert
    router: RouterSpec
    shared_ffn_size: int = 0  # total over all shared experts
    shared_gate: bool = False
    expert_bias: bool = False  # biases on the expert linears (gpt-oss)
    # routed experts work in so narrow a space, projected into before dispatch; 0: hidden_size
    latent_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. `moe_layers[i]` tells whether layer i has experts or a dense
    MLP."""

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
    def expert_width(self) -> int:
        """Width of a row that travels to an expert and comes back."""
        return (self.moe.latent_size if self.moe else 0) or self.hidden_size

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts: of the model, then those of MTP depths, which start
        at layers + 1."""
        depths = (
            range(self.layers + 1, self.layers + 1 + self.mtp_layers) if self.moe_layers[-1] else ()
        )
        return (*(layer for layer, is_moe in enumerate(self.moe_layers) if is_moe), *depths)

    @property
    def max_window(self) -> int:
        """That of the layers which have one; 0 where none has."""
        return self.attention.sliding_window if self.attention.window_every else 0

    def layer_window(self, layer: int) -> int:
        """The latest tokens that a query of the layer attends, itself included; 0: all. MTP depths
        attend all."""
        spec = self.attention
        windowed = spec.window_every and layer < self.layers and layer % spec.window_every == 0
        return spec.sliding_window if windowed else 0

    @property
    def moe_layer_count(self) -> int:
        return sum(self.moe_layers)
