"""Rows of a table of measured runs: what is stated, what stays unknown, what is skipped and why."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from moewright.calibration.cells import PeakKind
from moewright.calibration.columns import COLUMNS
from moewright.calibration.cross_validate import calibrate_as_shipped
from moewright.calibration.readings import Reading, likely_readings
from moewright.calibration.score import score_table
from moewright.calibration.software_facts import release_age_years, source_facts
from moewright.calibration.table import MeasurementTable, read_table
from moewright.codec import format_layout
from moewright.cost.constants import Constants
from moewright.intake import catalogue
from moewright.rules.expert_load import expected_load
from moewright.rules.shapes import flops
from moewright.spec.errors import BadInput
from moewright.spec.layout import CapacityFill, CudaGraphScope, Layout, Offload, Overlap, Recompute
from moewright.spec.plan import Verdict
from moewright.spec.units import GIB
from moewright.spec.workload import (
    AdapterTarget,
    DocumentMasking,
    Dtype,
    Fusion,
    Routing,
    TensorScaling,
    Workload,
)

BASE = {
    "id": "a-1",
    "source": "a guide",
    "model": "Qwen3-235B-A22B",
    "hardware": "H800",
    "num_gpus": "256",
    "precision": "bf16",
    "seq_len": "4096",
    "gbs": "2048",
    "mbs": "1",
    "tp": "2",
    "pp": "32",
    "vpp": "3",
    "ep": "8",
    "dp": "4",
    "recompute_granularity": "selective",
    "recompute_modules": "moe_act layernorm",
    "cuda_graph": "none",
    "force_balance": "true",
    "time_per_iter_s": "22.42",
}
DEEPSEEK = {
    "model": "DeepSeek-V3",
    "tp": "1",
    "pp": "8",
    "vpp": "",
    "dp": "32",
    "time_per_iter_s": "",
}
DENSE = {
    **DEEPSEEK,
    "model": "Meta-Llama-3-8B",
    "pp": "1",
    "dp": "256",
    "tp": "1",
    "ep": "",
    "recompute_granularity": "none",
    "recompute_modules": "",
}


def table(folder: Path, *changes: dict[str, str]) -> MeasurementTable:
    path = folder / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({**BASE, **change} for change in changes)
    return read_table(path)


def test_a_full_row(tmp_path: Path) -> None:
    (row,) = table(tmp_path, {}).rows
    assert row.is_complete
    assert row.group == ("Qwen/Qwen3-235B-A22B", "H800")
    assert format_layout(row.layout) == "tp2,pp32,vpp3,ep8,mbs1,recompute=layernorm+moe_act"
    assert row.layout.world_size == row.hardware.count == 256
    assert row.speed is not None
    assert row.speed.tokens_per_s_per_device == pytest.approx(2048 * 4096 / 22.42 / 256)
    assert not row.oom
    assert row.peak is None


def test_what_is_not_stated_stays_unknown(tmp_path: Path) -> None:
    blank = {
        "recompute_granularity": "",
        "recompute_modules": "",
        "cuda_graph": "",
        "force_balance": "",
    }
    (row,) = table(tmp_path, blank).rows
    assert set(row.unstated) == {
        "recompute_granularity",
        "cuda_graph",
        "force_balance",
        "dispatcher",
    }
    (natural,) = table(tmp_path, {"force_balance": "false"}).rows
    assert natural.unstated == ("expert_load",)
    assert natural.workload.routing is Routing.LEARNED


def test_a_row_without_a_micro_batch_is_read_at_each_legal_one(tmp_path: Path) -> None:
    (row,) = table(tmp_path, {"mbs": ""}).rows
    assert "mbs" in row.unstated
    assert {reading.layout.mbs for reading in row.readings} == {1, 2}  # the likely ones


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "nobody/Model-1B"}, "model=nobody/Model-1B: is neither a known model"),
        ({"seq_len": ""}, "seq_len: is not stated"),
        ({"precision": "mxfp4"}, "precision=mxfp4: of 4-bit"),
        ({"task": "dpo"}, "task=dpo: must be one of pretrain, sft, lora"),
        ({"time_per_iter_s": ""}, "states neither speed nor memory"),
        ({"dp": "8"}, "256 devices leave 4"),
        ({"ep": "7"}, "layout.ep=7"),
        ({"vpp": "on"}, "does not state its degree"),
    ],
)
def test_a_row_that_cannot_be_scored_says_why(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    runs = table(tmp_path, change, {"id": "a-2"})
    assert [row.id for row in runs.rows] == ["a-2"]
    assert runs.order == ("a-1", "a-2")
    assert reason in runs.skipped[0].reason


def test_trainers_that_do_not_accumulate_take_the_whole_local_batch(tmp_path: Path) -> None:
    open_size = {**DENSE, "mbs": "", "num_gpus": "64", "dp": "", "gbs": "256"}
    open_size |= {"hardware": "H100", "time_per_iter_s": "9"}
    sharded, megatrons, on_tpus, in_a_pipeline = table(
        tmp_path,
        {**open_size, "id": "b-1", "fsdp": "fsdp2"},
        {**open_size, "id": "c-1", "fsdp": "fsdp", "source": "a paper on Megatron"},
        {**open_size, "id": "d-1", "hardware": "TPU v5p", "cuda_graph": ""},
        {**open_size, "id": "e-1", "fsdp": "fsdp2", "pp": "2"},
    ).rows
    assert sharded.layout.mbs == on_tpus.layout.mbs == 256 // 64
    assert "mbs" in sharded.unstated
    assert megatrons.layout.mbs == in_a_pipeline.layout.mbs == 1
    assert "cuda_graph" not in on_tpus.unstated  # there are none to state


def test_a_run_that_ran_and_leaves_cells_open_is_never_out_of_memory(tmp_path: Path) -> None:
    tight = {**DENSE, "model": "Meta-Llama-3-70B", "num_gpus": "8", "dp": "8", "gbs": "8"}
    rows = table(
        tmp_path,
        {**tight, "id": "b-1", "time_per_iter_s": "9"},
        {**tight, "id": "c-1", "time_per_iter_s": "9", "precision": "bf16", "cuda_graph": ""},
        {**tight, "id": "d-1", "oom": "true"},
    )
    verdicts = {row.id: row.verdict for row in score_table(rows).rows}
    assert verdicts == {"b-1": Verdict.OOM, "c-1": Verdict.UNCERTAIN, "d-1": Verdict.OOM}


@pytest.mark.parametrize(
    ("source", "hardware", "released", "scale"),
    [
        ("a lab", "H100", "2023-11", 1.7),
        ("a lab", "H800", "2024-05", 1.7),
        ("a lab", "H100", "2024-08", 1.0),  # FlashAttention-3
        ("a lab", "A100", "2024-05", 1.0),  # FlashAttention-2 is of its year
        ("NVIDIA NeMo", "H100", "2024-05", 1.0),  # cuDNN's own
    ],
)
def test_attention_kernels_are_of_their_year(
    source: str, hardware: str, released: str, scale: float, tmp_path: Path
) -> None:
    cells = {"source": source, "hardware": hardware, "date_release": released}
    (row,) = table(tmp_path, {**DENSE, **cells, "time_per_iter_s": "9"}).rows
    assert Constants(row.hardware)["attention_kernel_time_scale"] == scale


def test_tables_are_read_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    table(tmp_path / "first", {"id": "a-1"}, {"id": "a-2", "seq_len": ""})
    table(tmp_path, {"id": "a-1"}, {"id": "b-1", "publisher": "somebody"})
    both = read_table(tmp_path / "first" / "runs.csv", tmp_path / "runs.csv")
    assert both.order == ("a-1", "a-2", "a-1@line2", "b-1")
    assert [row.publisher for row in both.rows] == ["a", "a", "somebody"]
    assert [row.id for row in both.skipped] == ["a-2"]


def test_a_publisher_has_rows_of_several_kinds_of_ids(tmp_path: Path) -> None:
    source = "NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards/x.yaml"
    (row,) = table(tmp_path, {"id": "mvc-3", "source": source}).rows
    assert row.publisher == "bridge"


@pytest.mark.parametrize(
    ("source", "framework"),
    [
        ("NVIDIA-NeMo/Automodel docs/performance-summary", "automodel"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md", "megatron"),
        ("NVIDIA/NeMo docs/source/performance/performance_summary.md", "megatron"),
        ("pytorch/torchtitan benchmarks/llama3.md", "torchtitan"),
        ("bigscience-workshop/bigscience train/tr11-176B-ml/chronicles", "megatron-deepspeed"),
        ("a cluster of our own", "me"),
    ],
)
def test_rows_name_the_framework_that_their_source_ran(
    tmp_path: Path, source: str, framework: str
) -> None:
    cells = {"id": "me-3", "source": source}
    by_source, by_cell = table(tmp_path, cells, {**cells, "id": "me-4", "framework": "x"}).rows
    assert by_source.cells["framework"] == framework
    assert by_cell.cells["framework"] == "x"


def test_a_model_may_be_cut(tmp_path: Path) -> None:
    change = {"model": "Qwen3-235B-A22B (4 layers)", "pp": "1", "vpp": "", "dp": "128"}
    runs = table(tmp_path, change, {**change, "id": "a-2", "model": "Qwen3-235B-A22B (95 layers)"})
    assert (runs.rows[0].model.layers, runs.rows[0].model.moe_layers) == (4, (True,) * 4)
    assert "has 94 layers" in runs.skipped[0].reason


def test_features_in_the_words_of_the_sources(tmp_path: Path) -> None:
    change = {
        **DEEPSEEK,
        "tokens_per_s_per_gpu": "1000",
        "pp_layout": "uneven: last stage 5 layers",
        "source": "FP8-FLOW logs",
        "precision": "fp8-blockwise",
        "recompute_modules": "layernorm moe_act",
        "cuda_graph": "transformer_engine: attn moe_router moe_preprocess",
        "offload": "optimizer states (chunked)",
        "optimizer": "adam precision-aware, bf16 main grads",
        "hardware": "H100 (96 GB HBM2e, 2.4 TB/s, 500 W)",
    }
    (row,) = table(tmp_path, change).rows
    assert row.layout.stages == "Et*8|t*8|t*8|t*8|t*8|t*8|t*8|t*5L"
    assert row.model.mtp_layers == 0
    assert row.layout.recompute == (Recompute.LAYERNORM, Recompute.MOE_ACT)
    assert set(row.layout.graphs) == {
        CudaGraphScope.ATTN,
        CudaGraphScope.MOE_ROUTER,
        CudaGraphScope.MOE_PREPROCESS,
    }
    assert row.layout.offload == (Offload.OPTIMIZER,)
    assert row.workload.precision is Dtype.FP8
    assert row.workload.tensor_scaling is TensorScaling.BLOCKWISE
    assert row.workload.optimizer.moment_dtype is Dtype.BF16
    assert row.workload.grad_dtype is Dtype.BF16
    assert row.hardware.device.memory_bytes.value == pytest.approx(0.99 * 96 * GIB)


def test_a_row_states_the_rate_of_its_nodes_and_the_ranks_that_hsdp_shards_over(
    tmp_path: Path,
) -> None:
    dense = {**DENSE, "hardware": "A100 (4 x 100 Gb/s a node)", "fsdp": "hsdp 8"}
    (row,) = table(tmp_path, {**dense, "tokens_per_s_per_gpu": "1000"}).rows
    assert row.hardware.fabric.network_Bps.value == 4 * 100e9 / 8 / 8
    assert row.hardware.fabric.network_Bps.source == dense["hardware"]
    assert (row.layout.zero, row.layout.shard) == (3, 8)


def test_a_graph_of_whole_layers_takes_the_attention_of_a_model_without_experts(
    tmp_path: Path,
) -> None:
    dense = {**DENSE, "tokens_per_s_per_gpu": "1000", "cuda_graph": "local: whole layer"}
    (row,) = table(tmp_path, dense).rows
    assert row.layout.graphs == (CudaGraphScope.ATTN,)


def test_a_row_tells_what_it_can_where_its_words_go_further_than_the_model(tmp_path: Path) -> None:
    """Muon and Lion keep half of Adam's moments; a gather of weights alone waits for no buckets."""
    change = {
        **DEEPSEEK,
        "tokens_per_s_per_gpu": "1000",
        "overlap_grad_reduce": "false",
        "overlap_param_gather": "true",
    }
    names = ("muon", "lion", "shampoo")
    read = table(tmp_path, *({**change, "id": f"{name}-1", "optimizer": name} for name in names))
    for row in read.rows:
        assert row.workload.optimizer.moment_dtype is Dtype.BF16
        assert Overlap.PARAM not in row.layout.overlap
    (skipped,) = read.skipped
    assert skipped.id == "shampoo-1"
    assert "only Adam, Muon and Lion" in skipped.reason


