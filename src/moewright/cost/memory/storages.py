"""All storages of a rank at the moments of a counted step: what rows list, and what lies beside.

The engine weighs every storage that lives, whoever holds it (engine.observe.storage_census). At
rest these are the states and the saved activations, to the byte, and little else: tables of
positions, statistics of the routers, the tokens of the step, messages of a pipeline and weights on
their way. What follows says how much that may be; more is memory that no row lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from moewright.cost.memory.model_states import BucketSet
from moewright.rules.checkpoint_shares import WRITE_ALIGNMENT, WRITE_BUFFER_BYTES
from moewright.rules.context_parallel import cp_factors
from moewright.rules.delayed_scaling import is_delayed
from moewright.rules.job import Job
from moewright.rules.low_precision import find_recipe
from moewright.rules.packed_base import FP8_BLOCK, holds_packed, is_packed
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes.fsdp import FsdpUnit
from moewright.rules.shapes.parameters import count_parameters, parameters_by_layer
from moewright.rules.shapes.shards import local_shape
from moewright.rules.timetable.paired_passes import can_pair
from moewright.spec.layout import Overlap
from moewright.spec.ledger import Component, MemoryRow, StorageBytes
from moewright.spec.model import AttentionKind
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import DocumentMasking, MatrixUpdate, SaveMode

# Counters, scalars and the random state.
_SCALARS = 4 << 10
_SAVED = (Component.ACTIVATIONS, Component.LOGITS)
_HASH_KEYS_BYTES = 8 << 16  # of checks that no bit has changed
_KEY_TABLE_RATES = 3  # the rates at which keys of a few tokens are made, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesOfStep:
    """The bytes of states that a step makes, and that may not be there yet when it begins.

    fully_shard makes its gradients as backwards end; converted weights are made by the first
    forward of a step, and stay until the next step's takes their place.
    """

    unit_gradients: int
    weight_copies: int


def list_storages(
    job: Job, rows: Sequence[MemoryRow], *, host_bytes: int, made: BytesOfStep
) -> StorageBytes:
    """Return the least bytes at each moment: what `rows` list, but `host_bytes` on the host.

    Of what the step makes there may be nothing as it begins, and no gradients when the most
    activations are kept. Where two passes run beside each other, the
    fullest moment lies between their segments, and no row of the timetable ends there.
    """
    states = sum(row.bytes for row in rows if row.component not in _SAVED) - host_bytes
    saved = sum(row.bytes for row in rows if row.component in _SAVED)
    without_gradients = states - made.unit_gradients
    fullest = without_gradients + saved
    return StorageBytes(
        resident=without_gradients - made.weight_copies,
        kept=without_gradients if can_pair(job.layout, job.micro_batches) else fullest,
        peak=fullest,
        reduced=states,
        update=states,
        left=states,
    )


def bound_allowance(
    job: Job,
    rows: Sequence[MemoryRow],
    flat_sets: Sequence[BucketSet],
    units: Sequence[FsdpUnit],
    *,
    made: BytesOfStep,
    recorded_micro_batches: int,
    is_repeated: bool = False,
) -> StorageBytes:
    """Return the most bytes that may live at each moment beside the least (`list_storages`).

    Of a step that is repeated, what the first try has left lives through the second.
    """
    steady = _SCALARS + _table_bytes(job) + _statistics_bytes(job, recorded_micro_batches)
    inputs = _input_bytes(job)
    if job.workload.data.prefetch:
        steady += inputs  # of the step that is read ahead, where it is computed
    hash_keys = 0
    if job.workload.check_every:
        hash_keys = _HASH_KEYS_BYTES
    steady += hash_keys
    if job.workload.checkpoint.mode is SaveMode.ASYNC:  # a save may be under way
        steady += WRITE_BUFFER_BYTES + WRITE_ALIGNMENT
    if is_repeated:
        steady += inputs + _reduced_bytes(job, flat_sets, units)
    saved_bytes = sum(row.bytes for row in rows if row.component in _SAVED)
    weight_bytes = sum(row.bytes for row in rows if row.component is Component.WEIGHTS)
    weight_bytes -= made.weight_copies
    on_their_way = _weights_on_their_way(job, weight_bytes, units)
    rest = steady + on_their_way
    in_passes = rest + inputs + _message_bytes(job) + made.unit_gradients
    kept = in_passes
    if can_pair(job.layout, job.micro_batches):
        kept += saved_bytes
    if Overlap.GRAD in job.layout.overlap:
        # At rest after a last backward, buckets are reduced and what it read is gone; other chunks
        # of the rank may keep theirs.
        shards = _reduced_bytes(job, flat_sets, units)
        kept += shards if job.layout.vpp > 1 else max(0, shards - saved_bytes)
    products = hash_keys  # of a block of words with the keys, as large at most
    update = rest + inputs + products + _update_bytes(job, flat_sets, units)
    if is_delayed(job.workload):  # histories move on in a copy
        update += 2 * sum(row.bytes for row in rows if row.component is Component.BUFFERS)
    return StorageBytes(
        resident=rest + made.unit_gradients + made.weight_copies,
        kept=kept,
        peak=max(in_passes + on_their_way + _working_set_bytes(job, weight_bytes), update),
        reduced=rest + inputs + products + _reduced_bytes(job, flat_sets, units),
        update=update,
        left=rest,
    )


def _tokens(job: Job) -> int:
    """Return the tokens of a rank's micro-batch."""
    return job.workload.seq_len * job.layout.mbs // job.layout.cp


