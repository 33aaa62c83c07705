"""Products of row groups and what lies between them, against plain ones.

Groups have any size; some are empty.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moewright.engine.dispatch.rows import Unpermute
from moewright.engine.kernels import matmul as matmul_module
from moewright.engine.kernels.attention import AttentionMask, attention, attention_backward
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.kernels.matmul import grouped_matmul, matmul, zero_empty_groups
from moewright.engine.model.activations import SwiGlu
from moewright.engine.observe.counters import Counters
from moewright.spec.ledger import FlopOp

SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=6)


@pytest.fixture(params=["MKL", "oneDNN"])
def _fp32_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as on an Intel CPU, and as on another."""
    monkeypatch.setattr(matmul_module, "_mkl_is_fast", lambda: request.param == "MKL")


@pytest.mark.usefixtures("_fp32_by")
@given(sizes=SIZES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_group_is_multiplied_by_its_own_matrix(sizes: list[int]) -> None:
    """Whatever comes after a group, and at the end; each row is counted once, padding is not."""
    generator = torch.Generator().manual_seed(len(sizes))
    a = torch.randn(sum(sizes), 24, generator=generator)
    b = torch.randn(len(sizes), 24, 8, generator=generator)
    g = torch.randn(sum(sizes), 12, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    counters = Counters()
    with counters.counting():
        out, contracted = grouped_matmul(a, b, ends), grouped_matmul(g.T, a, ends)
    rows = list(zip(a.split(sizes), g.split(sizes), b, strict=True))
    torch.testing.assert_close(out, torch.cat([x @ w for x, _, w in rows]))
    torch.testing.assert_close(contracted, torch.stack([y.T @ x for x, y, _ in rows]))
    counted = sum(flops for (op, _), flops in counters.flops.items() if op is FlopOp.GROUPED_GEMM)
    assert counted == 2 * sum(sizes) * 24 * (8 + 12)


@pytest.mark.usefixtures("_fp32_by")
def test_a_large_product_is_fp32_throughout_and_counted() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(256, 384, generator=generator), torch.randn(96, 384, generator=generator)
    counters = Counters()
    with counters.counting():
        out = matmul(a, b.T)
    wide = a.double() @ b.double().T
    assert (out - wide).norm() <= 1e-6 * wide.norm()
    assert sum(counters.flops.values()) == 2 * 256 * 384 * 96


@pytest.mark.usefixtures("_fp32_by")
def test_large_groups_are_multiplied_by_their_own_matrices() -> None:
    """Each product is so large that it is worth a kernel of oneDNN.

    It is padded with rows of the next group, or with none.
    """
    sizes = [150, 0, 300, 1, 129]
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(580, 256, generator=generator), torch.randn(5, 256, 160, generator=generator)
    g = torch.randn(580, 160, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    out, contracted = grouped_matmul(a, b, ends), grouped_matmul(g.T, a, ends)
    rows = list(zip(a.double().split(sizes), g.double().split(sizes), b.double(), strict=True))
    expected_out = torch.cat([x @ w for x, _, w in rows])
    expected_contracted = torch.stack([y.T @ x for x, y, _ in rows])
    assert (out - expected_out).norm() <= 1e-6 * expected_out.norm()
    assert (contracted - expected_contracted).norm() <= 1e-6 * expected_contracted.norm()


def test_groups_without_rows_contract_to_zero_on_blackwell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in device of 10.x leaves there what an accumulator held."""
    zeroed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert matmul_module._misses_empty_groups(torch.device("cuda", 7))
    monkeypatch.setattr(matmul_module, "_misses_empty_groups", lambda device: True)
    monkeypatch.setattr(
        matmul_module, "zero_empty_groups", lambda product, ends: zeroed.append(product)
    )
    x, g, w = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((32, 64), (32, 16), (3, 64, 16))
    )
    ends = torch.tensor([0, 8, 32], dtype=torch.int32)
    grouped_matmul(x, w, ends.to("meta"))
    product = grouped_matmul(g.T, x, ends.to("meta"))
    assert [part is product for part in zeroed] == [True]
    monkeypatch.undo()
    written = torch.full((3, 4, 4), torch.nan)
    written[1:] = 2.0
    zero_empty_groups(written, ends)
    assert written.flatten(1).unique(dim=1).flatten().tolist() == [0.0, 2.0, 2.0]


def test_a_bf16_product_is_rounded_once() -> None:
    sizes = [5, 0, 40, 17, 2]
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 32), (5, 32, 8)))
    out = grouped_matmul(a, b, torch.tensor(sizes).cumsum(0).to(torch.int32))
    wide = torch.cat([x.float() @ w.float() for x, w in zip(a.split(sizes), b, strict=True)])
    assert (out.float() - wide).abs().max() <= 2**-8 * wide.abs().max()


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_in_blocks_has_the_gradients_of_its_formula(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1100, 16, generator=generator, requires_grad=True)
    weight = torch.rand(1100, generator=generator, requires_grad=True) if weighted else None
    grad = torch.randn(1100, 8, generator=generator)
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    gate, up = x.chunk(2, -1)
    plain = torch.sigmoid(gate) * gate * up * (1.0 if weight is None else weight[:, None])
    out = SwiGlu.apply(x, weight, torch_kernels(1 << 13))
    torch.testing.assert_close(out, plain)
    gradients = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, leaves, grad))


def test_slots_without_a_row_add_nothing() -> None:
    rows = torch.arange(12.0).view(4, 3).requires_grad_()
    row_of_slot = torch.tensor([[0, 2], [4, 4], [3, 1]])
    token_of_row = torch.tensor([0, 2, 0, 2])
    out = Unpermute.apply(rows, token_of_row, row_of_slot, False, torch_kernels())
    torch.testing.assert_close(
        out, torch.stack((rows[0] + rows[2], torch.zeros(3), rows[3] + rows[1]))
    )
    (gradient,) = torch.autograd.grad(out, rows, torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]))
    assert gradient[:, 0].tolist() == [1.0, 3.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("queries", "keys", "window", "causal"),
    [(300, 300, 50, True), (400, 400, 130, True), (70, 260, 150, False), (200, 90, 210, False)],
)
def test_a_window_in_blocks_is_that_window(
    queries: int, keys: int, window: int, causal: bool
) -> None:
    """There are more queries than a block has; every query attends a key.

    Each pair is counted once, a token with itself half.
    """
    generator = torch.Generator().manual_seed(queries)
    inputs = [
        torch.randn(2, n, h, d, generator=generator)
        for n, h, d in ((queries, 4, 16), (keys, 2, 16), (keys, 2, 12))
    ]
    q, k, v = (x.double().requires_grad_() for x in inputs)
    query_place = torch.arange(queries)[:, None] + keys - queries
    key_place = torch.arange(keys)
    attended = key_place > query_place - window
    if causal:
        attended &= key_place <= query_place
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4
    scores = scores.masked_fill(~attended, float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    grad = torch.randn(expected.shape, generator=generator)
    mask = AttentionMask(causal=causal, window=window)
    counters = Counters()
    with counters.counting():
        out, state = attention(*inputs, mask=mask)
        gradients = attention_backward(grad, *inputs, out_BSHD=out, state=state, mask=mask)
    lse = scores.logsumexp(-1).detach()
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[0].double(), lse, rtol=1e-5, atol=1e-5)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), grad.double())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)
    pairs = 2 * int(attended.sum()) - (queries if causal else 0)
    assert sum(counters.flops.values()) == 3 * pairs * 2 * 4 * (16 + 12)
