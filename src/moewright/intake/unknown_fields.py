"""The fields of a config.json that say nothing about the model, and those that must not be skipped.

A field that no reader knows is skipped and named, unless it may ask for other mathematics: its name
contains a word or begins with a prefix of a part of a model, or it switches something on.
"""

from __future__ import annotations

from moewright.families.fields import FieldReader
from moewright.spec.model import ModelSpec

# Fields that say nothing about the shape of the model.
_HARMLESS = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
    "quantization_config",
    "max_window_layers",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "num_nextn_predict_layers",
    "is_decoder",
    "chunk_size_feed_forward",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "use_bfloat16",
    "torchscript",
    "initial_context_length",
    "_attn_implementation",
    "attn_implementation",
    "router_z_loss_coef",
    "moe_z_loss_coef",
    "expert_parallel",
    # Kernels, caches and training losses of remote code.
    "gradient_checkpointing",
    "trust_remote_code",
    "use_flash_attn",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_mamba_kernels",
    "fuse_rms_norm",
    "fuse_swiglu",
    "add_bos_token",
    "add_eos_token",
    "for_llm_class",
    "moe_drop_tokens",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "num_logits_to_keep",
    "mtp_loss_scaling_factor",
    "router_dtype",
    "moe_router_dtype",
)

# An unknown field asks for other mathematics if its name contains one of these,
_TELLING_PARTS = (
    "mamba",
    "ssm",
    "linear_",
    "conv",
    "hybrid",
    "index_",
    "indexer",
    "dsa",
    "delta",
    "softcap",
    "soft_cap",
    "multiplier",
    "residual_streams",
    "hash_layers",
    "latent",
    "cross_attention",
    "output_gate",
    "compress",
    "full_attention_interval",
    "attention_chunk",
    "no_rope",
    "partial_rotary",
    "inverse_layer",
    "logit_scale",
    "dropout",
    "pdrop",
    "alibi",
    "parallel_attn",
    "parallel_residual",
    "sandwich",
    "zero_expert",
    "engram",
    "mhc",
    "scoring",
    "score_",
    "topk",
    "scaling",
    "scale",
    "expert",
    "routed",
    "lora",
    "head_dim",
    "attn",
    "layer_types",
    "block_type",
    "per_layer",
    "o_groups",
    "shared_intermediate",
    "layer_freq",
    "layer_interval",
    "layer_step",
    "sparse_step",
    "dense_replace",
    "kv_shared",
    "sliding_window",
    "activation",
    "hidden_act",
    "swiglu",
    "clip_qkv",
    "interleave",
    "expand",
    "altup",
    "laurel",
    "mup_",
    "dim_model_base",
    "jitter",
    "intermediate_size_mlp",
    "time_step_limit",
)
# Counts, of which 1 is as telling as 2; any other 1 is taken for a factor.
_COUNTS = ("shared_expert", "dense_replace", "hash_layers")
# or begins with one of these, the parts of a model that decide its mathematics.
_TELLING_PREFIXES = (
    "attention_",
    "attn_",
    "qk_",
    "rope_",
    "rotary_",
    "norm_",
    "mlp_",
    "ffn_",
    "moe_",
    "router_",
    "expert",
    "n_group",
    "hc_",
    "cla_",
    "query_",
)


# The names under which families state the function that scores the experts.
_SCORE_FIELDS = (
    "scoring_func",
    "score_func",
    "score_function",
    "moe_router_activation_func",
    "moe_gate_act",
)


def require_same_score(fields: FieldReader, model: ModelSpec) -> None:
    """Refuse a scorer that is not the family's, under any of its names.

    A family reads the name that its own code reads; another name would be skipped, and the router
    planned as the family's.

    Raises:
        BadInput: it names the field and the family's scorer.
    """
    unread = fields.unread_names()
    for field in _SCORE_FIELDS:
        if model.moe is not None and field in unread:
            fields.require_neutral(field, model.moe.router.score.value)


def skipped_names(fields: FieldReader) -> tuple[str, ...]:
    """Return the names of the fields that no reader has taken and that may be skipped.

    Raises:
        BadInput: one of them may ask for other mathematics.
    """
    fields.ignore(*_HARMLESS)
    unknown = fields.unread_names()
    for field in unknown:
        value = fields.raw_value(field)
        is_one = value == 1 and any(part in field for part in _COUNTS)
        if value is True or (is_telling(field) and (is_one or not _is_off(value))):
            raise fields.refusal(field, "asks for what moewright does not model", "leave it out")
    return unknown


def skips_silently(field: str) -> bool:
    """Tell whether a field is known to say nothing about the shape of a model."""
    return field in _HARMLESS


def is_telling(field: str) -> bool:
    """Tell whether the name of an unknown field may ask for other mathematics."""
    return field.startswith(_TELLING_PREFIXES) or any(part in field for part in _TELLING_PARTS)


def _is_off(value: object) -> bool:
    """Whether an unknown field leaves the model as it is: absent, off, or a factor of 1.

    A switch that is on is no factor, though it equals 1.
    """
    return value is not True and value in (None, False, 0, 1, 1.0, [], {})
