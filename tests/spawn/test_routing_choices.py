"""Choices of routing equal one process in layouts that cut tokens, experts and batches."""

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
from moewright.rules.shapes.parameters import selection_bias_name
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

# The global loss counts what came before in the step: ranks that work side by side see less than a
# single rank that works through all of it.
_EVERY_LOSS = LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, global_aux_coeff=0.03, z_coeff=0.001)
_SINKHORN_UNTIL_CONVERGED = RouterTraining(assignment=RouterAssignment.SINKHORN)
_SINKHORN_FIXED = RouterTraining(
    assignment=RouterAssignment.SINKHORN, sinkhorn_iterations=4, jitter_eps=0.1
)
_JITTERED = RouterTraining(jitter_eps=0.3)
_FP64_ROUTER = RouterTraining(router_dtype=RouterDtype.FP64)
_Z_LOSS = LossSpec(z_coeff=0.001)


# Tokens of each expert: the contiguous halves have 1430 and 1335.
_EXPERT_LOADS = (900, 10, 500, 20, 700, 30, 5, 600)


def make_plan(
    shape: str,
    world: int,
    text: str,
    training: RouterTraining = WORKLOAD.router,
    loss: LossSpec = WORKLOAD.loss,
) -> Plan:
    """Build a plan whose load differs by layer.

    By that load the experts of the shape are placed where a case balances them.
    """
    experts = SHAPES[shape].moe.experts
    loads = [
        tuple((_EXPERT_LOADS * 2)[layer : layer + experts])
        for layer in range(SHAPES[shape].moe_layer_count)
    ]
    workload = replace(WORKLOAD, router=training, loss=loss, load_histogram=tuple(loads))
    return replace(
        build_plan(workload, "", world_size=world, model=SHAPES[shape]),
        layout=parse_layout(text, world_size=world),
    )


# A case of each choice runs in every test, the others with the sweep.
_IN_EVERY_TEST = (
    (
        "sinkhorn over TP and EP",
        make_plan("qwen", 4, "tp2,ep4,mbs2", _SINKHORN_UNTIL_CONVERGED, _Z_LOSS),
    ),
    (
        "noise over stages, replayed",
        make_plan("olmoe", 4, "pp2,ep2,mbs1,recompute=full", _JITTERED),
    ),
    (
        "replicas over TP and EDP",
        make_plan(
            "qwen",
            4,
            "tp2,ep2,mbs2,offload=expert_fc1,expert_placement=balanced,spare1,overlap=grad",
        ),
    ),
    (
        "shared experts beside dispatch, gated, TP",
        make_plan("deep", 4, "tp2,ep4,mbs2,overlap=shared"),
    ),
    ("padded", make_plan("qwen", 4, "tp2,ep4,mbs2,capacity=4,capacity_fill=padded")),
)
_THOROUGH = (
    ("placed over TP and DP", make_plan("qwen", 4, "tp2,ep4,mbs2,expert_placement=balanced")),
    (
        "fixed sinkhorn, noise, over CP",
        make_plan("deep", 4, "cp2,ep2,mbs2,recompute=moe", _SINKHORN_FIXED, _Z_LOSS),
    ),
    ("noise over TP, CP and DP", make_plan("qwen", 8, "tp2,cp2,ep4,mbs2", _JITTERED)),
    ("fp64, four losses", make_plan("deepseek", 2, "tp2,ep2,mbs2", _FP64_ROUTER, _EVERY_LOSS)),
    (
        "placed, cut, replayed",
        make_plan("deep", 4, "ep2,etp2,mbs2,recompute=moe,expert_placement=balanced"),
    ),
    (
        "placed copies, EDP",
        make_plan("deepseek", 4, "ep2,mbs2,dispatcher=dedup,expert_placement=balanced"),
    ),
    (
        "shared experts beside copies, split backwards",
        make_plan("deepseek", 4, "pp2,ep2,mbs1,schedule=zb-h1,dispatcher=dedup,overlap=shared"),
    ),
    (
        "shared experts beside, replayed, ETP",
        make_plan("deep", 4, "ep2,etp2,mbs2,recompute=moe,overlap=shared+grad"),
    ),
    (
        "padded, cut",
        make_plan("deepseek", 2, "tp2,etp2,mbs2,recompute=moe,capacity=4,capacity_fill=padded"),
    ),
    (
        "two replicas a rank, three holders",
        make_plan("deep", 4, "ep4,mbs2,expert_placement=balanced,spare2,zero0"),
    ),
    (
        "replicas of cut experts, biased",
        make_plan("oss", 8, "ep2,etp2,mbs1,expert_placement=balanced,spare2"),
    ),
    (
        "replicas, split backwards, copies",
        make_plan(
            "deepseek",
            4,
            "pp2,ep2,mbs1,schedule=zb-h1,dispatcher=dedup,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas, replayed and offloaded, depths apart",
        make_plan(
            "ahead",
            2,
            "ep2,mbs2,recompute=moe_act,offload=expert_fc1+optimizer,"
            "expert_placement=balanced,spare3",
        ),
    ),
    (
        "replicas, all see all tokens, replayed",
        make_plan(
            "olmoe",
            2,
            "ep2,mbs2,recompute=moe,dispatcher=allgather,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas over nodes, capacity",
        make_plan(
            "deep",
            8,
            "tp2,ep4,ep_node2,dispatcher=dedup,mbs2,capacity=4,expert_placement=balanced,spare1",
        ),
    ),
    (
        "replicas of experts that are whole among shards",
        make_plan("deep", 4, "tp2,ep4,zero3,mbs2,expert_placement=balanced,spare1"),
    ),
    (
        "replicas beside overlapped reductions, split backwards",
        make_plan(
            "deep",
            4,
            "pp2,ep2,mbs1,schedule=zb-h1,overlap=grad+param,expert_placement=balanced,spare1",
        ),
    ),
    (
        "placed shards",
        make_plan("olmoe", 4, "ep2,zero3,mbs2,dispatcher=allgather,expert_placement=balanced"),
    ),
)


@pytest.mark.turns
@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, id=name) for name, plan in _IN_EVERY_TEST),
        *(pytest.param(plan, id=name, marks=pytest.mark.thorough) for name, plan in _THOROUGH),
    ],
)
def test_a_choice_of_routing_equals_one_process(plan: Plan, tmp_path: Path) -> None:
    prove_layout(plan, tmp_path)


