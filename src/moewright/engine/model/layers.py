"""The parts of a transformer layer, and the embedding and head around them.

Parameter names follow rules.shapes.parameters, so that a state means the same in any layout. Each
class that owns parameters says which module of the ledger they belong to.

Shapes: T = B*S tokens, t = T / tp those of this rank between blocks, H hidden, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moewright.engine.comm.collectives import Group
from moewright.engine.comm.mesh import Sharding, TensorPlacement, place_tensor
from moewright.engine.kernels.products import WIDE_PRODUCTS, Products
from moewright.engine.memory.saved_tensors import run_checkpointed
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model import vocab_parallel
from moewright.engine.model.activations import build_activation
from moewright.engine.model.adapters import (
    add_column_adapter,
    add_replicated_adapter,
    add_row_adapter,
)
from moewright.engine.model.autograd import LayerNorm, NormSettings, RmsNorm
from moewright.engine.model.biases import AddBias, AddBiasInPlace
from moewright.engine.model.parallel_linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from moewright.engine.model.vocab_parallel import ChunkedLossSettings, LinearCrossEntropy
from moewright.engine.runtime import Runtime
from moewright.rules.saved.recompute import loss_chunk_columns
from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS, has_weight_decay
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import NormKind


def hidden_replica_group(runtime: Runtime) -> Group | None:
    """Return the ranks that have the same hidden states as this one.

    Without sequence parallelism that is the TP group; with it each rank has tokens of its own, and
    there is none.
    """
    if runtime.mesh.layout.sp:
        return None
    return runtime.mesh.group("tp")


class Weight(nn.Module):
    """This rank's part of a named tensor `weight` of a global `shape`.

    It is on the meta device until the flat buffers own it. Reading `weight` calls
    `ensure_ready` first: its values may still be on their way from other ranks. A weight that is
    held in fewer bits is made anew by every reading. `row_indices` as in TensorPlacement.
    """

    suffix = "weight"

    def __init__(
        self,
        runtime: Runtime,
        *shape: int,
        sharding: Sharding = (),
        row_indices: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.ensure_ready: Callable[[], object] | None = None
        self.bias: Vector | None = None
        self.is_trained = True
        # What multiplies by it, where it is the first or only weight of a linear layer.
        self.products: Products = runtime.products
        # The adapter, where the weight has one (model.fine_tuning).
        self.lora_a: Weight | None = None
        self.lora_b: Weight | None = None
        self.lora_factor = 0.0
        # Makes the weight where it is held in fewer bits (optim.frozen_weights).
        self.unpack: Callable[[], torch.Tensor] | None = None
        placement = place_tensor(runtime.mesh, shape, sharding)
        self.placement = replace(placement, row_indices=row_indices)
        self.weight = nn.Parameter(
            torch.empty(self.placement.local_shape, dtype=runtime.dtype, device="meta")
        )

    def __getattr__(self, name: str) -> Any:
        # torch keeps parameters apart from attributes, so that every reading of one comes here.
        if name == "weight" and self.ensure_ready is not None:
            self.ensure_ready()
        if name == "weight" and self.unpack is not None:
            return self.unpack()
        return super().__getattr__(name)

    def add_bias(self, y: torch.Tensor, replica_group: Group | None = None) -> torch.Tensor:
        """Return y plus the bias, where there is one; `replica_group` as in AddBias."""
        if self.bias is None:
            return y
        return AddBias.apply(y, self.bias.weight.flatten(), replica_group)


def project_replicated(
    runtime: Runtime, x_tK: torch.Tensor, linear: Weight, *, is_wide: bool = False
) -> torch.Tensor:
    """Project a rank's own tokens [t,K] by a weight that every TP rank has whole: [t,N].

    With `is_wide` the product has 16 bits or more in every precision.
    """
    replicas = hidden_replica_group(runtime)
    products = WIDE_PRODUCTS if is_wide else linear.products
    y_tN = ReplicatedLinear.apply(x_tK, linear.weight, runtime.counters, products, replicas)
    return add_replicated_adapter(runtime, linear, y_tN, x_tK)


def project_out(runtime: Runtime, rows: torch.Tensor, linear: Weight) -> torch.Tensor:
    """Project rows [T, columns of this rank] by `linear`, which TP cuts by columns: [t,H]."""
    with runtime.saved_tensors.keep_converted(rows, linear.products):
        projected = RowParallelLinear.apply(
            rows,
            linear.weight,
            runtime.mesh.tensor_parallel,
            linear.products,
            runtime.weight_grads,
        )
        return add_row_adapter(runtime, linear, projected, rows)


class Vector(Weight):
    """A parameter that bears the name of its module: a bias, or sinks."""

    suffix = ""


class Norm(Weight):
    """An RMSNorm over the last dim, which may be sharded over TP.

    With `recompute` it keeps only its input for backward. `on_hidden_states` tells it from a norm
    of queries and keys, whose heads are sharded: without sequence parallelism the ranks of a TP
    group norm the same hidden states, so each computes a part of the weight's gradient, and the
    parts are summed over the group, as they are with sequence parallelism. `eps` None is the
    model's.
    """

    ledger_module = Module.NORM

    def __init__(
        self,
        runtime: Runtime,
        width: int,
        sharding: Sharding = (),
        *,
        recompute: bool = False,
        on_hidden_states: bool = False,
        eps: float | None = None,
    ) -> None:
        super().__init__(runtime, width, sharding=sharding)
        is_sharded = bool(sharding) and runtime.mesh.layout.tp > 1
        self._settings = NormSettings(
            eps=runtime.model.norm_eps if eps is None else eps,
            kernels=runtime.kernels,
            keeps_scale=not recompute,
            shard_group=runtime.mesh.group("tp") if is_sharded else None,
            replica_group=hidden_replica_group(runtime) if on_hidden_states else None,
            zero_centered=runtime.model.zero_centered_norms,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RmsNorm.apply(x, self.weight, self._settings)


class HiddenNorm(Norm):
    """The norm of hidden states [t,H], of the model's kind: RMSNorm, or LayerNorm with a bias."""

    def __init__(self, runtime: Runtime, *, recompute: bool = False) -> None:
        hidden = runtime.model.hidden_size
        super().__init__(runtime, hidden, recompute=recompute, on_hidden_states=True)
        if runtime.model.norm is NormKind.LAYER:
            self.bias = Vector(runtime, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return super().forward(x)
        return LayerNorm.apply(x, self.weight, self.bias.weight, self._settings)


class Mlp(nn.Module):
    """An MLP of width F, SwiGLU or squared ReLU, sharded over TP: [t,H] -> [t,H].

    `kind` is DENSE_MLP or SHARED_EXPERTS.
    """

    def __init__(self, runtime: Runtime, width: int, kind: Module) -> None:
        super().__init__()
        hidden = runtime.model.hidden_size
        self.ledger_module = kind
        self._runtime = runtime
        if kind is Module.DENSE_MLP:
            self._recomputes = runtime.recomputes(Recompute.MLP)
        else:  # a recomputed MoE block recomputes its shared experts anyway
            self._recomputes = runtime.recomputes(
                Recompute.SHARED_EXPERTS
            ) and not runtime.recomputes(Recompute.MOE)
        self._activate = build_activation(runtime.model, runtime.kernels)
        stacked = runtime.model.fc1_stack
        sharding = (("tp", len(stacked)),)
        first = Weight(runtime, *stacked, width, hidden, sharding=sharding)
        self._first_name = runtime.model.fc1_name
        self.add_module(self._first_name, first)
        self.down = Weight(runtime, hidden, width, sharding=TP_COLUMNS)
        if kind is Module.DENSE_MLP and runtime.model.mlp_bias:
            first.bias = Vector(runtime, *stacked, width, sharding=sharding)
            self.down.bias = Vector(runtime, hidden)

    def forward(self, x_tH: torch.Tensor) -> torch.Tensor:
        with self._runtime.counters.scopes.enter(self.ledger_module):
            if self._recomputes:
                (out,) = run_checkpointed(self._runtime.counters, self._block, x_tH)
            else:
                (out,) = self._block(x_tH)
            return out

    @property
    def _first(self) -> Weight:
        weight = self.get_submodule(self._first_name)
        assert isinstance(weight, Weight)
        return weight

    def _block(self, x_tH: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._run_second(x_tH, self._run_first(x_tH)),)

    def _run_first(self, x_tH: torch.Tensor) -> torch.Tensor:
        """Run the first linear and the activation."""
        runtime = self._runtime
        first = self._first
        # The router keeps the same input as shared experts, as it is.
        kept_for = first.products
        if self.ledger_module is Module.SHARED_EXPERTS:
            kept_for = WIDE_PRODUCTS
        with runtime.saved_tensors.keep_converted(x_tH, kept_for):
            (hidden,) = ColumnParallelLinear.apply(
                x_tH,
                runtime.mesh.tensor_parallel,
                first.products,
                runtime.weight_grads,
                # Gate and up lie one after the other, so that one product computes both.
                first.weight.flatten(0, -2),
            )
        hidden = add_column_adapter(runtime, first, hidden, x_tH)
        return self._activate(first.add_bias(hidden), None)

    def _run_second(self, x_tH: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Run the second linear on the activation; `x_tH`, the MLP's input, is for subclasses."""
        runtime = self._runtime
        out = project_out(runtime, active, self.down)
        return self.down.add_bias(out, hidden_replica_group(runtime))


class VocabTable(Weight):
    """A table with one row of width H per token id, sharded over TP."""

    def __init__(self, runtime: Runtime) -> None:
        model = runtime.model
        super().__init__(runtime, model.vocab_size, model.hidden_size, sharding=TP_ROWS)
        self.vocab_shard = vocab_parallel.VocabShard(
            tp=runtime.mesh.tensor_parallel,
            start=self.placement.offsets[0],
            size=self.placement.unpadded_shape[0],
        )


class Embedding(VocabTable):
    """The embedding: token ids [T] -> [t,H]."""

    ledger_module = Module.EMBEDDING

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._runtime = runtime

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        with self._runtime.counters.scopes.enter(Module.EMBEDDING):
            return vocab_parallel.VocabParallelEmbedding.apply(ids_T, self.weight, self.vocab_shard)


class OutputHead(VocabTable):
    """The output projection, with a bias where the model has one; absent when it is tied."""

    ledger_module = Module.HEAD

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        if runtime.model.head_bias:
            self.bias = Vector(runtime, runtime.model.vocab_size, sharding=TP_ROWS)


def compute_token_loss(
    runtime: Runtime,
    x_tH: torch.Tensor,
    table: VocabTable,
    targets_T: torch.Tensor,
    needs_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood [T] in fp32, 0 where target < 0, and this rank's logits.

    The logits are [T,V]; under recompute=loss they are not kept, and are [0] unless `needs_logits`.
    """
    shard = table.vocab_shard
    with runtime.counters.scopes.enter(Module.HEAD):
        if runtime.recomputes(Recompute.LOSS) and not needs_logits:
            max_columns = loss_chunk_columns(runtime.model, runtime.mesh.layout)
            bias = None if table.bias is None else table.bias.weight
            settings = ChunkedLossSettings(
                shard=shard, max_columns=max_columns, kernels=runtime.kernels
            )
            nll = LinearCrossEntropy.apply(x_tH, table.weight, bias, targets_T, settings)
            return nll, x_tH.new_zeros(0)
        # Only schedules with rows for weight gradients put off that of the table, which a depth or
        # the embedding may use too: autograd sums the gradients of one backward.
        is_split = runtime.mesh.layout.schedule.splits_backward
        weight_grads = runtime.weight_grads if is_split else WeightGradStore()
        tp = replace(runtime.mesh.tensor_parallel, is_pipelined=False)  # as in Megatron-LM
        (logits_TV,) = ColumnParallelLinear.apply(
            x_tH, tp, WIDE_PRODUCTS, weight_grads, table.weight
        )
        if table.bias is not None:
            logits_TV = AddBiasInPlace.apply(logits_TV, table.bias.weight, None)
        nll = vocab_parallel.VocabParallelCrossEntropy.apply(
            logits_TV, targets_T, shard, runtime.kernels
        )
        # Who reads the logits must not add to the graph of the loss.
        return nll, logits_TV.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParameter:
    """A parameter with its global name; `owner.weight` is the tensor."""

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
    """List every parameter of the model in registration order.

    One that several modules share is listed once, by the first of its names.
    """
    parameters: list[NamedParameter] = []
    owners: set[Weight] = set()

    def visit(module: nn.Module, prefix: str, inherited: Module) -> None:
        ledger_module = _ledger_module(module, inherited)
        if isinstance(module, Weight) and module not in owners:
            owners.add(module)
            name = (prefix + module.suffix).removesuffix(".")
            parameters.append(NamedParameter(name=name, owner=module, module=ledger_module))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", ledger_module)

    visit(model, "", Module.OTHER)
    return tuple(parameters)


def _ledger_module(module: nn.Module, inherited: Module) -> Module:
    own: Module = getattr(module, "ledger_module", inherited)
    # A norm inside attention (q/k norm) is attention's, and all of an MTP depth is the depth's.
    is_inner_norm = own is Module.NORM and inherited is Module.ATTENTION
    if is_inner_norm or inherited is Module.MTP:
        return inherited
    return own
