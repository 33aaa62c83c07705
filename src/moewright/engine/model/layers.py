"""The parts of a transformer layer, and the embedding and head around them.

Parameter names follow rules.inventory, so that a state means the same in any layout. Each class
that owns parameters says which module of the ledger they belong to.

Shapes: T = B*S tokens, t = T / tp those of this rank between blocks, H hidden, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from moewright.engine.comm.collectives import Group
from moewright.engine.comm.tensor_placement import Sharding, TensorPlacement, place_tensor
from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.memory.saved_tensors import run_checkpointed
from moewright.engine.model import vocab_parallel
from moewright.engine.model.activations import SwiGlu
from moewright.engine.model.attention_blocks import BlocksBySource
from moewright.engine.model.autograd import GatherKvHeads, RmsNorm, Rotary
from moewright.engine.model.biases import AddBias
from moewright.engine.model.context_parallel import (
    attend,
    gather_heads,
    plan_attention_blocks,
    scatter_heads,
)
from moewright.engine.model.linear_loss import LinearCrossEntropy
from moewright.engine.model.parallel_linear import ColumnParallelLinear, RowParallelLinear
from moewright.engine.model.rope import rope_frequencies
from moewright.engine.runtime import Runtime
from moewright.rules.parameters import has_weight_decay
from moewright.rules.recompute import loss_chunk_columns
from moewright.spec.layout import Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import QkNorm
from moewright.spec.workload import DocumentMasking


def hidden_replica_group(run: Runtime) -> Group | None:
    """The ranks that have the same hidden states: those of the TP group, without sequence
    parallelism."""
    return None if run.mesh.layout.sp else run.mesh.group("tp")


class Weight(nn.Module):
    """This rank's part of a named tensor `weight` of `shape`, on the meta device until the flat
    buffers own it.

    Whoever takes `weight` calls `arrive` first: its values may still be on their way from other
    ranks. `rows` as in Placement.
    """

    suffix = "weight"

    def __init__(
        self, run: Runtime, *shape: int, sharding: Sharding = (), row_indices: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.ensure_ready: Callable[[], object] | None = None
        self.bias: Vector | None = None
        self.placement = replace(place_tensor(run.mesh, shape, sharding), row_indices=row_indices)
        self.weight = nn.Parameter(
            torch.empty(self.placement.local_shape, dtype=run.dtype, device="meta")
        )

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.ensure_ready is not None:
            self.ensure_ready()
        return super().__getattr__(name)

    def add_bias(self, y: torch.Tensor, sharers: Group | None = None) -> torch.Tensor:
        """y plus the bias, where there is one; `sharers` as in AddBias."""
        return y if self.bias is None else AddBias.apply(y, self.bias.weight.flatten(), sharers)


class Vector(Weight):
    """A parameter that bears the name of its module: a bias, or sinks."""

    own_name = ""


class Norm(Weight):
    """RMSNorm over the last dim, which may be cut over TP. One that is `replayed` keeps its input
    alone.

    Without sequence parallelism the ranks of a TP group norm the same hidden states (not queries
    and keys, whose heads are cut): each then makes its part of the weight's gradient, which is
    summed over them as with it.
    """

    ledger_module = Module.NORM

    def __init__(
        self,
        run: Runtime,
        width: int,
        sharding: Sharding = (),
        *,
        recompute: bool = False,
        on_hidden_states: bool = False,
    ) -> None:
        super().__init__(run, width, sharding=sharding)
        self._eps, self._keep_scale, self._kernels = run.model.norm_eps, not recompute, run.kernels
        self._across = run.mesh.group("tp") if sharding and run.mesh.layout.tp > 1 else None
        self._sharers = hidden_replica_group(run) if on_hidden_states else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RmsNorm.apply(
            x, self.weight, self._eps, self._across, self._sharers, self._keep_scale, self._kernels
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """How the tokens of a micro-batch lie: `count` sequences, one after the other; what each
    attends, and in layers with a sliding window what is `near`; the rotation of each, cos and sin
    [S, D/2] or [count, S, D/2] fp32.

    `first` is the number of the first sequence over all of training; None in evaluation.
    """

    sequences: int
    blocks: BlocksBySource
    window_blocks: BlocksBySource
    cos: torch.Tensor
    sin: torch.Tensor
    first_sequence: int | None
    kernels: KernelSet

    def rotate(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        return Rotary.apply(x_BSHD, self.cos, self.sin, self.kernels)


class AttentionContextBuilder:
    """cos and sin [S, D/2] fp32 of the positions that this rank holds of a sequence, made once; of
    all positions where documents restart them.
    """

    def __init__(self, run: Runtime) -> None:
        spec = run.model.attention
        # A head may be rotated in part (MLA). gpt-oss alone does not round the bounds of its yarn
        # blend.
        turning, factor = rope_frequencies(
            spec.rope, spec.qk_rope_head_dim or spec.head_dim, rounded=run.model.family != "gpt_oss"
        )
        self._run, self._restarted = run, run.workload.data.documents is DocumentMasking.RESTARTED
        places = torch.arange(run.workload.seq_len) if self._restarted else run.positions
        angles = torch.outer(places.double(), turning)
        self.cos = (angles.cos() * factor).to(run.device, torch.float32)
        self.sin = (angles.sin() * factor).to(run.device, torch.float32)
        self._window = run.model.max_window if run.model.max_window < run.workload.seq_len else 0
        self._whole = self._meetings(None)

    def build(self, count: int, runs: Segments | None, first: int | None) -> AttentionContext:
        """Those of a micro-batch of `count` sequences that consist of `runs`."""
        met, near = self._whole if runs is None else self._meetings(runs)
        cos, sin = self.cos, self.sin
        if runs is not None and self._restarted:
            places = torch.cat([torch.arange(length) for length in runs.lengths]).view(count, -1)
            places = places[:, self._run.positions].to(cos.device)
            cos, sin = cos[places], sin[places]
        return AttentionContext(
            sequences=count,
            blocks=met,
            window_blocks=near,
            cos=cos,
            sin=sin,
            first_sequence=first,
            kernels=self._run.kernels,
        )

    def _meetings(self, runs: Segments | None) -> tuple[BlocksBySource, BlocksBySource]:
        met = plan_attention_blocks(self._run, runs)
        return met, plan_attention_blocks(self._run, runs, self._window) if self._window else met


Core = Callable[..., tuple[torch.Tensor]]


def attend_and_project(
    run: Runtime, core: Core, inputs: tuple[torch.Tensor, ...], o: torch.Tensor
) -> torch.Tensor:
    """Attention of `inputs`, each [B,S,*,*] as `to_heads` gives them, and the projection `o` of its
    output: [t,H]."""
    moved = run.offloads(Offload.ATTN_PROJ)
    with (
        run.saved_tensors.offload(*inputs, enabled=run.offloads(Offload.CORE_ATTN)),
        run.saved_tensors.offload_saved(dims=4, enabled=moved),  # attention keeps its output too
    ):
        (out,) = (
            run_checkpointed(run.counters, core, *inputs)
            if run.recomputes(Recompute.CORE_ATTN)
            else core(*inputs)
        )
        out = gather_heads(run, out)
        with run.saved_tensors.offload(out, enabled=moved):
            return RowParallelLinear.apply(
                out.flatten(0, 1).flatten(1), o, run.mesh.tensor_parallel, run.counters
            )


class Attention(nn.Module):
    """Grouped-query attention of layer `number`, with optional biases, q/k norm, sinks and window,
    and rotary positions; heads cut over TP: [t,H] -> [t,H].
    """

    ledger_module = Module.ATTENTION

    def __init__(self, run: Runtime, number: int) -> None:
        super().__init__()
        window = run.model.layer_window(number)
        self._window = window if window < run.workload.seq_len else 0
        spec, hidden, rows = run.model.attention, run.model.hidden_size, (("tp", 0),)
        self._spec, self._run = spec, run
        self.q = Weight(run, spec.q_width, hidden, sharding=rows)
        self.k = Weight(run, spec.kv_width, hidden, sharding=rows)
        self.v = Weight(run, spec.kv_width, hidden, sharding=rows)
        if spec.qkv_bias:
            for part, width in (
                (self.q, spec.q_width),
                (self.k, spec.kv_width),
                (self.v, spec.kv_width),
            ):
                part.bias = Vector(run, width, sharding=rows)
        # PER_HEAD norms each head over head_dim; FULL norms all heads together.
        if spec.qk_norm is QkNorm.PER_HEAD:
            self.q_norm, self.k_norm = Norm(run, spec.head_dim), Norm(run, spec.head_dim)
        elif spec.qk_norm is QkNorm.FULL:
            self.q_norm, self.k_norm = Norm(run, spec.q_width, rows), Norm(run, spec.kv_width, rows)
        self.sinks = Vector(run, spec.heads, sharding=rows) if spec.sinks else None
        self.o = Weight(run, hidden, spec.out_width, sharding=(("tp", 1),))
        if spec.out_bias:
            self.o.bias = Vector(run, hidden)

    def forward(self, x_tH: torch.Tensor, batch: AttentionContext) -> torch.Tensor:
        run, spec, books, tp = (
            self._run,
            self._spec,
            self._run.counters,
            self._run.mesh.tensor_parallel,
        )
        size = tp.group.size
        with books.attribute_to(Module.ATTENTION):
            with run.saved_tensors.offload(x_tH, enabled=run.offloads(Offload.QKV_LINEAR)):
                q, k, v = ColumnParallelLinear.apply(
                    x_tH, tp, books, self.q.weight, self.k.weight, self.v.weight
                )
            q, k, v = self.q.add_bias(q), self.k.add_bias(k), self.v.add_bias(v)
            if spec.qk_norm is QkNorm.FULL:
                q, k = self.q_norm(q), self.k_norm(k)
            if size > spec.kv_heads:
                k, v = GatherKvHeads.apply(k, v, tp.group, spec.kv_heads)
            if spec.qk_norm is QkNorm.PER_HEAD:
                q, k = (
                    norm(y.unflatten(1, (-1, spec.head_dim)))
                    for norm, y in ((self.q_norm, q), (self.k_norm, k))
                )
            q_BSHD = batch.rotate(q.reshape(batch.sequences, -1, spec.heads // size, spec.head_dim))
            k_BSGD = batch.rotate(k.reshape(batch.sequences, q_BSHD.shape[1], -1, spec.head_dim))
            v_BSGD = v.view(batch.sequences, q_BSHD.shape[1], -1, spec.v_head_dim)
            heads = tuple(scatter_heads(run, x) for x in (q_BSHD, k_BSGD, v_BSGD))
            out = attend_and_project(
                run,
                partial(self._core, batch.window_blocks if self._window else batch.blocks),
                heads,
                self.o.weight,
            )
            return self.o.add_bias(out, hidden_replica_group(run))

    def _core(
        self, met: BlocksBySource, q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor
    ) -> tuple[torch.Tensor]:
        sinks = None if self.sinks is None else self.sinks.weight
        return (attend(self._run, met, q_BSHD, k_BSGD, v_BSGD, sinks=sinks, window=self._window),)


class Mlp(nn.Module):
    """SwiGLU MLP of width F, cut over TP: [t,H] -> [t,H]; `kind` is DENSE_MLP or SHARED_EXPERTS."""

    def __init__(self, run: Runtime, width: int, kind: Module) -> None:
        super().__init__()
        self.ledger_module = kind
        self._run = run
        if kind is Module.DENSE_MLP:
            self._replayed = run.recomputes(Recompute.MLP)
        else:  # a replayed MoE block makes it again as a part of itself
            self._replayed = run.recomputes(Recompute.SHARED_EXPERTS) and not run.recomputes(
                Recompute.MOE
            )
        self.gate_up = Weight(run, 2, width, run.model.hidden_size, sharding=(("tp", 1),))
        self.down = Weight(run, run.model.hidden_size, width, sharding=(("tp", 1),))
        if kind is Module.DENSE_MLP and run.model.mlp_bias:
            self.gate_up.bias = Vector(run, 2, width, sharding=(("tp", 1),))
            self.down.bias = Vector(run, run.model.hidden_size)

    def forward(self, x_tH: torch.Tensor) -> torch.Tensor:
        with self._run.counters.attribute_to(self.ledger_module):
            (out,) = (
                run_checkpointed(self._run.counters, self._block, x_tH)
                if self._replayed
                else self._block(x_tH)
            )
            return out

    def _block(self, x_tH: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._second(x_tH, self._first(x_tH)),)

    def _first(self, x_tH: torch.Tensor) -> torch.Tensor:
        """Up to the activation."""
        books, tp = self._run.counters, self._run.mesh.tensor_parallel
        (hidden,) = ColumnParallelLinear.apply(x_tH, tp, books, self.gate_up.weight.flatten(0, 1))
        return SwiGlu.apply(self.gate_up.add_bias(hidden), None, self._run.kernels)

    def _second(self, x_tH: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """From the activation of `x` on."""
        out = RowParallelLinear.apply(
            active, self.down.weight, self._run.mesh.tensor_parallel, self._run.counters
        )
        return self.down.add_bias(out, hidden_replica_group(self._run))


class VocabTable(Weight):
    """A row of width H for each token, cut over TP."""

    def __init__(self, run: Runtime) -> None:
        super().__init__(run, run.model.vocab_size, run.model.hidden_size, sharding=(("tp", 0),))
        self.vocab_shard = vocab_parallel.VocabShard(
            tp=run.mesh.tensor_parallel,
            start=self.placement.offsets[0],
            size=self.placement.unpadded_shape[0],
        )


class Embedding(VocabTable):
    """Token ids [T] -> [t,H]."""

    ledger_module = Module.EMBEDDING

    def __init__(self, run: Runtime) -> None:
        super().__init__(run)
        self._run = run

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        with self._run.counters.attribute_to(Module.EMBEDDING):
            return vocab_parallel.VocabParallelEmbedding.apply(ids_T, self.weight, self.vocab_shard)


class OutputHead(VocabTable):
    """The output projection; absent when the embedding is tied to it."""

    ledger_module = Module.HEAD


def compute_token_loss(
    run: Runtime, x_tH: torch.Tensor, table: VocabTable, targets_T: torch.Tensor, needs_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood [T] in fp32, 0 where target < 0, and this rank's logits [T,V] under
    the projection; under recompute=loss none, [0], unless they are asked for `whole`.
    """
    with run.counters.attribute_to(Module.HEAD):
        if run.recomputes(Recompute.LOSS) and not needs_logits:
            most = loss_chunk_columns(run.model, run.mesh.layout)
            nll = LinearCrossEntropy.apply(
                x_tH, table.weight, targets_T, table.vocab_shard, most, run.counters, run.kernels
            )
            return nll, x_tH.new_zeros(0)
        (logits_TV,) = ColumnParallelLinear.apply(
            x_tH, run.mesh.tensor_parallel, run.counters, table.weight
        )
        return vocab_parallel.VocabParallelCrossEntropy.apply(
            logits_TV, targets_T, table.vocab_shard, run.kernels
        ), logits_TV.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParameter:
    """A parameter's place in the model: `owner.weight` is the tensor, `name` its global name."""

    name: str
    owner: Weight
    module: Module

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner.weight

    @property
    def placement(self) -> TensorPlacement:
        return self.owner.placement

    @property
    def has_weight_decay(self) -> bool:
        return has_weight_decay(self.name, len(self.placement.local_shape))


def list_parameters(model: nn.Module) -> tuple[NamedParameter, ...]:
    """Every parameter of the model in registration order."""
    found: list[NamedParameter] = []

    def walk(module: nn.Module, prefix: str, inherited: Module) -> None:
        owner = _ledger_module(module, inherited)
        if isinstance(module, Weight):
            found.append(
                NamedParameter(
                    name=(prefix + module.suffix).removesuffix("."), owner=module, module=owner
                )
            )
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", owner)

    walk(model, "", Module.OTHER)
    return tuple(found)


def _ledger_module(module: nn.Module, inherited: Module) -> Module:
    own: Module = getattr(module, "ledger_module", inherited)
    # A norm inside attention (q/k norm) is attention's, and all of an MTP depth is the depth's.
    inside = inherited is Module.MTP or (own is Module.NORM and inherited is Module.ATTENTION)
    return inherited if inside else own
