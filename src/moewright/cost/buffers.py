"""Buffers besides the model's tensors: those of dispatchers, CUDA graphs and ZeRO-3 gathers."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil, prod

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.cost.symbols import Symbols
from moewright.rules import micro_batches, recompute, shards
from moewright.spec.layout import CudaGraphScope, DispatcherKind, Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

# DeepEP's defaults (deep_ep/csrc/config.hpp): channels (two SMs each), tokens that a peer may have
# under way inside the node and between nodes, and what travels beside a token's hidden state
# (routing, weights, scales).
_DEEPEP_PEERS = 8
_DEEPEP_CHANNELS = 10
_DEEPEP_TOKENS_INSIDE = 256
_DEEPEP_TOKENS_BETWEEN = 128
_DEEPEP_BESIDE_BYTES = 2064

_GATHERED_LAYERS = 2  # the layer at work and the one after it


def dispatcher_bytes(sym: Symbols) -> int:
    """Return the bytes that a dispatcher registers, however much it sends.

    DeepEP: rings of tokens for each peer of the node and each node, both ways. HybridEP: room for
    every token of its group going to one rank, once each way (assumed: its buffers are not
    documented). All-to-all and all-gather keep nothing.
    """
    layout, token = sym.layout, sym.c * sym.model.expert_width
    if sym.model.moe is None or layout.ep == 1:
        return 0
    if layout.dispatcher is DispatcherKind.HYBRIDEP:
        return 2 * layout.ep * sym.t * token
    if layout.dispatcher is not DispatcherKind.DEEPEP:
        return 0
    nodes = ceil(layout.ep / _DEEPEP_PEERS)
    inside = min(layout.ep, _DEEPEP_PEERS) * _DEEPEP_TOKENS_INSIDE
    between = 2 * nodes * _DEEPEP_TOKENS_BETWEEN if nodes > 1 else 0
    return _DEEPEP_CHANNELS * (inside + between) * (token + _DEEPEP_BESIDE_BYTES)


def graph_bytes(
    model: ModelSpec, workload: Workload, layout: Layout, graphs: Collection[CudaGraphScope]
) -> int:
    """Return the bytes that the CUDA graphs of one layer and micro-batch in flight pin.

    They are the static input and the gradient of the output.
    60 of them in DeepSeek-V3 on GB200 are 7.05 GB; arXiv 2603.07685 prints 7. A graph of the whole
    iteration pins what its run holds anyway.
    """
    if not graphs or CudaGraphScope.FULL in graphs:
        return 0
    tokens = micro_batches.micro_batch_tokens(workload, layout)
    return 2 * recompute.activation_nbytes(workload) * tokens * model.hidden_size


def gathered_bytes(workload: Workload, layer_numel: Array) -> Array:
    """Return the bytes [ranks] of the layers that ZeRO-3 holds gathered: weights and gradients.

    `layer_numel` [ranks, layers] are the elements of every layer of a rank before ZeRO shards them.
    """
    largest = np.sort(layer_numel, axis=1)[:, -_GATHERED_LAYERS:].sum(axis=1)
    element_bytes = recompute.activation_nbytes(workload) + workload.grad_dtype.nbytes
    return np.asarray(element_bytes * largest)


def rank_layer_numel(model: ModelSpec, layout: Layout, pp_rank: int) -> Array:
    """Return the elements of every layer of a pipeline rank, as rules.parameters numbers layers."""
    return np.array(
        [
            sum(prod(shards.local_shape(param, layout)) for param in params)
            for _, params in shards.layer_parameters(model, layout, pp_rank)
        ],
        dtype=float,
    )
