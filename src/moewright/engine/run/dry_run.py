"""Dry run: become one rank of a job of any size in this process, and count what a step of it would
hold and send.

It is the trainer's model, step and optimizer on tensors without data, among ranks that are not
there. Routing is even, and every number that the host reads from the device is 1, so losses and
norms mean nothing; shapes, and so bytes, calls and FLOPs, are those of the real rank.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from moewright.engine.comm import collectives
from moewright.engine.data.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.kernels.matmul import has_native_bf16
from moewright.engine.model.layers import NamedParameter
from moewright.engine.observe.counters import Counters, storage_id
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.runtime import Runtime
from moewright.rules import grid
from moewright.rules.engine_limits import require_runnable
from moewright.rules.routing import LIBRARY_DISPATCHERS, drops_by_probability
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import DispatcherKind, ExpertPlacement, Layout
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DropPolicy, Dtype, RouterForce, Workload

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """What one rank held, sent and computed in a step.

    `states_bytes` of weights, gradients and optimizer state live all through it; `beside` are the
    bytes of the tensors that lived beside them at the fullest moment, by the module that made them:
    with zero=3 also gathered weights, and the gradients, which are made in the step.
    """

    ledger: Ledger
    states_bytes: int
    peak_by_module: tuple[tuple[Module, int], ...]


def dry_run(model: ModelSpec, workload: Workload, layout: Layout, *, rank: int) -> DryRun:
    """One step of `rank`. Raises BadInput for a rank outside the world and for what the engine
    would refuse."""
    pp_rank = grid.coordinate(layout, rank, "pp")
    require_runnable(model, workload, layout)
    if model.moe is not None and drops_by_probability(layout, workload.router):
        rule = "a dry run knows no probabilities, by which capacity drops rows and dedup finds none to copy"
        near = DropPolicy.POSITION
        raise BadInput(
            Reason(field="train.drop_policy", value=DropPolicy.PROBS, rule=rule, nearest=near)
        )
    if layout.dispatcher in LIBRARY_DISPATCHERS:
        rule = "a dry run has no devices for a library to move rows between"
        raise BadInput(
            Reason(
                field="layout.dispatcher",
                value=layout.dispatcher,
                rule=rule,
                nearest=DispatcherKind.DEDUP,
            )
        )
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        rule = "a dry run takes experts in turn, whose load no placement evens"
        field, value = "layout.expert_placement", layout.expert_placement
        raise BadInput(
            Reason(field=field, value=value, rule=rule, nearest=ExpertPlacement.CONTIGUOUS)
        )
    if layout.world_size > 1:
        collectives.join_fake_world(rank=rank, world_size=layout.world_size)
    try:
        with FakeTensorMode(), MemoryMeter() as meter:
            here = build_train_state(
                model,
                replace(workload, router=replace(workload.router, force=RouterForce.BALANCED)),
                layout,
                _BlankBatches(),
                rank=rank,
                device=torch.device("cpu"),
                initial_value=lambda slot, run: _uninitialized(slot),
                kernels=TorchKernels(),  # they keep the same, and run without data
            )
            states = (
                here.optimizer.memory_rows()
            )  # of zero=3 without gradients, which end with the step before
            meter.start(here.runtime.counters)
            train_step(here, step=1, lr=0.0, stop_requested=False, count_ledger=True)
            ledger = here.runtime.counters.build_ledger(
                rank=rank,
                pp_rank=pp_rank,
                state=here.optimizer.memory_rows(),
                time=(),
                notes=_describe_differences(workload),
            )
        beside = tuple(
            sorted((module, nbytes) for module, nbytes in meter.peak_by_module.items() if nbytes)
        )
        held = sum(row.bytes for row in states if row.component is not Component.HOST)
        return DryRun(ledger=ledger, states_bytes=held, peak_by_module=beside)
    finally:
        collectives.leave_world()


def _uninitialized(slot: NamedParameter) -> torch.Tensor:
    return torch.empty(slot.placement.local_shape)


def _describe_differences(workload: Workload) -> tuple[str, ...]:
    """Where what is kept or held here is not what a CUDA device keeps or holds."""
    notes = [
        "flash attention on CUDA keeps two 8-byte numbers of its random state a layer and micro-batch; here none",
        "flash attention on CUDA copies the key heads for every query head while it runs; here it reads them in place",
    ]
    if workload.precision is not Dtype.FP32 and not has_native_bf16():
        notes.append(
            f"this CPU multiplies {workload.precision} in fp32: the peak holds widened copies of a product's operands "
            "that CUDA does not make; saved tensors are as on CUDA"
        )
    return tuple(notes)


class _BlankBatches:
    """Micro-batches without content."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        tokens = torch.zeros(run.mesh.layout.mbs, run.workload.seq_len, dtype=torch.int64)
        return build_micro_batch(run, tokens, tokens, None)


class MemoryMeter(TorchDispatchMode):
    """Weighs the live tensors, and answers what tensors without data cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_by_module: dict[Module, int] = {}
        self._books: Counters | None = None
        self._live: dict[Module, int] = defaultdict(int)
        self._known: dict[int, tuple[Module, int]] = {}  # by storage, while it lives
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._total = self._most = 0

    def start(self, counters: Counters) -> None:
        """Weigh what is made from here on, for the module that `books` say runs; what lives already
        stays unweighed."""
        self._books = counters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is _aten._local_scalar_dense:
            return 1
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fsdp":
            self._follow((kwargs or {}).get("out"))
        self._weigh_again()
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        key = storage_id(tensor)
        if key in self._known or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        weighed = self._books is not None and not self._books.is_on_host
        module, nbytes = (
            (self._books.current_module, storage.nbytes())
            if self._books and weighed
            else (Module.OTHER, 0)
        )
        weakref.finalize(storage, self._forget, key)
        self._known[key] = module, 0
        self._weigh(key, nbytes)

    def _follow(self, filled: Any) -> None:
        """fully_shard empties the storage of a gathered weight and fills it again: look at its size
        from here on."""
        for tensor in tree_iter(filled):
            if isinstance(tensor, torch.Tensor) and storage_id(tensor) in self._known:
                self._resizable[storage_id(tensor)] = weakref.ref(tensor.untyped_storage())

    def _weigh_again(self) -> None:
        for key, reference in list(self._resizable.items()):
            storage = reference()
            nbytes = storage.nbytes() if storage is not None else 0
            if nbytes == 0:
                del self._resizable[key]
            if key in self._known and self._known[key][1] != nbytes:
                self._weigh(key, nbytes)

    def _weigh(self, key: int, nbytes: int) -> None:
        module, before = self._known[key]
        self._known[key] = module, nbytes
        self._live[module] += nbytes - before
        self._total += nbytes - before
        if self._total > self._most:
            self._most, self.peak_by_module = self._total, dict(self._live)

    def _forget(self, key: int) -> None:
        self._weigh(key, 0)
        del self._known[key]
