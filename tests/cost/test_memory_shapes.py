"""How a model's shape changes memory: dense layers, tied tables, windows, MTP, odd vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.ledger import Component, Module
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate
from moewright.spec.units import MIB
from moewright.spec.workload import Workload

QWEN = replace(catalogue.model("Qwen3-30B-A3B"), layers=8, moe_layers=(True,) * 8)
WORK = Workload(seq_len=4096, global_batch=64)
H, V = QWEN.hidden_size, QWEN.vocab_size


def estimate_layout(model: ModelSpec, text: str = "ep8", world: int = 8) -> Estimate:
    return estimate(
        model, WORK, catalogue.hardware(f"{world}xH100"), parse_layout(text, world_size=world)
    )


def memory_bytes(result: Estimate, component: Component, module: Module, pp_rank: int = 0) -> int:
    rows = result.ledgers[pp_rank].memory
    return sum(row.bytes for row in rows if row.component is component and row.module is module)


def test_dense_layers_between_moe_layers() -> None:
    """Make every second layer dense, of width 6144.

    It keeps 3 x 2 bytes x 6144 a token and a norm's output; half the experts are left.
    """
    mixed = replace(QWEN, moe_layers=(True, False) * 4, dense_ffn_size=6144)
    whole = estimate_layout(QWEN)
    half = estimate_layout(mixed)
    assert memory_bytes(half, Component.ACTIVATIONS, Module.DENSE_MLP) == 4 * 4096 * 2 * (
        3 * 6144 + H
    )
    for component in (Component.ACTIVATIONS, Component.WEIGHTS):
        assert 2 * memory_bytes(half, component, Module.EXPERTS) == memory_bytes(
            whole, component, Module.EXPERTS
        )
    assert memory_bytes(half, Component.ACTIVATIONS, Module.ATTENTION) == memory_bytes(
        whole, Component.ACTIVATIONS, Module.ATTENTION
    )


def test_a_tied_table_is_held_once_in_a_stage_and_on_both_ends_of_a_pipeline() -> None:
    tied = replace(QWEN, tie_embeddings=True)
    table = 2 * V * H
    assert (
        memory_bytes(estimate_layout(QWEN), Component.WEIGHTS, Module.EMBEDDING)
        == memory_bytes(estimate_layout(QWEN), Component.WEIGHTS, Module.HEAD)
        == table
    )
    assert memory_bytes(estimate_layout(tied), Component.WEIGHTS, Module.EMBEDDING) == table
    assert memory_bytes(estimate_layout(tied), Component.WEIGHTS, Module.HEAD) == 0
    cut = estimate_layout(tied, "ep4,pp2")
    assert [
        memory_bytes(cut, Component.WEIGHTS, Module.EMBEDDING, pp_rank=rank) for rank in (0, 1)
    ] == [
        table,
        table,
    ]


def test_a_window_keeps_the_same_keys() -> None:
    """Keep every key for the tokens that attend it, windowed or not."""
    windowed = replace(QWEN, attention=replace(QWEN.attention, sliding_window=128, window_every=1))
    assert estimate_layout(windowed).peak_bytes == estimate_layout(QWEN).peak_bytes


def test_an_mtp_depth_is_a_layer_a_projection_and_a_pass_through_the_head() -> None:
    with_mtp = estimate_layout(replace(QWEN, mtp_layers=1))
    without = estimate_layout(QWEN)
    layer = sum(
        memory_bytes(without, Component.WEIGHTS, module) // 8
        for module in (Module.ATTENTION, Module.ROUTER, Module.EXPERTS)
    )
    norms = 2 * (2 + 3) * H
    assert memory_bytes(with_mtp, Component.WEIGHTS, Module.MTP) == pytest.approx(
        layer + 2 * 2 * H * H + norms, abs=2 * H
    )
    # Of its logits the softmax in fp32 waits for backward while the head runs.
    more = memory_bytes(with_mtp, Component.LOGITS, Module.HEAD) - memory_bytes(
        without, Component.LOGITS, Module.HEAD
    )
    assert more == 4096 * (4 * V + 2 * H + 8)


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_vocabulary_is_padded_to_the_ranks_that_share_it(extra: int) -> None:
    odd = replace(QWEN, vocab_size=V + extra)
    rows = -(-(V + extra) // 4)
    assert (
        memory_bytes(estimate_layout(odd, "tp4,ep8"), Component.WEIGHTS, Module.EMBEDDING)
        == 2 * rows * H
    )
    assert (
        memory_bytes(estimate_layout(odd, "tp4,ep8"), Component.WEIGHTS, Module.HEAD)
        == 2 * rows * H
    )


def test_shared_experts_are_cut_by_tp_and_replayed_apart() -> None:
    shared = replace(QWEN, moe=replace(QWEN.moe, shared_ffn_size=1024)) if QWEN.moe else QWEN
    kept = estimate_layout(shared, "tp2,ep8")
    replayed = estimate_layout(shared, "tp2,ep8,recompute=shared_experts")
    assert (
        memory_bytes(kept, Component.ACTIVATIONS, Module.SHARED_EXPERTS)
        == 8 * 4096 * 3 * 2 * 1024 // 2
    )
    assert memory_bytes(replayed, Component.ACTIVATIONS, Module.SHARED_EXPERTS) == 0
    assert memory_bytes(kept, Component.ACTIVATIONS, Module.SHARED_EXPERTS) == 96 * MIB
