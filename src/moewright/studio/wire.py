"""Records on their way to a page: JSON with the name of the record's kind."""

from __future__ import annotations

import json
from collections.abc import Callable

from moewright.spec.errors import BadInput, Reason
from moewright.spec.record import Record, replace_non_finite, to_plain_data
from moewright.view.plan_view import build_refusal


def encode_record(record: Record) -> bytes:
    """Return a record as JSON; its class stands as `kind`, numbers that are not finite are null."""
    data = {"kind": type(record).__name__, **record.to_dict()}
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        text = json.dumps(replace_non_finite(data), allow_nan=False)
    return text.encode()


def encode_data(value: object) -> bytes:
    """Return plain data, or dataclasses in it, as JSON."""
    return json.dumps(replace_non_finite(to_plain_data(value)), allow_nan=False).encode()


def encode_refusal(*reasons: Reason) -> bytes:
    """Return why there is no answer, as the record of it."""
    return encode_record(build_refusal(reasons))


def encode_failure(error: BadInput | OSError) -> bytes:
    """Return why something cannot be used or read: a file outside of the root, say."""
    if isinstance(error, BadInput):
        return encode_refusal(*error.reasons)
    rule = f"cannot be read: {error.strerror or error}"
    return encode_refusal(Reason(field=str(error.filename or "file"), rule=rule))


def build_or_refuse(build: Callable[[], bytes]) -> bytes:
    """Return what a function builds, or why it cannot."""
    try:
        return build()
    except (BadInput, OSError) as error:
        return encode_failure(error)
