"""Text of files as it may be shown: on a terminal, in a table, in a spreadsheet."""

from __future__ import annotations

# A spreadsheet computes a cell that begins with one of these.
_FORMULA_STARTS = ("=", "+", "@", "-")


def escape_controls(text: str) -> str:
    r"""Return text with everything that does not print written out, such as \x1b or \u202e.

    Terminal escapes, marks that turn the direction of text, line ends and lone surrogates are
    among them; escaping twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def escape_formula(cell: str) -> str:
    """Return the text of a CSV cell that no spreadsheet takes for a formula.

    Numbers and percentages stay as they are, and so does a dash for what is not known.
    """
    cell = escape_controls(cell)
    if not cell.startswith(_FORMULA_STARTS) or cell == "-":
        return cell
    try:
        float(cell.removesuffix("%"))
    except ValueError:
        return f"'{cell}"
    return cell