def _table_bytes(job: Job) -> int:
    """Return the bytes of tables: rotations, keys of a few tokens, experts of hashed layers."""
    model, workload = job.model, job.workload
    spec = model.attention
    is_compressed = spec.kind is AttentionKind.COMPRESSED
    positions = workload.seq_len
    if not is_compressed and workload.data.documents is not DocumentMasking.RESTARTED:
        positions //= job.layout.cp
    rotations = 4 * positions * spec.head_dim  # cos and sin of half of a head each, fp32
    if is_compressed:
        # A rotation of each of two kinds, and of the keys of each rate.
        rotations *= 2 + _KEY_TABLE_RATES
        rotations += _KEY_TABLE_RATES * 32 * workload.seq_len  # bounds and first tokens
    hashed = 0
    if model.moe is not None:
        router = model.moe.router
        hashed = 8 * model.vocab_size * router.top_k * router.hash_layers
    return rotations + hashed


def _statistics_bytes(job: Job, micro_batches: int) -> int:
    """Return the bytes of what routers count: of this step and of the one before."""
    moe = job.model.moe
    if moe is None:
        return 0
    layers = len(job.model.routed_layers)
    width = moe.experts + 2 * job.layout.ep  # and copies by rank and node
    return 8 * layers * width * (2 * micro_batches + 8)


