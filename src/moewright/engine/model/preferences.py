"""Direct preference optimization: the loss of pairs of answers, from the nll of their tokens.

An answer is a segment of a sequence, whose tokens but the prompt's have a target; a pair is a
chosen answer and the rejected one after it. With d the log-probability of an answer under the model
less that under the reference, the loss of a pair is

    -(1 - e) log sigmoid(z) - e log sigmoid(-z),   z = beta (d_chosen - d_rejected)

(Rafailov et al. 2023, equation 7; with label smoothing e Mitchell 2023, "A note on DPO with noisy
preferences"). Its gradient by the nll of a token is one factor for all tokens of an answer.

Shapes: B sequences of S tokens, t tokens of this rank, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import logsigmoid

from moewright.engine.model.context_parallel import join_sequences
from moewright.engine.runtime import Runtime
from moewright.spec.workload import LossSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PairAnswers:
    """The answers of a micro-batch, before CP splits its sequences.

    `lengths` [segments] int64 are those of all segments, `segments` [P, 2] the places among them of
    the chosen and the rejected answer of each pair, and `reference` [P, 2] fp64 the
    log-probabilities of those under the reference.
    """

    lengths: torch.Tensor
    segments: torch.Tensor
    reference: torch.Tensor

    @property
    def pairs(self) -> int:
        return len(self.segments)

    def convert(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> PairAnswers:
        """Return the answers with every tensor converted."""
        tensors = {field.name: convert(getattr(self, field.name)) for field in fields(self)}
        return PairAnswers(**tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLosses:
    """The losses of the pairs of a micro-batch.

    `sums` [3] fp64 are sums over the pairs: of the loss, of how many have the greater reward on the
    chosen answer, and of the margin of the rewards, which are beta d. `nll_weights` [t] fp32 are
    the derivatives of the summed loss by the nll of this rank's tokens.
    """

    sums: torch.Tensor
    nll_weights: torch.Tensor


def build_answers(
    lengths: Sequence[Sequence[int]], reference: Sequence[Sequence[float]]
) -> PairAnswers:
    """Build the answers of sequences whose segments have these lengths.

    `reference` has the log-probability of each answer of each sequence, whose first segments these
    are.
    """
    segments: list[int] = []
    first = 0
    for row_lengths, answers in zip(lengths, reference, strict=True):
        segments.extend(range(first, first + len(answers)))
        first += len(row_lengths)
    logps = [value for answers in reference for value in answers]
    return PairAnswers(
        lengths=torch.tensor([size for row in lengths for size in row], dtype=torch.int64),
        segments=torch.tensor(segments, dtype=torch.int64).view(-1, 2),
        reference=torch.tensor(logps, dtype=torch.float64).view(-1, 2),
    )


@torch.no_grad()
def sum_answers(runtime: Runtime, answers: PairAnswers, nll_t: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected answers, fp64 [P, 2].

    All CP ranks call this, and have the same bits.
    """
    nll_T = join_sequences(runtime, nll_t)
    sums = torch.segment_reduce(nll_T.double(), "sum", lengths=answers.lengths, unsafe=True)
    return -sums[answers.segments]


@torch.no_grad()
def compute_pair_losses(runtime: Runtime, answers: PairAnswers, nll_t: torch.Tensor) -> PairLosses:
    """Return the losses of a micro-batch's pairs, on every rank that holds a part of them."""
    ratios = sum_answers(runtime, answers, nll_t) - answers.reference
    margins, losses, slopes = weigh_pairs(ratios[:, 0] - ratios[:, 1], runtime.workload.loss)
    weights = torch.zeros_like(answers.lengths, dtype=torch.float32)
    # The log-probability of an answer is the negative sum of its nll.
    weights[answers.segments[:, 0]] = -slopes.float()
    weights[answers.segments[:, 1]] = slopes.float()
    tokens = len(nll_t) * runtime.mesh.layout.cp  # known, so that the host waits for no sum
    weights_T = weights.repeat_interleave(answers.lengths, output_size=tokens)
    weights_BS = weights_T.view(-1, runtime.workload.seq_len)
    return PairLosses(
        sums=torch.stack((losses.sum(), (margins > 0).double().sum(), margins.sum())),
        nll_weights=weights_BS[:, runtime.positions.to(weights.device)].flatten(),
    )


def weigh_pairs(
    differences: torch.Tensor, loss: LossSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the reward margins of pairs, their losses, and these's derivatives, all [P].

    `differences` [P] are those of the log-ratios of both answers, by which the derivatives are.
    """
    smoothing = loss.dpo_label_smoothing
    margins = loss.dpo_beta * differences
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    slopes = smoothing * torch.sigmoid(margins) - (1 - smoothing) * torch.sigmoid(-margins)
    return margins, losses, loss.dpo_beta * slopes
