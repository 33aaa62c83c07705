"""Inject every fault of matrix.toml into supervised runs, and write the table of what held.

    python tests/faults/run.py                       every case at five moments (`make faults`)
    python tests/faults/run.py --moments 1 KEY ...   some faults, by their key
    python tests/faults/run.py --jobs 2              two cases at a time

The exit status is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import tiny_jobs  # noqa: E402
from faults import harness  # noqa: E402
from faults.harness import FaultNotPossible, SupervisedRun  # noqa: E402
from faults.program import find_section, replace_section  # noqa: E402
from moewright.codec import read_incidents  # noqa: E402
from moewright.engine.run.train import train  # noqa: E402

TABLE = TESTS.parent / "docs/reference/faults.md"
_HEAD = """# The fault matrix

`make faults` injects each fault into a supervised run of two ranks (gloo) at random moments;
`tests/faults/matrix.toml` says what must hold. In every case the losses and gradient norms of all
steps equal those of the run without a fault, bit for bit. Times are medians, and the longest; the
time to go on ends with the first step after. They were taken on two cores, beside other work.
What other libraries state is below.

Then `tests/faults/program.py` draws cells of fault, layout (TP, PP, EP, CP, ZeRO-1 to 3), moment
(start, restore, first step, a step, a save, last step, after it), launcher (own, torchrun), elastic
or not, in place or not, with copies (in a folder, in a bucket of S3) or not, and runs them by the
command line. A try in which the run noticed nothing, and was not ended, is not counted; after each
the losses are those without a fault, bit for bit, and `report`, `diagnose` and the studio answer. A
number of a seed is the same cell again.

| fault | tried | held | time to notice, s | time to go on, s | steps repeated |
|---|--:|--:|--:|--:|--:|
"""
_FOOT = """
## What others promise

As their documents say it; none of it was run here.

| fault | torchft [1] | NVRx [2] | Megatron-LM [3] | here |
|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row of the matrix."""

    name: str
    fault: str
    incident: str = ""
    exit: int = 0
    notice_s: float = 0.0
    go_on_s: float = 0.0
    may_pass: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a fault: `broken` says what did not hold, "" where all did."""

    broken: str
    notice_s: float = 0.0
    go_on_s: float = 0.0
    repeated_steps: int = 0


def read_matrix() -> tuple[Case, ...]:
    """Read the cases of matrix.toml."""
    data = tomllib.loads(Path(__file__).with_name("matrix.toml").read_text("utf-8"))
    return tuple(Case(**case) for case in data["case"])


