"""The Triton kernels against the reference, values and every gradient: on a GPU where there is one,
else in Triton's interpreter on the CPU (conftest.py).

Both sum in fp32, in orders of their own: a few units of its rounding apart, of the largest number
in a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.run.env import is_triton_interpreted
from moewright.spec.model import RouterSpec, ScoreFunction

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)

from moewright.engine.kernels.fused.triton import TritonKernels

CLOSE = 32 * 2.0**-24
DEVICE = torch.device("cpu" if is_triton_interpreted() else "cuda")
PLAIN, FUSED = TorchKernels(), TritonKernels()


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


@pytest.mark.parametrize(
    ("tokens", "slots", "width"), [(13, 3, 36), (1, 1, 1), (5, 2, 1100), (0, 2, 8), (4, 8, 16)]
)
def test_rows_are_copied_and_summed(tokens: int, slots: int, width: int) -> None:
    """Slots without a row among them; more columns than a program holds; no token at all."""
    make, rows = dice(tokens), max(1, tokens * slots - 2)
    x, routed = torch.randn(tokens, width, generator=make), torch.randn(rows, width, generator=make)
    of_row = torch.randint(0, max(1, tokens), (rows if tokens else 0,), generator=make)
    assert torch.equal(FUSED.permute(x, of_row), PLAIN.permute(x, of_row))
    of_slot = torch.randint(0, rows + 1, (tokens, slots), generator=make)
    assert_close(FUSED.unpermute(routed, of_slot, False), PLAIN.unpermute(routed, of_slot, False))
    of_slot.clamp_(max=rows - 1)
    assert_close(FUSED.unpermute(routed, of_slot, True), PLAIN.unpermute(routed, of_slot, True))


@pytest.mark.parametrize(("rows", "width"), [(20, 1100), (7, 24), (1, 1), (0, 8)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("clamped", [True, False])
def test_gated_activations(rows: int, width: int, weighted: bool, clamped: bool) -> None:
    """With gates and ups on both sides of gpt-oss's limits."""
    make = dice(rows)
    x, grad = (
        4 * torch.randn(rows, 2 * width, generator=make),
        torch.randn(rows, width, generator=make),
    )
    weight = torch.rand(rows, generator=make) if weighted else None
    assert_close(FUSED.swiglu(x, weight, clamped), PLAIN.swiglu(x, weight, clamped))
    (of_x, of_weight), (wanted_x, wanted_weight) = (
        k.swiglu_backward(grad, x, weight, clamped) for k in (FUSED, PLAIN)
    )
    assert_close(of_x, wanted_x)
    assert (of_weight is None) == (weight is None)
    if of_weight is not None and wanted_weight is not None:
        # a sum of `width` products, which may cancel: the error is of their sizes, not of the sum's
        assert_close(of_weight, wanted_weight, 8 * CLOSE)


def test_a_clamped_activation_hides_no_nan() -> None:
    x = torch.tensor([[math.nan, 1.0, 1.0, math.nan]])
    assert FUSED.swiglu(x, None, True).isnan().all()


