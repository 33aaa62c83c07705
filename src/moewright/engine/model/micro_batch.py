"""The input of the model: this rank's part of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.runtime import Runtime

IGNORED_TARGET = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Inputs and targets [mbs, seq_len / cp] int64 of this rank; a target below 0 has no loss.

    `mtp` has the inputs and targets of each MTP depth, each depth one token further ahead than the
    one before. `segments` are the packed documents of the micro-batch before CP splits it, whose
    tokens attend only each other; None where every sequence is one segment.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mtp: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    segments: Segments | None


def build_micro_batch(
    runtime: Runtime,
    inputs_BS: torch.Tensor,
    targets_BS: torch.Tensor,
    segments: Segments | None,
) -> MicroBatch:
    """Build this rank's part of whole sequences.

    The shifts for the MTP depths stay within a segment: none takes a token of the next one.
    """

    def take_local(x_BS: torch.Tensor) -> torch.Tensor:
        return x_BS[:, runtime.positions].to(runtime.device)

    mtp = []
    shifted_inputs_BS = inputs_BS
    shifted_targets_BS = targets_BS
    for _ in range(runtime.model.mtp_layers):
        shifted_inputs_BS = _shift_left(shifted_inputs_BS, segments, 0)
        shifted_targets_BS = _shift_left(shifted_targets_BS, segments, IGNORED_TARGET)
        mtp.append((take_local(shifted_inputs_BS), take_local(shifted_targets_BS)))
    return MicroBatch(
        inputs=take_local(inputs_BS),
        targets=take_local(targets_BS),
        mtp=tuple(mtp),
        segments=segments,
    )


def _shift_left(x_BS: torch.Tensor, segments: Segments | None, fill: int) -> torch.Tensor:
    """Shift every segment one token to the left, with `fill` at its end."""
    shifted_BS = torch.cat((x_BS[:, 1:], x_BS.new_full((len(x_BS), 1), fill)), 1)
    if segments is not None:
        segment_ends = [stop - 1 for stop in accumulate(segments.lengths)]
        shifted_BS.view(-1)[segment_ends] = fill
    return shifted_BS
