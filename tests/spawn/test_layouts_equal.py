"""Every layout computes what one process computes: gradients of all parameters, losses, norms, and
the loss curve.

The first AdamW moment after one unclipped step is (1 - beta1) times the gradient, and a checkpoint
holds it by global name: reading it back compares every gradient, whatever shards it lay in.
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

# The sweep proves layouts one by one; these also go through training's own loop: data, logs,
# checkpoints.
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
    """Runs of one process, by micro-batch size."""
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
    """Train `steps` steps, keeping a checkpoint of each."""
    work = tiny_jobs.build_workload(data, steps=steps)
    optimizer = replace(work.optimizer, bucket_elements=4000)  # several buckets
    work = replace(
        work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=steps)
    )
    assert (
        train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), run_dir)
        is ExitCode.DONE
    )
    return run_dir


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_equals_one_process(
    world_size: int, layout: str, data: DataSpec, one_process: dict[int, Path], tmp_path: Path
) -> None:
    reference_run = one_process[parse_layout(layout, world_size=world_size).mbs]
    assert_same(train_layout(data, layout, world_size, tmp_path), reference_run)


def assert_same(here: Path, reference_run: Path) -> None:
    """Two runs of the same steps: every gradient of the first, and what each step logged."""
    assert_first_gradients_equal(here, reference_run)
    for ours, theirs in zip(read_steps(here), read_steps(reference_run), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)
    first = [read_steps(path)[0] for path in (here, reference_run)]
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-5)
    assert [load["counts"] for load in first[0]["loads"]] == [
        load["counts"] for load in first[1]["loads"]
    ]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "tp2,sp0"), thorough(4, "tp2,sp0,zero0"), thorough(8, "tp4,sp0,recompute=full")],
)
def test_tensor_parallelism_without_sequence_parallelism(
    world_size: int, layout: str, data: DataSpec, tmp_path: Path
) -> None:
    """Dense layers alone, q/k norms over all heads; under tp4 more ranks than key heads."""
    attention = replace(tiny_jobs.DENSE.attention, qk_norm=QkNorm.FULL)
    model = replace(tiny_jobs.DENSE, attention=attention)
    one = train_layout(data, "", 1, tmp_path / "one", model=model)
    assert_same(train_layout(data, layout, world_size, tmp_path / "cut", model=model), one)


def test_cut_norms_shared_experts_and_a_padded_vocabulary(data: DataSpec, tmp_path: Path) -> None:
    """q/k norms over all heads, a shared expert and a vocabulary that TP does not divide, resumed
    on another layout.

    Two steps on four ranks, then two on one rank, against four steps on one rank.
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
        work = tiny_jobs.build_workload(data, steps=steps)
        optimizer = replace(work.optimizer, bucket_elements=4000, decay_steps=4)
        work = replace(
            work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=4)
        )
        assert (
            train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), run_dir)
            is ExitCode.DONE
        )
        return run_dir

    one = run_to(4, "mbs2", 1, tmp_path / "one")
    moved = run_to(2, "tp4,etp2,ep2,mbs2,recompute=shared_experts+layernorm", 4, tmp_path / "moved")
    assert_first_gradients_equal(moved, one)
    run_to(4, "mbs2", 1, moved)
    for ours, theirs in zip(read_steps(moved), read_steps(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("world_size", "layout", "loss"),
    [
        (
            4,
            "ep2,mbs1",
            LossSpec(seq_aux_coeff=0.05),
        ),  # a sequence's loss does not depend on how the batch is cut
        thorough(4, "tp2,ep4,mbs4", LossSpec(seq_aux_coeff=0.05)),
        (
            2,
            "tp2,etp2,mbs2",
            LossSpec(global_aux_coeff=0.05),
        ),  # the counts so far do: the same micro-batches
    ],
)
def test_a_router_of_independent_scores_in_groups_with_a_moving_bias(
    world_size: int, layout: str, loss: LossSpec, data: DataSpec, tmp_path: Path
) -> None:
    router = RouterSpec(
        top_k=2, score=ScoreFunction.SIGMOID, scaling_factor=2.5, groups=4, top_groups=2, group_scores=2,
        selection_bias=True,
    )  # fmt: skip
    base = tiny_jobs.MODEL
    assert base.moe is not None
    model = replace(
        base, moe=replace(base.moe, router=router, shared_ffn_size=24, shared_gate=True)
    )
    work = tiny_jobs.build_workload(
        data, steps=4, loss=loss, router=RouterTraining(bias_update_rate=0.02)
    )
    work = replace(work, checkpoint=replace(work.checkpoint, every_steps=1, keep=4))
    one, here = tmp_path / "one", tmp_path / "here"
    assert train(tiny_jobs.build_plan(work, "mbs2", world_size=1, model=model), one) is ExitCode.DONE
    assert (
        train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), here)
        is ExitCode.DONE
    )
    assert_first_gradients_equal(here, one)
    bias = "layers.2.moe.router.selection_bias"
    assert torch.equal(read_state(here, 4)[bias], read_state(one, 4)[bias])
    assert read_state(one, 4)[bias].abs().max() > 0.02
    for ours, theirs in zip(read_steps(here), read_steps(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)


@pytest.mark.parametrize("policy", list(DropPolicy))
def test_every_dispatcher_drops_alike(policy: DropPolicy, data: DataSpec, tmp_path: Path) -> None:
    """A capacity below the load: what a rank drops is its own affair, so the same ranks drop the
    same rows."""
    work = tiny_jobs.build_workload(
        data, steps=3, loss=LossSpec(aux_coeff=0.02), router=RouterTraining(drop_policy=policy)
    )
    runs = {}
    for dispatcher in ("alltoall", "allgather", "dedup,ep_node2", "alltoall,capacity_fill=padded"):
        runs[dispatcher] = tmp_path / dispatcher
        layout = f"ep4,capacity0.75,dispatcher={dispatcher}"
        assert train(tiny_jobs.build_plan(work, layout, world_size=4), runs[dispatcher]) is ExitCode.DONE
    first, *others = (read_steps(path) for path in runs.values())
    most = 8 * 8 * 6  # passes of all ranks, experts, ceil(32 tokens * 2 / 8 * 0.75) rows
    assert all(0 < sum(load["counts"]) <= most for load in first[0]["loads"])
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert [load["counts"] for load in other[0]["loads"]] == [
            load["counts"] for load in first[0]["loads"]
        ]


@pytest.mark.parametrize(
    ("world_size", "layout", "documents"),
    [
        (4, "tp2,cp2,ep4,mbs2,cp_comm=a2a", DocumentMasking.RESTARTED),
        thorough(4, "ep2,mbs2,recompute=full", DocumentMasking.BOUNDED),
    ],
)
def test_packed_documents(
    world_size: int, layout: str, documents: DocumentMasking, tmp_path: Path
) -> None:
    """Short documents, several in most sequences, and ranks with uneven numbers of targets."""
    data = replace(
        tiny_jobs.write_corpus(tmp_path / "corpus", documents=300, words=6), documents=documents
    )
    one, here = (
        train_layout(data, "mbs2", 1, tmp_path / "one"),
        train_layout(data, layout, world_size, tmp_path / "here"),
    )
    assert_first_gradients_equal(here, one)
    for ours, theirs in zip(read_steps(here), read_steps(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "layout", "tied"),
    [thorough(4, "tp2,ep2,mbs2", True), (2, "pp2,mbs2", False), (4, "pp2,ep2,mbs2", True)],
)
def test_two_depths_of_prediction_ahead(
    world_size: int, layout: str, tied: bool, data: DataSpec, tmp_path: Path
) -> None:
    model = replace(
        tiny_jobs.MODEL,
        mtp_layers=2,
        tie_embeddings=tied,
        layers=4,
        moe_layers=(True, False, True, True),
    )
    work = tiny_jobs.build_workload(data, steps=3, loss=LossSpec(aux_coeff=0.02, mtp_coeff=0.3))
    work = replace(work, checkpoint=replace(work.checkpoint, every_steps=1, keep=3))
    one, here = tmp_path / "one", tmp_path / "here"
    assert train(tiny_jobs.build_plan(work, "mbs2", world_size=1, model=model), one) is ExitCode.DONE
    assert (
        train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), here)
        is ExitCode.DONE
    )
    assert any(name.startswith("optim/exp_avg/mtp.1.layer.moe") for name in read_state(one, 1))
    assert_first_gradients_equal(here, one)
    for ours, theirs in zip(read_steps(here), read_steps(one), strict=True):
        for key in ("loss", "aux_loss"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert [load["counts"] for load in ours["loads"]] == [
            load["counts"] for load in theirs["loads"]
        ]


def test_a_run_goes_on_in_another_pipeline(data: DataSpec, tmp_path: Path) -> None:
    """Four steps of a tied model, each on other stages, against four steps on one rank."""
    model = replace(tiny_jobs.MODEL, tie_embeddings=True)

    def run_to(steps: int, layout: str, world_size: int, run_dir: Path) -> Path:
        work = tiny_jobs.build_workload(data, steps=steps)
        optimizer = replace(work.optimizer, bucket_elements=4000, decay_steps=4)
        work = replace(
            work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=4)
        )
        assert (
            train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=model), run_dir)
            is ExitCode.DONE
        )
        return run_dir

    one, moved = tmp_path / "one", tmp_path / "moved"
    run_to(4, "mbs2", 1, one)
    run_to(1, "pp3,mbs2", 3, moved)
    run_to(2, "pp2,vpp2,tp2,mbs2,layout='Et|t||tL'", 4, moved)
    run_to(3, "mbs2", 1, moved)
    run_to(4, "pp2,ep2,mbs2,schedule=zbv,layout='E|t|t|tL'", 4, moved)
    for ours, theirs in zip(read_steps(moved), read_steps(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


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
    one, two = read_state(first, 2), read_state(second, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    for ours, theirs in zip(read_steps(first), read_steps(second), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])


def test_neither_a_replay_nor_the_host_changes_a_bit(data: DataSpec, tmp_path: Path) -> None:
    away = "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"
    kinds = (
        "",
        ",recompute=full",
        ",recompute=uniform2",
        ",recompute=block2",
        f",recompute=select,offload={away}",
        f",recompute=core_attn,offload={away}",
    )
    plain, *others = (
        read_state(train_layout(data, f"tp2,ep2{kind}", 2, tmp_path / str(number), steps=2), 2)
        for number, kind in enumerate(kinds)
    )
    for other in others:
        assert all(torch.equal(plain[name], other[name]) for name in plain)


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
    """Micro-batches, evaluations and checkpoints between the steps, and a resumed session."""

    def run_to(steps: int, layout: str, run_dir: Path) -> Path:
        work = tiny_jobs.build_workload(data, steps=steps, eval_every_steps=1)
        optimizer = replace(work.optimizer, bucket_elements=4000, decay_steps=5)
        work = replace(
            work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=5)
        )
        assert train(tiny_jobs.build_plan(work, layout, world_size=world_size), run_dir) is ExitCode.DONE
        return run_dir

    plain = run_to(5, layout, tmp_path / "plain")
    hidden = tmp_path / "hidden"
    for steps in (3, 5):
        run_to(steps, f"{layout},overlap={overlap}", hidden)
    for step in (1, 2, 3, 4, 5):
        wanted, found = read_state(plain, step), read_state(hidden, step)
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    lines = [
        {key: line[key] for key in ("step", "loss", "grad_norm", "heldout_loss") if key in line}
        for path in (plain, hidden)
        for line in map(json.loads, (path / "steps.jsonl").read_text().splitlines())
        if line["kind"] in ("step", "eval")
    ]
    evals = [line for line in lines if "heldout_loss" in line]
    assert len(evals) >= 10
    for found_lines in ([line for line in lines if "loss" in line], evals):
        half = len(found_lines) // 2
        assert found_lines[:half] == found_lines[half:]


def test_a_starved_and_a_flooded_rank(data: DataSpec, tmp_path: Path) -> None:
    """A router that sends every token to the first two experts: three of four ranks get no row, and
    all agree."""
    moe = tiny_jobs.MODEL.moe
    assert moe is not None
    model = replace(
        tiny_jobs.MODEL, moe=replace(moe, experts=4, router=replace(moe.router, top_k=1))
    )
    # With all weights zero every logit ties, and a tie falls on one expert for all tokens.
    work = tiny_jobs.build_workload(data, steps=1, optimizer=OptimizerSpec(lr=0.0, clip_norm=0.0))
    results = []
    for world_size, layout in ((1, ""), (4, "ep4"), (4, "tp2,etp2,ep2")):
        run_dir = tmp_path / str(world_size)
        flat = replace(model, initializer_range=0.0)
        assert (
            train(tiny_jobs.build_plan(work, layout, world_size=world_size, model=flat), run_dir)
            is ExitCode.DONE
        )
        results.append(read_steps(run_dir)[0])
    counts = results[1]["loads"][0]["counts"]
    assert sorted(counts)[:3] == [0, 0, 0]
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert result["loads"][0]["counts"] == counts


def test_counted_bytes_do_not_depend_on_time(data: DataSpec, tmp_path: Path) -> None:
    """Each rank of one expert group holds the same parameter bytes; nothing is counted twice on a
    second session."""
    here = train_layout(data, "ep2,mbs2", 2, tmp_path, steps=2)
    ledgers = [read_json(Ledger, here / "ledger" / f"rank{rank:05d}.json") for rank in (0, 1)]
    rows = [
        {
            (r.component, r.module): r.bytes
            for r in ledger.memory
            if r.component in ("weights", "gradients")
        }
        for ledger in ledgers
    ]
    assert rows[0] == rows[1]
    assert find_latest(here / "checkpoints") is not None