def test_tflops_are_converted_to_tokens_by_the_convention_of_the_source(tmp_path: Path) -> None:
    # 259.99 GFLOP a token with MTP and 249.81 without (docs/tables.md); Llama3-8B 57.9 at 8192,
    # with full attention.
    with_mtp = {**DEEPSEEK, "tflops_per_gpu": "300"}
    without_mtp = {**with_mtp, "id": "a-2", "mtp": "false"}
    dense = {
        **DEEPSEEK,
        "model": "Meta-Llama-3-8B",
        "pp": "1",
        "dp": "256",
        "ep": "",
        "seq_len": "8192",
        "recompute_modules": "layernorm",
        "tflops_per_gpu": "700",
    }
    by_source = {**dense, "id": "a-3", "source": "NeMo 24.07", "date_release": "24.07"}
    by_column = {**dense, "id": "a-4", "flops_convention": "full_attention"}
    rows = table(tmp_path, with_mtp, without_mtp, by_source, by_column).rows
    rates = [row.speed.tokens_per_s_per_device for row in rows if row.speed]
    expected = [300e3 / 259.99, 300e3 / 249.81, 700e3 / 57.9, 700e3 / 57.9]
    assert rates == pytest.approx(expected, rel=2e-3)


def test_rounded_tokens_give_way_to_tflops(tmp_path: Path) -> None:
    printed = {"time_per_iter_s": "", "tokens_per_s_per_gpu": "1470", "tflops_per_gpu": "216"}
    page = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md, 26.06.01"
    by_source = {**printed, "source": page, "date_release": "26.06.01"}
    by_column = {**printed, "id": "a-2", "tokens_rounded": "true"}
    exact, also_exact, rounded = table(
        tmp_path, by_source, by_column, {**printed, "id": "a-3"}
    ).rows
    assert exact.speed
    assert also_exact.speed
    assert rounded.speed
    converted = 216e12 / flops.model_flops_per_token(exact.model, 4096)
    assert exact.speed.tokens_per_s_per_device == pytest.approx(converted)
    assert also_exact.speed.tokens_per_s_per_device == pytest.approx(converted)
    assert rounded.speed.tokens_per_s_per_device == 1470