def _input_bytes(job: Job) -> int:
    """Return the bytes of the tokens of a step, the largest there may be."""
    layout, workload, model = job.layout, job.workload, job.model
    sequences = max(workload.global_batch, workload.batch_samples)
    batches = -(-sequences // (layout.mbs * layout.dp))
    tokens = _tokens(job)
    nbytes = 16 * (1 + model.mtp_layers) * batches * tokens
    if workload.data.documents is not DocumentMasking.JOINED:
        # Where documents begin, and the rotation of their positions.
        head_ranks, _ = cp_factors(layout)
        nbytes += 4 * batches * tokens * (8 + model.attention.head_dim) * head_ranks
    if workload.data.documents is DocumentMasking.RESTARTED:
        nbytes += 8 * batches * tokens  # which tokens of packed chats the routers count
    return nbytes


def _message_bytes(job: Job) -> int:
    """Return the bytes of a pipeline's messages that were received and not used yet, or sent."""
    layout = job.layout
    if layout.pp == 1:
        return 0
    message = activation_nbytes(job.workload) * _tokens(job) * job.model.hidden_size // layout.tp
    return 4 * layout.pp * layout.vpp * message


def _weights_on_their_way(job: Job, weight_bytes: int, units: Sequence[FsdpUnit]) -> int:
    """Return the bytes of weights that are gathered, or cast to be sent."""
    layout = job.layout
    if layout.zero == 3 and units:
        # fully_shard fills each parameter up to parts of one size: where ranks outnumber its rows,
        # that is many times what the parameter has.
        filled = sum(unit.filled_numel for unit in units)
        numel = max(count_parameters(job.model).total, filled)
        return activation_nbytes(job.workload) * numel
    if Overlap.PARAM in layout.overlap:
        return weight_bytes
    return 0


def _reduced_bytes(job: Job, flat_sets: Sequence[BucketSet], units: Sequence[FsdpUnit]) -> int:
    """Return the most bytes of reduced gradients beside those that the buffers hold.

    They are the shards of what is scattered over several ranks, and zeros for parameters of
    fully_shard that no token used.
    """
    scattered = sum(
        bucket_set.numel // bucket_set.shards for bucket_set in flat_sets if bucket_set.shards > 1
    )
    zeros = 4 * sum(unit.padded_numel for unit in units)
    return job.workload.grad_dtype.nbytes * scattered + zeros


def _update_bytes(job: Job, flat_sets: Sequence[BucketSet], units: Sequence[FsdpUnit]) -> int:
    """Return the most bytes of the reduction of gradients and of the update beside states.

    Beside the reduced gradients they are one bucket on its way or one shard in fp32, and weights
    that are cast to be gathered.
    """
    workload = job.workload
    grad_nbytes = workload.grad_dtype.nbytes
    c = activation_nbytes(workload)
    buckets = [
        (bucket.numel, bucket.numel // bucket_set.shards)
        for bucket_set in flat_sets
        for bucket in bucket_set.buckets
    ]
    on_its_way = max((grad_nbytes * numel for numel, shard in buckets if numel > shard), default=0)
    widened = 0
    if grad_nbytes < 4:
        widened = max((4 * shard for _, shard in buckets), default=0)
    cast = sum(c * shard for numel, shard in buckets if numel > shard)
    nbytes = _reduced_bytes(job, flat_sets, units)
    if Overlap.PARAM in job.layout.overlap:
        nbytes += cast
    nbytes += max(on_its_way, widened, cast)
    nbytes += max((2 * c * unit.filled_numel for unit in units), default=0)
    if any(dtype.nbytes < FP32_BYTES for dtype in workload.optimizer.moment_dtypes):
        # A bucket's moments in fp32, scaled, padded to blocks, rounded and in their codes.
        nbytes += 24 * max((shard for _, shard in buckets), default=0)
    if workload.optimizer.matrix_update is MatrixUpdate.MUON:
        # Matrices that TP or ETP cuts are made whole.
        wholes = 16 * max(job.layout.tp, job.layout.etp)
        nbytes += wholes * sum(numel for numel, _ in buckets)
        nbytes += wholes * sum(unit.filled_numel for unit in units)
    return nbytes


def _working_set_bytes(job: Job, weight_bytes: int) -> int:
    """Return the most bytes of what one operation of forward or backward works with."""
    model, workload = job.model, job.workload
    nbytes = 12 * _tokens(job) * max(model.vocab_size, 8 * model.hidden_size) + weight_bytes
    nbytes += _unpacked_bytes(job)
    recipe = find_recipe(workload)
    if recipe is not None:
        # A CPU converts the largest matrix in fp32, and in int32 where numbers have 4 bits.
        block = recipe.weights.block or 1
        nbytes += 40 * max(
            count * (-(-rows // block) * block) * (-(-columns // block) * block)
            for count, rows, columns in _converted_matrices(job)
        )
    return nbytes


def _unpacked_bytes(job: Job) -> int:
    """Return the most bytes of packed weights that are widened at once.

    A product widens one, whose last blocks are filled up in fp32. What is recomputed keeps those of
    all its products until its backward has read them.
    """
    layout, fine_tuning = job.layout, job.workload.fine_tuning
    if not holds_packed(job.workload):
        return 0
    largest = 0
    by_layer = []
    for params in parameters_by_layer(job.model).values():
        shapes = [
            local_shape(param, layout)
            for param in params
            if is_packed(param.name, param.module, param.shape, fine_tuning)
        ]
        by_layer.append(sum(map(prod, shapes)))
        for *lead, rows, columns in shapes:
            filled = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK) * FP8_BLOCK**2
            largest = max(largest, prod(lead) * filled)
    recomputed = 0
    if layout.recompute:
        recomputed = sum(sorted(by_layer)[-layout.recompute_span :])
    return activation_nbytes(job.workload) * recomputed + FP32_BYTES * largest


def _converted_matrices(job: Job) -> Iterator[tuple[int, int, int]]:
    """Yield the largest operands that are converted at once: how many, their rows and columns."""
    model, layout = job.model, job.layout
    attention = model.attention
    dense_size = 2 * model.dense_ffn_size
    yield 1, attention.heads * max(attention.head_dim, attention.v_head_dim), model.hidden_size
    yield 1, dense_size, model.hidden_size
    yield 1, dense_size, _tokens(job)
    if model.moe is not None:
        yield model.moe.experts // layout.ep, 2 * model.moe.ffn_size, model.hidden_size
