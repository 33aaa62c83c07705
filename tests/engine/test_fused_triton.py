"""The Triton kernels against the reference, values and every gradient.

They run on a GPU where there is one, else in Triton's interpreter on the CPU (conftest.py). Both
sum in fp32, in orders of their own: a few units of its rounding apart, of the largest number in a
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from moewright.engine.kernels.fused.router_losses import RouterLossTerms
from moewright.engine.kernels.fused.table import torch_kernels, triton_kernels
from moewright.engine.run.env import is_triton_interpreted
from moewright.spec.model import RouterSpec, ScoreFunction

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)

CLOSE = 32 * 2.0**-24
DEVICE = torch.device("cpu" if is_triton_interpreted() else "cuda")
PLAIN, FUSED = torch_kernels(), triton_kernels()


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with DEVICE:
        yield


def build_generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def assert_close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = CLOSE) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if expected.numel():
        assert float((result - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(
    ("tokens", "slots", "width"), [(13, 3, 36), (1, 1, 1), (5, 2, 1100), (0, 2, 8), (4, 8, 16)]
)
def test_rows_are_copied_and_summed(tokens: int, slots: int, width: int) -> None:
    """Slots without a row among them; more columns than a program holds; no token at all."""
    generator = build_generator(tokens)
    rows = max(1, tokens * slots - 2)
    x = torch.randn(tokens, width, generator=generator)
    routed = torch.randn(rows, width, generator=generator)
    token_of_row = torch.randint(0, max(1, tokens), (rows if tokens else 0,), generator=generator)
    assert torch.equal(FUSED.permute(x, token_of_row), PLAIN.permute(x, token_of_row))
    row_of_slot = torch.randint(0, rows + 1, (tokens, slots), generator=generator)
    assert_close(
        FUSED.unpermute(routed, row_of_slot, False), PLAIN.unpermute(routed, row_of_slot, False)
    )
    row_of_slot.clamp_(max=rows - 1)
    assert_close(
        FUSED.unpermute(routed, row_of_slot, True), PLAIN.unpermute(routed, row_of_slot, True)
    )


@pytest.mark.parametrize(("rows", "width"), [(20, 1100), (7, 24), (1, 1), (0, 8)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("clamped", [True, False])
def test_gated_activations(rows: int, width: int, weighted: bool, clamped: bool) -> None:
    """With gates and ups on both sides of gpt-oss's limits."""
    generator = build_generator(rows)
    x = 4 * torch.randn(rows, 2 * width, generator=generator)
    grad = torch.randn(rows, width, generator=generator)
    weight = torch.rand(rows, generator=generator) if weighted else None
    assert_close(FUSED.swiglu(x, weight, clamped), PLAIN.swiglu(x, weight, clamped))
    (grad_x, grad_weight), (expected_x, expected_weight) = (
        k.swiglu_backward(grad, x, weight, clamped) for k in (FUSED, PLAIN)
    )
    assert_close(grad_x, expected_x)
    assert (grad_weight is None) == (weight is None)
    if grad_weight is not None and expected_weight is not None:
        # a sum of `width` products, which may cancel: the error is of their sizes, not of the sum's
        assert_close(grad_weight, expected_weight, 8 * CLOSE)


def test_logits_that_are_no_numbers_choose_experts_that_are_there() -> None:
    """Twelve experts in programs sixteen wide: the ids of the padding must not come out."""
    logits = torch.randn(6, 12, generator=build_generator(3))
    logits[0] = math.nan
    logits[1, 3] = math.inf
    logits[2] = math.inf
    logits[3, :10] = math.nan
    logits[4] = -math.inf
    for score in (ScoreFunction.SOFTMAX, ScoreFunction.SIGMOID, ScoreFunction.SQRT_SOFTPLUS):
        spec = RouterSpec(top_k=4, score=score)
        experts, *_ = FUSED.route_tokens(logits.clone(), spec, None, None)
        assert int(experts.min()) >= 0
        assert int(experts.max()) < 12
        assert all(len(set(row)) == 4 for row in experts.tolist())


def test_a_clamped_activation_hides_no_nan() -> None:
    x = torch.tensor([[math.nan, 1.0, 1.0, math.nan]])
    assert FUSED.swiglu(x, None, True).isnan().all()


