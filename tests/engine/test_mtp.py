"""MTP depths under every kind of recomputation and offloading.

Gradients stay the same, and ledgers are as predicted.

One process: layouts over several are proven in spawn/test_layout_sweep.
"""

from __future__ import annotations

import pytest
import torch

from layout_proof import assert_equal_rows, build_batches, draw_test_weight
from layout_space import Case, plan_case
from moewright.codec import parse_layout
from moewright.cost.ledger import predict_ledger
from moewright.engine.optim.update_rules import sgd_update
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.rules.job import plan_job
from moewright.spec.ledger import Selection
from moewright.spec.workload import DocumentMasking

CHOICES = (
    "recompute=full",
    "recompute=block5",
    "recompute=uniform2",
    "recompute=moe",
    "recompute=core_attn+layernorm",
    "recompute=shared_experts+moe_act+mlp",
    "offload=attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act",
)


def gradients(text: str, documents: DocumentMasking) -> dict[str, torch.Tensor]:
    """Return every gradient of a counted step, whose ledger is compared with its prediction."""
    case = Case(
        name="", shape="ahead", layout=parse_layout(text, world_size=1), documents=documents
    )
    assert not case.refusals
    plan = plan_case(case)
    data = build_batches(plan.workload, plan.model)
    state = build_train_state(
        plan_job(plan), data, rank=0, device=torch.device("cpu"), initial_value=draw_test_weight,
        update_rule=sgd_update,
    )  # fmt: skip
    results: dict[str, torch.Tensor] = {}
    update = state.optimizer.update

    def record_gradients(*, lr: float, scale: float) -> None:
        results.update(
            (piece.name, piece.tensor.clone()) for piece in state.optimizer.gradient_shards()
        )
        update(lr=lr, scale=scale)

    state.optimizer.update = record_gradients  # type: ignore[method-assign]
    result = train_step(state, step=1, lr=0.0, stop_requested=False, count_ledger=True)
    ledger = state.runtime.counters.build_ledger(
        rank=0, pp_rank=0, state=state.memory_rows(), time=(), notes=()
    )
    counts = tuple(
        tuple((tuple(layer),) for layer in of_batch)
        for of_batch in result.backward.expert_counts.tolist()
    )
    attended = () if documents is DocumentMasking.JOINED else (result.backward.attended_pairs,)
    selection = Selection(step=1, counts=counts, attended=attended)
    # The copies of gradients above are storages that no row lists.
    assert_equal_rows(predict_ledger(plan, rank=0, selection=selection), ledger)
    return results


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread, as a rank does: tiny products only wait for more."""
    torch.set_num_threads(1)


def test_a_depth_joins_the_token_ahead_with_the_hidden_state() -> None:
    """Project the embedding before the hidden state, as published weights (eh_proj) have them."""
    plan = plan_case(Case(name="", shape="ahead", layout=parse_layout("mbs2", world_size=1)))
    state = build_train_state(
        plan_job(plan),
        build_batches(plan.workload, plan.model),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
    )
    depth = state.model.mtp["0"]
    depth.layer.forward = lambda decisions, context, x_tH: (x_tH,)
    generator = torch.Generator().manual_seed(0)
    embedded, hidden = torch.randn(2, 6, plan.model.hidden_size, generator=generator)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, plan.model.norm_eps)

    joined = torch.cat(
        (normed(embedded, depth.embed_norm.weight), normed(hidden, depth.hidden_norm.weight)), -1
    )
    (projected,) = depth(embedded, hidden, None, False)
    torch.testing.assert_close(projected, joined @ depth.proj.weight.T)


@pytest.mark.turns
@pytest.mark.parametrize("choice", CHOICES)
def test_depths_recompute_and_offload_as_layers_do(choice: str) -> None:
    documents = DocumentMasking.RESTARTED if "block" in choice else DocumentMasking.JOINED
    expected = gradients("mbs2", documents)
    results = gradients(f"mbs2,{choice}", documents)
    assert any(name.startswith("grad/mtp.1.") for name in expected)
    assert expected.keys() == results.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(results[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.turns
@pytest.mark.parametrize(
    "choice", ["recompute=loss", "recompute=full+loss", "recompute=block5+loss"]
)
def test_depths_share_a_loss_that_keeps_no_logits(choice: str) -> None:
    """Sums are in another order: equal to rounding, not bit by bit as what is recomputed."""
    expected = gradients("mbs2", DocumentMasking.JOINED)
    results = gradients(f"mbs2,{choice}", DocumentMasking.JOINED)
    assert expected.keys() == results.keys()
    for name, gradient in expected.items():
        assert (results[name] - gradient).norm() <= 2e-6 * gradient.norm(), name
