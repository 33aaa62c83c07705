"""What an update does to the weights, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layout_proof import WORKLOAD, draw_test_weight
from moewright.engine.optim.muon import orthogonalize
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, sgd_update
from moewright.engine.run.build_state import build_train_state
from moewright.rules.job import plan_job
from moewright.rules.optimizers import COEFFICIENTS, scale_update
from moewright.spec.workload import Dtype, MatrixUpdate, MuonCoefficients, MuonScale, MuonSpec
from tiny_jobs import MODEL, build_plan

LR = 0.5


@pytest.mark.parametrize("update_rule", [adamw_update, sgd_update])
def test_without_gradients_matrices_decay_and_vectors_stay(update_rule: UpdateRule) -> None:
    work = replace(WORKLOAD, optimizer=replace(WORKLOAD.optimizer, weight_decay=0.1))
    no_data: Any = None
    optimizer = build_train_state(
        plan_job(build_plan(work, "", world_size=1, model=MODEL)),
        no_data,
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
        update_rule=update_rule,
    ).optimizer
    weights = [shard for shard in optimizer.local_shards() if "/" not in shard.name]
    before = [shard.tensor.clone() for shard in weights]
    optimizer.begin_step(1)
    optimizer.reduce_gradients()
    optimizer.update(lr=LR, scale=1.0)
    assert {len(shard.global_shape) > 1 for shard in weights} == {True, False}
    for shard, old in zip(weights, before, strict=True):
        factor = 1 - LR * 0.1 if len(shard.global_shape) > 1 else 1.0
        torch.testing.assert_close(shard.tensor, factor * old, msg=shard.name)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_makes_the_updates_of_torch(shape: tuple[int, int], nesterov: bool) -> None:
    """torch.optim.Muon has one triple of coefficients, and Jordan's scale or none."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=generator)
    expected = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon(
        [expected], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov
    )
    momentum = torch.zeros(shape)
    coefficients = COEFFICIENTS[MuonCoefficients.SIMPLE]
    for _ in range(3):
        grad = torch.randn(shape, generator=generator)
        expected.grad = grad.clone()
        optimizer.step()
        momentum.lerp_(grad, 1 - 0.9)
        direction = grad.lerp(momentum, 0.9) if nesterov else momentum
        update = orthogonalize(
            direction[None], steps=5, coefficients=coefficients, dtype=torch.bfloat16
        )[0].float()
        update *= scale_update(MuonScale.SHAPE_SCALING, 1.0, *shape)
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * update
        torch.testing.assert_close(weight, expected.detach(), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("coefficient_type", list(MuonCoefficients))
def test_newton_schulz_steps_bring_singular_values_near_one(
    coefficient_type: MuonCoefficients,
) -> None:
    matrices = torch.randn((3, 20, 33), generator=torch.Generator().manual_seed(1))
    matrices[2] = 0.0
    updates = orthogonalize(
        matrices, steps=5, coefficients=COEFFICIENTS[coefficient_type], dtype=torch.float32
    )
    values = torch.linalg.svdvals(updates)
    assert values[:2].min() > 0.6
    assert values[:2].max() < 1.3
    assert not updates[2].any()
    u, _, vt = torch.linalg.svd(matrices[0], full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(updates[0].flatten(), (u @ vt).flatten(), dim=0)
    assert cosine > 0.97


def test_one_process_with_muon_updates_as_torch_does_by_matrix() -> None:
    """Each parameter of a model takes the update of torch's Muon, or of torch's AdamW."""
    muon = MuonSpec(
        muon_coefficient_type=MuonCoefficients.SIMPLE, muon_scale_mode=MuonScale.SHAPE_SCALING
    )
    spec = replace(WORKLOAD.optimizer, matrix_update=MatrixUpdate.MUON)
    work = replace(WORKLOAD, optimizer=spec, muon=muon, precision=Dtype.BF16)
    no_data: Any = None
    optimizer = build_train_state(
        plan_job(build_plan(work, "", world_size=1, model=MODEL)),
        no_data,
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    ).optimizer
    generator = torch.Generator().manual_seed(9)
    before = {shard.name: shard.tensor.clone() for shard in optimizer.local_shards()}
    grads = {}
    for bucket in optimizer.buckets:
        for parameter, view in bucket.grad_views:
            view.copy_(torch.randn(view.shape, generator=generator))
            grads[parameter.name] = view.clone()
    optimizer.reduce_gradients()
    for bucket in optimizer.buckets:  # what no micro-batch used is cleared: fill it again
        for parameter, view in bucket.grad_views:
            view.copy_(grads[parameter.name])
    optimizer.update(lr=LR, scale=1.0)
    after = {shard.name: shard.tensor for shard in optimizer.local_shards()}
    names = [name for name in before if "/" not in name]
    matrices = {name for name in names if f"optim/momentum/{name}" in before}
    assert {name for name in names if "weight" in name and before[name].dim() > 1} - matrices == {
        "embedding.weight",
        "head.weight",
    }
    for name in names:
        experts = before[name].shape[0] if ".experts." in name else 1
        rows = before[name].reshape(experts, -1, before[name].shape[-1])
        for index in range(experts):
            own = torch.nn.Parameter(rows[index].clone())
            own.grad = grads[name].reshape(rows.shape)[index].clone()
            rule: torch.optim.Optimizer
            if name in matrices:
                rule = torch.optim.Muon([own], lr=LR, momentum=0.9, nesterov=False)
            else:
                decay = spec.weight_decay if before[name].dim() > 1 else 0.0
                betas = spec.beta1, spec.beta2
                rule = torch.optim.AdamW(
                    [own], lr=LR, betas=betas, eps=spec.eps, weight_decay=decay
                )
            rule.step()
            actual = after[name].reshape(rows.shape)[index]
            error = (actual - own.detach()).norm() / (own.detach() - rows[index]).norm()
            assert error < 1e-2, name
