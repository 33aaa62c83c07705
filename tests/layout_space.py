"""Small model shapes, and the corners of the space of legal layouts over them.

The corners are those in which bugs of other engines were found. Layouts at random, beside all other
choices of a job, are drawn by job_draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from layout_proof import WORKLOAD
from moewright.codec import format_layout, parse_layout
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.limits.legality import check_legality
from moewright.spec.layout import (
    Layout,
)
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    IndexerSpec,
    MixerKind,
    ModelSpec,
    MoeSpec,
    PositionKind,
    QkNorm,
    RecurrentKind,
    RecurrentSpec,
    RopeSpec,
    RouterSpec,
    ScoreFunction,
)
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, DocumentMasking, Workload
from tiny_jobs import DENSE, MODEL, build_plan


def _gqa(heads: int, kv_heads: int, norm: QkNorm) -> AttentionSpec:
    return replace(MODEL.attention, heads=heads, kv_heads=kv_heads, qk_norm=norm)


def _moe(experts: int, top_k: int, **more: object) -> MoeSpec:
    spec = MoeSpec(experts=experts, ffn_size=16, router=RouterSpec(top_k=top_k))
    return replace(spec, **more)  # type: ignore[arg-type]


LATENT = AttentionSpec(
    kind=AttentionKind.MLA,
    heads=4,
    kv_heads=4,
    head_dim=16,
    v_head_dim=12,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    rope=RopeSpec(interleaved=True),
)
_GROUPED = RouterSpec(
    top_k=2,
    score=ScoreFunction.SIGMOID,
    scaling_factor=2.5,
    groups=4,
    top_groups=2,
    group_scores=2,
    selection_bias=True,
)
_THREE_OF_FOUR_MOE = (True, False, True, True)

# A window, chosen blocks and all blocks, experts by the token's number, parallel streams.
_COMPRESSED = replace(
    MODEL,
    family="deepseek_v4",
    layers=4,
    moe_layers=(True,) * 4,
    vocab_size=97,
    mixers=(
        MixerKind.LOCAL_ATTENTION,
        MixerKind.COMPRESSED_SPARSE,
        MixerKind.HEAVILY_COMPRESSED,
        MixerKind.COMPRESSED_SPARSE,
    ),
    attention=AttentionSpec(
        kind=AttentionKind.COMPRESSED,
        heads=8,
        kv_heads=1,
        head_dim=16,
        v_head_dim=16,
        sinks=True,
        sliding_window=6,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        indexer=IndexerSpec(heads=4, head_dim=12, top_k=2),
        output_groups=4,
        output_lora_rank=8,
        sparse_rate=4,
        heavy_rate=8,
        rope=RopeSpec(interleaved=True),
        compressed_rope=RopeSpec(theta=160000.0, interleaved=True),
    ),
    moe=replace(
        _moe(8, 2, shared_ffn_size=24),
        router=RouterSpec(
            top_k=2,
            score=ScoreFunction.SQRT_SOFTPLUS,
            scaling_factor=1.5,
            selection_bias=True,
            hash_layers=1,
        ),
    ),
    residual_streams=3,
    stream_iterations=4,
    activation_limit=0.5,
)
SHAPES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "qwen": replace(MODEL, layers=4, moe_layers=_THREE_OF_FOUR_MOE),
        # Norms over all heads, tied, an odd vocabulary, experts not a power of two.
        "olmoe": replace(
            MODEL,
            layers=4,
            moe_layers=(True,) * 4,
            attention=_gqa(8, 4, QkNorm.FULL),
            moe=_moe(6, 2),
            tie_embeddings=True,
            vocab_size=97,
        ),
        # Latent attention, groups of experts, a moving bias, a shared expert.
        "deepseek": replace(
            MODEL,
            layers=4,
            moe_layers=(False, True, True, True),
            attention=LATENT,
            vocab_size=101,
            moe=replace(_moe(8, 2, shared_ffn_size=24), router=_GROUPED),
        ),
        # Biases that fall with distance in place of rotations, heads that are no power of two.
        "biased": replace(
            MODEL,
            layers=4,
            moe_layers=_THREE_OF_FOUR_MOE,
            position=PositionKind.ALIBI,
            attention=_gqa(12, 4, QkNorm.NONE),
        ),
        # More layers than stages, the best three of twelve experts, a gated shared expert, sinks.
        "deep": replace(
            MODEL,
            layers=8,
            moe_layers=(False, True) * 4,
            attention=replace(_gqa(4, 4, QkNorm.NONE), sinks=True),
            moe=_moe(12, 3, shared_ffn_size=16, shared_gate=True),
        ),
        # Two more tokens are predicted ahead, by depths with experts.
        "ahead": replace(
            MODEL,
            layers=4,
            moe_layers=_THREE_OF_FOUR_MOE,
            attention=_gqa(4, 4, QkNorm.NONE),
            mtp_layers=2,
            moe=_moe(8, 2, shared_ffn_size=16),
        ),
        # Biases everywhere, sinks, a window in every other layer, a clamped activation.
        "oss": replace(
            MODEL,
            family="gpt_oss",
            layers=4,
            moe_layers=(True,) * 4,
            vocab_size=97,
            attention=replace(
                _gqa(8, 2, QkNorm.NONE),
                qkv_bias=True,
                out_bias=True,
                sinks=True,
                sliding_window=6,
                window_every=2,
            ),
            moe=replace(_moe(8, 2, expert_bias=True), router=RouterSpec(top_k=2, logit_bias=True)),
        ),
        # No experts, one key head, biases, tied, an odd vocabulary, one more token predicted ahead.
        "dense": replace(
            DENSE,
            layers=4,
            moe_layers=(False,) * 4,
            tie_embeddings=True,
            vocab_size=97,
            mlp_bias=True,
            mtp_layers=1,
            attention=replace(_gqa(4, 1, QkNorm.PER_HEAD), qkv_bias=True, out_bias=True),
        ),
        # Latent attention in a dense model: only here may TP go without sequence parallelism.
        "latent": replace(
            DENSE,
            layers=4,
            moe_layers=(False,) * 4,
            attention=LATENT,
            vocab_size=101,
            mtp_layers=1,
        ),
        # An indexer chooses the keys of latent attention, of so few heads that many scores are 0;
        # one more token is predicted ahead.
        "sparse": replace(
            MODEL,
            layers=4,
            moe_layers=(False, True, True, True),
            attention=replace(LATENT, indexer=IndexerSpec(heads=4, head_dim=12, top_k=5)),
            vocab_size=101,
            mtp_layers=1,
            moe=replace(_moe(8, 2, shared_ffn_size=24), router=_GROUPED),
        ),
        "compressed": _COMPRESSED,
        "compressed_ahead": replace(_COMPRESSED, mtp_layers=1),
        # Gated delta nets around gated attention, and one more token predicted ahead. A larger
        # epsilon, for a first token reads what it wrote under a key nearly across its query.
        "delta": replace(
            MODEL,
            family="qwen3_next",
            layers=4,
            moe_layers=_THREE_OF_FOUR_MOE,
            norm_eps=1e-3,
            vocab_size=97,
            mtp_layers=1,
            mixers=(
                MixerKind.RECURRENT,
                MixerKind.RECURRENT,
                MixerKind.ATTENTION,
                MixerKind.RECURRENT,
            ),
            recurrent=RecurrentSpec(
                kind=RecurrentKind.GATED_DELTA, heads=8, head_dim=6, key_heads=4, key_dim=8
            ),
            attention=replace(
                _gqa(4, 2, QkNorm.PER_HEAD), output_gate=True, rope=RopeSpec(rotary_share=0.5)
            ),
            moe=_moe(8, 2, shared_ffn_size=16, shared_gate=True),
            zero_centered_norms=True,
        ),
        # Mamba-2, attention without positions and an MLP in layers of their own, and latent experts
        # of squared ReLU. The epsilon as above: gates nearly at zero.
        "hybrid": replace(
            MODEL,
            family="nemotron_h",
            layers=6,
            moe_layers=(False, True, False, False, False, True),
            norm_eps=1e-3,
            vocab_size=97,
            mixers=(
                MixerKind.RECURRENT,
                MixerKind.NONE,
                MixerKind.ATTENTION,
                MixerKind.NONE,
                MixerKind.RECURRENT,
                MixerKind.NONE,
            ),
            mlp_layers=(False, True, False, True, False, True),
            dense_ffn_size=48,
            recurrent=RecurrentSpec(
                kind=RecurrentKind.MAMBA2,
                heads=8,
                head_dim=6,
                key_heads=4,
                key_dim=8,
                conv_bias=True,
            ),
            attention=_gqa(4, 2, QkNorm.NONE),
            position=PositionKind.NONE,
            activation=Activation.RELU_SQUARED,
            gated=False,
            moe=replace(_moe(8, 2, shared_ffn_size=24, latent_size=16), router=_GROUPED),
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layout on a model shape, with the meaning of the ends of documents.

    The `name` says what the case is there for.
    """

    name: str
    shape: str
    layout: Layout
    documents: DocumentMasking = DocumentMasking.JOINED

    @property
    def workload(self) -> Workload:
        return replace(WORKLOAD, data=DataSpec(documents=self.documents))

    @property
    def id(self) -> str:
        text = f"{self.shape}-{self.layout.world_size}x-{format_layout(self.layout)}"
        if self.documents is not DocumentMasking.JOINED:
            text += f"-{self.documents}"
        return f"{self.name}: {text}" if self.name else text

    @property
    def refusals(self) -> tuple[object, ...]:
        """Why the layout is not legal or not run by the engine; () when it is of the space."""
        model = SHAPES[self.shape]
        job = Job(model=model, workload=self.workload, layout=self.layout)
        return check_legality(job) or unsupported_layout(job)


