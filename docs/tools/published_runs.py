"""Write the published runs that pages show beside a plan: predicted beside measured.

The figures are those of docs/accuracy/, where each run is predicted by constants fitted without
its publisher; the layouts are those of the tables. `make accuracy` runs it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from io import StringIO
from pathlib import Path

from moewright.calibration.cells import parse_hardware, parse_task
from moewright.calibration.speed import megatron_flops_per_token
from moewright.diagnosis.waterfall import peak_flops
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.workload import Dtype, Routing, Task

ROOT = Path(__file__).parents[2]
FILE = ROOT / "src" / "moewright" / "diagnosis" / "data" / "published_runs.csv"
_PAGES = ROOT / "docs" / "accuracy"
_TABLES = ROOT / "tests" / "published" / "data"
_COLUMNS = (
    *("id", "model", "device", "devices", "precision", "seq_len", "layout"),
    *("tp", "cp", "pp", "ep", "measured", "predicted", "error"),
    *("flops_per_token", "mfu", "load", "source"),
)
_LOADS = {"true": Routing.BALANCED, "false": Routing.LEARNED}
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")


def render_file() -> str:
    """Return the text of the table, a row for each run of the pages on accuracy."""
    cells: dict[str, dict[str, str]] = {}
    for name in ("measurements.csv", "measurements_more.csv"):
        with (_TABLES / name).open(encoding="utf-8", newline="") as file:
            cells |= {row["id"]: row for row in csv.DictReader(file)}
    stream = StringIO()
    writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted(_PAGES.glob("*.md")))
    for line in pages.splitlines():
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
                **_count_flops(row, measured),
                "load": _LOADS.get(row["force_balance"], ""),
                "source": row["source"],
            }
        )
    return stream.getvalue()


def _count_flops(row: Mapping[str, str], measured: float) -> Mapping[str, str]:
    """Return a token's model FLOPs by our count, and the MFU at the bf16 peak of the device.

    Both are empty where a row trains adapters or names a model or a device of no catalogue.
    """
    try:
        has_adapters = parse_task(row["task"]).task is Task.LORA
        peak = _find_peak(row["hardware"])
        flops = _find_flops(row["model"], int(row["seq_len"]))
    except (BadInput, ValueError):
        return {"flops_per_token": "", "mfu": ""}
    if has_adapters or not peak:
        return {"flops_per_token": "", "mfu": ""}
    return {"flops_per_token": f"{flops:.4g}", "mfu": f"{measured * flops / peak:.4f}"}


@cache
def _find_flops(model: str, seq_len: int) -> int:
    return megatron_flops_per_token(catalogue.model(model), seq_len)


@cache
def _find_peak(hardware: str) -> float:
    return peak_flops(parse_hardware(hardware, 8), Dtype.BF16)


def _integer(text: str) -> str:
    """Return a whole number as text; "" where the cell states none."""
    return text if re.fullmatch(r"\d+", text) else ""


if __name__ == "__main__":
    FILE.write_text(render_file(), encoding="utf-8")
