"""Rows of experts and tokens of ranks, and how a capacity bounds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moewright.intake import catalogue
from moewright.rules.job import capacity_rows, micro_batch_tokens, routed_rows
from moewright.spec.layout import Layout
from moewright.spec.workload import Workload

QWEN = catalogue.model("Qwen3-235B-A22B")
WORKLOAD = Workload(seq_len=4096, global_batch=2048)


def test_capacity_rounds_up_exactly() -> None:
    """ceil(T k / E x factor): 4096 * 8 / 128 = 256 rows at factor 1."""
    assert capacity_rows(4096, 8, 128, 1.0) == 256
    assert capacity_rows(4096, 8, 128, 1.25) == 320
    assert capacity_rows(100, 2, 7, 1.0) == 29
    # 300 * 1.1 is 330 in decimal and 330.00000000000006 in binary.
    assert capacity_rows(300, 1, 1, 1.1) == 300
    assert capacity_rows(3000, 1, 10, 1.1) == 330
    assert capacity_rows(50, 1, 100, 1000.0) == 50
    assert capacity_rows(50, 4, 8, 0.0) == 50


def test_rows_of_a_rank() -> None:
    """docs/formulas.md 6: lambda x T k, T being the rank's own sequence part.

    ETP ranks share the rows of their group.
    """
    layout = Layout(world_size=256, tp=2, sp=True, pp=32, ep=8)
    assert routed_rows(QWEN, WORKLOAD, layout, 1.0) == 2048 * 8
    assert routed_rows(QWEN, WORKLOAD, layout, 1.5) == 2048 * 12
    folded = Layout(world_size=256, tp=2, sp=True, pp=32, ep=4, etp=2)
    assert routed_rows(QWEN, WORKLOAD, folded, 1.0) == 2048 * 8 * 2
    capped = Layout(world_size=256, tp=2, sp=True, pp=32, ep=8, capacity=1.0)
    assert routed_rows(QWEN, WORKLOAD, capped, 3.0) == 2048 * 8
    assert routed_rows(catalogue.model("Qwen3-8B"), WORKLOAD, layout, 1.0) == 0


def test_context_and_micro_batch_scale_tokens() -> None:
    layout = Layout(world_size=8, cp=2, mbs=4, ep=8)
    assert micro_batch_tokens(WORKLOAD, layout) == 4096 * 4 // 2


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 512), st.floats(0.01, 10))
def test_capacity_never_exceeds_tokens_nor_falls_short(
    tokens: int, top_k: int, experts: int, factor: float
) -> None:
    rows = capacity_rows(tokens, top_k, experts, factor)
    assert 0 < rows <= tokens
    assert rows == tokens or rows >= tokens * top_k / experts * factor * (1 - 1e-12)
