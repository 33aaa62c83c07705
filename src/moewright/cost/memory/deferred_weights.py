"""What a rank holds between a backward and the weight gradients that the backward left.

Schedules that split the backward run the weight gradients of a chunk in a row of their own. Until
then the products of the chunk keep their input and the gradient of their output; what only input
gradients needed is free. The engine defers column-parallel, row-parallel and grouped products, and
none that is narrower (engine.memory.weight_gradients).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moewright.rules import routing
from moewright.rules.adapters import adapted_linears, is_frozen, trains_module
from moewright.rules.job import Job, micro_batch_tokens, routed_rows, tp_group_tokens
from moewright.rules.saved import recompute
from moewright.rules.saved.trained_saved import adapter_tensor
from moewright.rules.shapes.mixers import recurrent_macs
from moewright.rules.shapes.shards import shard_size
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, MixerKind

Booking = tuple[Module, int]

# The saved inputs of linears whose adapter has a first matrix that is deferred.
_INPUT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention.o": "attention_out",
        "mlp.down": "activation",
        "moe.shared.down": "activation",
        "moe.experts.gate_up": "permuted",
        "moe.experts.up": "permuted",
        "moe.experts.down": "activation",
    }
)


def layer_owed_bytes(
    job: Job,
    layer: int,
    *,
    load: float,
    dispatch: routing.DispatchCounts | None = None,
) -> tuple[Booking, ...]:
    """Return the bytes that the weight gradients of a layer wait with, by module.

    An input that was dropped or sent to the host is made again in the backward, and then waits like
    any other: no recompute and no offload choice changes these bytes. `load` and `dispatch` are
    those of rules.saved.recompute; layers above `model.layers` are MTP depths.
    """
    tensors = recompute.saved_tensors(job, layer, load=load, dispatch=dispatch)
    # Reversed, so that of attention_out, which stands twice where ranks exchange heads, the first
    # stays: that is what the projection takes.
    inputs = {(tensor.owner, tensor.name): tensor.wide_bytes for tensor in reversed(tensors)}
    is_mtp = layer > job.model.layers
    if is_frozen(job.workload):
        return tuple(_adapters(job, layer, inputs, load))
    bookings: list[Booking] = []
    if job.model.mixer(layer) is not MixerKind.NONE:
        bookings += _mixer(job, layer, inputs)
    if job.model.has_experts(layer):
        bookings += _experts(job, inputs, load)
    elif job.model.has_mlp(layer):
        bookings += _mlp(job, inputs)
    if is_mtp:
        if job.model.joins_mtp_inputs:
            bookings += _mtp_projection(job)
        bookings = [(Module.MTP, nbytes) for _, nbytes in bookings]
        bookings += head_owed_bytes(job)
    return tuple(bookings)


def head_owed_bytes(job: Job) -> tuple[Booking, ...]:
    """Return the bytes that the weight gradient of a pass through the head waits with.

    They are the head's input and the gradient of the logits. Under recompute=loss the gradient is
    computed with the loss, and nothing waits.
    """
    is_frozen_head = not trains_module(job.workload.fine_tuning, Module.HEAD)
    if is_frozen_head or Recompute.LOSS in job.layout.recompute:
        return ()
    head_input = micro_batch_tokens(job.workload, job.layout) * job.model.hidden_size
    logits = tp_group_tokens(job.workload, job.layout) * shard_size(
        job.model.vocab_size, job.layout.tp
    )
    return ((Module.HEAD, recompute.activation_nbytes(job.workload) * (head_input + logits)),)


def _mixer(job: Job, layer: int, inputs: dict[tuple[Module, str], int]) -> Iterator[Booking]:
    if not trains_module(job.workload.fine_tuning, Module.ATTENTION):
        return
    spec = job.model.attention
    names = ["input_norm_out", "attention_out"]
    width = spec.q_width * (spec.q_matrices) + 2 * spec.kv_width
    recurrent = job.model.recurrent
    if recurrent is not None and job.model.mixer(layer) is MixerKind.RECURRENT:
        names = ["input_norm_out", "mixer_out"]
        sharded, _ = recurrent_macs(recurrent, job.model.hidden_size)
        # Multiply-adds over h are columns; less those of the output projection, the last product.
        width = sharded // job.model.hidden_size - recurrent.value_width
    elif spec.kind is AttentionKind.MLA:
        # The projections to the latents are replicated, and their gradients are not deferred.
        names = ["q_latent" if spec.q_lora_rank else "input_norm_out", "kv_latent", "attention_out"]
        width = spec.q_width + spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    elif spec.kind is AttentionKind.COMPRESSED:
        names = ["q_latent", "attention_out", "o_down"]
        width = spec.q_width + spec.output_groups * spec.output_lora_rank
    kept = sum(inputs.get((Module.ATTENTION, name), 0) for name in names)
    yield Module.ATTENTION, kept + _output_gradients(job, width)


def _mlp(job: Job, inputs: dict[tuple[Module, str], int]) -> Iterator[Booking]:
    if not trains_module(job.workload.fine_tuning, Module.DENSE_MLP):
        return
    width = job.model.fc1_matrices * job.model.dense_ffn_size
    kept = sum(inputs.get((Module.DENSE_MLP, name), 0) for name in ("post_norm_out", "activation"))
    yield Module.DENSE_MLP, kept + _output_gradients(job, width)


def _experts(
    job: Job,
    inputs: dict[tuple[Module, str], int],
    load: float,
) -> Iterator[Booking]:
    assert job.model.moe is not None  # the layer has experts
    fine_tuning = job.workload.fine_tuning
    wide = job.model.fc1_matrices
    rows = routed_rows(job.model, job.workload, job.layout, load)
    row_width = wide * job.model.moe.ffn_size // job.layout.etp + job.model.expert_width
    kept = sum(
        inputs.get((Module.EXPERTS, name), 0) for name in ("permuted", "activation", "row_ends")
    )
    if trains_module(fine_tuning, Module.EXPERTS):
        yield Module.EXPERTS, kept + recompute.activation_nbytes(job.workload) * rows * row_width
    if job.model.moe.shared_ffn_size and trains_module(fine_tuning, Module.SHARED_EXPERTS):
        # Shared experts take the router's input, which is saved once, under the router.
        kept = inputs[Module.ROUTER, "post_norm_out"] + inputs[Module.SHARED_EXPERTS, "activation"]
        width = wide * job.model.moe.shared_ffn_size
        yield Module.SHARED_EXPERTS, kept + _output_gradients(job, width)


def _adapters(
    job: Job, layer: int, inputs: dict[tuple[Module, str], int], load: float
) -> Iterator[Booking]:
    """Yield what the adapters of a layer wait with.

    Beside a weight that TP shards, the matrix that is sharded alike is deferred; beside weights of
    experts both are. The first waits with the input of the weight and the gradient of what is
    between the two, the second with what is between them and the gradient of the output.
    """
    c, rank = recompute.activation_nbytes(job.workload), job.workload.fine_tuning.lora_rank
    tokens, tp = tp_group_tokens(job.workload, job.layout), job.layout.tp
    rows = routed_rows(job.model, job.workload, job.layout, load)
    is_grouped = False
    names = dict(_INPUT_NAMES)
    for name in ("mixer_out", "o_down"):  # where the last product takes another tensor
        if (Module.ATTENTION, name) in inputs:
            names["attention.o"] = name
    for linear in adapted_linears(job.model, job.workload.fine_tuning, layer):
        waiting = 0
        count, parts = (rows, 1) if linear.is_expert else (tokens, tp)
        if linear.is_expert or linear.cut == "columns":
            waiting += inputs[linear.module, names[linear.name]]
            waiting += c * count * linear.stack * rank
        if linear.is_expert or linear.cut == "rows":
            waiting += inputs[linear.module, adapter_tensor(linear)]
            waiting += c * count * linear.stack * linear.outputs // parts
        is_grouped |= linear.is_expert
        yield linear.module, waiting
    if is_grouped:
        yield Module.EXPERTS, inputs[Module.EXPERTS, "row_ends"]


def _output_gradients(job: Job, width: int) -> int:
    """Return the bytes of the output gradients of a block's first and last product.

    The first has `width` columns over the TP ranks. The last has the hidden size, and its gradient
    is gathered over them.
    """
    columns = width // job.layout.tp + job.model.hidden_size
    tokens = tp_group_tokens(job.workload, job.layout)
    return recompute.activation_nbytes(job.workload) * tokens * columns


def _mtp_projection(job: Job) -> Iterator[Booking]:
    """Yield what the projection of an MTP depth waits with: both norms' outputs, and its output."""
    joined = micro_batch_tokens(job.workload, job.layout) * 2 * job.model.hidden_size
    columns = tp_group_tokens(job.workload, job.layout) * job.model.hidden_size // job.layout.tp
    yield Module.MTP, recompute.activation_nbytes(job.workload) * (joined + columns)
