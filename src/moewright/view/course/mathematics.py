r"""Formulas: a part of LaTeX, written as MathML, which browsers draw by themselves.

    >>> str(write_mathematics("a_i"))
    '<math><mrow><msub><mi>a</mi><mi>i</mi></msub></mrow></math>'

What it reads: letters, numbers, operators, groups, `^`, `_`, \frac, \sqrt, \text, \mathrm, sums and
the letters, signs and spaces listed below. Everything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.quoting import Html

_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "alpha": "α",
        "beta": "β",
        "gamma": "γ",
        "delta": "δ",
        "Delta": "Δ",
        "epsilon": "ε",
        "eta": "η",
        "lambda": "λ",
        "mu": "μ",
        "pi": "π",
        "rho": "ρ",
        "sigma": "σ",
        "tau": "τ",
        "phi": "φ",
        "Phi": "Φ",
        "infty": "∞",
    }
)
_SIGNS: Mapping[str, str] = MappingProxyType(
    {
        "cdot": "·",
        "times": "×",
        "le": "≤",
        "ge": "≥",
        "ne": "≠",
        "approx": "≈",
        "to": "→",
        "leftarrow": "←",
        "in": "∈",
        "pm": "±",
        "mid": "|",
        "lceil": "⌈",
        "rceil": "⌉",
        "lfloor": "⌊",
        "rfloor": "⌋",
        "dots": "…",
        "ldots": "…",
        "cdots": "⋯",
        "sum": "∑",
        "prod": "∏",
        "int": "∫",
        "%": "%",
        "{": "{",
        "}": "}",
        "_": "_",
        "#": "#",
        "odot": "⊙",
        "otimes": "⊗",
        "partial": "∂",
        "nabla": "∇",
        "forall": "∀",
    }
)
_SPACES: Mapping[str, str] = MappingProxyType(
    {"quad": "1em", ",": "0.17em", ";": "0.28em", " ": "0.25em"}
)
_WORDS = ("max", "min", "log", "ln", "exp", "mod", "arg", "softmax", "sigmoid", "top")
_LARGE = ("∑", "∏", "∫")
_FENCES = ("(", ")", "[", "]", "|")
_TOKEN = re.compile(r"\\([A-Za-z]+|.)|(\d+(?:\.\d+)?(?:,\d{3})*)|([A-Za-z])|(\S)|(\s+)")


def write_mathematics(text: str, *, is_block: bool = False) -> Html:
    """Return a formula as MathML, in a line of text or as a block.

    Raises:
        BadInput: a command is not known, or a brace has no partner.
    """
    reader = _FormulaReader(text)
    row = reader.read_row("")
    if is_block:
        return Html.write('<math display="block">{}</math>', row)
    return Html.write("<math>{}</math>", row)


class _FormulaReader:
    """A place in the tokens of a formula."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in _TOKEN.finditer(text) if not match[5]]
        self._at = 0

    def read_row(self, end: str) -> Html:
        """Read up to a closing token, or to the end of the text where it is ""."""
        parts = []
        while self._peek() != end:
            if not self._peek():
                raise self._refuse(f"no {end} closes")
            parts.append(self._read_scripted())
        self._at += 1
        if len(parts) == 1 and end:
            return parts[0]
        return Html.write("<mrow>{}</mrow>", Html.concat(parts))

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _read_scripted(self) -> Html:
        base = self._read_atom()
        lower = upper = None
        while self._peek() in ("_", "^"):
            is_lower = self._peek() == "_"
            self._at += 1
            script = self._read_atom()
            if is_lower:
                lower = script
            else:
                upper = script
        if lower is None and upper is None:
            return base
        is_large = any(sign in base for sign in _LARGE)
        if upper is None:
            tag = "munder" if is_large else "msub"
            return _element(tag, base, lower)
        if lower is None:
            return _element("mover" if is_large else "msup", base, upper)
        return _element("munderover" if is_large else "msubsup", base, lower, upper)

    def _read_atom(self) -> Html:
        if self._at >= len(self._tokens):
            raise self._refuse("something is missing at the end")
        token = self._tokens[self._at]
        self._at += 1
        command, number, letter, sign = token[1], token[2], token[3], token[4]
        if number:
            return _element("mn", number)
        if letter:
            return _element("mi", letter)
        if sign == "{":
            return self.read_row("}")
        if sign in _FENCES:
            return Html.write('<mo stretchy="false">{}</mo>', sign)
        if sign:
            return _element("mo", "−" if sign == "-" else sign)
        return self._read_command(command)

    def _read_command(self, command: str) -> Html:
        if command in ("text", "mathrm", "mathtt", "operatorname"):
            word = self._read_braced_text()
            return _element("mtext" if command == "text" else "mi", word)
        if command == "frac":
            return _element("mfrac", self._read_atom(), self._read_atom())
        if command == "sqrt":
            return _element("msqrt", self._read_atom())
        if command == "left":
            return self._read_fenced()
        if command in _WORDS:
            return _element("mi", command)
        if command in _LETTERS:
            return _element("mi", _LETTERS[command])
        if command in _SPACES:
            return Html.write('<mspace width="{}"/>', _SPACES[command])
        if command in _SIGNS:
            return _element("mo", _SIGNS[command])
        raise self._refuse(f"\\{command} is not known")

    def _read_fenced(self) -> Html:
        """Read what stands between two signs that are as tall as it is."""
        opening = self._read_sign()
        row = self.read_row("\\right")
        return Html.write(
            "<mrow><mo>{}</mo>{}<mo>{}</mo></mrow>", *(opening, row, self._read_sign())
        )

    def _read_sign(self) -> str:
        sign = self._peek()
        if sign not in _FENCES:
            raise self._refuse(f"a bracket is one of {' '.join(_FENCES)}")
        self._at += 1
        return sign

    def _read_braced_text(self) -> str:
        """Read the text between braces as it stands, spaces too."""
        start = self._tokens[self._at].end() if self._peek() == "{" else -1
        end = self._text.find("}", start)
        if start < 0 or end < 0:
            raise self._refuse("text stands in braces")
        while self._tokens[self._at].start() < end:
            self._at += 1
        self._at += 1
        return self._text[start:end].replace("\\_", "_")

    def _refuse(self, rule: str) -> BadInput:
        return BadInput(Reason(field="formula", value=self._text, rule=rule))


def _element(tag: str, *children: Html | str | None) -> Html:
    # Tags are those above; text is quoted.
    inner = Html.concat(Html.write("{}", child) for child in children)
    return Html.concat((Html.trust(f"<{tag}>"), inner, Html.trust(f"</{tag}>")))
