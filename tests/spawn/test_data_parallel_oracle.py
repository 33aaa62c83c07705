"""Data parallelism against torch's own, over the same modules: DistributedDataParallel, and
fully_shard over all ranks and inside blocks of them, as torch divides, groups and sends by itself.
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
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import PhaseClock, TrainState, forward_backward
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan

pytestmark = pytest.mark.spawn

Wrap = Callable[[nn.Module, int], nn.Module]


def replicated(model: nn.Module, world: int) -> nn.Module:
    return DistributedDataParallel(model)


def cut(model: nn.Module, world: int, *, blocks: int = 1) -> nn.Module:
    """Each layer a unit, experts and all; whole copies in `blocks` of ranks."""
    sizes = {"copies": blocks, "shard": world // blocks} if blocks > 1 else {"shard": world}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for module in (
        *(layer for layer in model.modules() if isinstance(layer, TransformerLayer)),
        model,
    ):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        # It takes the mean by a multiplication that gloo has not: the sum, then.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def compared(plan: Plan, folder: Path, wrap: Wrap, seat: RankContext) -> RankOutcome:
    """The worst difference of a gradient over its norm, left in `folder`."""
    device, data = init_distributed(seat), draw_batches(plan.model)

    def built(layout: Layout) -> TrainState:
        return build_train_state(
            Job(model=plan.model, workload=plan.workload, layout=layout),
            data,
            rank=seat.rank,
            device=device,
            initial_value=draw_initial_value,
        )

    job = built(plan.layout)
    forward_backward(job, PhaseClock(), step=1)
    ours = [piece for piece in job.optimizer.gradient_shards() if piece.tensor.numel()]

    theirs = torchs_gradients(built(replace(plan.layout, zero=0, shard=0)), wrap, seat.world_size)
    assert ours
    worst = 0.0
    for piece in ours:
        wanted = theirs[piece.name]
        box = tuple(
            slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True)
        )
        worst = max(worst, float((piece.tensor - wanted[box]).norm() / wanted.norm()))
    (folder / f"worst{seat.rank}").write_text(str(worst))
    collectives.leave_world()
    return RankOutcome.DONE


def torchs_gradients(bare: TrainState, wrap: Wrap, world: int) -> dict[str, torch.Tensor]:
    """Of the first micro-batch, by name. The wrapper dies here, while the world still holds its
    group: the last owner ends the group's threads, and DDP would do so without letting go of
    Python, for which such a thread may wait.
    """
    for slot in list_parameters(bare.model):  # parameters that nothing of the engine hangs on
        slot.owner.weight = nn.Parameter(slot.owner.weight.detach().clone())
    wrapped = wrap(bare.model, world)  # its hooks live as long as it does
    out = wrapped(bare.train_data.micro_batch(bare.runtime, 0, 0))
    loss = out.nll.sum() / int((bare.train_data.targets[0] >= 0).sum()) + out.aux.sum() / world
    # DDP takes the mean over ranks, of a sum that is already over all valid targets.
    (loss * (world if isinstance(wrapped, DistributedDataParallel) else 1)).backward()
    return {
        f"grad/{slot.name}": whole(slot.owner.weight.grad) for slot in list_parameters(bare.model)
    }


def whole(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@pytest.mark.parametrize(
    ("world", "layout", "wrap", "model"),
    [
        (2, "zero0", replicated, tiny_jobs.DENSE),
        (4, "zero1", replicated, tiny_jobs.DENSE),
        (2, "zero3", cut, tiny_jobs.MODEL),
        (4, "zero1", cut, tiny_jobs.MODEL),
        (4, "zero3,shard2", partial(cut, blocks=2), tiny_jobs.MODEL),
    ],
)
def test_gradients_are_those_of_torchs_data_parallelism(
    world: int, layout: str, wrap: Wrap, model: ModelSpec, tmp_path: Path
) -> None:
    text = f"{layout},mbs{WORKLOAD.global_batch // world}"
    plan = tiny_jobs.build_plan(WORKLOAD, text, world_size=world, model=model)
    assert (
        launch(partial(compared, plan, tmp_path, wrap), nproc=world, run_dir=tmp_path / "run")
        is ExitCode.DONE
    )
    assert max(float((tmp_path / f"worst{rank}").read_text()) for rank in range(world)) < 3e-6
