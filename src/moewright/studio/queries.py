"""The address of a page as a query: its keys are those of the command line's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from moewright.api.planning import workload_options
from moewright.api.views import ViewQuery
from moewright.codec.numbers import parse_count
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import BatchRampSpec
from moewright.studio.packing import unpack_model

_LONGEST = 4000


def read_query(params: Mapping[str, str]) -> ViewQuery:
    """Read the query of an address, whose keys are model, on, layout and options of the workload.

    Raises:
        BadInput: a number or a precision cannot be read, or nothing says the model.
    """
    for key, value in params.items():
        if len(value) > _LONGEST:
            rule = f"must have at most {_LONGEST} characters"
            raise BadInput(Reason(field=key, value=value[:20], rule=rule))
    if not params.get("model"):
        raise BadInput(Reason(field="model", rule="is needed", nearest="Qwen3-30B-A3B"))
    options = workload_options(
        read_count(params, "seq_len"),
        read_count(params, "global_batch"),
        params.get("precision") or None,
        Path(params["load"]) if params.get("load") else None,
    )
    return ViewQuery(
        model=unpack_model(params["model"]) or params["model"],
        on=params.get("on", ""),
        options=replace(
            options, network=params.get("network", ""), rampup_batch_size=_read_ramp(params)
        ),
        layout=params.get("layout", ""),
    )


def _read_ramp(params: Mapping[str, str]) -> tuple[int, int, int] | None:
    words = params.get("rampup_batch_size", "").split()
    if not words:
        return None
    if len(words) != len(fields(BatchRampSpec)):
        rule = "needs three numbers: start, increment, samples"
        raise BadInput(Reason(field="rampup_batch_size", value=" ".join(words), rule=rule))
    start, increment, samples = (parse_count(word, "rampup_batch_size") for word in words)
    return start, increment, samples


def read_count(params: Mapping[str, str], key: str) -> int | None:
    """Return a whole number of an address, which may be written as 4k; None without.

    Raises:
        BadInput: it is no number.
    """
    text = params.get(key, "").strip()
    return parse_count(text, key) if text else None


def read_number(params: Mapping[str, str], key: str) -> float | None:
    """Return a number of an address; None without.

    Raises:
        BadInput: it is no number.
    """
    text = params.get(key, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise BadInput(Reason(field=key, value=text[:60], rule="must be a number")) from None
