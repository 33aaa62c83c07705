"""Tries of cells: the fault comes at its moment, and what holds afterwards is seen."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import tiny_jobs
from faults.bucket import Bucket
from faults.catalogue import CELLS, FAULTS, STARTS
from faults.cells import LAYOUTS, SAVE_EVERY, STEPS, Copies, Launcher, Moment, Try
from faults.program import (
    PATIENCE_S,
    Program,
    Surroundings,
    end_process,
    read_end,
    read_output,
    run_command,
    start_command,
)
from moewright.codec import read_incidents, read_json, write_json
from moewright.spec.plan import Plan
from moewright.spec.run import Incident

_MOST_STARTS = 4
_DISK_MIB = 24
# What the jobs state: how long a rank may be silent within a step, before the first one, and in it.
_HANG_TIMEOUT_S = 2.5
_START_TIMEOUT_S = 30.0
_FIRST_STEP_TIMEOUT_S = 15.0
# The longest that a silent server may delay the end of a run, and what a busy machine adds to it.
_MOST_DELAY_S = 60.0 + 30.0
# The longest until an incident is noted, and until the first step after it, on a busy machine. A
# silent server is one after its own deadline, and ranks that do not meet after 60 s. When the first
# rank begins its first step, others may still be before theirs.
_MOST_NOTICE_S = 30.0
_MOST_MEETING_S = 60.0 + 30.0
_MOST_DOWN_S = 60.0
_NO_BITE = "no bite"
_HELD = "held"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of a try: "held", "no bite", or what did not hold, and the first incident's times.

    A time is -1 where there was no incident, or no step after it.
    """

    verdict: str
    notice_s: float = -1.0
    down_s: float = -1.0
    repeated_steps: int = -1

    @property
    def has_bitten(self) -> bool:
        return self.verdict != _NO_BITE

    @property
    def has_held(self) -> bool:
        return self.verdict == _HELD


