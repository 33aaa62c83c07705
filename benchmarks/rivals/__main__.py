"""`python -m benchmarks.rivals`: other planners on the published runs that ours predicts.

It writes docs/rivals.md. The rivals are not installed by this repository: a checkout of each is
named by its option, and pip installs what the rival needs under runs/rivals.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.command import run_command
from benchmarks.peers.contest import Contestant, prepare_environment
from benchmarks.rivals.cases import build_case
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.splits import SpeedPair, score_groups, speed_errors
from moewright.calibration.table import read_table
from moewright.codec import write_text

PAGE = Path("docs/rivals.md")
_FOLDER = Path("runs/rivals")
_DATA = Path("tests/published/data")
_TABLES = (_DATA / "measurements.csv", _DATA / "measurements_more.csv")
_INTRODUCTION = """# Beside other planners

The published runs of [accuracy](accuracy.md), predicted by other planners that need no GPU. Each
rival is scored on the runs that it can express, and moewright on the same runs, with constants
that were fitted without the publisher of the run. *As it comes* is what the rival answers; *with
a level* is the same times one factor, the median of measured over predicted over the runs of all
other publishers. The factor is the least that a user of a rival would fit. CPU is the median time
of one prediction.

    python -m benchmarks.rivals REPORT --simumax DIR --llm-analysis DIR

writes this page, from checkouts of the rivals and the JSON report of `moewright validate`
(`--leave-out publisher --json REPORT`).

"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another planner: the module that asks it, what that needs, and what is assumed for it."""

    name: str
    module: str
    requirements: str
    assumptions: str


