"""The input of the model: this rank's part of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from moewright.engine.kernels.attention import Segments
from moewright.engine.model.preferences import PairAnswers
from moewright.engine.runtime import Runtime
from moewright.rules.packing import IGNORED_TARGET


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedTokens:
    """The tokens of a micro-batch that router losses and statistics count, where not all do.

    `mask` [t] fp32 is 1 for each of this rank's tokens between blocks that counts, and 0 for the
    others; `sequence_weights` [t] fp32 are the same over the tokens that count in the sequence of
    each. `total` tokens count in the whole micro-batch, on all ranks that share it, in `sequences`
    of its sequences; both are 1 at least.
    """

    mask: torch.Tensor
    sequence_weights: torch.Tensor
    total: int
    sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Inputs and targets [mbs, seq_len / cp] int64 of this rank; a target below 0 has no loss.

    `mtp` has the inputs and targets of each MTP depth, each depth one token further ahead than the
    one before. `segments` are the packed documents of the micro-batch before CP splits it, whose
    tokens attend only each other; None where every sequence is one segment. `counted` None: all
    tokens count. `answers` are those of preference pairs; None where the objective is another.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    mtp: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    segments: Segments | None
    counted: CountedTokens | None = None
    answers: PairAnswers | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on a device; copies of pinned memory are not waited for."""
        return self._convert(lambda x: x.to(device, non_blocking=True))

    def clone(self) -> MicroBatch:
        """Return a copy."""
        return self._convert(torch.clone)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs and targets, those of the MTP depths after them."""
        return (self.inputs, self.targets, *(tensor for pair in self.mtp for tensor in pair))

    def pin(self) -> MicroBatch:
        """Return the micro-batch in pinned memory of the host."""
        return self._convert(torch.Tensor.pin_memory)

    def _convert(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        segments = self.segments
        counted = self.counted
        if segments is not None:
            segments = replace(segments, cu_seqlens=convert(segments.cu_seqlens))
        if counted is not None:
            counted = replace(
                counted,
                mask=convert(counted.mask),
                sequence_weights=convert(counted.sequence_weights),
            )
        answers = self.answers
        return MicroBatch(
            inputs=convert(self.inputs),
            targets=convert(self.targets),
            mtp=tuple((convert(inputs), convert(targets)) for inputs, targets in self.mtp),
            segments=segments,
            counted=counted,
            answers=None if answers is None else answers.convert(convert),
        )


def build_micro_batch(
    runtime: Runtime,
    inputs_BS: torch.Tensor,
    targets_BS: torch.Tensor,
    segments: Segments | None,
    is_counted_BS: torch.Tensor | None = None,
) -> MicroBatch:
    """Build this rank's part of whole sequences, where these are.

    `is_counted_BS` says which tokens router losses and statistics count; None: all. The shifts for
    the MTP depths stay within a segment: none takes a token of the next one.
    """
    positions = runtime.positions

    def take_local(x_BS: torch.Tensor) -> torch.Tensor:
        return x_BS[:, positions]

    mtp = []
    shifted_inputs_BS = inputs_BS
    shifted_targets_BS = targets_BS
    for _ in range(runtime.model.mtp_layers):
        # While sequences are whole: the next token may belong to another CP rank.
        shifted_inputs_BS = _shift_left(shifted_inputs_BS, segments, 0)
        shifted_targets_BS = _shift_left(shifted_targets_BS, segments, IGNORED_TARGET)
        mtp.append((take_local(shifted_inputs_BS), take_local(shifted_targets_BS)))
    return MicroBatch(
        inputs=take_local(inputs_BS),
        targets=take_local(targets_BS),
        mtp=tuple(mtp),
        segments=segments,
        counted=None if is_counted_BS is None else _count_tokens(runtime, is_counted_BS),
    )


def _count_tokens(runtime: Runtime, is_counted_BS: torch.Tensor) -> CountedTokens:
    """Return this rank's part of the tokens that count.

    With sequence parallelism the ranks of a TP group split the tokens.
    """
    # At least 1, for sequences of which no token counts.
    totals_B = is_counted_BS.sum(1).clamp(min=1)
    local_BS = is_counted_BS[:, runtime.positions].float()
    weights_BS = local_BS / totals_B[:, None]
    layout = runtime.mesh.layout
    tokens = local_BS.numel() // (layout.sp_degree)
    first = 0
    if layout.sp:
        first = runtime.mesh.coordinate("tp") * tokens
    own = slice(first, first + tokens)
    return CountedTokens(
        mask=local_BS.flatten()[own],
        sequence_weights=weights_BS.flatten()[own],
        total=max(1, int(is_counted_BS.sum())),
        sequences=max(1, int(is_counted_BS.any(1).sum())),
    )


def _shift_left(x_BS: torch.Tensor, segments: Segments | None, fill: int) -> torch.Tensor:
    """Shift every segment one token to the left, with `fill` at its end."""
    shifted_BS = torch.cat((x_BS[:, 1:], x_BS.new_full((len(x_BS), 1), fill)), 1)
    if segments is not None:
        segment_ends = [stop - 1 for stop in accumulate(segments.lengths)]
        shifted_BS.view(-1)[segment_ends] = fill
    return shifted_BS