def test_a_run_records_the_load_and_the_losses_of_every_router_on_the_steps_of_its_log(
    tmp_path: Path,
) -> None:
    workload = build_workload(
        write_corpus(tmp_path / "corpus"),
        steps=4,
        loss=replace(_EVERY_LOSS, aux_coeff=0.5),
        router_log_every_steps=2,
    )
    assert (
        train(build_plan(workload, "ep2,mbs2,capacity=1.0", world_size=2), tmp_path / "run")
        is ExitCode.DONE
    )
    record = read_run(tmp_path / "run")
    assert [bool(step.loads) for step in record.steps] == [False, True, False, True]
    assert record.selection is not None
    for step in record.steps[1::2]:
        assert [load.layer for load in step.loads] == [0, 2]
        total = sum(
            load.aux_loss + load.seq_aux_loss + load.global_aux_loss + load.z_loss
            for load in step.loads
        )
        assert total == pytest.approx(step.aux_loss, rel=1e-6)
        for index, load in enumerate(step.loads):
            assert min(load.aux_loss, load.seq_aux_loss, load.global_aux_loss, load.z_loss) > 0
            assert load.rank_counts == (sum(load.counts[:4]), sum(load.counts[4:]))
            assert load.dropped_share == 1 - sum(load.counts) / (2 * step.tokens) > 0
            assert load.p95_over_mean == load.max_over_mean  # of eight experts
            if step.step == record.selection.step:
                sent = [
                    sum(source_counts)
                    for micro_batch in record.selection.counts
                    for source_counts in zip(*micro_batch[index], strict=True)
                ]
                assert sum(sent) == sum(load.counts)


def test_the_bias_of_every_layer_moves_by_the_load_of_all_ranks(tmp_path: Path) -> None:
    """The bias of every layer with experts moves, that of a depth too.

    It moves by what both ranks of a TP group send, and stays in fp32 where the rest is bf16.
    """
    moe = replace(
        MODEL.moe, router=RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, selection_bias=True)
    )
    model = replace(MODEL, moe=moe, mtp_layers=1)
    rate = RouterTraining().bias_update_rate
    workload = build_workload(
        write_corpus(tmp_path / "corpus"), steps=2, precision=Dtype.BF16, router_log_every_steps=1
    )
    workload = replace(workload, checkpoint=replace(workload.checkpoint, every_steps=1))
    assert (
        train(build_plan(workload, "tp2,ep2,mbs2", world_size=2, model=model), tmp_path / "run")
        is ExitCode.DONE
    )
    expected = {layer: torch.zeros(moe.experts) for layer in model.routed_layers}
    for step in read_run(tmp_path / "run").steps:
        state = read_state(tmp_path / "run", step.step)
        assert [load.layer for load in step.loads] == list(expected)
        for load in step.loads:
            assert sum(load.counts) == 2 * workload.global_batch * workload.seq_len
            counts = torch.tensor(load.counts, dtype=torch.float32)
            expected[load.layer] += rate * (counts.mean() - counts).sign()
            bias = state[selection_bias_name(load.layer)]
            assert bias.dtype is torch.float32
            assert torch.equal(bias, expected[load.layer])