SIMUMAX = Rival(
    name="SimuMax",
    module="predict_simumax",
    requirements="numpy pandas sympy tabulate matplotlib graphviz tqdm",
    assumptions=(
        "It ships kernel tables of B200 and of an A100 on PCIe, which those parts take. On other "
        "parts dense products run at 65 % of the peak, grouped ones at 50 %, and all else as its "
        "B200 file has it. Peaks, bandwidths and domains are those of the part."
    ),
)
LLM_ANALYSIS = Rival(
    name="llm-analysis",
    module="predict_llm_analysis",
    requirements="fire",
    assumptions="Products run at half of the peak, as its documentation says of Megatron-LM.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalAnswers:
    """What a rival says of the runs: seconds of a step by id, and how often it refuses, and why.

    `commit` is the checkout's, with its date.
    """

    rival: Rival
    commit: str
    step_s: Mapping[str, float]
    cpu_s: Sequence[float]
    refusals: Mapping[str, int]


def compare_planners(
    report: Path,
    /,
    *,
    simumax: Path | None = None,
    llm_analysis: Path | None = None,
) -> int:
    """Ask other planners for the published runs, and write their scores beside moewright's.

    Parameters
    ----------
    report
        The JSON of `moewright validate` of both tables, with `--leave-out publisher`.
    simumax
        A checkout of SimuMax.
    llm_analysis
        A checkout of llm-analysis.
    """
    rows = [row for row in read_table(*_TABLES).rows if row.speed and not row.duplicate_of]
    scored = json.loads(report.read_text(encoding="utf-8"))["rows"]
    own_speeds = {row["id"]: row["predicted_tokens_per_s_per_gpu"] for row in scored}
    checkouts = ((SIMUMAX, simumax), (LLM_ANALYSIS, llm_analysis))
    answers = [
        _ask_rival(rival, checkout, rows) for rival, checkout in checkouts if checkout is not None
    ]
    write_text(PAGE, "".join(_page_parts(rows, own_speeds, answers)))
    return 0


def _ask_rival(rival: Rival, checkout: Path, rows: Sequence[MeasuredRow]) -> RivalAnswers:
    environment = Contestant(name=rival.name, module=rival.module, requirements=rival.requirements)
    python = prepare_environment(environment, _FOLDER)
    run = subprocess.run(
        [str(python), "-m", f"benchmarks.rivals.{rival.module}", str(checkout)],
        input="".join(json.dumps(build_case(row)) + "\n" for row in rows),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers: list[Mapping[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    return RivalAnswers(
        rival=rival,
        commit=_read_commit(checkout),
        step_s={answer["id"]: answer["step_s"] for answer in answers if "step_s" in answer},
        cpu_s=[answer["cpu_s"] for answer in answers if "step_s" in answer],
        refusals=Counter(answer["refused"] for answer in answers if answer["refused"]),
    )


def _read_commit(checkout: Path) -> str:
    show = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %as"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


def _page_parts(
    rows: Sequence[MeasuredRow],
    own_speeds: Mapping[str, float | None],
    answers: Sequence[RivalAnswers],
) -> Iterator[str]:
    yield _INTRODUCTION
    yield "| runs | planner | count | median | p90 | rank corr. | regret | CPU |\n"
    yield "|---|---|---:|---:|---:|---:|---:|---:|\n"
    for rival_answers in answers:
        for family in ("MoE", "dense"):
            pairs = _pair_rows(rows, rival_answers.step_s, own_speeds, family)
            if pairs:
                yield from _score_lines(rival_answers, family, pairs)
    yield "\n<!-- bars: median by planner in runs -->\n"
    yield "\nRank correlation and regret are means over groups of one model on one device with "
    yield "three layouts or more.\n"
    for rival_answers in answers:
        rival = rival_answers.rival
        yield f"\n## What {rival.name} was asked\n\n"
        yield f"Commit {rival_answers.commit}. {rival.assumptions}\n\n"
        yield "| it cannot express | runs |\n|---|---:|\n"
        for reason, count in sorted(rival_answers.refusals.items(), key=lambda item: -item[1]):
            yield f"| {reason} | {count} |\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """A run with the tokens/s a device that the rival and moewright predict."""

    rival: SpeedPair
    own: SpeedPair


def _pair_rows(
    rows: Sequence[MeasuredRow],
    step_s: Mapping[str, float],
    own_speeds: Mapping[str, float | None],
    family: str,
) -> list[_Compared]:
    """Return the runs of a family that both planners predict."""
    pairs = []
    for row in rows:
        own = own_speeds.get(row.id)
        is_family = (row.model.moe is not None) == (family == "MoE")
        if row.speed is None or row.id not in step_s or own is None or not is_family:
            continue
        tokens = row.workload.global_batch * row.workload.seq_len
        predicted = tokens / step_s[row.id] / row.layout.world_size
        measured = row.speed.tokens_per_s_per_device
        rival = SpeedPair(row=row, measured=measured, predicted=predicted)
        pairs.append(_Compared(rival=rival, own=replace(rival, predicted=own)))
    return pairs


def _score_lines(answers: RivalAnswers, family: str, pairs: Sequence[_Compared]) -> Iterator[str]:
    rival_pairs = [pair.rival for pair in pairs]
    cpu_s = f"{median(answers.cpu_s):.2g} s"
    name = answers.rival.name
    runs = f"{family} that {name} expresses"
    yield _score_line(runs, f"{name}, as it comes", rival_pairs, cpu_s)
    yield _score_line(runs, f"{name}, with a level", list(_add_level(rival_pairs)), "")
    yield _score_line(runs, "moewright", [pair.own for pair in pairs], "")


def _add_level(pairs: Sequence[SpeedPair]) -> Iterator[SpeedPair]:
    """Yield predictions times the median of measured over predicted of all other publishers."""
    for pair in pairs:
        ratios = [
            other.measured / other.predicted
            for other in pairs
            if other.row.publisher != pair.row.publisher
        ]
        level = median(ratios) if ratios else 1.0
        yield replace(pair, predicted=pair.predicted * level)


def _score_line(runs: str, planner: str, pairs: Sequence[SpeedPair], cpu_s: str) -> str:
    errors = speed_errors(pairs)
    if errors is None:
        return ""
    groups = list(score_groups(pairs))
    correlation = f"{fmean(group.rank_correlation for group in groups):.2f}" if groups else ""
    regret = f"{100 * fmean(group.regret for group in groups):.1f} %" if groups else ""
    cells = [
        runs,
        planner,
        str(errors.rows),
        f"{100 * errors.median_error:.1f} %",
        f"{100 * errors.p90_error:.1f} %",
        correlation,
        regret,
        cpu_s,
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    run_command("benchmarks.rivals", compare_planners)
