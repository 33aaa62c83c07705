"""Plain data parallelism against torch's own: DistributedDataParallel over the same modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import tiny_jobs
from layout_proof import WORK, batches
from moewright.engine import collectives
from moewright.engine.build import join, trainee
from moewright.engine.launch import launch
from moewright.engine.model.layers import slots_of
from moewright.engine.model.transformer import initial_value
from moewright.engine.rank import Exit, Outcome, RankContext
from moewright.engine.step import Clock, Trainee, accumulate
from moewright.spec.plan import Plan

pytestmark = pytest.mark.spawn


def compared(plan: Plan, folder: Path, seat: RankContext) -> Outcome:
    """The worst relative difference of a gradient, left in `folder`."""
    device, data = join(seat), batches(plan.model)

    def built() -> Trainee:
        return trainee(
            plan.model, plan.workload, plan.layout, data, rank=seat.rank, device=device, initial=initial_value
        )

    job = built()
    accumulate(job, Clock(), step=1)
    ours = {piece.name: piece.tensor for piece in job.optimizer.gradients()}

    bare = built()
    for slot in slots_of(bare.model):  # parameters that nothing of the engine hangs on
        slot.owner.weight = torch.nn.Parameter(slot.owner.weight.detach().clone())
    wrapped = DistributedDataParallel(bare.model)  # its hooks live as long as it does
    out = wrapped(*data.micro_batch(bare.run, 0, 0))
    # It takes the mean over ranks, of a sum that is already over all valid targets.
    (out.nll.sum() / int((data.targets[0] >= 0).sum()) * seat.world).backward()
    worst = 0.0
    for slot in slots_of(bare.model):
        theirs = slot.owner.weight.grad
        worst = max(worst, float((ours[f"grad/{slot.name}"] - theirs).norm() / theirs.norm()))
    assert len(ours) == len(list(slots_of(bare.model)))
    (folder / f"worst{seat.rank}").write_text(str(worst))
    collectives.stop()
    return Outcome.DONE


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_torchs_data_parallelism(world: int, tmp_path: Path) -> None:
    layout = f"zero0,mbs{WORK.global_batch // world}"
    plan = tiny_jobs.plan(WORK, layout, world_size=world, model=tiny_jobs.DENSE)
    assert launch(partial(compared, plan, tmp_path), nproc=world, run_dir=tmp_path / "run") is Exit.DONE
    assert max(float((tmp_path / f"worst{rank}").read_text()) for rank in range(world)) < 3e-6
