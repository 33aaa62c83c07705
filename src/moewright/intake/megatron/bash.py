"""An interpreter of launch scripts that starts nothing: bash as people write them.

It reads assignments, arrays, functions, conditions, loops over words, arithmetic, here-documents,
subshells, `eval`, `bash -c`, and scripts that are sourced or called and lie beside the script. A
value that is only known when the script runs (the output of programs, variables set elsewhere)
stands in the words as an unknown one (unknown.py), so that the reader of the value can say which
one is missing. Where an unknown value decides what runs, all branches run, and what they leave
differently is unknown. What cannot be followed is refused with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from moewright.intake.megatron.bash_builtins import PLAIN_PROGRAMS, print_text
from moewright.intake.megatron.bash_grammar import ShellGrammar
from moewright.intake.megatron.bash_session import (
    MAX_DEPTH,
    FunctionReturn,
    FunctionScope,
    LoopJump,
    Redirections,
    ScriptExit,
)
from moewright.intake.megatron.bash_session import Command as Command
from moewright.intake.megatron.bash_session import ShellReading as ShellReading
from moewright.intake.megatron.bash_tokens import ShellToken, TokenReader, syntax_refusal, tokenize
from moewright.intake.megatron.called_scripts import (
    CalledScript,
    find_called_script,
    find_script_file,
    is_environment_script,
    read_script_file,
)
from moewright.intake.megatron.launchers import split_launcher
from moewright.intake.megatron.unknown import UnknownValue, show_unknown
from moewright.spec.errors import BadInput, Reason

_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")


# NAME=<Specify path to file>/vocab.json: what a user still has to write, to bash a redirection.
_PLACEHOLDER = re.compile(
    r"^([ \t]*(?:export[ \t]+)?\w+=)(<[^<>\n|;&'\"()]+>[^\s'\"|;&<>]*)(?=[ \t]*(?:#.*)?\r?$)",
    re.MULTILINE,
)


def _quote_placeholders(text: str) -> str:
    return _PLACEHOLDER.sub(r"\1'\2'", text)


def read_commands(
    text: str,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
    *,
    script: Path | None = None,
    constants: Mapping[str, str] = MappingProxyType({}),
) -> ShellReading:
    """Return every command of a script that bash would reach, with its words expanded.

    Variables come from `constants`, then from the script, then from `environment`; `arguments` are
    the words that would stand behind the script's name on the command line; `script` is its file,
    beside which others are looked for.

    Raises:
        BadInput: names a line that cannot be read, before which no command stands.
    """
    commands: list[Command] = []
    interpreter = _Interpreter(environment, arguments, script)
    interpreter.variables.set_constants(constants)
    exit_line = 0
    fault: BadInput | None = None
    try:
        for command in interpreter.run(_quote_placeholders(text), first_line=1):
            commands.append(command)
    except ScriptExit as leaving:
        exit_line = leaving.line
    except RecursionError:
        rule = "holds commands inside of commands, too deep to be read"
        raise BadInput(Reason(field="script", rule=rule)) from None
    except BadInput as error:
        if not any(split_launcher(command.words) for command in commands):
            raise
        fault = error
    notes = (*dict.fromkeys(interpreter.notes), *_note_assumed(interpreter.variables.assumed_unset))
    return ShellReading(
        commands=tuple(commands),
        notes=notes,
        exit_line=exit_line,
        deciding=interpreter.variables.deciding if exit_line else (),
        files=dict(interpreter.files),
        fault=fault,
    )


class _Interpreter(ShellGrammar):
    """What simple commands do: builtins, functions, and scripts inside each other."""

    def __init__(
        self, environment: Mapping[str, str], arguments: Sequence[str], script: Path | None
    ) -> None:
        super().__init__(environment, arguments, script)
        self.variables.run_command = self.print_output

    def command(
        self,
        words: list[ShellToken],
        redirections: Redirections,
    ) -> Iterator[Command]:
        self.keep_status()
        self.status = True
        first = words[0].unquoted if words else ""
        if first in ("[", "test"):
            operands = [word for word in words[1:] if word.text != "]"]
            self.status = self.condition(operands, words[0].line, has_patterns=False)
        elif first == "exit":
            raise ScriptExit(words[0].line)
        elif first == "return":
            value = " ".join(self.variables.expand(words[1])) if len(words) > 1 else "0"
            self.status = value == "0"
            raise FunctionReturn
        elif first in ("break", "continue"):
            levels = self.variables.integer(words[1].text, words[0].line) if len(words) > 1 else 1
            raise LoopJump(levels, first == "continue")
        elif first in _DECLARATIONS:
            self.declare(first, words[1:])
        else:
            yield from self._start(words, redirections)

    def _start(
        self,
        words: list[ShellToken],
        redirections: Redirections,
    ) -> Iterator[Command]:
        """Yield a command with the variables before it, or set these where no command follows."""
        line = words[0].line if words else redirections[0][0].line
        previous = []
        while words and words[0].is_assignment:
            name = words[0].text.partition("=")[0].partition("[")[0].rstrip("+")
            old = self.variables.arrays.get(name, ())
            if not self.variables.assign(words[0]):
                break
            words = words[1:]
            previous.append((name, old))
        expanded = [text for word in words for text in self.variables.expand(word)]
        if not expanded:
            return
        own = {name: self.variables.first(name) for name, _ in previous}
        exported = {name: self.variables.first(name) for name in self.exported} | own
        for name, value in previous:
            self.variables.arrays[name] = value
        heredoc = self.heredoc(redirections)
        if own and expanded[0] == "read":  # IFS=, read a b
            self.variables.arrays |= {name: (value,) for name, value in own.items()}
            self.builtins()["read"](expanded, line, heredoc)
            self.variables.arrays |= dict(previous)
            return
        command = Command(words=tuple(expanded), exported=tuple(exported.items()), line=line)
        handler = self.builtins().get(expanded[0])
        is_function = expanded[0] in self.functions
        if is_function or expanded[0] in ("source", ".", "eval"):
            # NAME=value before what this shell runs itself holds as long as that runs.
            self.variables.arrays |= {name: (value,) for name, value in own.items()}
            run = self._call if is_function else self._inside
            yield from run(expanded, line)
            self.variables.arrays |= dict(previous)
        elif expanded[:2] == ["printf", "-v"] and len(expanded) > 3:
            printed = print_text([["printf", *expanded[3:]]], self.folder)
            unknown = UnknownValue(name=expanded[2], origin="what printf prints")
            self.variables.arrays[expanded[2]] = (unknown.mark() if printed is None else printed,)
        elif handler is not None:
            handler(expanded, line, heredoc)
        else:
            yield from self._program(command, heredoc, redirections)

    def _program(
        self,
        command: Command,
        heredoc: str | None,
        redirections: Redirections,
    ) -> Iterator[Command]:
        """Yield a program's command, or those of the script that it starts."""
        called = find_called_script(list(command.words), heredoc)
        if called is not None:
            yield from self._run_script(called, command)
            return
        if heredoc is not None and command.words[0] in ("cat", "tee"):
            self.keep_file(command.words, heredoc, redirections)
        if command.words[0] not in PLAIN_PROGRAMS:
            self.status = None
            program = show_unknown(command.words[0]).rpartition("/")[2][:40]
            self.decision = UnknownValue(origin=f"whether `{program}` succeeds")
        yield command

    def _call(self, words: list[str], line: int) -> Iterator[Command]:
        """Run a function of the script with its arguments."""
        outer = self.variables.arrays["@"]
        self.variables.set_arguments(words[1:])
        self.scopes.append(FunctionScope())
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise syntax_refusal(line, f"calls functions more than {MAX_DEPTH} deep")
        try:
            yield from self.element(TokenReader(self.functions[words[0]]), True)
        except FunctionReturn:
            pass
        finally:
            self.depth -= 1
            for name, value in self.scopes.pop().hidden.items():
                if value is None:
                    self.variables.arrays.pop(name, None)
                else:
                    self.variables.arrays[name] = value
            self.variables.set_arguments(outer)

    def _inside(self, words: list[str], line: int) -> Iterator[Command]:
        """Run the text of `eval`, or the file of `source`, with the script's own variables."""
        if words[0] == "eval":
            yield from self.run(" ".join(words[1:]), first_line=line)
            return
        if len(words) < 2:  # source <(curl ...): what a program prints
            self.notes.append(f"line {line}: what `{words[0]} <(...)` reads is not known here")
            self.variables.unread_origin = f"what line {line} sources"
            return
        text = read_script_file(words[1], self.folders(), self.files)
        if text is None:
            name = show_unknown(words[1])[:80]
            if is_environment_script(words[1]):
                self.notes.append(f"line {line}: {name} is not read")
                return
            self.notes.append(
                f"line {line}: {name} is not beside the script, so that what it sets is not known; "
                "what stood before it is kept"
            )
            self.variables.unread_origin = f"what {name.rpartition('/')[2]} sets"
            return
        outer = self.variables.arrays["@"]
        sources = self.variables.arrays.get("BASH_SOURCE", ())
        self.variables.arrays["BASH_SOURCE"] = (words[1], *sources)
        if len(words) > 2:
            self.variables.set_arguments(words[2:])
        try:
            yield from self.run(text, first_line=1)
        except FunctionReturn:
            self.depth -= 1
        except BadInput as error:
            raise _inside_file(words[1], error) from None
        finally:
            self.variables.arrays["BASH_SOURCE"] = sources
        if len(words) > 2:
            self.variables.set_arguments(outer)

    def _run_script(self, called: CalledScript, command: Command) -> Iterator[Command]:
        """Run a script that this one starts: it sees what is exported."""
        text = called.text
        script = self.script
        if not text:
            file_text = read_script_file(called.path, self.folders(), self.files)
            if file_text is None:
                yield command  # the reader of commands may find that nothing else trains
                return
            text = file_text
            script = find_script_file(called.path, self.folders()) or self.folder / called.path
            if (script, called.arguments) in self.started and not self._is_resubmitted(called):
                raise syntax_refusal(command.line, f"{called.path[:60]} starts itself")
        environment = {name: values[0] for name, values in self.inherited().items() if values}
        started = {**environment, **dict(command.exported), **called.scheduled}
        inner = _Interpreter(started, called.arguments, script)
        inner.variables.set_constants(self.variables.constants)
        inner.depth = self.depth
        inner.started = {*self.started, (script, called.arguments)}
        inner.folder = self.folder
        inner.files = self.files
        inner.exported = dict.fromkeys(name for name, _ in command.exported)
        inner.variables.unread_origin = self.variables.unread_origin
        inner.variables.assumed_unset = self.variables.assumed_unset
        try:
            yield from inner.run(text, first_line=command.line if called.text else 1)
        except ScriptExit:
            pass
        except BadInput as error:
            raise (_inside_file(called.path, error) if not called.text else error) from None
        finally:
            self.notes += inner.notes

    def _is_resubmitted(self, called: CalledScript) -> bool:
        """Whether a script hands itself to a scheduler, in whose job it goes on past that."""
        return any(not self.variables.first(name) for name in called.scheduled)

    def print_output(self, text: str, line: int) -> str | None:
        """Return what the commands of $(...) print; None where only running tells."""
        outer = self.variables
        status, folder = self.status, self.folder
        self.variables = outer.copy()
        self.variables.run_command = self.print_output
        try:
            reader = TokenReader(tokenize(text, line))
            if any(token.is_operator and token.text == "|" for token in reader.tokens):
                return None
            commands = list(self.block(reader, (), True))
            if any(command.decision is not None for command in commands):
                return None
            return print_text([command.words for command in commands], self.folder)
        except (BadInput, ScriptExit, FunctionReturn, LoopJump):
            return None
        finally:
            self.variables, self.status, self.folder = outer, status, folder


def _note_assumed(names: Mapping[str, str]) -> list[str]:
    """Return notes on variables that were taken as unset, though a file may set them."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in names.items():
        by_origin.setdefault(origin, []).append(name)
    return [
        f"{', '.join(absent)}: taken as unset, for {origin} is not known (--set {absent[0]}=...)"
        for origin, absent in by_origin.items()
    ]


def _inside_file(name: str, error: BadInput) -> BadInput:
    """Return an error with the file that it is about."""
    reason = error.reasons[0]
    if not reason.field.startswith("line "):
        return error
    number = int(reason.field.removeprefix("line ").split(" ")[0])
    return syntax_refusal(number, f"of {name[:60]}: {reason.rule}")
