"""Books: what really ran on this rank, counted for the ledger.

Bytes come from the tensors and buffers themselves, FLOPs from the shapes of the operations torch
dispatched, saved activations from the tensors autograd kept. Nothing here knows a formula of the
planner: otherwise the equality of prediction and count would prove nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moewright.engine.kernels.matmul import CPU_GROUPED_MATMUL, ONEDNN_LINEAR
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.observe.step_timing import WaitClock
from moewright.spec.hardware import Collective
from moewright.spec.ledger import (
    CommRow,
    Component,
    FlopOp,
    FlopRow,
    Ledger,
    MemoryRow,
    Module,
    TimeRow,
)

_aten = torch.ops.aten


_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]


def _mm_flops(args: _Args, named: _Kwargs) -> int:
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1])


def _linear_flops(args: _Args, named: _Kwargs) -> int:
    x, weight = args[0], args[1]
    return 2 * int(x.shape[0]) * int(x.shape[1]) * int(weight.shape[0])


def _grouped_mm_flops(args: _Args, named: _Kwargs) -> int:
    """[R,K] x [E,K,N] multiplies each row once; [M,R] x [R,N] (a weight gradient) contracts over
    all rows once."""
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[-1])


def _bmm_flops(args: _Args, named: _Kwargs) -> int:
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(a.shape[2]) * int(b.shape[2])


def _attention_flops(args: _Args, named: _Kwargs, *, causal: bool) -> int:
    """Scores and values of q [B,heads,S,Dq] over k, v [B,kv_heads,K,Dv]: all pairs, the causal half
    of them, or those that a mask leaves.
    """
    q, v = args[0], args[2]
    batch, heads, rows, dim = q.shape
    columns = getattr(v, "true_width", v.shape[3])
    twice = (1 if causal else 2) * int(rows) * int(v.shape[2])
    if named.get("attn_mask") is not None:
        twice = named["attn_mask"].twice_pairs
    return twice * int(batch) * int(heads) * (int(dim) + int(columns))


def _attention_forward(args: _Args, named: _Kwargs) -> int:
    return _attention_flops(
        args, named, causal=len(args) > 4 and args[4]
    )  # torch leaves out arguments of their default


def _attention_backward_on_cpu(args: _Args, named: _Kwargs) -> int:
    """Twice the forward: the convention of model FLOPs, which leaves out the recomputed scores."""
    return 2 * _attention_flops(args[1:], named, causal=args[7])


def _attention_backward(args: _Args, named: _Kwargs) -> int:
    return 2 * _attention_flops(args[1:], named, causal=args[11])


def _varlen_attention_flops(
    q: Any, v: Any, starts: Any, seen: Any, named: _Kwargs, *, causal: bool
) -> int:
    """All pairs of each run of queries with its run of keys, the causal half of them, or of either
    a window's part: q [T,heads,Dq], v [K,kv_heads,Dv]; where the runs of each start, [runs + 1].
    """
    columns = getattr(v, "true_width", v.shape[2])
    lengths, others = starts.diff().long(), seen.diff().long()
    twice = (1 if causal else 2) * lengths * others
    left = named.get("window_size_left")
    if left is not None:  # of the last query so many keys are too far, of each before it one less
        far = (others - left - 1).clamp(min=0)
        rows = torch.minimum(far, lengths)
        twice = twice - 2 * rows * far + rows * (rows - 1)
    return int(twice.sum()) * int(q.shape[1]) * (int(q.shape[2]) + int(columns))


def _varlen_attention_forward(args: _Args, named: _Kwargs) -> int:
    return _varlen_attention_flops(args[0], args[2], args[3], args[4], named, causal=args[8])


def _varlen_attention_backward(args: _Args, named: _Kwargs) -> int:
    return 2 * _varlen_attention_flops(args[1], args[3], args[6], args[7], named, causal=args[11])


_FLOPS: tuple[tuple[str, FlopOp, Callable[[_Args, _Kwargs], int]], ...] = (
    ("mm", FlopOp.GEMM, _mm_flops),
    ("bmm", FlopOp.GEMM, _bmm_flops),
    ("_grouped_mm", FlopOp.GROUPED_GEMM, _grouped_mm_flops),
    ("_scaled_dot_product_flash_attention_for_cpu", FlopOp.ATTENTION, _attention_forward),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        FlopOp.ATTENTION,
        _attention_backward_on_cpu,
    ),
    ("_scaled_dot_product_flash_attention", FlopOp.ATTENTION, _attention_forward),
    ("_scaled_dot_product_flash_attention_backward", FlopOp.ATTENTION, _attention_backward),
    ("_flash_attention_forward", FlopOp.ATTENTION, _varlen_attention_forward),
    ("_flash_attention_backward", FlopOp.ATTENTION, _varlen_attention_backward),
)


def storage_id(tensor: torch.Tensor) -> int:
    """Of the storage, as long as it lives; tensors without data have one too, unlike an address."""
    return int(tensor.untyped_storage()._cdata)


class _FlopMode(TorchDispatchMode):
    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters
        self._rules = {
            getattr(_aten, name): (op, rule) for name, op, rule in _FLOPS if hasattr(_aten, name)
        }
        self._rules |= {
            CPU_GROUPED_MATMUL: (FlopOp.GROUPED_GEMM, _grouped_mm_flops),
            ONEDNN_LINEAR: (FlopOp.GEMM, _linear_flops),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: wrapping the rule below against a compiler imports the compiler, two seconds in every
        rank."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._rules.get(func.overloadpacket)
        if found is not None:
            op, rule = found
            self._counters.flops[(op, self._counters.current_module)] += rule(args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """The module that something is booked to, and whether it is part of an MTP depth."""

    module: Module
    in_mtp_depth: bool


class Counters:
    """One rank's running counts. Counting is off except inside `counting()`."""

    def __init__(self, *, blocking: bool = True) -> None:
        self.wait_clock = WaitClock(blocking=blocking)  # kept whether counting or not
        self.collectives: dict[tuple[Collective, str], list[int]] = defaultdict(lambda: [0, 0])
        self.flops: dict[tuple[FlopOp, Module], int] = defaultdict(int)
        self._alive: dict[
            tuple[int, int], dict[Module, int]
        ] = {}  # kept by each (micro-batch, chunk) in flight
        self._peak_saved: dict[Module, int] = {}
        self._peak_alive = 0
        self.weight_grads = (
            WeightGradStore()
        )  # not counted: whoever is handed the books, for what runs inside a step, needs it too
        self._places = [Scope(module=Module.OTHER, in_mtp_depth=False)]
        self._counting = False
        self.is_on_host = False

    @property
    def current_module(self) -> Module:
        """The module that what runs now is booked to."""
        return self.scope.module

    @property
    def scope(self) -> Scope:
        """What runs now; `within` leads back to it."""
        return self._places[-1]

    @contextmanager
    def attribute_to(self, scope: Module | Scope) -> Iterator[None]:
        """Attribute what runs inside to a module; all of an MTP depth but its router is the
        depth's."""
        if isinstance(scope, Module):
            depth = self.scope.in_mtp_depth or scope is Module.MTP
            scope = Scope(
                module=Module.MTP if depth and scope is not Module.ROUTER else scope,
                in_mtp_depth=depth,
            )
        self._places.append(scope)
        try:
            yield
        finally:
            self._places.pop()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made inside lies in host memory, even where the device stands for one with memory
        of its own."""
        self.is_on_host = True
        try:
            yield
        finally:
            self.is_on_host = False

    def count_collective(self, op: Collective, group: str, nbytes: int) -> None:
        """Book one collective call with the bytes this rank hands in."""
        if self._counting:
            row = self.collectives[(op, group)]
            row[0] += nbytes
            row[1] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count collectives and FLOPs of everything inside, from zero."""
        self.collectives.clear()
        self.flops.clear()
        self._alive.clear()
        self._peak_saved, self._peak_alive = {}, 0
        self._counting = True
        try:
            with _FlopMode(self):
                yield
        finally:
            self._counting = False

    @contextmanager
    def count_saved(
        self, key: tuple[int, int], is_weight: Callable[[torch.Tensor], bool]
    ) -> Iterator[Callable[[torch.Tensor], None] | None]:
        """Count the storages that the forward of `key` (micro-batch, chunk) keeps for backward
        until `released`, each once, by the module that kept it first.

        Gives what to call with every tensor that is kept, or None when nothing is counted.
        `resident` tells tensors that live anyway (weights, caches). The count of the fullest moment
        is kept.
        """
        if not self._counting:
            yield None
            return
        # Keeping the storages alive keeps their identities unique while we compare them.
        seen: dict[int, torch.UntypedStorage] = {}
        saved: dict[Module, int] = defaultdict(int)

        def count(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage_id(tensor) not in seen and not is_weight(tensor):
                seen[storage_id(tensor)] = storage
                saved[self.current_module] += storage.nbytes()

        yield count
        self._alive[key] = saved
        self._peak_alive = max(self._peak_alive, len(self._alive))
        if sum(sum(one.values()) for one in self._alive.values()) > sum(self._peak_saved.values()):
            self._peak_saved = {
                module: sum(one.get(module, 0) for one in self._alive.values())
                for module in Module
                if any(module in one for one in self._alive.values())
            }

    def release(self, key: tuple[int, int]) -> None:
        """Nothing is kept of a (micro-batch, chunk) any more."""
        self._alive.pop(key, None)

    def build_ledger(
        self,
        *,
        rank: int,
        pp_rank: int,
        state: tuple[MemoryRow, ...],
        time: tuple[TimeRow, ...],
        notes: tuple[str, ...],
    ) -> Ledger:
        """Close the books: `state` is the resident memory by component and module."""
        held = list(state)
        for module, nbytes in self._peak_saved.items():
            kind = Component.LOGITS if module is Module.HEAD else Component.ACTIVATIONS
            held.append(MemoryRow(component=kind, module=module, bytes=nbytes))
        return Ledger(
            rank=rank,
            pp_rank=pp_rank,
            memory=tuple(
                sorted((r for r in held if r.bytes), key=lambda r: (r.component, r.module))
            ),
            comm=tuple(
                CommRow(op=op, group=group, bytes=nbytes, calls=calls)
                for (op, group), (nbytes, calls) in sorted(self.collectives.items())
            ),
            flops=tuple(
                FlopRow(op=op, module=module, flops=flops)
                for (op, module), flops in sorted(self.flops.items())
                if flops
            ),
            time=time,
            in_flight=self._peak_alive,
            notes=notes,
        )
