"""Types of options on the command line: how a value is read, and how its option is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match
from moewright.spec.workload import Dtype, FrozenPart

# An empty `negative` leaves out the options --empty-set and --no-... that cyclopts would add.
SetOption = Annotated[
    list[str] | None, Parameter(name="--set", negative="", allow_leading_hyphen=True)
]
Flag = Annotated[bool, Parameter(negative="")]


def _read_json_path(_: type, tokens: Sequence[Token]) -> Path:
    """Return the path of --json; "-" is one, another option that follows --json is none."""
    (token,) = tokens
    if token.value.startswith("-") and token.value != "-":
        rule = 'needs a path, or "-" for standard output'
        raise BadInput(Reason(field="--json", value=token.value[:60], rule=rule))
    return Path(token.value)


def _read_count(_: type, tokens: Sequence[Token]) -> int:
    """Return a count that may be written as 128k; a plain number may also be out of range.

    A fraction is refused, which cyclopts alone would round to a count that nobody asked for.
    """
    from moewright.codec.numbers import parse_count

    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        return parse_count(token.value, token.keyword or "")


def _read_length(_: type, tokens: Sequence[Token]) -> int:
    """Return a length in tokens; say so where 4k is 4,000 and 4,096 may be meant."""
    from moewright.codec.numbers import explain_thousands

    (token,) = tokens
    length = _read_count(int, tokens)
    note = explain_thousands(token.value)
    if note:
        print(f"moewright: {token.keyword} {note}", file=sys.stderr)
    return length


def _read_rank(_: type, tokens: Sequence[Token]) -> int | None:
    """Return the rank of "r=16" or "16"; None for ""."""
    from moewright.api.requests import read_lora_rank

    (token,) = tokens
    return read_lora_rank(token.value)


def _read_parts(_: type, tokens: Sequence[Token]) -> tuple[FrozenPart, ...]:
    """Return the parts of "router,embeddings"."""
    names = [name for token in tokens for name in token.value.split(",") if name]
    for name in names:
        if name not in set(FrozenPart):
            rule = f"must be parts, by commas, of {', '.join(FrozenPart)}"
            nearest = closest_match(name, list(FrozenPart))
            raise BadInput(Reason(field="--freeze", value=name, rule=rule, nearest=nearest))
    return tuple(FrozenPart(name) for name in names)


def _read_text(_: type, tokens: Sequence[Token]) -> str:
    """Return an option's text, which the package reads; the type lists what completes it."""
    (token,) = tokens
    return str(token.value)


def _read_counts(_: type, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Return as many counts as there are tokens."""
    return tuple(_read_count(int, (token,)) for token in tokens)


# A lone "-" stands for standard output, which cyclopts would take for an option.
JsonOption = Annotated[
    Path | None,
    Parameter(name="--json", allow_leading_hyphen=True, converter=_read_json_path),
]
# A log, or a lone "-" for standard input.
LogPath = Annotated[Path, Parameter(allow_leading_hyphen=True)]
Verbose = Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")]
Quiet = Annotated[bool, Parameter(name=("--quiet", "-q"), negative="")]
Count = Annotated[int, Parameter(converter=_read_count)]
# Words that begin with hyphens are the value here, not options.
ShellWords = Annotated[str, Parameter(allow_leading_hyphen=True)]
OptionalLength = Annotated[int | None, Parameter(converter=_read_length)]
OptionalCount = Annotated[int | None, Parameter(converter=_read_count)]
OptionalCounts = Annotated[tuple[int, int, int] | None, Parameter(converter=_read_counts)]
PrecisionChoice = Annotated[
    Dtype | Literal["any"] | None, Parameter(name="--precision", converter=_read_text)
]
LoraRank = Annotated[int | None, Parameter(name="--lora", converter=_read_rank)]
# Parts by commas, which the help does not list a second time.
FrozenParts = Annotated[
    tuple[FrozenPart, ...], Parameter(negative="", show_choices=False, converter=_read_parts)
]
# A field of the package's record that a verb does not offer.
NoOption = Annotated[Any, Parameter(parse=False, show=False)]
