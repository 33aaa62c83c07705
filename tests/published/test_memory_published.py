"""Published memory: tables of measured peaks, a printed breakdown, and out-of-memory statements.

The sources are in data/README.md. The bars: the B200 table is met within 3 % (and within 10 % of
what is not model states), printed components within 5 %, the median error of measured peaks is at
most 8 %, and no run that was out of memory is said to fit.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moewright.calibration.score import Score, score_table
from moewright.calibration.table import read_table
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.hardware import Constant
from moewright.spec.ledger import Component
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.plan import Estimate, Verdict
from moewright.spec.units import GB, GIB, Sourced, SourceKind
from moewright.spec.workload import Dtype, OptimizerSpec, Routing, Workload

DATA = Path(__file__).parent / "data"
STATES = (Component.WEIGHTS, Component.GRADIENTS, Component.MASTER, Component.MOMENTS)
NOT_ALLOCATED = (Component.FRAGMENTATION, Component.COMMUNICATION, Component.HOST)
NAMES = {
    "llama3-70b": "Meta-Llama-3-70B",
    "llama3-405b": "Llama-3.1-405B",
    "deepseekv2": "DeepSeek-V2",
    "deepseekv3": "DeepSeek-V3",
}


def read_rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shrink_model(row: dict[str, str]) -> ModelSpec:
    """Return the catalogue's model with the layers, heads and vocabulary of the table."""
    base = catalogue.model(NAMES[row["model"].split()[0]])
    layers = int(row["layers"])
    dense_layers = int(row["dense_layers"])
    attention = base.attention
    if attention.kind is AttentionKind.GQA:
        attention = replace(attention, heads=int(row["heads"]), kv_heads=int(row["kv_heads"]))
    moe_layers = tuple(layer >= dense_layers for layer in range(layers))
    changed = replace(base, layers=layers, moe_layers=moe_layers, mtp_layers=0, attention=attention)
    return replace(changed, vocab_size=int(row["vocab"]))


@pytest.mark.parametrize("row", read_rows("simumax_b200_memory.csv"), ids=lambda row: row["id"])
def test_allocated_peaks_on_b200_are_within_three_percent(row: dict[str, str]) -> None:
    text = f"tp{row['tp']},pp{row['pp']},cp{row['cp']},ep{row['ep']},mbs{row['mbs']}"
    if row["cp"] != "1":
        text += ",cp_comm=a2a"
    if row["experts"]:
        text += ",capacity1.0"
    workload = Workload(
        routing=Routing.BALANCED, seq_len=int(row["seq"]), global_batch=int(row["gbs"])
    )
    hardware = catalogue.hardware("8xB200")
    layout = parse_layout(text, world_size=8)
    # Megatron-LM of before August 2025, which made the head's gradient placeholder anew each time.
    age = Sourced(value=1.0, kind=SourceKind.ASSUMED, source="SimuMax v1.2")
    hardware = replace(
        hardware, constants=(*hardware.constants, Constant(name="stack_age_years", value=age))
    )
    prediction = estimate(shrink_model(row), workload, hardware, layout)
    memory = prediction.ledgers[prediction.peak_rank].memory
    allocated = sum(line.bytes for line in memory if line.component not in NOT_ALLOCATED) / GIB
    states = sum(line.bytes for line in memory if line.component in STATES) / GIB
    measured = float(row["peak_memory_gib"])
    assert allocated == pytest.approx(measured, rel=0.03)
    assert allocated - states == pytest.approx(measured - states, rel=0.10)


@cache
def estimate_deepseek_v3(
    extra: str = "", precision: Dtype = Dtype.BF16, moments: Dtype = Dtype.FP32
) -> Estimate:
    """Estimate table 3 of arXiv 2603.07685: PP4 VPP4 EP64 on 256 devices."""
    text = f"pp4,vpp4,ep64,layout='Etttt|(tttt|)*14tmL'{extra}"
    workload = Workload(
        routing=Routing.BALANCED,
        seq_len=4096,
        global_batch=8192,
        precision=precision,
        optimizer=OptimizerSpec(moment_dtype=moments),
    )
    hardware = catalogue.hardware("256xH100")
    return estimate(
        catalogue.model("DeepSeek-V3"), workload, hardware, parse_layout(text, world_size=256)
    )


def component_gib(prediction: Estimate, *components: Component) -> float:
    """Return the GiB of some components on pipeline rank 2.

    It is a middle rank, with the 60 layer-micro-batches that reproduce the printed lines.
    """
    memory = prediction.ledgers[2].memory
    return sum(row.bytes for row in memory if row.component in components) / GIB


def recompute_change_gib(policies: str) -> float:
    """Return the GiB that recompute adds to the activations of an FP8 run.

    The run is the one that the paper's table 4 starts from.
    """
    after = estimate_deepseek_v3(f",recompute={policies}", Dtype.FP8)
    before = estimate_deepseek_v3(precision=Dtype.FP8)
    change = component_gib(after, Component.ACTIVATIONS)
    return change - component_gib(before, Component.ACTIVATIONS)


