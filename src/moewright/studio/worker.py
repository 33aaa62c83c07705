"""What processes beside the server answer: long questions, and those of files of strangers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moewright.api.design_document import build_design_view
from moewright.api.designing import compute_design
from moewright.api.diagnosing import diagnose_file, read_logged_sizes, view_diagnosis
from moewright.api.views import view_budget, view_search
from moewright.api.watching import view_watch
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import DesignOptions
from moewright.studio.confinement import Confinement
from moewright.studio.folder import StudioFolder
from moewright.studio.forking import work, write_line
from moewright.studio.queries import (
    read_counts,
    read_dropped_model,
    read_dropped_script,
    read_number,
    read_query,
    read_watched_job,
)
from moewright.studio.wire import encode_data, encode_failure, encode_record, encode_refusal
from moewright.view.design_view import DesignView
from moewright.view.run_view import DiagnosisView

# A small job, whose answers fill the caches of tables and imports before anybody asks.
_SMALL = {"model": "Qwen/Qwen3-30B-A3B", "on": "8xH100", "global_batch": "64"}
_WARM_UPS = (("search", _SMALL),)


def answer(task: str, params: Mapping[str, Any], confinement: Confinement) -> Iterator[bytes]:
    """Yield the records that answer a task, or why there is none."""
    try:
        yield from _answer(task, params, confinement)
    except (BadInput, OSError) as error:
        yield encode_failure(error)


def _answer(task: str, params: Mapping[str, Any], confinement: Confinement) -> Iterator[bytes]:
    """Yield the records that answer a task; `path` names a file for the tasks about one."""
    path = Path(params.get("path", ""))
    match task:
        case "search":
            yield from map(encode_record, view_search(read_query(params)))
        case "budget":
            price = read_number(params, "price")
            tokens = params.get("tokens", "")
            views = view_budget(read_query(params), tokens=tokens, price=price)
            yield from map(encode_record, views)
        case "design":
            yield encode_record(_design(params))
        case "diagnosis":
            yield encode_record(_diagnose(path, params))
        case "watch":
            yield encode_record(view_watch(path, read_watched_job(params)))
        case "model":
            yield encode_data(read_dropped_model(StudioFolder(confinement.folder), path))
        case "script":
            yield encode_data(read_dropped_script(path, params))


def _design(params: Mapping[str, Any]) -> DesignView:
    """Return the shapes that a page asks for, like the model of its job and on its devices.

    Raises:
        BadInput: a goal cannot be used, or no shape fits.
    """
    query = read_query(params)
    options = DesignOptions(
        days=read_number(params, "days") or 0.0,
        tokens=params.get("tokens", ""),
        until=read_number(params, "until") or 0.0,
        max_total=params.get("max_total", ""),
        max_active=params.get("max_active", ""),
        serve=params.get("serve", ""),
        served_tokens=params.get("served_tokens", ""),
        attention_kinds=tuple(params.get("attention_kinds", "").replace(",", " ").split()),
        kv_heads=read_counts(params, "kv_heads"),
        vocab_sizes=read_counts(params, "vocab_sizes"),
        shared_experts=read_counts(params, "shared_experts"),
    )
    design = compute_design(
        query.on, query.model, query.options, options, report_progress=_report_progress
    )
    return build_design_view(design)


def _diagnose(path: Path, params: Mapping[str, Any]) -> DiagnosisView:
    """Return the diagnosis of a trace or a log, under the job that the page says.

    What a log states of its sizes wins over defaults. How much of a trace is read goes out as it
    is known.

    Raises:
        BadInput: the file or the job cannot be used.
    """
    plan = None
    if params.get("model"):
        batch, seq_len = read_logged_sizes(path)
        sizes = {"global_batch": batch, "seq_len": seq_len}
        logged = {key: str(size) for key, size in sizes.items() if size and not params.get(key)}
        if not params.get("layout"):
            rule = "is needed beside a model"
            raise BadInput(Reason(field="layout", rule=rule, nearest="ep8,mbs1"))
        plan = read_query({**params, **logged}).build()
    diagnosis = diagnose_file(
        path,
        plan=plan,
        on=params.get("on", ""),
        network=params.get("network", ""),
        report_progress=_report_progress,
    )
    return view_diagnosis(diagnosis)


def _report_progress(done: int, total: int) -> None:
    write_line(encode_data({"done": done, "total": total}))


if __name__ == "__main__":
    work(sys.argv[1:], answer, encode_refusal, _WARM_UPS)
