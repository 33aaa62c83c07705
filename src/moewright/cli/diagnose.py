"""`moewright diagnose`: which wall holds a run back."""

from __future__ import annotations

from pathlib import Path

from moewright.spec.errors import BadInput, Reason


def diagnose(run: Path, /) -> int:
    """Name the wall that holds a run back, with its evidence, and what to change next, best first.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it.
    """
    from moewright.codec import read_run
    from moewright.tune.diagnose import diagnose as findings_of

    record = read_run(run)
    findings = findings_of(record)
    if not findings:
        raise BadInput(Reason(field=str(run), rule="holds no finished steps to diagnose", nearest="a run that trained"))
    for finding in findings:
        print(f"{finding.wall}: {finding.title} ({finding.share:.0%})")
        for line in finding.evidence:
            print(f"  seen: {line}")
        for place, line in enumerate(finding.fixes, 1):
            print(f"  {place}. {line}")
    return 0
