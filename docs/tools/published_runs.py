"""Write the published runs that pages show beside a plan: predicted beside measured.

The figures are those of docs/accuracy.md, where each run is predicted by constants fitted without
its publisher; the layouts are those of the tables. `make accuracy` runs it.
"""

from __future__ import annotations

import csv
import re
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "src" / "moewright" / "view" / "data" / "published_runs.csv"
_PAGE = ROOT / "docs" / "accuracy.md"
_TABLES = ROOT / "tests" / "published" / "data"
_COLUMNS = (
    *("id", "model", "device", "devices", "precision", "seq_len", "layout"),
    *("tp", "cp", "pp", "ep", "measured", "predicted", "error"),
)
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")


def render_file() -> str:
    """Return the text of the table, a row for each run of the page on accuracy."""
    cells: dict[str, dict[str, str]] = {}
    for name in ("measurements.csv", "measurements_more.csv"):
        with (_TABLES / name).open(encoding="utf-8", newline="") as file:
            cells |= {row["id"]: row for row in csv.DictReader(file)}
    stream = StringIO()
    writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    section = _PAGE.read_text(encoding="utf-8").partition("## Every run")[2]
    for line in section.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if not line.startswith("| ") or parts[0] not in cells:
            continue
        row = cells[parts[0]]
        measured, predicted = (float(text.replace(",", "")) for text in (parts[4], parts[5]))
        degrees = {key: _integer(row.get(key, "")) for key in _DEGREES}
        writer.writerow(
            {
                "id": parts[0],
                "model": row["model"],
                "device": row["hardware"],
                "devices": row["num_gpus"],
                "precision": row["precision"],
                "seq_len": _integer(row["seq_len"]),
                "layout": ",".join(f"{key}{value}" for key, value in degrees.items() if value),
                **{key: degrees[key] for key in ("tp", "cp", "pp", "ep")},
                "measured": f"{measured:g}",
                "predicted": f"{predicted:g}",
                "error": f"{predicted / measured - 1:.4f}",
            }
        )
    return stream.getvalue()


def _integer(text: str) -> str:
    """Return a whole number as text; "" where the cell states none."""
    return text if re.fullmatch(r"\d+", text) else ""


if __name__ == "__main__":
    FILE.write_text(render_file(), encoding="utf-8")
