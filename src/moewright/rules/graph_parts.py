"""Which parts of a layer are captured in graphs, and what the graphs of a rank share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

from moewright.rules.job import Job
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.timetable.stages import chunk_layers
from moewright.spec.layout import CudaGraphScope
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import MixerKind, ModelSpec
from moewright.spec.workload import Dtype

# Of balance over the micro-batch, each sequence and the global batch, and of the logits' size.
_ROUTER_LOSSES = 4


def captured_parts(
    model: ModelSpec, graphs: Collection[CudaGraphScope], layer: int
) -> tuple[CudaGraphScope, ...]:
    """Return the parts of a layer that graphs of it capture, in the order in which they run."""
    mixer = model.mixer(layer)
    parts = []
    if mixer is MixerKind.RECURRENT:
        parts.append(CudaGraphScope.MAMBA)
    elif mixer is not MixerKind.NONE:
        parts.append(CudaGraphScope.ATTN)
    # MTP depths are like the last layer.
    if model.has_mlp(layer) and model.moe_layers[min(layer, model.layers - 1)]:
        parts.append(CudaGraphScope.MOE_ROUTER)
    return tuple(part for part in parts if part in graphs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGradients:
    """The shapes of the gradients that all graphs of a rank's backwards share.

    They are those of hidden states [t,H] in the dtype of activations, of routed weights [t,k] in
    that of the router, and of a router's losses in fp32; () where no part hands one on.
    """

    hidden: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()


def shared_gradients(job: Job, layers: Iterable[int]) -> SharedGradients:
    """Return what the graphs of a rank with these layers share."""
    model = job.model
    parts = {part for layer in layers for part in captured_parts(model, job.layout.graphs, layer)}
    if not parts:
        return SharedGradients()
    tokens = job.micro_batch_tokens
    hidden = tokens, model.hidden_size
    if CudaGraphScope.MOE_ROUTER not in parts or model.moe is None:
        return SharedGradients(hidden=hidden)
    weights = tokens, model.moe.router.top_k
    return SharedGradients(hidden=hidden, weights=weights, losses=(_ROUTER_LOSSES,))


def shared_gradient_bytes(job: Job, layers: Iterable[int]) -> int:
    """Return the bytes of what the graphs of a rank with these layers share.

    Their slots hold what the micro-batches in flight would hold without them.
    """
    shared = shared_gradients(job, layers)
    return (
        activation_nbytes(job.workload) * _numel(shared.hidden)
        + job.workload.router.router_dtype.nbytes * _numel(shared.weights)
        + Dtype.FP32.nbytes * _numel(shared.losses)
    )


def graph_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    """Return the row of what the graphs of a rank of the engine share; () where there is none."""
    layers = [
        layer for chunk in job.rank_chunks(pp_rank) for layer in chunk_layers(job.model, chunk)
    ]
    nbytes = shared_gradient_bytes(job, layers)
    if not nbytes:
        return ()
    return (MemoryRow(component=Component.BUFFERS, module=Module.OTHER, bytes=nbytes),)


def _numel(shape: tuple[int, ...]) -> int:
    return prod(shape) if shape else 0
