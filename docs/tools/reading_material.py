"""Fetch the public files of the draws that the log of readers tells of, and list them.

`make reading-material MATERIAL=DIR` clones each repository of `docs/tools/reading_draws.csv` below
DIR at its commit, without the history of its files, and writes DIR/files.txt for `make
reading-table`. DRAW=11 takes one draw alone; HOST is where the repositories are cloned from.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

_DRAWS = Path("docs/tools/reading_draws.csv")


def clone(host: str, repository: str, commit: str, folder: Path) -> str:
    """Clone a repository at a commit; return why it could not be, "" where it could."""
    if (folder / ".git").is_dir():
        return ""
    link = f"{host}/{repository}"
    start = ("git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", link, str(folder))
    for command in (start, ("git", "-C", str(folder), "checkout", "--quiet", commit)):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.splitlines()
            return next((line for line in lines if line.startswith("fatal:")), done.stderr[:80])
    return ""


def main(folder: Path, host: str, draw: str) -> None:
    """Fetch the repositories of a draw, or of all draws, and list the files."""
    with _DRAWS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if draw in ("", row["draw"])]
    gone = set()
    for repository, commit in dict.fromkeys((row["repository"], row["commit"]) for row in rows):
        failure = clone(host, repository, commit, folder / repository)
        if failure:
            gone.add(repository)
            print(f"{repository}: {failure}", file=sys.stderr)
    paths = (f"{row['repository']}/{row['path']}" for row in rows if row["repository"] not in gone)
    folder.joinpath("files.txt").write_text("".join(f"{path}\n" for path in paths))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
