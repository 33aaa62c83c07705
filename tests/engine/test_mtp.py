"""MTP depths under every way of replaying and offloading: the same gradients, and ledgers as
predicted.

One process: layouts over several are proven in spawn/test_layout_sweep.
"""

from __future__ import annotations

import pytest
import torch

from layout_proof import _initial, assert_equal_lines, batches_of
from layout_space import Case, job
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
    """Every gradient of a counted step, whose ledger is held against its prediction."""
    case = Case(
        name="", shape="ahead", layout=parse_layout(text, world_size=1), documents=documents
    )
    assert not case.refusals
    plan = job(case)
    data = batches_of(plan.workload, plan.model)
    here = build_train_state(
        plan_job(plan), data, rank=0, device=torch.device("cpu"), initial_value=_initial,
        update_rule=sgd_update,
    )  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    update = here.optimizer.update

    def watched(*, lr: float, scale: float) -> None:
        found.update(
            (piece.name, piece.tensor.clone()) for piece in here.optimizer.gradient_shards()
        )
        update(lr=lr, scale=scale)

    here.optimizer.update = watched  # type: ignore[method-assign]
    result = train_step(here, step=1, lr=0.0, stop_requested=False, count_ledger=True)
    books = here.runtime.counters.build_ledger(
        rank=0, pp_rank=0, state=here.optimizer.memory_rows(), time=(), notes=()
    )
    counts = tuple(
        tuple((tuple(layer),) for layer in of_batch) for of_batch in result.expert_counts.tolist()
    )
    attended = () if documents is DocumentMasking.JOINED else (result.attended_pairs,)
    selection = Selection(step=1, counts=counts, attended=attended)
    assert_equal_lines(predict_ledger(plan, rank=0, selection=selection), books)
    return found


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As a rank has: tiny products only wait for more."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("choice", CHOICES)
def test_depths_replay_and_offload_as_layers_do(choice: str) -> None:
    documents = DocumentMasking.RESTARTED if "block" in choice else DocumentMasking.JOINED
    wanted, found = gradients("mbs2", documents), gradients(f"mbs2,{choice}", documents)
    assert any(name.startswith("grad/mtp.1.") for name in wanted)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    "choice", ["recompute=loss", "recompute=full+loss", "recompute=block5+loss"]
)
def test_depths_share_a_loss_that_keeps_no_logits(choice: str) -> None:
    """Sums in another order: equal to rounding, not bit by bit as what is replayed."""
    wanted, found = (
        gradients("mbs2", DocumentMasking.JOINED),
        gradients(f"mbs2,{choice}", DocumentMasking.JOINED),
    )
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 2e-6 * gradient.norm(), name
