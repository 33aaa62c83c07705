"""`train` joins floors: which plan it runs, when it plans anew, what it refuses.

The search, the engine and the measuring of the machine are replaced by stand-ins.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import sample_run
from moewright.api.reporting import RunReport
from moewright.cli.main import main
from moewright.codec import (
    fingerprint,
    format_layout,
    parse_layout,
    read_json,
    write_json,
    write_toml,
)
from moewright.engine.run.launch import LaunchHooks
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.search import search
from moewright.search.space import Objections
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload

RECIPE = Path(__file__).resolve().parents[2] / "recipes/quickstart_2cpu_bf16.toml"

SEARCH = search.search
Start = Callable[..., int]


class Stage:
    """The stand-ins, which record how they were called."""

    def __init__(self) -> None:
        self.searches: list[str] = []
        self.runs: list[tuple[Plan, Path, bool]] = []
        self.reports: list[Path] = []
        self.measured: list[int] = []
        self.falls_back = False
        self.prints_steps = False
        self.code = 0

    def search(
        self,
        model: ModelSpec,
        workload: Workload,
        hardware: Hardware,
        *,
        fixed: str,
        top: int,
        allowed: Objections,
    ) -> SimpleNamespace:
        beyond_engine = parse_layout("overlap=ep,zero3", world_size=hardware.count)
        job = Job(model=model, workload=workload, layout=beyond_engine)
        assert allowed(beyond_engine) == unsupported_layout(job) != ()
        self.searches.append(fixed)
        layout = parse_layout(fixed, world_size=hardware.count)
        plan = Plan(
            model=model,
            workload=workload,
            hardware=hardware,
            layout=layout,
            estimate=sample_run.estimate(),
            fingerprint=fingerprint(model, workload, hardware, layout),
        )
        return SimpleNamespace(plans=(plan,), rejected=(), why=())

    def run(
        self, plan: Plan, run_dir: Path, *, extend: bool, falls_back: bool, hooks: LaunchHooks
    ) -> int:
        self.falls_back = falls_back
        self.prints_steps = hooks.display.prints_steps
        self.runs.append((plan, run_dir, extend))
        write_json(run_dir / "plan.json", plan)
        return self.code

    def check_data(self, model: ModelSpec, workload: Workload) -> str:
        if "nowhere" in workload.data.train:
            raise BadInput(Reason(field=f"{workload.data.train}.idx", rule="does not exist"))
        return "fingerprint"

    def measure(self, *, nproc: int) -> Hardware:
        self.measured.append(nproc)
        return sample_run.hardware(nproc)

    def report(self, run: Path, out: Path) -> Path:
        self.reports.append(out)
        return out


def replace_search(monkeypatch: pytest.MonkeyPatch, search: Callable[..., object]) -> None:
    """Replace the search where it is defined and where the face has imported it."""
    # The face comes first: were it imported later, it would keep the replacement.
    monkeypatch.setattr("moewright.api.planning.search", search)
    monkeypatch.setattr("moewright.search.search.search", search)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    replace_search(monkeypatch, stage.search)
    monkeypatch.setattr("moewright.engine.run.train.train", stage.run)
    monkeypatch.setattr("moewright.engine.data.preflight.check_data", stage.check_data)
    monkeypatch.setattr("moewright.bench.machine.measure_machine", stage.measure)
    report = RunReport(run=sample_run.record(steps=40), findings=(), comparisons=())
    monkeypatch.setattr("moewright.api.reporting.build_report", lambda run: report)
    monkeypatch.setattr("moewright.api.reporting.write_page", stage.report)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return stage


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a call of `train` on the quickstart recipe, with its files in `tmp_path`."""
    write_toml(tmp_path / "machine.toml", sample_run.hardware(2))
    common = [
        "train",
        str(RECIPE),
        "--out",
        str(tmp_path / "run"),
        "--set",
        f"train.hardware={tmp_path}/machine.toml",
    ]
    return lambda *more: main([*common, *more])


