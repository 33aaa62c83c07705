"""Every layout computes what one process computes.

Compared are the gradients of all parameters, losses, norms and the loss curve. The first AdamW
moment after one unclipped step is (1 - beta1) times the gradient, and a checkpoint holds it by
global name: reading it back compares every gradient, whatever shards it lay in.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import parse_layout, read_json
from moewright.engine.checkpoint import find_latest
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.ledger import Ledger
from moewright.spec.model import ModelSpec, QkNorm, RouterSpec, ScoreFunction
from moewright.spec.workload import (
    DataSpec,
    DocumentMasking,
    DropPolicy,
    LossSpec,
    OptimizerSpec,
    RouterTraining,
)
from selection import thorough
from tiny_jobs import assert_first_gradients_equal, read_state, read_steps

pytestmark = pytest.mark.spawn

# The sweep proves each layout by itself; these also go through training's own loop with its data,
# logs and checkpoints.
LAYOUTS = [
    thorough(8, "ep8"),
    (4, "tp2,ep4,mbs2"),  # EP beyond DP and across TP
    thorough(4, "tp2,etp2,ep2,dispatcher=allgather"),
    (4, "tp2,ep2,zero0,dispatcher=dedup,mbs2"),
    (2, "pp2,mbs2,schedule=zbv,recompute=full,layout='E|t|tt|L'"),
    (6, "pp3,vpp2,vpp_group=4,ep2,overlap=grad+param+p2p,layout='E|t|t||t|L'"),
    (4, "etp2,ep2,recompute=moe+mlp"),
    thorough(8, "cp2,ep8,mbs2"),  # EP across CP and DP
    thorough(8, "tp2,cp4,ep4,mbs2,cp_comm=a2a+p2p,recompute=full"),
]


@pytest.fixture(scope="module")
def one_process(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Make runs of one process, by micro-batch size."""
    return {
        mbs: train_layout(data, f"mbs{mbs}", 1, tmp_path_factory.mktemp("one")) for mbs in (1, 2, 4)
    }


