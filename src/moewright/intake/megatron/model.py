"""A Megatron-LM command read back: model, workload and layout, with the defaults that its own
parser has."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from moewright.intake import catalogue
from moewright.intake.megatron.arguments import Arguments
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    QkNorm,
    RopeSpec,
    RouterSpec,
    ScoreFunction,
)

_POSITIONS = {
    "rope": PositionKind.ROPE,
    "yarn": PositionKind.ROPE,
    "learned_absolute": PositionKind.LEARNED,
    "none": PositionKind.NONE,
}
_MLA_ORIGINAL, _LLAMA3_ORIGINAL = (
    4096,
    8192,
)  # positions that its latent attention and its llama3 scaling are fixed to
_NOT_PLANNED = {
    "--hybrid-layer-pattern": "layers that are no attention",
    "--hybrid-override-pattern": "layers that are no attention",
    "--is-hybrid-model": "layers that are no attention",
    "--experimental-attention-variant": "that attention",
    "--heterogeneous-layers-config-path": "layers of different shapes",
    "--heterogeneous-layers-config-encoded-json": "layers of different shapes",
    "--enable-mhc-connections": "several residual streams",
    "--qk-l2-norm": "queries and keys normalised without weights",
    "--apply-residual-connection-post-layernorm": "residuals after norms",
    "--use-checkpoint-args": "sizes that stand in a checkpoint",
    "--yaml-cfg": "options in a YAML file",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptModel:
    model: ModelSpec
    note: str


def read_model(arguments: Arguments, named_model: ModelSpec | None) -> ScriptModel:
    """The model that the flags shape: a known one's by its name. `named` stands in where they give
    no sizes.

    Raises BadInput for what is not planned here, and for sizes that are missing or contradict
    `named`.
    """
    for name, what in _NOT_PLANNED.items():
        if arguments.has(name):
            raise BadInput(Reason(field=name, rule=f"{what} cannot be planned here"))
    if not arguments.has("--num-layers"):
        if named_model is None:
            rule = "is missing: the model is not in the script; give its name or config.json before --from-flags"
            raise BadInput(
                Reason(
                    field="--num-layers",
                    rule=rule,
                    nearest="estimate Qwen3-30B-A3B --from-flags ...",
                )
            )
        return ScriptModel(
            model=named_model, note=f"model {named_model.name}: the script gives no sizes"
        )
    shaped = _shape(arguments)
    if named_model is not None:
        for name, wanted in (
            ("--num-layers", named_model.layers),
            ("--hidden-size", named_model.hidden_size),
        ):
            if arguments.integer(name) != wanted:
                rule = f"{named_model.name} has {wanted}"
                raise BadInput(
                    Reason(field=name, value=arguments.text(name), rule=rule, nearest=str(wanted))
                )
        return ScriptModel(model=named_model, note=f"model {named_model.name} (given)")
    known = [
        model for model in map(catalogue.model, catalogue.model_names()) if _same(shaped, model)
    ]
    known.sort(key=lambda model: model.max_position != shaped.max_position)
    if known:
        return ScriptModel(
            model=_own(shaped, known[0]), note=f"model {known[0].name}, by its sizes"
        )
    if not shaped.vocab_size:
        rule = "is missing, and the tokenizer that would tell it is not read"
        raise BadInput(Reason(field="--vocab-size", rule=rule, nearest="--vocab-size 128000"))
    return ScriptModel(model=shaped, note="model of the script's own sizes, none that is known")


def _same(shaped: ModelSpec, known: ModelSpec) -> bool:
    """Whether the flags could be this model's: they do not say names, and not everything that a
    config does."""
    if shaped.layers != known.layers or shaped.hidden_size != known.hidden_size:
        return False
    longest = max(shaped.max_position, known.max_position)
    return _plain(
        replace(shaped, vocab_size=shaped.vocab_size or known.vocab_size), longest
    ) == _plain(known, longest)


def _own(shaped: ModelSpec, known: ModelSpec) -> ModelSpec:
    """The known model with what a script may set otherwise: how weights are drawn, whether chosen
    scores sum to 1."""
    model = replace(known, initializer_range=shaped.initializer_range)
    if (
        shaped.moe is None
        or known.moe is None
        or shaped.moe.router.renormalize == known.moe.router.renormalize
    ):
        return model
    said = shaped.moe.router
    router = replace(known.moe.router, renormalize=said.renormalize, pre_softmax=said.pre_softmax)
    return replace(model, moe=replace(known.moe, router=router))


def _plain(model: ModelSpec, longest: int) -> ModelSpec:
    """The model without what flags cannot tell apart."""
    moe = model.moe
    if moe is not None:
        router = moe.router
        router = replace(
            router,
            group_scores=router.scores_per_group if router.groups > 1 else 0,
            pre_softmax=False,
            renormalize=True,
        )
        moe = replace(moe, router=router)
    rope = model.attention.rope if model.position is PositionKind.ROPE else RopeSpec()
    if rope.scaling == "default":
        rope = RopeSpec(theta=rope.theta, interleaved=rope.interleaved)
    elif rope.scaling == "llama3":
        rope = replace(rope, original_max_position=rope.original_max_position or _LLAMA3_ORIGINAL)
    return replace(
        model,
        name="",
        family="",
        max_position=longest,
        initializer_range=0.0,
        moe=moe,
        dense_ffn_size=0 if all(model.moe_layers) else model.dense_ffn_size,
        attention=replace(model.attention, rope=rope),
    )


def _shape(given: Arguments) -> ModelSpec:
    layers, hidden = given.integer("--num-layers"), _needed(given, "--hidden-size")
    heads = _needed(given, "--num-attention-heads")
    biased = not given.has("--disable-bias-linear")
    gated = given.has("--swiglu") or given.has("--quick-geglu")
    for name in ("--squared-relu", "--openai-gelu"):
        given.has(name)
    usual = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    ffn = given.integer("--ffn-hidden-size")
    moe_layers = _moe_layers(given, layers)
    position = given.text("--position-embedding-type", "learned_absolute")
    if given.has("--use-rotary-position-embeddings"):
        position = "rope"
    if position not in _POSITIONS:
        rule = "positions of this kind cannot be planned here"
        raise BadInput(
            Reason(field="--position-embedding-type", value=position, rule=rule, nearest="rope")
        )
    given.has("--padded-vocab-size")
    given.has("--null-tokenizer-eod-id")
    return ModelSpec(
        name="script",
        family="",
        hidden_size=hidden,
        layers=layers,
        vocab_size=given.integer("--vocab-size"),
        attention=_attention(given, hidden, heads, biased, position),
        dense_ffn_size=ffn or (0 if all(moe_layers) else usual),
        moe=_moe(given, ffn or usual, biased) if any(moe_layers) else None,
        moe_layers=moe_layers,
        gated=gated,
        mlp_bias=biased,
        norm=NormKind.RMS
        if given.text("--normalization", "LayerNorm") == "RMSNorm"
        else NormKind.LAYER,
        norm_eps=given.number("--norm-epsilon", 1e-5),
        position=_POSITIONS[position],
        max_position=given.integer("--max-position-embeddings"),
        tie_embeddings=not given.has("--untie-embeddings-and-output-weights"),
        mtp_layers=given.integer("--mtp-num-layers"),
        initializer_range=given.number("--init-method-std", 0.02),
    )


def _needed(given: Arguments, name: str) -> int:
    if not given.has(name):
        raise BadInput(Reason(field=name, rule="is missing, and Megatron-LM has no default for it"))
    return given.integer(name)


def _attention(
    given: Arguments, hidden: int, heads: int, biased: bool, position: str
) -> AttentionSpec:
    normed = given.has("--qk-layernorm")
    window, every = _window(given)
    common = {
        "heads": heads,
        "qkv_bias": biased or given.has("--add-qkv-bias"),
        "out_bias": biased,
        "sinks": given.text("--softmax-type", "vanilla") == "learnable",
        "sliding_window": window,
        "window_every": every,
    }
    if given.has("--multi-latent-attention"):
        nope, turned = (
            given.integer("--qk-head-dim", 128),
            given.integer("--qk-pos-emb-head-dim", 64),
        )
        return AttentionSpec(
            **common,  # type: ignore[arg-type]
            kind=AttentionKind.MLA,
            kv_heads=heads,
            head_dim=nope + turned,
            v_head_dim=given.integer("--v-head-dim", 128),
            q_lora_rank=given.integer("--q-lora-rank"),
            kv_lora_rank=given.integer("--kv-lora-rank", 32),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=turned,
            rope=_latent_rope(given),
        )
    width = given.integer("--kv-channels", hidden // heads)
    groups = (
        given.integer("--num-query-groups", 1) if given.has("--group-query-attention") else heads
    )
    return AttentionSpec(
        **common,  # type: ignore[arg-type]
        kind=AttentionKind.GQA,
        kv_heads=groups,
        head_dim=width,
        v_head_dim=width,
        qk_norm=QkNorm.PER_HEAD if normed else QkNorm.NONE,
        rope=_rope(given, position),
    )


def _window(given: Arguments) -> tuple[int, int]:
    """Width of sliding windows, this token included, and every how many layers one is."""
    if not given.has("--window-size"):
        return 0, 0
    left = given.text("--window-size").strip("() ").partition(",")[0].strip()
    if not left.isdigit():
        raise BadInput(
            Reason(
                field="--window-size", value=left[:60], rule="is two whole numbers", nearest="127,0"
            )
        )
    skip = given.text("--window-attn-skip-freq", "")
    if skip not in ("", "2"):
        rule = "only all layers or every other one can be planned with windows here"
        raise BadInput(Reason(field="--window-attn-skip-freq", value=skip, rule=rule, nearest="2"))
    return int(left) + 1, 2 if skip else 1


def _latent_rope(given: Arguments) -> RopeSpec:
    theta, factor = (
        given.number("--rotary-base", 10000.0),
        given.number("--rotary-scaling-factor", 1.0),
    )
    mscale, all_dim = given.number("--mscale", 1.0), given.number("--mscale-all-dim", 0.0)
    if given.text("--rope-type", "yarn") == "rope" or factor == 1:
        return RopeSpec(theta=theta, interleaved=True)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=_MLA_ORIGINAL,
        mscale=mscale,
        mscale_all_dim=all_dim,
        interleaved=True,
    )


def _rope(given: Arguments, position: str) -> RopeSpec:
    theta, interleaved = given.number("--rotary-base", 10000.0), given.has("--rotary-interleaved")
    if position == "yarn":
        return RopeSpec(
            theta=theta,
            scaling="yarn",
            factor=given.number("--rotary-scaling-factor", 1.0),
            original_max_position=given.integer("--yarn-original-max-position-embeddings"),
            beta_fast=given.number("--yarn-beta-fast", 32.0),
            beta_slow=given.number("--yarn-beta-slow", 1.0),
            interleaved=interleaved,
        )
    if given.has("--use-rope-scaling"):
        factor = given.number("--rope-scaling-factor", 8.0)
        return RopeSpec(
            theta=theta,
            scaling="llama3",
            factor=factor,
            original_max_position=_LLAMA3_ORIGINAL,
            interleaved=interleaved,
        )
    return RopeSpec(theta=theta, interleaved=interleaved)


def _moe_layers(given: Arguments, layers: int) -> tuple[bool, ...]:
    if not given.integer("--num-experts"):
        return (False,) * layers
    text = given.text("--moe-layer-freq", "1")
    if text.isdigit() and int(text):
        return tuple(layer % int(text) == 0 for layer in range(layers))
    try:
        pattern = (
            _pattern(ast.parse(text, mode="eval").body)
            if re.fullmatch(r"[\d\[\]()+*, ]+", text)
            else None
        )
    except (SyntaxError, RecursionError):
        pattern = None
    if not isinstance(pattern, list) or len(pattern) != layers:
        rule = f"must be a number or a list of {layers} zeros and ones"
        raise BadInput(
            Reason(field="--moe-layer-freq", value=text[:60], rule=rule, nearest=f"([1]*{layers})")
        )
    return tuple(bool(item) for item in pattern)


def _pattern(node: ast.expr) -> list[int] | int | None:
    """Lists of whole numbers joined by + and repeated by *, at most a model's layers long."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=items):
            inside = [_pattern(item) for item in items]
            return [item for item in inside if isinstance(item, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _pattern(left), _pattern(right)
            return first + second if isinstance(first, list) and isinstance(second, list) else None
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _pattern(left), _pattern(right)
            if (
                isinstance(first, list)
                and isinstance(second, int)
                and len(first) * second <= 10_000
            ):
                return first * second
    return None


def _moe(given: Arguments, ffn: int, biased: bool) -> MoeSpec:
    score = ScoreFunction(given.text("--moe-router-score-function", "softmax"))
    before = given.has("--moe-router-pre-softmax")
    groups = given.integer("--moe-router-num-groups", 1)
    router = RouterSpec(
        top_k=given.integer("--moe-router-topk", 2),
        score=score,
        pre_softmax=before,
        renormalize=not before,
        scaling_factor=given.number("--moe-router-topk-scaling-factor", 1.0),
        groups=groups,
        top_groups=given.integer("--moe-router-group-topk", 1),
        selection_bias=given.has("--moe-router-enable-expert-bias"),
    )
    return MoeSpec(
        experts=given.integer("--num-experts"),
        ffn_size=given.integer("--moe-ffn-hidden-size", ffn),
        router=router,
        shared_ffn_size=given.integer("--moe-shared-expert-intermediate-size"),
        shared_gate=given.has("--moe-shared-expert-gate"),
        expert_bias=biased,
        latent_size=given.integer("--moe-latent-size"),
    )
