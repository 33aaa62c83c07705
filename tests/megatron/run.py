"""`make megatron`: Megatron-LM's own code starts every export, and its verdicts are recorded.

`python tests/megatron/run.py MEGATRON_LM [PLANS]` starts the cases of verdicts.csv anew: the best
plans of the catalogue, random legal layouts, and plans by hand. PLANS are lines of JSON, {"model",
"machine", "layouts"}, as `search` prints them; with it the best plans are those, and every layout
of theirs is started. MEGATRON_LM is a checkout of d98e8a64.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import (  # noqa: E402
    COLUMNS,
    MACHINES,
    VERDICTS,
    case_plan,
    digest,
    is_expressible,
    our_rules,
    plans_by_hand,
    random_cases,
    read_verdicts,
    start_command,
)

_RANDOM_CASES = 1000


def main(megatron_lm: str, plans: str = "") -> int:
    """Start every case, print what came of it, and write the verdicts."""
    began_s = time.monotonic()
    cases = [*_best_plans(plans), *plans_by_hand(), *random_cases(_RANDOM_CASES)]
    cases = [row for row in cases if is_expressible(case_plan(row))]
    verdicts = _start_all(megatron_lm, [case_plan(row) for row in cases])
    rows = [
        {**row, "command": digest(case_plan(row)), "refusal": refusal}
        for row, refusal in zip(cases, verdicts, strict=True)
    ]
    disagreements = _report(rows)
    kept = [row for row in rows if row["kind"] != "further plan"]
    with VERDICTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    print(f"{len(rows)} starts in {time.monotonic() - began_s:.0f} s")
    return 1 if disagreements else 0


def _best_plans(path: str) -> list[dict[str, str]]:
    """Return the best and the further plans of a file; without one, those that are recorded."""
    if not path:
        return [
            {name: row[name] for name in COLUMNS[:5]}
            for row in read_verdicts()
            if row["kind"] == "best plan"
        ]
    rows = []
    for line in Path(path).read_text().splitlines():
        search = json.loads(line)
        for rank, layout in enumerate(search["layouts"]):
            kind = "further plan" if rank else "best plan"
            where = {"model": search["model"], "machine": search["machine"]}
            rows.append({"kind": kind, **where, "workload": "plain", "layout": layout})
    assert {row["machine"] for row in rows} <= set(MACHINES)
    return rows


def _start_all(megatron_lm: str, plans) -> list[str]:
    """Return Megatron-LM's verdict on every plan."""
    lines = (json.dumps({"id": place, **start_command(plan)}) for place, plan in enumerate(plans))
    result = subprocess.run(
        [sys.executable, str(HERE / "start.py"), megatron_lm],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line)["refusal"] for line in result.stdout.splitlines()]


def _report(rows: list[dict[str, str]]) -> int:
    """Print what started and what did not; return how often our rules say otherwise."""
    disagreements = 0
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        started = sum(not row["refusal"] for row in own)
        print(f"{kind}: {started} of {len(own)} start")
        refusals = Counter(row["refusal"][:150] for row in own if row["refusal"])
        for refusal, count in refusals.most_common():
            print(f"  {count:5}  {refusal}")
    for row in rows:
        ours = our_rules(case_plan(row))
        if bool(ours) != bool(row["refusal"]):
            disagreements += 1
            where = " ".join(row[name] for name in COLUMNS[:5])
            print(f"DISAGREE {where}\n    ours: {ours}\n    theirs: {row['refusal'][:300]}")
    return disagreements


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
