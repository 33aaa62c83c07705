"""The parts of a transformer layer, and the embedding and head around them.

Parameter names follow rules.inventory, so that a state means the same in any layout. Each class that owns parameters
says which module of the ledger they belong to.

Shapes: T = B*S tokens, H hidden, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moewright.engine.model.functions import (
    CausalAttention,
    CrossEntropy,
    Embed,
    GroupedLinear,
    Linear,
    RmsNorm,
    Rotary,
    SwiGlu,
)
from moewright.engine.placement import Cuts, Placement, place
from moewright.engine.runtime import Runtime
from moewright.spec.ledger import Module
from moewright.spec.model import QkNorm


class Weight(nn.Module):
    """This rank's part of a named tensor `weight` of `shape`, on the meta device until the flat buffers own it."""

    def __init__(self, run: Runtime, *shape: int, cuts: Cuts = ()) -> None:
        super().__init__()
        self.placement = place(run.mesh, shape, cuts)
        self.weight = nn.Parameter(torch.empty(self.placement.local, dtype=run.dtype, device="meta"))


class Norm(Weight):
    """RMSNorm over the last dim."""

    ledger_module = Module.NORM

    def __init__(self, run: Runtime, width: int) -> None:
        super().__init__(run, width)
        self._eps = run.model.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RmsNorm.apply(x, self.weight, self._eps)


class RotaryTable:
    """cos and sin [S, D/2] fp32 of positions 0..S-1, made once."""

    def __init__(self, run: Runtime) -> None:
        dim, length = run.model.attention.head_dim, run.workload.seq_len
        inverse = run.model.attention.rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
        self.cos = angles.cos().to(run.device, torch.float32)
        self.sin = angles.sin().to(run.device, torch.float32)

    def apply(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        length = x_BSHD.shape[1]
        return Rotary.apply(x_BSHD, self.cos[:length], self.sin[:length])


class Attention(nn.Module):
    """Grouped-query attention with optional q/k norm and rotary positions: [T,H] -> [T,H]."""

    ledger_module = Module.ATTENTION

    def __init__(self, run: Runtime, rotary: RotaryTable) -> None:
        super().__init__()
        spec, hidden = run.model.attention, run.model.hidden_size
        self._spec, self._run, self._rotary = spec, run, rotary
        self.q = Weight(run, spec.q_width, hidden)
        self.k = Weight(run, spec.kv_width, hidden)
        self.v = Weight(run, spec.kv_width, hidden)
        self._norm_width = {QkNorm.PER_HEAD: spec.head_dim, QkNorm.FULL: 0}.get(spec.qk_norm)
        if self._norm_width is not None:
            self.q_norm = Norm(run, self._norm_width or spec.q_width)
            self.k_norm = Norm(run, self._norm_width or spec.kv_width)
        self.o = Weight(run, hidden, spec.out_width)

    def forward(self, x_TH: torch.Tensor, batch: int) -> torch.Tensor:
        spec, books = self._spec, self._run.books
        with books.within(Module.ATTENTION):
            q, k, v = (Linear.apply(x_TH, w.weight, books) for w in (self.q, self.k, self.v))
            if self._norm_width is not None:
                # PER_HEAD norms each head over head_dim; FULL norms all heads together.
                q, k = (
                    norm(y.unflatten(1, (-1, norm.weight.shape[0]))) for norm, y in ((self.q_norm, q), (self.k_norm, k))
                )
            q_BSHD = self._rotary.apply(q.reshape(batch, -1, spec.heads, spec.head_dim))
            k_BSGD = self._rotary.apply(k.reshape(batch, -1, spec.kv_heads, spec.head_dim))
            v_BSGD = v.view(batch, -1, spec.kv_heads, spec.v_head_dim)
            out = CausalAttention.apply(q_BSHD, k_BSGD, v_BSGD, books)
            return Linear.apply(out.reshape(x_TH.shape[0], -1), self.o.weight, books)


class Mlp(nn.Module):
    """SwiGLU MLP of width F: [T,H] -> [T,H]; `kind` is DENSE_MLP or SHARED_EXPERTS."""

    def __init__(self, run: Runtime, width: int, kind: Module) -> None:
        super().__init__()
        self.ledger_module = kind
        self._run = run
        self.gate_up = Weight(run, 2, width, run.model.hidden_size)
        self.down = Weight(run, run.model.hidden_size, width)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        books = self._run.books
        with books.within(self.ledger_module):
            act = SwiGlu.apply(Linear.apply(x_TH, self.gate_up.weight.flatten(0, 1), books), None)
            return Linear.apply(act, self.down.weight, books)


class Experts(nn.Module):
    """The routed experts this rank holds: rows [R,H] sorted by expert, weights [R] -> weighted outputs [R,H]."""

    ledger_module = Module.EXPERTS

    def __init__(self, run: Runtime, experts: int, width: int) -> None:
        super().__init__()
        self._run = run
        hidden = run.model.hidden_size
        self.gate_up = Weight(run, experts, 2, width, hidden, cuts=(("ep", 0),))
        self.down = Weight(run, experts, hidden, width, cuts=(("ep", 0),))

    def forward(self, rows_RH: torch.Tensor, weights_R: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        books = self._run.books
        hidden = GroupedLinear.apply(rows_RH, self.gate_up.weight.flatten(1, 2), ends_E, books)
        return GroupedLinear.apply(SwiGlu.apply(hidden, weights_R), self.down.weight, ends_E, books)


class Embedding(Weight):
    """Token ids [T] -> [T,H]."""

    ledger_module = Module.EMBEDDING

    def __init__(self, run: Runtime) -> None:
        super().__init__(run, run.model.vocab_size, run.model.hidden_size)
        self._run = run

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        with self._run.books.within(Module.EMBEDDING):
            return Embed.apply(ids_T, self.weight)


class Head(Weight):
    """The output projection [V,H]; absent when the embedding is tied to it."""

    ledger_module = Module.HEAD

    def __init__(self, run: Runtime) -> None:
        super().__init__(run, run.model.vocab_size, run.model.hidden_size)


def token_loss(
    run: Runtime, x_TH: torch.Tensor, w_VH: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood [T] in fp32 of hidden states under the output projection, 0 where target < 0; logits."""
    with run.books.within(Module.HEAD):
        logits_TV = Linear.apply(x_TH, w_VH, run.books)
        return CrossEntropy.apply(logits_TV, targets_T), logits_TV.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A parameter's place in the model: `owner.weight` is the tensor, `name` its global name."""

    name: str
    owner: Weight
    module: Module

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner.weight

    @property
    def placement(self) -> Placement:
        return self.owner.placement


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """Every parameter of the model in registration order."""
    found: list[Slot] = []

    def walk(module: nn.Module, prefix: str, inherited: Module) -> None:
        owner = _ledger_module(module, inherited)
        if isinstance(module, Weight):
            found.append(Slot(name=f"{prefix}weight", owner=module, module=owner))
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", owner)

    walk(model, "", Module.OTHER)
    return tuple(found)


def _ledger_module(module: nn.Module, inherited: Module) -> Module:
    own: Module = getattr(module, "ledger_module", inherited)
    # A norm inside attention (q/k norm) is attention's.
    return inherited if own is Module.NORM and inherited is Module.ATTENTION else own