def test_mfu_is_of_the_peak_that_the_row_states(tmp_path: Path) -> None:
    printed = {"time_per_iter_s": "", "mfu_pct": "40"}
    default, stated = table(
        tmp_path, printed, {**printed, "id": "a-2", "mfu_peak_tflops": "1979"}
    ).rows
    assert default.speed
    assert stated.speed
    ratio = stated.speed.tokens_per_s_per_device / default.speed.tokens_per_s_per_device
    assert ratio == pytest.approx(1979 / 989.5)
    assert stated.speed.origin == "MFU of 1979 TFLOP/s"


def test_gpt_oss_is_compared_in_tokens_alone(tmp_path: Path) -> None:
    change = {
        "model": "gpt-oss-120b",
        "pp": "1",
        "vpp": "",
        "dp": "128",
        "time_per_iter_s": "",
        "tflops_per_gpu": "500",
    }
    (row,) = table(tmp_path, change).rows
    assert row.speed is None


def test_peaks_in_their_units(tmp_path: Path) -> None:
    golden = "NVIDIA/Megatron-LM dev, tests/functional_tests golden values"
    last_rank = {"peak_memory_unit": "GB", "peak_memory_scope": "last_rank"}
    expected: tuple[tuple[str, dict[str, str], PeakKind, int, int], ...] = (
        ("40", {"peak_memory_kind": "GiB allocated (42 reserved)"}, PeakKind.ALLOCATED, 40, GIB),
        ("40", {"peak_memory_kind": "GB as printed"}, PeakKind.ALLOCATED, 40, 10**9),
        ("40960", {"peak_memory_kind": "MiB, device, peak observed"}, PeakKind.DEVICE, 40, GIB),
        ("40", {"peak_memory_kind": "GiB reserved"}, PeakKind.RESERVED, 40, GIB),
        ("40", last_rank, PeakKind.LAST_RANK, 40, 10**9),
        ("40", {"source": golden}, PeakKind.LAST_RANK, 40, 10**9),
    )
    changes = [{"peak_memory_gb": value, **cells} for value, cells, *_ in expected]
    rows = table(tmp_path, *changes).rows
    peaks = [(row.peak.kind, row.peak.value, row.peak.unit_bytes) for row in rows if row.peak]
    assert peaks == [(kind, value, unit) for _, _, kind, value, unit in expected]