def test_the_first_start_plans_and_reports(stage: Stage, start: Start, tmp_path: Path) -> None:
    assert start() == 0
    ((plan, run_dir, extend),) = stage.runs
    assert format_layout(plan.layout) == "tp1,pp1,ep2,mbs1"
    assert plan.layout.world_size == plan.hardware.count == 2
    assert run_dir == tmp_path / "run"
    assert not extend
    assert read_json(Plan, run_dir / "plan.json") == plan
    assert stage.reports == [run_dir / "report.html"]
    assert stage.measured == []


def test_a_run_ends_in_six_lines_and_is_quiet_where_asked(
    stage: Stage, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start() == 0
    assert stage.prints_steps
    names = ["learned", "speed", "wall", "health", "kept", "next"]
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[0] for line in lines] == names
    assert "loss " in lines[0]
    assert "predicted" in lines[1] or "a step" in lines[1]
    assert "report.html" in lines[4]
    assert f"moewright diagnose {tmp_path / 'run'}" in lines[5]
    assert start("--quiet", "--extend") == 0
    assert not stage.prints_steps


def test_the_second_start_takes_up_the_plan(stage: Stage, start: Start) -> None:
    start()
    assert start("--extend") == 0
    assert stage.searches == ["tp=1,ep=2"]
    first, second = stage.runs
    assert first[0] == second[0]
    assert second[2]


def test_a_start_falls_back_when_asked_to(stage: Stage, start: Start) -> None:
    start()
    assert not stage.falls_back
    assert start("--fall-back") == 0
    assert stage.falls_back


