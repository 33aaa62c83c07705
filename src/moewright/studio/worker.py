"""A process that works on long questions: a query in on standard input, answers out as lines.

The server kills it when nobody waits for it any more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from moewright.api.views import view_budget, view_search
from moewright.spec.errors import BadInput
from moewright.spec.record import Record
from moewright.studio.queries import read_number, read_query
from moewright.studio.wire import encode_record
from moewright.view.plan_view import build_refusal

# A small job, whose search fills the caches of tables and imports before anybody asks.
_WARM_UP = {"model": "Qwen/Qwen3-30B-A3B", "on": "8xH100", "global_batch": "64"}


def main() -> None:
    """Answer one question: {"task": ..., "params": {...}}."""
    next(answer("search", _WARM_UP), None)
    line = sys.stdin.readline()
    if not line:
        return  # nobody asks any more
    question = json.loads(line)
    try:
        for record in answer(question["task"], question["params"]):
            _write(encode_record(record))
    except BadInput as error:
        _write(encode_record(build_refusal(error.reasons)))


def answer(task: str, params: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the records that answer a task."""
    query = read_query(params)
    if task == "search":
        yield from view_search(query)
    else:
        tokens = params.get("tokens", "")
        yield from view_budget(query, tokens=tokens, price=read_number(params, "price"))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
