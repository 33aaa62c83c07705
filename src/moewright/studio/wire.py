"""Records on their way to a page: JSON with the name of the record's kind."""

from __future__ import annotations

import json

from moewright.spec.record import Record, replace_non_finite, to_plain_data


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
