"""Floor 1: nouns to and from JSON, TOML and layout text; strict on the way in, atomic on the way
out."""

from moewright.codec.data import Numbers, fingerprint, from_data, nearest, shown, to_data, unsaid
from moewright.codec.files import (
    append_line,
    json_data,
    parse_json,
    read_json,
    read_text,
    read_toml,
    toml_data,
    whole_lines,
    write_json,
    write_text,
    write_toml,
)
from moewright.codec.layout_text import given_fields, layout_text, parse_layout
from moewright.codec.run_files import PACES_FILE, read_run, record_line

__all__ = [
    "PACES_FILE",
    "Numbers",
    "append_line",
    "fingerprint",
    "from_data",
    "given_fields",
    "json_data",
    "layout_text",
    "nearest",
    "parse_json",
    "parse_layout",
    "read_json",
    "read_run",
    "read_text",
    "read_toml",
    "record_line",
    "shown",
    "to_data",
    "toml_data",
    "unsaid",
    "whole_lines",
    "write_json",
    "write_text",
    "write_toml",
]