@pytest.mark.parametrize("layout", ["ep2,mbs1,overlap=grad", "ep2,mbs1,dispatcher=allgather,zero0"])
def test_an_expert_without_a_row_decays(layout: str, tmp_path: Path) -> None:
    """Sixteen tokens go in turn to two each of 64 experts.

    Half of the experts, all of one rank's, never get a gradient.
    """
    model = replace(MODEL, moe=replace(MODEL.moe, experts=64))
    optimizer = OptimizerSpec(lr=0.1, warmup_steps=0, clip_norm=0.0, weight_decay=0.1)
    workload = build_workload(
        write_corpus(tmp_path / "corpus"),
        steps=2,
        seq_len=16,
        optimizer=optimizer,
        router=RouterTraining(force=RouterForce.BALANCED),
    )
    workload = replace(workload, checkpoint=replace(workload.checkpoint, every_steps=1))
    assert (
        train(build_plan(workload, layout, world_size=2, model=model), tmp_path / "run")
        is ExitCode.DONE
    )
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


@pytest.mark.thorough
def test_a_run_goes_on_under_another_placement(tmp_path: Path) -> None:
    """Checkpoints hold each expert once and by number, whoever has replicas.

    So a run under three placements equals the run under one.
    """
    loads = ((90, 10, 50, 20, 70, 30, 5, 60), (1, 2, 3, 4, 5, 6, 7, 9))
    workload = build_workload(write_corpus(tmp_path / "corpus"), steps=2, load_histogram=loads)
    whole = replace(workload, steps=6, optimizer=replace(workload.optimizer, decay_steps=6))
    assert train(build_plan(whole, "ep2,mbs2", world_size=2), tmp_path / "whole") is ExitCode.DONE
    for steps, text in (
        (2, "ep2,mbs2,expert_placement=balanced,spare1"),
        (4, "mbs2"),
        (6, "ep4,expert_placement=balanced,spare2,mbs2"),
    ):
        world_size = 4 if "ep4" in text else 2
        plan = build_plan(replace(whole, steps=steps), text, world_size=world_size)
        assert train(plan, tmp_path / "parts") is ExitCode.DONE
    for actual, expected in zip(
        read_run(tmp_path / "parts").steps, read_run(tmp_path / "whole").steps, strict=True
    ):
        assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        for load, expected_load in zip(actual.loads, expected.loads, strict=True):
            assert load.counts == expected_load.counts


@pytest.mark.parametrize(
    ("text", "places"),
    [("ep4", {"ep": 4}), ("ep4,ep_node2", {"ep_far": 2, "ep_near": 4})],
    ids=["ranks", "nodes"],
)
def test_under_uniform_routing_tokens_reach_the_expected_number_of_ranks(
    text: str, places: dict[str, int], tmp_path: Path
) -> None:
    """A preference without spread chooses uniformly.

    Each token then reaches N (1 - (1 - 1/N)^k) of N ranks on average, and as many of N nodes where
    it crosses to those first.
    """
    moe = MoeSpec(experts=64, ffn_size=16, router=RouterSpec(top_k=2))
    uniform = RouterTraining(force=RouterForce.SKEWED, force_std=0.0)
    workload = build_workload(
        write_corpus(tmp_path / "corpus"), steps=2, router=uniform, loss=LossSpec()
    )
    plan = build_plan(
        workload, f"{text},dispatcher=dedup,mbs2", world_size=4, model=replace(MODEL, moe=moe)
    )
    assert train(plan, tmp_path / "run") is ExitCode.DONE

    counted = read_run(tmp_path / "run").ledgers
    expected = tuple(predict_ledger(plan, rank=rank, selection=None) for rank in range(4))
    for group, count in places.items():
        counted_bytes = _all_to_all_bytes(counted, group)
        expected_bytes = _all_to_all_bytes(expected, group)
        _assert_replica_bytes(count, counted_bytes, expected_bytes, workload, moe)


def _all_to_all_bytes(ledgers: tuple[Ledger, ...], group: str) -> int:
    rows = [row for ledger in ledgers for row in ledger.comm]
    return sum(row.bytes for row in rows if (row.op, row.group) == (Collective.ALL_TO_ALL, group))


def _assert_replica_bytes(
    places: int, counted: int, expected: int, workload: Workload, moe: MoeSpec
) -> None:
    """Assert that the bytes to so many places lie within three deviations."""
    tokens = 2 * workload.tokens_per_step
    expected_places = places * (1 - (1 - 1 / places) ** 2)
    # The row of a token goes out and comes back, in forward and in backward; its choices go out,
    # its weights out and back.
    replica_bytes = 4 * (4 * MODEL.hidden_size) + 3 * (4 * moe.router.top_k)
    deviation = (
        (2 - expected_places) * (expected_places - 1)
    ) ** 0.5  # a token reaches one rank or two
    assert abs(counted - expected) <= 3 * deviation * tokens**0.5 * replica_bytes
    # The tolerance is narrow enough to say something.
    assert 0 < 3 * deviation * tokens**0.5 < 0.05 * expected_places * tokens
