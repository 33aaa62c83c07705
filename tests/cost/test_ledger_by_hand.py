"""The predicted ledger of a job that is small enough to work out by hand.

Every number below is literal arithmetic.

Two ranks, ep2 folded onto dp2, two MoE layers: h 4, 2 query heads and 1 key head of 4, E 4, f 8, k
2, V 16; sequences of 8 tokens, 4 a step, so each rank runs 2 micro-batches of 8 tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.ledger import predict_rank_ledger
from moewright.rules.job import Job
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

# Dense bucket, last parameter first, every start a multiple of 64: head 0-64, final norm 64-68;
# layer 1: router 128-144, post norm 192-196, o 256-288, v 320-336, k 384-400, q 448-480, input norm
# 512-516; layer 0: router 576-592, post norm 640-644, o 704-736, v 768-784, k 832-848, q 896-928,
# input norm 960-964; embedding 1024-1088. 1088 rounds up to 1152.
DENSE = 1152
SHARD = DENSE // 2
# Two experts a rank: down 64, gate_up 128 a layer, 384 in all, no padding.
EXPERTS = 384


def memory(ledger: Ledger, component: Component) -> dict[str, int]:
    return {row.module.value: row.bytes for row in ledger.memory if row.component is component}


def ledger(
    rank: int = 0, *, selection: Selection | None = None, text: str = "ep2", work: Workload = WORK
) -> Ledger:
    return predict_rank_ledger(
        Job(model=MODEL, workload=work, layout=parse_layout(text, world_size=2)),
        rank=rank,
        selection=selection,
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
        name: 2 * nbytes for name, nbytes in weights.items()
    }


@pytest.mark.parametrize(
    ("rank", "own"),
    [
        (0, {"attention": 96, "head": 64, "norm": 12, "router": 16, "other": SHARD - 188}),
        (1, {"attention": 96, "embedding": 64, "norm": 8, "router": 16, "other": SHARD - 184}),
    ],
)
def test_sharded_states(rank: int, own: dict[str, int]) -> None:
    """Give a rank half of the dense bucket, and all its experts, which have no replicas."""
    numel = {**own, "experts": EXPERTS}
    assert memory(ledger(rank), Component.MASTER) == {
        name: 4 * elements for name, elements in numel.items()
    }
    assert memory(ledger(rank), Component.MOMENTS) == {
        name: 8 * elements for name, elements in numel.items()
    }


def test_replicated_optimizer_holds_everything() -> None:
    master = memory(ledger(text="ep2,zero0"), Component.MASTER)
    assert sum(master.values()) == 4 * (DENSE + EXPERTS)
    comm = {
        (row.op.value, row.group): (row.bytes, row.calls) for row in ledger(text="ep2,zero0").comm
    }
    assert comm["all_reduce", "dp_cp"] == (4 * DENSE + 8, 2)
    assert comm["all_reduce", "world"] == (32 + 2 * 4 * 8 + 8 * 2 * 4, 2)
    assert ("all_gather", "dp_cp") not in comm


def test_collectives() -> None:
    counts = 8 * 4
    rows = 2 * 8 * 2 * 4
    probs = 4 * 8 * 2
    rows_back = 2 * 16 * 4
    forward = counts + rows + probs + rows_back
    backward = rows + rows_back + 4 * 16
    assert {(row.op.value, row.group): (row.bytes, row.calls) for row in ledger().comm} == {
        ("all_to_all", "ep"): (2 * 2 * (forward + backward), 2 * 2 * 7),
        ("all_reduce", "dp_cp"): (8, 1),
        ("all_reduce", "world"): (32 + 2 * 4 * 8 + 8 * 2 * 4, 2),
        ("reduce_scatter", "dp_cp"): (4 * DENSE, 1),
        ("all_gather", "dp_cp"): (2 * SHARD, 1),
    }


def test_flops() -> None:
    tokens = 16
    passes = 3
    layers = 2
    assert {(row.op.value, row.module.value): row.flops for row in ledger().flops} == {
        ("gemm", "attention"): passes * layers * 2 * tokens * 4 * (8 + 4 + 4 + 8),
        ("gemm", "router"): passes * layers * 2 * tokens * 4 * 4,
        ("gemm", "head"): passes * 2 * tokens * 4 * 16,
        ("grouped_gemm", "experts"): passes * layers * (2 * 16) * 2 * 3 * 4 * 8,
        ("attention", "attention"): passes * layers * 2 * (2 * 8 * 8 * (4 + 4)),
    }


def test_saved_activations() -> None:
    saved = memory(ledger(), Component.ACTIVATIONS)
    bf16 = 2 * 8
    # Normed input, q, k and v, output, log-sum-exp of each of two layers.
    assert saved["attention"] == 2 * (bf16 * 4 + bf16 * (8 + 4 + 4) + bf16 * 8 + 4 * 8 * 2)
    # Two inputs and statistics a layer, and the final norm's.
    assert saved["norm"] == 5 * (bf16 * 4 + 4 * 8)
    assert saved["embedding"] == 8 * 8
    # The head's input, the logits, the targets.
    assert memory(ledger(), Component.LOGITS) == {"head": bf16 * 4 + bf16 * 16 + 8 * 8}


def test_logits_in_pieces() -> None:
    """Make the logits once more in backward, and keep the log of each token's partition sum."""
    bf16 = 2 * 8
    blockwise = ledger(text="ep2,recompute=loss")
    assert memory(blockwise, Component.LOGITS) == {"head": bf16 * 4 + 4 * 8 + 8 * 8}
    plain = {(row.op, row.module): row.flops for row in ledger().flops}
    extra = {(row.op, row.module): row.flops - plain[row.op, row.module] for row in blockwise.flops}
    assert [added for added in extra.values() if added] == [2 * 16 * 4 * 16]
    assert extra[FlopOp.GEMM, Module.HEAD]
    assert (blockwise.comm, memory(blockwise, Component.ACTIVATIONS)) == (
        ledger().comm,
        memory(ledger(), Component.ACTIVATIONS),
    )


