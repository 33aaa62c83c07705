"""The parts of `python -m benchmarks.gpu`, each of which returns a section of the page.

Every part runs in a process of its own (`python -m benchmarks.gpu.parts NAME FILE`), so that one
that fails or hangs takes no other with it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.peers import (
    build_transformers_model,
    build_transformers_step,
    find_moe_layer,
)
from benchmarks.gpu.sizes import (
    RECIPES,
    GpuSizes,
    best_gemm_rate,
    build_engine_state,
    build_job,
    card_sizes,
    rehearsal_sizes,
    time_call,
)
from moewright.cost.estimate import estimate
from moewright.cost.ledger import predict_rank_ledger
from moewright.engine.kernels.fused.table import build_kernels, torch_kernels
from moewright.engine.kernels.low_precision import ONE_GROUP, Groups, NarrowTensor, convert
from moewright.engine.kernels.matmul import grouped_matmul, matmul
from moewright.engine.kernels.scaled_groups import (
    contract_groups,
    find_gradient_product,
    find_group_product,
    multiply_groups,
    pad_to_tiles,
)
from moewright.engine.kernels.scaled_products import find_product, multiply
from moewright.engine.memory.graph_capture import WARMUP_STEPS
from moewright.engine.run.step import train_step
from moewright.intake import catalogue
from moewright.rules.low_precision import find_recipe
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.spec.hardware import DeviceKind
from moewright.spec.ledger import Component
from moewright.spec.model import ModelSpec
from moewright.spec.units import GIB
from moewright.spec.workload import FusedKernels, Workload

_TERA = 10**12
_EXPERTS = 8
_PROFILE_ROWS = 15


def run_tests(sizes: GpuSizes, *, file: str) -> str:
    """Run a file of tests/gpu and return how it ended; each test is a line as it ends."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = next(line for line in reversed(lines) if line)
    return "\n".join((f"`pytest tests/gpu/{file}`: {summary.strip('= ')}", *failed))


def compare_kernels(sizes: GpuSizes) -> str:
    """Compare kernels and narrow products with fp32 references, and casts with the CPU's."""
    width = sizes.models[0].model.hidden_size
    return "\n\n".join(
        (
            _table(
                ("kernel", "largest error over fp32's largest", "time", "plain torch"),
                _kernel_rows(sizes, width),
            ),
            _table(
                ("cast", "bytes that differ from the CPU's", "time", "plain torch"),
                _cast_rows(sizes, width),
            ),
            _table(
                ("product", "by", "error over the exact norm", "time", "in bf16"),
                _product_rows(sizes, width),
            ),
        )
    )


