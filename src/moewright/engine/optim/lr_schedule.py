"""The learning rate of a step."""

from __future__ import annotations

import math

from moewright.rules.batch_rampup import wsd_decay_steps
from moewright.spec.workload import LrDecay, OptimizerSpec


def learning_rate(spec: OptimizerSpec, *, steps: int, step: int) -> float:
    """Return the learning rate of update `step` (from 1).

    It rises linearly for `warmup_steps`, falls to the floor, `min_lr_fraction` of the peak, at
    `decay_steps` (at the end of the run, `steps`, where that is 0), and stays there. It falls along
    a cosine, or (WSD, arXiv 2404.06395) in a line over the last steps alone.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    floor = spec.lr * spec.min_lr_fraction
    end = spec.decay_steps or steps
    if spec.lr_decay is LrDecay.WSD:
        length = wsd_decay_steps(spec, steps)
        progress = min(1.0, max(0.0, (step - (end - length)) / length))
        return floor + (spec.lr - floor) * (1 - progress)
    progress = min(1.0, (step - spec.warmup_steps) / max(1, end - spec.warmup_steps))
    return floor + (spec.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
