"""The Python face: documented with examples that run, short to print, quick to import."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest

import moewright as mw
import sample_run
from moewright.codec import format_record, to_data, write_json
from moewright.spec.errors import BadInput

TABLE = Path(__file__).parents[1] / "published" / "data" / "measured_steps.csv"
FUNCTIONS = [name for name in mw.__all__ if name not in ("BadInput", "Reason", "__version__")]
SLOW = ("fit", "design", "budget")


@pytest.fixture(scope="module")
def plans():
    return mw.plan("Qwen3-30B-A3B", on="8xH100", top=2)


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the examples name: a table, a run of this engine, a script."""
    folder = tmp_path_factory.mktemp("examples")
    lines = TABLE.read_text().splitlines(keepends=True)
    (folder / "measurements.csv").write_text("".join(lines[:13]))
    run = folder / "runs" / "quickstart"
    record = sample_run.record()
    write_json(run / "plan.json", record.plan)
    parts = (*record.sessions, *record.steps, *record.evals)
    (run / "steps.jsonl").write_text("".join(map(format_record, parts)))
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
    (folder / "run.sh").write_text(mw.export(plan, to="megatron"))
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in FUNCTIONS],
)
def test_every_function_has_an_example_that_runs(
    name: str, example_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example_folder)
    function = getattr(mw, name)
    assert function.__doc__
    example = doctest.DocTestParser().get_doctest(function.__doc__, {}, name, None, None)
    assert example.examples, f"{name} has no example"
    runner = doctest.DocTestRunner()
    output: list[str] = []
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)


def test_results_print_short_and_convert(plans) -> None:
    best = plans.best
    results = [plans, best, best.estimate, best.model, best.workload, best.hardware]
    results += [mw.why_not(plans, "tp8,mbs8"), mw.compare(*plans), mw.models(), mw.hardware()]
    for result in results:
        assert len(repr(result).splitlines()) <= 25
        assert "<table>" in result._repr_html_()
        assert result.to_rows()
        json.dumps(result.to_dict())
    assert best.to_dict() == to_data(best)


def test_import_takes_less_than_a_third_of_a_second_and_no_torch() -> None:
    code = (
        "import resource, sys, moewright; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_torch = done.stdout.split()
    assert float(seconds) < 0.3
    assert has_torch == "False"


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, moewright as mw; mw.estimate('Qwen3-30B-A3B', 'ep8', on='8xH100'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_python_m_moewright_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moewright", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.strip() == mw.__version__


def test_a_plan_is_estimated_again_and_with_other_figures(plans, tmp_path: Path) -> None:
    best = plans.best
    assert mw.estimate(best).estimate == best.estimate
    longer = mw.estimate(best, seq_len=8192)
    assert longer.workload.seq_len == 8192
    assert longer.estimate.step_s > best.estimate.step_s
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(best.to_dict()))
    assert mw.estimate(path).estimate == best.estimate


def test_the_example_of_the_package_runs() -> None:
    assert doctest.testmod(mw).failed == 0


def test_refusals_are_bad_input() -> None:
    with pytest.raises(BadInput, match="precision"):
        mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100", precision="bf17")
    with pytest.raises(BadInput, match="--to"):
        mw.export(mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100"), to="megatro")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        _ = mw.no_such_name


def test_a_notebook_shows_choices_of_a_layout_and_a_refusal_in_one_block(plans) -> None:
    layout = plans.best.layout
    assert f"<td>{layout.mbs}</td>" in layout._repr_html_()
    assert f"world_size={layout.world_size}" in repr(layout)
    assert "\n" not in repr(layout)
    with pytest.raises(mw.BadInput) as refusal:
        mw.estimate("Qwen3-30B-A3B", "tp3,ep7", on="16xH100")
    block = refusal.value._render_traceback_()
    assert len(block) == len(refusal.value.reasons) > 1
    assert block[0].startswith("BadInput: --layout tp=3")
