"""Words of a shell script: where one ends, which parts of it are quoted, and what stands behind its
dollars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.spec.errors import BadInput, Reason

_OPERATORS = (";;", "&&", "||", "\n", ";", "&", "|", "(", ")")
_BLANKS = " \t\r"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellToken:
    """A word or an operator; `pieces` are (bare | double | single, text) without the quotes."""

    text: str
    pieces: tuple[tuple[str, str], ...]
    line: int
    is_operator: bool = False

    @property
    def unquoted(self) -> str:
        """The word where nothing in it is quoted: keywords are bare."""
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
    """Words and operators; comments and continued lines are gone. BadInput for quotes and brackets
    left open."""
    at = 0
    while at < len(text):
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text.startswith("\\\r\n", at):
            at, line = at + 3, line + 1
        elif text[at] in _BLANKS:
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif found := next((word for word in _OPERATORS if text.startswith(word, at)), ""):
            yield ShellToken(text=found, pieces=(), line=line, is_operator=True)
            at, line = at + len(found), line + found.count("\n")
        else:
            token, end = _word(text, at, line)
            yield token
            line += text.count("\n", at, end)
            at = end


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _word(text: str, start: int, line: int) -> tuple[ShellToken, int]:
    pieces: list[tuple[str, str]] = []
    at, bare, spelled = start, "", ""

    def close() -> None:
        nonlocal bare
        if bare:
            pieces.append(("bare", bare))
            bare = ""

    while (
        at < len(text)
        and text[at] not in " \t\r\n;|)"
        and not (text[at] == "&" and not bare.endswith((">", "<")))
    ):
        letter = text[at]
        if text.startswith("\\\n", at):
            at += 2
            continue
        if letter == "\\" and at + 1 < len(text):
            close()
            pieces.append(("single", text[at + 1]))
            end = at + 2
        elif letter == "'":
            close()
            end = _find(text, "'", at + 1, line) + 1
            pieces.append(("single", text[at + 1 : end - 1]))
        elif letter == '"':
            close()
            end = _double(text, at, line)
            pieces.append(("double", text[at + 1 : end - 1]))
        elif letter in "$`":
            end = _dollar(text, at, line)
            close()
            pieces.append(("bare", text[at:end]))
        elif letter == "(":
            if not bare.endswith("="):
                break
            end = _closed(text, at, line)
            bare += text[at:end]
        else:
            end = at + 1
            bare += letter
        spelled += text[at:end]
        at = end
    close()
    return ShellToken(text=spelled, pieces=tuple(pieces), line=line), at


def _find(text: str, letter: str, at: int, line: int) -> int:
    end = text.find(letter, at)
    if end < 0:
        raise BadInput(Reason(field=f"line {line}", rule=f"the quote {letter} is not closed"))
    return end


def _double(text: str, at: int, line: int) -> int:
    """Past the double-quoted text that starts at `at`."""
    end = at + 1
    while end < len(text) and text[end] != '"':
        if text[end] == "\\":
            end += 2
        elif text[end] in "$`":
            end = _dollar(text, end, line)
        else:
            end += 1
    if end >= len(text):
        raise BadInput(Reason(field=f"line {line}", rule='the quote " is not closed'))
    return end + 1


def _dollar(text: str, at: int, line: int) -> int:
    """Past the expression that starts with the dollar or the back-quote at `at`."""
    if text[at] == "`":
        return _find(text, "`", at + 1, line) + 1
    after = text[at + 1 : at + 2]
    if after in ("(", "{"):
        return _closed(text, at + 1, line)
    if after.isalpha() or after == "_":
        end = at + 2
        while end < len(text) and (text[end].isalnum() or text[end] == "_"):
            end += 1
        return end
    return at + 2 if after and (after.isdigit() or after in "@*#?$!-") else at + 1


def _closed(text: str, at: int, line: int) -> int:
    """Past the bracket that closes the one at `at`; those in quotes and comments do not count."""
    pairs, held, end = {"(": ")", "{": "}"}, [], at
    while end < len(text):
        letter = text[end]
        if letter == "\\":
            end += 1
        elif letter == "'":
            end = _find(text, "'", end + 1, line)
        elif letter == '"':
            end = _double(text, end, line) - 1
        elif letter == "#" and text[end - 1] in " \t\n":
            end = _line_end(text, end) - 1
        elif letter in pairs:
            held.append(pairs[letter])
        elif held and letter == held[-1]:
            held.pop()
            if not held:
                return end + 1
        end += 1
    raise BadInput(Reason(field=f"line {line}", rule=f"the bracket {text[at]} is not closed"))


def split_expressions(text: str, line: int) -> Iterator[tuple[str, str]]:
    """(text | variable | command | arithmetic, body) of a text; quotes that an assigned value still
    has are removed."""
    at, plain, quote = 0, "", ""
    while at < len(text):
        letter = text[at]
        if letter == "\\" and at + 1 < len(text) and quote != "'":
            if text[at + 1] == "\n":
                plain += ""
            elif quote == '"' and text[at + 1] not in '$`"\\':
                plain += text[at : at + 2]
            else:
                plain += text[at + 1]
            at += 2
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
            at += 1
        elif letter in "$`" and quote != "'":
            end = _dollar(text, at, line)
            body = text[at:end]
            if plain:
                yield "text", plain
                plain = ""
            yield _kind(body)
            at = end
        else:
            plain += letter
            at += 1
    if plain:
        yield "text", plain


def _kind(body: str) -> tuple[str, str]:
    if body.startswith("$((") and body.endswith("))"):
        return "arithmetic", body[3:-2]
    if body.startswith("$("):
        return "command", body[2:-1]
    if body.startswith("`"):
        return "command", body[1:-1]
    if body.startswith("${"):
        return "variable", body[2:-1]
    return ("variable", body[1:]) if len(body) > 1 else ("text", "$")


class TokenReader:
    """Tokens, taken one after another."""

    def __init__(self, held: tuple[ShellToken, ...]) -> None:
        self.tokens, self.position = held, 0

    @property
    def line(self) -> int:
        return self.tokens[min(self.position, len(self.tokens) - 1)].line if self.tokens else 1

    def peek(self) -> ShellToken | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> ShellToken:
        token = self.peek()
        if token is None:
            raise syntax_refusal(self.line, "the script ends inside a statement")
        self.position += 1
        return token

    def expect(self, word: str) -> None:
        if self.take().unquoted != word:
            raise syntax_refusal(self.line, f"`{word}` is missing")

    def skip_function_header(self) -> bool:
        """Whether `name() {` or `function name {` starts here; if so, the next token is its
        brace."""
        rest = [token.text for token in self.tokens[self.position : self.position + 5]]
        for head in (1 + (rest[:1] == ["function"]),):
            after = rest[head:]
            parenthesised = rest[head - 1 : head] and rest[head - 1].endswith("()")
            if after[:2] == ["(", ")"] and after[2:3] == ["{"]:
                self.position += head + 2
                return True
            if after[:1] == ["{"] and (parenthesised or rest[0] == "function"):
                self.position += head
                return True
        return False

    def take_command(self) -> list[ShellToken]:
        """The words of one command, without redirections."""
        words: list[ShellToken] = []
        while (token := self.peek()) is not None and not token.is_operator:
            self.position += 1
            if token.is_redirection:
                if (
                    token.text.endswith((">", "<", "&"))
                    and (after := self.peek())
                    and not after.is_operator
                ):
                    self.position += 1
            else:
                words.append(token)
        if not words and (token := self.peek()) is not None and token.text in ("(", ")"):
            self.position += 1
        return words


def syntax_refusal(line: int, rule: str) -> BadInput:
    return BadInput(Reason(field=f"line {line}", rule=rule))
