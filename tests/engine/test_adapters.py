"""Adapters beside frozen weights: what they compute, hold and save."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layout_space import SHAPES
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.model.transformer import Transformer, draw_initial_value
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.corpus_loader import NoBatches
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import ADAPTER_PARTS, adapter_parameters, is_adapter
from moewright.rules.job import Job
from moewright.rules.shapes.parameters import parameters
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Component, Module
from moewright.spec.model import AttentionKind, AttentionSpec, MoeSpec, RopeSpec, RouterSpec
from moewright.spec.workload import AdapterTarget, DataSpec, FineTuningSpec, Task
from tiny_jobs import MODEL, build_workload

EVERYWHERE = FineTuningSpec(
    task=Task.LORA, lora_rank=4, lora_alpha=6.0, lora_experts=True, lora_router=True
)
PROJECTIONS_ALONE = FineTuningSpec(
    task=Task.LORA, lora_rank=4, lora_alpha=6.0, lora_targets=(AdapterTarget.PROJ,)
)
LATENT = AttentionSpec(
    kind=AttentionKind.MLA, heads=4, kv_heads=4, head_dim=16, v_head_dim=12,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    rope=RopeSpec(interleaved=True),
)  # fmt: skip
SHARED = replace(
    MODEL, moe=MoeSpec(experts=8, ffn_size=16, router=RouterSpec(top_k=2), shared_ffn_size=24)
)


COMPRESSED = replace(SHAPES["compressed_ahead"], vocab_size=MODEL.vocab_size)


def draw_value(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
    """Draw a value, of both matrices of an adapter too."""
    value = draw_initial_value(parameter, runtime)
    if ".lora_b." in parameter.name:
        generator = torch.Generator().manual_seed(len(parameter.name))
        value = 0.1 * torch.randn(value.shape, generator=generator)
    return value


def build_state(
    fine_tuning: FineTuningSpec, model=MODEL, layout=None, draw=draw_value
) -> TrainState:  # type: ignore[no-untyped-def]
    workload = replace(build_workload(DataSpec()), fine_tuning=fine_tuning)
    return build_train_state(
        Job(model=model, workload=workload, layout=layout or Layout(world_size=1)),
        NoBatches(),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw,
    )


def run(model: Transformer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, MODEL.vocab_size, (3, 33), generator=generator)
    out = model(build_micro_batch(model._runtime, ids[:, :-1], ids[:, 1:], None), first_sequence=0)
    return out.nll.sum() + out.aux_losses.sum()


def merge(base: torch.Tensor, name: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight with the product of its adapter added, where it has one."""
    stem = name.removesuffix("weight")
    if f"{stem}lora_a.weight" not in values:
        return base
    a, b = (values[f"{stem}{part}.weight"] for part in ADAPTER_PARTS)
    return base + 6.0 / 4 * b @ a


@pytest.mark.parametrize(
    ("model", "fine_tuning"),
    [
        (MODEL, EVERYWHERE),
        (SHARED, EVERYWHERE),
        (replace(MODEL, attention=LATENT), EVERYWHERE),
        (COMPRESSED, EVERYWHERE),
        (SHARED, PROJECTIONS_ALONE),
    ],
)
def test_adapters_compute_what_merged_weights_do(model, fine_tuning) -> None:  # type: ignore[no-untyped-def]
    """The gradient of an adapter follows from that of the merged weight by the chain rule."""
    adapted = build_state(fine_tuning, model)
    values = {p.name: p.parameter.data for p in list_parameters(adapted.model)}
    expected_names = [param.name for param in adapter_parameters(model, fine_tuning)]
    assert sorted(name for name in values if is_adapter(name)) == sorted(expected_names)

    def merged_value(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
        return merge(values[parameter.name], parameter.name, values)

    merged = build_state(FineTuningSpec(), model, draw=merged_value)
    merged_loss, loss = run(merged.model), run(adapted.model)
    torch.testing.assert_close(loss, merged_loss, rtol=1e-5, atol=0)
    grads: dict[str, torch.Tensor] = {}
    for state, total in ((merged, merged_loss), (adapted, loss)):
        state.optimizer.begin_step(1)
        total.backward()
        grads |= {
            parameter.name: view.clone()
            for bucket in state.optimizer.buckets
            for parameter, view in bucket.grad_views
            if is_adapter(parameter.name) or state is merged
        }
    for name in expected_names:
        stem, part = name.removesuffix(".weight").rsplit(".", 1)
        full = grads[f"{stem}.weight"] * 6.0 / 4
        if part == "lora_a":
            expected = values[f"{stem}.lora_b.weight"].mT @ full
        else:
            expected = full @ values[f"{stem}.lora_a.weight"].mT
        error = float((grads[name] - expected).norm() / expected.norm())
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize("recompute", [(), (Recompute.FULL,), (Recompute.MOE, Recompute.MLP)])
def test_frozen_weights_have_no_gradient_and_no_state(recompute: tuple[Recompute, ...]) -> None:
    state = build_state(EVERYWHERE, layout=Layout(world_size=1, recompute=recompute))
    run(state.model).backward()
    for parameter in list_parameters(state.model):
        assert parameter.parameter.requires_grad == is_adapter(parameter.name)
        assert is_adapter(parameter.name) or parameter.parameter.grad is None
    rows: dict[Component, int] = {}
    for row in state.optimizer.memory_rows():
        if row.module is not Module.OTHER:  # what buckets are filled up with
            rows[row.component] = rows.get(row.component, 0) + row.bytes
    adapters = sum(param.numel for param in adapter_parameters(MODEL, EVERYWHERE))
    base = sum(param.numel for param in parameters(MODEL))
    assert rows[Component.WEIGHTS] == 4 * (base + adapters)
    assert rows[Component.GRADIENTS] == rows[Component.MASTER] == 4 * adapters
    assert rows[Component.MOMENTS] == 8 * adapters
    grads = [view for bucket in state.optimizer.buckets for _, view in bucket.grad_views]
    assert all(view.any() for view in grads)
    saved = {shard.name for shard in state.local_shards() if not shard.name.startswith("optim/")}
    assert saved == {param.name for param in adapter_parameters(MODEL, EVERYWHERE)}


def test_adapters_begin_without_effect() -> None:
    plain = build_state(FineTuningSpec(), draw=draw_initial_value)
    adapted = build_state(EVERYWHERE, draw=draw_initial_value)
    assert torch.equal(run(plain.model), run(adapted.model))


def test_what_is_frozen_is_not_kept_for_backward() -> None:
    """Inputs of frozen products are kept where an adapter needs them, and else dropped."""

    def count_saved(fine_tuning: FineTuningSpec) -> int:
        state = build_state(fine_tuning)
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not state.optimizer.is_weight(tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = run(state.model)
        del loss
        return sum(storages.values())

    attention_alone = FineTuningSpec(task=Task.LORA, lora_rank=4)
    assert count_saved(attention_alone) < 0.9 * count_saved(FineTuningSpec())
