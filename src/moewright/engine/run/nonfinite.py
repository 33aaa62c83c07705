"""Steps whose gradients or loss are not finite: which tensor began it, and when it ends the job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isfinite

import torch

from moewright.engine.comm import collectives
from moewright.engine.model.layers import list_parameters
from moewright.engine.optim.fsdp import local_weight
from moewright.engine.run.step import StepResult
from moewright.engine.run.train_state import TrainState

# More than a dynamic loss scale takes to come down from its start.
_MAX_CONSECUTIVE_SKIPS = 50


def report_nonfinite(
    state: TrainState, result: StepResult, *, step: int, rank: int, consecutive_skips: int
) -> None:
    """Report (on rank 0) what was not finite in a step that was skipped.

    Every rank of the world calls this.

    Raises:
        FloatingPointError: on the rank that it began with, where skipping cannot help: a weight or
            the loss is not finite, or too many steps were skipped in a row.
    """
    state.optimizer.finish_pending()
    # What comes first is nearer to the cause: gradients of bad losses reach the ranks that hold the
    # experts.
    own_suspects = [
        next(_find_bad_weights(state), ""),
        "" if isfinite(result.backward.local_nll) else "the loss",
        next(_find_bad_gradients(state), ""),
    ]
    # Before any rank raises, because all have to take part.
    suspects = collectives.gather_json(own_suspects)
    culprit, name = _find_first_suspect(suspects)
    has_bad_weight = any(names[0] for names in suspects)
    has_skips_left = consecutive_skips < _MAX_CONSECUTIVE_SKIPS
    if isfinite(result.backward.loss) and has_skips_left and not has_bad_weight:
        if rank == 0:
            message = f"step {step} is skipped: {name} of rank {culprit} is not finite"
            print(message, file=sys.stderr, flush=True)
    elif rank == culprit:  # the launcher ends the others, which wait in their next collective
        after = "" if has_skips_left else f" after {consecutive_skips} skipped steps in a row"
        raise FloatingPointError(f"{name} is not finite{after}")


def _find_first_suspect(suspects: list[list[str]]) -> tuple[int, str]:
    """Return the rank and the name of the tensor that the trouble began with.

    `suspects` [rank][kind] are names, or "" where all is finite; kinds nearer to the cause come
    first.
    """
    for kind in range(len(suspects[0])):
        for rank, names in enumerate(suspects):
            if names[kind]:
                return rank, names[kind]
    return 0, "a reduced gradient"


def _find_bad_weights(state: TrainState) -> Iterator[str]:
    for parameter in list_parameters(state.model):
        if not torch.isfinite(local_weight(parameter)).all():
            yield f"weight {parameter.name}"


def _find_bad_gradients(state: TrainState) -> Iterator[str]:
    """Look at the sums of this rank's own micro-batches, where the reduction leaves them."""
    for bucket in state.optimizer.buckets:
        for parameter, gradient in bucket.grad_views:
            if not torch.isfinite(gradient).all():
                yield f"gradient of {parameter.name}"
