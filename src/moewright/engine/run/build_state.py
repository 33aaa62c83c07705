"""What every job does on a rank before its first step: meet the others, and build its part of the
model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moewright.engine.comm import collectives
from moewright.engine.comm.mesh import Mesh, build_mesh
from moewright.engine.data.corpus_loader import BatchSource
from moewright.engine.dispatch.deepep import verify_library
from moewright.engine.dispatch.deepep_bindings import DispatchLibrary, open_library
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.select import build_kernels
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.transformer import Transformer
from moewright.engine.observe.counters import Counters
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.optim.update_rules import UpdateRule, adamw_update
from moewright.engine.run.step import TrainState
from moewright.engine.run.worker import RankContext
from moewright.engine.runtime import Runtime, torch_dtype
from moewright.rules.grid import axis_size
from moewright.rules.routing import LIBRARY_DISPATCHERS, micro_batch_tokens
from moewright.rules.shards import shared_table_ranks
from moewright.rules.stages import pipeline_chunks
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

InitialValue = Callable[[NamedParameter, Runtime], torch.Tensor]


def init_distributed(context: RankContext) -> torch.device:
    """Meet the other ranks; returns this rank's device."""
    if context.info.device is DeviceKind.CUDA:
        device, backend = torch.device("cuda", context.local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
        keep_freed_memory()
    if context.world_size > 1:
        collectives.join_world(
            rank=context.rank,
            world_size=context.world_size,
            store=context.open_store(),
            backend=backend,
            timeout_s=context.timeouts.collective_s,
        )
    return device


def build_train_state(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    train_data: BatchSource,
    *,
    rank: int,
    device: torch.device,
    initial_value: InitialValue,
    update_rule: UpdateRule = adamw_update,
    kernels: KernelSet | None = None,
) -> TrainState:
    """This rank's mesh, part of the model with its `initial` weights, and optimizer; `kernels`
    other than those that the workload asks for.
    """
    books = Counters(blocking=device.type == "cpu")
    mesh = build_mesh(layout, rank, books, shared_table_ranks(model, layout).values())
    run = Runtime(
        model=model,
        workload=workload,
        mesh=mesh,
        counters=books,
        saved_tensors=SavedTensorManager(
            books, replaces_tensors=bool(layout.recompute or layout.offload)
        ),
        kernels=kernels or build_kernels(workload.fused_kernels, DeviceKind(device.type)),
        device=device,
        dispatch_library=_open_library(model, workload, mesh, device)
        if layout.dispatcher in LIBRARY_DISPATCHERS
        else None,
    )
    pp_rank = run.mesh.coordinate("pp")
    part = Transformer(
        run, [chunk for chunk in pipeline_chunks(model, layout) if chunk.pp_rank == pp_rank]
    )
    optimizer = DistributedOptimizer(run, part, lambda slot: initial_value(slot, run), update_rule)
    return TrainState(runtime=run, model=part, optimizer=optimizer, train_data=train_data)


def _open_library(
    model: ModelSpec, workload: Workload, mesh: Mesh, device: torch.device
) -> DispatchLibrary:
    """The library that the layout names, set up and proven. Raises BadInput when it is not fit for
    use here."""
    assert model.moe is not None  # rules.exclusions
    layout, group, experts, hidden = (
        mesh.layout,
        mesh.group("ep"),
        model.moe.experts,
        model.expert_width,
    )
    library = open_library(
        layout.dispatcher,
        group,
        experts=experts,
        hidden=hidden,
        max_tokens=micro_batch_tokens(workload, layout),
        nvlink_domain_size=axis_size(layout, "ep_near"),
    )
    like = torch.empty(0, dtype=torch_dtype(workload.precision), device=device)
    verify_library(
        library, layout.dispatcher, mesh.group("etp"), experts=experts, hidden=hidden, like=like
    )
    return library
