"""`make gpu` without a GPU: a rehearsal goes through every part, and a part may fail alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.gpu.__main__ as gpu
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.sizes import rehearsal_sizes

ROOT = Path(gpu.__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


@pytest.mark.parametrize("name", ["kernels", "memory", "profile"])
def test_parts_run_on_a_cpu(name: str) -> None:
    _, _, measure = PARTS[name]
    section = measure(rehearsal_sizes())
    if name == "kernels":
        assert "| fp8, blocks of 128 | 0 |" in section
        assert section.count("| widened |") == 8  # four recipes, dense and of experts
        assert section.count("\n| ") == 4 + 1 + 4 + 1 + 8
    elif name == "memory":
        states, counted = _memory_row(section)[1:3]
        assert states == counted
    else:
        assert "aten::" in section


@pytest.mark.thorough
def test_a_rehearsal_writes_a_page_with_every_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--rehearse", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "rehearsal.md").read_text()
    for title, _, _ in PARTS.values():
        assert f"\n## {title}\n" in page
    assert "Failed" not in page
    assert "| fp8, blocks of 128 | 0 |" in page
    _, layers = page.split("## Speed of a MoE layer")
    assert "| quickstart | moewright |" in layers
    states, counted = _memory_row(page.split("## Memory")[1])[1:3]
    assert states == counted


def _memory_row(section: str) -> list[str]:
    row = next(line for line in section.splitlines() if line.startswith("| quickstart |"))
    return [cell.strip() for cell in row.strip("| ").split("|")]


def test_a_part_that_fails_or_hangs_is_named_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ended = {"kernels": ("Failed with code 1: `RuntimeError: the card fell`", False)}
    ended["memory"] = ("all is well", True)
    monkeypatch.setattr(gpu, "_run_part", lambda name, limit_s, rehearse: ended[name])
    assert gpu.measure_gpu(folder=tmp_path, rehearse=True, only=("kernels", "memory")) == 1
    page = (tmp_path / "rehearsal.md").read_text()
    assert page.index("the card fell") < page.index("## Memory") < page.index("all is well")


def test_what_a_part_says_last_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "_PARTS_MODULE", "benchmarks.no_such_module")
    text, is_whole = gpu._run_part("layers", 30.0, rehearse=True)
    assert not is_whole
    assert text.startswith("Failed with code 1: `")
    assert "No module named benchmarks.no_such_module`" in text
    late, is_whole = gpu._run_part("layers", 4.0, rehearse=True)
    assert (late, is_whole) == ("Not run: no time was left.", False)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device_it_is_refused_in_one_line() -> None:
    refused = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "needs a CUDA device" in refused.stderr
