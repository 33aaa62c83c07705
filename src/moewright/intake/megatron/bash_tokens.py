"""A tokenizer of shell scripts: words with their quoting, and the $-expressions inside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moewright.spec.errors import BadInput, Reason

_OPERATORS = (";;", "&&", "||", "\n", ";", "&", "|", "(", ")")
_BLANKS = " \t\r"
_CLOSING = {"(": ")", "{": "}"}

Quoting = Literal["bare", "single", "double"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellToken:
    """A word or an operator; `pieces` are its parts, each with how it is quoted and its text."""

    text: str
    pieces: tuple[tuple[Quoting, str], ...]
    line: int
    is_operator: bool = False

    @property
    def unquoted(self) -> str:
        """The word where nothing in it is quoted, else "": keywords are not quoted."""
        return self.text if len(self.pieces) == 1 and self.pieces[0][0] == "bare" else ""

    @property
    def is_separator(self) -> bool:
        return self.is_operator and self.text in ("\n", ";", "&", ";;")

    @property
    def is_redirection(self) -> bool:
        return self.unquoted.lstrip("0123456789&").startswith((">", "<"))

    @property
    def is_assignment(self) -> bool:
        """Whether the name before `=` is not quoted."""
        return bool(self.pieces) and self.pieces[0][0] == "bare" and "=" in self.pieces[0][1]


def tokenize(text: str, line: int) -> Iterator[ShellToken]:
    """Yield the words and operators of a text that starts at `line`.

    Comments and the ends of continued lines are left out.

    Raises:
        BadInput: a quote or a bracket is left open.
    """
    position = 0
    while position < len(text):
        operator = next((word for word in _OPERATORS if text.startswith(word, position)), "")
        if text.startswith("\\\n", position):
            position += 2
            line += 1
        elif text.startswith("\\\r\n", position):
            position += 3
            line += 1
        elif text[position] in _BLANKS:
            position += 1
        elif text[position] == "#":
            position = _line_end(text, position)
        elif operator:
            yield ShellToken(text=operator, pieces=(), line=line, is_operator=True)
            position += len(operator)
            line += operator.count("\n")
        else:
            token, end = _read_word(text, position, line)
            yield token
            line += text.count("\n", position, end)
            position = end


def split_expressions(text: str, line: int) -> Iterator[tuple[str, str]]:
    """Yield (text | variable | command | arithmetic, body) for the parts of a text.

    Quotes that an assigned value still has are removed.
    """
    position = 0
    plain = ""
    quote = ""
    while position < len(text):
        letter = text[position]
        if letter == "\\" and position + 1 < len(text) and quote != "'":
            plain += _unescape(text[position + 1], quote)
            position += 2
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
            position += 1
        elif letter in "$`" and quote != "'":
            end = _expression_end(text, position, line)
            if plain:
                yield "text", plain
                plain = ""
            yield _classify_expression(text[position:end])
            position = end
        else:
            plain += letter
            position += 1
    if plain:
        yield "text", plain


class TokenReader:
    """A script's tokens, taken one after another."""

    def __init__(self, tokens: tuple[ShellToken, ...]) -> None:
        self.tokens = tokens
        self.position = 0

    @property
    def line(self) -> int:
        if not self.tokens:
            return 1
        return self.tokens[min(self.position, len(self.tokens) - 1)].line

    def peek(self) -> ShellToken | None:
        """Return the next token without taking it; None at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> ShellToken:
        """Take the next token.

        Raises:
            BadInput: the script has ended.
        """
        token = self.peek()
        if token is None:
            raise syntax_refusal(self.line, "the script ends inside a statement")
        self.position += 1
        return token

    def expect(self, word: str) -> None:
        """Take the next token, which must be the keyword `word`.

        Raises:
            BadInput: it is another.
        """
        if self.take().unquoted != word:
            raise syntax_refusal(self.line, f"`{word}` is missing")

    def skip_function_header(self) -> bool:
        """Skip `name()` or `function name` where a function starts here; return whether one does.

        The next token is the function's brace then.
        """
        texts = [token.text for token in self.tokens[self.position : self.position + 5]]
        has_keyword = texts[:1] == ["function"]
        name_end = 2 if has_keyword else 1
        name = "".join(texts[name_end - 1 : name_end])
        after = texts[name_end:]
        if after[:3] == ["(", ")", "{"]:
            self.position += name_end + 2
            return True
        if after[:1] == ["{"] and (has_keyword or name.endswith("()")):
            self.position += name_end
            return True
        return False

    def take_command(self) -> list[ShellToken]:
        """Take the words of one command, without its redirections."""
        words: list[ShellToken] = []
        while (token := self.peek()) is not None and not token.is_operator:
            self.position += 1
            if token.is_redirection:
                self._skip_redirection_target(token)
            else:
                words.append(token)
        if not words and token is not None and token.text in ("(", ")"):
            self.position += 1
        return words

    def _skip_redirection_target(self, redirection: ShellToken) -> None:
        """Skip the file of `> file`; that of `>file` is part of the token."""
        target = self.peek()
        if redirection.text.endswith((">", "<", "&")) and target and not target.is_operator:
            self.position += 1


def syntax_refusal(line: int, rule: str) -> BadInput:
    """Build the error for a line that cannot be read."""
    return BadInput(Reason(field=f"line {line}", rule=rule))


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _read_word(text: str, start: int, line: int) -> tuple[ShellToken, int]:
    """Read the word at `start`; return it and where it ends."""
    pieces: list[tuple[Quoting, str]] = []
    position = start
    bare = ""
    spelled = ""

    def close_bare() -> None:
        nonlocal bare
        if bare:
            pieces.append(("bare", bare))
            bare = ""

    while position < len(text) and not _ends_word(text[position], bare):
        letter = text[position]
        if text.startswith("\\\n", position):
            position += 2
            continue
        if letter == "\\" and position + 1 < len(text):
            close_bare()
            end = position + 2
            pieces.append(("single", text[position + 1]))
        elif letter == "'":
            close_bare()
            end = _find_quote(text, "'", position + 1, line) + 1
            pieces.append(("single", text[position + 1 : end - 1]))
        elif letter == '"':
            close_bare()
            end = _double_quote_end(text, position, line)
            pieces.append(("double", text[position + 1 : end - 1]))
        elif letter in "$`":
            end = _expression_end(text, position, line)
            close_bare()
            pieces.append(("bare", text[position:end]))
        elif letter == "(":
            if not bare.endswith("="):  # only an array stands in brackets inside a word
                break
            end = _bracket_end(text, position, line)
            bare += text[position:end]
        else:
            end = position + 1
            bare += letter
        spelled += text[position:end]
        position = end
    close_bare()
    return ShellToken(text=spelled, pieces=tuple(pieces), line=line), position


def _ends_word(letter: str, bare: str) -> bool:
    """Whether the letter ends a word; the & of >& does not."""
    return letter in " \t\r\n;|)" or (letter == "&" and not bare.endswith((">", "<")))


def _find_quote(text: str, quote: str, position: int, line: int) -> int:
    end = text.find(quote, position)
    if end < 0:
        raise BadInput(Reason(field=f"line {line}", rule=f"the quote {quote} is not closed"))
    return end


def _double_quote_end(text: str, position: int, line: int) -> int:
    """Return the position behind the double-quoted text that starts at `position`."""
    end = position + 1
    while end < len(text) and text[end] != '"':
        if text[end] == "\\":
            end += 2
        elif text[end] in "$`":
            end = _expression_end(text, end, line)
        else:
            end += 1
    if end >= len(text):
        raise BadInput(Reason(field=f"line {line}", rule='the quote " is not closed'))
    return end + 1


def _expression_end(text: str, position: int, line: int) -> int:
    """Return the position behind the expression that starts with a dollar or a back-quote."""
    if text[position] == "`":
        return _find_quote(text, "`", position + 1, line) + 1
    after = text[position + 1 : position + 2]
    if after in ("(", "{"):
        return _bracket_end(text, position + 1, line)
    if after.isalpha() or after == "_":
        end = position + 2
        while end < len(text) and (text[end].isalnum() or text[end] == "_"):
            end += 1
        return end
    is_special = after.isdigit() or (after != "" and after in "@*#?$!-")
    return position + 2 if is_special else position + 1


def _bracket_end(text: str, position: int, line: int) -> int:
    """Return the position behind the bracket that closes the one at `position`.

    Brackets in quotes and comments do not count.
    """
    open_brackets: list[str] = []
    end = position
    while end < len(text):
        letter = text[end]
        if letter == "\\":
            end += 1
        elif letter == "'":
            end = _find_quote(text, "'", end + 1, line)
        elif letter == '"':
            end = _double_quote_end(text, end, line) - 1
        elif letter == "#" and text[end - 1] in " \t\n":
            end = _line_end(text, end) - 1
        elif letter in _CLOSING:
            open_brackets.append(_CLOSING[letter])
        elif open_brackets and letter == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return end + 1
        end += 1
    rule = f"the bracket {text[position]} is not closed"
    raise BadInput(Reason(field=f"line {line}", rule=rule))


def _unescape(letter: str, quote: str) -> str:
    """Return what a back-slash before `letter` means inside `quote`."""
    if letter == "\n":
        return ""
    if quote == '"' and letter not in '$`"\\':
        return f"\\{letter}"
    return letter


def _classify_expression(text: str) -> tuple[str, str]:
    if text.startswith("$((") and text.endswith("))"):
        return "arithmetic", text[3:-2]
    if text.startswith("$("):
        return "command", text[2:-1]
    if text.startswith("`"):
        return "command", text[1:-1]
    if text.startswith("${"):
        return "variable", text[2:-1]
    return ("variable", text[1:]) if len(text) > 1 else ("text", "$")
