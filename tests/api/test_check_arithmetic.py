"""Checks of changes beside the arithmetic of a Megatron-LM job, written out by hand.

The other tests of checks hold rows of one script against ratios. Here every figure, before and
after, comes from formulas of this file alone, in numbers, and changes are random besides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import moewright as mw
from moewright.diagnosis.plan_changes import Measure, PlanChanges

BF16, FP32 = 2, 4
MASTER_AND_MOMENTS = 3 * FP32
BACKWARD_TOO = 3  # products of a forward, and twice as many of its backward


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """A job of grouped-query attention and experts in every layer on 16 ranks.

    Routing is forced to be even, and all sizes divide.
    """

    ranks: int = 16
    layers: int = 8
    hidden: int = 2048
    heads: int = 16
    groups: int = 4
    head_dim: int = 128
    experts: int = 16
    expert_ffn: int = 1024
    top_k: int = 2
    vocab: int = 65536
    seq: int = 4096
    tp: int = 2
    pp: int = 1
    ep: int = 8
    etp: int = 1
    micro_batch: int = 1
    batch: int = 64
    gradient_bytes: int = FP32

    @property
    def dp(self) -> int:
        return self.ranks // self.tp // self.pp

    @property
    def is_legal(self) -> bool:
        stage = self.ranks // self.pp
        return stage % (self.ep * self.etp) == 0 and self.batch % (self.dp * self.micro_batch) == 0

    @property
    def micro_batches(self) -> int:
        return self.batch // self.dp // self.micro_batch

    @property
    def stage_layers(self) -> int:
        return self.layers // self.pp

    @property
    def attention_weights(self) -> int:
        kv = 2 * self.groups * self.head_dim
        query = self.heads * self.head_dim
        return self.hidden * (query + kv) // self.tp + query // self.tp * self.hidden

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.expert_ffn * self.experts // self.ep // self.etp

    def states_bytes(self, stage: int) -> int:
        """Return bytes of weights, gradients, master weights and moments of a pipeline rank.

        A rank's share of what is alike on all TP ranks is a ceiling or a floor of elements, so the
        caller leaves a little.
        """
        is_first, is_last = stage == 0, stage == self.pp - 1
        table = self.vocab * self.hidden // self.tp
        dense = self.stage_layers * self.attention_weights + (is_first + is_last) * table
        whole = self.stage_layers * (2 + self.experts) * self.hidden + is_last * self.hidden
        experts = self.stage_layers * self.expert_weights
        full = BF16 + self.gradient_bytes
        expert_copies = self.ranks // self.pp // self.ep // self.etp
        return (
            (dense + whole + experts) * full
            + MASTER_AND_MOMENTS * dense // self.dp
            + MASTER_AND_MOMENTS * whole // (self.dp * self.tp)
            + MASTER_AND_MOMENTS * experts // expert_copies
        )

    def flops(self, stage: int) -> int:
        """Return FLOPs of a step of a pipeline rank: 2 a multiplication, causal attention half."""
        tokens = self.batch // self.dp * self.seq
        is_last = stage == self.pp - 1
        products = self.stage_layers * self.attention_weights * tokens
        products += is_last * self.vocab * self.hidden // self.tp * tokens
        products += self.stage_layers * self.hidden * self.experts * tokens // self.tp
        rows = self.top_k * tokens // self.tp
        products += self.stage_layers * 3 * self.hidden * self.expert_ffn * rows
        width = self.heads * self.head_dim // self.tp
        scores = self.stage_layers * (tokens * self.seq // 2) * width * 2
        return 2 * BACKWARD_TOO * products + 2 * BACKWARD_TOO * scores

    @property
    def attention_saved_bytes(self) -> int:
        """Bytes that attention of a micro-batch keeps: input, q, k, v, output and the log-sums."""
        tokens = self.micro_batch * self.seq
        own_width = (self.heads + 2 * self.groups) * self.head_dim // self.tp
        kept = self.hidden // self.tp + own_width + self.heads * self.head_dim // self.tp
        return self.stage_layers * tokens * (kept * BF16 + self.heads // self.tp * FP32)

    @property
    def gathered(self) -> tuple[int, int]:
        """Calls and bytes of all-gathers over TP ranks, of one stage alone.

        The input of attention's first product, again in backward, and the gradient of its output;
        so for the head, without the last; the gradient of the embedding.
        """
        calls = self.micro_batches * (3 * self.layers + 3)
        return calls, calls * self.micro_batch * self.seq * self.hidden * BF16 // self.tp

    @property
    def scattered(self) -> tuple[int, int]:
        """Calls and bytes of reduce-scatters over TP ranks, of one stage alone."""
        calls = self.micro_batches * (2 * self.layers + 2)
        return calls, calls * self.micro_batch * self.seq * self.hidden * BF16

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of rows, of their weights, and of numbers of rows that go to experts and back."""
        pairs = self.micro_batch * self.seq * self.top_k // self.tp
        layer = 4 * pairs * self.hidden * BF16 + 2 * pairs * FP32 + 8 * self.experts * self.etp
        return self.micro_batches * self.stage_layers * layer

    def script(self) -> str:
        gradients = "--accumulate-allreduce-grads-in-fp32"
        if self.gradient_bytes == BF16:
            gradients = "--grad-reduce-in-bf16"
        return f"""#!/bin/bash
torchrun --nproc-per-node 8 --nnodes {self.ranks // 8} pretrain_gpt.py \\
  --num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size 6144 \\
  --moe-ffn-hidden-size {self.expert_ffn} --num-attention-heads {self.heads} \\
  --group-query-attention --num-query-groups {self.groups} --kv-channels {self.head_dim} \\
  --seq-length {self.seq} --max-position-embeddings {self.seq} --vocab-size {self.vocab} \\
  --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights \\
  --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope \\
  --num-experts {self.experts} --moe-router-topk {self.top_k} --moe-grouped-gemm \\
  --moe-token-dispatcher-type alltoall --moe-router-force-load-balancing \\
  --tensor-model-parallel-size {self.tp} --sequence-parallel \\
  --pipeline-model-parallel-size {self.pp} --expert-model-parallel-size {self.ep} \\
  --expert-tensor-parallel-size {self.etp} --micro-batch-size {self.micro_batch} \\
  --global-batch-size {self.batch} --bf16 {gradients} --use-distributed-optimizer \\
  --attention-backend flash --lr 1e-4 --train-iters 100 --mock-data
"""


