"""Branches of a script of which only running tells which one is taken: all run, and are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moewright.intake.megatron.bash_builtins import DecisionNeeded
from moewright.intake.megatron.bash_expansion import ShellVariables
from moewright.intake.megatron.bash_session import (
    Command,
    FunctionReturn,
    LoopJump,
    ScriptExit,
    ShellSession,
)
from moewright.intake.megatron.bash_tokens import ShellToken, TokenReader, syntax_refusal
from moewright.intake.megatron.unknown import UNKNOWN_VALUE, UnknownValue, find_unknown

Branch = Callable[[bool], Iterator[Command]]
_MAX_BRANCHES = 2000  # each is run; this many take seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellState:
    """What a branch may change."""

    variables: ShellVariables
    functions: Mapping[str, tuple[ShellToken, ...]]
    files: Mapping[str, str]
    exported: Mapping[str, None]
    folder: Path
    depth: int
    status: bool | None
    decision: UnknownValue


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchOutcome:
    """What a branch starts, what it leaves, and where it goes instead of on."""

    commands: tuple[Command, ...]
    state: ShellState
    jump: ScriptExit | FunctionReturn | LoopJump | None = None


class ShellBranches(ShellSession):
    """A script whose branches can be tried, one after another, from one state."""

    def save(self) -> ShellState:
        """Return a copy of the state."""
        return ShellState(
            variables=self.variables.copy(),
            functions=dict(self.functions),
            files=dict(self.files),
            exported=dict(self.exported),
            folder=self.folder,
            depth=self.depth,
            status=self.status,
            decision=self.decision,
        )

    def restore(self, state: ShellState) -> None:
        """Go back to a state, which stays as it is."""
        self.variables = state.variables.copy()
        self.functions = dict(state.functions)
        self.files = dict(state.files)
        self.exported = dict(state.exported)
        self.folder = state.folder
        self.depth = state.depth
        self.status = state.status
        self.decision = state.decision

    def try_branch(self, reader: TokenReader, start: ShellState, branch: Branch) -> BranchOutcome:
        """Run a branch from a state; the reader stands behind it then."""
        self.tried_branches += 1
        if self.tried_branches > _MAX_BRANCHES:
            rule = f"more than {_MAX_BRANCHES} branches depend on what only running tells"
            raise syntax_refusal(reader.line, rule)
        self.restore(start)
        begin = reader.position
        commands: list[Command] = []
        jump: ScriptExit | FunctionReturn | LoopJump | None = None
        try:
            for command in branch(True):
                commands.append(command)
        except (ScriptExit, FunctionReturn, LoopJump) as leaving:
            jump = leaving
            left = self.save()
            self.restore(start)
            reader.position = begin
            for _ in branch(False):
                pass
            self.restore(left)
        return BranchOutcome(commands=tuple(commands), state=self.save(), jump=jump)

    def join(
        self, outcomes: Sequence[BranchOutcome], decision: UnknownValue, line: int
    ) -> Iterator[Command]:
        """Yield what the branches start, and go on with what they leave.

        A branch that ends the script or a function is not taken where another goes on, as in a run
        that trains.

        Raises:
            DecisionNeeded: a branch leaves a loop, and another does not.
        """
        for outcome in outcomes:
            for command in outcome.commands:
                yield command if command.decision else replace(command, decision=decision)
        going_on = [outcome for outcome in outcomes if outcome.jump is None]
        if any(isinstance(outcome.jump, LoopJump) for outcome in outcomes) and (
            len({repr(outcome.jump) for outcome in outcomes}) > 1
        ):
            raise DecisionNeeded(decision, line)
        states = [outcome.state for outcome in going_on or outcomes]
        self.restore(states[0])
        for state in states[1:]:
            self.functions = {**state.functions, **self.functions}
            self.files = {**state.files, **self.files}
            self.exported = {**self.exported, **state.exported}
        if len({state.status for state in states}) > 1:
            self.status, self.decision = None, decision
        _join_variables(self.variables, [state.variables for state in states], decision)
        if not going_on:
            jumps = [outcome.jump for outcome in outcomes if outcome.jump is not None]
            raise next((jump for jump in jumps if isinstance(jump, FunctionReturn)), jumps[0])


def _join_variables(
    joined: ShellVariables, branches: Sequence[ShellVariables], decision: UnknownValue
) -> None:
    for name in dict.fromkeys(name for branch in branches for name in branch.arrays):
        values = [branch.arrays.get(name, ()) for branch in branches]
        if len(set(values)) > 1:
            joined.arrays[name] = _join_arrays(values, _name(decision, name, values))
    for name in dict.fromkeys(name for branch in branches for name in branch.tables):
        tables = [branch.tables.get(name, {}) for branch in branches]
        for key in dict.fromkeys(key for table in tables for key in table):
            texts = [(table[key],) if key in table else () for table in tables]
            if len(set(texts)) > 1:
                joined.tables.setdefault(name, {})[key] = " ".join(
                    _join_arrays(texts, _name(decision, name, texts))
                )


def _name(decision: UnknownValue, name: str, values: Iterable[Sequence[str]]) -> UnknownValue:
    """Return what decides a variable: without a variable of its own, a single value answers."""
    is_single = all(len(" ".join(value).split()) <= 1 for value in values)
    return replace(decision, name=name) if is_single and not decision.name else decision


def _join_arrays(values: Sequence[tuple[str, ...]], decision: UnknownValue) -> tuple[str, ...]:
    """Return what several values have in common in front, and an unknown rest."""
    if all(len(value) <= 1 for value in values):
        texts = ["".join(value) for value in values]
        return (" ".join(_join_words([text.split() for text in texts], decision)),)
    return tuple(_join_words(values, decision))


def _join_words(values: Sequence[Sequence[str]], decision: UnknownValue) -> list[str]:
    count = 0
    while len({tuple(value[: count + 1]) for value in values}) == 1:
        count += 1
    rests = dict.fromkeys(tuple(value[count:]) for value in values)
    words = tuple(option for rest in rests for word in rest for option in _list_words(word))
    return [*values[0][:count], replace(decision, words=words).mark()]


def _list_words(word: str) -> tuple[str, ...]:
    """Return the words that a word may be."""
    unknown = find_unknown(word) if UNKNOWN_VALUE.fullmatch(word) else None
    return unknown.words if unknown is not None and unknown.words else (word,)