def _corner(
    name: str,
    shape: str,
    world: int,
    text: str,
    documents: DocumentMasking = DocumentMasking.JOINED,
) -> Case:
    return Case(
        name=name, shape=shape, layout=parse_layout(text, world_size=world), documents=documents
    )


# Layouts in which bugs of other engines showed while the default layout hid them.
CORNERS = (
    _corner("ETP beyond TP, EP 1", "qwen", 4, "tp2,etp4,mbs2"),
    _corner("ETP without TP, EP 1", "olmoe", 2, "etp2,mbs2"),
    _corner("EP beyond DP", "qwen", 4, "tp2,ep4,mbs2"),
    _corner("EP beyond DP, two expert replicas", "deep", 8, "tp4,ep4,mbs4"),
    _corner("EP and ETP on TP ranks", "deepseek", 4, "tp4,etp2,ep2,mbs2"),
    _corner("DP x CP", "qwen", 4, "cp2,mbs2"),
    _corner("DP x CP, experts across both", "olmoe", 4, "cp2,ep2,etp2,mbs2"),
    _corner("TP x CP x DP", "deepseek", 8, "tp2,cp2,ep4,mbs2"),
    _corner("CP all-gather", "qwen", 2, "cp2,cp_comm=allgather,mbs4"),
    _corner("CP by heads, then in a ring", "olmoe", 4, "cp4,ep2,mbs4,cp_comm=a2a+p2p"),
    _corner("CP by more heads than keys", "qwen", 4, "cp4,ep4,mbs2,cp_comm=a2a"),
    _corner("sinks round a ring", "deep", 4, "cp2,tp2,ep2,mbs2"),
    _corner("windows by heads, biases over ETP", "oss", 4, "cp2,cp_comm=a2a,tp2,ep2,etp2,mbs2"),
    _corner("windows round a ring", "oss", 4, "cp4,ep2,mbs4"),
    _corner(
        "windows over gathered keys, in documents",
        "oss",
        4,
        "cp4,cp_comm=allgather,ep2,mbs4",
        DocumentMasking.BOUNDED,
    ),
    _corner(
        "more ranks than key heads, biases", "oss", 4, "tp4,ep4,mbs4,recompute=core_attn+moe_act"
    ),
    _corner("room in shards and beside them", "oss", 4, "ep4,zero3,mbs1"),
    _corner("CP by heads", "deep", 2, "cp2,cp_comm=a2a,mbs4"),
    _corner("documents round a ring", "qwen", 4, "cp4,ep2,mbs4", DocumentMasking.RESTARTED),
    _corner(
        "documents, keys gathered",
        "deepseek",
        4,
        "cp4,cp_comm=allgather,mbs4",
        DocumentMasking.BOUNDED,
    ),
    _corner(
        "documents, heads inside and a ring between",
        "deep",
        8,
        "cp8,cp_comm=a2a+p2p,mbs2",
        DocumentMasking.BOUNDED,
    ),
    _corner("micro-batches of many rows with SP", "deepseek", 2, "tp2,mbs4"),
    _corner(
        "depths over a ring, in documents", "ahead", 4, "cp4,ep2,mbs4", DocumentMasking.RESTARTED
    ),
    _corner(
        "depths in a V, replayed in part",
        "ahead",
        4,
        "pp2,ep2,schedule=zbv,mbs2,recompute=moe+core_attn",
    ),
    _corner(
        "a checkpoint a depth", "ahead", 2, "ep2,mbs4,recompute=uniform2", DocumentMasking.BOUNDED
    ),
    _corner("depths before the stage of the loss", "ahead", 4, "pp4,mbs2,layout='Ett|tt|mm|L'"),
    _corner(
        "depths and loss on the ranks of a V",
        "ahead",
        2,
        "pp2,schedule=zbv,mbs2,layout='E|tt|ttmm|L'",
    ),
    _corner(
        "a tied table on three ranks, TP without SP",
        "dense",
        6,
        "pp3,tp2,sp=false,mbs4,layout='Ett|ttm|L'",
    ),
    _corner("a rank without a valid token", "qwen", 8, "ep8,mbs1"),
    _corner("a rank without a valid token, dense", "dense", 8, "mbs1"),
    _corner("latents made whole on every rank", "latent", 2, "tp2,sp=false,mbs4"),
    _corner(
        "latents made whole, replayed and in shards",
        "latent",
        4,
        "tp2,sp=false,cp2,mbs4,zero3,recompute=mla_up_proj",
    ),
    _corner(
        "latents made whole on four ranks of two stages",
        "latent",
        8,
        "tp4,sp=false,pp2,mbs4,schedule=zb-h1",
    ),
    _corner("delta nets cut by heads", "delta", 2, "tp2,ep2,mbs2"),
    _corner("delta nets of a key head a rank", "delta", 4, "tp4,ep2,etp2,mbs4"),
    _corner(
        "delta nets in documents, replayed in part",
        "delta",
        2,
        "ep2,mbs4,recompute=core_attn+moe_act+layernorm",
        DocumentMasking.RESTARTED,
    ),
    _corner(
        "delta nets in stages, weight gradients later",
        "delta",
        4,
        "pp2,tp2,ep2,schedule=zb-h1,mbs2",
        DocumentMasking.BOUNDED,
    ),
    _corner("delta nets of two passes", "delta", 2, "ep2,mbs1,overlap=ep+wgrad"),
    _corner("delta nets in shards", "delta", 2, "ep2,zero3,mbs2,recompute=full"),
    _corner(
        "delta nets beside offloaded activations",
        "delta",
        2,
        "pp2,zero0,mbs2,offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm",
    ),
    _corner("key heads of delta nets for tokens", "delta", 4, "tp2,cp2,ep2,mbs2"),
    _corner(
        "key heads for tokens in documents",
        "delta",
        4,
        "cp4,ep2,mbs2,cp_comm=a2a,recompute=full",
        DocumentMasking.RESTARTED,
    ),
    _corner("Mamba-2 cut by groups", "hybrid", 2, "tp2,ep2,mbs2"),
    _corner("Mamba-2 of a group a rank, latent experts cut", "hybrid", 4, "tp4,ep2,etp2,mbs4"),
    _corner(
        "layers of one block in stages and documents",
        "hybrid",
        4,
        "pp2,tp2,ep2,schedule=zb-h1,mbs2",
        DocumentMasking.BOUNDED,
    ),
    _corner(
        "layers of one block, replayed in part",
        "hybrid",
        2,
        "ep2,mbs4,recompute=core_attn+moe_act+layernorm+mlp",
        DocumentMasking.RESTARTED,
    ),
    _corner("layers of one block in shards", "hybrid", 2, "ep2,zero3,mbs2,recompute=full"),
    _corner("layers of one block in two passes", "hybrid", 2, "ep2,mbs1,overlap=ep+wgrad"),
    _corner(
        "layers of one block beside offloaded activations",
        "hybrid",
        2,
        "pp2,zero0,mbs2,offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+moe_act",
    ),
    _corner("groups of Mamba-2 for tokens", "hybrid", 4, "tp2,cp2,ep2,mbs2"),
    _corner(
        "groups for tokens in documents, keys gathered",
        "hybrid",
        4,
        "cp4,ep2,cp_comm=allgather,mbs2,recompute=full",
        DocumentMasking.BOUNDED,
    ),
    _corner("keys chosen on the ranks of their queries", "sparse", 4, "tp4,ep2,etp2,mbs2"),
    _corner(
        "keys chosen inside documents, replayed in part",
        "sparse",
        2,
        "ep2,mbs4,recompute=core_attn+mla_up_proj+layernorm",
        DocumentMasking.RESTARTED,
    ),
    _corner(
        "keys chosen in stages, weight gradients later",
        "sparse",
        4,
        "pp2,tp2,ep2,schedule=zb-h1,mbs2",
        DocumentMasking.BOUNDED,
    ),
    _corner(
        "keys chosen of all CP ranks, inside documents",
        "sparse",
        4,
        "tp2,cp2,cp_comm=a2a,ep2,mbs2,recompute=core_attn",
        DocumentMasking.RESTARTED,
    ),
    _corner("keys chosen by weights in shards", "sparse", 2, "ep2,zero3,mbs2,recompute=full"),
    _corner("keys chosen again, TP ranks", "sparse", 2, "tp2,ep2,mbs4,recompute=full"),
    _corner("keys chosen by two passes", "sparse", 2, "ep2,mbs1,overlap=ep+wgrad"),
    _corner(
        "choices beside offloaded activations",
        "sparse",
        2,
        "pp2,zero0,mbs2,offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm",
    ),
    _corner(
        "blocks chosen on the ranks of their queries", "compressed_ahead", 4, "tp4,ep2,etp2,mbs2"
    ),
    _corner("blocks chosen again, TP ranks", "compressed_ahead", 2, "tp2,ep2,mbs4,recompute=full"),
    _corner(
        "blocks of documents, TP ranks",
        "compressed",
        2,
        "tp2,ep2,mbs4,recompute=core_attn",
        DocumentMasking.RESTARTED,
    ),
    _corner(
        "blocks of documents in stages, weight gradients later",
        "compressed",
        4,
        "pp2,tp2,ep2,schedule=zb-h1,mbs2",
        DocumentMasking.BOUNDED,
    ),
    _corner(
        "blocks of documents by weights in shards",
        "compressed",
        2,
        "ep2,zero3,mbs2,recompute=full",
        DocumentMasking.RESTARTED,
    ),
    _corner(
        "blocks of all CP ranks, inside documents",
        "compressed",
        4,
        "tp2,cp2,cp_comm=a2a,ep2,mbs2,recompute=core_attn",
        DocumentMasking.RESTARTED,
    ),
    _corner(
        "blocks that CP ranks cut", "compressed_ahead", 4, "cp4,cp_comm=a2a,ep2,mbs2,recompute=full"
    ),
    _corner(
        "blocks of CP ranks in stages, weight gradients later",
        "compressed",
        4,
        "pp2,cp2,cp_comm=a2a,ep2,schedule=zb-h1,mbs2",
    ),
    _corner("streams between stages", "compressed_ahead", 2, "pp2,vpp2,mbs2,recompute=core_attn"),
    _corner(
        "streams between stages, weight gradients later",
        "compressed_ahead",
        4,
        "pp2,tp2,ep2,schedule=zb-h1,mbs2,recompute=layernorm",
    ),
    _corner("streams by weights in shards", "compressed_ahead", 2, "ep2,zero3,mbs2,recompute=moe"),
    _corner("streams of two passes", "compressed_ahead", 2, "ep2,mbs1,overlap=ep+wgrad"),
    _corner(
        "streams and blocks beside offloaded activations",
        "compressed_ahead",
        2,
        "pp2,zero0,mbs2,offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm",
    ),
    _corner(
        "streams beside offloaded experts", "compressed_ahead", 2, "ep2,offload=expert_fc1+moe_act"
    ),
    _corner("replicated key heads", "dense", 4, "tp4,mbs4"),
    _corner("q/k norm over all heads", "olmoe", 2, "tp2,ep2,mbs4"),
    _corner(
        "copies once a rank, of experts cut in two", "deep", 4, "tp2,etp2,ep2,mbs2,dispatcher=dedup"
    ),
    _corner("experts not a power of two", "olmoe", 4, "ep2,mbs2"),
    _corner("tied embeddings across stages", "olmoe", 2, "pp2,mbs2"),
    _corner("1F1B across EP and TP", "qwen", 8, "tp2,pp2,ep2,mbs2"),
    _corner("interleaved, uneven stages", "deep", 2, "pp2,vpp2,mbs2,layout='Ett|t|ttt|ttL'"),
    _corner("interleaved, groups longer than the pipeline", "deep", 2, "pp2,vpp2,vpp_group=4,mbs1"),
    _corner("zero-bubble", "qwen", 4, "pp4,schedule=zb-h1,mbs1"),
    _corner(
        "micro-batches one by one, the chunk that is held longest on the host",
        "deep",
        4,
        "pp2,vpp2,ep2,schedule=gis,mbs1,offload=core_attn+mlp_norm+expert_fc1+moe_act+chunks1",
    ),
    _corner(
        "micro-batches one by one, uneven stages",
        "qwen",
        3,
        "pp3,vpp2,schedule=gis,vpp_group3,mbs1,layout='E|t|t|t|t|L'",
    ),
    _corner(
        "zero-bubble beside overlapped reductions",
        "qwen",
        4,
        "pp2,ep2,schedule=zb-h1,layout='Et|tttL',overlap=grad+param",
    ),
    _corner("both ways along a V", "qwen", 2, "pp2,schedule=dualpipev,layout='E|tt|t|tL'"),
    _corner(
        "half the memory along a V", "qwen", 3, "pp3,schedule=v-half,mbs1,layout='E|t|t|t|t|L'"
    ),
    _corner(
        "a third of the memory along a V", "deep", 8, "pp4,ep2,schedule=v-min,mbs1,recompute=moe"
    ),
    _corner(
        "biases by heads, in documents",
        "biased",
        4,
        "tp2,cp2,ep2,mbs2,cp_comm=a2a",
        DocumentMasking.BOUNDED,
    ),
    _corner("biases round a ring", "biased", 4, "cp4,ep2,mbs2", DocumentMasking.RESTARTED),
    _corner("biases over gathered keys", "biased", 2, "cp2,mbs4,cp_comm=allgather,recompute=full"),
    _corner("empty stages", "qwen", 2, "pp2,vpp3,vpp_group=3,layout='E|tt||t|t|L'"),
    _corner("a V, tied ends on one rank", "olmoe", 2, "pp2,schedule=zbv,mbs2"),
    _corner("every rank sees all tokens", "deepseek", 4, "tp2,etp2,ep2,dispatcher=allgather"),
    _corner("a token crosses once", "deep", 4, "tp2,ep4,dispatcher=dedup,mbs2"),
    _corner(
        "a token crosses to a node, then to ranks", "deep", 4, "ep4,ep_node2,dispatcher=dedup,mbs2"
    ),
    _corner(
        "to a node, then to ranks of cut experts",
        "deep",
        8,
        "tp2,ep4,etp2,ep_node2,dispatcher=dedup,mbs2",
    ),
    _corner(
        "to four nodes, beside shared experts, replayed",
        "deepseek",
        8,
        "ep8,ep_node2,dispatcher=dedup,mbs1,overlap=shared,recompute=moe",
    ),
    _corner("weights in shards", "qwen", 4, "ep2,zero3,mbs2"),
    _corner(
        "weights in shards of TP and ETP parts",
        "olmoe",
        4,
        "tp2,etp2,zero3,mbs2,overlap=grad+param",
    ),
    _corner("weights in shards, TP alone", "qwen", 2, "tp2,etp2,zero3,mbs4"),
    _corner(
        "weights in shards, layers replayed", "deepseek", 4, "tp2,ep2,zero3,mbs2,recompute=full"
    ),
    _corner(
        "weights in shards, experts replayed, states on the host",
        "deep",
        2,
        "zero3,recompute=moe,offload=optimizer",
    ),
    _corner("weights in shards, copies across blocks", "qwen", 8, "tp2,ep2,zero3,shard2,mbs2"),
    _corner(
        "weights in shards, a block without two copies of the experts",
        "olmoe",
        4,
        "ep2,zero3,shard2,mbs2",
    ),
    _corner("depths of which the experts alone are whole", "ahead", 2, "etp2,mbs4,zero3"),
    _corner("replicated optimizer", "qwen", 4, "tp2,ep2,zero0,mbs2"),
    _corner("products in a ring of four", "ahead", 4, "tp4,ep2,mbs2,overlap=tp"),
    _corner("products in a ring, latents", "deepseek", 4, "tp2,ep4,mbs2,overlap=ep+tp+wgrad"),
    _corner("two passes, layers replayed", "ahead", 4, "ep4,mbs1,overlap=ep+wgrad,recompute=full"),
    _corner(
        "two passes across stages", "deep", 4, "pp2,vpp2,ep2,mbs1,overlap=ep+p2p,dispatcher=dedup"
    ),
    _corner(
        "parts in graphs, in stages",
        "ahead",
        4,
        "pp2,tp2,ep2,graphs=attn+moe_router+moe_preprocess",
    ),
    _corner("recurrences in graphs", "hybrid", 2, "ep2,mbs2,graphs=attn+mamba+moe_router"),
    _corner("parts in graphs round a ring", "qwen", 4, "cp4,ep2,mbs4,graphs=attn+moe_router"),
    _corner(
        "parts in graphs, two passes across stages",
        "deep",
        4,
        "pp2,vpp2,ep2,mbs1,overlap=ep+wgrad+p2p,graphs=attn+moe_router",
    ),
    _corner("full recompute across EP and TP", "deepseek", 4, "tp2,ep2,mbs2,recompute=full"),
    _corner(
        "logits in pieces of a tied and padded table", "olmoe", 2, "tp2,ep2,mbs2,recompute=loss"
    ),
    _corner(
        "logits in pieces, TP without SP, a depth", "dense", 2, "tp2,sp=false,mbs4,recompute=loss"
    ),
    _corner(
        "logits in pieces, weights in shards", "ahead", 4, "tp2,ep2,zero3,mbs2,recompute=full+loss"
    ),
    _corner(
        "logits in pieces where weight gradients wait",
        "ahead",
        2,
        "pp2,schedule=zb-h1,mbs2,recompute=loss",
    ),
)


def plan_case(case: Case) -> Plan:
    """Build the plan of a case."""
    base = build_plan(
        case.workload, "", world_size=case.layout.world_size, model=SHAPES[case.shape]
    )
    return replace(base, layout=case.layout)