BASE = Arithmetic()
CHANGES = (
    {"batch": 128},
    {"micro_batch": 2},
    {"seq": 8192},
    {"layers": 16},
    {"hidden": 4096},
    {"heads": 32},
    {"groups": 8},
    {"head_dim": 64},
    {"experts": 32},
    {"expert_ffn": 1536},
    {"top_k": 4},
    {"vocab": 131072},
    {"tp": 4},
    {"tp": 1},
    {"pp": 2},
    {"ep": 4},
    {"ep": 16},
    {"etp": 2},
    {"gradient_bytes": BF16},
    {"ranks": 32},
)


def draw(seed: int) -> Arithmetic:
    """Draw a job, every field beside every other."""
    source = random.Random(seed)
    while True:
        job = Arithmetic(
            ranks=source.choice((16, 32)),
            layers=source.choice((4, 8, 12)),
            hidden=source.choice((1024, 2048)),
            heads=source.choice((16, 32)),
            groups=source.choice((4, 8)),
            head_dim=source.choice((64, 128)),
            experts=source.choice((16, 32, 64)),
            expert_ffn=source.choice((512, 768, 1024)),
            top_k=source.choice((2, 4, 8)),
            vocab=source.choice((32768, 65536)),
            seq=source.choice((2048, 4096)),
            tp=source.choice((1, 2, 4)),
            pp=source.choice((1, 2, 4)),
            ep=source.choice((2, 4, 8)),
            etp=source.choice((1, 2)),
            micro_batch=source.choice((1, 2)),
            batch=source.choice((64, 128, 192)),
            gradient_bytes=source.choice((BF16, FP32)),
        )
        if job.is_legal:
            return job


def check_jobs(folder: Path, before: Arithmetic, after: Arithmetic) -> PlanChanges:
    for name, job in (("before.sh", before), ("after.sh", after)):
        (folder / name).write_text(job.script())
    (checked,) = mw.check(folder / "before.sh", folder / "after.sh", on="H100").jobs
    assert checked.changes is not None
    return checked.changes


def assert_counts(changes: PlanChanges, before: Arithmetic, after: Arithmetic) -> None:
    """Hold the change of every measure, and rows of the first stage, against the formulas."""
    states, flops = changes.find(Measure.STATES), changes.find(Measure.FLOPS)
    assert states is not None
    assert flops is not None
    for job, own_states, own_flops in (
        (before, states.before, flops.before),
        (after, states.after, flops.after),
    ):
        assert own_flops == max(job.flops(stage) for stage in range(job.pp))
        expected = max(job.states_bytes(stage) for stage in range(job.pp))
        # shares of what is alike on TP ranks end at a multiple of 64 elements
        assert abs(own_states - expected) <= MASTER_AND_MOMENTS * 64
    rows = {row.label: row for row in changes.rows if row.section == "comm"}
    calls = {row.label: row for row in changes.rows if row.section == "calls"}
    if before.pp == after.pp == 1:
        for label, kind in (("all gather / tp", "gathered"), ("reduce scatter / tp", "scattered")):
            was, now = getattr(before, kind), getattr(after, kind)
            was, now = (
                job if size > 1 else (0, 0) for job, size in ((was, before.tp), (now, after.tp))
            )
            for place, table in ((0, calls), (1, rows)):
                if was[place] == now[place]:
                    assert label not in table
                else:
                    assert (table[label].before, table[label].after) == (was[place], now[place])


@pytest.mark.turns
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, *change.items())))
def test_a_change_is_what_its_formulas_say(tmp_path: Path, change: dict[str, int]) -> None:
    after = replace(BASE, **change)
    assert after.is_legal
    assert_counts(check_jobs(tmp_path, BASE, after), BASE, after)


@pytest.mark.turns
@pytest.mark.parametrize("seed", range(20))
def test_a_change_of_everything_at_once_is_what_its_formulas_say(tmp_path: Path, seed: int) -> None:
    before, after = draw(2 * seed), draw(2 * seed + 1)
    assert_counts(check_jobs(tmp_path, before, after), before, after)


def test_a_step_grows_by_the_same_for_each_batch_more(tmp_path: Path) -> None:
    """Without a pipeline a step is an update and so many equal micro-batches."""
    batches = [replace(BASE, batch=batch) for batch in (64, 128, 192)]
    steps = [check_jobs(tmp_path, BASE, job).find(Measure.STEP) for job in batches]
    first, second, third = (step.after for step in steps if step is not None)
    assert third - second == pytest.approx(second - first, rel=1e-9)
