"""A tokenizer of shell scripts: words with their quoting, and the $-expressions inside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from moewright.spec.errors import BadInput, Reason

# A reader of a script's tokens, one after another.


class TokenReader:
    """A script's tokens, taken one after another.

    `redirections` are those of the last command that was taken: each redirection and its target.
    """

    def __init__(self, tokens: tuple[ShellToken, ...]) -> None:
        self.tokens = tokens
        self.position = 0
        self.redirections: list[tuple[ShellToken, ShellToken | None]] = []

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
        """Take the next token, which must be the keyword or operator `word`.

        Raises:
            BadInput: it is another.
        """
        token = self.take()
        if token.word != word:
            raise syntax_refusal(token.line, f"`{word}` is missing")

    def skip_separators(self) -> None:
        """Skip line ends and semicolons."""
        while (token := self.peek()) is not None and token.is_separator:
            self.position += 1

    def take_function_name(self) -> str:
        """Take `name()` or `function name` where a function starts here; return its name, or "".

        The next token is the first of the function's body then.
        """
        texts = [token.text for token in self.tokens[self.position : self.position + 5]]
        has_keyword = texts[:1] == ["function"]
        start = 1 if has_keyword else 0
        name = "".join(texts[start : start + 1])
        has_brackets = texts[start + 1 : start + 3] == ["(", ")"]
        if not (has_keyword or has_brackets) or not name or self.tokens[self.position].is_operator:
            return ""
        self.position += start + 1 + 2 * has_brackets
        self.skip_separators()
        return name

    def take_command(self) -> list[ShellToken]:
        """Take the words of one command; its redirections go to `redirections`."""
        words: list[ShellToken] = []
        self.redirections = []
        while (token := self.peek()) is not None and not token.is_operator:
            self.position += 1
            if token.is_redirection:
                self._take_redirection(token)
            else:
                words.append(token)
        return words

    def skip_redirections(self) -> None:
        """Skip what stands behind a compound command; `redirections` has it."""
        self.redirections = []
        while (token := self.peek()) is not None and token.is_redirection:
            self.position += 1
            self._take_redirection(token)

    def _take_redirection(self, redirection: ShellToken) -> None:
        """Take the file of `> file`; that of `>file` is part of the token."""
        target = self.peek()
        has_target = redirection.text.endswith((">", "<", "&", "<<-"))
        if has_target and target is not None and not target.is_operator:
            self.position += 1
            self.redirections.append((redirection, target))
        else:
            self.redirections.append((redirection, None))


_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "\n", ";", "&", "|", "(", ")")
_BLANKS = " \t"
_CLOSING = {"(": ")", "{": "}"}
# Letters of a word that neither end it nor begin anything else in it.
_PLAIN = re.compile(r"[^ \t\n;|&()\\'\"$`]+")
_BOTH_OUTPUTS = re.compile("&>>?")  # redirections
_HEREDOC = re.compile(r"\d*<<(-?)([^<].*)?", re.DOTALL)

Quoting = Literal["bare", "single", "double"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellToken:
    """A word or an operator; `pieces` are its parts, each with how it is quoted and its text.

    `heredoc` is the text of a here-document that the redirection `<<` brings; `is_literal` tells
    that its delimiter is quoted, so that nothing in it is expanded.
    """

    text: str
    pieces: tuple[tuple[Quoting, str], ...]
    line: int
    is_operator: bool = False
    heredoc: str | None = None
    is_literal: bool = False

    @property
    def word(self) -> str:
        """What the grammar knows it by: an operator, or a word without its quotes."""
        return self.text if self.is_operator else self.unquoted

    @property
    def unquoted(self) -> str:
        """The word where nothing in it is quoted, else "": keywords are not quoted."""
        return self.text if len(self.pieces) == 1 and self.pieces[0][0] == "bare" else ""

    @property
    def is_separator(self) -> bool:
        return self.is_operator and self.text in ("\n", ";", "&", ";;", ";&", ";;&")

    @property
    def is_redirection(self) -> bool:
        if not self.pieces or self.pieces[0][0] != "bare" or self.is_arithmetic:
            return False
        return self.pieces[0][1].lstrip("0123456789&").startswith((">", "<"))

    @property
    def is_arithmetic(self) -> bool:
        """Whether this is ((expression))."""
        return self.text.startswith("((") and self.text.endswith("))") and not self.is_operator

    @property
    def is_assignment(self) -> bool:
        """Whether the name before `=` is not quoted."""
        return bool(self.pieces) and self.pieces[0][0] == "bare" and "=" in self.text


def tokenize(text: str, line: int) -> tuple[ShellToken, ...]:
    """Return the words and operators of a text that starts at `line`.

    Comments, the ends of continued lines and the bodies of here-documents are left out.

    Raises:
        BadInput: a quote, a bracket or a here-document is left open.
    """
    text = text.replace("\r\n", "\n")  # as if saved on Linux, where bash would stop at them
    tokens: list[ShellToken] = []
    open_heredocs: list[int] = []  # places of redirections whose text comes after the line
    position = 0
    while position < len(text):
        operator = next((word for word in _OPERATORS if text.startswith(word, position)), "")
        if text.startswith("\\\n", position):
            position += 2
            line += 1
        elif text[position] in _BLANKS:
            position += 1
        elif text[position] == "#":
            position = _line_end(text, position)
        elif end := _arithmetic_end(text, position, line):
            word = text[position:end]
            tokens.append(ShellToken(text=word, pieces=(("bare", word),), line=line))
            line += word.count("\n")
            position = end
        elif match := _BOTH_OUTPUTS.match(text, position):
            tokens.append(ShellToken(text=match[0], pieces=(("bare", match[0]),), line=line))
            position = match.end()
        elif operator:
            tokens.append(ShellToken(text=operator, pieces=(), line=line, is_operator=True))
            position += len(operator)
            if operator == "\n":
                line += 1
                for place in open_heredocs:
                    body, position = _take_heredoc(tokens, place, text, position)
                    line += body.count("\n") + 1
                open_heredocs.clear()
        else:
            token, end = _read_word(text, position, line)
            tokens.append(token)
            if _HEREDOC.fullmatch(token.text) and token.is_redirection:
                open_heredocs.append(len(tokens) - 1)
            line += text.count("\n", position, end)
            position = end
    return tuple(tokens)


def split_expressions(text: str, line: int, quote: str = "") -> Iterator[tuple[str, str]]:
    """Yield (text | variable | command | arithmetic, body) for the parts of a text.

    Quotes that an assigned value still has are removed; `quote` is the one around the text.
    """
    position = 0
    plain = ""
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


def find_expressions(text: str, line: int) -> tuple[tuple[int, int], ...]:
    """Return where the expressions of a here-document begin and end."""
    spans: list[tuple[int, int]] = []
    position = 0
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text[position] in "$`":
            end = _expression_end(text, position, line)
            spans.append((position, end))
            position = end
        else:
            position += 1
    return tuple(spans)


def syntax_refusal(line: int, rule: str, nearest: str = "") -> BadInput:
    """Build the error for a line that cannot be read."""
    return BadInput(Reason(field=f"line {line}", rule=rule, nearest=nearest))


def _take_heredoc(
    tokens: list[ShellToken], place: int, text: str, position: int
) -> tuple[str, int]:
    """Give a redirection the text of its here-document; return it and where the script goes on."""
    redirection = tokens[place]
    match = _HEREDOC.fullmatch(redirection.text)
    assert match is not None
    spelled = match[2]
    if not spelled and place + 1 < len(tokens):
        spelled = tokens[place + 1].text
    delimiter = re.sub(r"[\\'\"]", "", spelled or "")
    lines: list[str] = []
    while position < len(text):
        end = _line_end(text, position)
        row = text[position:end]
        position = min(end + 1, len(text))
        if match[1]:
            row = row.lstrip("\t")
        if row == delimiter:
            body = "\n".join(lines)
            is_literal = spelled != delimiter
            tokens[place] = replace(redirection, heredoc=body, is_literal=is_literal)
            return body + ("\n" if lines else ""), position
        lines.append(row)
    raise syntax_refusal(redirection.line, f"the here-document {delimiter} is not closed")


def _arithmetic_end(text: str, position: int, line: int) -> int:
    """Return the position behind ((expression)); 0 where none starts."""
    if not text.startswith("((", position):
        return 0
    end = _bracket_end(text, position, line)
    return end if text.startswith("))", end - 2) else 0


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def read_whole(text: str, line: int) -> ShellToken:
    """Return a text as one word, blanks and operators in it, as in ${name%text}."""
    return _read_word(text, 0, line, is_whole=True)[0]


def split_replacement(text: str, line: int) -> tuple[ShellToken, ShellToken]:
    """Return both sides of the first stroke that is not quoted, as in ${name/text/other}."""
    before: list[tuple[Quoting, str]] = []
    pieces = list(read_whole(text, line).pieces)
    while pieces:
        quoting, piece = pieces.pop(0)
        left, stroke, right = piece.partition("/")
        if stroke and quoting == "bare" and piece[0] not in "$`":
            before += [(quoting, left)] if left else []
            pieces = [("bare", right), *pieces] if right else pieces
            break
        before.append((quoting, piece))
    return (
        ShellToken(text=text, pieces=tuple(before), line=line),
        ShellToken(text=text, pieces=tuple(pieces), line=line),
    )


def _read_word(
    text: str, start: int, line: int, *, is_whole: bool = False
) -> tuple[ShellToken, int]:
    """Read the word at `start`; return it and where it ends; a whole one goes to the end."""
    pieces: list[tuple[Quoting, str]] = []
    position = start
    bare = ""
    spelled = ""

    def close_bare() -> None:
        nonlocal bare
        if bare:
            pieces.append(("bare", bare))
            bare = ""

    while position < len(text) and (is_whole or not _ends_word(text[position], bare)):
        letter = text[position]
        if text.startswith("\\\n", position):
            position += 2
            continue
        if letter == "\\" and position + 1 < len(text):
            close_bare()
            end = position + 2
            pieces.append(("single", text[position + 1]))
        elif letter == "'" or text.startswith("$'", position):
            close_bare()
            begin = position + 1 + (letter == "$")
            end = _find_quote(text, "'", begin, line) + 1
            pieces.append(("single", text[begin : end - 1]))
        elif letter == '"':
            close_bare()
            end = _double_quote_end(text, position, line)
            pieces.append(("double", text[position + 1 : end - 1]))
        elif letter in "$`":
            end = _expression_end(text, position, line)
            close_bare()
            pieces.append(("bare", text[position:end]))
        elif letter == "(" and not is_whole:
            # Only arrays, process substitutions and extended patterns have brackets in a word.
            if not bare.endswith(("=", "<", ">", "@", "+", "*", "?", "!")):
                break
            end = _bracket_end(text, position, line)
            bare += text[position:end]
        else:
            plain = _PLAIN.match(text, position)
            end = plain.end() if plain else position + 1
            bare += text[position:end]
        spelled += text[position:end]
        position = end
    close_bare()
    return ShellToken(text=spelled, pieces=tuple(pieces), line=line), position


def _ends_word(letter: str, bare: str) -> bool:
    """Whether the letter ends a word; the & of >& does not."""
    return letter in " \t\n;|)" or (letter == "&" and not bare.endswith((">", "<")))


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
