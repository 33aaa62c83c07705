"""Constants from a traced step, beside steps whose kernels take known multiples."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import moewright as mw
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.speed import MeasuredSpeed
from moewright.calibration.traced_step import TracedSeconds, calibrate_on_trace
from moewright.cli.main import main
from moewright.codec import read_json
from moewright.cost.constants import Constants
from moewright.cost.estimate import estimate
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import Sourced, SourceKind
from moewright.view.plan_view import PlanView

ROOT = Path(__file__).parents[2]
SCALES = (
    "gemm_time_scale",
    "grouped_gemm_time_scale",
    "attention_time_scale",
    "elementwise_time_scale",
)
TIED = {
    "attention_time_scale": ("attention_backward_time_scale",),
    "elementwise_time_scale": ("optimizer_time_scale",),
}


def scale(hardware: Hardware, factors: dict[str, float]) -> Hardware:
    values = Constants(hardware)
    names = {
        name: factor
        for scaled, factor in factors.items()
        for name in (scaled, *TIED.get(scaled, ()))
    }
    changed = tuple(
        Constant(
            name=name,
            value=Sourced(value=values[name] * factor, kind=SourceKind.FITTED, source="drawn"),
        )
        for name, factor in names.items()
    )
    kept = tuple(item for item in hardware.constants if item.name not in names)
    return replace(hardware, constants=(*kept, *changed))


def kernel_seconds(plan: Plan, hardware: Hardware, factors: dict[str, float]) -> float:
    scaled = scale(hardware, factors)
    told = estimate(plan.model, plan.workload, scaled, plan.layout)
    outside = (TimePart.BUBBLE, TimePart.HOST)
    return sum(item.seconds + item.hidden_s for item in told.shares if item.part not in outside)


def trace_of(plan: Plan, factors: dict[str, float]) -> TracedSeconds:
    """Return what kernels take on devices whose constants are that much larger."""
    whole = kernel_seconds(plan, plan.hardware, factors)
    kinds = {
        name: (kernel_seconds(plan, plan.hardware, factors | {name: 2 * factors[name]}) - whole)
        for name in SCALES
    }
    return TracedSeconds(
        products=kinds["gemm_time_scale"] - kinds["grouped_gemm_time_scale"],
        grouped=kinds["grouped_gemm_time_scale"],
        attention=kinds["attention_time_scale"],
        other=kinds["elementwise_time_scale"],
        exchange=0.0,
        tensor=0.0,
    )


def row_of(plan: Plan, step_s: float) -> MeasuredRow:
    tokens = plan.workload.tokens_per_step / plan.layout.world_size / step_s
    return MeasuredRow(
        id="a trace",
        cells={},
        model=plan.model,
        workload=plan.workload,
        hardware=plan.hardware,
        layout=plan.layout,
        speed=MeasuredSpeed(tokens_per_s_per_device=tokens, origin="traced steps"),
        peak=None,
        oom=False,
        unstated=(),
    )


@pytest.mark.parametrize("layout", ["ep8,recompute=full", "tp2,ep4,recompute=full"])
@pytest.mark.parametrize("seed", range(2))
def test_kernels_that_take_drawn_multiples_give_back_their_constants(
    layout: str, seed: int
) -> None:
    plan = mw.estimate("Qwen3-30B-A3B", layout, on="8xH100")
    rng = random.Random(seed)
    factors = {name: rng.uniform(0.8, 1.6) for name in SCALES}
    real = scale(plan.hardware, factors)
    step_s = estimate(plan.model, plan.workload, real, plan.layout).step_s
    calibrated, told = calibrate_on_trace(
        plan.hardware, row_of(plan, step_s), trace_of(plan, factors)
    )
    values, before = Constants(calibrated), Constants(plan.hardware)
    for name, factor in factors.items():
        assert values[name] / before[name] == pytest.approx(factor, rel=0.05), name
    assert len(told) == 4
    # What was calibrated in one layout is told of another one.
    other = mw.estimate("Qwen3-30B-A3B", "tp2,ep8,recompute=full", on="8xH100").layout
    job = plan.model, plan.workload
    true_s = estimate(*job, real, other).step_s
    assert estimate(*job, calibrated, other).step_s == pytest.approx(true_s, rel=0.03)
    assert abs(estimate(*job, plan.hardware, other).step_s / true_s - 1) > 0.03


def test_work_that_is_not_told_apart_keeps_its_constants() -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    nothing = TracedSeconds(
        products=0.0, grouped=0.0, attention=1e-9, other=1e9, exchange=0.0, tensor=0.0
    )
    calibrated, told = calibrate_on_trace(
        plan.hardware, row_of(plan, plan.estimate.step_s), nothing
    )
    assert told == ()
    assert calibrated.constants == plan.hardware.constants
    assert estimate(plan.model, plan.workload, calibrated, plan.layout).step_s == pytest.approx(
        plan.estimate.step_s, rel=0.001
    )


def test_products_that_a_trace_does_not_tell_apart_share_a_factor() -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    factors = dict.fromkeys(SCALES, 1.3) | {"grouped_gemm_time_scale": 1.0}
    told = trace_of(plan, factors)
    looped = replace(told, products=told.products + told.grouped, grouped=0.0)
    calibrated, found = calibrate_on_trace(
        plan.hardware, row_of(plan, plan.estimate.step_s), looped
    )
    assert found[0].kind == "products"
    assert found[0].factor == pytest.approx(1.3, rel=0.02)
    values, before = Constants(calibrated), Constants(plan.hardware)
    assert values["grouped_gemm_time_scale"] == before["grouped_gemm_time_scale"]


def test_a_trace_beside_its_plan_calibrates_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes((ROOT / "skills" / "moewright" / "files" / "step_trace.json").read_bytes())
    verb = ["estimate", "OLMoE-1B-7B-0924", "--on", "4xH100", "--layout", "ep4"]
    verb += ["--global-batch", "4"]
    answer, stated = tmp_path / "answer.json", tmp_path / "plan.json"
    assert main([*verb, "--from-trace", str(trace), "--json", str(answer)]) == 2
    assert "plan.json beside it" in capsys.readouterr().err
    assert main([*verb, "--json", str(stated)]) in (0, 3)
    assert main([*verb, "--from-trace", str(trace), "--json", str(answer)]) in (0, 3)
    told = read_json(Plan, answer)
    values, before = Constants(told.hardware), Constants(read_json(Plan, stated).hardware)
    changed = [name for name in SCALES if values[name] != before[name]]
    assert changed
    sources = {item.name: item.value.source for item in told.hardware.constants}
    assert all(sources[name] == "the trace trace.json" for name in changed)
    # Passes without an update are no whole step.
    assert told.hardware.own_runs == ()
    assert "it holds no update of weights" in capsys.readouterr().out
    # The functions take it as the verbs do.
    job = {"on": "4xH100", "global_batch": 4, "from_trace": str(trace)}
    own = mw.estimate("OLMoE-1B-7B-0924", "ep4", **job)
    assert own.estimate == told.estimate
    shown = mw.show("OLMoE-1B-7B-0924", "ep4", **job)
    assert isinstance(shown, PlanView)
    assert shown.estimate.step_s == told.estimate.step_s
    # A whole step, as the kernel of an optimizer says.
    whole = trace.read_text().replace("vectorized_elementwise_kernel", "multi_tensor_apply_kernel")
    trace.write_text(whole)
    assert len(mw.estimate("OLMoE-1B-7B-0924", "ep4", **job).hardware.own_runs) == 1
    # A job of which the trace has no kernels, and other devices.
    assert main([*verb[:-1], "4096", "--json", str(stated)]) in (0, 3)
    capsys.readouterr()
    assert main([*verb, "--from-trace", str(trace)]) == 2
    assert "has no kernels of the job that plan.json states" in capsys.readouterr().err
    verb[3] = "4xB200"
    assert main([*verb, "--from-trace", str(trace)]) == 2
    assert "was traced on H100, not on B200" in capsys.readouterr().err


@pytest.mark.parametrize("looped", [False, True])
def test_products_whose_names_err_share_a_factor(looped: bool) -> None:
    """A library of grouped products has plain ones under the same names, or the other way round."""
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    factors = dict.fromkeys(SCALES, 1.3) | {"grouped_gemm_time_scale": 1.0}
    told = trace_of(plan, factors)
    both = told.products + told.grouped
    few, most = 0.001 * both, 0.999 * both
    named = replace(told, products=most if looped else few, grouped=few if looped else most)
    _, found = calibrate_on_trace(plan.hardware, row_of(plan, plan.estimate.step_s), named)
    assert [item.kind for item in found if "products" in item.kind] == ["products"]
    assert found[0].factor == pytest.approx(1.3, rel=0.02)


def test_passes_without_an_update_leave_the_optimizer_and_the_step_as_they_are() -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    told = trace_of(plan, dict.fromkeys(SCALES, 1.0) | {"elementwise_time_scale": 1.2})
    update_s = sum(share.seconds for share in plan.estimate.shares if share.part == "optimizer")
    part = replace(told, other=told.other - 1.2 * update_s, has_update=False)
    row = row_of(plan, plan.estimate.step_s - update_s)
    calibrated, _ = calibrate_on_trace(plan.hardware, row, part)
    values, before = Constants(calibrated), Constants(plan.hardware)
    assert values["optimizer_time_scale"] == before["optimizer_time_scale"]
    ratio = values["elementwise_time_scale"] / before["elementwise_time_scale"]
    assert ratio == pytest.approx(1.2, rel=0.15)
    assert calibrated.own_runs == ()
