"""What every job does on a rank before its first step: meet the others, and build its state."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moewright.engine.checkpoint import Coordinator
from moewright.engine.comm import collectives
from moewright.engine.comm.mesh import CreateGroups, Mesh, build_mesh
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.dispatch.deepep import open_library, verify_library
from moewright.engine.dispatch.interface import DispatchLibrary, LibrarySizes
from moewright.engine.dispatch.rows import RowBudget
from moewright.engine.kernels.attention_backends import activate_attention
from moewright.engine.kernels.delayed_scaling import DelayedScaling
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.table import build_kernels
from moewright.engine.kernels.products import WIDE_PRODUCTS, Conversions, NarrowProducts, Products
from moewright.engine.kernels.weight_copies import CopiedWeight, WeightCopies
from moewright.engine.memory.allocator import keep_freed_memory
from moewright.engine.memory.part_graphs import PartGraphs
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model.experts import RoutedExperts, assign_scales
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.transformer import Transformer
from moewright.engine.observe.counters import Counters
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.optim.update_rules import UpdateRule, adamw_update
from moewright.engine.run.adapter_binding import bind_adapters, bind_to_gpu
from moewright.engine.run.corpus_loader import BatchSource
from moewright.engine.run.env import read_torchrun_env, set_allocator
from moewright.engine.run.step_graph import StepGraph
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import RankContext
from moewright.engine.runtime import Runtime, router_dtype, stored_dtype, torch_dtype
from moewright.rules.delayed_scaling import is_delayed, scaled_linears
from moewright.rules.graph_parts import shared_gradients
from moewright.rules.grid import axis_size
from moewright.rules.job import Job
from moewright.rules.low_precision import find_recipe
from moewright.rules.saved.saved_tensor import offloading_layers
from moewright.rules.shapes.shards import shared_table_ranks
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.weight_copies import copied_weights
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import CudaGraphScope
from moewright.spec.ledger import Module

InitialValue = Callable[[NamedParameter, Runtime], torch.Tensor]


def init_distributed(context: RankContext) -> torch.device:
    """Join the process group of the job, and return this rank's device.

    A world of one rank has no process group.

    Raises:
        BadInput: where a rank must not be in the group (see open_rendezvous).
        TimeoutError: under torchrun, where ranks did not come in time.
    """
    if context.info.device is DeviceKind.CUDA:
        sentence = set_allocator()
        if context.local_rank == 0:
            _tell_machine(sentence)
        device = torch.device("cuda", context.local_rank)
        backend = "nccl"
        torch.cuda.set_device(device)
        bind_to_gpu(device)
        attention = activate_attention(device)
        if context.local_rank == 0:
            _tell_machine(attention)
        # Before the first communicator, which reads what is set here.
        _bind_adapters(context)
    else:
        device = torch.device("cpu")
        backend = "gloo"
        # The ranks share the cores of the machine.
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


def _bind_adapters(context: RankContext) -> None:
    """Choose NCCL's adapters where ranks run on several machines; one rank of each says which."""
    env = read_torchrun_env()
    if env is None or not 0 < env.local_world_size < env.world_size:
        return
    sentence = bind_adapters(env.local_world_size)
    if context.local_rank == 0:
        _tell_machine(sentence)


def _tell_machine(sentence: str) -> None:
    """Print what was chosen for the ranks of this machine."""
    print(f"{socket.gethostname()}: {sentence}", file=sys.stderr, flush=True)


def gather_and_note(context: RankContext, value: Any) -> list[Any]:
    """Gather a value of every rank, and tell who watches that this rank waits for the others."""
    context.note("waits for the other ranks", is_waiting=True)
    values = collectives.gather_json(value)
    context.note("has met the other ranks")
    return values


def build_coordinator(context: RankContext, *, in_background: bool = False) -> Coordinator:
    """Build what checkpoints need of the other ranks, all of which call this.

    That of a thread `in_background` has a process group of its own.
    """
    if not in_background:
        return Coordinator(
            rank=context.rank,
            world_size=context.world_size,
            gather=partial(gather_and_note, context),
            note=context.note,
        )
    group = collectives.new_control_group()
    return Coordinator(
        rank=context.rank,
        world_size=context.world_size,
        gather=lambda value: collectives.gather_json(value, group),
    )


def build_train_state(
    job: Job,
    train_data: BatchSource,
    *,
    rank: int,
    device: torch.device,
    initial_value: InitialValue,
    update_rule: UpdateRule = adamw_update,
    kernels: KernelSet | None = None,
) -> TrainState:
    """Build this rank's mesh, its part of the model, and its optimizer.

    `initial_value` gives the weights; `kernels` replace those that the workload asks for.
    """
    runtime = build_runtime(job, rank=rank, device=device, kernels=kernels)
    model = build_model(runtime)
    optimizer = DistributedOptimizer(
        runtime, model, lambda parameter: initial_value(parameter, runtime), update_rule
    )
    runtime.weight_copies.register(_list_copied_weights(runtime, model))
    graph = StepGraph(device) if CudaGraphScope.FULL in job.layout.graphs else None
    state = TrainState(
        runtime=runtime, model=model, optimizer=optimizer, train_data=train_data, graph=graph
    )
    runtime.counters.census.list_states = state.state_tensors
    return state


