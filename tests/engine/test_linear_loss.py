"""The loss that keeps no logits against the loss of all logits.

Compared are values, gradients, and how many logits exist at once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moewright.engine.comm.collectives import Group, TensorParallel
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.kernels.products import WIDE_PRODUCTS
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model.biases import AddBiasInPlace
from moewright.engine.model.parallel_linear import ColumnParallelLinear
from moewright.engine.model.vocab_parallel import (
    ChunkedLossSettings,
    LinearCrossEntropy,
    VocabParallelCrossEntropy,
    VocabShard,
)
from moewright.engine.observe.counters import Counters
from moewright.spec.ledger import FlopOp, Module

T, K, VOCABULARY = 12, 16, 37


def single_rank_shard(counters: Counters) -> VocabShard:
    """Return the shard of one rank, which is the whole vocabulary."""
    group = Group(name="tp", ranks=(0,), index=0, handle=None, counters=counters)
    tp = TensorParallel(group=group, sequence_parallel=False)
    return VocabShard(tp=tp, start=0, size=VOCABULARY)


def draw_inputs(
    dtype: torch.dtype, rows: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw inputs, a table with large and small logits, targets, and loss gradients.

    Some targets are none.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(T, K, generator=generator).to(dtype).requires_grad_()
    w = (3 * torch.randn(rows, K, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (T,), generator=generator)
    targets[::5] = -100
    return x, w, targets, torch.rand(T, generator=generator)


def full_logits_loss(
    x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    shard = single_rank_shard(Counters())
    (logits,) = ColumnParallelLinear.apply(x, shard.tp, WIDE_PRODUCTS, WeightGradStore(), w)
    if bias is not None:
        logits = AddBiasInPlace.apply(logits, bias, None)
    if len(w) > VOCABULARY:
        logits = logits[:, :VOCABULARY]
    return VocabParallelCrossEntropy.apply(logits, targets, shard, torch_kernels())


def chunked_loss(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    max_columns: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    shard = single_rank_shard(Counters())
    settings = ChunkedLossSettings(shard=shard, max_columns=max_columns, kernels=torch_kernels())
    return LinearCrossEntropy.apply(x, w, bias, targets, settings)


def collect_results(
    loss: torch.Tensor, grad: torch.Tensor, *leaves: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad)


@pytest.mark.parametrize("max_columns", [1, 7, 16, 37, 64])
@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 9])
def test_equals_the_loss_of_all_logits(max_columns: int, rows: int) -> None:
    """They agree also where the last rows of the table are padding.

    Padding gets no gradient; it is a whole chunk or part of one.
    """
    x, w, targets, grad = draw_inputs(torch.float32, rows)
    expected = collect_results(full_logits_loss(x, w, targets), grad, x, w)
    results = collect_results(chunked_loss(x, w, targets, max_columns), grad, x, w)
    for result, reference in zip(results, expected, strict=True):
        assert (result - reference).norm() <= 1e-6 * reference.norm()
    loss, _, grad_w = results
    assert not loss[targets < 0].any()
    assert not grad_w[VOCABULARY:].any()


def test_a_bias_of_the_logits_has_its_gradient() -> None:
    x, w, targets, grad = draw_inputs(torch.float32)
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)).requires_grad_()
    logits = torch.nn.functional.linear(x, w, bias)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = collect_results(loss, grad, x, w, bias)
    for loss in (
        full_logits_loss(x, w, targets, bias),
        chunked_loss(x, w, targets, 7, bias),
    ):
        results = collect_results(loss, grad, x, w, bias)
        for result, reference in zip(results, expected, strict=True):
            assert (result - reference).norm() <= 1e-6 * reference.norm()


def test_rounds_as_the_loss_of_all_logits_does() -> None:
    """In bf16, against fp64 of the same values.

    A kernel that rounds its result rounds the parts of x's gradient once each and then their sum:
    as far off again, in another direction.
    """
    x, w, targets, grad = draw_inputs(torch.bfloat16)
    exact_x, exact_w = (leaf.detach().double().requires_grad_() for leaf in (x, w))
    loss = torch.nn.functional.cross_entropy(exact_x @ exact_w.T, targets, reduction="none")
    exact = collect_results(loss, grad.double(), exact_x, exact_w)
    references = collect_results(full_logits_loss(x, w, targets), grad, x, w)
    results = collect_results(chunked_loss(x, w, targets, 8), grad, x, w)
    slack = (1.01, 2**0.5, 1.01)
    for result, reference, truth, factor in zip(results, references, exact, slack, strict=True):
        assert result.dtype == reference.dtype
        assert (result - truth).norm() <= factor * (reference - truth).norm()


def test_keeps_no_logits_and_makes_no_more_than_a_chunk_of_them() -> None:
    x, w, targets, grad = draw_inputs(torch.float32)
    counters = Counters()
    max_columns = 8
    widths = []
    saved = []

    plain = torch_kernels()

    def watch_sum(logits_TV: torch.Tensor, max_T: torch.Tensor) -> torch.Tensor:
        widths.append(logits_TV.shape[1])
        return plain.sum_exp(logits_TV, max_T)

    def watch_backward(
        grad_T: torch.Tensor,
        logits_TV: torch.Tensor,
        columns_T: torch.Tensor,
        log_sum_T: torch.Tensor | None,
        size: int,
    ) -> torch.Tensor:
        widths.append(logits_TV.shape[1])
        return plain.cross_entropy_backward(grad_T, logits_TV, columns_T, log_sum_T, size)

    watched = replace(plain, sum_exp=watch_sum, cross_entropy_backward=watch_backward)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with counters.counting(), counters.scopes.enter(Module.HEAD):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            settings = ChunkedLossSettings(
                shard=single_rank_shard(counters), max_columns=max_columns, kernels=watched
            )
            loss = LinearCrossEntropy.apply(x, w, None, targets, settings)
        loss.backward(grad)
    assert widths == 2 * [8, 8, 8, 8, 5]
    assert saved == [
        ((T, K), torch.float32),
        ((VOCABULARY, K), torch.float32),
        ((T,), torch.int64),
        ((T,), torch.float32),
    ]
    assert counters.flops == {(FlopOp.GEMM, Module.HEAD): 4 * 2 * T * K * VOCABULARY}
