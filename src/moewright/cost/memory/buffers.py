"""Buffers besides the model's tensors: of dispatchers, CUDA graphs, and what ZeRO has whole."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil, prod

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.stage_parts import Array
from moewright.cost.symbols import Symbols
from moewright.rules import grid
from moewright.rules.adapters import is_frozen, trains_module
from moewright.rules.graph_parts import shared_gradient_bytes
from moewright.rules.job import Job
from moewright.rules.packed_base import CHUNK_BYTES, CHUNK_NUMEL, packed_elements
from moewright.rules.saved import recompute
from moewright.rules.shapes import fsdp, shards
from moewright.spec.choices import Payload, RegisteredMemory
from moewright.spec.layout import CudaGraphScope, Layout
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.units import BF16_BYTES
from moewright.spec.workload import AttentionBackend, ExpertKernels, Fusion, Workload

# DeepEP's defaults (deep_ep/csrc/config.hpp): channels (two SMs each), tokens that a peer may have
# under way inside the node and between nodes, and what travels beside a token's hidden state
# (routing, weights, scales).
_DEEPEP_PEERS = 8
_DEEPEP_CHANNELS = 10
_DEEPEP_TOKENS_INSIDE = 256
_DEEPEP_TOKENS_BETWEEN = 128
_DEEPEP_BESIDE_BYTES = 2064

# Threads with a cuBLAS handle of their own: that of the program and that of backward.
_HANDLES = 2
# Streams on which Transformer Engine starts the products of several experts.
_GROUPED_STREAMS = 4


# The gradients in the backward of FlashAttention and of the rotation before it: those of outputs,
# queries, keys and values in 16 bits (2, 2 and 2 x 2 bytes), sums in fp32 (4 and 2 x 4), and
# products, their sums and the rotated tensors of the rotation (8 and 8).
_QUERY_GRADIENT_BYTES = 16
_KEY_GRADIENT_BYTES = 20
_GATHERED_LAYERS = 2  # the layer at work and the one after it


def dispatcher_bytes(sym: Symbols) -> int:
    """Return the bytes that a dispatcher registers, however much it sends.

    DeepEP: rings of tokens for each peer of the node and each node, both ways. HybridEP and
    NCCL-EP: room for every token of the group going to one rank, once each way (assumed: their
    buffers are not documented). All-to-all and all-gather keep nothing.
    """
    layout, token = sym.layout, sym.c * sym.model.expert_width
    if sym.model.moe is None or layout.ep == 1:
        return 0
    registers = layout.dispatcher.facts.registers
    if registers is RegisteredMemory.EVERY_TOKEN:
        return 2 * layout.ep * sym.t * token
    if registers is RegisteredMemory.NOTHING:
        return 0
    nodes = ceil(layout.ep / _DEEPEP_PEERS)
    inside = min(layout.ep, _DEEPEP_PEERS) * _DEEPEP_TOKENS_INSIDE
    between = 0
    if nodes > 1:
        # Rings for sending and for receiving.
        between = 2 * nodes * _DEEPEP_TOKENS_BETWEEN
    return _DEEPEP_CHANNELS * (inside + between) * (token + _DEEPEP_BESIDE_BYTES)


def graph_bytes(job: Job, graphs: Collection[CudaGraphScope]) -> int:
    """Return the bytes that the CUDA graphs of one layer and micro-batch in flight pin.

    They are the static input and the gradient of the output.
    60 of them in DeepSeek-V3 on GB200 are 7.05 GB; arXiv 2603.07685 prints 7. A graph of the whole
    iteration pins what its run holds anyway.
    """
    if not graphs or CudaGraphScope.FULL in graphs:
        return 0
    tokens = job.micro_batch_tokens
    return 2 * recompute.activation_nbytes(job.workload) * tokens * job.model.hidden_size


def gathered_bytes(workload: Workload, layer_numel: Array, *, zero: int) -> Array:
    """Return the bytes [ranks] of the layers that are whole beside what ZeRO shards.

    ZeRO-3 holds their weights and gradients, ZeRO-2 their gradients until they are reduced; lower
    levels have no such layers.

    `layer_numel` [ranks, layers] are the elements of every layer of a rank before ZeRO shards them.
    """
    # The two largest stand for any two neighbours.
    largest = np.sort(layer_numel, axis=1)[:, -_GATHERED_LAYERS:].sum(axis=1)
    if zero < 2:
        return np.zeros_like(largest)
    element_bytes = 0
    if zero == 3:
        element_bytes = recompute.activation_nbytes(workload)
    if not is_frozen(workload):
        element_bytes += workload.grad_dtype.nbytes
    return np.asarray(element_bytes * largest)


def fsdp_buffer_bytes(sym: Symbols) -> int:
    """Return the bytes that torch's FSDP holds on a CUDA device besides the gathered layers.

    Where ranks share them, embedding and head stand in the buffer of their gather too. Experts with
    adapters hold results of their products.
    """
    if not sym.is_fused or sym.layout.zero != 3:
        return 0
    model, layout = sym.model, sym.layout
    ends = 0
    if grid.group_size(layout, fsdp.state_group(layout, "dp_cp")) > 1:
        tables = 1 if model.tie_embeddings else 2
        ends = sym.c * tables * model.vocab_size * model.hidden_size // layout.tp
    return ends + _adapted_experts_bytes(sym)


def fsdp_layer_bytes(sym: Symbols) -> int:
    """Return the bytes that torch's FSDP holds on a CUDA device while a layer's backward runs.

    In the backward of attention the gradients of queries, keys and values stand in 16 bits, those
    that FlashAttention sums up in 32 beside them, and what undoes the rotation: 16 bytes an element
    of the queries and 20 of the keys. They are gone while the head runs.
    """
    spec = sym.model.attention
    if not sym.is_fused or sym.layout.zero != 3 or spec.kind is not AttentionKind.GQA:
        return 0
    elements = _QUERY_GRADIENT_BYTES * spec.q_width + _KEY_GRADIENT_BYTES * spec.kv_width
    return sym.T * elements // sym.layout.tp


def _adapted_experts_bytes(sym: Symbols) -> int:
    """Return the bytes that an eager function of experts with adapters holds until it returns.

    It names its results: the frozen product and the adapter's beside their sum, of gate and up and
    of down, and the scaled one of down (prime-rl, trainer/models/layers/lora/multi_moe.py).
    """
    moe = sym.model.moe
    if moe is None or not sym.is_frozen or not sym.workload.fine_tuning.lora_experts:
        return 0
    first_width = sym.model.fc1_matrices * moe.ffn_size // sym.layout.etp
    return sym.c * sym.R_peak * (2 * first_width + 3 * sym.model.expert_width)


def rank_layer_numel(model: ModelSpec, layout: Layout, pp_rank: int) -> Array:
    """Return the elements of every layer of a pipeline rank, in rules.shapes.parameters' order."""
    return np.array(
        [
            sum(prod(shards.local_shape(param, layout)) for param in params)
            for _, params in shards.layer_parameters(model, layout, pp_rank)
        ],
        dtype=float,
    )


