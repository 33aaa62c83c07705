"""The counted ledgers of a run in a few lines: the rows that hold, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moewright.diagnosis.compare_ledgers import (
    AgreementRule,
    LedgerComparison,
    LedgerLine,
    Section,
)
from moewright.spec.units import format_bytes, plural

_LINES_SHOWN = 5
_PLACES_SHOWN = 3


def describe_comparisons(comparisons: Sequence[LedgerComparison]) -> Iterator[str]:
    """Yield a line on the promised rows of all ranks, then one for each of some that fail.

    Of a moment at which more lives than the rows list, the largest places follow.
    """
    promised = [
        (comparison, line)
        for comparison in comparisons
        for line in comparison.lines
        if line.rule is not AgreementRule.LISTED
    ]
    failed = [(comparison, line) for comparison, line in promised if not line.keeps_rule]
    kept = len(promised) - len(failed)
    ranks = plural(len(comparisons), "rank")
    yield f"ledger: {kept} of {len(promised)} promised rows of {ranks} as predicted"
    for comparison, line in failed[:_LINES_SHOWN]:
        yield f"  rank {comparison.rank}: {_describe(line)}"
        if line.section is Section.STORAGES and line.counted > line.predicted:
            places = [row for row in comparison.unlisted if row.moment.value == line.key[-1]]
            for row in places[:_PLACES_SHOWN]:
                yield f"    no row lists {format_bytes(row.bytes)} of {row.module}: {row.place}"
    if len(failed) > _LINES_SHOWN:
        yield f"  and {plural(len(failed) - _LINES_SHOWN, 'row')} more"


def _describe(line: LedgerLine) -> str:
    text = f"{line.section}: {line.label}: {line.predicted:,.0f} predicted"
    if line.rule is AgreementRule.ALLOWANCE:
        text += f" and at most {line.allowance:,.0f} beside"
    return f"{text}, {line.counted:,.0f} counted"
