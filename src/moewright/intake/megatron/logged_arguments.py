"""The arguments that a Megatron-LM log prints at its start, as the command they come from.

The dump holds every argument after the trainer's own checks, defaults and derived ones among them.
Only those that shape a job are taken; the rest would say again what follows from them.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence

from moewright.intake.megatron.options import MegatronOption, option_table

_SHAPING = frozenset(
    (
        *(
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "group_query_attention",
        ),
        *(
            "num_query_groups",
            "kv_channels",
            "max_position_embeddings",
            "position_embedding_type",
            "rotary_base",
        ),
        *(
            "normalization",
            "norm_epsilon",
            "swiglu",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
        ),
        *(
            "untie_embeddings_and_output_weights",
            "vocab_size",
            "multi_latent_attention",
            "q_lora_rank",
        ),
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers"),
        *(
            "num_experts",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ),
        *(
            "moe_router_topk",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "moe_router_num_groups",
        ),
        *(
            "moe_router_group_topk",
            "moe_router_topk_scaling_factor",
            "moe_router_enable_expert_bias",
        ),
        *(
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_expert_capacity_factor",
        ),
        *(
            "moe_router_force_load_balancing",
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
        ),
        *(
            "seq_length",
            "micro_batch_size",
            "global_batch_size",
            "bf16",
            "fp16",
            "fp8",
            "fp8_recipe",
        ),
        *("fp4", "fp4_recipe"),
        *(
            "tensor_model_parallel_size",
            "sequence_parallel",
            "context_parallel_size",
            "cp_comm_type",
        ),
        *("pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
        *(
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
            "expert_model_parallel_size",
        ),
        *(
            "expert_tensor_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *(
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "tp_comm_overlap",
        ),
        *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "recompute_granularity"),
        *("recompute_method", "recompute_num_layers"),
        *(
            "recompute_modules",
            "fine_grained_activation_offloading",
            "offload_modules",
            "optimizer_cpu_offload",
        ),
        *("optimizer_offload_fraction", "use_precision_aware_optimizer"),
    )
)


def rebuild_command(arguments: Sequence[tuple[str, str]]) -> str:
    """The launch command of a dump; "" when the dump does not say how many ranks there were."""
    said = dict(arguments)
    world = said.get("world_size", "")
    if not world.isdigit():
        return ""
    options = {option.dest: option for option in option_table().values() if option.dest in _SHAPING}
    if said.get(
        "padded_vocab_size", ""
    ).isdigit():  # the tokenizer's own size is often not among the arguments
        said["vocab_size"] = said["padded_vocab_size"]
    words = [
        word
        for dest, option in options.items()
        if dest in said
        for word in _words(option, said[dest])
    ]
    return f"torchrun --nproc_per_node={world} pretrain_gpt.py {shlex.join(words)}\n"


def _words(option: MegatronOption, value: str) -> Iterator[str]:
    """The option as one would write it; nothing for one that was not set."""
    if option.value_count == "0":
        off = option.name.startswith(
            ("--no-", "--disable-")
        )  # such an option makes its argument False
        yield from (option.name,) if value == str(not off) else ()
    elif value not in ("None", "", "[]"):
        yield option.name
        yield from _items(value) if option.value_count in ("+", "*") else (value,)


def _items(value: str) -> tuple[str, ...]:
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return (value,)
    return tuple(map(str, read)) if isinstance(read, list | tuple) else (str(read),)