def test_repeats_and_contradictions_are_named(tmp_path: Path) -> None:
    printed = {"tflops_per_gpu": "216.4"}
    runs = table(
        tmp_path,
        printed,
        {**printed, "id": "b-1", "source": "another page"},
        {"id": "c-1", "time_per_iter_s": "30"},
    )
    assert [row.duplicate_of for row in runs.rows] == ["", "a-1", ""]
    assert runs.contradictions == ("a-1 (a) and c-1 (c): 1.34 x apart",)


def test_devices_that_no_network_joins_are_named(tmp_path: Path) -> None:
    """A GH200 is a server of its own unless a row names the network of its board."""
    board = {"hardware": "GH200", "nvlink_domain": "4"}
    runs = table(tmp_path, board, {**board, "id": "b-1", "network": "nvl4+ib"}, {"id": "c-1"})
    (note,) = runs.lone_devices
    assert note.startswith("a-1: 4 GH200 of a node are stated, and fast links join 1 of them")


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("x,y\n1,2\n", encoding="utf-8")
    with pytest.raises(BadInput, match="missing: model, hardware, num_gpus"):
        read_table(path)
    with pytest.raises(BadInput, match="No such file"):
        read_table(tmp_path / "none.csv")


def test_what_software_is_known_to_do_fills_what_a_row_leaves_open(tmp_path: Path) -> None:
    moonlight = {
        "model": "Moonlight-16B-A3B",
        "num_gpus": "8",
        "pp": "1",
        "vpp": "",
        "dp": "4",
        "gbs": "8",
    }
    bridge = {
        **moonlight,
        "source": "NVIDIA-NeMo/Megatron-Bridge skill",
        "recompute_modules": "moe_act",
    }
    (row,) = table(tmp_path, bridge).rows
    assert row.workload.grad_dtype is row.workload.optimizer.moment_dtype is Dtype.BF16
    (row,) = table(tmp_path, {**bridge, "optimizer": "adam, main grads fp32"}).rows
    assert row.workload.grad_dtype is row.workload.optimizer.moment_dtype is Dtype.FP32
    # A step waits for every layer's hottest rank; a peak is of one moment: 1 + 4 / 16 experts.
    guide = "Megatron MoE benchmark and tuning guide (Pai-Megatron-Patch commit 2b201af)"
    natural = {"id": "seed000-013", "source": guide, "force_balance": ""}
    (row,) = table(tmp_path, natural).rows
    assert row.workload.routing is Routing.LEARNED
    assert expected_load(row.job).step > 2
    assert expected_load(row.job).peak == pytest.approx(1.25)
    assert row.unstated == ("expert_load",)
    (row,) = table(tmp_path, {**bridge, "force_balance": "false"}).rows
    assert 1.3 < expected_load(row.job).step < 2  # a bias balances the batch
    assert expected_load(row.job).peak == 1.0


