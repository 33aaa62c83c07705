"""The exit codes of the command line."""

# A stable contract: scripts and CI ask for these; the README and each verb's help name them.
DONE = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3  # of `estimate`; of `train`, 3 is a rank that failed
OVER_BUDGET = 4  # of `check`
ALARMED = 5  # of `watch`
INTERRUPTED = 130
PIPE_CLOSED = 141
STOPPED = 143  # by SIGTERM; a run that trained has saved


def exit_code(*, holds: bool, otherwise: int = FAILED) -> int:
    """Return DONE where what a verb asks holds, and the code of what does not."""
    return DONE if holds else otherwise
