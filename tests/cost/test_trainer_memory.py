"""Bytes that depend on the trainer: buffers, optimizer, kernels; and rows under a capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.spec.hardware import Constant
from moewright.spec.ledger import Component, Module
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate
from moewright.spec.units import MIB, Sourced, SourceKind
from moewright.spec.workload import (
    AttentionBackend,
    CrossEntropyKernel,
    Dtype,
    ExpertKernels,
    Fusion,
    MatrixUpdate,
    OptimizerSpec,
    Routing,
    TrainerSpec,
    Workload,
)

QWEN = catalogue.model("Qwen3-30B-A3B")
WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64)
H, V = QWEN.hidden_size, QWEN.vocab_size


def estimate_layout(
    text: str = "ep8",
    workload: Workload = WORK,
    device: str = "H100",
    model: ModelSpec = QWEN,
    **constants: float,
) -> Estimate:
    hardware = catalogue.hardware(f"16x{device}")
    extra = tuple(
        Constant(name=name, value=Sourced(value=value, kind=SourceKind.ASSUMED, source="test"))
        for name, value in constants.items()
    )
    hardware = replace(hardware, constants=(*hardware.constants, *extra))
    return estimate(model, workload, hardware, parse_layout(text, world_size=16))


def device_bytes(result: Estimate, component: Component, module: Module | None = None) -> int:
    rows = result.ledgers[result.peak_rank].device_rows
    return sum(
        row.bytes for row in rows if row.component is component and module in (None, row.module)
    )


def with_trainer(**choices: object) -> Workload:
    return replace(WORK, trainer=TrainerSpec(**choices))


@pytest.mark.parametrize(("factor", "share"), [(1.0, 1), (0.5, 1 / 2), (0.25, 1 / 4)])
@pytest.mark.parametrize("fill", ["", ",capacity_fill=padded"])
def test_a_capacity_below_one_cuts_the_rows_of_experts_once(
    factor: float, share: float, fill: str
) -> None:
    whole = estimate_layout("ep8,capacity=1.0")
    cut = estimate_layout(f"ep8,capacity={factor}{fill}")
    kept = device_bytes(cut, Component.ACTIVATIONS, Module.EXPERTS)
    assert kept == pytest.approx(
        share * device_bytes(whole, Component.ACTIVATIONS, Module.EXPERTS),
        rel=0.005,  # indices too
    )


def test_workspaces_are_those_of_the_device_and_of_the_kernels() -> None:
    """Two of cuBLAS and one of the linear layers, four more for experts in groups."""
    unfused = (Fusion.WEIGHT_GRAD,)
    sequential = with_trainer(unfused=unfused, expert_kernels=ExpertKernels.SEQUENTIAL)
    grouped = with_trainer(unfused=unfused)

    def buffers(workload: Workload, device: str) -> int:
        return device_bytes(estimate_layout(workload=workload, device=device), Component.BUFFERS)

    assert buffers(sequential, "H100") == 3 * 32 * MIB
    assert buffers(grouped, "H100") == 7 * 32 * MIB
    assert buffers(grouped, "A100") == 2 * 8.125 * MIB + 5 * 4 * MIB
    assert buffers(grouped, "B200") == 2 * 8.125 * MIB + 5 * 32 * MIB
    chosen = with_trainer(unfused=unfused, cublas_workspace_bytes=16 * MIB)
    assert buffers(chosen, "H100") == (2 * 16 + 5 * 32) * MIB


def test_the_heads_placeholder_stays_in_newer_software() -> None:
    newer = device_bytes(estimate_layout(), Component.BUFFERS)
    older = device_bytes(estimate_layout(stack_age_years=1.0), Component.BUFFERS)
    assert newer - older == 2 * V * H


def test_gathers_share_the_buffer_of_the_largest() -> None:
    """The head's input under TP, or all tokens of an all-gather's group."""
    plain = device_bytes(estimate_layout("ep8"), Component.BUFFERS)
    gathered = device_bytes(estimate_layout("ep8,dispatcher=allgather"), Component.BUFFERS)
    assert gathered - plain == 2 * 8 * 4096 * H
    local = with_trainer(attention_backend=AttentionBackend.LOCAL)
    scores = device_bytes(estimate_layout("ep8", local), Component.BUFFERS)
    assert scores - plain == 2 * QWEN.attention.heads * 4096 * 4096


def test_narrow_gradients_are_widened_at_the_step() -> None:
    """Of a peak at the optimizer's step no recompute takes a byte."""
    moonlight = catalogue.model("Moonlight-16B-A3B")
    small = replace(
        WORK,
        seq_len=256,
        grad_dtype=Dtype.BF16,
        optimizer=OptimizerSpec(moment_dtype=Dtype.BF16),
    )
    kept, replayed = (
        estimate_layout(text, small, model=moonlight) for text in ("ep8", "ep8,recompute=full")
    )
    assert kept.peak_bytes == replayed.peak_bytes
    assert device_bytes(kept, Component.ACTIVATIONS) == 0
    # As many bytes as the fp32 weights that the rank owns.
    assert device_bytes(kept, Component.TRANSIENT) == device_bytes(kept, Component.MASTER)
    wide = replace(small, grad_dtype=Dtype.FP32)
    assert device_bytes(estimate_layout("ep8", wide, model=moonlight), Component.ACTIVATIONS) > 0
    hosted = estimate_layout("ep8,offload=optimizer", small, model=moonlight)
    assert device_bytes(hosted, Component.ACTIVATIONS) > 0


def test_muon_keeps_one_momentum_of_the_matrices_of_layers() -> None:
    muon = replace(WORK, optimizer=OptimizerSpec(matrix_update=MatrixUpdate.MUON))
    before, after = (estimate_layout(workload=work) for work in (WORK, muon))
    for module, share in ((Module.EXPERTS, 0.5), (Module.EMBEDDING, 1.0), (Module.ROUTER, 0.5)):
        assert device_bytes(after, Component.MOMENTS, module) == pytest.approx(
            share * device_bytes(before, Component.MOMENTS, module)
        )


def test_a_loss_in_place_holds_a_third_of_its_logits_and_a_compiled_one_more() -> None:
    logits = {
        kernel: device_bytes(
            estimate_layout(workload=with_trainer(cross_entropy=kernel)), Component.LOGITS
        )
        for kernel in CrossEntropyKernel
    }
    plain = logits[CrossEntropyKernel.FP32]
    assert logits[CrossEntropyKernel.COMPILED] - plain == 4 * 4096 * V
    assert logits[CrossEntropyKernel.IN_PLACE] - plain == 2 * 4096 * (H - 2 * V)


def test_activations_without_fusion_keep_their_steps() -> None:
    """The activated gate, and what the router's weight multiplies: 2 widths of an expert."""
    fused = estimate_layout()
    plain = estimate_layout(workload=with_trainer(unfused=(Fusion.ACTIVATION,)))
    assert QWEN.moe is not None
    rows = 4096 * QWEN.moe.router.top_k
    more = device_bytes(plain, Component.ACTIVATIONS, Module.EXPERTS) - device_bytes(
        fused, Component.ACTIVATIONS, Module.EXPERTS
    )
    assert more == QWEN.layers * 2 * rows * 2 * QWEN.moe.ffn_size
