"""A step whose gradients or loss are not finite: which tensor of which rank it began with, and when
it ends the job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isfinite

import torch
from torch.distributed.tensor import DTensor

from moewright.engine.comm import collectives
from moewright.engine.model.layers import list_parameters
from moewright.engine.run.step import StepResult, TrainState

_MAX_CONSECUTIVE_SKIPS = (
    50  # in a row; more than a dynamic loss scale takes to come down from its start
)


def report_nonfinite(
    job: TrainState, result: StepResult, *, step: int, rank: int, consecutive_skips: int
) -> None:
    """Say (rank 0) what was not finite in a step that was skipped, the last of `skips` in a row.

    Raises FloatingPointError on the rank that it began with where skipping cannot help: a weight or
    the loss is not finite, or too many steps were skipped. Every rank of the world calls this.
    """
    job.optimizer.finish_pending()
    loss = "" if isfinite(result.local_nll) else "the loss"
    # What comes first is nearer to the cause: gradients of bad losses reach the ranks that hold the
    # experts.
    suspects = (_find_bad_weights(job), iter((loss,) if loss else ()), _find_bad_gradients(job))
    found = collectives.gather_json([next(names, "") for names in suspects])
    named = (
        (rank, names[kind])
        for kind in range(len(suspects))
        for rank, names in enumerate(found)
        if names[kind]
    )
    culprit, name = next(named, (0, "a reduced gradient"))
    if (
        isfinite(result.loss)
        and consecutive_skips < _MAX_CONSECUTIVE_SKIPS
        and not any(names[0] for names in found)
    ):
        if rank == 0:
            print(
                f"step {step} is skipped: {name} of rank {culprit} is not finite",
                file=sys.stderr,
                flush=True,
            )
    elif rank == culprit:  # the others wait for it until they are ended
        after = (
            f" after {consecutive_skips} skipped steps in a row"
            if consecutive_skips >= _MAX_CONSECUTIVE_SKIPS
            else ""
        )
        raise FloatingPointError(f"{name} is not finite{after}")


def _find_bad_weights(job: TrainState) -> Iterator[str]:
    for slot in list_parameters(job.model):
        weight = slot.owner.weight
        if not torch.isfinite(weight.to_local() if isinstance(weight, DTensor) else weight).all():
            yield f"weight {slot.name}"


def _find_bad_gradients(job: TrainState) -> Iterator[str]:
    """Of what this rank's own micro-batches added up to, where the reduction leaves that
    standing."""
    for bucket in job.optimizer.buckets:
        for slot, gradient in bucket.grad_views:
            if not torch.isfinite(gradient).all():
                yield f"gradient of {slot.name}"
