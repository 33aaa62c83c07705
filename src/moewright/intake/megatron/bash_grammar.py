"""The grammar of scripts: statements, pipes, conditions, loops and subshells."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from moewright.intake.megatron.bash_builtins import PLAIN_PROGRAMS, OutputNeeded, require_known
from moewright.intake.megatron.bash_expansion import NAME, OUTPUT_PREFIX, UNKNOWN_VALUE
from moewright.intake.megatron.bash_patterns import matches_pattern
from moewright.intake.megatron.bash_session import (
    MAX_DEPTH,
    Command,
    FunctionReturn,
    LoopJump,
    Redirections,
    ScriptExit,
    ShellSession,
)
from moewright.intake.megatron.bash_tokens import ShellToken, TokenReader, syntax_refusal, tokenize
from moewright.spec.errors import BadInput

_LOOPS = ("while", "until", "for", "select")
# What may train, or start what does.
_TRAINS = re.compile(r"python|torchrun|deepspeed|srun|mpirun|pretrain|\.sh\b|--[a-z]|eval|source")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=")
_MAX_ROUNDS = 10_000  # of a loop


class ShellGrammar(ShellSession):
    """A reader of statements, which runs or skips them; what a simple command does is a subclass's.

    Statements are run where they are `live`, else skipped.
    """

    @abstractmethod
    def command(self, words: list[ShellToken], redirections: Redirections) -> Iterator[Command]:
        """Run a simple command and yield what it starts."""

    @abstractmethod
    def print_output(self, text: str, line: int) -> str | None:
        """Return what the commands of $(...) print; None where only running tells."""

    def run(self, text: str, *, first_line: int) -> Iterator[Command]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise syntax_refusal(first_line, f"starts shells more than {MAX_DEPTH} deep")
        reader = TokenReader(tokenize(text, first_line))
        yield from self.block(reader, (), True)
        self.depth -= 1

    def block(self, reader: TokenReader, ends: tuple[str, ...], live: bool) -> Iterator[Command]:
        """Run the statements up to one of the words in `ends`, or skip them where not `live`."""
        while (token := reader.peek()) is not None:
            if (token.text if token.is_operator else token.unquoted) in ends:
                return
            if token.is_separator:
                reader.take()
            else:
                yield from self._list(reader, live)
        if ends:
            raise syntax_refusal(reader.line, f"`{ends[-1]}` is missing")

    def _list(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run pipelines joined by && and ||."""
        is_run = live
        while True:
            begin = reader.position
            try:
                yield from self._pipeline(reader, is_run)
            except OutputNeeded:
                reader.position = begin
                list(self._pipeline(reader, False))
                if not self._guards(reader):
                    raise
                self.status = None
            joint = reader.peek()
            if joint is None or joint.text not in ("&&", "||") or not joint.is_operator:
                return
            reader.take()
            reader.skip_separators()
            # A program that a run calls succeeds in a run that trains.
            succeeded = self.status is not False
            is_run = live and succeeded == (joint.text == "&&")

    def _guards(self, reader: TokenReader) -> bool:
        """Whether `|| ... exit` stands in front: what is before it held in a run that trains."""
        begin = reader.position
        joint = reader.peek()
        if joint is None or not joint.is_operator or joint.text != "||":
            return False
        reader.take()
        reader.skip_separators()
        start = reader.position
        list(self._pipeline(reader, False))
        part = reader.tokens[start : reader.position]
        reader.position = begin
        return _leaves(part)

    def _pipeline(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run the first command of a pipe; the others run in subshells and train nothing."""
        is_negated = False
        while (token := reader.peek()) is not None and token.unquoted in ("!", "time"):
            is_negated ^= token.unquoted == "!"
            reader.take()
        start = reader.position
        commands: list[Command] = []
        try:
            for command in self.element(reader, live):
                commands.append(command)
        except (ScriptExit, FunctionReturn, LoopJump):
            yield from commands  # they were started before the script went elsewhere
            raise
        is_pipe = False
        while (token := reader.peek()) is not None and token.is_operator and token.text[0] == "|":
            if token.text == "||":
                break
            reader.take()
            reader.skip_separators()
            begin = reader.position
            if live and not is_pipe and _sets_variables(reader.tokens[start:begin]):
                raise syntax_refusal(token.line, "a pipe hides what its first part sets")
            is_pipe = True
            list(self.element(reader, False))
            part = reader.tokens[begin : reader.position]
            if live and _trains(part):
                raise syntax_refusal(token.line, "a command that trains behind a pipe is not read")
            if live and part:
                self.status = None
                self.status_source = part[0].text[:40]
        yield from commands
        if is_negated and live and self.status is not None:
            self.status = not self.status

    def element(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run one command, simple or compound."""
        token = reader.peek()
        if token is None:
            return
        keyword = token.unquoted
        if token.is_operator and token.text == "(":
            yield from self._subshell(reader, live)
        elif token.is_operator:
            raise syntax_refusal(token.line, f"`{token.text.strip() or 'line end'}` stands alone")
        elif keyword == "if":
            yield from self._if(reader, live)
        elif keyword in _LOOPS:
            yield from self._loop(reader, live)
        elif keyword == "case":
            yield from self._case(reader, live)
        elif keyword == "{":
            reader.take()
            yield from self.block(reader, ("}",), live)
            reader.expect("}")
        elif keyword == "[[":
            self._double_brackets(reader, live)
        elif token.is_arithmetic:
            reader.take()
            if live:
                self.set_arithmetic_status(token.text[2:-2], token.line)
        elif name := reader.take_function_name():
            begin = reader.position
            for _ in self.element(reader, False):
                pass
            if live:
                self.functions[name] = reader.tokens[begin : reader.position]
                self.status = True
        else:
            words = reader.take_command()
            if live and (words or reader.redirections):
                yield from self.command(words, tuple(reader.redirections))
            return
        reader.skip_redirections()

    def _subshell(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run ( ... ): what it sets is gone behind it."""
        reader.take()
        outer = self.variables
        exported = dict(self.exported)
        folder = self.folder
        self.variables = outer.copy()
        self.variables.run_command = self.print_output
        try:
            yield from self.block(reader, (")",), live)
        except ScriptExit:
            self._skip_to_bracket(reader)
        finally:
            self.variables, self.exported, self.folder = outer, exported, folder
        reader.expect(")")

    @staticmethod
    def _skip_to_bracket(reader: TokenReader) -> None:
        """Skip to the bracket that closes a subshell that was left."""
        depth = 0
        while (token := reader.peek()) is not None:
            if token.is_operator and token.text in "()":
                if token.text == ")" and not depth:
                    return
                depth += 1 if token.text == "(" else -1
            reader.take()

    def _double_brackets(self, reader: TokenReader, live: bool) -> None:
        """Take [[ ... ]], in which && and || belong to the test."""
        line = reader.take().line
        words: list[ShellToken] = []
        while (token := reader.take()).unquoted != "]]":
            if token.text != "\n":
                words.append(token)
        if live:
            self.status = self.condition(words, line, has_patterns=True)

    def _if(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        reader.take()
        is_open = live  # no branch has been taken yet
        while True:
            status, rule = self._read_condition(reader, is_open)
            reader.expect("then")
            if is_open and status is None:
                self._skip_undecided(reader, rule)
                is_open = False
            is_taken = is_open and bool(status)
            yield from self.block(reader, ("elif", "else", "fi"), is_taken)
            is_open = is_open and not is_taken
            keyword = reader.take().unquoted
            if keyword == "fi":
                return
            if keyword == "else":
                yield from self.block(reader, ("fi",), is_open)
                reader.expect("fi")
                return

    def _read_condition(self, reader: TokenReader, live: bool) -> tuple[bool | None, str]:
        """Run a condition up to `then`; return whether it holds, and what else only running tells.

        It counts by its status, not by what it would start.
        """
        begin = reader.position
        try:
            for _ in self.block(reader, ("then",), live):
                pass
        except OutputNeeded as error:
            reader.position = begin
            for _ in self.block(reader, ("then",), False):
                pass
            self.status_source = error.program
            return None, error.reasons[0].rule
        source = self.status_source
        rule = f"what follows depends on whether `{source}` succeeds, which only running tells"
        return self.status, rule

    def _skip_undecided(self, reader: TokenReader, rule: str) -> None:
        """Leave what the branches set unknown, where only running tells which one is taken.

        Raises:
            BadInput: `rule`, where a branch does more than set plain variables.
        """
        begin = reader.position
        for _ in self.block(reader, ("fi",), False):
            pass
        branches = reader.tokens[begin : reader.position]
        line = reader.tokens[begin].line if begin < len(reader.tokens) else reader.line
        reader.position = begin
        names = _assigned_names(branches)
        if names is None and not _leaves(branches):
            raise syntax_refusal(line, rule)
        for name in names or ():
            self.variables.arrays[name] = (f"\0{OUTPUT_PREFIX}{self.status_source}\0",)

    def _loop(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run a loop over words or under a condition."""
        keyword = reader.take()
        if keyword.unquoted in ("while", "until"):
            yield from self._while(reader, keyword, live)
            return
        name = reader.take()
        if name.is_arithmetic:
            yield from self._counted_loop(reader, name, live)
            return
        items = self._loop_items(reader, live)
        if live and keyword.unquoted == "select":
            raise syntax_refusal(keyword.line, "`select` asks somebody; write the commands out")

        def rounds() -> Iterator[bool]:
            if any(UNKNOWN_VALUE.fullmatch(item) for item in items):
                missing = next(iter(UNKNOWN_VALUE.findall("".join(items))))
                rule = f"loops over {missing}, which only running tells"
                raise syntax_refusal(keyword.line, rule)
            for item in items:
                self.variables.arrays[name.text] = (item,)
                yield True

        yield from self._repeat(reader, rounds(), live and bool(items))

    def _loop_items(self, reader: TokenReader, live: bool) -> list[str]:
        """Take the head of `for name in items; do`, of which only `do` is left."""
        reader.skip_separators()
        token = reader.peek()
        items = list(self.variables.arrays["@"])
        if token is not None and token.unquoted == "in":
            reader.take()
            items = []
            while not (token := reader.take()).is_separator:
                items += self.variables.expand(token) if live else []
        reader.skip_separators()
        return items

    def _while(self, reader: TokenReader, keyword: ShellToken, live: bool) -> Iterator[Command]:
        begin = reader.position
        for _ in self.block(reader, ("do",), False):
            pass
        body = reader.position

        def rounds() -> Iterator[bool]:
            while True:
                reader.position = begin
                for _ in self.block(reader, ("do",), True):
                    pass
                if self.status is None:
                    rule = f"loops while `{self.status_source}` succeeds, which only running tells"
                    raise syntax_refusal(keyword.line, rule)
                if self.status != (keyword.unquoted == "while"):
                    reader.position = body
                    return
                reader.position = body
                yield True

        yield from self._repeat(reader, rounds(), live)

    def _counted_loop(self, reader: TokenReader, head: ShellToken, live: bool) -> Iterator[Command]:
        """Run `for ((start; condition; step))`."""
        start, condition, step, *_ = [*head.text[2:-2].split(";"), "", ""]
        reader.skip_separators()

        def rounds() -> Iterator[bool]:
            self.variables.arithmetic(start or "0", head.line)
            while self.variables.integer(condition or "1", head.line):
                yield True
                self.variables.arithmetic(step or "0", head.line)

        yield from self._repeat(reader, rounds(), live)

    def _repeat(self, reader: TokenReader, rounds: Iterator[bool], live: bool) -> Iterator[Command]:
        """Run the body `do ... done` once a round."""
        body = reader.position
        count = 0
        while live and self._has_next_round(reader, rounds, body):
            count += 1
            if count > _MAX_ROUNDS:
                raise syntax_refusal(reader.line, f"loops more than {_MAX_ROUNDS} times")
            reader.position = body
            reader.expect("do")
            try:
                yield from self.block(reader, ("done",), True)
            except LoopJump as jump:
                if jump.levels > 1:
                    reader.position = body
                    self._skip_body(reader)
                    raise LoopJump(jump.levels - 1, jump.goes_on) from None
                if not jump.goes_on:
                    break
        reader.position = body
        self._skip_body(reader)
        if live:
            self.status = True

    def _has_next_round(self, reader: TokenReader, rounds: Iterator[bool], body: int) -> bool:
        """Tell whether a loop goes on.

        Where only running tells, a body that starts no program of training is left out, and what it
        sets is not known.

        Raises:
            BadInput: only running tells, and the body may train.
        """
        try:
            return next(rounds, False)
        except BadInput:
            reader.position = body
            self._skip_body(reader)
            tokens = reader.tokens[body : reader.position]
            if any(_TRAINS.search(token.text) for token in tokens):
                raise
            for token in tokens:
                if match := _ASSIGNMENT.match(token.text):
                    unknown = f"\0{OUTPUT_PREFIX}{self.status_source or 'a loop'}\0"
                    self.variables.arrays[match[1]] = (unknown,)
            return False

    def _skip_body(self, reader: TokenReader) -> None:
        reader.expect("do")
        for _ in self.block(reader, ("done",), False):
            pass
        reader.expect("done")

    def _case(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        line = reader.take().line
        subject = reader.take()
        value = ""
        if live:
            value = require_known(" ".join(self.variables.expand(subject)), line)
        reader.skip_separators()
        reader.expect("in")
        falls = False
        while True:
            while (token := reader.peek()) is not None and (
                token.is_separator or token.text == "("
            ):
                reader.take()
            token = reader.take()
            if token.unquoted == "esac":
                return
            matches = falls
            while token.text != ")" or not token.is_operator:
                if live and not matches and not token.is_operator:
                    matches = matches_pattern(value, self.variables.pattern(token))
                token = reader.take()
            yield from self.block(reader, (";;", ";&", ";;&", "esac"), live and matches)
            end = reader.peek()
            falls = live and matches and end is not None and end.text == ";&"
            if not falls and not (end is not None and end.text == ";;&"):
                live = live and not matches


def _leaves(tokens: Sequence[ShellToken]) -> bool:
    """Whether a branch, the only one, ends the script: it is not taken in a run that trains."""
    words = [token.unquoted for token in tokens if not token.is_separator]
    last = next((place for place, word in enumerate(words) if word == "exit"), None)
    if last is None or {"else", "elif"} & set(words) or _trains(tokens):
        return False
    return all(word.isdigit() or word in ("}", ")") for word in words[last + 1 :])


def _assigned_names(tokens: Sequence[ShellToken]) -> tuple[str, ...] | None:
    """Return the plain variables that skipped branches set; None where these do more.

    To print, to make folders and to leave the script changes no job.
    """
    keywords = ("then", "else", "elif", "fi", "if", "do", "done")
    programs = ("wget", "pip", "rm", "cp", "touch", "scontrol", "scancel", "nvidia-smi", "kill")
    harmless = (*PLAIN_PROGRAMS, *keywords, "exit", "return", "sleep", *programs)
    names: list[str] = []
    begins = True
    is_test = False  # between `elif` and `then`
    for token in tokens:
        if token.is_operator:
            begins = True
            continue
        if begins and token.unquoted == "export":
            continue
        if begins and token.unquoted in ("if", "elif", "then"):
            is_test = token.unquoted != "then"
        elif is_test:
            continue
        elif begins and token.is_assignment:
            name, _, value = token.text.partition("=")
            if not NAME.fullmatch(name) or value.startswith("("):
                return None
            names.append(name)
            continue
        elif begins and token.unquoted not in harmless:
            return None
        begins = begins and token.unquoted in keywords
    return tuple(names)


def _sets_variables(tokens: Sequence[ShellToken]) -> bool:
    """Whether the first part of a pipe is a group that sets variables, which it does for itself."""
    return bool(tokens) and tokens[0].text == "{" and any(token.is_assignment for token in tokens)


def _trains(tokens: Sequence[ShellToken]) -> bool:
    """Whether a part of a script starts a trainer; a program in its own words is none."""
    programs = ("torchrun", "python", "python3", "deepspeed", "srun", "mpirun", "sbatch")
    words = [token.unquoted for token in tokens]
    is_filter = words[:1] != [] and words[0] in ("python", "python3") and "-c" in words[1:4]
    return not is_filter and any(word.rpartition("/")[2] in programs for word in words)
