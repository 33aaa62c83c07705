"""A dry run holds, sends and computes what is predicted, on layouts of any size."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tiny_jobs
from job_draws import draw_job, list_seeds
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.cost.ledger import predict_rank_ledger
from moewright.diagnosis.compare_ledgers import LineStatus, Section, compare_ledgers
from moewright.engine.run.dry_run import dry_run
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.rules.routing import round_robin_selection
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, StorageMoment
from moewright.spec.model import ModelSpec, NormKind
from moewright.spec.workload import (
    DataSpec,
    DropPolicy,
    Dtype,
    FineTuningSpec,
    FrozenPart,
    LossSpec,
    MatrixUpdate,
    Objective,
    OptimizerSpec,
    RouterTraining,
    Task,
    TensorScaling,
    Workload,
)
from saved_moments import watch_moments
from selection import thorough
from tensors_with_memory import tensors_with_memory


def assert_as_predicted(model: ModelSpec, workload: Workload, layout: Layout, rank: int) -> None:
    job = Job(model=model, workload=workload, layout=layout)
    with watch_moments() as moments:
        counted = dry_run(job, rank=rank)
        predicted = predict_rank_ledger(job, rank=rank, selection=round_robin_selection(job))
    moments.check(job)
    comparison = compare_ledgers(predicted, counted.ledger)
    unequal = [
        line
        for line in comparison.lines
        if line.section not in (Section.TIME, Section.STORAGES)
        and line.status is not LineStatus.EQUAL
    ]
    assert not unequal, unequal
    assert comparison.is_accounted, (comparison.lines_in(Section.STORAGES), comparison.unlisted)
    saved = (Component.ACTIVATIONS, Component.LOGITS)
    assert sum(size for _, size in counted.peak_by_module) > sum(
        r.bytes for r in counted.ledger.memory if r.component in saved
    )
    assert not dist.is_initialized()


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "text", "precision"),
    [
        (1, "", Dtype.FP32),
        (256, "ep8", Dtype.BF16),
        thorough(256, "tp2,ep8,recompute=full", Dtype.BF16),
        (1024, "tp2,ep4,etp2,zero0", Dtype.FP32),
        thorough(16384, "tp2,ep8,recompute=moe+layernorm", Dtype.BF16),
        thorough(64, "tp2,cp4,ep8", Dtype.BF16),
        thorough(48, "pp3,tp2,ep8", Dtype.BF16),
        (48, "pp3,ep8,schedule=zb-h1,recompute=full", Dtype.FP32),
        (64, "cp2,cp_comm=allgather,ep8,offload=moe_act", Dtype.BF16),
        thorough(1024, "tp2,ep8,dispatcher=allgather", Dtype.BF16),
        thorough(1024, "tp2,ep4,etp2,dispatcher=dedup,recompute=moe", Dtype.BF16),
        thorough(256, "tp2,ep8,ep_node4,dispatcher=dedup", Dtype.BF16),
        thorough(256, "ep8,capacity0.5", Dtype.FP32),
        thorough(256, "tp2,ep8,capacity1.5,dispatcher=allgather,recompute=full", Dtype.BF16),
        (256, "tp2,ep8,zero3,recompute=moe", Dtype.BF16),
        (16, "ep2,zero2", Dtype.FP32),  # shards of some ranks are padded
        thorough(64, "tp2,etp2,ep4,zero3,shard8,offload=optimizer", Dtype.FP32),
    ],
)
def test_any_rank_of_any_world_is_as_predicted(
    world_size: int, text: str, precision: Dtype
) -> None:
    layout = parse_layout(text, world_size=world_size)
    work = tiny_jobs.build_workload(
        DataSpec(), precision=precision, loss=LossSpec(aux_coeff=0.01), global_batch=4 * layout.dp
    )
    for rank in {0, world_size // 2 + 1, world_size - 1} if world_size > 1 else {0}:
        assert_as_predicted(tiny_jobs.MODEL, work, layout, rank)


def draw_rank(seed: str) -> tuple[Job, int]:
    """Draw a job and one of its ranks."""
    draw = draw_job(f"{seed} dry", worlds=(4, 8, 16), is_counted_dry=True)
    print(draw)
    return draw.job, random.Random(seed).randrange(draw.job.layout.world_size)


@pytest.mark.parametrize("seed", list_seeds(quick=40, often=40))
def test_a_rank_of_a_drawn_job_is_as_predicted(seed: str) -> None:
    job, rank = draw_rank(seed)
    with tensors_with_memory():
        assert_as_predicted(job.model, job.workload, job.layout, rank)


@pytest.mark.parametrize("seed", list_seeds(quick=1, often=3))
def test_a_rank_counts_the_same_with_memory_and_without(seed: str) -> None:
    job, rank = draw_rank(seed)
    without = dry_run(job, rank=rank)
    with tensors_with_memory():
        assert dry_run(job, rank=rank) == without


@pytest.mark.parametrize(
    ("text", "precision", "scaling"),
    [
        ("ep8", Dtype.MXFP8, TensorScaling.CURRENT),
        thorough("tp2,ep4,etp2", Dtype.FP8, TensorScaling.BLOCKWISE),
        thorough("ep4,zero3", Dtype.FP8, TensorScaling.CURRENT),
        thorough("tp2,ep4,etp2", Dtype.FP8, TensorScaling.DELAYED),
        thorough("ep8", Dtype.NVFP4, TensorScaling.CURRENT),
    ],
)
def test_narrow_products_in_a_large_world(
    text: str, precision: Dtype, scaling: TensorScaling
) -> None:
    layout = parse_layout(text, world_size=64)
    work = Workload(seq_len=32, global_batch=64, precision=precision, tensor_scaling=scaling)
    assert_as_predicted(tiny_jobs.MODEL, work, layout, 5)


@pytest.mark.parametrize(
    ("model", "recompute", "precision"),
    [
        # A checkpoint over three layers keeps the input of the first when the last has ended, and
        # what the routers decided until its own backward has.
        (tiny_jobs.MODEL, ",recompute=uniform3", Dtype.FP32),
        # A checkpoint lets go of what it runs again, of which blocks attention reads among it.
        (SHAPES["compressed"], ",recompute=core_attn", Dtype.FP32),
        # A node of the graph lives longer than what it held of an expert's input.
        (tiny_jobs.MODEL, "", Dtype.FP8),
    ],
    ids=["span", "block", "input"],
)
def test_every_moment_of_two_passes_is_as_predicted(
    model: ModelSpec, recompute: str, precision: Dtype
) -> None:
    layout = parse_layout(f"ep2,mbs1,overlap=ep{recompute}", world_size=4)
    scaling = TensorScaling.DELAYED if precision is Dtype.FP8 else TensorScaling.CURRENT
    work = Workload(seq_len=32, global_batch=12, precision=precision, tensor_scaling=scaling)
    assert_as_predicted(model, work, layout, 1)


def test_a_stage_without_linears_sends_no_scales() -> None:
    layout = parse_layout("pp2,ep2,mbs1,layout='E|tttL'", world_size=4)
    work = Workload(
        seq_len=32, global_batch=8, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED
    )
    assert_as_predicted(tiny_jobs.MODEL, work, layout, 0)


@pytest.mark.thorough
def test_muon_makes_matrices_whole_that_ranks_have_parts_of() -> None:
    frozen = FineTuningSpec(
        task=Task.SFT, freeze=(FrozenPart.EMBEDDINGS, FrozenPart.ATTENTION, FrozenPart.ROUTER)
    )
    optimizer = OptimizerSpec(matrix_update=MatrixUpdate.MUON)
    work = Workload(
        seq_len=32,
        global_batch=16,
        precision=Dtype.FP32,
        optimizer=optimizer,
        fine_tuning=frozen,
    )
    assert_as_predicted(tiny_jobs.MODEL, work, parse_layout("tp2,etp4,mbs4", world_size=4), 3)


@pytest.mark.turns
@pytest.mark.parametrize("precision", [Dtype.BF16, Dtype.FP32])
def test_layer_norms_keep_statistics_in_fp32(precision: Dtype) -> None:
    model = replace(tiny_jobs.MODEL, norm=NormKind.LAYER)
    work = Workload(seq_len=32, global_batch=64, precision=precision)
    assert_as_predicted(model, work, parse_layout("tp2,ep4", world_size=64), 5)


@pytest.mark.thorough
def test_muon_in_a_large_world() -> None:
    work = Workload(
        seq_len=32, global_batch=64, optimizer=OptimizerSpec(matrix_update=MatrixUpdate.MUON)
    )
    assert_as_predicted(tiny_jobs.MODEL, work, parse_layout("tp2,ep4", world_size=64), 5)


@pytest.mark.thorough
def test_pairs_of_answers_over_ranks_that_cut_sequences() -> None:
    """Ranks gather the nll of tokens, and keep a weight for each of their own."""
    work = Workload(seq_len=64, global_batch=8, loss=LossSpec(objective=Objective.DPO))
    layout = parse_layout("tp2,cp2,ep4", world_size=8)
    assert_as_predicted(tiny_jobs.MODEL, work, layout, 3)


def test_sinks_windows_and_biases_of_gpt_oss() -> None:
    model = replace(catalogue.model("gpt-oss-20b"), layers=2, moe_layers=(True, True))
    work = Workload(seq_len=512, global_batch=4, precision=Dtype.BF16)
    assert_as_predicted(
        model, work, parse_layout("tp2,ep2,etp2,recompute=core_attn", world_size=4), 1
    )


def test_two_layers_of_qwen3_235b_at_full_width() -> None:
    whole = catalogue.model("Qwen3-235B-A22B")
    model = replace(whole, layers=2, moe_layers=whole.moe_layers[:2])
    layout = parse_layout("tp4,ep64", world_size=256)
    assert_as_predicted(model, Workload(seq_len=4096, global_batch=64), layout, 255)


def test_the_fullest_moment_is_that_of_real_tensors() -> None:
    """By hand: a product's two operands, its output and a copy of it live at once."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from moewright.engine.observe.module_scopes import ModuleScopes, ObservingMode
    from moewright.engine.observe.storage_census import StorageCensus

    with FakeTensorMode():
        census = StorageCensus(ModuleScopes())
        state = torch.zeros(1000)
        census.begin()
        with ObservingMode(after=(census.weigh,)):
            state.add_(1.0)
            a, b = torch.ones(8, 4), torch.ones(4, 8)
            c = a @ b
            copy = c.clone()
            del a, b, c
            more = copy + 1
            del copy, more
    assert sum(census.peak_by_module.values()) == 4 * (32 + 32 + 64 + 64)
    assert census.totals.resident == 4000
    assert census.totals.peak == 4000 + 4 * (32 + 32 + 64 + 64)


