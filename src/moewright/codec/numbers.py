"""Numbers as people write them: 4096, 131,072, 128k, 4Ki, 15T, 1.5e12."""

from __future__ import annotations

import re
from decimal import Decimal

from moewright.spec.errors import BadInput, Reason

# The letters of model and token counts (B and G both mean 10**9), and the powers of 1024.
_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "b": 10**9,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_NUMBER = re.compile(
    r"([+-]?)"
    r"([0-9]+(?:_[0-9]+)*|[0-9]{1,3}(?:,[0-9]{3})+)?"  # 4096, 1_000_000 or 1,000,000
    r"(\.[0-9]*)?"
    r"(?:e([+-]?[0-9]{1,4}))?"
    r"\s*([kmbgt]i?|)",
    re.IGNORECASE,
)
_COUNT_LIMIT = 2**63
_LONGEST_TEXT = 28  # digits that Decimal multiplies exactly
_RULE = "must be a whole number such as 4096, 128k (128,000), 4Ki (4,096) or 15T"


def parse_count(text: str, field: str) -> int:
    """Return the whole number from 0 that `text` says.

    Decimal suffixes are k, M, B or G, and T in either case; Ki, Mi, Gi and Ti are powers of 1024.
    A fraction or an exponent is fine where the product is whole: 1.5T, 3e9. Digits may be grouped
    by underscores or commas.

    Raises:
        BadInput: `text` is no number, is negative, is not whole or is too large for 63 bits; the
            Reason names `field`.
    """
    match = _NUMBER.fullmatch(text.strip())
    has_digits = match is not None and (match[2] or (match[3] or ".") != ".")
    if match is None or not has_digits or len(text) > _LONGEST_TEXT:
        raise _refusal(text, field, _RULE)
    sign, digits, fraction, exponent, suffix = match.groups()
    if suffix.casefold() not in _SUFFIXES:
        raise _refusal(text, field, _RULE)
    plain = re.sub("[_,]", "", digits or "0") + (fraction or "").rstrip(".")
    value = Decimal(f"{plain}e{exponent or 0}") * _SUFFIXES[suffix.casefold()]
    if sign == "-" and value:
        raise _refusal(text, field, "must not be negative", text.strip().lstrip("-"))
    if value >= _COUNT_LIMIT:
        raise _refusal(text, field, "must be below 2**63")
    if value != int(value):
        raise _refusal(text, field, "must be a whole number", str(max(1, round(value))))
    return int(value)


def explain_thousands(text: str) -> str:
    """Say what a count written as 4k is where 4Ki may be meant: "4k is 4,000; 4Ki is 4,096"."""
    text = text.strip()
    thousands = text[:-1]
    if text[-1:] not in ("k", "K") or not thousands.isdecimal():
        return ""
    if int(thousands).bit_count() != 1:
        return ""
    count = int(thousands)
    return f"{text} is {count * 1000:,} tokens; {thousands}Ki is {count * 1024:,}"


def parse_bytes(text: str, field: str) -> int:
    """Return the bytes that `text` says, such as 16MB (16,000,000), 4GiB or 1048576.

    Raises:
        BadInput: `text` is no whole number of bytes, zero or more; the Reason names `field`.
    """
    number = text.strip()
    if number[-1:] in ("B", "b"):
        number = number[:-1]
    try:
        return parse_count(number, field)
    except BadInput as error:
        rule = "must be a size such as 16MB, 4GiB or 1048576"
        raise _refusal(text, field, rule) from error


def _refusal(text: str, field: str, rule: str, nearest: str = "") -> BadInput:
    return BadInput(Reason(field=field, value=text[:60], rule=rule, nearest=nearest[:60]))