def engine_graph_bytes(sym: Symbols, has_experts: Collection[bool]) -> int:
    """Return the bytes that the graphs of the engine share on a rank with these kinds of layers.

    What graphs of a CUDA stack pin is counted with activations (`graph_bytes`).
    """
    if sym.is_fused or not sym.layout.graphs:
        return 0
    moe_layers = sym.model.moe_layers
    layers = [moe_layers.index(kind) for kind in set(has_experts) if kind in moe_layers]
    return shared_gradient_bytes(sym.job, layers)


def resident_bytes(
    constants: Constants, sym: Symbols, has_experts: Collection[bool], *, has_head: bool
) -> int:
    """Return the bytes that stay all step long on a rank besides model states and activations.

    They are gradient placeholders, the workspaces of libraries, the buffers that gathers and graphs
    share, and a packed weight that is widened.
    `has_experts` tells which kinds of layer a rank holds: with experts, without, or both.
    """
    grouped = (
        sym.workload.trainer.expert_kernels is not ExpertKernels.SEQUENTIAL and True in has_experts
    )
    streams = 1 + (_GROUPED_STREAMS if grouped else 0)
    cublas_bytes = sym.workload.trainer.cublas_workspace_bytes or constants["cublas_bytes"]
    workspaces = _HANDLES * cublas_bytes + streams * constants["gemm_workspace_bytes"]
    gather = gather_buffer_bytes(sym, has_experts, has_head=has_head)
    head = 0
    if has_head:
        head = head_placeholder_bytes(constants, sym)
    own = placeholder_bytes(sym, has_experts) + unpacked_bytes(sym, has_experts)
    graphs = engine_graph_bytes(sym, has_experts)
    return own + head + round(workspaces) + gather + graphs


def unpacked_bytes(sym: Symbols, has_experts: Collection[bool]) -> int:
    """Return the bytes of the largest packed weight of a rank's layers, widened for a product."""
    moe_layers = sym.model.moe_layers
    firsts = [moe_layers.index(kind) for kind in set(has_experts) if kind in moe_layers]
    largest = max(
        (
            elements
            for layer in firsts
            for _, elements in packed_elements(sym.model, sym.workload, sym.layout, layer)
        ),
        default=0,
    )
    return sym.c * largest + CHUNK_BYTES * min(largest, CHUNK_NUMEL)


