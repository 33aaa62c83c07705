"""Where the trials of a tuning or of a sweep run, and what runs in them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moewright.exporters.trial_script import TrialStart
from moewright.spec.errors import BadInput, Reason

_MAX_AT_ONCE = 64


class Launcher(StrEnum):
    """What starts a trial."""

    LOCAL = "local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


class TrialTrainer(StrEnum):
    """What runs in a trial."""

    OURS = "ours"
    MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlace:
    """Where trials run and what runs in them; `at_once` of them wait or run at the same time."""

    launcher: Launcher = Launcher.LOCAL
    trainer: TrialTrainer = TrialTrainer.OURS
    megatron: Path | None = None
    megatron_args: str = ""
    setup: str = ""
    sbatch: str = ""
    at_once: int = 1

    @property
    def is_in_process(self) -> bool:
        """Return whether this program itself starts the ranks of our engine."""
        return self.launcher is Launcher.LOCAL and self.trainer is TrialTrainer.OURS

    def to_start(self) -> TrialStart:
        """Return how each trial is started.

        Raises:
            BadInput: the options contradict each other, or pretrain_gpt.py is not there.
        """
        if not 1 <= self.at_once <= _MAX_AT_ONCE:
            nearest = str(min(max(self.at_once, 1), _MAX_AT_ONCE))
            rule = f"must be in 1..{_MAX_AT_ONCE}"
            value = str(self.at_once)
            raise BadInput(Reason(field="--at-once", value=value, rule=rule, nearest=nearest))
        is_scheduled = self.launcher is Launcher.SLURM
        if self.at_once > 1 and not is_scheduled:
            rule = "trials of one machine would slow each other"
            raise BadInput(
                Reason(field="--at-once", value=str(self.at_once), rule=rule, nearest="1")
            )
        if self.sbatch and not is_scheduled:
            rule = "needs --launcher slurm"
            raise BadInput(Reason(field="--sbatch", value=self.sbatch, rule=rule))
        return TrialStart(
            trainer_script=self._find_trainer(),
            trainer_flags=self.megatron_args,
            setup=self.setup,
            sbatch=self.sbatch,
            is_scheduled=is_scheduled,
        )

    def _find_trainer(self) -> str:
        if self.trainer is TrialTrainer.OURS:
            if self.megatron or self.megatron_args:
                rule = "needs --trainer megatron"
                raise BadInput(Reason(field="--megatron", rule=rule))
            return ""
        rule = "is needed: pretrain_gpt.py, or the checkout of Megatron-LM that holds it"
        if self.megatron is None:
            raise BadInput(Reason(field="--megatron", rule=rule))
        path = self.megatron / "pretrain_gpt.py" if self.megatron.is_dir() else self.megatron
        if not path.is_file():
            raise BadInput(Reason(field="--megatron", value=str(self.megatron), rule=rule))
        return str(path.resolve())


HERE = TrialPlace()  # our engine, on this machine
