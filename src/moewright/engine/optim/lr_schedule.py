"""The learning rate of a step."""

from __future__ import annotations

import math

from moewright.spec.workload import OptimizerSpec


def learning_rate(spec: OptimizerSpec, *, steps: int, step: int) -> float:
    """Return the learning rate of update `step` (from 1).

    It rises linearly for `warmup_steps`, follows a cosine down to the floor, `min_lr_fraction` of
    the peak, at `decay_steps` (at the end of the run, `steps`, where that is 0), and stays there.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    floor = spec.lr * spec.min_lr_fraction
    decay_steps = spec.decay_steps or steps
    progress = min(1.0, (step - spec.warmup_steps) / max(1, decay_steps - spec.warmup_steps))
    return floor + (spec.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
