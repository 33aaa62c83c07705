"""The grammar of scripts: statements, pipes, conditions, loops and subshells."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

from moewright.intake.megatron.bash_branches import BranchOutcome, ShellBranches
from moewright.intake.megatron.bash_builtins import DecisionNeeded, require_known
from moewright.intake.megatron.bash_patterns import matches_pattern
from moewright.intake.megatron.bash_session import (
    MAX_DEPTH,
    Command,
    FunctionReturn,
    LoopJump,
    Redirections,
    ScriptExit,
)
from moewright.intake.megatron.bash_tokens import ShellToken, TokenReader, syntax_refusal, tokenize
from moewright.intake.megatron.launchers import LAUNCHERS, split_launcher
from moewright.intake.megatron.unknown import UnknownValue, find_unknown
from moewright.spec.errors import BadInput

_LOOPS = ("while", "until", "for", "select")
# What may train, or start what does.
_TRAINS = re.compile(r"python|torchrun|deepspeed|srun|mpirun|pretrain|\.sh\b|--[a-z]|eval|source")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_FILES = "which files there are"
_MAX_ROUNDS = 10_000  # of a loop
_CASE_ENDS = (";;", ";&", ";;&", "esac")


# Statements that do nothing but test, and the words behind a block whose status is a condition.
_TESTS = ("[[", "[", "test")
_BEHIND_CONDITIONS = {"then", "do"}
_MOST_GROUPS = 10  # of an expression: what a script asks of one


class ShellGrammar(ShellBranches):
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
            if token.word in ends:
                return
            if token.is_separator:
                reader.take()
            elif token.unquoted in _TESTS and not set(ends) & _BEHIND_CONDITIONS:
                yield from self._test_alone(reader, live)
            else:
                yield from self._list(reader, live)
        if ends:
            raise syntax_refusal(reader.line, f"`{ends[-1]}` is missing")

    def _test_alone(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run a test that decides nothing by itself: what it finds may stay unknown."""
        begin = reader.position
        try:
            yield from self._list(reader, live)
        except DecisionNeeded as error:
            reader.position = begin
            for _ in self._pipeline(reader, False):
                pass
            if _is_joint(reader):
                raise
            self.status, self.decision = None, error.unknown
            # What an expression would have taken apart is as unknown as the whole.
            self.variables.arrays["BASH_REMATCH"] = (error.unknown.mark(),) * _MOST_GROUPS

    def _list(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run pipelines joined by && and ||."""
        yield from self._pipelines(reader, live, live)

    def _pipelines(self, reader: TokenReader, live: bool, is_run: bool) -> Iterator[Command]:
        # Where its status is not known it is skipped from here; both ways behind it are tried.
        begin = reader.position
        line = reader.line
        try:
            yield from self._pipeline(reader, is_run)
        except DecisionNeeded as error:
            reader.position = begin
            for _ in self._pipeline(reader, False):
                pass
            # Nothing in this list depends on the status: a condition around it may still do.
            if not _is_joint(reader):
                raise
            yield from self._undecided_list(reader, error.unknown, line)
            return
        yield from self._behind_joint(reader, live)

    def _behind_joint(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run what stands behind && or ||, by the status of what is before it."""
        if not _is_joint(reader):
            return
        joint = reader.take()
        reader.skip_separators()
        # A program that a run calls succeeds in a run that trains.
        succeeded = self.status is not False
        yield from self._pipelines(reader, live, live and succeeded == (joint.text == "&&"))

    def _undecided_list(
        self, reader: TokenReader, decision: UnknownValue, line: int
    ) -> Iterator[Command]:
        """Run what stands behind a pipeline that only running tells the status of."""
        begin = reader.position
        start = self.save()

        def follow(status: bool, live: bool) -> Iterator[Command]:
            reader.position = begin
            self.status = status
            yield from self._behind_joint(reader, live)

        outcomes = [
            self.try_branch(reader, start, partial(follow, status)) for status in (True, False)
        ]
        yield from self.join(outcomes, decision, line)

    def _pipeline(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run the first command of a pipe; the others run in subshells and train nothing."""
        is_negated = False
        while (token := reader.peek()) is not None and token.unquoted in ("!", "time"):
            # `time` reports on a pipeline and leaves its status as it is.
            is_negated ^= token.unquoted == "!"
            reader.take()
        start = reader.position
        # Held back until the whole pipe is read, as a part behind it may refuse it.
        commands: list[Command] = []
        try:
            for command in self.element(reader, live):
                commands.append(command)
        except (ScriptExit, FunctionReturn, LoopJump, BadInput):
            yield from commands  # they were started before the script went elsewhere
            raise
        is_pipe = False
        parts = [(reader.tokens[start : reader.position], tuple(reader.redirections))]
        while (token := reader.peek()) is not None and token.is_operator and token.text[0] == "|":
            if token.text == "||":
                break
            reader.take()
            reader.skip_separators()
            begin = reader.position
            # Each part of a pipe is a subshell of bash: what it sets is lost behind it.
            if live and not is_pipe and _sets_variables(reader.tokens[start:begin]):
                raise syntax_refusal(token.line, "a pipe hides what its first part sets")
            is_pipe = True
            list(self.element(reader, False))
            part = reader.tokens[begin : reader.position]
            parts.append((part, tuple(reader.redirections)))
            if live and _trains(part):
                raise syntax_refusal(token.line, "a command that trains behind a pipe is not read")
            if live and part:
                self.status = None
                self.decision = UnknownValue(origin=f"whether `{part[0].text[:40]}` succeeds")
        if live:
            self.keep_filtered(parts)
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
            self.keep_status()
            self._double_brackets(reader, live)
        elif token.is_arithmetic:
            reader.take()
            if live:
                self.keep_status()
                self.set_arithmetic_status(token.text[2:-2], token.line)
        elif name := reader.take_function_name():
            begin = reader.position
            for _ in self.element(reader, False):
                pass
            if live:
                # Tokens, not text: a call of the function does not tokenize its body again.
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
        # A copy, as bash forks: assignments of a subshell must not reach what follows it.
        outer = self.variables
        exported = dict(self.exported)
        folder = self.folder
        self.variables = outer.copy()
        self.variables.run_command = self.print_output
        try:
            yield from self.block(reader, (")",), live)
        # `exit` ends the subshell alone; the script goes on behind its bracket.
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
        line = reader.take().line
        trainers: list[Command] = []
        status = self._read_condition(reader, live, trainers)
        yield from trainers
        reader.expect("then")
        ends = ("elif", "else", "fi")
        if live and status is None:
            decision = self.decision
            start = self.save()
            # Both branches run from one state: what they leave in common is known behind them.
            outcomes = [
                self.try_branch(reader, start, partial(self.block, reader, ends)),
                self.try_branch(reader, start, partial(self._otherwise, reader)),
            ]
            yield from self.join(outcomes, decision, line)
            return
        is_taken = live and bool(status)
        yield from self.block(reader, ends, is_taken)
        yield from self._otherwise(reader, live and not is_taken)

    def _otherwise(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        """Run what stands behind a branch that is not taken, and take `fi`."""
        token = reader.peek()
        if token is not None and token.unquoted == "elif":
            yield from self._if(reader, live)
        elif reader.take().unquoted == "else":
            yield from self.block(reader, ("fi",), live)
            reader.expect("fi")

    def _read_condition(
        self, reader: TokenReader, live: bool, trainers: list[Command]
    ) -> bool | None:
        """Run a condition up to `then`; return whether it holds, None where only running tells.

        It counts by its status; what it starts with a launcher may train, and goes to `trainers`.
        """
        begin = reader.position
        try:
            trainers += filter(_starts_launcher, self.block(reader, ("then",), live))
        except DecisionNeeded as error:
            reader.position = begin
            for _ in self.block(reader, ("then",), False):
                pass
            self.status, self.decision = None, error.unknown
        return self.status

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
            unknown = find_unknown("".join(items))
            if unknown is not None and unknown.origin:
                raise DecisionNeeded(unknown, keyword.line)
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
        trainers: list[Command] = []

        def rounds() -> Iterator[bool]:
            notes = len(self.notes)
            while True:
                reader.position = begin
                trainers.extend(filter(_starts_launcher, self.block(reader, ("do",), True)))
                if len(self.notes) > notes:  # of a file that is taken to be there
                    del self.notes[notes:]
                    raise DecisionNeeded(UnknownValue(origin=_FILES), keyword.line)
                if self.status is None:
                    raise DecisionNeeded(self.decision, keyword.line)
                if self.status != (keyword.unquoted == "while"):
                    reader.position = body
                    return
                reader.position = body
                yield True

        yield from self._repeat(reader, rounds(), live)
        yield from trainers  # `until torchrun ...; do sleep 60; done`

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
            except DecisionNeeded as error:
                self._forget(reader, body, error)
                return
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
        """Tell whether a loop goes on; one of which only running tells that is left out."""
        try:
            return next(rounds, False)
        except BadInput as error:
            self._forget(reader, body, error)
            return False

    def _forget(self, reader: TokenReader, body: int, error: BadInput) -> None:
        """Leave what a loop sets unknown, where only running tells how often it runs.

        Raises:
            BadInput: `error`, where the body may train.
        """
        reader.position = body
        self._skip_body(reader)
        tokens = reader.tokens[body : reader.position]
        if any(_TRAINS.search(t.text) for t in tokens if not _ASSIGNMENT.match(t.text)):
            raise error
        origin = "how often a loop runs"
        decision = error.unknown if isinstance(error, DecisionNeeded) else UnknownValue()
        for token in tokens:
            if match := _ASSIGNMENT.match(token.text):
                name = match[1]
                unknown = UnknownValue(
                    name=decision.name or name,
                    origin=decision.origin or origin,
                    words=tuple(_OPTION.findall(token.text)),
                )
                kept = self.variables.arrays.get(name, ()) if match[0].endswith("+=") else ()
                self.variables.arrays[name] = (*kept, unknown.mark())

    def _skip_body(self, reader: TokenReader) -> None:
        reader.expect("do")
        for _ in self.block(reader, ("done",), False):
            pass
        reader.expect("done")

    def _case(self, reader: TokenReader, live: bool) -> Iterator[Command]:
        line = reader.take().line
        subject = reader.take()
        value = ""
        decision = None
        if live:
            try:
                self.variables.ask(subject.text)
                value = require_known(" ".join(self.variables.expand(subject)), line)
            except DecisionNeeded as error:
                decision = error.unknown
        reader.skip_separators()
        reader.expect("in")
        if decision is not None:
            yield from self._undecided_case(reader, decision, line)
            return
        falls = False
        while True:
            matches = self._take_patterns(reader, value, live and not falls)
            if matches is None:
                return
            matches = matches or falls
            yield from self.block(reader, _CASE_ENDS, live and matches)
            end = reader.peek()
            falls = live and matches and end is not None and end.text == ";&"
            if not falls and not (end is not None and end.text == ";;&"):
                live = live and not matches

    def _take_patterns(self, reader: TokenReader, value: str, live: bool) -> bool | None:
        """Take the patterns of a branch of `case`, or `esac`; return whether one matches.

        None is for `esac`.
        """
        while (token := reader.peek()) is not None and (token.is_separator or token.text == "("):
            reader.take()
        token = reader.take()
        if token.unquoted == "esac":
            return None
        matches = False
        while token.text != ")" or not token.is_operator:
            if live and not matches and not token.is_operator:
                matches = matches_pattern(value, self.variables.pattern(token))
            token = reader.take()
        return matches

    def _undecided_case(
        self, reader: TokenReader, decision: UnknownValue, line: int
    ) -> Iterator[Command]:
        """Run all branches of a `case`, of which only running tells the value."""
        start = self.save()
        outcomes: list[BranchOutcome] = []
        has_rest = False
        while True:
            begin = reader.position
            if self._take_patterns(reader, "", False) is None:
                break
            patterns = reader.tokens[begin : reader.position]
            has_rest = has_rest or any(token.text == "*" for token in patterns)
            branch = partial(self.block, reader, _CASE_ENDS)
            outcomes.append(self.try_branch(reader, start, branch))
        if not has_rest:
            outcomes.append(BranchOutcome(commands=(), state=start))
        yield from self.join(outcomes, decision, line)


def _is_joint(reader: TokenReader) -> bool:
    token = reader.peek()
    return token is not None and token.is_operator and token.text in ("&&", "||")


def _starts_launcher(command: Command) -> bool:
    return split_launcher(command.words) is not None


def _sets_variables(tokens: Sequence[ShellToken]) -> bool:
    """Whether the first part of a pipe is a group that sets variables, which it does for itself."""
    return bool(tokens) and tokens[0].text == "{" and any(token.is_assignment for token in tokens)


def _trains(tokens: Sequence[ShellToken]) -> bool:
    """Whether a part of a script starts a trainer; a program in its own words is none."""
    programs = (*LAUNCHERS, "srun", "mpirun", "sbatch")
    words = [token.unquoted for token in tokens]
    is_filter = words[:1] != [] and words[0] in ("python", "python3") and "-c" in words[1:4]
    return not is_filter and any(word.rpartition("/")[2] in programs for word in words)