def test_fewer_ranks_go_with_a_supervisor(
    stage: Stage, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--min-ranks", "1") == 2
    assert "--min-ranks=1: goes with --supervise" in capsys.readouterr().err
    assert start("--supervise", "--min-ranks", "0") == 2
    assert "--min-ranks=0: must be at least 1" in capsys.readouterr().err
    assert not stage.runs


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.lr=1e-3", "optimizer"),
        ("train.steps=7", "steps"),
        ("layout.mbs=2", "mbs"),
        ("train.seed=1", "seed"),
    ],
)
def test_a_changed_job_is_planned_anew(
    change: str, named: str, stage: Stage, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    assert start("--set", change) == 0
    assert len(stage.searches) == 2
    assert f"plan.json is not of this job ({named}): planning again" in capsys.readouterr().out


def test_other_hardware_is_planned_anew(stage: Stage, start: Start, tmp_path: Path) -> None:
    start()
    write_toml(tmp_path / "machine.toml", sample_run.hardware(4))
    assert start() == 0
    assert len(stage.searches) == 2
    assert start("--nproc", "4") == 0
    assert stage.runs[-1][0].layout.world_size == 4


def test_a_plan_of_another_model_is_replaced_while_nothing_ran(stage: Stage, start: Start) -> None:
    start()
    assert start("--set", "model.config=Qwen3-30B-A3B") == 0
    assert stage.runs[-1][0].model.name == "Qwen/Qwen3-30B-A3B"


def test_a_run_of_another_model_is_refused(
    stage: Stage, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    (tmp_path / "run" / "steps.jsonl").write_text("")
    capsys.readouterr()
    assert start("--set", "model.config=Qwen3-30B-A3B") == 2
    error = capsys.readouterr().err
    assert f"--out={tmp_path}/run: holds a run of another model (quickstart)" in error
    assert len(error.splitlines()) == 1
    assert len(stage.runs) == 1


def test_a_run_goes_on_where_the_folder_of_its_config_has_moved(
    stage: Stage, start: Start, tmp_path: Path
) -> None:
    start()
    (tmp_path / "run" / "steps.jsonl").write_text("")
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(RECIPE.parent / "quickstart/config.json", moved)
    assert start("--set", f"model.config={moved}/config.json") == 0
    assert len(stage.searches) == 1
    assert stage.runs[1][0] == stage.runs[0][0]


def test_an_unmeasured_machine_is_measured(stage: Stage, start: Start, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").unlink()
    assert start() == 0
    assert stage.measured == [2]
    assert (tmp_path / "machine.toml").exists()


def test_a_failed_rank_gives_its_code_and_no_report(stage: Stage, start: Start) -> None:
    stage.code = 3
    assert start() == 3
    assert stage.reports == []


def test_under_torchrun_one_rank_writes(
    stage: Stage,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert start() == 0
    assert stage.runs[0][0].layout.world_size == 2
    assert stage.reports == []
    capsys.readouterr()
    assert start("--nproc", "4") == 2
    assert (
        "--nproc=4: is not the number of processes torchrun started; nearest legal value: 2"
        in capsys.readouterr().err
    )
    (tmp_path / "machine.toml").unlink()
    assert start() == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.steps=0", "train.steps=0: must be at least 1"),
        (
            "train.grad_dtype=fp16",
            "fp16 has too little range to accumulate in; nearest legal value: fp32",
        ),
        ("layout.eq=2", "nearest legal value: ep"),
        ("tarin.lr=1", "nearest legal value: train"),
        ("data.train=nowhere", "nowhere.idx: does not exist"),
        ("train.moment_dtype=fp16", "train.moment_dtype=fp16: fp16 has too little range"),
        ("train.moment_dtype=nvfp4", "must be fp32 or bf16 or fp8; nearest legal value: fp8"),
        ("train.second_moment_dtype=mxfp8", "must be fp32 or bf16 or fp8"),
        ("train.grad_dtype=fp8", "must be fp32 or bf16; nearest legal value: bf16"),
        ("train.lr", "must be section.key=value"),
    ],
)
def test_a_job_that_cannot_be_trained_writes_nothing(
    change: str,
    message: str,
    stage: Stage,
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert start("--set", change) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layout.ep=3", ": layout.ep=3"),
        ("layout.tp=3", ": layout.tp=3"),
        ("layout.cp=3", ": layout.cp=3"),
        ("layout.mbs=3", ": layout.mbs=3"),
        ("layout.dp=3", ": layout.dp=3"),
    ],
)
def test_pins_that_leave_no_layout_are_named(
    change: str, message: str, stage: Stage, start: Start, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    replace_search(monkeypatch, SEARCH)
    assert start("--set", change) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith(f"moewright: {RECIPE.name}: ")
    assert "nearest legal value" in err
    assert len(err.splitlines()) == 1


def test_a_machine_is_not_measured_for_a_job_without_a_layout(
    stage: Stage,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_search(monkeypatch, SEARCH)
    (tmp_path / "machine.toml").unlink()
    assert start("--nproc", "3") == 2
    assert "layout.ep=2: etp * ep = 2 must divide the 3 ranks" in capsys.readouterr().err
    assert start("--set", "data.train=nowhere") == 2
    assert stage.measured == []


def test_a_plan_edited_by_hand_is_planned_anew(
    stage: Stage, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    path = tmp_path / "run" / "plan.json"
    path.write_text(
        path.read_text().replace('"bucket_elements": 40000000', '"bucket_elements": 4000')
    )
    assert start() == 0
    assert "(optimizer, fingerprint): planning again" in capsys.readouterr().out


def test_a_torn_plan_file_is_named(
    stage: Stage, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text('{"model": {')
    assert start() == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/run/plan.json: is not JSON" in error
    assert "nearest legal value: delete it to plan again" in error


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Return the path of a plan that was written apart from any run."""
    path = tmp_path / "best.json"
    write_json(path, sample_run.plan())
    return path


def test_a_plan_is_trained_as_it_stands(stage: Stage, plan_file: Path, tmp_path: Path) -> None:
    assert main(["train", str(plan_file), "--out", str(tmp_path / "run")]) == 0
    ((plan, run_dir, _),) = stage.runs
    assert plan == sample_run.plan()
    assert run_dir == tmp_path / "run"
    assert stage.searches == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--out: is needed with a plan"),
        (("--out", "run", "--set", "train.lr=1"), "--set=train.lr=1: changes keys of a job file"),
        (("--out", "run", "--nproc", "1"), "--nproc=1: is not the world size of the plan"),
    ],
)
def test_a_plan_takes_no_other_values(
    options: tuple[str, ...],
    message: str,
    stage: Stage,
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(plan_file), *options]) == 2
    assert message in capsys.readouterr().err
    assert stage.runs == []
