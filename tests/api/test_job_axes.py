"""Precision and global batch as choices of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import moewright as mw
from moewright.api.job_axes import list_batches, search_axes
from moewright.api.requests import read_axes, read_plan_request
from moewright.api.workload_choices import workload_options
from moewright.cost.evidence import read_measured_choices
from moewright.spec.errors import BadInput
from moewright.spec.options import JobAxes, SearchOptions
from moewright.spec.workload import Dtype, ExpertKernels

MODEL = "OLMoE-1B-7B-0924"
PINS = "tp1,pp1,ep4,mbs2,recompute=none,offload=none,zero1"


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100, 4096, 2**24])
def test_a_range_is_searched_at_both_ends_and_at_few_batches_between(most):
    for least in (1, 3, 64):
        if least < most:
            batches = list_batches(least, most)
            assert batches[0] == least
            assert batches[-1] == most
            assert len(batches) <= 8
            assert list(batches) == sorted(set(batches))


def test_every_format_of_the_devices_is_compared_and_one_without_a_run_is_not_taken():
    pins = "tp1,pp1,ep2,mbs16,offload=none,zero1"  # 4 bits are worth it there
    plans = mw.plan(MODEL, on="8xB200", global_batch=512, precision="any", layout=pins)
    formats = {choice.precision: choice for choice in plans.choices}
    assert set(formats) == {Dtype.BF16, Dtype.MXFP8, Dtype.FP8, Dtype.NVFP4}
    runs = read_measured_choices().count_runs(("part=B200", "precision=nvfp4"))
    assert formats[Dtype.NVFP4].runs == runs == 0
    fastest = min(plans.choices, key=lambda choice: choice.bound_s)
    assert fastest.precision is Dtype.NVFP4
    chosen = plans.request.workload.precision
    assert chosen is not Dtype.NVFP4
    assert plans.best.workload.precision is chosen
    proven = [choice for choice in plans.choices if choice.runs or not choice.precision.is_narrow]
    assert formats[chosen].bound_s <= 1.01 * min(choice.bound_s for choice in proven)
    assert plans.best.estimate.step_s == pytest.approx(formats[chosen].step_s, rel=1e-9)


def test_a_batch_of_a_range_is_the_smallest_of_those_that_take_as_long_a_token():
    plans = mw.plan(MODEL, on="8xH100", global_batch="16..128", layout=PINS)
    batches = [choice.global_batch for choice in plans.choices]
    assert sorted(batches) == [16, 32, 64, 128]
    chosen = plans.request.workload.global_batch
    seconds = {
        choice.global_batch: choice.bound_s / choice.global_batch for choice in plans.choices
    }
    assert seconds[chosen] <= 1.01 * min(seconds.values())
    assert all(seconds[batch] > 1.01 * min(seconds.values()) for batch in batches if batch < chosen)


def test_a_format_that_no_layout_fits_in_says_so_and_another_is_taken():
    request = read_plan_request(MODEL, "8xH100", workload_options(4096, 64, None))
    axes = JobAxes(any_precision=True)
    options = SearchOptions(top=1, layout=f"{PINS},overlap=ep+wgrad")
    plans = search_axes(request, Path(MODEL), axes, options)
    assert [choice.precision for choice in plans.choices] == [Dtype.BF16, Dtype.FP8]
    assert all(choice.layout or choice.refusal for choice in plans.choices)


def test_switches_that_the_user_allows_are_set_where_they_pay() -> None:
    names = ("bf16-gradients", "bf16-moments", "fused-experts")
    plans = mw.plan(MODEL, on="8xB200", precision="mxfp8", layout=PINS, switches=names, top=1)
    plain, switched = plans.choices
    assert (plain.switches, switched.switches) == ((), names)
    assert switched.is_chosen
    assert not plain.is_chosen
    workload = plans.best.workload
    assert workload.grad_dtype is Dtype.BF16
    assert workload.optimizer.moment_dtype is Dtype.BF16
    assert workload.trainer.expert_kernels is ExpertKernels.FUSED
    assert plans.best.estimate.step_s == pytest.approx(switched.step_s, rel=1e-9)
    assert switched.step_s < plain.step_s
    alone = mw.plan(MODEL, on="8xB200", precision="mxfp8", layout=PINS, top=1)
    assert alone.best.estimate.step_s == pytest.approx(plain.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("names", "field"), [(("bf16-weights",), "switches"), (("fused-experts",), "--try")]
)
def test_a_switch_that_is_none_or_changes_nothing_is_refused(names, field) -> None:
    """Fused experts quantise what they write: a job in 16 bits has none."""
    with pytest.raises(BadInput) as error:
        mw.plan(MODEL, on="8xH100", layout=PINS, switches=names)
    assert error.value.reasons[0].field == field


def test_values_that_are_no_choice_are_read_as_they_are():
    assert read_axes("fp8", 64) == (Dtype.FP8, 64, JobAxes())
    assert read_axes(None, "2k") == (None, 2000, JobAxes())
    assert read_axes("any", "64..512") == (
        None,
        512,
        JobAxes(any_precision=True, batches=(64, 512)),
    )


@pytest.mark.parametrize("text", ["64..", "..64", "64..64", "512..64", "0..4", "1..2..3", "a..b"])
def test_a_range_that_is_none_is_refused(text):
    with pytest.raises(BadInput) as error:
        read_axes(None, text)
    assert error.value.reasons[0].field == "global_batch"
