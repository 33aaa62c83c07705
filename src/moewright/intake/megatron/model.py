"""The model of a Megatron-LM command, with the defaults that its own parser has."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.intake import catalogue
from moewright.intake.megatron.hybrid import read_hybrid
from moewright.intake.megatron.named_model import (
    check_sizes,
    padded_vocabulary,
    read_vocabulary,
    with_sizes,
)
from moewright.intake.megatron.options import Arguments, ask_missing
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    Activation,
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
from moewright.spec.units import is_whole_number, whole_number

_POSITIONS = {
    "rope": PositionKind.ROPE,
    "yarn": PositionKind.ROPE,
    "learned_absolute": PositionKind.LEARNED,
    "none": PositionKind.NONE,
}
# The positions that Megatron-LM's latent attention and its llama3 scaling are fixed to.
_MLA_ORIGINAL_POSITIONS = 4096
_LLAMA3_ORIGINAL_POSITIONS = 8192
_MAX_PATTERN_LENGTH = 10_000
_NOT_PLANNED = {
    "--experimental-attention-variant": "that attention",
    "--heterogeneous-layers-config-path": "layers of different shapes",
    "--heterogeneous-layers-config-encoded-json": "layers of different shapes",
    "--enable-mhc-connections": "several residual streams",
    "--qk-l2-norm": "queries and keys normalised without weights",
    "--apply-residual-connection-post-layernorm": "residuals after norms",
    "--use-checkpoint-args": "sizes that stand in a checkpoint",
    "--yaml-cfg": "options in a YAML file",
}
# Modules of layers that the other options say all of.
_SPECS = (
    "megatron.",
    "mindspeed_llm.tasks.models.spec.qwen3_spec",
    "mindspeed_llm.tasks.models.spec.bailing_spec",
    "mindspeed_llm.tasks.models.spec.deepseek_spec",
)
# What a model's name says too, and what changes neither its weights nor its work.
_SAID_BY_NAME = (
    "--normalization",
    "--norm-epsilon",
    "--position-embedding-type",
    "--use-rotary-position-embeddings",
    "--max-position-embeddings",
    "--moe-router-score-function",
    "--moe-router-pre-softmax",
    "--moe-router-enable-expert-bias",
    "--vocab-size",
    "--padded-vocab-size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptModel:
    """The model of a command, and a note on where it comes from."""

    model: ModelSpec
    note: str


def read_model(arguments: Arguments, named_model: ModelSpec | None) -> ScriptModel:
    """Return the model that the options shape, under its name where it is a known one.

    `named_model` stands in where the options give no sizes.

    Raises:
        BadInput: an option is not planned here, or sizes are missing or contradict `named_model`.
    """
    arguments.refuse_unplanned(_NOT_PLANNED)
    script = _find_model(arguments, named_model)
    if not arguments.has("--padded-vocab-size"):
        return script
    # Whatever names the model: its embedding has the rows that the command says.
    rows = padded_vocabulary(arguments, script.model.vocab_size)
    return replace(script, model=replace(script.model, vocab_size=rows))


def _find_model(arguments: Arguments, named_model: ModelSpec | None) -> ScriptModel:
    """Return the model of the options, under its name where it is a known one."""
    if not arguments.has("--num-layers"):
        return _use_named_model(arguments, named_model)
    if named_model is None:
        _refuse_own_layers(arguments)
    shaped = _read_shape(arguments)
    if named_model is not None:
        check_sizes(arguments, named_model)
        return ScriptModel(model=named_model, note=f"model {named_model.name} (given)")
    models = map(catalogue.model, catalogue.model_names())
    matches = [model for model in models if _may_be(shaped, model)]
    matches.sort(key=lambda model: model.max_position != shaped.max_position)
    if matches:
        match = matches[0]
        note = f"model {match.name}, by its sizes"
        if not shaped.vocab_size:
            note += (
                f"; its vocabulary of {match.vocab_size:,} counts, for the script's tokenizer is "
                "not read (--set --vocab-size=...)"
            )
        return ScriptModel(model=_with_script_settings(match, shaped), note=note)
    entries = shaped.vocab_size or arguments.integer("--padded-vocab-size")
    if not entries:
        rule = "is missing, and the tokenizer that would tell it is not read"
        raise BadInput(Reason(field="--vocab-size", rule=rule, nearest="--set --vocab-size=128000"))
    padded = padded_vocabulary(arguments, entries)
    _, vocabulary_note = read_vocabulary(arguments)
    note = "model of the script's own sizes, none that is known"
    if vocabulary_note:
        note = f"{note}; {vocabulary_note}"
    return ScriptModel(model=replace(shaped, vocab_size=padded), note=note)


_NAME_PIECES = re.compile(r"([-_])")


def require_positions(model: ModelSpec, seq_len: int) -> None:
    """Ask for the rows of a table of learned positions, with the sequence as a value for them.

    Raises:
        BadInput: positions are learned and nothing tells how many there are.
    """
    if model.position is PositionKind.LEARNED and not model.max_position:
        raise ask_missing("--max-position-embeddings", str(seq_len))


def _refuse_own_layers(arguments: Arguments) -> None:
    """Refuse layers that a module outside Megatron-LM builds, whatever the options say."""
    name = "--spec"
    module = arguments.text(name, "")
    if module and not module.startswith(_SPECS):
        rule = "builds layers that the options do not say: name the model in front"
        nearest = f"estimate {_suggest_model(arguments, 'CONFIG.json')} --from-flags ..."
        raise BadInput(Reason(field=name, value=module[:60], rule=rule, nearest=nearest))


def _suggest_model(arguments: Arguments, otherwise: str) -> str:
    """Return the name of a known model that a path of the command ends in, else what is said.

    What converters add to a name ("-mcore") is left out; a model of other sizes is none.
    """
    layers = arguments.options.get("--num-layers", ())
    for value in (value for values in arguments.options.values() for value in values):
        pieces = _NAME_PIECES.split(Path(value).name)
        for count in range(len(pieces), 1, -2):
            try:
                model = catalogue.model("".join(pieces[:count]))
            except BadInput:
                continue
            if layers in ((), (str(model.layers),)):
                return model.name.rpartition("/")[2]
    return otherwise


def _use_named_model(arguments: Arguments, named_model: ModelSpec | None) -> ScriptModel:
    if named_model is None:
        rule = (
            "is missing: the model is not in the script; "
            "give its name or config.json before --from-flags"
        )
        nearest = f"estimate {_suggest_model(arguments, 'Qwen3-30B-A3B')} --from-flags ..."
        raise BadInput(Reason(field="--num-layers", rule=rule, nearest=nearest))
    model, changes = with_sizes(arguments, named_model)
    arguments.ignore(*_SAID_BY_NAME)
    note = f"model {named_model.name} {changes}".rstrip() if changes else ""
    note = note or f"model {named_model.name}: the script gives no sizes"
    return ScriptModel(model=model, note=note)


def _may_be(shaped: ModelSpec, model: ModelSpec) -> bool:
    """Whether the options could be this model's.

    They do not say its name, nor everything that a config does.
    """
    if shaped.layers != model.layers or shaped.hidden_size != model.hidden_size:
        return False
    longest = max(shaped.max_position, model.max_position)
    filled = replace(shaped, vocab_size=shaped.vocab_size or model.vocab_size)
    return _comparable(filled, longest) == _comparable(model, longest)


def _comparable(model: ModelSpec, longest: int) -> ModelSpec:
    """Return the model without what options cannot tell apart."""
    moe = model.moe
    if moe is not None:
        router = replace(
            moe.router,
            group_scores=moe.router.scores_per_group if moe.router.groups > 1 else 0,
            pre_softmax=False,
            renormalize=True,
        )
        moe = replace(moe, router=router)
    rope = model.attention.rope if model.position is PositionKind.ROPE else RopeSpec()
    if rope.scaling == "default":
        rope = RopeSpec(theta=rope.theta, interleaved=rope.interleaved)
    elif rope.scaling == "llama3":
        original = rope.original_max_position or _LLAMA3_ORIGINAL_POSITIONS
        rope = replace(rope, original_max_position=original)
    return replace(
        model,
        name="",
        family="",
        max_position=longest,
        initializer_range=0.0,
        moe=moe,
        dense_ffn_size=0 if all(model.moe_layers) else model.dense_ffn_size,
        mlp_bias=model.mlp_bias and not all(model.moe_layers),
        attention=replace(model.attention, rope=rope),
    )


def _with_script_settings(model: ModelSpec, shaped: ModelSpec) -> ModelSpec:
    """Return a known model with what a script may set otherwise.

    That is how weights are drawn, and whether the chosen scores sum to 1.
    """
    model = replace(model, initializer_range=shaped.initializer_range)
    if shaped.moe is None or model.moe is None:
        return model
    script_router = shaped.moe.router
    router = model.moe.router
    if script_router.renormalize == router.renormalize:
        return model
    router = replace(
        router, renormalize=script_router.renormalize, pre_softmax=script_router.pre_softmax
    )
    return replace(model, moe=replace(model.moe, router=router))


def _read_shape(arguments: Arguments) -> ModelSpec:
    """Read the model with the defaults that Megatron-LM's parser has."""
    layers = arguments.integer("--num-layers")
    hidden = _require_size(arguments, "--hidden-size")
    heads = _require_size(arguments, "--num-attention-heads")
    has_biases = not arguments.has("--disable-bias-linear")
    is_gated = arguments.has("--swiglu") or arguments.has("--quick-geglu")
    arguments.ignore("--openai-gelu", "--glu-linear-offset", "--activation-func-clamp-value")
    arguments.ignore("--no-bias-dropout-fusion", "--no-rope-fusion")
    hybrid = read_hybrid(arguments)
    # Megatron-LM sets this width in validate_args where --ffn-hidden-size is left out.
    default_ffn = int(4 * hidden * 2 / 3) // 64 * 64 if is_gated else 4 * hidden
    ffn = arguments.integer("--ffn-hidden-size")
    moe_layers = _read_moe_layers(arguments, layers)
    if hybrid is not None:
        moe_layers = hybrid.moe_layers
        layers = len(moe_layers)
    # A model whose layers all have experts has no dense width, which a config states as 0.
    dense_ffn = 0 if all(moe_layers) else default_ffn
    position = _read_position(arguments)
    arguments.ignore("--padded-vocab-size", "--null-tokenizer-eod-id")
    is_rms_norm = arguments.text("--normalization", "LayerNorm") == "RMSNorm"
    return ModelSpec(
        name="script",
        family="",
        hidden_size=hidden,
        layers=layers,
        vocab_size=read_vocabulary(arguments)[0],
        attention=_read_attention(arguments, hidden, heads, has_biases, position),
        dense_ffn_size=ffn or dense_ffn,
        moe=_read_moe(arguments, ffn or default_ffn, has_biases) if any(moe_layers) else None,
        moe_layers=moe_layers,
        gated=is_gated,
        mlp_bias=has_biases,
        norm=NormKind.RMS if is_rms_norm else NormKind.LAYER,
        norm_eps=arguments.number("--norm-epsilon", 1e-5),
        position=_POSITIONS[position],
        max_position=arguments.integer("--max-position-embeddings"),
        tie_embeddings=not arguments.has("--untie-embeddings-and-output-weights"),
        mtp_layers=hybrid.mtp_layers if hybrid else arguments.integer("--mtp-num-layers"),
        mixers=hybrid.mixers if hybrid else (),
        mlp_layers=hybrid.mlp_layers if hybrid else (),
        recurrent=hybrid.recurrent if hybrid else None,
        mtp_shared=arguments.has("--mtp-use-repeated-layer"),
        activation=_read_activation(arguments, is_gated=is_gated),
        initializer_range=arguments.number("--init-method-std", 0.02),
    )


