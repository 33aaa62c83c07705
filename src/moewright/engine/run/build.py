"""What every job does on a rank before its first step: meet the others, and build its part of the
model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moewright.engine.comm import collectives
from moewright.engine.comm.mesh import Mesh, build_mesh
from moewright.engine.data.batches import Batches
from moewright.engine.dispatch.deepep import prove
from moewright.engine.dispatch.deepep_bindings import Library, opened
from moewright.engine.kernels.fused.interface import Kernels
from moewright.engine.kernels.fused.select import kernels_for
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.memory.saved_tensors import Keeper
from moewright.engine.model.layers import Slot
from moewright.engine.model.transformer import Transformer
from moewright.engine.observe.counters import Books
from moewright.engine.optim.distributed import DistributedOptimizer
from moewright.engine.optim.update import Update, adamw_update
from moewright.engine.run.step import Trainee
from moewright.engine.run.worker import RankContext
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.rules.grid import axis_size
from moewright.rules.routing import LIBRARIES, micro_batch_tokens
from moewright.rules.shards import shared_tables
from moewright.rules.stages import chunks
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

Initial = Callable[[Slot, Runtime], torch.Tensor]


def join(seat: RankContext) -> torch.device:
    """Meet the other ranks; returns this rank's device."""
    if seat.seat.device is DeviceKind.CUDA:
        device, backend = torch.device("cuda", seat.local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
        keep_freed_memory()
    if seat.world > 1:
        collectives.start(
            rank=seat.rank,
            world_size=seat.world,
            store=seat.store(),
            backend=backend,
            timeout_s=seat.timeouts.collective_s,
        )
    return device


def trainee(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    batches: Batches,
    *,
    rank: int,
    device: torch.device,
    initial: Initial,
    rule: Update = adamw_update,
    kernels: Kernels | None = None,
) -> Trainee:
    """This rank's mesh, part of the model with its `initial` weights, and optimizer; `kernels`
    other than those that the workload asks for.
    """
    books = Books(blocking=device.type == "cpu")
    mesh = build_mesh(layout, rank, books, shared_tables(model, layout).values())
    run = Runtime(
        model=model,
        workload=workload,
        mesh=mesh,
        books=books,
        keeper=Keeper(books, at_work=bool(layout.recompute or layout.offload)),
        kernels=kernels or kernels_for(workload.fused_kernels, DeviceKind(device.type)),
        device=device,
        library=_library(model, workload, mesh, device) if layout.dispatcher in LIBRARIES else None,
    )
    pp_rank = run.mesh.coordinate("pp")
    part = Transformer(run, [chunk for chunk in chunks(model, layout) if chunk.pp_rank == pp_rank])
    optimizer = DistributedOptimizer(run, part, lambda slot: initial(slot, run), rule)
    return Trainee(run=run, model=part, optimizer=optimizer, train_data=batches)


def _library(model: ModelSpec, workload: Workload, mesh: Mesh, device: torch.device) -> Library:
    """The library that the layout names, set up and proven. Raises BadInput when it is not fit for
    use here."""
    assert model.moe is not None  # rules.exclusions
    layout, group, experts, hidden = (
        mesh.layout,
        mesh.group("ep"),
        model.moe.experts,
        model.expert_width,
    )
    library = opened(
        layout.dispatcher,
        group,
        experts=experts,
        hidden=hidden,
        tokens=micro_batch_tokens(workload, layout),
        near=axis_size(layout, "ep_near"),
    )
    like = torch.empty(0, dtype=torch_dtype(workload.precision), device=device)
    prove(library, layout.dispatcher, mesh.group("etp"), experts=experts, hidden=hidden, like=like)
    return library
