"""The options of a launch command that make the difference between two plans of a job."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass

from moewright.codec.megatron_options import SAME_OPTIONS
from moewright.exporters.megatron.script import all_flags, environment_variables
from moewright.spec.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenChanges:
    """What to write in a launch command, to leave out, and to export beside it; "" for nothing."""

    write: str = ""
    leave_out: str = ""
    export: str = ""

    def lines(self) -> tuple[str, ...]:
        """Return a line for each that is not empty."""
        named = (("write", self.write), ("leave out", self.leave_out), ("export", self.export))
        return tuple(f"{name}: {text}" for name, text in named if text)


def write_megatron_changes(
    before: Plan, after: Plan, options: Collection[str] = ()
) -> WrittenChanges:
    """Return Megatron-LM's options of a change.

    `options` are those that the command has: what says the same as a changed option by another name
    is left out too.
    """
    was = {name: shlex.join(values) for name, *values in all_flags(before)}
    now = {name: shlex.join(values) for name, *values in all_flags(after)}
    written = {name: value for name, value in now.items() if was.get(name) != value}
    dropped = [name for name in was if name not in now]
    changed = {*written, *dropped}
    for name in options:
        if name not in changed and changed & set(SAME_OPTIONS.get(name, ())):
            dropped.append(name)
    variables = set(environment_variables(after.layout)) - set(environment_variables(before.layout))
    return WrittenChanges(
        write=" ".join(f"{name} {value}".rstrip() for name, value in written.items()),
        leave_out=" ".join(dropped),
        export=" ".join(f"{name}={value}" for name, value in sorted(variables)),
    )
