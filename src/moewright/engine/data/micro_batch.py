"""What one rank is given of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.runtime import Runtime

IGNORED_TARGET = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Inputs and targets [mbs, seq_len / cp] int64, targets < 0 being none; those of each MTP
    depth, another token further ahead; the micro-batch's runs of tokens, before CP cuts them, that
    attend only each other, if not whole sequences.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mtp: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    segments: Segments | None


def build_micro_batch(
    run: Runtime, inputs_BS: torch.Tensor, targets_BS: torch.Tensor, runs: Segments | None
) -> MicroBatch:
    """This rank's part of whole sequences, of which a token follows another in one run alone."""
    ahead, shifted = [], (inputs_BS, targets_BS)
    for _ in range(run.model.mtp_layers):
        shifted = (_shift_left(shifted[0], runs, 0), _shift_left(shifted[1], runs, IGNORED_TARGET))
        ahead.append(
            (_slice_rank_positions(run, shifted[0]), _slice_rank_positions(run, shifted[1]))
        )
    return MicroBatch(
        inputs=_slice_rank_positions(run, inputs_BS),
        targets=_slice_rank_positions(run, targets_BS),
        mtp=tuple(ahead),
        segments=runs,
    )


def _slice_rank_positions(run: Runtime, x_BS: torch.Tensor) -> torch.Tensor:
    return x_BS[:, run.positions].to(run.device)


def _shift_left(x_BS: torch.Tensor, runs: Segments | None, last: int) -> torch.Tensor:
    """One token to the left in every run, `last` at its end."""
    shifted = torch.cat((x_BS[:, 1:], x_BS.new_full((len(x_BS), 1), last)), 1)
    if runs is not None:
        shifted.view(-1)[[stop - 1 for stop in accumulate(runs.lengths)]] = last
    return shifted
