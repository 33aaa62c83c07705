"""Attention of a layer: its projections, its context, and the products between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from moewright.engine.kernels.attention import Segments, build_segments
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.memory.saved_tensors import run_checkpointed
from moewright.engine.model.adapters import add_column_adapter, add_row_adapter
from moewright.engine.model.attention_blocks import BlocksBySource
from moewright.engine.model.autograd import (
    GatherKvHeads,
    NormSettings,
    RmsNorm,
    Rotary,
    SigmoidGate,
)
from moewright.engine.model.context_parallel import (
    add_slopes,
    attend,
    gather_heads,
    plan_attention_blocks,
    scatter_heads,
)
from moewright.engine.model.key_tables import KeyTables
from moewright.engine.model.layers import (
    Norm,
    Vector,
    Weight,
    hidden_replica_group,
)
from moewright.engine.model.micro_batch import CountedTokens
from moewright.engine.model.parallel_linear import ColumnParallelLinear, RowParallelLinear
from moewright.engine.model.rope import rope_frequencies
from moewright.engine.runtime import Runtime
from moewright.families.table import find_family
from moewright.rules.context_parallel import split_at_chunks
from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, PositionKind, QkNorm, RopeSpec
from moewright.spec.workload import DocumentMasking

# Linear position biases: Press et al., "Train Short, Test Long" (ALiBi, arXiv 2108.12409).


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return what a score of each head loses with every token between query and key.

    For a power of two they are 2^(-8 i / heads), i from 1. Other numbers of heads take the slopes
    of the power of two below, then every second one of the power above.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = _geometric(below)
    return slopes + _geometric(2 * below)[::2][: heads - below]


def _geometric(heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * number / heads) for number in range(1, heads + 1))


Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchContext:
    """What all layers share in a micro-batch of `sequences` sequences, attention above all.

    Its tokens lie sequence after sequence. `blocks` say what each query attends, `window_blocks`
    what it attends in layers with a window; cos and sin [S, D/2] or [sequences, S, D/2] fp32 are
    the rotation of each position. `temperatures` [S, 1, 1] or [sequences, S, 1, 1] fp32 scale the
    queries of layers that do not rotate, None where they are 1. `first_sequence` is the number of
    the first sequence over all of training; None in evaluation. `counted` as in MicroBatch.
    `segments` are the documents that bound attention, None for whole sequences. `choices` are the
    keys that the indexers of layers have chosen, by the number of the layer; `objective_weight` is
    what the objectives of indexers, means over the micro-batch, are multiplied by, 0 for none.
    `ids` [t] are this rank's tokens between blocks, where some layers choose experts by them. In a
    model with compressed blocks `whole_rotation` are cos and sin of all tokens of the sequences, on
    all CP ranks, and `compressed_rotations` those of this rank's tokens and of all in the layers
    that attend to blocks.
    """

    sequences: int
    blocks: BlocksBySource
    window_blocks: BlocksBySource
    cos: torch.Tensor
    sin: torch.Tensor
    first_sequence: int | None
    kernels: KernelSet
    key_tables: KeyTables
    counted: CountedTokens | None = None
    temperatures: torch.Tensor | None = None
    segments: Segments | None = None
    choices: dict[int, torch.Tensor] = field(default_factory=dict)
    objective_weight: float = 0.0
    whole_rotation: Rotation | None = None
    compressed_rotations: tuple[Rotation, Rotation] | None = None
    ids: torch.Tensor | None = None

    def bound_keys(self, rate: int) -> torch.Tensor:
        """Return the bounds [B,S,3] of keys of `rate` tokens (kernels.documents)."""
        return self.key_tables.bounds(rate).expand(self.sequences, -1, -1)

    def for_compressed(self) -> MicroBatchContext:
        """Return the context of layers that attend to compressed blocks."""
        if self.compressed_rotations is None:
            raise ValueError("the model has no compressed attention")
        (cos, sin), whole = self.compressed_rotations
        return replace(self, cos=cos, sin=sin, whole_rotation=whole)

    def for_sequences(self) -> MicroBatchContext:
        """Return the context of all tokens of the sequences, for rotations."""
        if self.whole_rotation is None:
            raise ValueError("the model has no compressed attention")
        cos, sin = self.whole_rotation
        return replace(self, cos=cos, sin=sin)

    def select_tokens(self, tokens: slice) -> MicroBatchContext:
        """Return the context of some of the tokens, as one sequence, for rotations."""
        cos, sin = (
            x.expand(self.sequences, *x.shape[-2:]).flatten(0, 1)[tokens]
            for x in (self.cos, self.sin)
        )
        return replace(self, sequences=1, cos=cos, sin=sin)

    def rotate(self, x_BSHD: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
        """Rotate queries or keys by position: the first columns of a head, where not all rotate.

        Interleaved pairs (2i, 2i + 1) are first moved to columns i and i + D/2. That changes no
        attention score, for it is done to queries and keys alike.
        """
        if interleaved:
            x_BSHD = x_BSHD.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        width = 2 * self.cos.shape[-1]
        if width == x_BSHD.shape[-1]:
            return Rotary.apply(x_BSHD, self.cos, self.sin, self.kernels)
        rotary, plain = x_BSHD.split((width, x_BSHD.shape[-1] - width), -1)
        rotated = Rotary.apply(rotary.contiguous(), self.cos, self.sin, self.kernels)
        return torch.cat((rotated, plain), -1)


class MicroBatchContextBuilder:
    """A builder of the contexts of micro-batches, with the rotary tables that they share.

    A table, cos and sin [S, D/2] fp32, covers the positions that this rank holds of a sequence. It
    covers all positions where they restart in every document, and in a model with compressed
    blocks, which has a second one, of the layers that attend to these.
    """

    def __init__(self, runtime: Runtime) -> None:
        spec = runtime.model.attention
        self._runtime = runtime
        self._restarts = runtime.workload.data.documents is DocumentMasking.RESTARTED
        seq_len = runtime.workload.seq_len
        positions = torch.arange(seq_len) if self._restarts else runtime.positions
        self._is_compressed = spec.kind is AttentionKind.COMPRESSED
        ropes = (spec.rope, spec.compressed_rope) if self._is_compressed else (spec.rope,)
        rotated = torch.arange(seq_len) if self._is_compressed else positions
        self._rotations = tuple(self._compute_rotation(rope, rotated) for rope in ropes)
        # A window as long as a sequence bounds nothing.
        self._window = runtime.model.max_window if runtime.model.max_window < seq_len else 0
        self._chunk = self._window if spec.chunked else 0
        self._temperatures = self._compute_temperatures(positions)
        self._full_blocks = self._plan_blocks(None)
        ends = torch.tensor((0, seq_len), device=runtime.device)
        self._full_key_tables = self._build_key_tables(ends, seq_len)

    def build(
        self,
        sequences: int,
        segments: Segments | None,
        first_sequence: int | None,
        counted: CountedTokens | None = None,
    ) -> MicroBatchContext:
        """Build the context of a micro-batch; `segments` None means one document per sequence."""
        blocks, window_blocks = self._full_blocks
        rotations = self._rotations
        key_tables = self._full_key_tables
        temperatures = self._temperatures
        if segments is not None:
            key_tables = self._build_key_tables(segments.cu_seqlens, sum(segments.lengths))
            blocks, window_blocks = self._plan_blocks(segments)
        if self._chunk:
            chunks = self._split_at_chunks(sequences, segments)
            window_blocks = plan_attention_blocks(self._runtime, chunks)
        if segments is not None and self._restarts:
            positions = torch.cat([torch.arange(length) for length in segments.lengths])
            positions = positions.view(sequences, -1).to(self._runtime.device)
            own = positions[:, self._runtime.positions]
            rotated = positions if self._is_compressed else own
            rotations = tuple((cos[rotated], sin[rotated]) for cos, sin in rotations)
            if temperatures is not None:
                temperatures = temperatures[own]
        whole: Rotation | None = None
        compressed: tuple[Rotation, Rotation] | None = None
        cos, sin = rotations[0]
        if self._is_compressed:
            whole = rotations[0]
            cos, sin = self._take_own(whole)
            compressed = self._take_own(rotations[1]), rotations[1]
        return MicroBatchContext(
            sequences=sequences,
            blocks=blocks,
            window_blocks=window_blocks,
            cos=cos,
            sin=sin,
            first_sequence=first_sequence,
            kernels=self._runtime.kernels,
            key_tables=key_tables,
            counted=counted,
            temperatures=temperatures,
            segments=segments,
            whole_rotation=whole,
            compressed_rotations=compressed,
        )

    def _take_own(self, rotation: Rotation) -> Rotation:
        """Return the rotation of this rank's tokens, of that of all tokens of sequences."""
        positions = self._runtime.positions
        cos, sin = rotation
        if len(positions) == cos.shape[-2]:
            return rotation
        return cos[..., positions, :], sin[..., positions, :]

    def _build_key_tables(self, ends: torch.Tensor, total: int) -> KeyTables:
        return KeyTables(
            ends,
            total=total,
            seq_len=self._runtime.workload.seq_len,
            rotation=self._rotations[1] if self._is_compressed else None,
            restarts=self._restarts,
        )

    def _compute_rotation(self, rope: RopeSpec, positions: torch.Tensor) -> Rotation:
        """Return cos and sin [positions, D/2] of a rope; a head may be rotated in part."""
        runtime = self._runtime
        spec = runtime.model.attention
        frequencies, factor = rope_frequencies(
            rope,
            spec.qk_rope_head_dim or round(spec.head_dim * rope.rotary_share),
            seq_len=runtime.workload.seq_len,
            rounded=find_family(runtime.model.family).rounds_yarn,
        )
        # In fp64: an fp32 product of a far position and a frequency loses part of the angle.
        angles = torch.outer(positions.double(), frequencies)
        return (
            (angles.cos() * factor).to(runtime.device, torch.float32),
            (angles.sin() * factor).to(runtime.device, torch.float32),
        )

    def _split_at_chunks(self, sequences: int, segments: Segments | None) -> Segments:
        """Return the segments that queries and keys of the same chunk form."""
        seq_len = self._runtime.workload.seq_len
        documents = (seq_len,) * sequences if segments is None else segments.lengths
        return build_segments(
            split_at_chunks(documents, seq_len, self._chunk, restarts=self._restarts),
            self._runtime.device,
        )

    def _compute_temperatures(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return 1 + scale * log(1 + floors before a position), None where there is none."""
        spec = self._runtime.model.attention
        if not spec.temperature_floor or self._runtime.workload.seq_len < spec.temperature_floor:
            return None
        floors = torch.floor((positions.double() + 1) / spec.temperature_floor)
        scales = 1 + spec.temperature_scale * torch.log1p(floors)
        return scales.to(self._runtime.device, torch.float32)[:, None, None]

    def _plan_blocks(self, segments: Segments | None) -> tuple[BlocksBySource, BlocksBySource]:
        blocks = plan_attention_blocks(self._runtime, segments)
        # Blocks of chunks are planned by `build`, as those of segments.
        if not self._window or self._chunk:
            return blocks, blocks
        return blocks, plan_attention_blocks(self._runtime, segments, self._window)


CoreAttention = Callable[..., tuple[torch.Tensor]]


def attend_and_project(
    runtime: Runtime,
    core: CoreAttention,
    inputs: tuple[torch.Tensor, ...],
    o: Weight,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run core attention and project its output by `o`: [t,H].

    `inputs` are each [B,S,*,*] as `scatter_heads` gives them. The sigmoid of a gate [B,S,h,V]
    scales the output.
    """
    manager = runtime.saved_tensors
    offloads_output = runtime.offloads(Offload.ATTN_PROJ)
    with (
        manager.offload(*inputs, enabled=runtime.offloads(Offload.CORE_ATTN)),
        # Attention keeps its output too; a gate lies beside queries that stay.
        manager.offload_saved(
            dims=4, staying=() if gate is None else (gate,), enabled=offloads_output
        ),
    ):
        if runtime.recomputes(Recompute.CORE_ATTN):
            (out,) = run_checkpointed(runtime.counters, core, *inputs)
        else:
            (out,) = core(*inputs)
        out = gather_heads(runtime, out)
        with manager.offload(out, enabled=offloads_output):
            if gate is not None:
                out = SigmoidGate.apply(out, gate)
            rows = out.flatten(0, 1).flatten(1)
            projected = RowParallelLinear.apply(
                rows,
                o.weight,
                runtime.mesh.tensor_parallel,
                o.products,
                runtime.weight_grads,
            )
            return add_row_adapter(runtime, o, projected, rows)


class Attention(nn.Module):
    """Grouped-query attention of layer `layer_number`: [t,H] -> [t,H].

    It has optional biases, q/k norm, sinks and window, and rotary positions; heads are sharded over
    TP.
    """

    ledger_module = Module.ATTENTION

    def __init__(self, runtime: Runtime, layer_number: int) -> None:
        super().__init__()
        window = runtime.model.layer_window(layer_number)
        self._window = window if window < runtime.workload.seq_len else 0
        spec = runtime.model.attention
        hidden = runtime.model.hidden_size
        self._spec = spec
        self._runtime = runtime
        rope_layers = runtime.model.rope_layers
        # MTP depths are like the last layer.
        self._rotates = not rope_layers or rope_layers[min(layer_number, len(rope_layers) - 1)]
        # A head's queries, and the gate of its output after them.
        q_rows = spec.q_width * (spec.q_matrices)
        self.q = Weight(runtime, q_rows, hidden, sharding=TP_ROWS)
        self.k = Weight(runtime, spec.kv_width, hidden, sharding=TP_ROWS)
        self.v = Weight(runtime, spec.kv_width, hidden, sharding=TP_ROWS)
        if spec.qkv_bias:
            self.q.bias = Vector(runtime, q_rows, sharding=TP_ROWS)
            self.k.bias = Vector(runtime, spec.kv_width, sharding=TP_ROWS)
            self.v.bias = Vector(runtime, spec.kv_width, sharding=TP_ROWS)
        # PER_HEAD norms each head over head_dim; FULL norms all heads together.
        if spec.qk_norm in (QkNorm.PER_HEAD, QkNorm.PER_HEAD_ROTATED):
            self.q_norm = Norm(runtime, spec.head_dim)
            self.k_norm = Norm(runtime, spec.head_dim)
        elif spec.qk_norm is QkNorm.FULL:
            self.q_norm = Norm(runtime, spec.q_width, TP_ROWS)
            self.k_norm = Norm(runtime, spec.kv_width, TP_ROWS)
        self.sinks = Vector(runtime, spec.heads, sharding=TP_ROWS) if spec.sinks else None
        self._slopes: torch.Tensor | None = None
        if runtime.model.position is not PositionKind.ROPE:
            self._rotates = False
        if runtime.model.position is PositionKind.ALIBI:
            tp = runtime.mesh.group("tp")
            slopes = torch.tensor(alibi_slopes(spec.heads), device=runtime.device)
            self._slopes = slopes.unflatten(0, (tp.size, -1))[tp.index].clone()
        self.o = Weight(runtime, hidden, spec.out_width, sharding=TP_COLUMNS)
        if spec.out_bias:
            self.o.bias = Vector(runtime, hidden)

    def forward(self, x_tH: torch.Tensor, context: MicroBatchContext) -> torch.Tensor:
        runtime = self._runtime
        spec = self._spec
        with runtime.counters.scopes.enter(Module.ATTENTION):
            q, k, v, gate = self._project_qkv(x_tH)
            local_heads = spec.heads // runtime.mesh.group("tp").size
            # Not a view: beside a gate the queries are every second part of a head's rows.
            q_BSHD = q.reshape(context.sequences, -1, local_heads, spec.head_dim)
            seq_len = q_BSHD.shape[1]
            k_BSGD = k.reshape(context.sequences, seq_len, -1, spec.head_dim)
            v_BSGD = v.view(context.sequences, seq_len, -1, spec.v_head_dim)
            rotated = self._rotate(q_BSHD, k_BSGD, context)
            heads = tuple(scatter_heads(runtime, x) for x in (*rotated, v_BSGD))
            blocks = context.window_blocks if self._window else context.blocks
            core = partial(self._attend, blocks)
            gate_BSHD = None if gate is None else gate.unflatten(0, (context.sequences, -1))
            out = attend_and_project(runtime, core, heads, self.o, gate_BSHD)
            return self.o.add_bias(out, hidden_replica_group(runtime))

    def _project_qkv(
        self, x_tH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Project queries, keys and values [T, width of this rank], biased and normed.

        The last is the gate [T, heads of this rank, D] of the output, None without one.
        """
        runtime = self._runtime
        spec = self._spec
        tp = runtime.mesh.tensor_parallel
        is_offloaded = runtime.offloads(Offload.QKV_LINEAR)
        manager = runtime.saved_tensors
        weights = self.q.weight, self.k.weight, self.v.weight
        with (
            manager.offload(x_tH, enabled=is_offloaded),
            manager.keep_converted(x_tH, self.q.products),
        ):
            q, k, v = ColumnParallelLinear.apply(
                x_tH, tp, self.q.products, runtime.weight_grads, *weights
            )
            q, k, v = (
                add_column_adapter(runtime, part, y, x_tH)
                for part, y in ((self.q, q), (self.k, k), (self.v, v))
            )
        q, k, v = self.q.add_bias(q), self.k.add_bias(k), self.v.add_bias(v)
        gate = None
        if spec.output_gate:
            q, gate = q.unflatten(1, (-1, 2, spec.head_dim)).unbind(2)
        # Before heads are gathered: the mean of this norm is over the shards of all ranks.
        if spec.qk_norm is QkNorm.FULL:
            q, k = self.q_norm(q.flatten(1)), self.k_norm(k)
        if tp.group.size > spec.kv_heads:
            k, v = GatherKvHeads.apply(k, v, tp.group, spec.kv_heads)
        # After it: the mean is over a whole head.
        if spec.qk_norm is QkNorm.PER_HEAD:
            q = self.q_norm(q.view(len(q), -1, spec.head_dim))
            k = self.k_norm(k.unflatten(1, (-1, spec.head_dim)))
        return q, k, v, gate

    def _rotate(
        self, q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, context: MicroBatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, norm them where that comes after, and scale the queries."""
        spec = self._spec
        if not self._rotates:
            if context.temperatures is None:
                return q_BSHD, k_BSGD
            return (q_BSHD * context.temperatures).to(q_BSHD.dtype), k_BSGD
        interleaved = spec.rope.interleaved
        q = context.rotate(q_BSHD, interleaved=interleaved)
        k = context.rotate(k_BSGD, interleaved=interleaved)
        if spec.qk_norm is QkNorm.PER_HEAD_ROTATED:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.qk_norm is QkNorm.UNWEIGHTED:
            runtime = self._runtime
            settings = NormSettings(
                eps=runtime.model.norm_eps, kernels=runtime.kernels, keeps_scale=True
            )
            q, k = RmsNorm.apply(q, None, settings), RmsNorm.apply(k, None, settings)
        multiplier = self._runtime.model.multipliers.attention
        if multiplier != 1:  # the kernels divide by sqrt(D)
            q = q * (multiplier * math.sqrt(spec.head_dim))
        return q, k

    def _attend(
        self,
        blocks: BlocksBySource,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        sinks = None if self.sinks is None else self.sinks.weight
        if self._slopes is not None:
            blocks = add_slopes(self._runtime, blocks, self._slopes)
        window = 0 if self._spec.chunked else self._window
        out = attend(self._runtime, blocks, q_BSHD, k_BSGD, v_BSGD, sinks=sinks, window=window)
        return (out,)
