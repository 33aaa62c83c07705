"""FLOPs of one rank's share against the total, and against the written-out formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.intake import catalogue
from moewright.rules.shapes import flops, mixers
from moewright.spec.layout import Layout
from moewright.spec.ledger import FlopOp, Module
from moewright.spec.model import ModelSpec

QWEN = catalogue.model("Qwen3-235B-A22B")


def whole_share(model: ModelSpec, tokens: int) -> flops.RankShare:
    depths = model.mtp_layers if model.moe_layers[-1] else 0
    top_k = model.moe.router.top_k if model.moe else 0
    return flops.RankShare(
        layers=tuple(range(model.layers)),
        tokens=tokens,
        routed_rows=tokens * top_k * (model.moe_layer_count + depths),
        head=True,
        mtp=model.mtp_layers,
    )


def test_formula_of_a_plain_moe() -> None:
    """docs/formulas.md 9, written out for grouped-query attention without shared experts."""
    h, q, kv, f, k, layers, seq = 4096, 8192, 512, 1536, 8, 94, 4096
    linear = layers * (h * (q + 2 * kv) + q * h + 3 * k * f * h) + h * 151936
    assert flops.model_flops_per_token(QWEN, seq) == 6 * linear + 6 * q * seq * layers


def test_full_scores_would_add_what_the_convention_trap_says() -> None:
    """Counting both halves of the scores adds 12.8 % for Qwen3-235B at 4096."""
    causal = flops.model_flops_per_token(QWEN, 4096)
    scores = 6 * 8192 * 4096 * 94
    assert scores / causal == pytest.approx(0.128, abs=5e-4)


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "Qwen2-57B-A14B", "gpt-oss-20b", "Qwen3-8B", "GPT3-175B"]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rank_shares_add_up(name: str, tp: int) -> None:
    """TP ranks, two pipeline halves and two halves of the tokens together make up the model."""
    model = catalogue.model(name)
    seq = 2048
    etp = 2 if tp > 1 else 1
    layout = Layout(world_size=tp, tp=tp, sp=tp > 1, etp=etp)
    half = model.layers // 2
    total = 0
    for layers, last in ((range(half), False), (range(half, model.layers), True)):
        depths = model.mtp_layers if last else 0
        moe = sum(model.moe_layers[i] for i in layers) + (depths if model.moe_layers[-1] else 0)
        top_k = model.moe.router.top_k if model.moe else 0
        share = flops.RankShare(
            layers=tuple(layers),
            tokens=seq // 2,
            # Every rank of the TP group sends its part; ETP ranks compute the rows of their group.
            routed_rows=seq // 2 // (tp if layout.sp else 1) * top_k * moe * etp,
            head=last,
            mtp=depths,
        )
        rows = flops.train_flop_rows(model, layout, share, seq_len=seq)
        total += 2 * tp * flops.total_model_flops(rows)
    assert total == pytest.approx(flops.model_flops_per_token(model, seq) * seq, rel=1e-9)


def test_rows_name_every_module_once_and_keep_the_router_apart() -> None:
    model = catalogue.model("DeepSeek-V3")
    rows = flops.train_flop_rows(
        model, Layout(world_size=1), whole_share(model, 4096), seq_len=4096
    )
    keys = [(row.op, row.module) for row in rows]
    assert len(set(keys)) == len(keys)
    assert keys == sorted(keys)
    router = next(row for row in rows if row.module is Module.ROUTER)
    assert router.flops == 6 * 4096 * 7168 * 256 * (58 + 1)
    assert flops.total_model_flops(rows) == sum(row.flops for row in rows) - router.flops
    head = next(row for row in rows if row.module is Module.HEAD)
    assert head.flops == 6 * 4096 * 7168 * 129280 * 2


def test_actual_rows_count_not_expected_ones() -> None:
    share = whole_share(QWEN, 1024)
    busy = replace(share, routed_rows=share.routed_rows + 100)
    layout = Layout(world_size=1)
    more = flops.total_model_flops(flops.train_flop_rows(QWEN, layout, busy, seq_len=1024))
    less = flops.total_model_flops(flops.train_flop_rows(QWEN, layout, share, seq_len=1024))
    assert more - less == 100 * 6 * 3 * 4096 * 1536


def test_forward_is_a_third() -> None:
    share = whole_share(QWEN, 512)
    forward = flops.forward_flop_rows(QWEN, Layout(world_size=1), share, seq_len=512)
    both = flops.train_flop_rows(QWEN, Layout(world_size=1), share, seq_len=512)
    assert [3 * row.flops for row in forward] == [row.flops for row in both]
    assert {row.op for row in both} == set(FlopOp) - {FlopOp.SCAN}


def test_window_saves_what_it_does_not_attend() -> None:
    """The first queries attend fewer keys than the window; a window as long as the text is none."""
    model = catalogue.model("gpt-oss-20b")
    seq = 1024
    window = 128
    heads = 64
    windowed = mixers.attention_flops(model, 0, seq, seq)
    assert windowed == heads * (64 + 64) * sum(
        2 * min(query + 1, window) - 1 for query in range(seq)
    )
    assert mixers.attention_flops(model, 1, seq, seq) == 2 * heads * (64 + 64) * seq * seq // 2
    assert mixers.attention_flops(model, 0, window, window) == mixers.attention_flops(
        model, 1, window, window
    )


def test_documents_take_from_attention_alone() -> None:
    """A share of the pairs is that share of the scores; a shorter window keeps its own pairs."""
    seq = 4096
    scores = 6 * 8192 * 4096 * 94
    causal, bounded = (
        flops.model_flops_per_token(QWEN, seq, attended_share=share) for share in (1.0, 0.25)
    )
    assert causal - bounded == 0.75 * scores
    windowed = catalogue.model("gpt-oss-20b")
    halves = windowed.layers // 2 * 3 * 64 * (64 + 64) * seq
    less = flops.model_flops_per_token(windowed, seq) - flops.model_flops_per_token(
        windowed, seq, attended_share=0.5
    )
    assert less == halves * 0.5