def test_runs_over_a_capacity_take_what_the_official_script_passes(tmp_path: Path) -> None:
    """Their table names no switch, and without recompute a hot rank would not fit."""
    guide = "Megatron MoE benchmark and tuning guide (Pai-Megatron-Patch commit 2b201af)"
    silent = {"source": guide, "recompute_granularity": "", "recompute_modules": ""}
    capacity = {"id": "seed000-016", "force_balance": "", "capacity_factor": "5"}
    dropping, balanced = table(
        tmp_path, {**silent, **capacity}, {**silent, "id": "seed000-002"}
    ).rows
    assert dropping.layout.recompute == (Recompute.MOE,)
    assert {Overlap.GRAD, Overlap.PARAM} < {*dropping.layout.overlap}
    assert dropping.unstated == ("expert_load",)
    assert balanced.layout.recompute == balanced.layout.overlap == ()


def test_a_fact_sees_what_facts_before_it_state(tmp_path: Path) -> None:
    """Graphs of whole iterations, stated elsewhere, came with a kernel for gpt-oss's activation."""
    gpt_oss = {
        "source": "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md",
        "model": "gpt-oss-120b",
        "hardware": "GB300",
        "num_gpus": "64",
        "dp": "",
        "pp": "1",
        "vpp": "",
        "tp": "1",
        "sp": "",
        "ep": "16",
        "mbs": "4",
        "gbs": "1280",
        "precision": "mxfp8",
        "recompute_granularity": "",
        "recompute_modules": "",
        "cuda_graph": "",
    }
    with_graphs, without = table(
        tmp_path, {**gpt_oss, "date_release": "26.06.01"}, {**gpt_oss, "id": "a-2"}
    ).rows
    assert CudaGraphScope.FULL in with_graphs.layout.graphs
    assert with_graphs.workload.trainer.unfused == ()
    assert without.workload.trainer.unfused == (Fusion.ACTIVATION,)