def test_selection_moves_rows() -> None:
    """Count rows by [micro-batch][layer][source][expert].

    Rank 0 holds experts 0 and 1 and receives 20, 16, 8 and 32 rows.
    """
    counts = (
        (((8, 4, 2, 2), (4, 4, 4, 4)), ((4, 4, 4, 4), (4, 4, 4, 4))),
        (((2, 2, 6, 6), (2, 2, 6, 6)), ((8, 8, 0, 0), (8, 8, 0, 0))),
    )
    first = ledger(selection=Selection(step=1, counts=counts))
    second = ledger(1, selection=Selection(step=1, counts=counts))
    rows = 20 + 16 + 8 + 32
    per_row = 3 * 2 * 3 * 4 * 8
    for predicted, received in ((first, rows), (second, 4 * 32 - rows)):
        flops = {row.module.value: row.flops for row in predicted.flops}
        assert flops["experts"] == received * per_row
        moved = next(row.bytes for row in predicted.comm if row.op.value == "all_to_all")
        # What is sent does not depend on the selection; what comes back does: rows twice and a
        # probability.
        assert moved == 4 * (8 * 4 + 2 * (2 * 16 * 4) + 4 * 16) + received * (2 * 2 * 4 + 4)
    # Rank 0 is fullest in the second micro-batch (8 + 32 rows), rank 1 in the first (12 + 16).
    fc1 = 2 * 2 * 8
    even = memory(ledger(), Component.ACTIVATIONS)["experts"]
    row_bytes = (
        2 * 4 + fc1 + 2 * 8 + 4 + 2 * 8
    )  # input, fc1, activation, probability, the order there and back
    assert memory(first, Component.ACTIVATIONS)["experts"] == even + (40 - 32) * row_bytes
    assert memory(second, Component.ACTIVATIONS)["experts"] == even + (28 - 32) * row_bytes


def test_selection_of_another_job_is_refused() -> None:
    selection = Selection(
        step=1, counts=((((4, 4, 4, 4), (4, 4, 4, 4)), ((4, 4, 4, 4), (4, 4, 4, 4))),)
    )
    with pytest.raises(BadInput, match=r"selection\.counts"):
        ledger(selection=selection)


def test_small_buckets_pad_each() -> None:
    """Close a bucket after each of head and embedding, and after 64 elements between them."""
    work = replace(WORK, optimizer=replace(WORK.optimizer, bucket_elements=64))
    reduction = next(row for row in ledger(work=work).comm if row.op.value == "reduce_scatter")
    # head | norm, router (ends at 80) | post norm, o (96) | v, k (80) | q, input norm (68)
    # | router, post norm (68) | o, v (80) | k, q (96) | input norm, embedding (128)
    # Each is padded to 128.
    assert (reduction.bytes, reduction.calls) == (4 * 128 * 9, 9)
