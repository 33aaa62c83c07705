"""Peak memory of Qwen3-235B on 256 H800: 12 layouts that ran, and 3 that did not.

Two more readings of a text are beside them. Layouts and outcomes: Pai-Megatron-Patch MoE guide,
"seed 0". Allocated GiB and margins: the findings that the model follows (docs/findings.md 6); they
pin the model, the outcomes judge it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import moewright as mw
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.hardware import DeviceKind
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Verdict
from moewright.spec.units import GIB
from moewright.spec.workload import Dtype, Routing, Workload

SELECT = "recompute=select"
CASES = (
    # layout, global batch, allocated GiB, peak rank, margin GiB, ran
    (f"tp2,ep8,pp32,vpp3,{SELECT}", 2048, 62.6, 1, 9.6, True),
    ("tp4,ep8,pp8,vpp4", 2048, 56.1, 1, 16.4, True),
    (f"tp2,ep32,pp8,vpp4,{SELECT}", 2048, 59.3, 1, 13.1, True),
    (f"tp2,ep32,pp8,vpp4,dispatcher=deepep,{SELECT}", 2048, 59.3, 1, 13.1, True),
    (f"tp2,ep8,pp8,{SELECT}", 2048, 65.2, 0, 6.9, True),
    (f"tp2,ep8,pp8,overlap=grad+param,{SELECT}", 2048, 65.2, 0, 6.9, True),
    (f"tp2,ep8,pp8,overlap=grad+param+tp,{SELECT}", 2048, 65.2, 0, 6.9, True),
    ("tp2,ep8,pp32,vpp3,mbs4,recompute=full", 4096, 27.1, 1, 47.0, True),
    ("tp2,ep8,pp32,mbs4,recompute=full", 8192, 25.1, 1, 49.0, True),
    ("tp1,ep8,pp32,vpp3,recompute=moe+layernorm", 2048, 54.8, 1, 18.2, True),
    ("tp1,ep8,pp32,vpp3,mbs4,recompute=full", 4096, 38.1, 1, 35.8, True),
    ("tp1,ep8,pp32,vpp3,mbs8,recompute=full", 8192, 60.1, 31, 13.0, True),
    ("tp1,ep8,pp32,vpp3", 2048, 125.1, 1, -55.0, False),
    (f"tp1,ep8,pp32,vpp3,{SELECT}", 2048, 109.5, 1, -39.0, False),
    (f"tp2,ep8,pp8,vpp4,{SELECT}", 2048, 74.5, 1, -2.8, False),
    (f"tp2,ep8,pp8,vpp2,{SELECT}", 2048, 80.0, 1, -8.6, False),
)


def estimate_layout(text: str, global_batch: int = 2048, **changes: object) -> Estimate:
    workload = replace(
        Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=global_batch), **changes
    )
    hardware = catalogue.hardware("256xH800")
    return estimate(
        catalogue.model("Qwen3-235B-A22B"), workload, hardware, parse_layout(text, world_size=256)
    )


def allocated_bytes(result: Estimate) -> int:
    overhead = (Component.FRAGMENTATION, Component.COMMUNICATION)
    return sum(
        row.bytes
        for row in result.ledgers[result.peak_rank].device_rows
        if row.component not in overhead
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]},gbs{case[1]}")
def test_verdict(case: tuple[str, int, float, int, float, bool]) -> None:
    text, global_batch, allocated_gib, peak_rank, margin_gib, ran = case
    result = estimate_layout(text, global_batch)
    assert (result.verdict is Verdict.FITS) == ran
    # VPP4 is over by 3 GiB, about one standard deviation: the others leave no doubt.
    assert result.fit_probability > 0.9 if ran else result.fit_probability < 0.25
    assert result.peak_rank == peak_rank
    assert allocated_bytes(result) / GIB == pytest.approx(allocated_gib, abs=0.4)
    assert result.margin_bytes / GIB == pytest.approx(margin_gib, abs=0.6)


def test_close_to_the_limit_is_uncertain() -> None:
    """Leave about 1 GiB at 12 chunks, where a text says that VPP at PP8 runs out of memory.

    The text does not give the degree.
    """
    result = estimate_layout(f"tp2,ep8,pp8,vpp12,{SELECT}")
    assert result.verdict is Verdict.UNCERTAIN
    assert result.margin_bytes / GIB == pytest.approx(1.1, abs=0.6)


def test_the_embedding_rank_is_not_the_fullest() -> None:
    """Hold one layer less on rank 0, where the embedding takes the place of a layer.

    Rank 1 has nearly as many micro-batches in flight.
    """
    result = estimate_layout(CASES[0][0])
    first, second = (sum(row.bytes for row in result.ledgers[rank].memory) for rank in (0, 1))
    assert (second - first) / GIB == pytest.approx(25.2 * 1.045, abs=1.0)


def test_peak_is_the_sum_of_its_rows_and_names_the_largest() -> None:
    result = estimate_layout(CASES[0][0])
    rows = result.ledgers[result.peak_rank].memory
    assert (
        sum(row.bytes for row in rows)
        == result.peak_bytes
        == result.capacity_bytes - result.margin_bytes
    )
    largest = max(rows, key=lambda row: row.bytes)
    assert result.largest == f"{largest.component} of {largest.module}"


def test_load_and_dtypes_move_the_peak() -> None:
    text = f"tp2,ep8,pp8,vpp4,{SELECT}"
    base = allocated_bytes(estimate_layout(text))
    hot = allocated_bytes(estimate_layout(text, routing=Routing.LEARNED, load_factor=1.5))
    bf16 = allocated_bytes(estimate_layout(text, grad_dtype=Dtype.BF16))
    # docs/findings.md 6: load 1.5 adds 12.3 GiB, bf16 gradients save 7.6.
    assert (hot - base) / GIB == pytest.approx(12.3, abs=0.5)
    assert (bf16 - base) / GIB == pytest.approx(-7.6, abs=0.3)


def test_no_allowances_on_a_cpu() -> None:
    cpu = catalogue.hardware("2xH800")
    cpu = replace(cpu, device=replace(cpu.device, kind=DeviceKind.CPU))
    work = Workload(routing=Routing.BALANCED, seq_len=512, global_batch=8)
    result = estimate(
        catalogue.model("Qwen3-30B-A3B"), work, cpu, parse_layout("ep2", world_size=2)
    )
    components = {row.component for row in result.ledgers[0].memory}
    assert components.isdisjoint({Component.FRAGMENTATION, Component.COMMUNICATION})
    assert result.ledgers[0].notes


def test_offload_takes_what_it_names_off_the_device() -> None:
    text = f"tp2,ep8,pp8,{SELECT}"
    base = estimate_layout(text)
    optimizer = estimate_layout(f"{text},offload=optimizer")
    norms = estimate_layout(f"{text},offload=mlp_norm")
    states = [
        row
        for row in base.ledgers[0].memory
        if row.component in (Component.MASTER, Component.MOMENTS)
    ]
    assert allocated_bytes(base) - allocated_bytes(optimizer) == sum(row.bytes for row in states)
    # The residual of 11 layers and 8 micro-batches: 2 bytes x 2048 tokens x 4096.
    assert allocated_bytes(base) - allocated_bytes(norms) == 11 * 8 * 2 * 2048 * 4096
    assert "offload" in {assumption.name for assumption in norms.assumptions}


def test_the_largest_part_of_the_peak_lies_on_the_device() -> None:
    """The state of the optimizer is larger than all of it, and lies on the host."""
    plan = mw.estimate("Qwen3-30B-A3B", on="8xH100", layout="ep8,offload=optimizer")
    ledger = plan.estimate.ledgers[plan.estimate.peak_rank]
    assert max(ledger.memory, key=lambda row: row.bytes).component is Component.HOST
    largest = max(ledger.device_rows, key=lambda row: row.bytes)
    assert plan.estimate.largest == f"{largest.component} of {largest.module}"