def test_a_cell_that_scripts_of_the_source_contradict_is_corrected(tmp_path: Path) -> None:
    """A page says that recompute is off, its script leaves the recipe's full recompute on."""
    efa = {
        "source": "awslabs/awsome-distributed-ai qwen3-30b RESULTS.md",
        "model": "Qwen3-30B-A3B",
        "hardware": "H100",
        "num_gpus": "64",
        "tp": "8",
        "pp": "4",
        "vpp": "",
        "ep": "16",
        "dp": "2",
        "gbs": "256",
        "recompute_granularity": "none",
        "recompute_modules": "",
        "dispatcher": "alltoall",
    }
    exposed, overlapped = table(
        tmp_path,
        {**efa, "overlap_moe_ep_comm": "false"},
        {**efa, "overlap_moe_ep_comm": "true", "vpp": "2", "time_per_iter_s": "6.87"},
    ).rows
    assert exposed.layout.recompute == (Recompute.FULL,)
    assert overlapped.layout.recompute == ()


def test_experts_padded_to_their_capacity(tmp_path: Path) -> None:
    full = {"capacity_factor": "1", "capacity_fill": "padded"}
    (row,) = table(tmp_path, full).rows
    assert row.layout.capacity_fill is CapacityFill.PADDED
    (row,) = table(tmp_path, {**full, "capacity_fill": ""}).rows
    assert row.layout.capacity_fill is CapacityFill.USED
    (skipped,) = table(tmp_path, {**full, "capacity_fill": "half"}).skipped
    assert "capacity_fill=half: must be used or padded" in skipped.reason


def test_what_a_published_row_leaves_open_is_read_in_several_ways(tmp_path: Path) -> None:
    blank = {"recompute_granularity": "", "recompute_modules": "", "cuda_graph": ""}
    (row,) = table(tmp_path, {**blank, "source": "somebody's blog"}).rows
    assert len(row.readings) > 1
    assert sum(reading.share for reading in row.readings) == pytest.approx(1)
    assert row.readings[0].layout == row.layout
    assert {"recompute_granularity", "cuda_graph"} <= set(row.unstated)
    assert {bool(reading.layout.recompute) for reading in row.readings} == {True, False}
    (own,) = table(tmp_path, {**blank, "source": ""}).rows
    assert [reading.share for reading in own.readings] == [1.0]
    assert own.layout.recompute == ()


def test_notes_tell_switches(tmp_path: Path) -> None:
    overlap = {"overlap_moe_ep_comm": "true", "dispatcher": "alltoall"}
    (row,) = table(tmp_path, {**overlap, "notes": "dropless; delay_wgrad_compute on"}).rows
    assert Overlap.WGRAD in row.layout.overlap
    (row,) = table(tmp_path, {"notes": "table: tokendrop; token-drop"}).rows
    assert row.layout.capacity == 1.0


