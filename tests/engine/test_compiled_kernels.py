"""What torch.compile makes of the chains: the numbers of the reference, in whole graphs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, draw_test_weight
from moewright.engine.kernels.fused import compiled
from moewright.engine.kernels.fused.compiled import describe_compilation
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.table import (
    build_kernels,
    compiled_kernels,
    implementation_name,
    torch_kernels,
)
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.run.verify import FixedBatches
from moewright.rules.job import plan_job
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import FusedKernels
from selection import thorough

PLAIN = torch_kernels()


@pytest.fixture(
    scope="module",
    params=["aot_eager", thorough("inductor")],
    ids=["graphs alone", "kernels of a compiler"],
)
def kernels(request: pytest.FixtureRequest) -> Iterator[KernelSet]:
    """Graphs run as they are traced, and as kernels where there is a compiler."""
    backend: str = request.param
    if backend == "inductor" and compiled.compile_backend(is_cpu=True) != "inductor":
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield compiled_kernels(backend)
    torch._dynamo.reset()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.thorough
def test_every_chain_gives_the_numbers_of_the_reference(kernels: KernelSet) -> None:
    """Of three numbers of rows: the second makes the rows a symbol, the third compiles nothing."""
    compiled_before = {}
    for rows in (6, 10, 14, 0):
        for name, args in list_calls(rows):
            expected = getattr(PLAIN, name)(*args)
            result = getattr(kernels, name)(*args)
            torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-6)
        compiled_before[rows] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled_before[6] >= 8
    assert compiled_before[14] == compiled_before[10]
    assert ", 0 graph breaks" in describe_compilation()


def list_calls(rows: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield every chain with each of its branches."""
    x, grad, weight = 4 * draw(rows, 2 * 24), draw(rows, 24), draw(rows).abs()
    for row_weight, clamped in ((None, False), (weight, False), (weight, True)):
        yield "swiglu", (x, row_weight, clamped)
        yield "swiglu_backward", (grad, x, row_weight, clamped)
    scale = draw(rows, 1).abs() + 1
    yield "rms_norm", (x, draw(48), 1e-6)
    yield "rms_norm", (draw(rows, 3, 16), draw(16), 1e-6)
    for kept in (None, scale):
        yield "rms_norm_backward", (draw(rows, 48), x, draw(48), 1e-6, kept, slice(1, 5))
    if not rows:
        return
    angles = draw(rows, 8)
    yield "rotate", (draw(2, rows, 3, 16), angles.cos(), angles.sin())
    logits, targets = draw(rows, 40), torch.arange(rows) * 2
    yield "cross_entropy", (logits, targets)
    yield "sum_exp", (logits, logits.max(-1).values)
    targets[1] = -1
    for log_sum in (None, logits[:, :36].logsumexp(-1)):
        yield (
            "cross_entropy_backward",
            (draw(rows), logits, targets, log_sum, 36 if log_sum is not None else 40),
        )


@pytest.mark.thorough
def test_a_run_has_the_losses_of_plain_operations(kernels: KernelSet) -> None:
    """Also on the step that is counted, which sees each operation."""
    ids = torch.randint(
        0,
        320,
        (2, WORKLOAD.global_batch, WORKLOAD.seq_len + 1),
        generator=torch.Generator().manual_seed(7),
    )
    losses = {}
    for name, chosen in (("plain", PLAIN), ("compiled", kernels)):
        state = build_train_state(
            plan_job(tiny_jobs.build_plan(WORKLOAD, "mbs2", world_size=1)),
            FixedBatches(inputs=ids[..., :-1], targets=ids[..., 1:]),
            rank=0,
            device=torch.device("cpu"),
            initial_value=draw_test_weight,
            kernels=chosen,
        )
        results = [
            train_step(state, step=step, lr=1e-3, stop_requested=False, count_ledger=step == 3)
            for step in (1, 2, 3, 4)
        ]
        losses[name] = [
            value
            for result in results
            for value in (result.backward.loss, result.backward.grad_norm)
        ]
        flops = sum(state.runtime.counters.flops.values())
        losses[f"{name} ledger"] = [float(flops), float(state.runtime.counters.census.totals.kept)]
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["compiled ledger"] == losses["plain ledger"]
    assert ", 0 graph breaks" in describe_compilation()


def test_graph_breaks_are_told(kernels: KernelSet) -> None:
    @torch.compile(backend="aot_eager")
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    breaks(torch.ones(2))
    assert ", 1 graph breaks (" in describe_compilation()


def test_a_cpu_without_a_compiler_runs_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    name = implementation_name(FusedKernels.COMPILED, DeviceKind.CPU)
    assert name.startswith("compiled aot_eager ")
    built = build_kernels(FusedKernels.COMPILED, DeviceKind.CPU)
    assert built.implementation is FusedKernels.COMPILED
    cuda = implementation_name(FusedKernels.COMPILED, DeviceKind.CUDA)
    assert cuda.startswith("compiled inductor ")
