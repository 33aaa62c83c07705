"""The walls of a run as sections of a document, each with its evidence and its fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moewright.diagnosis.priced_fixes import ALREADY_ON
from moewright.report.document import (
    DocumentSection,
    Extent,
    Face,
    ItemList,
    Phrase,
    Tone,
)
from moewright.spec.finding import Finding, Fix
from moewright.spec.units import format_bytes

_MAX_FINDINGS = 4  # on a terminal
_FIXES_SHOWN = 3  # without -v


def list_finding_sections(
    findings: Sequence[Finding], *, has_headline: bool = False
) -> Iterator[DocumentSection]:
    """Yield the wall to work on first with its evidence and fixes, then those that follow it.

    Where a headline says that the findings do not explain the step, none of them is the wall. A
    short answer has the best fixes of the first, and the headings of the others alone.
    """
    for index, finding in enumerate(findings):
        is_wall = index == 0 and not has_headline
        label = Phrase(
            text=f"WALL: {finding.wall}" if is_wall else f"then: {finding.wall}",
            tone=Tone.DOUBTFUL if is_wall else Tone.PLAIN,
            face=Face.BADGE,
        )
        fixes = ItemList(
            items=tuple(tuple(list_fix_runs(fix)) for fix in finding.fixes if not fix.excluded),
            is_numbered=True,
            short=_FIXES_SHOWN,
        )
        ruled_out = DocumentSection(
            lines=tuple(f"  {line}" for line in _list_ruled_out(finding.fixes)),
            extent=Extent.LONG,
        )
        body = DocumentSection(
            lines=tuple(f"  seen: {line}" for line in finding.evidence),
            items=fixes if fixes.items else None,
            sections=(ruled_out,) if ruled_out.lines else (),
            extent=Extent.LONG if index else Extent.SHORT,
        )
        yield DocumentSection(
            title=(label, f" ({finding.cause}): {finding.title}"),
            sections=(body,),
            extent=Extent.SHORT if index < _MAX_FINDINGS else Extent.WHOLE,
        )


def _list_ruled_out(fixes: Sequence[Fix]) -> Iterator[str]:
    """Yield the fixes of a cause that are on already or cannot be made here, which is no advice."""
    for fix in fixes:
        if fix.excluded == ALREADY_ON:
            yield f"{ALREADY_ON}: {fix.text}"
        elif fix.excluded:
            yield f"not here: {fix.text} ({fix.excluded})"


def list_fix_runs(fix: Fix) -> Iterator[str | Phrase]:
    """Yield a fix with its predicted price, its settings, and what it excludes."""
    yield fix.text
    if fix.price is not None:
        price = fix.price
        sign = "+" if price.peak_bytes >= 0 else "-"
        change = f"step {price.step_share:+.1%}, memory {sign}{format_bytes(abs(price.peak_bytes))}"
        yield " [predicted: "
        yield Phrase(text=change, tone=Tone.GOOD if price.step_share < 0 else Tone.PLAIN)
        yield f", {price.verdict}; layout: "
        yield Phrase(text=price.layout, face=Face.CODE)
        yield "]"
    if fix.setting:
        yield from (" [set: ", Phrase(text=fix.setting, face=Face.CODE), "]")
    if fix.megatron:
        yield from (" [Megatron: ", Phrase(text=fix.megatron, face=Face.CODE), "]")
    if fix.excludes:
        yield f" [excludes {fix.excludes}]"
