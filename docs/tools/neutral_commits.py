"""Check the commits of public forks that change a launch script and nothing of its training.

`make neutral-commits MATERIAL=DIR` clones each repository of `docs/tools/neutral_commits.csv` below
DIR, holds each script beside that of the commit before, as `moewright check` does, and prints a
line a commit. It fails where a commit is told as a change. HOST is where the repositories are
cloned from.
"""

from __future__ import annotations

import contextlib
import csv
import sys
from collections import Counter
from pathlib import Path

from docs.tools.reading_material import clone
from moewright.api.checking import check
from moewright.spec.errors import BadInput

_COMMITS = Path("docs/tools/neutral_commits.csv")
_NEUTRAL, _REFUSED, _ALARM, _GONE = "neutral", "refused", "an alarm", "not cloned"


def check_commit(row: dict[str, str]) -> tuple[str, str]:
    """Return what is told of a commit of the repository in the working folder, and the words."""
    sides = (f"{row['commit']}{end}:{row['path']}" for end in ("~", ""))
    try:
        (job,) = check(*sides, on=row["on"], overrides=tuple(row["set"].split())).jobs
    except BadInput as error:
        return _REFUSED, str(error)
    assert job.changes is not None
    switches = "; ".join(map(str, job.changes.switches))
    return _NEUTRAL if job.changes.is_neutral else _ALARM, switches


def main(folder: Path, host: str) -> int:
    """Check every commit of the list; return 1 where one is told as a change."""
    with _COMMITS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    outcomes: Counter[str] = Counter()
    for row in rows:
        outcome, words = (
            _GONE,
            clone(host, row["repository"], row["commit"], folder / row["repository"]),
        )
        if not words:
            with contextlib.chdir(folder / row["repository"]):
                outcome, words = check_commit(row)
        outcomes[outcome] += 1
        print(f"{outcome}\t{row['repository']}\t{row['commit'][:10]}\t{row['path']}\t{words}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return int(outcomes[_ALARM] > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
