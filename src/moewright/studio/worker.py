"""A process that works on long questions, and on files that strangers may have written.

A query comes in on standard input, answers go out as lines. The server kills it when nobody waits
for it any more; what it may use of time and memory, and of the disk, is limited.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moewright.api.design_document import build_design_view
from moewright.api.designing import compute_design
from moewright.api.diagnosing import diagnose_file, read_logged_sizes, view_diagnosis
from moewright.api.views import view_budget, view_search
from moewright.api.watching import view_watch
from moewright.spec.errors import BadInput, Reason, lacks_memory
from moewright.spec.options import DesignOptions
from moewright.spec.units import format_bytes
from moewright.studio.confinement import Confinement
from moewright.studio.folder import StudioFolder
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

# A small job, whose search fills the caches of tables and imports before anybody asks.
_WARM_UP = {"model": "Qwen/Qwen3-30B-A3B", "on": "8xH100", "global_batch": "64"}
_MOST_BYTES = 4 * 2**30
_MOST_CPU_S = 300


Answer = Callable[[str, Mapping[str, Any], Confinement], Iterator[bytes]]


def work(
    arguments: Sequence[str],
    answer_task: Answer,
    refuse: Callable[[Reason], bytes],
    warm_up: tuple[str, Mapping[str, Any]],
) -> None:
    """Answer one question: {"task": ..., "params": {...}}, within the walls that are named.

    `warm_up` is a task whose answer fills caches before anybody asks; `refuse` writes that there
    is no memory for an answer.
    """
    root, folder, hub_cache, *options = arguments
    confinement = Confinement(
        root=Path(root),
        folder=Path(folder),
        hub_cache=Path(hub_cache),
        is_read_only="--read-only" in options,
    )
    confinement.enter()
    _limit(resource.RLIMIT_AS, _MOST_BYTES)
    next(answer_task(*warm_up, confinement), None)
    line = sys.stdin.readline()
    if not line:
        return  # nobody asks any more
    _limit(resource.RLIMIT_CPU, _used_cpu_s() + _MOST_CPU_S)
    question = json.loads(line)
    try:
        for answered in answer_task(question["task"], question["params"], confinement):
            _write(answered)
    except Exception as error:
        if not lacks_memory(error):
            raise
        rule = f"needs more memory for an answer than {format_bytes(_MOST_BYTES)}"
        _write(refuse(Reason(field="server", rule=rule)))


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


def _limit(kind: int, value: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    limits = [limit for limit in resource.getrlimit(kind) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(value, *limits, value), resource.getrlimit(kind)[1]))


def _used_cpu_s() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime) + 1


def _report_progress(done: int, total: int) -> None:
    _write(encode_data({"done": done, "total": total}))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    work(sys.argv[1:], answer, encode_refusal, ("search", _WARM_UP))