def _kernel_rows(sizes: GpuSizes, width: int) -> Iterable[Sequence[str]]:
    device = sizes.device
    kind = DeviceKind.CUDA if device.type == "cuda" else DeviceKind.CPU
    fused = build_kernels(FusedKernels.AUTO, kind)
    plain = torch_kernels()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sizes.rows, width, generator=generator).to(device)
    weight = torch.randn(width, generator=generator).to(device)
    order = torch.randperm(sizes.rows, generator=generator).to(device)
    scales = torch.rand(sizes.rows, generator=generator).to(device)
    narrow = x.bfloat16()
    cases: tuple[tuple[str, Callable[[Any, torch.Tensor], torch.Tensor]], ...] = (
        ("permute", lambda kernels, rows: kernels.permute(rows, order)),
        ("swiglu", lambda kernels, rows: kernels.swiglu(rows, scales, False)),
        (
            "rms_norm",
            lambda kernels, rows: kernels.rms_norm(rows, weight.to(rows.dtype), 1e-6)[0],
        ),
    )
    for name, run in cases:
        expected = run(plain, narrow.float())
        error = (run(fused, narrow).float() - expected).abs().max() / expected.abs().max()
        own_s = time_call(sizes, partial(run, fused, narrow))
        plain_s = time_call(sizes, partial(run, plain, narrow))
        yield name, f"{float(error):.1e}", _microseconds(own_s), _microseconds(plain_s)
    experts = torch.randn(_EXPERTS, width, width, generator=generator).to(device)
    ends = (torch.arange(1, _EXPERTS + 1, device=device) * (sizes.rows // _EXPERTS)).int()
    product = grouped_matmul(narrow, experts.bfloat16(), ends)
    wide = torch.cat(
        [
            rows.float() @ expert.bfloat16().float()
            for rows, expert in zip(narrow.chunk(_EXPERTS), experts, strict=True)
        ]
    )
    error = (product.float() - wide).abs().max() / wide.abs().max()
    own_s = time_call(sizes, lambda: grouped_matmul(narrow, experts.bfloat16(), ends))
    yield "grouped product, 8 experts", f"{float(error):.1e}", _microseconds(own_s), ""


def _cast_rows(sizes: GpuSizes, width: int) -> Iterable[Sequence[str]]:
    kind = DeviceKind.CUDA if sizes.device.type == "cuda" else DeviceKind.CPU
    fused = build_kernels(FusedKernels.AUTO, kind).convert
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(sizes.rows, width, generator=generator).bfloat16()
    for name, precision, scaling in RECIPES:
        workload = Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
        recipe = find_recipe(workload)
        assert recipe is not None
        expected = convert(x, recipe.inputs)
        moved = x.to(sizes.device)
        result = fused(moved, recipe.inputs, ONE_GROUP, None)
        differing = sum(
            int((ours.cpu().view(torch.uint8) != reference.view(torch.uint8)).sum())
            for ours, reference in zip(result.tensors, expected.tensors, strict=True)
        )
        own_s = time_call(sizes, partial(fused, moved, recipe.inputs, ONE_GROUP, None))
        plain_s = time_call(sizes, partial(convert, moved, recipe.inputs))
        yield name, str(differing), _microseconds(own_s), _microseconds(plain_s)


def _product_rows(sizes: GpuSizes, width: int) -> Iterable[Sequence[str]]:
    """Time products of operands that are converted already: dense, and of experts."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sizes.rows, width, generator=generator).bfloat16().to(sizes.device)
    w = torch.randn(width, width, generator=generator).bfloat16().to(sizes.device)
    experts = w.expand(_EXPERTS, width, width).contiguous()
    ends = (torch.arange(1, _EXPERTS + 1, device=sizes.device) * (sizes.rows // _EXPERTS)).int()
    weight_ends = torch.arange(1, _EXPERTS + 1, device=sizes.device) * width
    dense_s = time_call(sizes, lambda: matmul(x, w.T))
    grouped_s = time_call(sizes, lambda: grouped_matmul(x, experts.mT, ends))
    for name, precision, scaling in RECIPES:
        workload = Workload(seq_len=1, global_batch=1, precision=precision, tensor_scaling=scaling)
        recipe = find_recipe(workload)
        assert recipe is not None
        a, b = convert(x, recipe.inputs), convert(w, recipe.weights)
        product = find_product(a, b, x.dtype)
        run = partial(multiply, a, b, x.dtype)
        yield name, product or "widened", _error(run(), a, b), *_times(sizes, run, dense_s)
        rows = convert(x, recipe.inputs, Groups(ends=ends))
        stack = convert(experts.flatten(0, 1), recipe.weights, Groups(ends=weight_ends))
        product = find_group_product(rows, stack, experts.shape, x.dtype)
        run = partial(multiply_groups, rows, stack, experts.shape, ends, x.dtype)
        yield (
            f"{name}, experts",
            product or "widened",
            _error(run(), rows, b),
            *_times(sizes, run, grouped_s),
        )
        product = find_gradient_product(recipe.gradients, recipe.inputs, width, x)
        if product is not None:
            padding = pad_to_tiles(ends, len(x), recipe.inputs)
            columns = Groups(ends=padding.ends, of_columns=True)
            narrow = convert(padding.pad(x).mT, recipe.inputs, columns)
            run = partial(contract_groups, product, narrow, narrow, len(x))
            wide = narrow.widen(torch.float32)[:, padding.places].double()
            exact = torch.stack([part @ part.T for part in wide.chunk(_EXPERTS, 1)])
            error = _relative(run(), exact)
            in_bf16_s = time_call(sizes, lambda: grouped_matmul(x.T, x, ends))
            yield f"{name}, experts' gradient", product, error, *_times(sizes, run, in_bf16_s)


def _error(result: torch.Tensor, a: NarrowTensor, b: NarrowTensor) -> str:
    exact = a.widen(torch.float32).double() @ b.widen(torch.float32).double().T
    return _relative(result, exact)


def _relative(result: torch.Tensor, exact: torch.Tensor) -> str:
    return f"{float((result.double() - exact).norm() / exact.norm()):.1e}"


def _times(sizes: GpuSizes, run: Callable[[], object], bf16_s: float) -> tuple[str, str]:
    return _microseconds(time_call(sizes, run)), _microseconds(bf16_s)


def time_layers(sizes: GpuSizes) -> str:
    """Time forward and backward of a MoE layer beside transformers', in turns of calls."""
    peak = best_gemm_rate(sizes)
    rows = []
    for measured in sizes.models:
        model = measured.cut(1)
        flops = _layer_flops(model) * sizes.layer_tokens
        times = {"moewright": time_call(sizes, _engine_layer(sizes, model))}
        _free(sizes)
        times |= _try_peer(partial(_time_transformers_layer, sizes, model))
        _free(sizes)
        for name, seconds in times.items():
            share = flops / seconds / peak
            gain = f"{seconds / times['moewright']:.2f}x"
            rows.append(
                (
                    model.name,
                    name,
                    f"{1e3 * seconds:.2f} ms",
                    f"{flops / seconds / _TERA:.1f}",
                    f"{share:.1%}",
                    gain,
                )
            )
    best = f"Best bf16 product of two squares of {sizes.gemm_side}: {peak / _TERA:.1f} TFLOP/s."
    columns = ("layer", "trainer", "forward and backward", "TFLOP/s", "of that", "moewright is")
    return f"{best}\n\n{_table(columns, rows)}"


def _engine_layer(sizes: GpuSizes, model: ModelSpec) -> Callable[[], object]:
    state = build_engine_state(sizes, model)
    layer: Any = state.model.layers["0"].moe
    x, grad = _draw_hidden(sizes, model)
    leaf = x.requires_grad_()

    def run() -> None:
        state.optimizer.begin_step(1)
        out, _, _ = layer(leaf, None, None)
        out.backward(grad)

    return run


def _time_transformers_layer(sizes: GpuSizes, model: ModelSpec) -> float:
    layer = find_moe_layer(build_transformers_model(sizes, model))
    x, grad = _draw_hidden(sizes, model)
    leaf = x[None].detach().requires_grad_()

    def run() -> None:
        out = layer(leaf)
        hidden = out[0] if isinstance(out, tuple) else out
        hidden.backward(grad[None])
        for parameter in layer.parameters():
            parameter.grad = None

    return time_call(sizes, run)


def _draw_hidden(sizes: GpuSizes, model: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    shape = (sizes.layer_tokens, model.hidden_size)
    x, grad = (
        torch.randn(shape, generator=generator).to(sizes.device).bfloat16() for _ in range(2)
    )
    return x, grad


def _layer_flops(model: ModelSpec) -> int:
    """Return the FLOPs a token of a MoE layer, forward and backward."""
    assert model.moe is not None
    expert = 3 * model.hidden_size * model.moe.ffn_size
    return 6 * (model.moe.router.top_k * expert + model.hidden_size * model.moe.experts)


def time_steps(sizes: GpuSizes) -> str:
    """Time whole training steps beside transformers'."""
    peak = best_gemm_rate(sizes)
    rows = []
    for measured in sizes.models:
        model = measured.cut(measured.step_layers)
        tokens = sizes.layer_tokens
        flops = model_flops_per_token(model, sizes.seq_len) * tokens
        times = {"moewright": time_call(sizes, _engine_step(sizes, model))}
        _free(sizes)
        times |= _try_peer(partial(_time_transformers_step, sizes, model))
        _free(sizes)
        for name, seconds in times.items():
            rows.append(
                (
                    f"{model.name}, {measured.step_layers} layers",
                    name,
                    f"{1e3 * seconds:.1f} ms",
                    f"{tokens / seconds:,.0f}",
                    f"{flops / seconds / peak:.1%}",
                    f"{seconds / times['moewright']:.2f}x",
                )
            )
    columns = ("model", "trainer", "step", "tokens/s", "model FLOPs of best GEMM", "moewright is")
    return _table(columns, rows)


def _engine_step(sizes: GpuSizes, model: ModelSpec) -> Callable[[], object]:
    state = build_engine_state(sizes, model)
    return partial(train_step, state, step=1, lr=1e-4, stop_requested=False, count_ledger=False)


def time_graphs(sizes: GpuSizes) -> str:
    """Time a step of one layer as it is, with graphs of its parts, and captured whole.

    All experts are on the device, so that a budget of rows pads none. What graphs take away is what
    the host takes.
    """
    model = sizes.models[-1].cut(1)
    rows = []
    for features in ("", "graphs=attn+moe_router", "rank_capacity=1,graphs=full"):
        state = build_engine_state(sizes, model, features)
        step = partial(train_step, state, lr=1e-4, stop_requested=False, count_ledger=False)
        for number in range(1, WARMUP_STEPS + 2):  # the last of them captures
            step(step=number)
        seconds = time_call(sizes, partial(step, step=WARMUP_STEPS + 2))
        rows.append((model.name, features or "none", f"{1e3 * seconds:.2f} ms"))
        del state, step
        _free(sizes)
    return _table(("model", "graphs", "step of one layer"), rows)


def _time_transformers_step(sizes: GpuSizes, model: ModelSpec) -> float:
    network = build_transformers_model(sizes, model)
    return time_call(sizes, build_transformers_step(sizes, model, network))


def _try_peer(measure: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of transformers; nothing where it cannot run."""
    try:
        return {"transformers, grouped_mm": measure()}
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        print(f"transformers is left out: {error}", file=sys.stderr)
        return {}


def compare_memory(sizes: GpuSizes) -> str:
    """Return the memory that was predicted beside what the census and torch's allocator counted."""
    rows = []
    for measured in sizes.models:
        model = measured.cut(measured.step_layers)
        job = build_job(sizes, model)
        state = build_engine_state(sizes, model)
        step = partial(train_step, state, step=1, lr=1e-4, stop_requested=False)
        step(count_ledger=False)
        if sizes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step(count_ledger=True)
        peak = torch.cuda.max_memory_allocated() if sizes.device.type == "cuda" else 0
        counted = state.runtime.counters.build_ledger(
            rank=0, pp_rank=0, state=state.memory_rows(), time=(), notes=()
        )
        assert counted.storages is not None
        predicted = predict_rank_ledger(job, rank=0, selection=None)
        saved = (Component.ACTIVATIONS, Component.LOGITS)
        states_bytes = sum(row.bytes for row in predicted.memory if row.component not in saved)
        kept_bytes = sum(row.bytes for row in predicted.memory)
        rows.append(
            (
                model.name,
                _gib(states_bytes),
                _gib(counted.storages.resident),
                _gib(kept_bytes),
                _gib(counted.storages.kept),
                _gib(_estimated_peak(sizes, job.model)),
                _gib(counted.storages.peak),
                _gib(peak) if peak else "no allocator of a GPU",
            )
        )
        del state, step
        _free(sizes)
    columns = (
        "model",
        "states, predicted",
        "counted",
        "kept, predicted",
        "counted",
        "peak, estimated",
        "counted",
        "torch's allocator",
    )
    return _table(columns, rows)


def _estimated_peak(sizes: GpuSizes, model: ModelSpec) -> int:
    """Return the peak that the planner's estimate gives for the card, or for an H200."""
    job = build_job(sizes, model)
    hardware = catalogue.hardware("1xH200")
    ledger, *_ = estimate(job.model, job.workload, hardware, job.layout).ledgers
    return sum(row.bytes for row in ledger.memory if row.component is not Component.HOST)


def measure_rates(sizes: GpuSizes) -> str:
    """Measure the rates that a hardware file holds, as `moewright bench machine` does."""
    from moewright.bench.machine import measure_machine

    if not sizes.bench_budget_s:
        return "Not measured in a rehearsal: `moewright bench machine` measures a CPU."
    hardware = measure_machine(nproc=1, budget_s=sizes.bench_budget_s)
    peaks = ((str(p.dtype), f"{p.rate.value / _TERA:.1f} TFLOP/s") for p in hardware.device.peaks)
    rates = (
        (str(rate.op), str(rate.dtype), f"{x:,.0f}", f"{y:.3g}")
        for rate in hardware.device.rates
        for x, y in rate.curve.points
    )
    return "\n\n".join(
        (
            _table(("dtype", "best product"), peaks),
            _table(("operation", "dtype", "size", "FLOP/s or bytes/s"), rates),
        )
    )


def profile_step(sizes: GpuSizes) -> str:
    """Return the operations of a step that took the most time on the device."""
    model = sizes.models[-1].cut(sizes.models[-1].step_layers)
    step = _engine_step(sizes, model)
    step()
    is_cuda = sizes.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        if is_cuda:
            torch.cuda.synchronize()
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda row: getattr(row, key), reverse=True)
    total = sum(getattr(row, key) for row in events) or 1
    rows = (
        (
            f"`{row.key[:80]}`",
            str(row.count),
            f"{getattr(row, key) / 1e3:.2f} ms",
            f"{getattr(row, key) / total:.1%}",
        )
        for row in events[:_PROFILE_ROWS]
    )
    return f"A step of {model.name}.\n\n{_table(('operation', 'calls', 'time', 'share'), rows)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A section of the page: its title, the most seconds it may take, and what measures it.

    `group` is the command of `make gpu PART=...` that runs it, each of which takes eight minutes.
    """

    title: str
    group: str
    limit_s: float
    measure: Callable[[GpuSizes], str]


def _tests(title: str, file: str) -> Part:
    return Part(title=title, group="tests", limit_s=210.0, measure=partial(run_tests, file=file))


def _speed(title: str, limit_s: float, measure: Callable[[GpuSizes], str]) -> Part:
    return Part(title=title, group="speed", limit_s=limit_s, measure=measure)


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "test_one_gpu": _tests("Tests: layers, steps and memory", "test_one_gpu.py"),
        "test_fused_kernels": _tests("Tests: fused kernels", "test_fused_kernels.py"),
        "test_narrow_products": _tests("Tests: narrow products", "test_narrow_products.py"),
        "test_scans": _tests("Tests: scans", "test_scans.py"),
        "steps": _speed("Speed of a step", 80.0, time_steps),
        "graphs": _speed("What graphs save of a step", 35.0, time_graphs),
        "memory": _speed("Memory", 60.0, compare_memory),
        "layers": _speed("Speed of a MoE layer", 80.0, time_layers),
        "kernels": _speed("Kernels against references", 60.0, compare_kernels),
        "profile": _speed("Profile of a step", 45.0, profile_step),
        "rates": _speed("Rates for a hardware file", 120.0, measure_rates),
    }
)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f} GiB"


def _free(sizes: GpuSizes) -> None:
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    part, target, is_rehearsal = sys.argv[1], Path(sys.argv[2]), sys.argv[3:] == ["--rehearse"]
    chosen = rehearsal_sizes() if is_rehearsal else card_sizes()
    target.write_text(PARTS[part].measure(chosen), encoding="utf-8")