class Studio:
    """A studio over the folders of the tries, as users start it."""

    def __init__(self, root: Path) -> None:
        output = root / "studio.log"
        output.unlink(missing_ok=True)
        words = ["moewright", "studio", "--root", str(root), "--port", "0"]
        self._process = start_command(words, output, environment={"PYTHONUNBUFFERED": "1"})
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := re.findall(r"http://([^/]+)/\?token=(\S+)", read_output(output))):
            assert self._process.is_alive(), read_output(output)
            assert time.monotonic() < deadline_s, "the studio does not start"
            time.sleep(0.05)
        self._address, token = found[0]
        self._headers = {"authorization": f"Bearer {token}"}

    def ask(self, folder: str) -> int:
        """Return the status of the answer about a run."""
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        connection.request("GET", f"/api/run?run={folder}", headers=self._headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def close(self) -> None:
        end_process(self._process)


class Laboratory:
    """A corpus, and what each layout records without a fault, which stays in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = tiny_jobs.write_corpus(folder / "corpus")
        self._lock = Lock()
        self._studios: list[Studio] = []

    def close(self) -> None:
        """End the studio."""
        for studio in self._studios:
            studio.close()

    def try_cell(self, cell: Try, name: str) -> Result:
        """Inject the fault of a cell, and say what came of it."""
        rng = random.Random(name)
        surroundings = CELLS[FAULTS[cell.fault]].surroundings
        program = Program(
            cell=cell,
            plan=self._write_plan(cell, name, surroundings),
            folder=self._folder / name,
            surroundings=surroundings,
        )
        self._find_curve(cell)
        with contextlib.ExitStack() as stack:
            if surroundings is Surroundings.DISK and not _mount_disk(program.folder, stack):
                return Result(verdict=_NO_BITE)
            if cell.copies is Copies.BUCKET:
                program.bucket = Bucket()
                stack.callback(program.bucket.close)
                program.environment |= program.bucket.environment()
                program.bucket.make()
            stack.callback(self._clear, program)
            if not self._inject(program, rng):
                return Result(verdict=_NO_BITE)
            code = program.wait()
            if code is None:
                return Result(verdict=f"did not end; {read_end(program.output)}")
            if not _has_bitten(program, code):
                return Result(verdict=_NO_BITE)
            incidents = _read_later_incidents(program)
            return _add_times(self._judge(program, code), incidents, program)

    def _clear(self, program: Program) -> None:
        program.end()
        for path in (program.folder, Path(f"{program.folder}-copies")):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f"{program.folder.name}.*"):
            path.unlink()

    def _write_plan(self, cell: Try, name: str, surroundings: Surroundings) -> Path:
        workload = tiny_jobs.build_workload(
            self._data,
            steps=STEPS,
            global_batch=4,
            hang_timeout_s=_HANG_TIMEOUT_S,
            start_timeout_s=_START_TIMEOUT_S,
            first_step_timeout_s=_FIRST_STEP_TIMEOUT_S,
            check_every=int(surroundings is Surroundings.ADDRESSES),
        )
        targets = {
            Copies.NONE: "",
            Copies.FOLDER: str(self._folder / f"{name}-copies"),
            Copies.BUCKET: f"s3://bucket/{name}",
        }
        checkpoint = replace(
            workload.checkpoint,
            every_steps=SAVE_EVERY,
            copy_to=targets[cell.copies],
            peer_every_steps=cell.peer_every,
        )
        workload = replace(workload, checkpoint=checkpoint)
        plan = tiny_jobs.build_plan(workload, cell.layout, world_size=cell.world_size)
        path = self._folder / f"{name}.json"
        write_json(path, plan)
        return path

    def _find_curve(self, cell: Try) -> list[tuple[int, float, float]]:
        """Return the losses and norms of the layout without a fault."""
        name = f"whole-{LAYOUTS.index((cell.world_size, cell.layout))}"
        with self._lock:
            folder = self._folder / name
            whole = replace(
                cell, copies=Copies.NONE, launcher=Launcher.OWN, is_elastic=False, peer_every=0
            )
            plan = self._write_plan(whole, name, Surroundings.PLAIN)
            if not _holds_whole_run(folder, plan):
                shutil.rmtree(folder, ignore_errors=True)
                program = Program(cell=whole, plan=plan, folder=folder)
                program.start()
                assert program.wait() == 0, read_end(program.output)
            return _read_curve(folder)

    def _inject(self, program: Program, rng: random.Random) -> bool:
        moment = program.cell.moment
        fault = FAULTS[program.cell.fault]
        is_before = CELLS[fault].before_start and moment in STARTS
        if not (is_before and moment is Moment.START):
            program.start()
        if moment is Moment.RESTORE:
            step = rng.randint(2 * SAVE_EVERY + 1, 3 * SAVE_EVERY - 2)
            if not program.wait_for(lambda: program.count_steps() >= step):
                return False
            program.end()
            if not is_before:
                program.start()
        if is_before:
            program.injected_s = time.time()
            is_done = fault(program, rng)
            program.start()
            return is_done
        if not _wait_for_moment(program, moment, rng):
            return False
        program.injected_s = time.time()
        return fault(program, rng)

    def _judge(self, program: Program, code: int) -> str:
        told = read_output(program.output)
        # A rank's own error has its traceback, and torchrun has many.
        is_own = any(" failed " in one.message for one in _read_later_incidents(program))
        if "Traceback" in told and program.cell.launcher is Launcher.OWN and not is_own:
            return f"a traceback: {read_end(program.output)}"
        code, broken = _judge_beside(program, code)
        broken = broken or _judge_copies(program, code)
        starts = 1
        while not broken and code != 0 and starts < _MOST_STARTS:
            program.start()
            again = program.wait()
            if again is None:
                return f"did not end when started again; {read_end(program.output)}"
            code = again
            starts += 1
        if not broken and code != 0:
            broken = f"exit code {code} after {starts} starts: {read_end(program.output)}"
        if not broken and _read_curve(program.folder) != self._find_curve(program.cell):
            broken = "losses differ"
        return broken or self._ask(program) or _HELD

    def _ask(self, program: Program) -> str:
        """Say what does not answer about the run."""
        for verb in ("report", "diagnose"):
            code, told = run_command(
                ["moewright", verb, str(program.folder)], program.folder.with_suffix(".answer")
            )
            if code != 0:
                return f"{verb} ends with {code}: {told.strip()[-200:]}"
        with self._lock:
            self._studios = self._studios or [Studio(self._folder)]
        status = self._studios[0].ask(program.folder.name)
        return "" if status == 200 else f"the studio answers {status}"


def _wait_for_moment(program: Program, moment: Moment, rng: random.Random) -> bool:
    last = {Moment.LAST_STEP: STEPS - 1, Moment.END: STEPS}
    step = last.get(moment, rng.randint(2 * SAVE_EVERY + 1, STEPS - SAVE_EVERY + 1))
    has_come = program.wait_for(program.list_ranks)
    if moment is Moment.SAVE:
        saving = program.folder / "checkpoints"
        has_come = program.wait_for(lambda: any(saving.glob(".saving-*")))
    elif moment is Moment.FIRST_STEP:
        has_come = program.wait_for((program.folder / "steps.jsonl").exists)
    elif moment not in STARTS:
        has_come = program.wait_for(lambda: program.count_steps() >= step)
    if has_come and moment in (*STARTS, Moment.STEP):
        time.sleep(rng.uniform(0.0, 0.3))
    return has_come


def _has_bitten(program: Program, code: int) -> bool:
    """Tell whether the run has noticed the fault, or was ended by it."""
    mark = program.environment.get("JUMPING_CLOCK_MARK")
    if mark:
        return Path(mark).exists()
    if not CELLS[FAULTS[program.cell.fault]].noticed:
        return True
    return code != 0 or bool(_read_later_incidents(program))


def _read_later_incidents(program: Program) -> list[Incident]:
    incidents = read_incidents(program.folder)
    return [incident for incident in incidents if incident.unix_s > program.injected_s - 1.0]


def _add_times(verdict: str, incidents: Sequence[Incident], program: Program) -> Result:
    if not incidents:
        return Result(verdict=verdict)
    first = incidents[0]
    notice_s = max(0.0, first.unix_s - program.injected_s)
    down_s = first.down_s
    most_s = _MOST_DELAY_S if program.bucket is not None else _MOST_NOTICE_S
    if program.cell.moment in (*STARTS, Moment.FIRST_STEP):
        most_s = max(most_s, _MOST_MEETING_S)
    if verdict == _HELD and notice_s > most_s:
        verdict = f"noticed after {notice_s:.1f} s"
    if verdict == _HELD and down_s > _MOST_DOWN_S:
        verdict = f"went on after {down_s:.1f} s"
    return Result(
        verdict=verdict,
        notice_s=round(notice_s, 2),
        down_s=round(down_s, 2) if down_s > 0 else -1.0,
        repeated_steps=first.repeated_steps,
    )


def _judge_beside(program: Program, code: int) -> tuple[int, str]:
    """Return the better exit code of the commands given at once, and what was wrong with them."""
    if not program.beside:
        return code, ""
    (process,) = program.beside
    process.join(PATIENCE_S)
    codes = sorted((code, -1 if process.exitcode is None else process.exitcode))
    told = read_output(program.output) + read_output(program.folder.with_suffix(".beside"))
    # The second may also come when the first has ended, and finds all steps done.
    if codes == [0, 0] or (codes == [0, 2] and "is in use by another job" in told):
        return 0, ""
    return 0, f"two jobs in one folder ended with {codes}: {told.splitlines()[-2:]}"


def _judge_copies(program: Program, code: int) -> str:
    """Say what a run without its bucket has done wrong, and bring the bucket back."""
    if program.bucket is None:
        return ""
    program.bucket.come_back()
    if not CELLS[FAULTS[program.cell.fault]].before_start:
        return ""
    if program.cell.moment is Moment.START:
        is_own = program.cell.launcher is Launcher.OWN  # torchrun ends with 1
        is_refused = code == (2 if is_own else 1)
        is_refused &= "checkpoint.copy_to" in read_output(program.output)
        end = read_end(program.output)
        return "" if is_refused else f"was not refused, but ended with {code}: {end}"
    delay_s = time.time() - (program.folder / "steps.jsonl").stat().st_mtime
    if code == 0 and delay_s > _MOST_DELAY_S:
        return f"the end came {delay_s:.0f} s after the last step"
    return ""


def _mount_disk(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Give a folder a small file system of its own; return whether this machine allows that."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        return False
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
    return True


def _holds_whole_run(folder: Path, plan: Path) -> bool:
    """Tell whether a folder has all steps of this plan, of now or of an earlier start."""
    kept = folder / "plan.json"
    is_same = kept.exists() and read_json(Plan, kept) == read_json(Plan, plan)
    return is_same and len(_read_curve(folder)) == STEPS


def _read_curve(folder: Path) -> list[tuple[int, float, float]]:
    rows = {row["step"]: (row["loss"], row["grad_norm"]) for row in tiny_jobs.read_steps(folder)}
    return [(step, *rows[step]) for step in sorted(rows)]
