"""One switch of a Megatron-LM script changed: what each measure of a check must say of it.

The formulas are written out here from Megatron-LM's code and from papers, in numbers: Korthikanti
et al. 2022 (arXiv 2205.05198) for what is saved under sequence parallelism and recompute, Narayanan
et al. 2021 (arXiv 2104.04473) for interleaved stages, Rajbhandari et al. 2020 (arXiv 1910.02054)
for optimizer states. Changes of sizes and of degrees are held in test_check_arithmetic.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import pytest

import moewright as mw
from moewright.diagnosis.plan_changes import Measure, PlanChanges

# A job of grouped-query attention with experts in every layer on 16 ranks.
LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN = 8, 2048, 16, 4, 128, 6144
EXPERTS, EXPERT_FFN, TOP_K, VOCAB, SEQ = 16, 1024, 2, 65536, 4096
TP, EP, DP, EXPERT_DP, MICRO_BATCHES = 2, 8, 8, 2, 8
BF16, FP32 = 2, 4
OWN = SEQ // TP  # tokens of a rank outside of attention
ROWS = OWN * TOP_K  # of a rank's experts, under even routing
SHARD = OWN * HIDDEN  # elements of a layer's input on a rank
ATTENTION = (HIDDEN * (HEADS + 2 * GROUPS) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN) // TP
EXPERT_WEIGHTS = LAYERS * 3 * HIDDEN * EXPERT_FFN * EXPERTS // EP
TABLE = VOCAB * HIDDEN // TP
DENSE = LAYERS * ATTENTION + 2 * TABLE
WHOLE = LAYERS * (2 * HIDDEN + EXPERTS * HIDDEN) + HIDDEN  # norms and routers, on every TP rank
SHARED = 3 * HIDDEN * 2048 // TP  # of a shared expert 2048 wide
# Elements that a rank updates.
UPDATED = DENSE // DP + WHOLE // (DP * TP) + EXPERT_WEIGHTS // EXPERT_DP
SCORES = SEQ * SEQ // 2 * HEADS * HEAD_DIM // TP  # of a layer: half of the square
ROUTER_PRODUCTS = HIDDEN * EXPERTS * OWN
EXPERT_PRODUCTS = 3 * HIDDEN * EXPERT_FFN * ROWS
FORWARD_FLOPS = 2 * (ATTENTION * SEQ + ROUTER_PRODUCTS + EXPERT_PRODUCTS) + 4 * SCORES
A_STEP = MICRO_BATCHES * LAYERS
WINDOW = 1025  # the token itself, and 1,024 before it
PAIRS_LOST = SEQ * (SEQ + 1) // 2 - sum(min(place + 1, WINDOW) for place in range(SEQ))

Options: TypeAlias = dict[str, object]
Expected: TypeAlias = dict[str, int]

OPTIONS: Options = {
    "num-layers": LAYERS,
    "hidden-size": HIDDEN,
    "ffn-hidden-size": FFN,
    "num-attention-heads": HEADS,
    "group-query-attention": "",
    "num-query-groups": GROUPS,
    "kv-channels": HEAD_DIM,
    "seq-length": SEQ,
    "max-position-embeddings": SEQ,
    "vocab-size": VOCAB,
    "tokenizer-type": "NullTokenizer",
    "untie-embeddings-and-output-weights": "",
    "disable-bias-linear": "",
    "swiglu": "",
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "tensor-model-parallel-size": TP,
    "sequence-parallel": "",
    "pipeline-model-parallel-size": 1,
    "micro-batch-size": 1,
    "global-batch-size": DP * MICRO_BATCHES,
    "bf16": "",
    "accumulate-allreduce-grads-in-fp32": "",
    "use-distributed-optimizer": "",
    "attention-backend": "flash",
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "lr": 1e-4,
    "train-iters": 100,
    "mock-data": "",
}
MOE: Options = {
    "moe-ffn-hidden-size": EXPERT_FFN,
    "num-experts": EXPERTS,
    "moe-router-topk": TOP_K,
    "moe-grouped-gemm": "",
    "moe-token-dispatcher-type": "alltoall",
    "moe-router-force-load-balancing": "",
    "expert-model-parallel-size": EP,
    "expert-tensor-parallel-size": 1,
}
SELECTIVE: Options = {"recompute-granularity": "selective"}
AWARE: Options = {"use-precision-aware-optimizer": ""}


def script(options: Options) -> str:
    """Return a launch script on 16 devices; options that are None are left out."""
    words = " ".join(f"--{k} {v}".strip() for k, v in options.items() if v is not None)
    return f"#!/bin/bash\ntorchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py {words}\n"


def check(folder: Path, before: Options, after: Options) -> PlanChanges:
    (folder / "before.sh").write_text(script(OPTIONS | before))
    (folder / "after.sh").write_text(script(OPTIONS | before | after))
    (job,) = mw.check(folder / "before.sh", folder / "after.sh", on="H100").jobs
    assert job.changes is not None
    return job.changes


def growth(changes: PlanChanges, measure: Measure) -> int:
    change = changes.find(measure)
    assert change is not None
    return int(change.after - change.before)


def states(*, dense: int = 0, whole: int = 0, experts: int = 0) -> int:
    """Return weights and fp32 gradients of a rank, and its share of master weights and moments."""
    shares = dense // DP + whole // (DP * TP) + experts // EXPERT_DP
    return (dense + whole + experts) * (BF16 + FP32) + shares * 3 * FP32


# Rows go to experts and back, in forward and in backward; what is left of a layer's calls are
# weights of rows, twice, and the numbers of rows, once.
SENT_ROWS = 4 * ROWS * HIDDEN * BF16 + 2 * ROWS * FP32
REPEATED_MOE = 2 * ROWS * HIDDEN * BF16 + ROWS * FP32 + 8 * EXPERTS
NOTHING = {"states": 0, "saved": 0, "comm": 0, "calls": 0, "flops": 0}
CASES: dict[str, tuple[Options, Options, Expected]] = {
    # arXiv 2104.04473, 2.2: p (m - 1) messages more for each micro-batch, here one each way.
    "vpp": (
        {"pipeline-model-parallel-size": 2},
        {"num-layers-per-virtual-pipeline-stage": 2},
        {"states": 0, "flops": 0, "calls": 2 * 16, "comm": 2 * 16 * SHARD * BF16},
    ),
    # arXiv 2205.05198, 4.2: a forward more of each layer, its collectives too.
    "full recompute": (
        {},
        {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        },
        {
            "states": 0,
            "flops": A_STEP * FORWARD_FLOPS,
            "calls": A_STEP * (1 + 1 + 4),
            "comm": A_STEP * (SHARD * BF16 + SEQ * HIDDEN * BF16 + REPEATED_MOE),
        },
    ),
    # 4.1: 5 a s^2 b / t with dropout, of which 2 are the probabilities in 16 bits.
    "whole scores are made again": (
        {"attention-backend": "unfused"},
        SELECTIVE | {"recompute-modules": "core_attn"},
        {"states": 0, "saved": -LAYERS * BF16 * HEADS // TP * SEQ**2, "comm": 0, "calls": 0},
    ),
    "core_attn": (
        {},
        SELECTIVE | {"recompute-modules": "core_attn"},
        NOTHING | {"saved": -LAYERS * SEQ * HEADS // TP * FP32, "flops": A_STEP * 4 * SCORES},
    ),
    "moe_act": (
        {},
        SELECTIVE | {"recompute-modules": "moe_act"},
        NOTHING | {"saved": -LAYERS * ROWS * EXPERT_FFN * BF16},
    ),
    # The norm before attention is part of its first product, which is not made again.
    "layernorm": (
        {},
        SELECTIVE | {"recompute-modules": "layernorm"},
        NOTHING | {"saved": -LAYERS * (SHARD * BF16 + OWN * FP32)},
    ),
    "moe": (
        {},
        SELECTIVE | {"recompute-modules": "moe"},
        {
            "states": 0,
            "flops": A_STEP * 2 * (ROUTER_PRODUCTS + EXPERT_PRODUCTS),
            "calls": A_STEP * 4,
            "comm": A_STEP * REPEATED_MOE,
        },
    ),
    # arXiv 1910.02054: gradients are summed whole, and no weights are gathered behind the update.
    "no distributed optimizer": (
        {},
        {"use-distributed-optimizer": None},
        {
            "states": 3 * FP32 * (DENSE + WHOLE + EXPERT_WEIGHTS - UPDATED),
            "saved": 0,
            "flops": 0,
            "comm": -BF16 * UPDATED,
        },
    ),
    "overlap of gradients": ({}, {"overlap-grad-reduce": ""}, NOTHING),
    "overlap of weights": (
        {"overlap-grad-reduce": ""},
        {"overlap-param-gather": ""},
        NOTHING,
    ),
    # Weights in 8 bits and their transposes are kept over micro-batches; inputs of products take a
    # byte in place of two (arXiv 2603.07685).
    "fp8": (
        {},
        {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
        NOTHING
        | {
            "states": 2 * (LAYERS * ATTENTION + EXPERT_WEIGHTS),
            "saved": -LAYERS * (SHARD + ROWS * (HIDDEN + EXPERT_FFN)),
        },
    ),
    "padded capacity": (
        {},
        {"moe-expert-capacity-factor": 1.25, "moe-pad-expert-input-to-capacity": ""},
        {"states": 0, "flops": A_STEP * 6 * EXPERT_PRODUCTS // 4},
    ),
    "cuda graphs": (
        {},
        {"cuda-graph-impl": "transformer_engine", "cuda-graph-scope": "attn"},
        {"states": 0, "flops": 0, "comm": 0, "calls": 0},
    ),
    "tied tables": (
        {},
        {"untie-embeddings-and-output-weights": None},
        {
            "states": -states(dense=TABLE),
            "flops": 0,
            "saved": 0,
            "comm": -TABLE * FP32 - TABLE * BF16 // DP,
        },
    ),
    "top_k": (
        {},
        {"moe-router-topk": 2 * TOP_K},
        {
            "states": 0,
            "flops": A_STEP * 6 * EXPERT_PRODUCTS,
            "calls": 0,
            "comm": A_STEP * SENT_ROWS,
        },
    ),
    # Input gathered in forward and again in backward, output's gradient gathered; sums both ways.
    "shared experts": (
        {},
        {"moe-shared-expert-intermediate-size": 2048},
        {
            "states": LAYERS * states(dense=SHARED),
            "saved": LAYERS * SEQ * 3 * 2048 // TP * BF16,
            "flops": A_STEP * 6 * SHARED * SEQ,
            "comm": A_STEP * (3 * SHARD * BF16 + 2 * SEQ * HIDDEN * BF16)
            + LAYERS * (SHARED * FP32 + SHARED * BF16 // DP),
        },
    ),
    # Norms of heads save their inputs besides what attention saves, and a statistic of each.
    "norms of heads": (
        {},
        {"qk-layernorm": ""},
        {
            "states": LAYERS * states(whole=2 * HEAD_DIM),
            "saved": LAYERS * SEQ * (HEADS + GROUPS) // TP * (HEAD_DIM * BF16 + FP32),
            "flops": 0,
            "calls": 0,
        },
    ),
    "a dense first layer": (
        {},
        {"moe-layer-freq": f"'([0]*1+[1]*{LAYERS - 1})'"},
        {
            "states": states(dense=3 * HIDDEN * FFN // TP)
            - states(experts=EXPERT_WEIGHTS // LAYERS)
            - states(whole=EXPERTS * HIDDEN),
            "flops": 6
            * MICRO_BATCHES
            * (3 * HIDDEN * FFN // TP * SEQ - EXPERT_PRODUCTS - ROUTER_PRODUCTS),
        },
    ),
    "moments of 16 bits": (
        AWARE,
        {"exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
        NOTHING | {"states": -2 * (FP32 - BF16) * UPDATED},
    ),
    "optimizer on the host": (
        AWARE,
        {"optimizer-cpu-offload": "", "optimizer-offload-fraction": 1.0},
        NOTHING | {"states": -3 * FP32 * UPDATED, "host": 3 * FP32 * UPDATED},
    ),
    "sliding window": (
        {},
        {"window-size": f"{WINDOW - 1},0"},
        NOTHING | {"flops": -A_STEP * 12 * PAIRS_LOST * HEADS * HEAD_DIM // TP},
    ),
    # A layer, the product of both inputs, three norms, and the head once more.
    "mtp": (
        {},
        {"mtp-num-layers": 1},
        {
            "states": states(
                dense=ATTENTION + 2 * HIDDEN * HIDDEN // TP,
                whole=2 * HIDDEN + EXPERTS * HIDDEN + 3 * HIDDEN,
                experts=EXPERT_WEIGHTS // LAYERS,
            ),
            "flops": MICRO_BATCHES
            * (3 * FORWARD_FLOPS + 6 * SEQ * (2 * HIDDEN * HIDDEN // TP + TABLE)),
        },
    ),
    # arXiv 2205.05198, 4.1: a mask of a byte an element behind both blocks, and of the embedding.
    "dropout": (
        {},
        {"hidden-dropout": 0.1},
        NOTHING | {"saved": (2 * LAYERS + 1) * SHARD},
    ),
    "deepep": (
        {},
        {"moe-token-dispatcher-type": "flex", "moe-enable-deepep": ""},
        {"states": 0, "flops": 0},
    ),
    "all-gather of tokens": (
        {},
        {"moe-token-dispatcher-type": "allgather"},
        {"states": 0, "flops": 0},
    ),
}
MEASURES = {
    "states": Measure.STATES,
    "saved": Measure.SAVED,
    "comm": Measure.COMM,
    "calls": Measure.CALLS,
    "flops": Measure.FLOPS,
    "host": Measure.HOST,
}


@pytest.mark.parametrize(("before", "after", "expected"), CASES.values(), ids=CASES)
def test_a_switch_changes_what_its_formula_says(
    tmp_path: Path, before: Options, after: Options, expected: Expected
) -> None:
    changes = check(tmp_path, MOE | before, after)
    assert changes.switches
    counted = {name: growth(changes, MEASURES[name]) for name in expected}
    assert counted == expected


def test_interleaved_stages_keep_more_of_the_first_rank(tmp_path: Path) -> None:
    """1 + (p - 1) / (p m) times as much (arXiv 2205.05198, 4.2.3): 5 / 4 for p = m = 2."""
    stages: Options = {"pipeline-model-parallel-size": 2}
    changes = check(tmp_path, MOE | stages, {"num-layers-per-virtual-pipeline-stage": 2})
    kept = {
        row.label: Fraction(int(row.after), int(row.before))
        for row in changes.rows
        if row.section == "memory" and row.pp_rank == 0 and row.before
    }
    assert kept["activations / attention"] == Fraction(5, 4)


def test_ranks_of_a_sequence_keep_a_part_of_it(tmp_path: Path) -> None:
    """Half of the tokens, and twice as many micro-batches: nothing else but numbers of rows."""
    changes = check(tmp_path, MOE, {"context-parallel-size": 2})
    assert growth(changes, Measure.STATES) == growth(changes, Measure.FLOPS) == 0
    saved = changes.find(Measure.SAVED)
    assert saved is not None
    counts = LAYERS * 8 * EXPERTS  # what no rank has less of
    assert abs(2 * saved.after - saved.before) <= counts


def test_without_sequence_parallelism_each_rank_keeps_whole_sequences(tmp_path: Path) -> None:
    """Of s b h (10 + 24 / t) the 10 are whole (arXiv 2205.05198, 4.2.1), 2 of them masks.

    The final norm, the head's input, and a number in fp32 of each token and norm besides.
    """
    changes = check(tmp_path, {}, {"sequence-parallel": None})
    whole = LAYERS * 8 * SEQ * HIDDEN + 2 * BF16 * SEQ * HIDDEN + (2 * LAYERS + 1) * FP32 * SEQ
    assert growth(changes, Measure.SAVED) == whole - whole // TP
    assert growth(changes, Measure.STATES) == growth(changes, Measure.FLOPS) == 0


def test_more_expert_ranks_change_no_flops_of_all_ranks(tmp_path: Path) -> None:
    """Where routers decide the hottest of more ranks is hotter; the others have that much less."""
    learned = MOE | {"moe-router-force-load-balancing": None, "expert-model-parallel-size": 2}
    changes = check(tmp_path, learned, {"expert-model-parallel-size": 8})
    assert growth(changes, Measure.FLOPS) > 0
    assert growth(changes, Measure.ALL_FLOPS) == 0
    even = check(tmp_path, MOE, {"moe-router-topk": 2 * TOP_K})
    assert growth(even, Measure.ALL_FLOPS) == 16 * growth(even, Measure.FLOPS)