@pytest.mark.parametrize("shape", [(3, 5, 24), (19, 700), (30, 4, 128), (1, 3), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_norms(shape: tuple[int, ...], kept: bool, cut: bool) -> None:
    """Norms are of heads and of whole rows, which may be parts of longer ones.

    The weight's gradient may be of some rows.
    """
    generator = build_generator(len(shape))
    *outer, width = shape
    extra = 3 if cut else 0
    x, grad = (
        torch.randn(*outer, width + extra, generator=generator)[..., :width] for _ in range(2)
    )
    weight = 1 + torch.randn(width, generator=generator)
    (result, scale), (expected, expected_scale) = (
        k.rms_norm(x, weight, 1e-5) for k in (FUSED, PLAIN)
    )
    assert_close(result, expected)
    assert_close(scale, expected_scale)
    rows = math.prod(outer)
    for weight_rows in (slice(None), slice(rows // 3, rows - rows // 3), slice(rows, rows)):
        inputs = (grad, x, weight, 1e-5, expected_scale if kept else None, weight_rows)
        (grad_x, grad_weight), (expected_x, expected_weight) = (
            k.rms_norm_backward(*inputs) for k in (FUSED, PLAIN)
        )
        assert_close(grad_x, expected_x)
        assert_close(grad_weight, expected_weight, 8 * CLOSE)
        assert torch.equal(grad_weight, FUSED.rms_norm_backward(*inputs)[1])


def test_a_norm_rounds_before_its_weight() -> None:
    """As the reference does; without it a quarter of these numbers round to a neighbour."""
    generator = build_generator(3)
    x = torch.randn(9, 256, generator=generator).half()
    weight = (1 + torch.randn(256, generator=generator) / 8).half()
    result, expected = (k.rms_norm(x, weight, 1e-5)[0] for k in (FUSED, PLAIN))
    assert result.dtype == torch.float16
    assert float((result != expected).float().mean()) < 0.01
    once = (x * PLAIN.rms_norm(x, weight, 1e-5)[1] * weight).half()
    assert float((once != expected).float().mean()) > 0.1


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(2, 5, 3, 24), (1, 7, 1, 2), (2, 3, 2, 2200), (3, 70, 2, 64), (0, 4, 2, 8)],
)
@pytest.mark.parametrize("angles", ["of all", "of each"])
@pytest.mark.parametrize(
    "laid", ["whole", "part of a projection", "heads first", "every other column"]
)
def test_rotations(batch: int, tokens: int, heads: int, width: int, angles: str, laid: str) -> None:
    generator = build_generator(width)
    if laid == "heads first":
        x = torch.randn(batch, heads, tokens, width, generator=generator).transpose(1, 2)
    elif laid == "part of a projection":
        x = torch.randn(batch, tokens, heads, width + 3, generator=generator)[..., 3:]
    elif laid == "every other column":
        x = torch.randn(batch, tokens, heads, 2 * width, generator=generator)[..., ::2]
    else:
        x = torch.randn(batch, tokens, heads, width, generator=generator)
    angle = 9 * torch.randn(
        *((batch,) if angles == "of each" else ()), tokens, width // 2, generator=generator
    )
    result, expected = (k.rotate(x, angle.cos(), angle.sin()) for k in (FUSED, PLAIN))
    assert_close(result, expected)
    assert result.is_contiguous()


@pytest.mark.parametrize(
    ("tokens", "width", "pads"),
    [(7, 37, 0), (7, 37, 5), (3, 9001, 0), (3, 9001, 1), (1, 1, 0), (0, 9, 0)],
)
def test_losses(tokens: int, width: int, pads: int) -> None:
    """Losses are of large logits, and of tokens without a target.

    The logits may be a part of a vocabulary with padding columns.
    """
    generator = build_generator(width)
    size = width - pads
    logits = 40 * torch.randn(tokens, width, generator=generator)
    targets = torch.randint(0, size, (tokens,), generator=generator)
    targets[1::3] = -1
    grad = torch.randn(tokens, generator=generator)
    meant = targets >= 0
    result, expected = (k.cross_entropy(logits, targets) for k in (FUSED, PLAIN))
    assert_close(result[meant], expected[meant])
    assert result.isfinite().all()
    inside = logits[:, :size]
    top = inside.amax(-1) + torch.rand(tokens, generator=generator)
    result, expected = (k.sum_exp(inside, top) for k in (FUSED, PLAIN))
    assert_close(result, expected)
    for log_sum in (None, top + expected.log()):
        inputs = (grad, logits, targets, log_sum, size)
        result, expected = (k.cross_entropy_backward(*inputs) for k in (FUSED, PLAIN))
        assert_close(result, expected)
        assert not result[:, size:].any()


_ROUTERS = [
    RouterSpec(top_k=3, score=score, renormalize=renormalize, scaling_factor=2.446)
    for score, renormalize in product(ScoreFunction, (True, False))
    if score is not ScoreFunction.SPARSE_MIXER  # which has no kernel
]


@pytest.mark.parametrize(
    "spec",
    [
        *_ROUTERS,
        RouterSpec(top_k=2, groups=4, top_groups=2, scaling_factor=1.0),
        # As DeepSeek-V3's: a group counts by its two best.
        RouterSpec(top_k=3, score=ScoreFunction.SIGMOID, groups=3, top_groups=2, group_scores=2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["chosen", "biased", "forced", "scores alone", "weights alone"])
def test_router(spec: RouterSpec, dtype: torch.dtype, case: str) -> None:
    """Experts, weights, scores and the gradient of the logits agree.

    The gradient comes through weights and through scores; what is kept agrees too.
    """
    generator = build_generator(7)
    experts = 12
    tokens = 150
    logits = 4 * torch.randn(tokens, experts, generator=generator, dtype=dtype)
    bias = torch.randn(experts, generator=generator) if case == "biased" else None
    forced = (
        torch.rand(tokens, experts, generator=generator).topk(spec.top_k).indices
        if case == "forced"
        else None
    )
    pull = torch.randn(tokens, spec.top_k, generator=generator, dtype=dtype) * (
        case != "scores alone"
    )
    push = torch.randn(tokens, experts, generator=generator, dtype=dtype) * (
        case != "weights alone"
    )
    results = []
    saved_bytes = []
    for kernels in (FUSED, PLAIN):
        leaf = logits.clone().requires_grad_()
        stored = {}

        def pack(
            x: torch.Tensor, stored: dict[int, int] = stored, own: torch.Tensor = leaf
        ) -> torch.Tensor:
            storage = x.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes() if x.data_ptr() != own.data_ptr() else 0
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            chosen, weights, scores = kernels.route_tokens(leaf, spec, bias, forced)
        loss = (weights * pull).sum() if case != "scores alone" else 0.0
        loss = loss + ((scores * push).sum() if case != "weights alone" else 0.0)
        torch.as_tensor(loss).backward()
        results.append((chosen, weights.detach(), scores.detach(), leaf.grad))
        saved_bytes.append(sum(stored.values()))
    fused, plain = results
    assert torch.equal(fused[0], plain[0])
    for result, expected in zip(fused[1:], plain[1:], strict=True):
        assert_close(result, expected, CLOSE if dtype is torch.float32 else CLOSE * 2.0**-29)
    assert saved_bytes[0] == saved_bytes[1]


def build_terms(losses: str, tokens: int, experts: int, *, is_masked: bool) -> RouterLossTerms:
    """Build the terms of the losses whose letters are in `losses`: b, s, g and z."""
    generator = build_generator(3)
    shapes = {"b": (experts,), "s": (tokens, experts), "g": (experts,)}
    first, second, third = (
        torch.rand(shape, generator=generator) if name in losses else None
        for name, shape in shapes.items()
    )
    terms = RouterLossTerms(
        coefficients=(
            0.5 * ("b" in losses),
            2.0 * ("s" in losses),
            0.3 * ("g" in losses),
            0.1 * ("z" in losses),
        ),
        shares=(first, second, third),
        is_normalized="n" in losses,
        ranks=2,
    )
    if not is_masked:
        return terms
    mask = (torch.rand(tokens, generator=generator) > 0.3).float()
    return replace(terms, mask=mask, sequence_weights=mask / 7, total=2 * tokens, sequences=3)


@pytest.mark.parametrize("losses", ["b", "sn", "gz", "bsgzn", "z", ""])
@pytest.mark.parametrize(("tokens", "experts"), [(150, 12), (3, 256)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_router_losses(losses: str, tokens: int, experts: int, is_masked: bool) -> None:
    """The four losses, the gradients of logits and scores, and what is kept of sums agree."""
    generator = build_generator(11)
    logits = 4 * torch.randn(tokens, experts, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    terms = build_terms(losses, tokens, experts, is_masked=is_masked)
    factors = torch.tensor([1.0, -2.0, 3.0, 0.5])
    results = []
    kept_sums = []
    for kernels in (FUSED, PLAIN):
        leaves = [x.clone().requires_grad_() for x in (logits, scores)]
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if x.numel() == tokens:
                kept[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            parts = kernels.router_losses(leaves[0], leaves[1], terms)
        assert parts.shape == (4,)
        if losses:
            (parts * factors).sum().backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        results.append((parts.detach(), *gradients))
        kept_sums.append(sum(kept.values()))
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected)
    assert kept_sums[0] == kept_sums[1] == 4 * tokens * (("n" in losses) + ("z" in losses))


def test_no_token_is_routed() -> None:
    logits = torch.empty(0, 8, requires_grad=True)
    chosen, weights, scores = FUSED.route_tokens(logits, RouterSpec(top_k=2), None, None)
    (weights.sum() + scores.sum()).backward()
    assert chosen.shape == (0, 2)
    assert logits.grad is not None