def _read_activation(arguments: Arguments, *, is_gated: bool) -> Activation:
    if arguments.has("--squared-relu"):
        return Activation.RELU_SQUARED
    return Activation.SILU if is_gated else Activation.GELU


def _require_size(arguments: Arguments, name: str) -> int:
    if not arguments.has(name):
        raise ask_missing(name)
    return arguments.size(name)


def _read_position(arguments: Arguments) -> str:
    name = "--position-embedding-type"
    position = arguments.text(name, "learned_absolute")
    if arguments.has("--use-rotary-position-embeddings"):
        position = "rope"
    if position not in _POSITIONS:
        rule = "positions of this kind cannot be planned here"
        raise BadInput(Reason(field=name, value=position, rule=rule, nearest="rope"))
    return position


def _read_attention(
    arguments: Arguments, hidden: int, heads: int, has_biases: bool, position: str
) -> AttentionSpec:
    has_qk_norm = arguments.has("--qk-layernorm")
    window, every = _read_window(arguments)
    # TransformerConfig: a bias of all linear layers is one of Q, K and V too.
    has_qkv_bias = arguments.has("--add-qkv-bias") or has_biases
    has_sinks = arguments.text("--softmax-type", "vanilla") == "learnable"
    if arguments.has("--multi-latent-attention"):
        nope = arguments.integer("--qk-head-dim", 128)
        rope = arguments.integer("--qk-pos-emb-head-dim", 64)
        return AttentionSpec(
            kind=AttentionKind.MLA,
            heads=heads,
            kv_heads=heads,
            head_dim=nope + rope,
            v_head_dim=arguments.integer("--v-head-dim", 128),
            q_lora_rank=arguments.integer("--q-lora-rank"),
            kv_lora_rank=arguments.integer("--kv-lora-rank", 32),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            rope=_read_latent_rope(arguments),
            qkv_bias=has_qkv_bias,
            out_bias=has_biases,
            sinks=has_sinks,
            sliding_window=window,
            window_every=every,
        )
    width = arguments.integer("--kv-channels", hidden // heads)
    kv_heads = heads
    if arguments.has("--group-query-attention"):
        kv_heads = arguments.integer("--num-query-groups", 1)
    return AttentionSpec(
        kind=AttentionKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=width,
        qk_norm=QkNorm.PER_HEAD if has_qk_norm else QkNorm.NONE,
        rope=_read_rope(arguments, position),
        qkv_bias=has_qkv_bias,
        out_bias=has_biases,
        sinks=has_sinks,
        sliding_window=window,
        window_every=every,
    )


def _read_window(arguments: Arguments) -> tuple[int, int]:
    """Read (the width of sliding windows with this token, every how many layers one is)."""
    name = "--window-size"
    if not arguments.has(name):
        return 0, 0
    left = arguments.text(name).strip("() ").partition(",")[0].strip()
    if not is_whole_number(left):
        rule = "is two whole numbers"
        raise BadInput(Reason(field=name, value=left[:60], rule=rule, nearest="127,0"))
    frequency = "--window-attn-skip-freq"
    skip = arguments.text(frequency, "")
    every = _read_window_frequency(skip)
    if not every:
        rule = "only all layers or every n-th, from the first, can be planned with windows here"
        raise BadInput(Reason(field=frequency, value=skip[:60], rule=rule, nearest="2"))
    # Megatron-LM counts the tokens before this one, configs of checkpoints the token as well.
    return int(left) + 1, every


def _read_window_frequency(skip: str) -> int:
    """Read of how many layers one has the window; 0 where others have it too."""
    if skip in ("", "2"):
        return 2 if skip else 1
    pattern = _parse_pattern(skip)
    if not isinstance(pattern, list) or 1 not in pattern[1:]:
        return 0
    every = pattern.index(1, 1)
    return every if pattern == [int(not layer % every) for layer in range(len(pattern))] else 0


def _read_latent_rope(arguments: Arguments) -> RopeSpec:
    theta = arguments.number("--rotary-base", 10000.0)
    factor = arguments.number("--rotary-scaling-factor", 1.0)
    mscale = arguments.number("--mscale", 1.0)
    mscale_all_dim = arguments.number("--mscale-all-dim", 0.0)
    # YaRN with a factor of 1 stretches nothing.
    if arguments.text("--rope-type", "yarn") == "rope" or factor == 1:
        return RopeSpec(theta=theta, interleaved=True)
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=_MLA_ORIGINAL_POSITIONS,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        interleaved=True,
    )


