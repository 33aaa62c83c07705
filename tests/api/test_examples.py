"""Every script in examples/ runs as it stands."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# A line that each prints when it has come to its point.
SHOWN = {
    "diagnose_a_trace": "to try: ",
    "own_hardware_file": "wrote ",
    "plan_a_cluster": " s a step in place of ",
    "read_a_megatron_script": "the planner's own layout is ",
    "train_and_change_layout": "step 20: loss ",
    "why_not_this_layout": "seconds by part, GiB by component",
}
QUICK = {"plan_a_cluster", "read_a_megatron_script"}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in SHOWN],
)
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SHOWN[name] in capfd.readouterr().out


@pytest.mark.thorough  # a kernel of Jupyter's, and a search
def test_the_cookbook_runs() -> None:
    notebook = nbformat.read(EXAMPLES / "cookbook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells)
    assert "steps are slower" in str(cells[-1].outputs)
