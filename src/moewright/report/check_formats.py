"""A check of a change as other programs read it: SARIF 2.1.0, and the XML of JUnit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from moewright.diagnosis.checks import Check, JobCheck
from moewright.spec.printable import escape_controls
from moewright.spec.quoting import Json
from moewright.version import __version__

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_FIT = "fits"
_HELP = {_FIT: "the job fits, or may fit, as it did before the change"}


def render_sarif(check: Check) -> Json:
    """Return a log of SARIF 2.1.0 with a result for each broken budget."""
    results = [
        _build_result(job, rule, text) for job in check.jobs for rule, text in list_failures(job)
    ]
    rules = sorted({result["ruleId"] for result in results})
    driver = {
        "name": "moewright check",
        "version": __version__,
        "rules": [
            {"id": rule, "shortDescription": {"text": _HELP.get(rule, f"budget {rule}")}}
            for rule in rules
        ],
    }
    run = {"tool": {"driver": driver}, "results": results}
    return Json.dump({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def list_failures(job: JobCheck) -> Iterator[tuple[str, str]]:
    """Yield the rule and a sentence for each reason for which a job fails."""
    yield from ((breach.budget, breach.text) for breach in job.breaches)
    if job.changes is not None and job.changes.breaks_fit:
        yield _FIT, f"does not fit any more: the verdict was {job.changes.verdict_before}"


def _build_result(job: JobCheck, rule: str, text: str) -> dict[str, Any]:
    place = {
        "artifactLocation": {"uri": job.path},
        "region": {"startLine": job.line},
    }
    return {
        "ruleId": rule,
        "level": "error",
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def render_junit(check: Check) -> str:
    """Return a test suite of JUnit with a case for each job, which fails over its budgets."""
    suite = ElementTree.Element("testsuite", name="moewright check")
    failures = 0
    for job in check.jobs:
        case = ElementTree.SubElement(
            suite, "testcase", classname="moewright.check", name=escape_controls(job.path)
        )
        texts = [text for _, text in list_failures(job)]
        if texts:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=escape_controls(texts[0]))
            failure.text = escape_controls("; ".join(texts))
        if job.note:
            ElementTree.SubElement(case, "skipped", message=escape_controls(job.note))
    suite.set("tests", str(len(check.jobs)))
    suite.set("failures", str(failures))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
