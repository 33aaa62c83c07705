"""Data parallelism equals torch's own over the same modules.

The oracles are DistributedDataParallel, and fully_shard over all ranks and inside blocks of them,
as torch divides, groups and sends by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tiny_jobs
from layout_proof import WORKLOAD, draw_batches
from moewright.engine.comm import collectives
from moewright.engine.model.layer import TransformerLayer
from moewright.engine.model.layers import list_parameters
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import forward_backward
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.verify import FixedBatches
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype

pytestmark = pytest.mark.spawn

Wrap = Callable[[nn.Module, int], nn.Module]


def wrap_ddp(model: nn.Module, world: int) -> nn.Module:
    return DistributedDataParallel(model)


def wrap_fully_shard(model: nn.Module, world: int, *, blocks: int = 1) -> nn.Module:
    """Shard each layer as a unit with its experts; `blocks` of ranks have whole replicas."""
    sizes = {"copies": blocks, "shard": world // blocks} if blocks > 1 else {"shard": world}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for module in (
        *(layer for layer in model.modules() if isinstance(layer, TransformerLayer)),
        model,
    ):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        # gloo has no multiplication, by which FSDP takes the mean: let it take the sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def compare_gradients(plan: Plan, folder: Path, wrap: Wrap, context: RankContext) -> RankOutcome:
    """Leave the worst difference of a gradient over its norm in `folder`."""
    device = init_distributed(context)
    data = draw_batches(plan.model)

    def build(layout: Layout) -> TrainState:
        return build_train_state(
            Job(model=plan.model, workload=plan.workload, layout=layout),
            data,
            rank=context.rank,
            device=device,
            initial_value=draw_initial_value,
        )

    state = build(plan.layout)
    forward_backward(state, build_phase_clock(state.runtime.device), step=1)
    shards = [shard for shard in state.optimizer.gradient_shards() if shard.tensor.numel()]

    expected_gradients = torch_gradients(
        build(replace(plan.layout, zero=0, shard=0)), wrap, context.world_size
    )
    assert shards
    worst = 0.0
    for shard in shards:
        expected = expected_gradients[shard.name]
        box = tuple(
            slice(start, start + size)
            for start, size in zip(shard.offsets, shard.tensor.shape, strict=True)
        )
        worst = max(worst, float((shard.tensor - expected[box]).norm() / expected.norm()))
    (folder / f"worst{context.rank}").write_text(str(worst))
    collectives.leave_world()
    return RankOutcome.DONE


def sum_in_bf16(plan: Plan, folder: Path, context: RankContext) -> RankOutcome:
    """Leave what each micro-batch added to each gradient, and what the optimizer made of it."""
    device = init_distributed(context)
    state = build_train_state(
        Job(model=plan.model, workload=plan.workload, layout=plan.layout),
        draw_batches(plan.model),
        rank=context.rank,
        device=device,
        initial_value=draw_initial_value,
    )
    added: dict[str, list[torch.Tensor]] = {}
    for slot in list_parameters(state.model):
        added[slot.name] = []
        slot.parameter.register_hook(lambda grad, name=slot.name: added[name].append(grad.clone()))
    forward_backward(state, build_phase_clock(device), step=1)
    reduced = {shard.name: shard.tensor.clone() for shard in state.optimizer.gradient_shards()}
    torch.save((added, reduced), folder / f"sums{context.rank}")
    collectives.leave_world()
    return RankOutcome.DONE


def test_bf16_gradients_are_rounded_after_every_micro_batch_and_rank(tmp_path: Path) -> None:
    """As Megatron-LM adds to main_grad under --grad-reduce-in-bf16; equal to the bit."""
    workload = replace(WORKLOAD, precision=Dtype.BF16, grad_dtype=Dtype.BF16)
    plan = tiny_jobs.build_plan(workload, "zero0,mbs1", world_size=2)
    code = launch(partial(sum_in_bf16, plan, tmp_path), nproc=2, run_dir=tmp_path / "run")
    assert code is ExitCode.DONE
    (first, reduced), (second, reduced_too) = (
        torch.load(tmp_path / f"sums{rank}") for rank in range(2)
    )
    differs_from_fp32 = 0
    for name, parts in first.items():
        sums = [torch.zeros_like(parts[0]), torch.zeros_like(parts[0])]
        assert len(parts) == 4
        for total, rank_parts in zip(sums, (parts, second[name]), strict=True):
            assert total.dtype is torch.bfloat16
            for part in rank_parts:
                total.add_(part)
        expected = (sums[0] + sums[1]).float()
        actual = reduced[f"grad/{name}"]
        assert torch.equal(actual.flatten(), expected.flatten()), name
        assert torch.equal(actual, reduced_too[f"grad/{name}"]), name
        in_fp32 = sum(part.float() for part in (*parts, *second[name]))
        differs_from_fp32 += not torch.equal(in_fp32.flatten(), expected.flatten())
    assert differs_from_fp32


def torch_gradients(state: TrainState, wrap: Wrap, world: int) -> dict[str, torch.Tensor]:
    """Return torch's gradients of the first micro-batch by name.

    The wrapper dies here, while the world still holds its group: the last owner ends the group's
    threads, and DDP would do so without letting go of Python, for which such a thread may wait.
    """
    # Fresh parameters carry none of the engine's hooks.
    for slot in list_parameters(state.model):
        slot.owner.weight = nn.Parameter(slot.owner.weight.detach().clone())
    assert isinstance(state.train_data, FixedBatches)
    wrapped = wrap(state.model, world)  # its hooks live as long as this name
    out = wrapped(state.train_data.micro_batch(state.runtime, 0, 0))
    valid_targets = int((state.train_data.targets[0] >= 0).sum())
    loss = out.nll.sum() / valid_targets + out.aux_losses.sum() / world
    # DDP takes the mean over ranks, of a sum that is already over all valid targets.
    if isinstance(wrapped, DistributedDataParallel):
        loss = loss * world
    loss.backward()
    return {
        f"grad/{slot.name}": full_gradient(slot.owner.weight.grad)
        for slot in list_parameters(state.model)
    }


def full_gradient(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@pytest.mark.parametrize(
    ("world", "layout", "wrap", "model"),
    [
        (2, "zero0", wrap_ddp, tiny_jobs.DENSE),
        (4, "zero1", wrap_ddp, tiny_jobs.DENSE),
        (2, "zero3", wrap_fully_shard, tiny_jobs.MODEL),
        (4, "zero1", wrap_fully_shard, tiny_jobs.MODEL),
        (4, "zero3,shard2", partial(wrap_fully_shard, blocks=2), tiny_jobs.MODEL),
    ],
    ids=[
        "2-zero0-replicated-model0",
        "4-zero1-replicated-model1",
        "2-zero3-cut-model2",
        "4-zero1-cut-model3",
        "4-zero3,shard2-wrap4-model4",
    ],
)
def test_gradients_equal_those_of_data_parallelism_in_torch(
    world: int, layout: str, wrap: Wrap, model: ModelSpec, tmp_path: Path
) -> None:
    text = f"{layout},mbs{WORKLOAD.global_batch // world}"
    plan = tiny_jobs.build_plan(WORKLOAD, text, world_size=world, model=model)
    assert (
        launch(
            partial(compare_gradients, plan, tmp_path, wrap), nproc=world, run_dir=tmp_path / "run"
        )
        is ExitCode.DONE
    )
    assert max(float((tmp_path / f"worst{rank}").read_text()) for rank in range(world)) < 3e-6
