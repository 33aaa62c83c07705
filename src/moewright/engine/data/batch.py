"""What one rank is given of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import Runs
from moewright.engine.runtime import Runtime

NO_TARGET = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Inputs and targets [mbs, seq_len / cp] int64, targets < 0 being none; those of each MTP
    depth, another token further ahead; the micro-batch's runs of tokens, before CP cuts them, that
    attend only each other, if not whole sequences.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ahead: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    runs: Runs | None


def batch_here(
    run: Runtime, inputs_BS: torch.Tensor, targets_BS: torch.Tensor, runs: Runs | None
) -> Batch:
    """This rank's part of whole sequences, of which a token follows another in one run alone."""
    ahead, shifted = [], (inputs_BS, targets_BS)
    for _ in range(run.model.mtp_layers):
        shifted = (_next(shifted[0], runs, 0), _next(shifted[1], runs, NO_TARGET))
        ahead.append((_part(run, shifted[0]), _part(run, shifted[1])))
    return Batch(
        inputs=_part(run, inputs_BS), targets=_part(run, targets_BS), ahead=tuple(ahead), runs=runs
    )


def _part(run: Runtime, x_BS: torch.Tensor) -> torch.Tensor:
    return x_BS[:, run.positions].to(run.device)


def _next(x_BS: torch.Tensor, runs: Runs | None, last: int) -> torch.Tensor:
    """One token to the left in every run, `last` at its end."""
    shifted = torch.cat((x_BS[:, 1:], x_BS.new_full((len(x_BS), 1), last)), 1)
    if runs is not None:
        shifted.view(-1)[[stop - 1 for stop in accumulate(runs.lengths)]] = last
    return shifted