def _list_copied_weights(runtime: Runtime, model: Transformer) -> Iterator[CopiedWeight]:
    """Yield the weights whose copies a step keeps, and the replicas of those of experts."""
    pp_rank = runtime.mesh.coordinate("pp")
    names = {param.name for param in copied_weights(runtime.job, pp_rank)}
    parameters = [named for named in list_parameters(model) if named.name in names]
    for named in parameters:
        yield CopiedWeight(
            tensor=named.parameter, module=named.module, is_trained=named.owner.is_trained
        )
    copied = {named.owner for named in parameters}
    for experts in model.modules():
        if isinstance(experts, RoutedExperts) and experts.replicas is not None:
            for part in copied.intersection(experts.replicas.parts):
                yield CopiedWeight(
                    tensor=experts.replicas.weight_of(part),
                    module=Module.EXPERTS,
                    is_trained=part.is_trained,
                )


def build_model(runtime: Runtime) -> Transformer:
    """Build a rank's part of the model, whose weights nobody owns yet."""
    model = Transformer(runtime, runtime.job.rank_chunks(runtime.mesh.coordinate("pp")))
    if runtime.delayed_scaling is not None:
        assign_scales(model, runtime.delayed_scaling)
    return model


def build_runtime(
    job: Job,
    *,
    rank: int,
    device: torch.device,
    kernels: KernelSet | None = None,
    create_groups: CreateGroups = collectives.create_process_groups,
) -> Runtime:
    """Build the mesh of a rank, and what the parts of its model share."""
    workload = job.workload
    layout = job.layout
    counters = Counters(blocking=device.type == "cpu")
    tables = shared_table_ranks(job.model, layout).values()
    mesh = build_mesh(layout, rank, counters, tables, create_groups)
    dispatch_library = None
    if layout.dispatcher.facts.is_library:
        dispatch_library = _open_library(job, mesh, device)
    if kernels is None:
        kernels = build_kernels(workload.fused_kernels, DeviceKind(device.type))
    recipe = find_recipe(workload)
    saved_tensors = SavedTensorManager(
        counters, replaces_tensors=bool(layout.recompute or layout.offload or recipe)
    )
    copies = WeightCopies()
    delayed_scaling: DelayedScaling | None = None
    products: Products = WIDE_PRODUCTS
    if recipe is not None and is_delayed(workload):
        linears = scaled_linears(job, mesh.coordinate("pp"), mesh.coordinate("ep"))
        delayed_scaling = DelayedScaling(
            workload.delayed,
            recipe,
            linears,
            device,
            saved_tensors.is_in_forward,
            copies,
            saved_tensors,
        )
        # A stand-in: every weight gets its own products (assign_scales).
        products = delayed_scaling.products_of("a weight without a name")
    elif recipe is not None:
        # So that each rank rounds by draws of its own.
        seed = workload.seed * layout.world_size + rank
        conversions = Conversions(
            convert=kernels.convert,
            convert_weight=kernels.convert_weight,
            convert_columns=kernels.convert_columns,
            convert_gradient=kernels.convert_gradient,
        )
        products = NarrowProducts(recipe, device, seed, conversions, copies, saved_tensors)
    chunks = job.rank_chunks(mesh.coordinate("pp"))
    weight_grads = WeightGradStore()
    return Runtime(
        job=job,
        mesh=mesh,
        counters=counters,
        weight_grads=weight_grads,
        saved_tensors=saved_tensors,
        turns=PassTurns(device, (counters.scopes, saved_tensors)),
        part_graphs=_build_part_graphs(job, chunks, device, weight_grads),
        kernels=kernels,
        weight_copies=copies,
        products=products,
        delayed_scaling=delayed_scaling,
        device=device,
        dispatch_library=dispatch_library,
        row_budget=RowBudget(device) if layout.rank_capacity else None,
        offloading_layers=offloading_layers(job.model, layout, chunks),
    )


def _build_part_graphs(
    job: Job, chunks: Sequence[Chunk], device: torch.device, weight_grads: WeightGradStore
) -> PartGraphs:
    """Build the graphs of the parts of a rank's layers, none of them captured yet."""
    layers = [layer for chunk in chunks for layer in chunk_layers(job.model, chunk)]
    shared = shared_gradients(job, layers)
    gradients = (
        (shared.hidden, stored_dtype(job.workload.precision)),
        (shared.weights, router_dtype(job.workload.router.router_dtype)),
        (shared.losses, torch.float32),
    )
    return PartGraphs(
        device,
        weight_grads,
        job.layout.graphs,
        [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in gradients if shape],
    )


def _open_library(job: Job, mesh: Mesh, device: torch.device) -> DispatchLibrary:
    """Open the library that the layout names, and verify it.

    Raises:
        BadInput: when the library is not fit for use here.
    """
    assert job.model.moe is not None  # rules.limits.compatibility
    dispatcher = job.layout.dispatcher
    experts = job.model.moe.experts
    hidden = job.model.expert_width
    sizes = LibrarySizes(
        experts=experts,
        hidden=hidden,
        max_tokens=job.micro_batch_tokens,
        nvlink_domain_size=axis_size(job.layout, "ep_near"),
    )
    library = open_library(dispatcher, mesh.group("ep"), sizes, device)
    like = torch.empty(0, dtype=torch_dtype(job.workload.precision), device=device)
    verify_library(
        library, dispatcher, mesh.group("etp"), experts=experts, hidden=hidden, like=like
    )
    return library
