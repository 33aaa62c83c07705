"""What processes beside the server answer agents, within walls and limits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from moewright.agents.tools import call_tool
from moewright.spec.errors import BadInput, Reason
from moewright.spec.record import format_json, to_plain_data
from moewright.studio.confinement import Confinement
from moewright.studio.forking import work

# A small job, whose answer fills the caches of tables and imports before anybody asks.
_WARM_UPS = (("estimate", {"model": "Qwen3-30B-A3B", "on": "8xH100"}),)


def answer(task: str, params: Mapping[str, Any], _: Confinement) -> Iterator[bytes]:
    """Yield the answer of a tool: its record, and the record as text; or why there is none."""
    try:
        record = call_tool(task, params)
    except BadInput as error:
        yield encode_refusal(*error.reasons)
        return
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        yield encode_refusal(Reason(field=str(error.filename or "file"), rule=rule))
        return
    # As the command line writes it, so that both say the same to the last digit.
    data = json.loads(format_json(record))
    yield json.dumps({"answer": data, "text": repr(record)}).encode()


def encode_refusal(*reasons: Reason) -> bytes:
    """Return why there is no answer."""
    return json.dumps({"refusal": to_plain_data(reasons)}).encode()


if __name__ == "__main__":
    work(sys.argv[1:], answer, encode_refusal, _WARM_UPS)