def _read_rope(arguments: Arguments, position: str) -> RopeSpec:
    arguments.ignore("--no-yarn-correction-range-round-to-int")
    theta = arguments.number("--rotary-base", 10000.0)
    is_interleaved = arguments.has("--rotary-interleaved")
    share = min(1.0, arguments.number("--rotary-percent", 1.0))  # Megatron's yarn rotates all
    if position == "yarn":
        return RopeSpec(
            theta=theta,
            scaling="yarn",
            factor=arguments.number("--rotary-scaling-factor", 1.0),
            original_max_position=arguments.integer("--yarn-original-max-position-embeddings"),
            beta_fast=arguments.number("--yarn-beta-fast", 32.0),
            beta_slow=arguments.number("--yarn-beta-slow", 1.0),
            mscale=arguments.number("--mscale", 1.0),
            mscale_all_dim=arguments.number("--mscale-all-dim", 0.0),
            interleaved=is_interleaved,
        )
    if arguments.has("--use-rope-scaling"):
        return RopeSpec(
            theta=theta,
            scaling="llama3",
            factor=arguments.number("--rope-scaling-factor", 8.0),
            original_max_position=_LLAMA3_ORIGINAL_POSITIONS,
            interleaved=is_interleaved,
            rotary_share=share,
        )
    return RopeSpec(theta=theta, interleaved=is_interleaved, rotary_share=share)


