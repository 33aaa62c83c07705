"""One GPU: NCCL over one rank, bf16 against fp32 on the CPU, and the idle time of the device.

The tests are skipped without a device. They are written for torch 2.11 and later.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import layout_proof
import tiny_jobs
from benchmarks import overhead
from layout_proof import WORKLOAD, draw_batches
from moewright.engine.comm import collectives
from moewright.engine.kernels.attention import AttentionMask
from moewright.engine.memory.graph_capture import WARMUP_STEPS
from moewright.engine.model.autograd import CausalAttention
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.counters import Counters
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import forward_backward, train_step
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import plan_job
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, FusedKernels, RouterForce, RouterTraining

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_BF16_EPS = 2.0**-8


def leave_first_gradients(plan: Plan, folder: Path, rank_context: RankContext) -> RankOutcome:
    """Leave the loss and gradients of the first step in `folder`."""
    device = init_distributed(rank_context)
    state = build_train_state(
        plan_job(plan),
        draw_batches(plan.model),
        rank=0,
        device=device,
        initial_value=draw_initial_value,
    )
    result = forward_backward(state, build_phase_clock(state.runtime.device), step=1)
    gradients = {
        shard.name: shard.tensor.double().cpu() for shard in state.optimizer.gradient_shards()
    }
    (folder / "result").write_bytes(pickle.dumps((result.loss, gradients)))
    collectives.leave_world()
    return RankOutcome.DONE


def run_step(
    precision: Dtype, device: DeviceKind, folder: Path, kernels: FusedKernels = FusedKernels.AUTO
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients with forced experts: rounding sends no token elsewhere."""
    folder.mkdir()
    router = RouterTraining(force=RouterForce.BALANCED)
    workload = replace(WORKLOAD, precision=precision, router=router, fused_kernels=kernels)
    plan = tiny_jobs.build_plan(workload, "mbs4", world_size=1)
    done = launch(
        partial(leave_first_gradients, plan, folder), nproc=1, run_dir=folder / "run", device=device
    )
    assert done is ExitCode.DONE
    return pickle.loads((folder / "result").read_bytes())


def assert_rounds_alike(result: torch.Tensor, reference: torch.Tensor, name: str = "") -> None:
    error = float((result - reference).norm())
    assert error <= 16 * _BF16_EPS * float(reference.norm()), name


def test_bf16_on_the_gpu_is_within_rounding_of_fp32_on_the_cpu(tmp_path: Path) -> None:
    """A gradient is a product of sums that were rounded a few times.

    A CPU keeps within 16 units of bf16.
    """
    loss, references = run_step(Dtype.FP32, DeviceKind.CPU, tmp_path / "cpu")
    gpu_loss, gradients = run_step(Dtype.BF16, DeviceKind.CUDA, tmp_path / "gpu")
    assert gpu_loss == pytest.approx(loss, rel=4 * _BF16_EPS)
    assert gradients.keys() == references.keys()
    for name, reference in references.items():
        assert_rounds_alike(gradients[name], reference, name)


def test_fused_kernels_have_the_gradients_of_the_reference(tmp_path: Path) -> None:
    """Both run in bf16 on the GPU: they sum in other orders and round at other places."""
    pytest.importorskip("triton", reason="needs the package triton")
    loss, references = run_step(Dtype.BF16, DeviceKind.CUDA, tmp_path / "plain", FusedKernels.PLAIN)
    gpu_loss, gradients = run_step(
        Dtype.BF16, DeviceKind.CUDA, tmp_path / "triton", FusedKernels.TRITON
    )
    assert gpu_loss == pytest.approx(loss, rel=4 * _BF16_EPS)
    for name, reference in references.items():
        assert_rounds_alike(gradients[name], reference, name)


