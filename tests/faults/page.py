"""The page of the fault matrix: what was tried and held, beside what others promise."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from faults.catalogue import FAULTS
from faults.cells import LAYOUTS, Copies, Launcher, Moment
from faults.tries import Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/faults.md"
_HEAD = """# The fault matrix

`make faults` draws cells of fault, layout (TP, PP, EP, CP, ZeRO-1 to 3), moment, launcher, elastic
or not, in place or not, with copies (in a folder, in a bucket of S3) or not, and runs each by the
command line, on this machine's CPUs (gloo). A number of a seed is the same cell again. A try in
which the run noticed nothing, and was not ended, is not counted. One has held where

* the run went on by itself, or with the same command once the fault was gone;
* the losses and gradient norms of all steps are those of the run without a fault, bit for bit;
* no traceback is printed, and no process is left;
* `report`, `diagnose` and the studio answer about the run.

{counts}
Where a number has a slash, fewer held than bit. "In place": ranks keep copies of their state for
each other, and the healthy ones stay.

| fault | bit | own | torchrun | elastic | in place | copies | noticed, s | on after, s | repeated |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
{faults}

Times, and steps that were repeated, are medians and, in brackets, the most; the time to go on ends
with the first step after. They were taken on two cores beside other work. A rank that is stopped is
noticed 5.5 s after its last sign of life: 2.5 s of these jobs (`hang_timeout_s`) and 3 s; before
its first step after `start_timeout_s` (120 s in the first 134 tries, 30 s later), in it after
`first_step_timeout_s` (30 s, then 15 s); a silent server after 60 s. The OOM killer takes a rank by
a control group of its own, where the machine lets one be made (here: cgroup v1, as root).

{moments}

{layouts}
"""
_RAN = """
## What others did here

{method}

| who | fault | processes that stay | first step, s | steps done again | loss |
|---|---|---|--:|---|---|
{rows}
"""
_FOOT = """
## What others promise

{method}

| fault | torchft [1] | NVRx [2] | Megatron-LM [3] | here |
|---|---|---|---|---|
"""


def write_page(outcomes: Sequence[Outcome]) -> None:
    """Write the page of these tries."""
    PAGE.write_text(format_page(outcomes), "utf-8")


def format_page(outcomes: Sequence[Outcome]) -> str:
    """Return the page of these tries."""
    bitten = [outcome for outcome in outcomes if outcome.result.has_bitten]
    faults = [fault for fault in sorted(FAULTS) if any(o.cell.fault == fault for o in bitten)]
    head = _HEAD.format(
        counts=_format_counts(outcomes, bitten),
        faults="\n".join(
            _format_fault(fault, [o for o in bitten if o.cell.fault == fault]) for fault in faults
        ),
        moments=_format_crossing("moment", faults, bitten, [str(m) for m in Moment], _read_moment),
        layouts=_format_crossing(
            "layout", faults, bitten, [_format_layout(text) for _, text in LAYOUTS], _read_layout
        ),
    )
    return head + _format_promises()


def _read_moment(outcome: Outcome) -> str:
    return str(outcome.cell.moment)


def _read_layout(outcome: Outcome) -> str:
    return _format_layout(outcome.cell.layout)


def _format_layout(text: str) -> str:
    """Return a layout without what is the same in all."""
    return text.replace("|", "\\|").replace(",mbs1", "").replace(",mbs2", "").replace("mbs1,", "")


def _format_counts(outcomes: Sequence[Outcome], bitten: Sequence[Outcome]) -> str:
    held = sum(outcome.result.has_held for outcome in bitten)
    seeds = {
        seed: sorted(o.number for o in outcomes if o.seed == seed) for seed in _seeds(outcomes)
    }
    numbers = "; ".join(f"seed {seed}: {run[0]} to {run[-1]}" for seed, run in seeds.items())
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    missed = len(outcomes) - len(bitten)
    return (
        f"**{held} of {len(bitten)} tries that bit held**; {missed} others did not bite "
        f"({numbers}; {minutes:.0f} minutes of tries)."
    )


def _seeds(outcomes: Sequence[Outcome]) -> list[int]:
    return sorted({outcome.seed for outcome in outcomes})


def _format_tally(outcomes: Sequence[Outcome]) -> str:
    """Return how many bit, and before a slash how many of them held where that is fewer."""
    held = sum(outcome.result.has_held for outcome in outcomes)
    return f"{held}/{len(outcomes)}" if held < len(outcomes) else str(len(outcomes) or "")


def _format_fault(fault: str, tried: Sequence[Outcome]) -> str:
    cells = [
        _format_tally(tried),
        _format_tally([o for o in tried if o.cell.launcher is Launcher.OWN]),
        _format_tally([o for o in tried if o.cell.launcher is Launcher.TORCHRUN]),
        _format_tally([o for o in tried if o.cell.is_elastic]),
        _format_tally([o for o in tried if o.cell.peer_every > 0]),
        _format_tally([o for o in tried if o.cell.copies is not Copies.NONE]),
        _format_median([o.result.notice_s for o in tried], ".1f"),
        _format_median([o.result.down_s for o in tried], ".1f"),
        _format_median([o.result.repeated_steps for o in tried if o.result.down_s > 0], "g"),
    ]
    text = (FAULTS[fault].__doc__ or "").split("\n")[0].rstrip(".")
    return f"| {text} | {' | '.join(cells)} |"


def _format_median(values: Sequence[float], style: str) -> str:
    known = [value for value in values if value >= 0]
    if not known:
        return ""
    return f"{format(statistics.median(known), style)} (≤ {format(max(known), style)})"


def _format_crossing(
    name: str,
    faults: Sequence[str],
    bitten: Sequence[Outcome],
    columns: Sequence[str],
    read: Callable[[Outcome], str],
) -> str:
    """Return the table of faults by something else."""
    rows = [
        f"| {name} | {' | '.join(columns)} |",
        f"|---|{'--:|' * len(columns)}",
    ]
    for fault in faults:
        tried = [o for o in bitten if o.cell.fault == fault]
        cells = [_format_tally([o for o in tried if read(o) == column]) for column in columns]
        rows.append(f"| {fault.replace('_', ' ')} | {' | '.join(cells)} |")
    tallies = [_format_tally([o for o in bitten if read(o) == column]) for column in columns]
    return "\n".join([*rows, f"| all | {' | '.join(tallies)} |"])


def _format_promises() -> str:
    """Return the tables of what other libraries did here, and of what they state, with sources."""
    data = tomllib.loads(Path(__file__).with_name("promises.toml").read_text("utf-8"))
    ran = _RAN.format(
        method=data["ran"]["method"].strip(),
        rows=_format_rows(
            data["ran"]["row"], ("who", "fault", "stay", "first_step", "repeated", "loss")
        ),
    )
    foot = _FOOT.format(method=data["method"].strip())
    rows = _format_rows(data["row"], ("fault", "torchft", "nvrx", "megatron", "here"))
    sources = [f"{number}. {source}" for number, source in enumerate(data["sources"], 1)]
    return ran + foot + rows + "\n\n" + "\n".join(sources) + "\n"


def _format_rows(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> str:
    return "\n".join("| " + " | ".join(row[column] for column in columns) + " |" for row in rows)