class Bench:
    """The plan that all runs follow, and what the run without a fault recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = tiny_jobs.write_corpus(folder / "corpus")
        self.plan = harness.build_plan(data)
        self.checked_plan = harness.build_plan(data, check_every=1)
        assert train(self.plan, folder / "whole") == 0
        self.expected = _read_curve(folder / "whole")

    def try_case(self, case: Case, seed: int) -> Outcome:
        """Inject the fault of a case at a random moment, and say what held.

        Raises:
            FaultNotPossible: where this machine has not what the fault needs.
        """
        folder = self.folder / f"{case.fault}-{seed}"
        with contextlib.ExitStack() as stack:
            if case.fault in harness.NEEDS_DISK:
                stack.enter_context(harness.own_disk(folder))
            with contextlib.ExitStack() as start:
                if case.fault in harness.NEEDS_CLOCK:
                    start.enter_context(harness.jumping_clock())
                own_network = case.fault in harness.NEEDS_NETWORK
                plan = self.checked_plan if case.fault in harness.NEEDS_CHECKS else self.plan
                run = SupervisedRun(plan, folder, own_network=own_network)
            try:
                return self._watch(run, case, random.Random(f"{case.fault} {seed}"))
            except (AssertionError, subprocess.SubprocessError) as error:
                return Outcome(broken=str(error) or "an assertion")
            finally:
                run.process.kill()
                run.process.join()

    def _watch(self, run: SupervisedRun, case: Case, rng: random.Random) -> Outcome:
        run.wait_for_moment(rng, last=8 if case.fault in harness.NEEDS_TIME else harness.STEPS // 2)
        run.injected_s = time.time()
        harness.FAULTS[case.fault](run, rng)
        run.process.join(harness.PATIENCE_S)
        if run.process.exitcode != case.exit:
            return Outcome(broken=f"exit code {run.process.exitcode}: {_last_line(run)}")
        if case.exit:
            run.start_again()
            run.process.join(harness.PATIENCE_S)
            if run.process.exitcode != 0:
                return Outcome(broken=f"did not go on: {_last_line(run)}")
        return self._judge(run, case)

    def _judge(self, run: SupervisedRun, case: Case) -> Outcome:
        incidents = read_incidents(run.folder)
        kinds = {incident.kind.value for incident in incidents}
        expected_kinds = {case.incident} - {""}
        if case.may_pass and not kinds:
            expected_kinds = set()
        broken = ""
        if _read_curve(run.folder) != self.expected:
            broken = "losses differ"
        elif not case.exit and kinds != expected_kinds:
            broken = f"incidents {sorted(kinds)}"
        elif case.exit and "Traceback" in run.log.read_text():
            broken = f"a traceback: {_last_line(run)}"
        if case.exit or not incidents:
            return Outcome(broken=broken)
        notice_s = incidents[0].unix_s - run.injected_s
        go_on_s = max(incident.down_s for incident in incidents)
        if not broken and notice_s > case.notice_s:
            broken = f"noticed after {notice_s:.1f} s"
        elif not broken and go_on_s > case.go_on_s:
            broken = f"went on after {go_on_s:.1f} s"
        return Outcome(
            broken=broken,
            notice_s=notice_s,
            go_on_s=go_on_s,
            repeated_steps=sum(incident.repeated_steps for incident in incidents),
        )


def _format_promises() -> str:
    """Return the table of what other libraries state, with the sources."""
    data = tomllib.loads(Path(__file__).with_name("promises.toml").read_text("utf-8"))
    columns = ("fault", "torchft", "nvrx", "megatron", "here")
    rows = ["| " + " | ".join(row[column] for column in columns) + " |" for row in data["row"]]
    sources = [f"{number}. {source}" for number, source in enumerate(data["sources"], 1)]
    return _FOOT + "\n".join(rows) + "\n\n" + "\n".join(sources) + "\n"


def _read_curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in tiny_jobs.read_steps(folder)]


def _last_line(run: SupervisedRun) -> str:
    return next(reversed(run.log.read_text().splitlines()), "")[:200]


def _format_row(case: Case, outcomes: Sequence[Outcome]) -> str:
    held = sum(not outcome.broken for outcome in outcomes)
    seen = [outcome for outcome in outcomes if outcome.go_on_s]
    cells = ["", "", ""]
    if seen:
        notices = [outcome.notice_s for outcome in seen]
        ways_on = [outcome.go_on_s for outcome in seen]
        repeated = [outcome.repeated_steps for outcome in seen]
        cells = [
            f"{statistics.median(notices):.1f} (≤ {max(notices):.1f})",
            f"{statistics.median(ways_on):.1f} (≤ {max(ways_on):.1f})",
            f"{statistics.median(repeated):g} (≤ {max(repeated)})",
        ]
    return f"| {case.name} | {len(outcomes)} | {held} | {' | '.join(cells)} |"


def _try_cases(cases: Sequence[Case], moments: int) -> dict[str, list[Outcome]]:
    """Try each case at so many moments; a case that is not possible here has fewer outcomes."""
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for case in cases:
            outcomes[case.fault] = []
            for seed in range(moments):
                try:
                    outcome = bench.try_case(case, seed)
                except FaultNotPossible as reason:
                    print(f"{case.name}: left out, {reason}", flush=True)
                    break
                outcomes[case.fault].append(outcome)
                print(f"{case.name} {seed}: {outcome.broken or 'held'}", flush=True)
    return outcomes


def _run_share(cases: Sequence[Case], moments: int, results: Connection) -> None:
    results.send(_try_cases(cases, moments))


def main() -> int:
    """Run the matrix; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help="keys of faults; all when none is there")
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="so many cases at a time")
    arguments = parser.parse_args()
    chosen = [
        case for case in read_matrix() if not arguments.faults or case.fault in arguments.faults
    ]
    context = multiprocessing.get_context("fork")
    pipes = []
    for job in range(arguments.jobs):
        receiver, sender = context.Pipe(duplex=False)
        share = chosen[job :: arguments.jobs]
        context.Process(target=_run_share, args=(share, arguments.moments, sender)).start()
        sender.close()
        pipes.append(receiver)
    outcomes: dict[str, list[Outcome]] = {}
    for receiver in pipes:
        outcomes |= receiver.recv()
    rows = [_format_row(case, outcomes[case.fault]) for case in chosen]
    print("\n".join(rows), flush=True)
    if not arguments.faults:
        section = find_section(TABLE.read_text("utf-8"))
        text = _HEAD + "\n".join(rows) + "\n" + _format_promises()
        TABLE.write_text(replace_section(text, section) if section else text, "utf-8")
    return int(any(outcome.broken for tried in outcomes.values() for outcome in tried))


if __name__ == "__main__":
    sys.exit(main())