def test_windows_and_sinks_on_the_gpu_are_those_of_the_cpu() -> None:
    """The kernel of segments has windows of its own; a CPU masks them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 64, heads, 32, generator=generator) for heads in (4, 2, 2, 4))
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v, torch.ones(4))]
        out = CausalAttention.apply(*inputs, AttentionMask(window=6), Counters())
        out.backward(grad.to(device, dtype))
        results.append([x.detach().float().cpu() for x in (out, *(leaf.grad for leaf in inputs))])
    for reference, result in zip(*results, strict=True):
        assert_rounds_alike(result, reference)


def all_reduce_over_nccl(path: Path, rank_context: RankContext) -> RankOutcome:
    """Sum over a group of one rank that NCCL made."""
    device = init_distributed(rank_context)
    collectives.join_world(
        rank=0, world_size=1, store=rank_context.open_store(), backend="nccl", timeout_s=60.0
    )
    value = torch.full((3,), 2.0, device=device)
    torch.distributed.all_reduce(value)
    path.write_text(str(value.tolist()))
    collectives.leave_world()
    return RankOutcome.DONE


def test_nccl_makes_a_world_of_one(tmp_path: Path) -> None:
    path = tmp_path / "value"
    assert (
        launch(
            partial(all_reduce_over_nccl, path), nproc=1, run_dir=tmp_path, device=DeviceKind.CUDA
        )
        is ExitCode.DONE
    )
    assert path.read_text() == "[2.0, 2.0, 2.0]"


def test_the_gpu_trains_and_its_idle_share_is_measured(
    record_property: pytest.FixtureRequest,
) -> None:
    """The model is the quickstart's; the share is the time of a step in which the device idles."""
    device = torch.device("cuda", 0)
    state = overhead.build_state(device)
    losses = [
        train_step(
            state, step=step, lr=1e-3, stop_requested=False, count_ledger=False
        ).backward.loss
        for step in range(1, 4)
    ]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        train_step(state, step=4, lr=1e-3, stop_requested=False, count_ledger=False)
        ended.record()
        torch.cuda.synchronize()
    busy_ms = sum(row.self_device_time_total for row in profile.key_averages()) * 1e-3
    idle = 1 - busy_ms / started.elapsed_time(ended)
    record_property("gpu_idle_share", idle)
    print(f"GPU idle share of a step: {idle:.1%}")
    assert 0 <= idle < 1


def test_the_engine_keeps_up_with_a_plain_loop_on_the_gpu() -> None:
    measured = overhead.measure_overhead(torch.device("cuda", 0))
    assert measured.losses[0] == pytest.approx(measured.losses[1], rel=1e-3)
    assert measured.ratio >= 0.95


def test_one_gpu_computes_the_fp32_curve_of_the_cpu(tmp_path: Path) -> None:
    """In fp32 without TF32 the proof of layouts holds across devices.

    The tolerance is a hundred times that of the proof.
    """
    reference = layout_proof.run_reference(tiny_jobs.MODEL, WORKLOAD, 4)
    workload = replace(WORKLOAD, seed=reference.seed)
    plan = tiny_jobs.build_plan(workload, "mbs4", world_size=1)
    folder = tmp_path / "gpu"
    folder.mkdir()
    done = launch(
        partial(leave_first_gradients, plan, folder),
        nproc=1,
        run_dir=folder / "run",
        device=DeviceKind.CUDA,
    )
    assert done is ExitCode.DONE
    loss, _ = pickle.loads((folder / "result").read_bytes())
    assert loss == pytest.approx(reference.observation.sgd.steps[0][0], rel=1e-3)


def run_losses(layout: str) -> list[float]:
    """Return the losses of steps of which the last two replay graphs, where there are any."""
    plan = tiny_jobs.build_plan(WORKLOAD, layout, world_size=1)
    state = build_train_state(
        plan_job(plan),
        draw_batches(plan.model),
        rank=0,
        device=torch.device("cuda", 0),
        initial_value=draw_initial_value,
    )
    losses = [
        train_step(
            state, step=step, lr=1e-3, stop_requested=False, count_ledger=False
        ).backward.loss
        for step in range(1, WARMUP_STEPS + 4)
    ]
    full = 0 if state.graph is None else state.graph.replays
    assert bool(full + state.runtime.part_graphs.replays) == bool(plan.layout.graphs)
    return losses


@pytest.mark.parametrize(
    "layout", ["mbs4,graphs=attn+moe_router+moe_preprocess", "mbs4,rank_capacity=1,graphs=full"]
)
def test_steps_that_replay_cuda_graphs_go_on_as_others_do(layout: str) -> None:
    """In fp32; the sums of gradients in another order, as atomic additions have it, are allowed."""
    captured = run_losses(layout)
    plain = run_losses(layout.partition(",graphs")[0])
    assert captured == pytest.approx(plain, rel=1e-4)
