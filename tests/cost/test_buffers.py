"""Buffers beside the model's tensors, against published sizes and sizes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.cost.memory import peak as peak_terms
from moewright.cost.memory.buffers import (
    dispatcher_bytes,
    fsdp_buffer_bytes,
    fsdp_layer_bytes,
    gathered_bytes,
    graph_bytes,
    rank_layer_numel,
)
from moewright.cost.memory.estimate_memory import expected_symbols
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.spec.ledger import Component, Module
from moewright.spec.plan import Estimate
from moewright.spec.units import GB
from moewright.spec.workload import Routing, Workload

DEEPSEEK = catalogue.model("DeepSeek-V3")
QWEN = catalogue.model("Qwen3-30B-A3B")
WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=2048)


def estimate_layout(
    text: str, model: str = "Qwen3-30B-A3B", on: str = "16xH100", work: Workload = WORK
) -> Estimate:
    hardware = catalogue.hardware(on)
    return estimate(
        catalogue.model(model), work, hardware, parse_layout(text, world_size=hardware.count)
    )


def memory_bytes(result: Estimate, component: Component, module: Module | None = None) -> int:
    rows = result.ledgers[result.peak_rank].memory
    return sum(
        row.bytes for row in rows if row.component is component and module in (None, row.module)
    )


def test_graphs_of_deepseek_v3_pin_the_printed_7_gb() -> None:
    """Compare with arXiv 2603.07685, CUDA graphs: about 7 GB more.

    Its rank holds 60 layers in flight (test_memory_published).
    """
    layout = parse_layout(
        "pp4,vpp4,ep64,graphs=attn+moe_router,layout='Etttt|(tttt|)*14tmL'", world_size=256
    )
    assert 60 * graph_bytes(
        Job(model=DEEPSEEK, workload=WORK, layout=layout), layout.graphs
    ) / GB == pytest.approx(7, rel=0.05)
    assert graph_bytes(Job(model=DEEPSEEK, workload=WORK, layout=layout), ()) == 0


def test_graphs_pin_what_is_in_flight() -> None:
    before = estimate_layout("ep16")
    after = estimate_layout("ep16,graphs=attn")
    assert memory_bytes(after, Component.ACTIVATIONS, Module.OTHER) == 48 * 2 * 2 * 4096 * 2048
    assert memory_bytes(before, Component.ACTIVATIONS, Module.OTHER) == 0


@pytest.mark.parametrize(
    ("dispatcher", "nbytes"),
    [
        ("alltoall", 0),
        # 10 channels, 8 peers of 256 tokens and 2 x 2 nodes of 128, each 2 x 2048 + 2064 bytes
        ("deepep", 10 * (8 * 256 + 2 * 2 * 128) * 6160),
        ("hybridep", 2 * 16 * 4096 * 2 * 2048),
        ("ncclep", 2 * 16 * 4096 * 2 * 2048),
    ],
)
def test_dispatchers_register_buffers(dispatcher: str, nbytes: int) -> None:
    plain = estimate_layout("ep16")
    chosen = estimate_layout(f"ep16,dispatcher={dispatcher}")
    assert (
        memory_bytes(chosen, Component.COMMUNICATION) - memory_bytes(plain, Component.COMMUNICATION)
        == nbytes
    )
    hardware = catalogue.hardware("16xH100")
    layout = parse_layout(f"dispatcher={dispatcher},tp2", world_size=16)
    assert (
        dispatcher_bytes(
            expected_symbols(
                Job(model=QWEN, workload=WORK, layout=layout), hardware, Constants(hardware)
            )
        )
        == 0
    )


def test_zero3_gathers_two_layers_and_zero2_has_their_gradients() -> None:
    """Count a layer of Qwen3-30B: its experts, attention, norms and router."""
    layer = (
        128 * 3 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128 + 2048 * 128
    )
    sharded = parse_layout("zero3", world_size=16)
    layer_numel = rank_layer_numel(QWEN, sharded, 0)
    nbytes = {
        zero: gathered_bytes(WORK, layer_numel[None], zero=zero).tolist() for zero in (1, 2, 3)
    }
    assert nbytes == {1: [0.0], 2: [2 * layer * 4], 3: [2 * layer * (2 + 4)]}
    assert memory_bytes(estimate_layout("zero3"), Component.TRANSIENT) >= 2 * layer * 6


def test_natural_routing_eats_the_margin() -> None:
    """Fill the device at the load that the estimate names."""
    balanced = estimate_layout("tp2,ep8,pp8,recompute=select", "Qwen3-235B-A22B", "256xH800")
    assert 1.3 < balanced.load_limit < 1.6
    at_limit = replace(WORK, routing=Routing.LEARNED, load_factor=balanced.load_limit)
    full = estimate_layout("tp2,ep8,pp8,recompute=select", "Qwen3-235B-A22B", "256xH800", at_limit)
    assert abs(full.margin_bytes) < 1e-3 * full.capacity_bytes
    assert full.load_limit == pytest.approx(balanced.load_limit, rel=1e-3)


def test_no_load_fills_a_dense_model_or_a_capacity() -> None:
    assert estimate_layout("tp2", "Qwen3-8B").load_limit == 0
    assert (
        estimate_layout(
            "tp2,ep8,pp8,recompute=select,capacity1.0", "Qwen3-235B-A22B", "256xH800"
        ).load_limit
        == 0
    )


def test_fsdp_holds_the_ends_of_the_model_and_gradients_of_attention() -> None:
    """By hand: embedding and head of Qwen3-30B-A3B in 16 bits, and 4,096 tokens of attention."""

    def held(text: str, on: str = "16xH100") -> tuple[int, int]:
        hardware = catalogue.hardware(on)
        layout = parse_layout(text, world_size=hardware.count)
        job = Job(model=QWEN, workload=WORK, layout=layout)
        sym = expected_symbols(job, hardware, Constants(hardware))
        return fsdp_buffer_bytes(sym), fsdp_layer_bytes(sym)

    ends = 2 * 2 * 151936 * 2048
    gradients = 4096 * (16 * 4096 + 20 * 512)
    assert held("zero3") == (ends, gradients)
    assert held("zero3,mbs2") == (ends, 2 * gradients)
    assert held("zero3,tp2") == (ends / 2, gradients / 2)
    assert held("zero3", on="1xH100") == (0, gradients)  # nothing to gather
    assert held("ep8") == (0, 0)


def test_gradients_of_attention_are_gone_while_the_logits_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 65,536 tokens of a small model the logits are the peak: attention adds nothing to it."""

    def peak(layer_bytes: int | None = None) -> int:
        if layer_bytes is not None:
            monkeypatch.setattr(peak_terms, "BACKWARD_TERMS", (lambda sym: layer_bytes,))
        work = replace(WORK, seq_len=65536, global_batch=16)
        layout = "zero3,recompute=full"
        return estimate_layout(layout, "Qwen3-4B-Instruct-2507", "8xB200", work).peak_bytes

    assert peak() == peak(0)
    assert peak(2**36) > peak(0)
