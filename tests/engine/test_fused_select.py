"""Which kernels a job gets.

Those that it cannot have are refused in a line, before anything starts.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import tiny_jobs
from moewright.engine.kernels.fused import table
from moewright.engine.run.train import train
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import DataSpec, FusedKernels

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.mark.parametrize(
    ("installed", "interpreted", "choice", "device", "refusal", "implementation"),
    [
        (
            False,
            True,
            FusedKernels.TRITON,
            CUDA,
            "needs the package triton, which is not installed here",
            None,
        ),
        (True, False, FusedKernels.TRITON, CPU, "needs CUDA devices", None),
        (True, True, FusedKernels.TRITON, CPU, "", "triton"),
        (True, False, FusedKernels.TRITON, CUDA, "", "triton"),
        (True, False, FusedKernels.AUTO, CUDA, "", "triton"),
        (False, False, FusedKernels.AUTO, CUDA, "", "plain"),
        (True, True, FusedKernels.AUTO, CPU, "", "plain"),
        (True, True, FusedKernels.PLAIN, CUDA, "", "plain"),
    ],
)
def test_what_a_job_gets(
    installed: bool,
    interpreted: bool,
    choice: FusedKernels,
    device: DeviceKind,
    refusal: str,
    implementation: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(table, "version", lambda name: "3.7")
    reasons = table.unavailable_reasons(choice, device, interpreted=interpreted)
    assert len(reasons) == bool(refusal)
    assert all(reason.rule.startswith(refusal) for reason in reasons)
    if implementation is not None:
        assert table.implementation_name(choice, device).split()[0] == implementation


def test_the_reference_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    for choice, device in product((FusedKernels.AUTO, FusedKernels.PLAIN), DeviceKind):
        assert table.build_kernels(choice, device).implementation is FusedKernels.PLAIN


def test_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    work = tiny_jobs.build_workload(DataSpec(), fused_kernels=FusedKernels.TRITON)
    with pytest.raises(
        BadInput, match=r"train.fused_kernels=triton: needs .*; nearest legal value: auto"
    ):
        train(tiny_jobs.build_plan(work, "", world_size=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