def head_placeholder_bytes(constants: Constants, sym: Symbols) -> int:
    """Return the bytes of the gradient placeholders that the head and MTP's projection cache.

    Megatron-LM makes the head's in every backward until August 2025 and caches it since.
    """
    is_unfused = Fusion.WEIGHT_GRAD in sym.workload.trainer.unfused
    is_older = constants["stack_age_years"] > constants["head_placeholder_years"]
    is_trained = trains_module(sym.workload.fine_tuning, Module.HEAD)
    if not sym.is_fused or is_unfused or is_older or not is_trained:
        return 0
    model = sym.model
    joined = 0
    if model.mtp_layers:
        joined = 2 * model.hidden_size
    return BF16_BYTES * (model.vocab_size + joined) * model.hidden_size // sym.layout.tp


def gather_buffer_bytes(sym: Symbols, has_experts: Collection[bool], *, has_head: bool) -> int:
    """Return the bytes of the buffer that gathers of Megatron-LM's own layers share.

    It stays as large as its largest use: the input of the head (of all linears in its own layers)
    under sequence parallelism, the rows that an all-gather dispatcher takes, and in its own
    attention the products of queries and keys.
    """
    if not sym.is_fused:
        return 0
    layout, h = sym.layout, sym.model.hidden_size
    is_local = sym.workload.trainer.attention_backend is AttentionBackend.LOCAL
    sizes = [0]
    if layout.sp and layout.tp > 1 and (has_head or is_local):
        sizes.append(sym.T * h)
    if layout.dispatcher.facts.payload is Payload.TOKENS and True in has_experts:
        ranks = layout.ep * layout.etp
        sizes.append(sym.t * ranks * h if ranks > 1 else 0)
    if is_local and has_experts:
        sizes.append(score_count(sym))
    return sym.c * max(sizes)


def score_count(sym: Symbols) -> int:
    """Return the scores of queries and keys of a layer and micro-batch on a rank."""
    return sym.T * sym.seq_len * sym.model.attention.heads // sym.layout.tp


def placeholder_bytes(sym: Symbols, has_experts: Collection[bool]) -> int:
    """Return the gradient placeholders that fused linear layers cache, in bf16.

    There is one for each distinct shape of a weight that trains, in CUDA stacks only. `has_experts`
    tells which kinds of layer a rank holds: with experts, without, or both.
    """
    is_unfused = Fusion.WEIGHT_GRAD in sym.workload.trainer.unfused
    if not sym.is_fused or not has_experts or is_unfused:
        return 0
    shapes = _mlp_shapes(sym, has_experts)
    if trains_module(sym.workload.fine_tuning, Module.ATTENTION):
        shapes |= _mixer_shapes(sym)
    return BF16_BYTES * sum(rows * columns for rows, columns in shapes)


def _mixer_shapes(sym: Symbols) -> set[tuple[int, int]]:
    """Return the shapes of a rank's weights that mix tokens."""
    model, layout, spec, h = sym.model, sym.layout, sym.model.attention, sym.model.hidden_size
    shapes = {(h, spec.out_width // layout.tp)}
    if spec.kind is AttentionKind.GQA:
        gates = spec.gate_width
        shapes.add(((spec.q_width + gates + 2 * spec.kv_width) // layout.tp, h))
    else:
        q_in = spec.q_lora_rank or h
        shapes |= {
            (spec.q_width // layout.tp, q_in),
            (spec.kv_lora_rank + spec.qk_rope_head_dim, h),
        }
        shapes.add(
            (spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim) // layout.tp, spec.kv_lora_rank)
        )
        shapes |= {(spec.q_lora_rank, h)} if spec.q_lora_rank else set()
    if model.recurrent is not None:
        wide_rows = model.recurrent.conv_width + model.recurrent.value_width + model.recurrent.heads
        value_columns = model.recurrent.value_width // layout.tp
        shapes |= {(wide_rows // layout.tp, h), (h, value_columns)}
    return shapes


def _mlp_shapes(sym: Symbols, has_experts: Collection[bool]) -> set[tuple[int, int]]:
    """Return the shapes of a rank's weights of MLPs and experts that train."""
    model, layout, h = sym.model, sym.layout, sym.model.hidden_size
    fine_tuning = sym.workload.fine_tuning
    wide = model.fc1_matrices
    shapes: set[tuple[int, int]] = set()
    widths = set()
    has_dense = False in has_experts and model.dense_layer_count
    if has_dense and trains_module(fine_tuning, Module.DENSE_MLP):
        widths.add(model.dense_ffn_size // layout.tp)
    has_moe = model.moe is not None and True in has_experts
    if model.moe is not None and has_moe and trains_module(fine_tuning, Module.SHARED_EXPERTS):
        widths.add(model.moe.shared_ffn_size // layout.tp)
    if model.moe is not None and has_moe and trains_module(fine_tuning, Module.EXPERTS):
        width, inner = model.moe.ffn_size // layout.etp, model.expert_width
        shapes |= {(wide * width, inner), (inner, width)}
        shapes |= {(inner, h), (h, inner)} if model.moe.latent_size else set()
    for width in widths:
        shapes |= {(wide * width, h), (h, width)}
    return shapes
