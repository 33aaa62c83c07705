"""Floor 1: nouns to and from JSON, TOML and layout text; reads are strict, writes are atomic."""

from moewright.codec.data import (
    FloatPolicy,
    default_values,
    fingerprint,
    format_value,
    from_data,
    to_data,
)
from moewright.codec.files import (
    append_line,
    parse_json,
    parse_toml,
    read_bytes,
    read_complete_lines,
    read_json,
    read_json_data,
    read_text,
    read_toml,
    read_toml_data,
    write_json,
    write_text,
    write_toml,
)
from moewright.codec.layout_text import (
    explicit_fields,
    format_layout,
    format_layout_changes,
    parse_layout,
)
from moewright.codec.names import closest_match
from moewright.codec.numbers import parse_count
from moewright.codec.run_files import (
    INCIDENTS_FILE,
    PLAN_FILE,
    RANK_TIMINGS_FILE,
    STEPS_FILE,
    format_record,
    read_incidents,
    read_run,
    write_incidents,
)

__all__ = [
    "INCIDENTS_FILE",
    "PLAN_FILE",
    "RANK_TIMINGS_FILE",
    "STEPS_FILE",
    "FloatPolicy",
    "append_line",
    "closest_match",
    "default_values",
    "explicit_fields",
    "fingerprint",
    "format_layout",
    "format_layout_changes",
    "format_record",
    "format_value",
    "from_data",
    "parse_count",
    "parse_json",
    "parse_layout",
    "parse_toml",
    "read_bytes",
    "read_complete_lines",
    "read_incidents",
    "read_json",
    "read_json_data",
    "read_run",
    "read_text",
    "read_toml",
    "read_toml_data",
    "to_data",
    "write_incidents",
    "write_json",
    "write_text",
    "write_toml",
]
