"""A node of the graph has nothing left when its own backward has run."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import moewright.engine
from layout_proof import WORKLOAD
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.run.dry_run import dry_run
from moewright.rules.job import Job
from moewright.spec.model import ModelSpec, NormKind, ScoreFunction
from moewright.spec.workload import Dtype, FineTuningSpec, FrozenPart, LossSpec, Workload

# A dry run takes torch's kernels and no library of dispatch, records no graphs, and has no tokens
# that do not count.
NOT_RUN_DRY = {"RouteTokens", "RouterLosses", "WeightedSum", "_Dispatch", "_Combine", "_RunPart"}


def route(model: ModelSpec, **changes: object) -> ModelSpec:
    """Return a model whose routers are changed."""
    assert model.moe is not None
    router = replace(model.moe.router, **changes)  # type: ignore[arg-type]
    return replace(model, moe=replace(model.moe, router=router))


MIXED = replace(
    route(SHAPES["olmoe"], score=ScoreFunction.SPARSE_MIXER, renormalize=False, mixer_eps=0.2),
    norm=NormKind.LAYER,
    head_bias=True,
    tie_embeddings=False,
)
SCALED = route(SHAPES["deep"], score=ScoreFunction.SIGMOID, scales_input=True)
WIDE = replace(WORKLOAD, precision=Dtype.BF16)
NARROW = replace(WORKLOAD, precision=Dtype.MXFP8)
FROZEN = replace(
    WIDE,
    loss=LossSpec(indexer_coeff=0.0),
    fine_tuning=FineTuningSpec(freeze=(FrozenPart.EMBEDDINGS,)),
)
# Together they run every other function.
JOBS: tuple[tuple[ModelSpec, str, Workload], ...] = (
    (MIXED, "tp2,etp2,ep2,mbs2", WIDE),
    (SHAPES["deepseek"], "tp2,ep2,mbs2,overlap=ep,recompute=moe", NARROW),
    (SHAPES["deepseek"], "cp2,cp_comm=allgather,ep2,mbs2,recompute=loss", WIDE),
    (SCALED, "tp2,cp2,ep2,mbs2,overlap=shared", WIDE),
    (SHAPES["oss"], "tp4,ep4,mbs4,dispatcher=allgather", WIDE),
    (SHAPES["latent"], "tp2,sp=0,mbs2", WIDE),
    (SHAPES["sparse"], "ep2,mbs2", WIDE),
    (SHAPES["sparse"], "ep2,mbs2,recompute=full", FROZEN),
    (SHAPES["compressed"], "tp2,ep2,mbs2", WIDE),
    (SHAPES["delta"], "tp2,ep2,mbs2", WIDE),
    (SHAPES["hybrid"], "tp2,ep2,mbs2", WIDE),
)


def list_functions(base: type) -> Iterator[type]:
    for function in base.__subclasses__():
        yield function
        yield from list_functions(function)


def engine_functions() -> tuple[type, ...]:
    """Return the autograd Functions of the engine, whatever module defines them."""
    for module in pkgutil.walk_packages(moewright.engine.__path__, "moewright.engine."):
        importlib.import_module(module.name)
    functions = dict.fromkeys(list_functions(torch.autograd.Function))
    return tuple(function for function in functions if function.__module__.startswith("moewright."))


FUNCTIONS = engine_functions()


def test_every_function_of_the_engine_lets_go_of_what_its_nodes_keep() -> None:
    assert ReleasingFunction in FUNCTIONS
    assert all(issubclass(function, ReleasingFunction) for function in FUNCTIONS)


class Keeper:
    """What a node keeps as an attribute."""


def give_keeper(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run_and_give(ctx: Any, *inputs: Any) -> Any:
        outputs = forward(ctx, *inputs)
        ctx.keeper = Keeper()
        return outputs

    return run_and_give


@contextmanager
def watch_nodes() -> Iterator[set[str]]:
    """Give every node something to keep, and assert that it is gone after the node's backward.

    Yields the names of the functions that went backward. Nothing is collected meanwhile.
    """
    names: set[str] = set()

    def check_after(backward: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_check(ctx: Any, *grads: Any) -> Any:
            keeper = weakref.ref(ctx.keeper)
            input_grads = backward(ctx, *grads)
            assert keeper() is None
            assert not vars(ctx)
            names.add(type(ctx)._forward_cls.__name__)
            return input_grads

        return run_and_check

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for function in FUNCTIONS:
                for name, wrap in (("forward", give_keeper), ("backward", check_after)):
                    own = vars(function).get(name)
                    if own is not None:
                        patch.setattr(function, name, staticmethod(wrap(own.__func__)))
            yield names
    finally:
        gc.enable()


def test_no_node_has_anything_left_after_its_backward() -> None:
    with watch_nodes() as names:
        for model, text, workload in JOBS:
            layout = parse_layout(text, world_size=4)
            # Two passes beside each other are of two micro-batches.
            micro_batches = 2 if layout.overlap else 1
            batch = micro_batches * layout.mbs * layout.dp
            work = replace(workload, global_batch=batch)
            dry_run(Job(model=model, workload=work, layout=layout), rank=1)
    runnable = {function.__name__ for function in FUNCTIONS if "forward" in vars(function)}
    assert runnable - names == NOT_RUN_DRY


class Cube(ReleasingFunction):
    """x^3, whose node keeps x as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keepers: list[Any]) -> torch.Tensor:
        ctx.x = x.clone()
        keepers.append(weakref.ref(ctx.x))
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 3 * grad * ctx.x**2, None


def test_a_graph_that_is_kept_goes_backward_again_and_then_lets_go() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    keepers: list[Any] = []
    out = Cube.apply(Cube.apply(x, keepers), keepers)
    first = torch.autograd.grad(out, x, retain_graph=True)
    assert all(keeper() is not None for keeper in keepers)
    second = torch.autograd.grad(out, x)
    assert first == second == (torch.tensor(9.0 * 2.0**8),)
    assert all(keeper() is None for keeper in keepers)
