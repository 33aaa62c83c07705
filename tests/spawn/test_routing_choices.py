"""Choices of routing equal one process in layouts that cut tokens, experts and batches, their
ledgers exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layout_proof import WORKLOAD, prove_layout
from layout_space import SHAPES
from moewright.codec import parse_layout, read_run
from moewright.cost.ledger import predict_ledger
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.parameters import selection_bias_name
from moewright.spec.hardware import Collective
from moewright.spec.ledger import Ledger
from moewright.spec.model import MoeSpec, RouterSpec, ScoreFunction
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    Dtype,
    LossSpec,
    OptimizerSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    Workload,
)
from tiny_jobs import MODEL, build_plan, build_workload, read_state, write_corpus

pytestmark = pytest.mark.spawn

# The global loss counts what came before in the step, so that ranks beside each other see less than
# one after another.
_EVERY_LOSS = LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, global_aux_coeff=0.03, z_coeff=0.001)
_UNTIL_SETTLED = RouterTraining(assignment=RouterAssignment.SINKHORN)
_FIXED = RouterTraining(assignment=RouterAssignment.SINKHORN, sinkhorn_iterations=4, jitter_eps=0.1)
_NOISY = RouterTraining(jitter_eps=0.3)
_WIDE = RouterTraining(router_dtype=RouterDtype.FP64)
_Z = LossSpec(z_coeff=0.001)


_HOT = (900, 10, 500, 20, 700, 30, 5, 600)  # tokens an expert: contiguous halves of 1430 and 1335


def made(
    shape: str,
    world: int,
    text: str,
    training: RouterTraining = WORKLOAD.router,
    loss: LossSpec = WORKLOAD.loss,
) -> Plan:
    """Experts of the shape that are placed evenly are so by a load that differs by layer."""
    experts = SHAPES[shape].moe.experts
    hot = [
        tuple((_HOT * 2)[layer : layer + experts]) for layer in range(SHAPES[shape].moe_layer_count)
    ]
    work = replace(WORKLOAD, router=training, loss=loss, load_histogram=tuple(hot))
    return replace(
        build_plan(work, "", world_size=world, model=SHAPES[shape]),
        layout=parse_layout(text, world_size=world),
    )


# One of each choice in every test run, the others with the sweep.
_OFTEN = (
    ("sinkhorn over TP and EP", made("qwen", 4, "tp2,ep4,mbs2", _UNTIL_SETTLED, _Z)),
    ("noise over stages, replayed", made("olmoe", 4, "pp2,ep2,mbs1,recompute=full", _NOISY)),
    ("placed over TP and DP", made("qwen", 4, "tp2,ep4,mbs2,expert_placement=balanced")),
    (
        "replicas over TP and EDP",
        made("qwen", 4, "tp2,ep2,mbs2,expert_placement=balanced,spare1,overlap=grad"),
    ),
    ("shared experts beside dispatch, gated, TP", made("deep", 4, "tp2,ep4,mbs2,overlap=shared")),
    ("padded", made("qwen", 4, "tp2,ep4,mbs2,capacity=4,capacity_fill=padded")),
)
_SELDOM = (
    ("fixed sinkhorn, noise, over CP", made("deep", 4, "cp2,ep2,mbs2,recompute=moe", _FIXED, _Z)),
    ("noise over TP, CP and DP", made("qwen", 8, "tp2,cp2,ep4,mbs2", _NOISY)),
    ("fp64, four losses", made("deepseek", 2, "tp2,ep2,mbs2", _WIDE, _EVERY_LOSS)),
    (
        "placed, cut, replayed",
        made("deep", 4, "ep2,etp2,mbs2,recompute=moe,expert_placement=balanced"),
    ),
    (
        "placed copies, EDP",
        made("deepseek", 4, "ep2,mbs2,dispatcher=dedup,expert_placement=balanced"),
    ),
    (
        "shared experts beside copies, split backwards",
        made("deepseek", 4, "pp2,ep2,mbs1,schedule=zb-h1,dispatcher=dedup,overlap=shared"),
    ),
    (
        "shared experts beside, replayed, ETP",
        made("deep", 4, "ep2,etp2,mbs2,recompute=moe,overlap=shared+grad"),
    ),
    (
        "padded, cut",
        made("deepseek", 2, "tp2,etp2,mbs2,recompute=moe,capacity=4,capacity_fill=padded"),
    ),
    (
        "two replicas a rank, three holders",
        made("deep", 4, "ep4,mbs2,expert_placement=balanced,spare2,zero0"),
    ),
    (
        "replicas of cut experts, biased",
        made("oss", 8, "ep2,etp2,mbs1,expert_placement=balanced,spare2"),
    ),
    (
        "replicas, split backwards, copies",
        made(
            "deepseek",
            4,
            "pp2,ep2,mbs1,schedule=zb-h1,dispatcher=dedup,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas, replayed and offloaded, depths apart",
        made(
            "ahead",
            2,
            "ep2,mbs2,recompute=moe_act,offload=expert_fc1+optimizer,expert_placement=balanced,spare3",
        ),
    ),
    (
        "replicas, all see all tokens, replayed",
        made(
            "olmoe",
            2,
            "ep2,mbs2,recompute=moe,dispatcher=allgather,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas over nodes, capacity",
        made(
            "deep",
            8,
            "tp2,ep4,ep_node2,dispatcher=dedup,mbs2,capacity=4,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas of experts that are whole among shards",
        made("deep", 4, "tp2,ep4,zero3,mbs2,expert_placement=balanced,spare1"),
    ),
    (
        "replicas beside overlapped reductions, split backwards",
        made(
            "deep",
            4,
            "pp2,ep2,mbs1,schedule=zb-h1,overlap=grad+param,expert_placement=balanced,spare1",
        ),
    ),
    (
        "placed shards",
        made("olmoe", 4, "ep2,zero3,mbs2,dispatcher=allgather,expert_placement=balanced"),
    ),
)


@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(job, id=name) for name, job in _OFTEN),
        *(pytest.param(job, id=name, marks=pytest.mark.thorough) for name, job in _SELDOM),
    ],
)
def test_a_choice_of_routing_equals_one_process(job: Plan, tmp_path: Path) -> None:
    prove_layout(job, tmp_path)


def test_a_run_records_every_routers_load_and_losses_on_the_steps_asked_for(tmp_path: Path) -> None:
    work = build_workload(
        write_corpus(tmp_path / "corpus"),
        steps=4,
        loss=replace(_EVERY_LOSS, aux_coeff=0.5),
        router_log_every_steps=2,
    )
    assert (
        train(build_plan(work, "ep2,mbs2,capacity=1.0", world_size=2), tmp_path / "run") is ExitCode.DONE
    )
    record = read_run(tmp_path / "run")
    assert [bool(step.loads) for step in record.steps] == [False, True, False, True]
    assert record.selection is not None
    for step in record.steps[1::2]:
        assert [load.layer for load in step.loads] == [0, 2]
        total = sum(x.aux_loss + x.seq_aux_loss + x.global_aux_loss + x.z_loss for x in step.loads)
        assert total == pytest.approx(step.aux_loss, rel=1e-6)
        for place, load in enumerate(step.loads):
            assert min(load.aux_loss, load.seq_aux_loss, load.global_aux_loss, load.z_loss) > 0
            assert load.rank_counts == (sum(load.counts[:4]), sum(load.counts[4:]))
            assert load.dropped_share == 1 - sum(load.counts) / (2 * step.tokens) > 0
            assert load.p95_over_mean == load.max_over_mean  # of eight experts
            if step.step == record.selection.step:
                sent = [
                    sum(of_source)
                    for m in record.selection.counts
                    for of_source in zip(*m[place], strict=True)
                ]
                assert sum(sent) == sum(load.counts)


def test_the_bias_of_every_layer_moves_by_the_load_of_all_ranks(tmp_path: Path) -> None:
    """Of every layer with experts, one of a depth too, by what both ranks of a TP group send; in
    fp32 beside bf16."""
    moe = replace(
        MODEL.moe, router=RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, selection_bias=True)
    )
    model, rate = replace(MODEL, moe=moe, mtp_layers=1), RouterTraining().bias_update_rate
    work = build_workload(
        write_corpus(tmp_path / "corpus"), steps=2, precision=Dtype.BF16, router_log_every_steps=1
    )
    work = replace(work, checkpoint=replace(work.checkpoint, every_steps=1))
    assert (
        train(build_plan(work, "tp2,ep2,mbs2", world_size=2, model=model), tmp_path / "run")
        is ExitCode.DONE
    )
    wanted = {layer: torch.zeros(moe.experts) for layer in model.routed_layers}
    for step in read_run(tmp_path / "run").steps:
        found = read_state(tmp_path / "run", step.step)
        assert [load.layer for load in step.loads] == list(wanted)
        for load in step.loads:
            assert sum(load.counts) == 2 * work.global_batch * work.seq_len
            counts = torch.tensor(load.counts, dtype=torch.float32)
            wanted[load.layer] += rate * (counts.mean() - counts).sign()
            bias = found[selection_bias_name(load.layer)]
            assert bias.dtype is torch.float32
            assert torch.equal(bias, wanted[load.layer])


@pytest.mark.parametrize("layout", ["ep2,mbs1,overlap=grad", "ep2,mbs1,dispatcher=allgather,zero0"])
def test_an_expert_without_a_row_decays(layout: str, tmp_path: Path) -> None:
    """Sixteen tokens in turn to two each of 64 experts: half of them, all of one rank's, never get
    a gradient."""
    model = replace(MODEL, moe=replace(MODEL.moe, experts=64))
    optimizer = OptimizerSpec(lr=0.1, warmup_steps=0, clip_norm=0.0, weight_decay=0.1)
    work = build_workload(
        write_corpus(tmp_path / "corpus"), steps=2, seq_len=16, optimizer=optimizer,
        router=RouterTraining(force=RouterForce.BALANCED),
    )  # fmt: skip
    work = replace(work, checkpoint=replace(work.checkpoint, every_steps=1))
    assert train(build_plan(work, layout, world_size=2, model=model), tmp_path / "run") is ExitCode.DONE
    before, after = (read_state(tmp_path / "run", step) for step in (1, 2))
    factor = 1 - read_run(tmp_path / "run").steps[1].lr * optimizer.weight_decay
    experts = [name for name in after if ".moe.experts." in name]
    assert len(experts) == 3 * 2 * model.moe_layer_count
    for name in experts:
        if name.startswith("optim/"):
            assert after[name][:32].any()
            assert not after[name][32:].any()
        else:
            torch.testing.assert_close(
                after[name][32:], factor * before[name][32:], rtol=1e-6, atol=0.0
            )
            assert not torch.allclose(
                after[name][:32], factor * before[name][:32], rtol=1e-6, atol=0.0
            )


def test_a_run_goes_on_under_another_placement(tmp_path: Path) -> None:
    """Checkpoints hold experts by number and once, whoever has replicas: three placements make the
    run of one."""
    hot = ((90, 10, 50, 20, 70, 30, 5, 60), (1, 2, 3, 4, 5, 6, 7, 9))
    work = build_workload(write_corpus(tmp_path / "corpus"), steps=2, load_histogram=hot)
    whole = replace(work, steps=6, optimizer=replace(work.optimizer, decay_steps=6))
    assert train(build_plan(whole, "ep2,mbs2", world_size=2), tmp_path / "whole") is ExitCode.DONE
    for steps, text in (
        (2, "ep2,mbs2,expert_placement=balanced,spare1"),
        (4, "mbs2"),
        (6, "ep4,expert_placement=balanced,spare2,mbs2"),
    ):
        job = build_plan(replace(whole, steps=steps), text, world_size=4 if "ep4" in text else 2)
        assert train(job, tmp_path / "parts") is ExitCode.DONE
    for ours, theirs in zip(
        read_run(tmp_path / "parts").steps, read_run(tmp_path / "whole").steps, strict=True
    ):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        for one, other in zip(ours.loads, theirs.loads, strict=True):
            assert one.counts == other.counts


@pytest.mark.parametrize(
    ("text", "places"),
    [("ep4", {"ep": 4}), ("ep4,ep_node2", {"ep_far": 2, "ep_near": 4})],
    ids=["ranks", "nodes"],
)
def test_under_uniform_routing_copies_are_what_is_expected_of_them(
    text: str, places: dict[str, int], tmp_path: Path
) -> None:
    """A preference of no spread chooses uniformly: each token reaches N (1 - (1 - 1/N)^k) of N
    ranks on average, and of N nodes where it crosses to those first."""
    moe = MoeSpec(experts=64, ffn_size=16, router=RouterSpec(top_k=2))
    uniform = RouterTraining(force=RouterForce.SKEWED, force_std=0.0)
    work = build_workload(write_corpus(tmp_path / "corpus"), steps=2, router=uniform, loss=LossSpec())
    job = build_plan(work, f"{text},dispatcher=dedup,mbs2", world_size=4, model=replace(MODEL, moe=moe))
    assert train(job, tmp_path / "run") is ExitCode.DONE

    counted = read_run(tmp_path / "run").ledgers
    expected = tuple(predict_ledger(job, rank=rank, selection=None) for rank in range(4))
    for group, count in places.items():
        _assert_copies(
            count, *(_moved(ledgers, group) for ledgers in (counted, expected)), work, moe
        )


def _moved(ledgers: tuple[Ledger, ...], group: str) -> int:
    rows = [row for ledger in ledgers for row in ledger.comm]
    return sum(row.bytes for row in rows if (row.op, row.group) == (Collective.ALL_TO_ALL, group))


def _assert_copies(places: int, counted: int, expected: int, work: Workload, moe: MoeSpec) -> None:
    """Bytes of copies to so many places, within three deviations."""
    tokens, reached = 2 * work.tokens_per_step, places * (1 - (1 - 1 / places) ** 2)
    # A copy's row goes out and comes back, in forward and in backward; its choices go out, its
    # weights there and back.
    of_copy = 4 * (4 * MODEL.hidden_size) + 3 * (4 * moe.router.top_k)
    deviation = ((2 - reached) * (reached - 1)) ** 0.5  # one rank or two
    assert abs(counted - expected) <= 3 * deviation * tokens**0.5 * of_copy
    assert 0 < 3 * deviation * tokens**0.5 < 0.05 * reached * tokens  # and that says something
