"""`make gpu` without a GPU: a rehearsal goes through every part, and a part may fail alone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import benchmarks.gpu.__main__ as gpu
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.sizes import rehearsal_sizes

ROOT = Path(gpu.__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


@pytest.mark.parametrize("name", ["kernels", "memory", "graphs", "profile"])
def test_parts_run_on_a_cpu(name: str) -> None:
    section = PARTS[name].measure(rehearsal_sizes())
    if name == "kernels":
        assert "| fp8, blocks of 128 | 0 |" in section
        assert section.count("| widened |") == 8  # four recipes, dense and of experts
        assert section.count("\n| ") == 4 + 1 + 4 + 1 + 8
    elif name == "memory":
        states, counted = _memory_row(section)[1:3]
        assert states == counted
    elif name == "graphs":
        assert section.count("| quickstart | ") == 3
        assert "| rank_capacity=1,graphs=full | " in section
    else:
        assert "aten::" in section


def test_every_file_of_tests_for_a_gpu_is_a_part() -> None:
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name for name, part in PARTS.items() if part.group == "tests"} == files


@pytest.mark.thorough
def test_a_rehearsal_writes_a_page_with_every_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--rehearse", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "rehearsal.md").read_text()
    for part in PARTS.values():
        assert f"\n## {part.title}\n" in page
    assert "Failed" not in page
    assert "| fp8, blocks of 128 | 0 |" in page
    layers = page.split("## Speed of a MoE layer")[1].split("\n## ")[0]
    assert "| quickstart | moewright |" in layers
    states, counted = _memory_row(page.split("## Memory")[1])[1:3]
    assert states == counted


def _memory_row(section: str) -> list[str]:
    row = next(line for line in section.splitlines() if line.startswith("| quickstart |"))
    return [cell.strip() for cell in row.strip("| ").split("|")]


def test_a_part_that_fails_is_named_and_alone_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ended = {name: f"{name} is well" for name in PARTS}
    ended["memory"] = "Failed with code 1: `RuntimeError: the card fell`"
    ran = []

    def run_part(name: str, limit_s: float, log: Path, rehearse: bool) -> str:
        ran.append(name)
        return ended[name]

    monkeypatch.setattr(gpu, "_run_part", run_part)
    assert gpu.measure_gpu(out=tmp_path, rehearse=True, part="speed") == 1
    page = (tmp_path / "rehearsal.md").read_text()
    assert page.index("the card fell") < page.index("layers is well")
    assert "test_scans" not in page
    ended["memory"] = "memory is well"
    ran.clear()
    assert gpu.measure_gpu(out=tmp_path, rehearse=True, part="speed") == 0
    assert ran == ["memory"]
    assert gpu.measure_gpu(out=tmp_path, rehearse=True, part="tests") == 0
    page = (tmp_path / "rehearsal.md").read_text()
    titles = [part.title for part in PARTS.values()]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == titles
    assert all(f"{name} is well" in page for name in PARTS)


def test_what_a_part_says_last_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "_PARTS_MODULE", "benchmarks.no_such_module")
    log = tmp_path / "layers.log"
    text = gpu._run_part("layers", 30.0, log, rehearse=True)
    assert text.startswith("Failed with code 1: `")
    assert "No module named benchmarks.no_such_module`" in text
    assert gpu._run_part("layers", 4.0, log, rehearse=True) == "Not run: no time was left."


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device_it_is_refused_in_one_line() -> None:
    refused = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "needs a CUDA device" in refused.stderr


@pytest.mark.slow
@pytest.mark.waits
def test_a_machine_without_a_network_runs_it_from_wheels(tmp_path: Path) -> None:
    """The environment has what the machine of a first card has, and no index to ask."""
    wheels = tmp_path / "wheels"
    gathered = _make("gpu-wheels", f"WHEELS={wheels}")
    if "pip could not download" in gathered.stderr:
        pytest.skip("no package index can be reached")
    assert gathered.returncode == 0, gathered.stderr
    names = {path.name.partition("-")[0] for path in wheels.iterdir()}
    assert {"cyclopts", "cattrs", "tomli_w"} <= names
    assert not {"numpy", "torch", "rich"} & names
    python = _bare_environment(tmp_path / "machine", leave_out={*names, "moewright"})
    lacking = subprocess.run(
        [python, "-c", "import torch, cyclopts"], capture_output=True, text=True
    )
    assert "No module named 'cyclopts'" in lacking.stderr
    out = tmp_path / "out"
    done = _make(
        *(
            "gpu",
            f"WHEELS={wheels}",
            f"OUT={out}",
            f"PYTHON={python}",
            f"GPU_SITE={tmp_path / 'site'}",
        ),
        "GPU_OPTIONS=--rehearse --only memory --only test_scans",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (out / "rehearsal.md").read_text()
    assert "`pytest tests/gpu/test_scans.py`" in page
    states, counted = _memory_row(page)[1:3]
    assert states == counted


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", f"VENV={Path(sys.prefix)}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _bare_environment(folder: Path, leave_out: set[str]) -> Path:
    """Make an environment of links to the packages of this one; return its interpreter."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    own = Path(sysconfig.get_paths()["purelib"])
    hidden = {
        file.parts[0]
        for name in leave_out
        for file in distribution(name).files or ()
        if file.parts[0] != ".."
    }
    for path in own.iterdir():
        if path.name not in hidden and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"
