"""A step whose gradients or loss are not finite: which tensor of which rank it began with, and when
it ends the job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isfinite

import torch
from torch.distributed.tensor import DTensor

from moewright.engine.comm import collectives
from moewright.engine.model.layers import slots_of
from moewright.engine.run.step import StepResult, Trainee

_MOST_SKIPS = 50  # in a row; more than a dynamic loss scale takes to come down from its start


def look_into(job: Trainee, result: StepResult, *, step: int, rank: int, skips: int) -> None:
    """Say (rank 0) what was not finite in a step that was skipped, the last of `skips` in a row.

    Raises FloatingPointError on the rank that it began with where skipping cannot help: a weight or
    the loss is not finite, or too many steps were skipped. Every rank of the world calls this.
    """
    job.optimizer.settle()
    loss = "" if isfinite(result.own_nll) else "the loss"
    # What comes first is nearer to the cause: gradients of bad losses reach the ranks that hold the
    # experts.
    suspects = (_bad_weights(job), iter((loss,) if loss else ()), _bad_gradients(job))
    found = collectives.gather_json([next(names, "") for names in suspects])
    named = (
        (rank, names[kind])
        for kind in range(len(suspects))
        for rank, names in enumerate(found)
        if names[kind]
    )
    culprit, name = next(named, (0, "a reduced gradient"))
    if isfinite(result.loss) and skips < _MOST_SKIPS and not any(names[0] for names in found):
        if rank == 0:
            print(
                f"step {step} is skipped: {name} of rank {culprit} is not finite",
                file=sys.stderr,
                flush=True,
            )
    elif rank == culprit:  # the others wait for it until they are ended
        after = f" after {skips} skipped steps in a row" if skips >= _MOST_SKIPS else ""
        raise FloatingPointError(f"{name} is not finite{after}")


def _bad_weights(job: Trainee) -> Iterator[str]:
    for slot in slots_of(job.model):
        weight = slot.owner.weight
        if not torch.isfinite(weight.to_local() if isinstance(weight, DTensor) else weight).all():
            yield f"weight {slot.name}"


def _bad_gradients(job: Trainee) -> Iterator[str]:
    """Of what this rank's own micro-batches added up to, where the reduction leaves that
    standing."""
    for bucket in job.optimizer.buckets:
        for slot, gradient in bucket.views:
            if not torch.isfinite(gradient).all():
                yield f"gradient of {slot.name}"
