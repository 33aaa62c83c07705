"""The exit codes of the command line, and what each means of each verb."""

from __future__ import annotations

# Little is imported: `main` waits for this file, and must be ready for an interrupt soon.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# A stable contract: scripts and CI ask for these; the README and each verb's help name them.
DONE = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3  # of `estimate`, `capture` and `check`
OVER_BUDGET = 4  # of `check`
ALARMED = 5  # of `watch`
NOTHING_VALID = 1  # of `tune`
RANK_FAILED = 3  # of verbs that train
INTERRUPTED = 130
PIPE_CLOSED = 141
STOPPED = 143  # by SIGTERM; a run that trained has saved


def exit_code(*, holds: bool, otherwise: int = FAILED) -> int:
    """Return DONE where what a verb asks holds, and the code of what does not."""
    return DONE if holds else otherwise


_MACHINE = "standard output cannot be written, or memory is out"
_NOT_USABLE = "input that cannot be used, or a file that cannot be read or written"
_RANK_FAILED = "a rank failed"
_STOPPED = "stopped by SIGTERM: the same command goes on"
_SAVED = "saved on SIGTERM: the same command goes on"
_FITS: Mapping[int, str] = {
    DONE: "the layout fits, or may (verdict fits or uncertain)",
    DOES_NOT_FIT: "the layout does not fit (verdict oom)",
}
_TRAINS: Mapping[int, str] = {RANK_FAILED: _RANK_FAILED, STOPPED: _SAVED}
_SERVES: Mapping[int, str] = {DONE: "ended by Ctrl-C"}

# What the codes of each verb mean besides those that all verbs have; no verb is without a line.
_MEANINGS: Mapping[str, Mapping[int, str]] = {
    "plan": {},
    "estimate": _FITS,
    "budget": {},
    "design": {},
    "validate": {},
    "fit": {},
    "train": _TRAINS,
    "finetune": _TRAINS,
    "chat": {},
    "verify": {
        DONE: "every figure is within its bound",
        FAILED: f"a figure is further off than its bound, or {_MACHINE}",
        RANK_FAILED: _RANK_FAILED,
    },
    "dryrun": {
        DONE: "every count equals its prediction",
        FAILED: f"a count does not equal its prediction, or {_MACHINE}",
    },
    "upcycle": {},
    "report": {},
    "diagnose": {},
    "watch": {
        DONE: "the run has ended, or all is read, without an alarm",
        ALARMED: "there was an alarm",
    },
    "forecast": {},
    "compare": {},
    "check": {
        DONE: "the change keeps its budgets",
        DOES_NOT_FIT: "the job fitted, or might, and does not any more",
        OVER_BUDGET: "a budget is broken",
    },
    "studio": _SERVES,
    "mcp": {DONE: "the client has closed, or Ctrl-C"},
    "tune": {NOTHING_VALID: f"no layout was found valid, or {_MACHINE}", STOPPED: _STOPPED},
    "export": {},
    "capture": _FITS,
    "models": {},
    "hardware": {},
    "completion": {},
    "data build": {},
    "convert import": {},
    "convert export": {},
    "bench machine": {},
    "bench search": {},
    "bench sweep": {STOPPED: _STOPPED},
}


def exit_meanings(verb: str) -> Mapping[int, str]:
    """Return what each exit code of a verb means; a verb of a group has its name before it."""
    every = {DONE: "done", FAILED: _MACHINE, BAD_INPUT: _NOT_USABLE}
    return dict(sorted({**every, **_MEANINGS[verb]}.items()))


def describe_exits(verb: str) -> str:
    """Return the exit codes of a verb in a sentence, for its help and its page."""
    parts = [f"{code} {meaning}" for code, meaning in exit_meanings(verb).items()]
    return f"Exit codes: {'; '.join(parts)}."
