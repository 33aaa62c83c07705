"""Whose kernels a job gets: asked for but not to be had is refused in a line, before anything
starts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import tiny_jobs
from moewright.engine.kernels.fused import select
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.run.train import train
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.workload import DataSpec, FusedKernels

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.mark.parametrize(
    ("installed", "interpreted", "asked", "device", "said", "given"),
    [
        (
            False,
            "1",
            FusedKernels.TRITON,
            CUDA,
            "needs the package triton, which is not installed here",
            None,
        ),
        (True, "0", FusedKernels.TRITON, CPU, "needs CUDA devices", None),
        (True, "1", FusedKernels.TRITON, CPU, "", "triton"),
        (True, "0", FusedKernels.TRITON, CUDA, "", "triton"),
        (True, "0", FusedKernels.AUTO, CUDA, "", "triton"),
        (False, "0", FusedKernels.AUTO, CUDA, "", "plain"),
        (True, "1", FusedKernels.AUTO, CPU, "", "plain"),
        (True, "1", FusedKernels.PLAIN, CUDA, "", "plain"),
    ],
)
def test_what_a_job_gets(
    installed: bool,
    interpreted: str,
    asked: FusedKernels,
    device: DeviceKind,
    said: str,
    given: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(select, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(select, "version", lambda name: "3.7")
    rules = [reason.rule for reason in select.unavailable_reasons(asked, device)]
    assert len(rules) == bool(said)
    assert all(rule.startswith(said) for rule in rules)
    if given is not None:
        assert select.implementation_name(asked, device).split()[0] == given


def test_the_reference_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    for asked, device in product((FusedKernels.AUTO, FusedKernels.PLAIN), DeviceKind):
        assert isinstance(select.build_kernels(asked, device), TorchKernels)


def test_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    work = tiny_jobs.workload(DataSpec(), fused_kernels=FusedKernels.TRITON)
    with pytest.raises(
        BadInput, match=r"train.fused_kernels=triton: needs .*; nearest legal value: auto"
    ):
        train(tiny_jobs.plan(work, "", world_size=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
