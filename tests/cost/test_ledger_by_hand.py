"""The predicted ledger of a job small enough to work out by hand; every number below is literal
arithmetic.

Two ranks, ep2 folded onto dp2, two MoE layers: h 4, 2 query heads and 1 key head of 4, E 4, f 8, k
2, V 16; sequences of 8 tokens, 4 a step, so each rank runs 2 micro-batches of 8 tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.ledger import predict_rank_ledger
from moewright.spec.errors import BadInput
from moewright.spec.ledger import Component, FlopOp, Ledger, Module, Selection
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec, MoeSpec, RouterSpec
from moewright.spec.workload import Workload

MODEL = ModelSpec(
    name="by-hand",
    family="",
    hidden_size=4,
    layers=2,
    vocab_size=16,
    attention=AttentionSpec(kind=AttentionKind.GQA, heads=2, kv_heads=1, head_dim=4, v_head_dim=4),
    dense_ffn_size=8,
    moe=MoeSpec(experts=4, ffn_size=8, router=RouterSpec(top_k=2)),
    moe_layers=(True, True),
)
WORK = Workload(seq_len=8, global_batch=4)
LAYOUT = parse_layout("ep2", world_size=2)

# Dense bucket, last parameter first, every start a multiple of 64: head 0-64, final norm 64-68,
# layer 1 router
# 128-144, post norm 192-196, o 256-288, v 320-336, k 384-400, q 448-480, input norm 512-516, layer
# 0 from 576: router
# 576-592, post norm 640-644, o 704-736, v 768-784, k 832-848, q 896-928, input norm 960-964,
# embedding 1024-1088;
# 1088 rounds up to 1152, two shards of 576. Experts (2 a rank): down 64, gate_up 128 a layer, 384
# in all, no padding.
DENSE, SHARD, EXPERTS = 1152, 576, 384


def memory(ledger: Ledger, component: Component) -> dict[str, int]:
    return {row.module.value: row.bytes for row in ledger.memory if row.component is component}


def ledger(
    rank: int = 0, *, selection: Selection | None = None, text: str = "ep2", work: Workload = WORK
) -> Ledger:
    return predict_rank_ledger(
        MODEL, work, parse_layout(text, world_size=2), rank=rank, selection=selection
    )


def test_weights_and_gradients() -> None:
    weights = {
        "attention": 2 * 2 * (32 + 16 + 16 + 32),
        "embedding": 2 * 64,
        "experts": 2 * EXPERTS,
        "head": 2 * 64,
        "norm": 2 * (2 * 2 * 4 + 4),
        "router": 2 * 2 * 16,
        "other": 2 * (DENSE - 192 - 64 - 64 - 20 - 32),
    }
    assert memory(ledger(), Component.WEIGHTS) == weights
    assert memory(ledger(), Component.GRADIENTS) == {
        name: 2 * held for name, held in weights.items()
    }


@pytest.mark.parametrize(
    ("rank", "own"),
    [
        (0, {"attention": 96, "head": 64, "norm": 12, "router": 16, "other": SHARD - 188}),
        (1, {"attention": 96, "embedding": 64, "norm": 8, "router": 16, "other": SHARD - 184}),
    ],
)
def test_sharded_states(rank: int, own: dict[str, int]) -> None:
    """A rank owns half of the dense bucket, and all of its experts: their data-parallel degree is
    1."""
    numel = {**own, "experts": EXPERTS}
    assert memory(ledger(rank), Component.MASTER) == {
        name: 4 * held for name, held in numel.items()
    }
    assert memory(ledger(rank), Component.MOMENTS) == {
        name: 8 * held for name, held in numel.items()
    }


def test_replicated_optimizer_holds_everything() -> None:
    held = memory(ledger(text="ep2,zero0"), Component.MASTER)
    assert sum(held.values()) == 4 * (DENSE + EXPERTS)
    comm = {
        (row.op.value, row.group): (row.bytes, row.calls) for row in ledger(text="ep2,zero0").comm
    }
    assert comm["all_reduce", "dp_cp"] == (4 * DENSE + 8, 2)
    assert comm["all_reduce", "world"] == (32 + 2 * 4 * 8 + 8 * 2 * 4, 2)
    assert ("all_gather", "dp_cp") not in comm


def test_collectives() -> None:
    counts, rows, probs, rows_back = 8 * 4, 2 * 8 * 2 * 4, 4 * 8 * 2, 2 * 16 * 4
    forward, backward = counts + rows + probs + rows_back, rows + rows_back + 4 * 16
    assert {(row.op.value, row.group): (row.bytes, row.calls) for row in ledger().comm} == {
        ("all_to_all", "ep"): (2 * 2 * (forward + backward), 2 * 2 * 7),
        ("all_reduce", "dp_cp"): (8, 1),
        ("all_reduce", "world"): (32 + 2 * 4 * 8 + 8 * 2 * 4, 2),
        ("reduce_scatter", "dp_cp"): (4 * DENSE, 1),
        ("all_gather", "dp_cp"): (2 * SHARD, 1),
    }


def test_flops() -> None:
    tokens, passes, layers = 16, 3, 2
    assert {(row.op.value, row.module.value): row.flops for row in ledger().flops} == {
        ("gemm", "attention"): passes * layers * 2 * tokens * 4 * (8 + 4 + 4 + 8),
        ("gemm", "router"): passes * layers * 2 * tokens * 4 * 4,
        ("gemm", "head"): passes * 2 * tokens * 4 * 16,
        ("grouped_gemm", "experts"): passes * layers * (2 * 16) * 2 * 3 * 4 * 8,
        ("attention", "attention"): passes * layers * 2 * (2 * 8 * 8 * (4 + 4)),
    }


def test_saved_activations() -> None:
    held = memory(ledger(), Component.ACTIVATIONS)
    bf16 = 2 * 8
    # Normed input, q, k and v, output, log-sum-exp of each of two layers.
    assert held["attention"] == 2 * (bf16 * 4 + bf16 * (8 + 4 + 4) + bf16 * 8 + 4 * 8 * 2)
    # Two inputs and statistics a layer, and the final norm's.
    assert held["norm"] == 5 * (bf16 * 4 + 4 * 8)
    assert held["embedding"] == 8 * 8
    # The head's input, the logits, the targets.
    assert memory(ledger(), Component.LOGITS) == {"head": bf16 * 4 + bf16 * 16 + 8 * 8}


def test_logits_in_pieces() -> None:
    """In backward they are made once more; of them the log of each token's partition sum is
    kept."""
    bf16, found = 2 * 8, ledger(text="ep2,recompute=loss")
    assert memory(found, Component.LOGITS) == {"head": bf16 * 4 + 4 * 8 + 8 * 8}
    plain = {(row.op, row.module): row.flops for row in ledger().flops}
    more = {(row.op, row.module): row.flops - plain[row.op, row.module] for row in found.flops}
    assert [added for added in more.values() if added] == [2 * 16 * 4 * 16]
    assert more[FlopOp.GEMM, Module.HEAD]
    assert (found.comm, memory(found, Component.ACTIVATIONS)) == (
        ledger().comm,
        memory(ledger(), Component.ACTIVATIONS),
    )


def test_selection_moves_rows() -> None:
    """counts[micro-batch][layer][source][expert]; rank 0 holds experts 0 and 1 and receives 20, 16,
    8 and 32 rows."""
    counts = (
        (((8, 4, 2, 2), (4, 4, 4, 4)), ((4, 4, 4, 4), (4, 4, 4, 4))),
        (((2, 2, 6, 6), (2, 2, 6, 6)), ((8, 8, 0, 0), (8, 8, 0, 0))),
    )
    mine = ledger(selection=Selection(step=1, counts=counts))
    theirs = ledger(1, selection=Selection(step=1, counts=counts))
    rows = 20 + 16 + 8 + 32
    per_row = 3 * 2 * 3 * 4 * 8
    for found, received in ((mine, rows), (theirs, 4 * 32 - rows)):
        flops = {row.module.value: row.flops for row in found.flops}
        assert flops["experts"] == received * per_row
        moved = next(row.bytes for row in found.comm if row.op.value == "all_to_all")
        # What is sent does not depend on the selection; what comes back does: rows twice and a
        # probability.
        assert moved == 4 * (8 * 4 + 2 * (2 * 16 * 4) + 4 * 16) + received * (2 * 2 * 4 + 4)
    # The second micro-batch is the fuller one for rank 0 (8 + 32 rows), the first for rank 1 (12 +
    # 16).
    fc1 = 2 * 2 * 8
    even = memory(ledger(), Component.ACTIVATIONS)["experts"]
    a_row = (
        2 * 4 + fc1 + 2 * 8 + 4 + 2 * 8
    )  # input, fc1, activation, probability, the order there and back
    assert memory(mine, Component.ACTIVATIONS)["experts"] == even + (40 - 32) * a_row
    assert memory(theirs, Component.ACTIVATIONS)["experts"] == even + (28 - 32) * a_row


def test_selection_of_another_job_is_refused() -> None:
    one = Selection(step=1, counts=((((4, 4, 4, 4), (4, 4, 4, 4)), ((4, 4, 4, 4), (4, 4, 4, 4))),))
    with pytest.raises(BadInput, match=r"selection\.counts"):
        ledger(selection=one)


def test_small_buckets_pad_each() -> None:
    """A bucket of 64 elements or more closes after each of head and embedding, and after 64
    elements between them."""
    work = replace(WORK, optimizer=replace(WORK.optimizer, bucket_elements=64))
    found = next(row for row in ledger(work=work).comm if row.op.value == "reduce_scatter")
    # head | norm, router (ends at 80) | post norm, o (96) | v, k (80) | q, input norm (68) |
    # router, post norm (68)
    # | o, v (80) | k, q (96) | input norm, embedding (128): each padded to 128.
    assert (found.bytes, found.calls) == (4 * 128 * 9, 9)