@pytest.mark.parametrize("shape", [(3, 5, 24), (19, 700), (30, 4, 128), (1, 3), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_norms(shape: tuple[int, ...], kept: bool, cut: bool) -> None:
    """Of heads and of whole rows, which may be parts of longer ones; the weight's gradient of some
    rows, too."""
    make, (*outer, width) = dice(len(shape)), shape
    extra = 3 if cut else 0
    x, grad = (torch.randn(*outer, width + extra, generator=make)[..., :width] for _ in range(2))
    weight = 1 + torch.randn(width, generator=make)
    (found, scale), (wanted, wanted_scale) = (k.rms_norm(x, weight, 1e-5) for k in (FUSED, PLAIN))
    assert_close(found, wanted)
    assert_close(scale, wanted_scale)
    rows = math.prod(outer)
    for mine in (slice(None), slice(rows // 3, rows - rows // 3), slice(rows, rows)):
        given = (grad, x, weight, 1e-5, wanted_scale if kept else None, mine)
        (of_x, of_weight), (wanted_x, wanted_weight) = (
            k.rms_norm_backward(*given) for k in (FUSED, PLAIN)
        )
        assert_close(of_x, wanted_x)
        assert_close(of_weight, wanted_weight, 8 * CLOSE)
        assert torch.equal(of_weight, FUSED.rms_norm_backward(*given)[1])


def test_a_norm_rounds_before_its_weight() -> None:
    """As the reference does; without it a quarter of these numbers round to a neighbour."""
    make = dice(3)
    x, weight = (
        torch.randn(9, 256, generator=make).half(),
        (1 + torch.randn(256, generator=make) / 8).half(),
    )
    found, wanted = (k.rms_norm(x, weight, 1e-5)[0] for k in (FUSED, PLAIN))
    assert found.dtype == torch.float16
    assert float((found != wanted).float().mean()) < 0.01
    once = (x * PLAIN.rms_norm(x, weight, 1e-5)[1] * weight).half()
    assert float((once != wanted).float().mean()) > 0.1


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(2, 5, 3, 24), (1, 7, 1, 2), (2, 3, 2, 2200), (3, 70, 2, 64), (0, 4, 2, 8)],
)
@pytest.mark.parametrize("angles", ["of all", "of each"])
@pytest.mark.parametrize(
    "laid", ["whole", "part of a projection", "heads first", "every other column"]
)
def test_rotations(batch: int, tokens: int, heads: int, width: int, angles: str, laid: str) -> None:
    make = dice(width)
    if laid == "heads first":
        x = torch.randn(batch, heads, tokens, width, generator=make).transpose(1, 2)
    elif laid == "part of a projection":
        x = torch.randn(batch, tokens, heads, width + 3, generator=make)[..., 3:]
    elif laid == "every other column":
        x = torch.randn(batch, tokens, heads, 2 * width, generator=make)[..., ::2]
    else:
        x = torch.randn(batch, tokens, heads, width, generator=make)
    angle = 9 * torch.randn(
        *((batch,) if angles == "of each" else ()), tokens, width // 2, generator=make
    )
    found, wanted = (k.rotate(x, angle.cos(), angle.sin()) for k in (FUSED, PLAIN))
    assert_close(found, wanted)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    ("tokens", "width", "pads"),
    [(7, 37, 0), (7, 37, 5), (3, 9001, 0), (3, 9001, 1), (1, 1, 0), (0, 9, 0)],
)
def test_losses(tokens: int, width: int, pads: int) -> None:
    """Of large logits, of tokens without a target, and of a part of a vocabulary with columns that
    are nobody's."""
    make, size = dice(width), width - pads
    logits = 40 * torch.randn(tokens, width, generator=make)
    targets = torch.randint(0, size, (tokens,), generator=make)
    targets[1::3] = -1
    grad = torch.randn(tokens, generator=make)
    meant = targets >= 0
    found, wanted = (k.cross_entropy(logits, targets) for k in (FUSED, PLAIN))
    assert_close(found[meant], wanted[meant])
    assert found.isfinite().all()
    inside = logits[:, :size]
    top = inside.amax(-1) + torch.rand(tokens, generator=make)
    found, wanted = (k.sum_exp(inside, top) for k in (FUSED, PLAIN))
    assert_close(found, wanted)
    for log_sum in (None, top + wanted.log()):
        given = (grad, logits, targets, log_sum, size)
        found, wanted = (k.cross_entropy_backward(*given) for k in (FUSED, PLAIN))
        assert_close(found, wanted)
        assert not found[:, size:].any()


_ROUTERS = [
    RouterSpec(top_k=3, score=score, renormalize=renormalize, scaling_factor=2.446)
    for score, renormalize in product(ScoreFunction, (True, False))
]


@pytest.mark.parametrize(
    "spec", [*_ROUTERS, RouterSpec(top_k=2, groups=4, top_groups=2, scaling_factor=1.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", ["chosen", "biased", "forced", "scores alone", "weights alone"])
def test_router(spec: RouterSpec, dtype: torch.dtype, given: str) -> None:
    """Experts, weights, scores and the gradient of the logits, through weights and through scores;
    and what is kept."""
    make, experts, tokens = dice(7), 12, 150
    logits = 4 * torch.randn(tokens, experts, generator=make, dtype=dtype)
    bias = torch.randn(experts, generator=make) if given == "biased" else None
    forced = (
        torch.rand(tokens, experts, generator=make).topk(spec.top_k).indices
        if given == "forced"
        else None
    )
    pull = torch.randn(tokens, spec.top_k, generator=make, dtype=dtype) * (given != "scores alone")
    push = torch.randn(tokens, experts, generator=make, dtype=dtype) * (given != "weights alone")
    seen, kept = [], []
    for kernels in (FUSED, PLAIN):
        leaf, stored = logits.clone().requires_grad_(), {}

        def pack(
            x: torch.Tensor, stored: dict[int, int] = stored, own: torch.Tensor = leaf
        ) -> torch.Tensor:
            storage = x.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes() if x.data_ptr() != own.data_ptr() else 0
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            chosen, weights, scores = kernels.route_tokens(leaf, spec, bias, forced)
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
    chosen, weights, scores = FUSED.route_tokens(logits, RouterSpec(top_k=2), None, None)
    (weights.sum() + scores.sum()).backward()
    assert chosen.shape == (0, 2)
    assert logits.grad is not None