def test_a_forks_own_policies_are_not_guessed(tmp_path: Path) -> None:
    (row,) = table(
        tmp_path, {"recompute_modules": "attn layernorm moe_expert (names of their fork)"}
    ).skipped
    assert "is no policy of modules that is modelled" in row.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"time_per_iter_s": "fast"}, "time_per_iter_s=fast: must be a number above 0"),
        (
            {"time_per_iter_s": "", "tflops_per_gpu": "plenty"},
            "tflops_per_gpu=plenty: must be a number above 0",
        ),
        ({"dispatcher": "pigeon"}, "dispatcher=pigeon: must be one of allgather, alltoall"),
        ({"capacity_factor": "-1"}, "capacity_factor=-1: must be a number above 0"),
        ({"num_gpus": "many"}, "num_gpus=many: must be a number above 0"),
        ({"pp_layout": "E|oops|L"}, "layout.stages"),
        ({"peak_memory_gb": "inf"}, "peak_memory_gb=inf: must be a number above 0"),
    ],
)
def test_a_cell_that_cannot_be_read_skips_its_row(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    (row,) = table(tmp_path, change).skipped
    assert reason in row.reason


def test_rows_without_an_id_of_their_own_are_told_apart_by_line(tmp_path: Path) -> None:
    runs = table(tmp_path, {}, {}, {"id": ""})
    assert runs.order == ("a-1", "a-1@line3", "@line4")
    assert [row.id for row in runs.rows] == list(runs.order)


def test_what_an_out_of_memory_row_leaves_open_is_taken_at_its_least(tmp_path: Path) -> None:
    stated = {"oom": "true", "time_per_iter_s": "", "gbs": "", "dp": ""}
    (open_vpp,) = table(tmp_path, {**stated, "pp": "8", "vpp": "on"}).rows
    assert (open_vpp.layout.vpp, open_vpp.assumed_least) == (12, ("vpp",))
    (small,) = table(tmp_path, {**stated, "mbs": "", "recompute_modules": "attn moe_expert"}).rows
    assert small.assumed_least == ("mbs", "recompute_granularity")
    assert small.layout.recompute == (Recompute.FULL,)


def test_what_a_guide_says_of_its_out_of_memory_runs(tmp_path: Path) -> None:
    """Statements of the guide's text, which data/sources.toml holds by the ids of the rows."""
    guide = "Megatron MoE benchmark and tuning guide (Pai-Megatron-Patch commit 2b201af)"
    stated = {"source": guide, "oom": "true", "time_per_iter_s": "", "gbs": "", "dp": ""}
    (vpp,) = table(tmp_path, {**stated, "id": "seed000-017", "pp": "8", "vpp": ""}).rows
    assert vpp.assumed_least == ("vpp",)
    silent = {"pp": "", "vpp": "", "recompute_granularity": "", "recompute_modules": ""}
    (row,) = table(tmp_path, {**stated, **silent, "id": "seed000-018", "tp": "1"}).rows
    assert row.assumed_least == ("pp",)
    assert row.layout.recompute == ()
    assert "recompute_granularity" in row.unstated


def test_parts_of_full_recompute_and_of_the_optimizer(tmp_path: Path) -> None:
    (row,) = table(tmp_path, {"offload": "optimizer CPU offload 25%"}).rows
    assert (row.layout.offload, row.layout.offload_fraction) == ((Offload.OPTIMIZER,), 0.25)
    full = {"recompute_granularity": "full"}
    block, uniform = table(
        tmp_path,
        {**full, "recompute_modules": "full block 5"},
        {**full, "recompute_modules": "uniform, 1 layer"},
    ).rows
    assert (block.layout.recompute_block, block.layout.recompute_span) == (5, 1)
    assert (uniform.layout.recompute_block, uniform.layout.recompute_span) == (0, 1)


def test_every_fact_of_the_sources_fills_columns_that_are_read() -> None:
    for fact in source_facts().fact:
        selectors = {*fact.when, *fact.unless, *fact.empty} - {"attention"}
        filled = {*fact.corrected, *fact.stated, *fact.implied}
        assert selectors | filled <= set(COLUMNS), fact.evidence
        assert fact.when
        assert fact.evidence


def test_the_age_of_a_release_counts_from_the_reference() -> None:
    assert source_facts().release_age.reference == "2026-07"
    assert release_age_years("26.07") == release_age_years("2027-01") == 0
    assert release_age_years("26.06.01") == pytest.approx(1 / 12)
    assert release_age_years("2025") == release_age_years("2025-07") == 1
    assert release_age_years("2019-01") == 2
    assert release_age_years("main branch") == 0


BLIND = Path(__file__).parents[1] / "published" / "data" / "blind_runs.csv"
PUBLISHED = Path(__file__).parents[1] / "published" / "data" / "measurements.csv"


@pytest.mark.parametrize(
    ("row_id", "layout"),
    [
        (
            "bridge-259",
            "tp1,pp8,vpp4,ep8,mbs1,overlap=ep+grad+wgrad",
        ),
        (
            "bridge-012",
            "tp1,pp1,ep8,mbs2,dispatcher=hybridep,overlap=grad+param,"
            "graphs=attn+mamba+moe_preprocess+moe_router",
        ),
    ],
)
def test_a_row_has_the_layout_that_its_recipe_ran(row_id: str, layout: str, tmp_path: Path) -> None:
    """Tables of Megatron-Bridge print cells of other releases, or leave some of a recipe out."""
    header, *lines = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "rows.csv"
    own = [line for line in lines if line.startswith(f"{row_id},")]
    path.write_text("".join([header, *own]), encoding="utf-8")
    (row,) = read_table(path).rows
    assert format_layout(row.layout) == layout
    assert not row.unstated


@pytest.mark.parametrize(
    ("row_id", "offload"),
    [("bridge-169", "activations of 20 layers"), ("bridge-170", "activations of 40 layers")],
)
def test_layers_in_host_memory_take_the_place_of_recompute(
    row_id: str, offload: str, tmp_path: Path
) -> None:
    """Megatron-Bridge's FSDP recipes of Llama 3 70B recompute nothing; their memory stays open."""
    header, *lines = PUBLISHED.read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "rows.csv"
    own = [line for line in lines if line.startswith(f"{row_id},")]
    path.write_text("".join([header, *own]), encoding="utf-8")
    (row,) = read_table(path).rows
    assert row.cells["offload"] == offload
    assert (row.layout.recompute, row.layout.offload) == ((), ())
    assert row.unstated == ("offload",)


def test_a_row_states_how_many_devices_a_node_joins() -> None:
    """Sites have nodes of four H200, where the catalogue's have eight; a rack stays a rack."""
    domains = {row.id: row.hardware.fabric.domain_size for row in read_table(BLIND).rows}
    assert domains["kempner-008"] == 4
    assert domains["gpurecipe-001"] == 8
    assert domains["marin-001"] == 64


def test_packed_samples_bound_attention_and_recipes_name_their_adapters() -> None:
    more = read_table(PUBLISHED.with_name("measurements_more.csv")).rows
    (row,) = (row for row in more if row.id == "dgxc-158")
    assert row.workload.fine_tuning.lora_targets == (AdapterTarget.QKV,)
    assert row.workload.data.documents is DocumentMasking.BOUNDED
    assert row.workload.data.attended_share == 0.05


# Words and numbers that cells of foreign tables hold, right and wrong.
STRANGE = {
    "num_gpus": ("1", "3", "512", "1048576"),
    "seq_len": ("1", "17", "16777216"),
    "gbs": ("1", "1000003", "0"),
    "mbs": ("", "1", "64"),
    "tp": ("", "1", "64"),
    "pp": ("1", "3", "94"),
    "ep": ("", "1", "256"),
    "vpp": ("", "2", "on"),
    "time_per_iter_s": ("", "0", "1e-300", "1e300", "-1", "nan", "inf"),
    "tokens_per_s_per_gpu": ("", "0", "1e-9"),
    "peak_memory_gb": ("", "0", "1e9"),
    "recompute_granularity": ("", "full", "selective"),
    "oom": ("true", "false"),
    "force_balance": ("true", "false", ""),
    "capacity_factor": ("", "0.001", "-1"),
    "precision": ("", "fp8", "mxfp8", "nvfp4", "fp16"),
    "hardware": ("H100", "H800", "TPU v5p", "MI355X", "H100 (1 GB)"),
    "fsdp": ("", "fsdp2", "hsdp 8"),
}


def test_no_row_kills_the_table_that_it_stands_in(tmp_path: Path) -> None:
    """A row is scored or left out with its reason, whatever its cells hold.

    One on a part without rates for its precision ended the whole table.
    """
    draw = random.Random(3)
    changes = [{"id": "nvfp4", "precision": "nvfp4"}]
    for number in range(24):
        columns = draw.sample(sorted(STRANGE), 3)
        row = {column: draw.choice(STRANGE[column]) for column in columns}
        changes.append({**row, "id": f"strange-{number}"})
    score = score_table(table(tmp_path, *changes, {"id": "sound"}), calibrate_as_shipped)
    rows = {row.id: row for row in score.rows}
    assert len(rows) == len(changes) + 1
    assert "does not multiply in it" in (rows["nvfp4"].skipped or "")
    assert rows["sound"].predicted_tokens_per_s_per_gpu


def test_a_run_far_over_memory_in_every_reading_keeps_its_readings() -> None:
    """The planner is wrong about its memory: one row ends no table."""
    model = catalogue.model("Qwen3-30B-A3B")
    hardware = catalogue.hardware("1xA100")
    workload = Workload(seq_len=65536, global_batch=1)
    readings = [
        Reading(share=share, workload=workload, layout=Layout(world_size=1, recompute=recompute))
        for share, recompute in ((0.6, ()), (0.4, (Recompute.FULL,)))
    ]
    kept = likely_readings(model, hardware, readings)
    assert [reading.share for reading in kept] == pytest.approx([0.6, 0.4])