def test_the_printed_breakdown_of_deepseek_v3_is_within_five_percent() -> None:
    printed = {row["id"]: float(row["value"]) for row in read_rows("memory_deepseek_v3.csv")}
    base = estimate_deepseek_v3()
    in_fp8 = estimate_deepseek_v3(precision=Dtype.FP8)
    # Activations are printed with the older permutation, whose saving is printed too. The
    # recomputed lines are those of the FP8 run: SwiGLU's output is kept in one byte, the outputs of
    # the two norms in 2 x 1 and 2 + 1 bytes.
    expected = {
        "mem-001": component_gib(base, Component.WEIGHTS, Component.GRADIENTS),
        "mem-002": component_gib(base, Component.MASTER, Component.MOMENTS),
        "mem-003": component_gib(base, Component.ACTIVATIONS) - printed["mem-009"],
        "mem-004": component_gib(base, *STATES, Component.ACTIVATIONS) - printed["mem-009"],
        "mem-005": recompute_change_gib("mla_up_proj"),
        "mem-006": recompute_change_gib("moe_act"),
        "mem-007": recompute_change_gib("layernorm"),
        "mem-008": recompute_change_gib("mla_up_proj+moe_act+layernorm"),
        "mem-010": component_gib(in_fp8, Component.ACTIVATIONS)
        - component_gib(base, Component.ACTIVATIONS),
        "mem-011": component_gib(estimate_deepseek_v3(moments=Dtype.BF16), Component.MOMENTS)
        - component_gib(base, Component.MOMENTS),
    }
    for name, value in expected.items():
        assert value == pytest.approx(printed[name], rel=0.05), name


@pytest.fixture(scope="module")
def peaks() -> Score:
    return score_table(read_table(DATA / "measured_peaks.csv"))


@pytest.mark.core
def test_the_median_error_of_measured_peaks_is_below_eight_percent(peaks: Score) -> None:
    assert peaks.summary.memory.peaks >= 35
    assert peaks.summary.memory.median_error <= 0.08


def test_out_of_memory_is_never_said_to_fit_nor_a_run_to_be_impossible(peaks: Score) -> None:
    for row in peaks.rows:
        if row.skipped is None:
            contradiction = Verdict.FITS if row.measured_oom else Verdict.OOM
            assert row.verdict is not contradiction, row.id


def test_statements_of_out_of_memory_are_judged_at_what_needs_least(peaks: Score) -> None:
    """A statement leaves much open, so it is judged at the least that it may mean.

    TP1 without recompute fits at no PP and EP. FSDP of Llama3-8x70B, and its TP8 EP8, are within
    the spread with full recompute, for experts share attention's TP; so is VPP at PP8 at 12 chunks
    a rank.
    """
    stated = {row.id: row for row in peaks.rows if row.measured_oom}
    assert len(stated) >= 10
    assert peaks.summary.memory.out_of_memory == len(stated)
    assert stated["seed000-018"].verdict is Verdict.OOM
    assert stated["fold-016"].verdict is Verdict.UNCERTAIN
    assert stated["fold-018"].verdict is Verdict.UNCERTAIN
    assert (
        "does not fit even at the least that its source leaves open: ep, pp"
        in stated["seed000-018"].calibration
    )
    assert stated["seed000-017"].verdict is Verdict.UNCERTAIN


def test_what_cannot_be_scored_says_why(peaks: Score) -> None:
    skipped = {row.id: row.skipped for row in peaks.rows if row.skipped}
    assert "num_gpus" in skipped["golden-001"]
    assert "is no policy of modules" in skipped["fp8flow-048"]
    assert len(peaks.rows) == len(read_rows("measured_peaks.csv"))


@pytest.mark.parametrize(("offload", "printed_gb"), [("", 169), (",offload=expert_fc1", 151)])
def test_peaks_with_and_without_offloaded_expert_inputs_are_within_five_percent(
    offload: str, printed_gb: float
) -> None:
    """mem-014 and -015 (table 5; PP8 VPP4 EP32, MXFP8), in decimal GB.

    Recompute, moments, primary weights and the offloaded modules are not printed: recompute is read
    as none, and the rest as Megatron-LM's recipe of DeepSeek-V3 on GB200 has it.
    """
    hardware = catalogue.hardware("256xGB200")
    recipe = [
        Constant(
            name=name,
            value=Sourced(
                value=value, kind=SourceKind.ASSUMED, source="moe_recipes/deepseek_v3/gb200"
            ),
        )
        for name, value in (("fp8_weight_copies_bytes", 0.0), ("logit_bytes", 2.0))
    ]
    workload = Workload(
        routing=Routing.BALANCED,
        seq_len=4096,
        global_batch=8192,
        precision=Dtype.MXFP8,
        optimizer=OptimizerSpec(moment_dtype=Dtype.BF16),
    )
    layout = parse_layout(f"pp8,vpp4,ep32,layout='Et|(tt|)*29tt|mL'{offload}", world_size=256)
    constants = (*hardware.constants, *recipe)
    hardware = replace(hardware, constants=constants)
    prediction = estimate(catalogue.model("DeepSeek-V3"), workload, hardware, layout)
    memory = prediction.ledgers[prediction.peak_rank].memory
    allocated = sum(line.bytes for line in memory if line.component not in NOT_ALLOCATED)
    assert allocated / GB == pytest.approx(printed_gb, rel=0.05)
