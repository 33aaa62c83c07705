"""An input that is kept in 8 or 4 bits is converted once for all that multiply it, and freed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from test_saved_tensors import is_freed, is_never_resident
from test_weight_copies import CPU, FORMATS, train, workload_in

from layout_space import SHAPES
from moewright.engine.kernels.columns import NarrowInput, convert_columns
from moewright.engine.kernels.low_precision import NarrowTensor, convert
from moewright.engine.kernels.products import (
    WIDE_PRODUCTS,
    Conversions,
    NarrowProducts,
    Products,
)
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.model.parallel_linear import ReplicatedLinear
from moewright.engine.observe.counters import Counters
from moewright.rules.job import Job
from moewright.rules.low_precision import Recipe, find_recipe
from moewright.spec.layout import Layout, Offload, Recompute


def recipe_in(name: str) -> Recipe:
    recipe = find_recipe(workload_in(name))
    assert recipe is not None
    return recipe


LAYOUTS = (
    Layout(world_size=1, mbs=2, recompute=(Recompute.MOE_ACT, Recompute.LAYERNORM)),
    Layout(world_size=1, mbs=2, offload=(Offload.QKV_LINEAR, Offload.EXPERT_FC1)),
)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "shape", "layout"),
    [
        (name, shape, layout)
        for (number, shape), name in product(enumerate(SHAPES), FORMATS)
        for layout in LAYOUTS[number % 2 :][:1]
    ],
)
def test_no_bit_differs_from_what_converts_each_input_again(
    name: str, shape: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of losses, norms and weights after two steps."""
    job = Job(model=SHAPES[shape], workload=workload_in(name), layout=layout)
    curve, weights, _ = train(job)
    for method in ("find_converted", "hold_converted"):
        monkeypatch.setattr(SavedTensorManager, method, lambda self, x, products: None)
    plain_curve, plain_weights, _ = train(job)
    assert curve == plain_curve
    for weight_name, weight in weights.items():
        assert torch.equal(weight, plain_weights[weight_name]), weight_name


class Conversion:
    """A conversion that notes what it reads, and where the codes lie that it writes."""

    def __init__(self, by: Callable[..., NarrowTensor]) -> None:
        self._by = by
        self.inputs: list[torch.Tensor | NarrowInput] = []
        self.storages: list[int] = []

    def __call__(self, x: torch.Tensor | NarrowInput, *settings: object) -> NarrowTensor:
        narrow = self._by(x, *settings)
        self.inputs.append(x)
        self.storages.append(narrow.codes.untyped_storage()._weak_ref())
        return narrow


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_an_input_is_converted_once_and_freed_by_the_last_that_reads_it(
    name: str, *, is_offloaded: bool
) -> None:
    """Two products take it as it is kept; one in 16 bits between them takes it widened."""
    along_columns, along_rows = Conversion(convert), Conversion(convert_columns)
    counters = Counters()
    manager = SavedTensorManager(counters, replaces_tensors=True)
    conversions = Conversions(convert=along_columns, convert_columns=along_rows)
    narrow = NarrowProducts(recipe_in(name), CPU, 1, conversions, kept=manager)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(32, 64, generator=generator).bfloat16().requires_grad_()
    weights = [
        torch.randn(48, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]
    users: tuple[Products, ...] = (narrow, WIDE_PRODUCTS, narrow)
    x = leaf * 1
    with (
        manager.track_forward((0, 0), is_never_resident),
        manager.offload(x, enabled=is_offloaded),
        manager.keep_converted(x, narrow),
    ):
        outputs = [
            ReplicatedLinear.apply(x, weight, counters, products)
            for weight, products in zip(weights, users, strict=True)
        ]
    reads = [read for read in along_columns.inputs if read.shape == x.shape]
    assert len(reads) == 1 + is_offloaded  # what has left for the host is converted again
    manager.fetch_last_layer((0, 0))
    torch.stack(outputs).float().sum().backward()
    inputs = [read for read in along_rows.inputs if read.shape == x.shape]
    assert all(isinstance(read, NarrowInput) for read in inputs)
    assert len(inputs) == (0 if name == "current" else 2)
    assert len([read for read in along_columns.inputs if read.shape == x.shape]) == len(reads)
    wide_grad = weights[1].grad
    assert wide_grad is not None
    rounded = convert(x.detach(), recipe_in(name).inputs).widen(torch.bfloat16)
    assert torch.equal(wide_grad, torch.ones(32, 48).bfloat16().T @ rounded)
    del inputs, reads
    along_columns.inputs.clear()
    along_rows.inputs.clear()
    assert all(is_freed(storage) for storage in (*along_columns.storages, *along_rows.storages))


@pytest.mark.parametrize("name", [*FORMATS])
def test_weights_that_share_an_input_convert_it_once(name: str) -> None:
    """As the query, key and value of attention do, forward and backward, to the same bits."""
    products = NarrowProducts(recipe_in(name), CPU, 1)
    along_columns, along_rows = Conversion(convert), Conversion(convert_columns)
    noted = Conversions(convert=along_columns, convert_columns=along_rows)
    counted = NarrowProducts(recipe_in(name), CPU, 1, noted)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator).bfloat16()
    weights = [torch.randn(rows, 64, generator=generator).bfloat16() for rows in (96, 48, 48)]
    gradients = [torch.randn(32, len(weight), generator=generator).bfloat16() for weight in weights]
    together = [*counted.forward_each(x, weights), *counted.weight_grad_each(gradients, x)]
    apart = [products.forward(x, weight) for weight in weights]
    apart += [products.weight_grad(gradient, x) for gradient in gradients]
    for ours, reference in zip(together, apart, strict=True):
        assert torch.equal(ours, reference)
    reads = [read for read in (*along_columns.inputs, *along_rows.inputs) if read is x]
    assert len(reads) == 2
