"""The Triton kernels against the reference, values and every gradient: on a GPU where there is one, else in Triton's
interpreter on the CPU (conftest.py).

Both sum in fp32, in orders of their own: a few units of its rounding apart, of the largest number in a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from moewright.engine.env import interprets_triton
from moewright.engine.fused.plain import Plain
from moewright.spec.model import RouterSpec, ScoreFunction

pytest.importorskip("triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone")

from moewright.engine.fused.compiled import Compiled

CLOSE = 32 * 2.0**-24
DEVICE = torch.device("cpu" if interprets_triton() else "cuda")
PLAIN, FUSED = Plain(), Compiled()


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with DEVICE:
        yield


def dice(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = CLOSE) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize(("tokens", "slots", "width"), [(13, 3, 36), (1, 1, 1), (5, 2, 1100), (0, 2, 8), (4, 8, 16)])
def test_rows_are_copied_and_summed(tokens: int, slots: int, width: int) -> None:
    """Slots without a row among them; more columns than a program holds; no token at all."""
    make, rows = dice(tokens), max(1, tokens * slots - 2)
    x, routed = torch.randn(tokens, width, generator=make), torch.randn(rows, width, generator=make)
    of_row = torch.randint(0, max(1, tokens), (rows if tokens else 0,), generator=make)
    assert torch.equal(FUSED.spread(x, of_row), PLAIN.spread(x, of_row))
    of_slot = torch.randint(0, rows + 1, (tokens, slots), generator=make)
    assert_close(FUSED.sum_slots(routed, of_slot, False), PLAIN.sum_slots(routed, of_slot, False))
    of_slot.clamp_(max=rows - 1)
    assert_close(FUSED.sum_slots(routed, of_slot, True), PLAIN.sum_slots(routed, of_slot, True))


@pytest.mark.parametrize(("rows", "width"), [(20, 1100), (7, 24), (1, 1), (0, 8)])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_activations(rows: int, width: int, weighted: bool) -> None:
    make = dice(rows)
    x, grad = 4 * torch.randn(rows, 2 * width, generator=make), torch.randn(rows, width, generator=make)
    weight = torch.rand(rows, generator=make) if weighted else None
    assert_close(FUSED.swiglu(x, weight), PLAIN.swiglu(x, weight))
    (of_x, of_weight), (wanted_x, wanted_weight) = (k.swiglu_backward(grad, x, weight) for k in (FUSED, PLAIN))
    assert_close(of_x, wanted_x)
    assert (of_weight is None) == (weight is None)
    if of_weight is not None and wanted_weight is not None:
        # a sum of `width` products, which may cancel: the error is of their sizes, not of the sum's
        assert_close(of_weight, wanted_weight, 8 * CLOSE)


_ROUTERS = [
    RouterSpec(top_k=3, score=score, renormalize=renormalize, scaling_factor=2.446)
    for score, renormalize in product(ScoreFunction, (True, False))
]


@pytest.mark.parametrize("spec", [*_ROUTERS, RouterSpec(top_k=2, groups=4, top_groups=2, scaling_factor=1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", ["chosen", "biased", "forced", "scores alone", "weights alone"])
def test_router(spec: RouterSpec, dtype: torch.dtype, given: str) -> None:
    """Experts, weights, scores and the gradient of the logits, through weights and through scores; and what is kept."""
    make, experts, tokens = dice(7), 12, 150
    logits = 4 * torch.randn(tokens, experts, generator=make, dtype=dtype)
    bias = torch.randn(experts, generator=make) if given == "biased" else None
    forced = torch.rand(tokens, experts, generator=make).topk(spec.top_k).indices if given == "forced" else None
    pull = torch.randn(tokens, spec.top_k, generator=make, dtype=dtype) * (given != "scores alone")
    push = torch.randn(tokens, experts, generator=make, dtype=dtype) * (given != "weights alone")
    seen, kept = [], []
    for kernels in (FUSED, PLAIN):
        leaf, stored = logits.clone().requires_grad_(), {}

        def pack(x: torch.Tensor, stored: dict[int, int] = stored, own: torch.Tensor = leaf) -> torch.Tensor:
            storage = x.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes() if x.data_ptr() != own.data_ptr() else 0
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            chosen, weights, scores = kernels.weigh(leaf, spec, bias, forced)
        loss = (weights * pull).sum() if given != "scores alone" else 0.0
        loss = loss + ((scores * push).sum() if given != "weights alone" else 0.0)
        torch.as_tensor(loss).backward()
        seen.append((chosen, weights.detach(), scores.detach(), leaf.grad))
        kept.append(sum(stored.values()))
    assert torch.equal(seen[0][0], seen[1][0])
    for found, wanted in zip(seen[0][1:], seen[1][1:], strict=True):
        assert_close(found, wanted, CLOSE if dtype is torch.float32 else CLOSE * 2.0**-29)
    assert kept[0] == kept[1]


def test_no_token_is_routed() -> None:
    logits = torch.empty(0, 8, requires_grad=True)
    chosen, weights, scores = FUSED.weigh(logits, RouterSpec(top_k=2), None, None)
    (weights.sum() + scores.sum()).backward()
    assert chosen.shape == (0, 2)
    assert logits.grad is not None
