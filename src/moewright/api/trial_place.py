"""Where the trials of a tuning or of a sweep run, and what runs in them."""

from __future__ import annotations

from moewright.exporters.trial_script import TrialStart
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import Launcher, TrialPlace, TrialTrainer

_MAX_AT_ONCE = 64


def plan_start(place: TrialPlace) -> TrialStart:
    """Return how each trial is started.

    Raises:
        BadInput: the options contradict each other, or pretrain_gpt.py is not there.
    """
    if not 1 <= place.at_once <= _MAX_AT_ONCE:
        nearest = str(min(max(place.at_once, 1), _MAX_AT_ONCE))
        rule = f"must be in 1..{_MAX_AT_ONCE}"
        value = str(place.at_once)
        raise BadInput(Reason(field="--at-once", value=value, rule=rule, nearest=nearest))
    is_scheduled = place.launcher is Launcher.SLURM
    if place.at_once > 1 and not is_scheduled:
        rule = "trials of one machine would slow each other"
        raise BadInput(Reason(field="--at-once", value=str(place.at_once), rule=rule, nearest="1"))
    if place.sbatch and not is_scheduled:
        rule = "needs --launcher slurm"
        raise BadInput(Reason(field="--sbatch", value=place.sbatch, rule=rule))
    return TrialStart(
        trainer_script=_find_trainer(place),
        trainer_flags=place.megatron_args,
        setup=place.setup,
        sbatch=place.sbatch,
        is_scheduled=is_scheduled,
    )


def _find_trainer(place: TrialPlace) -> str:
    if place.trainer is TrialTrainer.OURS:
        if place.megatron or place.megatron_args:
            rule = "needs --trainer megatron"
            raise BadInput(Reason(field="--megatron", rule=rule))
        return ""
    rule = "is needed: pretrain_gpt.py, or the checkout of Megatron-LM that holds it"
    if place.megatron is None:
        raise BadInput(Reason(field="--megatron", rule=rule))
    path = place.megatron / "pretrain_gpt.py" if place.megatron.is_dir() else place.megatron
    if not path.is_file():
        raise BadInput(Reason(field="--megatron", value=str(place.megatron), rule=rule))
    return str(path.resolve())