def train_layout(
    data: DataSpec,
    layout: str,
    world_size: int,
    run_dir: Path,
    *,
    steps: int = 4,
    model: ModelSpec = tiny_jobs.MODEL,
) -> Path:
    """Train `steps` steps and keep a checkpoint of each."""
    workload = tiny_jobs.build_workload(data, steps=steps)
    optimizer = replace(workload.optimizer, bucket_elements=4000)  # several buckets
    workload = replace(
        workload,
        optimizer=optimizer,
        checkpoint=replace(workload.checkpoint, every_steps=1, keep=steps),
    )
    assert (
        train(tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    return run_dir


@pytest.mark.core
@pytest.mark.turns
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_equals_one_process(
    world_size: int, layout: str, data: DataSpec, one_process: dict[int, Path], tmp_path: Path
) -> None:
    reference_run = one_process[parse_layout(layout, world_size=world_size).mbs]
    assert_same_training(train_layout(data, layout, world_size, tmp_path), reference_run)


def assert_same_training(run_dir: Path, reference_run: Path) -> None:
    """Compare every gradient of the first step of two runs, and what each step logged."""
    assert_first_gradients_equal(run_dir, reference_run)
    for actual, expected in zip(read_steps(run_dir), read_steps(reference_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert actual["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-5)
    first = [read_steps(path)[0] for path in (run_dir, reference_run)]
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-5)
    assert [load["counts"] for load in first[0]["loads"]] == [
        load["counts"] for load in first[1]["loads"]
    ]


@pytest.mark.thorough
@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "tp2,sp0"), thorough(4, "tp2,sp0,zero0"), thorough(8, "tp4,sp0,recompute=full")],
)
def test_tensor_parallelism_without_sequence_parallelism(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    """The layers are dense with q/k norms over all heads; tp4 has more ranks than key heads."""
    attention = replace(tiny_jobs.DENSE.attention, qk_norm=QkNorm.FULL)
    model = replace(tiny_jobs.DENSE, attention=attention)
    reference_run = train_layout(data, "", 1, tmp_path / "one", model=model)
    assert_same_training(
        train_layout(data, layout, world_size, tmp_path / "cut", model=model), reference_run
    )


@pytest.mark.thorough
def test_a_model_with_cut_norms_and_a_padded_vocabulary_moves_to_one_rank(
    data: DataSpec, tmp_path: Path
) -> None:
    """Resume on another layout with parts that TP cuts unevenly.

    They are q/k norms over all heads, a shared expert and a vocabulary that TP does not divide. Two
    steps on four ranks, then two on one rank, are compared with four steps on one rank.
    """
    base = tiny_jobs.MODEL
    assert base.moe is not None
    attention = replace(base.attention, heads=8, kv_heads=4, qk_norm=QkNorm.FULL)
    model = replace(
        base,
        attention=attention,
        vocab_size=tiny_jobs.VOCABULARY + 1,
        tie_embeddings=True,
        moe=replace(base.moe, shared_ffn_size=24),
    )

    def run_to(steps: int, layout: str, world_size: int, run_dir: Path) -> Path:
        workload = tiny_jobs.build_workload(data, steps=steps)
        optimizer = replace(workload.optimizer, bucket_elements=4000, decay_steps=4)
        workload = replace(
            workload,
            optimizer=optimizer,
            checkpoint=replace(workload.checkpoint, every_steps=1, keep=4),
        )
        assert (
            train(
                tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir
            )
            is ExitCode.DONE
        )
        return run_dir

    reference_run = run_to(4, "mbs2", 1, tmp_path / "one")
    moved = run_to(2, "tp4,etp2,ep2,mbs2,recompute=shared_experts+layernorm", 4, tmp_path / "moved")
    assert_first_gradients_equal(moved, reference_run)
    run_to(4, "mbs2", 1, moved)
    for actual, expected in zip(read_steps(moved), read_steps(reference_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "loss"),
    [
        # A sequence's loss does not depend on how the batch is cut.
        (4, "ep2,mbs1", LossSpec(seq_aux_coeff=0.05)),
        thorough(4, "tp2,ep4,mbs4", LossSpec(seq_aux_coeff=0.05)),
        # The counts so far in the step do: the micro-batches are the same.
        (2, "tp2,etp2,mbs2", LossSpec(global_aux_coeff=0.05)),
    ],
)
def test_a_router_with_grouped_sigmoid_scores_and_a_moving_bias_equals_one_process(
    world_size: int, layout: str, loss: LossSpec, data: DataSpec, tmp_path: Path
) -> None:
    router = RouterSpec(
        top_k=2,
        score=ScoreFunction.SIGMOID,
        scaling_factor=2.5,
        groups=4,
        top_groups=2,
        group_scores=2,
        selection_bias=True,
    )
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(
        base, moe=replace(base.moe, router=router, shared_ffn_size=24, shared_gate=True)
    )
    workload = tiny_jobs.build_workload(
        data, steps=4, loss=loss, router=RouterTraining(bias_update_rate=0.02)
    )
    workload = replace(workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=4))
    reference_run = tmp_path / "one"
    run_dir = tmp_path / "run"
    assert (
        train(tiny_jobs.build_plan(workload, "mbs2", world_size=1, model=model), reference_run)
        is ExitCode.DONE
    )
    assert (
        train(tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    assert_first_gradients_equal(run_dir, reference_run)
    bias = "layers.2.moe.router.selection_bias"
    assert torch.equal(read_state(run_dir, 4)[bias], read_state(reference_run, 4)[bias])
    assert read_state(reference_run, 4)[bias].abs().max() > 0.02
    for actual, expected in zip(read_steps(run_dir), read_steps(reference_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-5)


@pytest.mark.turns
@pytest.mark.parametrize("policy", [DropPolicy.POSITION, thorough(DropPolicy.PROBS)])
def test_every_dispatcher_drops_the_same_rows(
    policy: DropPolicy, data: DataSpec, tmp_path: Path
) -> None:
    """The capacity lies below the load.

    What a rank drops is its own affair: the same ranks drop the same rows under every dispatcher.
    """
    workload = tiny_jobs.build_workload(
        data, steps=3, loss=LossSpec(aux_coeff=0.02), router=RouterTraining(drop_policy=policy)
    )
    runs = {}
    for dispatcher in ("alltoall", "allgather", "dedup,ep_node2", "alltoall,capacity_fill=padded"):
        runs[dispatcher] = tmp_path / dispatcher
        layout = f"ep4,capacity0.75,dispatcher={dispatcher}"
        assert (
            train(tiny_jobs.build_plan(workload, layout, world_size=4), runs[dispatcher])
            is ExitCode.DONE
        )
    first, *others = (read_steps(path) for path in runs.values())
    # Passes of all ranks, experts, ceil(32 tokens * 2 / 8 * 0.75) rows.
    most_rows = 8 * 8 * 6
    assert all(0 < sum(load["counts"]) <= most_rows for load in first[0]["loads"])
    for other in others:
        for actual, expected in zip(other, first, strict=True):
            assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert [load["counts"] for load in other[0]["loads"]] == [
            load["counts"] for load in first[0]["loads"]
        ]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "documents"),
    [
        (2, "cp2,ep2,mbs2,cp_comm=a2a", DocumentMasking.RESTARTED),
        thorough(4, "tp2,cp2,ep4,mbs2,cp_comm=a2a", DocumentMasking.RESTARTED),
        thorough(4, "ep2,mbs2,recompute=full", DocumentMasking.BOUNDED),
    ],
)
def test_packed_documents_equal_one_process(
    world_size: int, layout: str, documents: DocumentMasking, tmp_path: Path
) -> None:
    """Documents are short, several in most sequences, and ranks have uneven numbers of targets."""
    data = replace(
        tiny_jobs.write_corpus(tmp_path / "corpus", documents=300, words=6), documents=documents
    )
    reference_run = train_layout(data, "mbs2", 1, tmp_path / "one")
    run_dir = train_layout(data, layout, world_size, tmp_path / "run")
    assert_first_gradients_equal(run_dir, reference_run)
    for actual, expected in zip(read_steps(run_dir), read_steps(reference_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-5)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "tied"),
    [thorough(4, "tp2,ep2,mbs2", True), (2, "pp2,mbs2", False), (4, "pp2,ep2,mbs2", True)],
)
def test_two_depths_of_prediction_equal_one_process(
    world_size: int, layout: str, tied: bool, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(
        tiny_jobs.MODEL,
        mtp_layers=2,
        tie_embeddings=tied,
        layers=4,
        moe_layers=(True, False, True, True),
    )
    workload = tiny_jobs.build_workload(data, steps=3, loss=LossSpec(aux_coeff=0.02, mtp_coeff=0.3))
    workload = replace(workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=3))
    reference_run = tmp_path / "one"
    run_dir = tmp_path / "run"
    assert (
        train(tiny_jobs.build_plan(workload, "mbs2", world_size=1, model=model), reference_run)
        is ExitCode.DONE
    )
    assert (
        train(tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    assert any(
        name.startswith("optim/exp_avg/mtp.1.layer.moe") for name in read_state(reference_run, 1)
    )
    assert_first_gradients_equal(run_dir, reference_run)
    for actual, expected in zip(read_steps(run_dir), read_steps(reference_run), strict=True):
        for key in ("loss", "aux_loss"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert [load["counts"] for load in actual["loads"]] == [
            load["counts"] for load in expected["loads"]
        ]


@pytest.mark.thorough
def test_a_run_goes_on_in_another_pipeline(data: DataSpec, tmp_path: Path) -> None:
    """Four steps of a tied model, each on other stages, equal four steps on one rank."""
    model = replace(tiny_jobs.MODEL, tie_embeddings=True)

    def run_to(steps: int, layout: str, world_size: int, run_dir: Path) -> Path:
        workload = tiny_jobs.build_workload(data, steps=steps)
        optimizer = replace(workload.optimizer, bucket_elements=4000, decay_steps=4)
        workload = replace(
            workload,
            optimizer=optimizer,
            checkpoint=replace(workload.checkpoint, every_steps=1, keep=4),
        )
        assert (
            train(
                tiny_jobs.build_plan(workload, layout, world_size=world_size, model=model), run_dir
            )
            is ExitCode.DONE
        )
        return run_dir

    reference_run = tmp_path / "one"
    moved = tmp_path / "moved"
    run_to(4, "mbs2", 1, reference_run)
    run_to(1, "pp3,mbs2", 3, moved)
    run_to(2, "pp2,vpp2,tp2,mbs2,layout='Et|t||tL'", 4, moved)
    run_to(3, "mbs2", 1, moved)
    run_to(4, "pp2,ep2,mbs2,schedule=zbv,layout='E|t|t|tL'", 4, moved)
    for actual, expected in zip(read_steps(moved), read_steps(reference_run), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "ep2,mbs2"), thorough(4, "tp2,ep2,mbs2"), thorough(4, "pp2,ep2,mbs2,layout='Et*2|tL'")],
)
def test_the_same_run_twice_is_bit_identical(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    first, second = (
        train_layout(data, layout, world_size, tmp_path / name, steps=2) for name in ("a", "b")
    )
    first_state = read_state(first, 2)
    second_state = read_state(second, 2)
    assert all(torch.equal(first_state[name], second_state[name]) for name in first_state)
    for first_step, second_step in zip(read_steps(first), read_steps(second), strict=True):
        assert (first_step["loss"], first_step["grad_norm"]) == (
            second_step["loss"],
            second_step["grad_norm"],
        )


@pytest.mark.thorough
def test_neither_a_replay_nor_the_host_changes_a_bit(data: DataSpec, tmp_path: Path) -> None:
    every_offload = "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"
    memory_savers = (
        "",
        ",recompute=full",
        ",recompute=block2",
        f",recompute=core_attn,offload={every_offload}",
        f",offload={every_offload}+layers0.5",
    )
    plain, *others = (
        read_state(
            train_layout(data, f"tp2,ep2{memory_saver}", 2, tmp_path / str(number), steps=2), 2
        )
        for number, memory_saver in enumerate(memory_savers)
    )
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.thorough
def test_chunks_on_the_host_change_no_bit(data: DataSpec, tmp_path: Path) -> None:
    """PipeOffload: the chunk that a rank holds longest, or both, go to the host."""
    offload = "core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"
    plain, *others = (
        read_state(
            train_layout(
                data,
                f"pp2,vpp2,schedule=gis{offloaded},layout='Et|t|t|L'",
                2,
                tmp_path / str(number),
                steps=2,
            ),
            2,
        )
        for number, offloaded in enumerate(
            ("", f",offload={offload}+chunks1", f",offload={offload}")
        )
    )
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout", "overlap"),
    [
        (2, "ep2,mbs2", "grad+param"),
        (4, "tp2,etp2,ep2,mbs2", "grad+param"),
        thorough(2, "mbs2,zero0", "grad"),
    ],
)
def test_overlap_changes_no_bit(
    world_size: int, layout: str, overlap: str, data: DataSpec, tmp_path: Path
) -> None:
    """Micro-batches, evaluations and checkpoints come between steps; a session is resumed."""

    def run_to(steps: int, layout: str, run_dir: Path) -> Path:
        workload = tiny_jobs.build_workload(data, steps=steps, eval_every_steps=1)
        optimizer = replace(workload.optimizer, bucket_elements=4000, decay_steps=5)
        workload = replace(
            workload,
            optimizer=optimizer,
            checkpoint=replace(workload.checkpoint, every_steps=1, keep=5),
        )
        assert (
            train(tiny_jobs.build_plan(workload, layout, world_size=world_size), run_dir)
            is ExitCode.DONE
        )
        return run_dir

    plain = run_to(5, layout, tmp_path / "plain")
    hidden = tmp_path / "hidden"
    for steps in (3, 5):
        run_to(steps, f"{layout},overlap={overlap}", hidden)
    for step in (1, 2, 3, 4, 5):
        expected = read_state(plain, step)
        actual = read_state(hidden, step)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    lines = [
        {key: line[key] for key in ("step", "loss", "grad_norm", "heldout_loss") if key in line}
        for path in (plain, hidden)
        for line in map(json.loads, (path / "steps.jsonl").read_text().splitlines())
        if line["kind"] in ("step", "eval")
    ]
    evals = [line for line in lines if "heldout_loss" in line]
    assert len(evals) >= 10
    for records in ([line for line in lines if "loss" in line], evals):
        half = len(records) // 2
        assert records[:half] == records[half:]


def test_a_starved_and_a_flooded_rank_agree(data: DataSpec, tmp_path: Path) -> None:
    """A router sends every token to the first two experts.

    Three of four ranks get no row, and all agree.
    """
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(
        tiny_jobs.MODEL, moe=replace(moe, experts=4, router=replace(moe.router, top_k=1))
    )
    # With all weights zero every logit ties, and a tie falls on one expert for all tokens.
    workload = tiny_jobs.build_workload(
        data, steps=1, optimizer=OptimizerSpec(lr=0.0, clip_norm=0.0)
    )
    results = []
    for world_size, layout in ((1, ""), (4, "ep4"), (4, "tp2,etp2,ep2")):
        run_dir = tmp_path / str(world_size)
        zeros = replace(model, initializer_range=0.0)
        assert (
            train(
                tiny_jobs.build_plan(workload, layout, world_size=world_size, model=zeros), run_dir
            )
            is ExitCode.DONE
        )
        results.append(read_steps(run_dir)[0])
    counts = results[1]["loads"][0]["counts"]
    assert sorted(counts)[:3] == [0, 0, 0]
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert result["loads"][0]["counts"] == counts


def test_counted_bytes_do_not_depend_on_time(data: DataSpec, tmp_path: Path) -> None:
    """Each rank of an expert group holds the same parameter bytes.

    Nothing is counted twice on a second session.
    """
    run_dir = train_layout(data, "ep2,mbs2", 2, tmp_path, steps=2)
    ledgers = [read_json(Ledger, run_dir / "ledger" / f"rank{rank:05d}.json") for rank in (0, 1)]
    rows = [
        {
            (row.component, row.module): row.bytes
            for row in ledger.memory
            if row.component in ("weights", "gradients")
        }
        for ledger in ledgers
    ]
    assert rows[0] == rows[1]
    assert find_latest(run_dir / "checkpoints") is not None
