"""The arguments that a Megatron-LM log prints at its start, as the command that they come from.

The dump holds every argument after the trainer's own checks, defaults and derived ones among them.
Only those that shape a job are taken; the rest would say again what follows from them.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence

from moewright.intake.megatron.options import MegatronOption, option_table
from moewright.spec.units import is_whole_number

_SHAPING_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_force_load_balancing",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "fp4",
    "fp4_recipe",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_comm_overlap",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "fine_grained_activation_offloading",
    "offload_modules",
    "activation_offload_fraction",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "use_precision_aware_optimizer",
)


def rebuild_command(arguments: Sequence[tuple[str, str]]) -> str:
    """Return the launch command of a dump; "" where it does not say how many ranks there were."""
    values = dict(arguments)
    world_size = values.get("world_size", "")
    if not is_whole_number(world_size):
        return ""
    # The tokenizer's own size is often not among the arguments.
    if is_whole_number(values.get("padded_vocab_size", "")):
        values["vocab_size"] = values["padded_vocab_size"]
    # Of the options that set one argument, the last speaks for it.
    options = {option.dest: option for option in option_table().values()}
    words = [
        word
        for dest, option in options.items()
        if dest in values and dest in _SHAPING_ARGUMENTS
        for word in _option_words(option, values[dest])
    ]
    return f"torchrun --nproc_per_node={world_size} pretrain_gpt.py {shlex.join(words)}\n"


def _option_words(option: MegatronOption, value: str) -> Iterator[str]:
    """Yield the option as one would write it; nothing for one that was not set."""
    if option.value_count == "0":
        # Such an option makes its argument False.
        is_negative = option.name.startswith(("--no-", "--disable-"))
        if value == str(not is_negative):
            yield option.name
    elif value not in ("None", "", "[]"):
        yield option.name
        if option.value_count in ("+", "*"):
            yield from _list_items(value)
        else:
            yield value


def _list_items(value: str) -> tuple[str, ...]:
    try:
        items = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return (value,)
    return tuple(map(str, items)) if isinstance(items, list | tuple) else (str(items),)