def _read_moe_layers(arguments: Arguments, layers: int) -> tuple[bool, ...]:
    if not arguments.integer("--num-experts"):
        return (False,) * layers
    text = arguments.text("--moe-layer-freq", "1")
    if whole_number(text):
        return tuple(layer % int(text) == 0 for layer in range(layers))
    pattern = _parse_pattern(text)
    if not isinstance(pattern, list) or len(pattern) != layers:
        rule = f"must be a number or a list of {layers} zeros and ones"
        raise BadInput(
            Reason(field="--moe-layer-freq", value=text[:60], rule=rule, nearest=f"([1]*{layers})")
        )
    return tuple(bool(item) for item in pattern)


def _parse_pattern(text: str) -> list[int] | int | None:
    """Return the value of an expression such as ([0]*3+[1]*58); None for anything else."""
    if not re.fullmatch(r"[\d\[\]()+*, ]+", text):
        return None
    try:
        return _evaluate_pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        return None


def _evaluate_pattern(node: ast.expr) -> list[int] | int | None:
    """Return lists of whole numbers, joined by + and repeated by *, at most 10,000 long."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=nodes):
            items = [_evaluate_pattern(item) for item in nodes]
            return [item for item in items if isinstance(item, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first = _evaluate_pattern(left)
            second = _evaluate_pattern(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            items_to_repeat = _evaluate_pattern(left)
            times = _evaluate_pattern(right)
            if isinstance(items_to_repeat, list) and isinstance(times, int):
                # Before the list is built: [1]*10**12 is one short word of a script.
                is_short = len(items_to_repeat) * times <= _MAX_PATTERN_LENGTH
                return items_to_repeat * times if is_short else None
    return None


def _read_moe(arguments: Arguments, default_ffn: int, has_biases: bool) -> MoeSpec:
    is_pre_softmax = arguments.has("--moe-router-pre-softmax")
    router = RouterSpec(
        top_k=arguments.integer("--moe-router-topk", 2),
        score=ScoreFunction(arguments.text("--moe-router-score-function", "softmax")),
        pre_softmax=is_pre_softmax,
        renormalize=not is_pre_softmax,
        scaling_factor=arguments.number("--moe-router-topk-scaling-factor", 1.0),
        groups=arguments.integer("--moe-router-num-groups", 1),
        top_groups=arguments.integer("--moe-router-group-topk", 1),
        selection_bias=arguments.has("--moe-router-enable-expert-bias"),
        logit_bias=has_biases,
    )
    return MoeSpec(
        experts=arguments.integer("--num-experts"),
        ffn_size=arguments.integer("--moe-ffn-hidden-size", default_ffn),
        router=router,
        shared_ffn_size=arguments.integer("--moe-shared-expert-intermediate-size"),
        shared_gate=arguments.has("--moe-shared-expert-gate"),
        expert_bias=has_biases,
        latent_size=arguments.integer("--moe-latent-size"),
    )