def test_storages_that_are_emptied_and_filled_again_weigh_what_they_hold() -> None:
    """As with fully_shard: of two gathered weights of 8 floats one lives at a time."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from moewright.engine.observe.module_scopes import ModuleScopes, ObservingMode
    from moewright.engine.observe.storage_census import StorageCensus

    def fill(weight: torch.Tensor, gathered: torch.Tensor) -> None:
        weight.untyped_storage().resize_(32)
        torch.ops.fsdp.split_with_sizes_copy(gathered, [8], 0, out=[weight])

    with FakeTensorMode():
        census = StorageCensus(ModuleScopes())
        first, second = torch.empty(8), torch.empty(8)
        for weight in (first, second):
            weight.untyped_storage().resize_(0)
        census.begin()
        with ObservingMode(after=(census.weigh,)):
            gathered = torch.zeros(8)
            fill(first, gathered)
            first.untyped_storage().resize_(0)
            fill(second, gathered)
            del gathered
            torch.zeros(4)
    assert sum(census.peak_by_module.values()) == 32 + 32


def test_a_gradient_in_the_place_of_a_freed_storage_lists_none_of_its_bytes() -> None:
    """Storages have the ids of those that were freed before: the fullest moment had no gradient."""
    from moewright.engine.observe.module_scopes import ModuleScopes, ObservingMode
    from moewright.engine.observe.storage_census import StorageCensus
    from moewright.engine.torch_private import storage_id

    gradients: list[torch.Tensor] = []
    census = StorageCensus(ModuleScopes())
    census.list_states = lambda: gradients
    census.begin()
    with ObservingMode(after=(census.weigh,)):
        passing = torch.ones(1000)
        key = storage_id(passing)
        del passing
        others = []
        while not gradients:
            made = torch.ones(1)
            (gradients if storage_id(made) == key else others).append(made)
            assert len(others) < 900, "no storage had the id again"
    census.end()
    fullest = [row.bytes for row in census.unlisted if row.moment is StorageMoment.PEAK]
    assert fullest == [4000]


def test_copies_of_tokens_that_probabilities_decide_on_are_refused() -> None:
    work = tiny_jobs.build_workload(DataSpec())
    layout = parse_layout("ep8,dispatcher=dedup,capacity0.5", world_size=8)
    with pytest.raises(
        BadInput, match=r"train.drop_policy=probs: .* nearest legal value: position"
    ):
        dry_run(Job(model=tiny_jobs.MODEL, workload=work, layout=layout), rank=0)
    by_place = replace(work, router=RouterTraining(drop_policy=DropPolicy.POSITION))
    assert_as_predicted(tiny_jobs.MODEL, by_place, layout, 3)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(BadInput, match="rank=8: ranks are 0 to 7"):
        dry_run(
            Job(
                model=tiny_jobs.MODEL,
                workload=tiny_jobs.build_workload(DataSpec()),
                layout=parse_layout("", world_size=8),
            ),
            rank=8,
        )
