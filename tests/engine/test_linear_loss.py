"""The loss that keeps no logits against the loss of whole ones: values, gradients, and what is
there at once."""

from __future__ import annotations

import pytest
import torch

from moewright.engine.comm.collectives import Group, TensorParallel
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.model.linear_loss import LinearCrossEntropy
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.model.vocab_parallel import VocabParallelCrossEntropy, VocabShard
from moewright.engine.observe.counters import Counters
from moewright.spec.ledger import FlopOp, Module

T, K, VOCABULARY = 12, 16, 37


def single_rank_shard(books: Counters, size: int = VOCABULARY) -> VocabShard:
    """The whole vocabulary, on one rank."""
    group = Group(name="tp", ranks=(0,), index=0, handle=None, counters=books)
    return VocabShard(tp=TensorParallel(group=group, sequence_parallel=False), start=0, size=size)


def draw_inputs(
    dtype: torch.dtype, rows: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, a table with large and small logits, targets of which some are none, and gradients of
    the losses."""
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(T, K, generator=dice).to(dtype).requires_grad_()
    w = (3 * torch.randn(rows, K, generator=dice)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (T,), generator=dice)
    targets[::5] = -100
    return x, w, targets, torch.rand(T, generator=dice)


def full_logits_loss(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    books = Counters()
    part = single_rank_shard(books)
    (logits,) = ColumnParallelLinear.apply(x, part.tp, books, w)
    if len(w) == VOCABULARY:
        return VocabParallelCrossEntropy.apply(logits, targets, part, TorchKernels())
    return VocabParallelCrossEntropy.apply(logits[:, :VOCABULARY], targets, part, TorchKernels())


def results(
    loss: torch.Tensor, grad: torch.Tensor, *leaves: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad)


@pytest.mark.parametrize("most", [1, 7, 16, 37, 64])
@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 9])
def test_equals_the_loss_of_whole_logits(most: int, rows: int) -> None:
    """Also where the last rows of the table are padding, which gets no gradient, a whole piece of
    it or part of one."""
    x, w, targets, grad = draw_inputs(torch.float32, rows)
    books = Counters()
    wanted = results(full_logits_loss(x, w, targets), grad, x, w)
    found = results(
        LinearCrossEntropy.apply(
            x, w, targets, single_rank_shard(books), most, books, TorchKernels()
        ),
        grad,
        x,
        w,
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert not found[0][targets < 0].any()
    assert not found[2][VOCABULARY:].any()


def test_rounds_as_the_loss_of_whole_logits_does() -> None:
    """bf16, against fp64 of the same values. A kernel that rounds its result rounds the parts of
    x's gradient once each and then their sum: as far off again, in another direction.
    """
    x, w, targets, grad = draw_inputs(torch.bfloat16)
    exact_x, exact_w = (each.detach().double().requires_grad_() for each in (x, w))
    loss = torch.nn.functional.cross_entropy(exact_x @ exact_w.T, targets, reduction="none")
    exact = results(loss, grad.double(), exact_x, exact_w)
    books = Counters()
    wanted = results(full_logits_loss(x, w, targets), grad, x, w)
    found = results(
        LinearCrossEntropy.apply(x, w, targets, single_rank_shard(books), 8, books, TorchKernels()),
        grad,
        x,
        w,
    )
    for ours, theirs, truth, more in zip(found, wanted, exact, (1.01, 2**0.5, 1.01), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - truth).norm() <= more * (theirs - truth).norm()


def test_keeps_no_logits_and_makes_no_more_than_a_piece_of_them() -> None:
    x, w, targets, grad = draw_inputs(torch.float32)
    books, most, widths, kept = Counters(), 8, [], []

    class Seen(TorchKernels):
        def sums(self, logits_TV: torch.Tensor, top_T: torch.Tensor) -> torch.Tensor:
            widths.append(logits_TV.shape[1])
            return super().sum_exp(logits_TV, top_T)

        def losses_backward(
            self,
            grad_T: torch.Tensor,
            logits_TV: torch.Tensor,
            columns_T: torch.Tensor,
            log_sum_T: torch.Tensor | None,
            size: int,
        ) -> torch.Tensor:
            widths.append(logits_TV.shape[1])
            return super().cross_entropy_backward(grad_T, logits_TV, columns_T, log_sum_T, size)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with books.counting(), books.scopes.enter(Module.HEAD):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = LinearCrossEntropy.apply(
                x, w, targets, single_rank_shard(books), most, books, Seen()
            )
        loss.backward(grad)
    assert widths == 2 * [8, 8, 8, 8, 5]
    assert kept == [
        ((T, K), torch.float32),
        ((VOCABULARY, K), torch.float32),
        ((T,), torch.int64),
        ((T,), torch.float32),
    ]
    assert books.flops == {(FlopOp.GEMM, Module.HEAD): 4 * 2 * T * K * VOCABULARY}
