"""A reader of a script's tokens, one after another."""

from __future__ import annotations

from moewright.intake.megatron.bash_tokens import ShellToken, syntax_refusal


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
        if (token.text if token.is_operator else token.unquoted) != word:
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
