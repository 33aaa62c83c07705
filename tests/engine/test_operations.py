"""Registered operations: what one is registered with is all that counters need."""

from __future__ import annotations

from inspect import Parameter, signature

import pytest
import torch

from moewright.engine.kernels import (
    causal_conv,
    compressed_attention,
    delta_rule,
    exact_attention,
    matmul,
    operations,
    scaled_groups,
    sparse_attention,
    state_space,
)
from moewright.engine.kernels.operations import OperationWork, define_operation, find_work
from moewright.engine.observe.flop_counter import FlopCounter
from moewright.engine.observe.module_scopes import ObservingMode
from moewright.spec.ledger import FlopOp

KERNELS = (
    causal_conv,
    compressed_attention,
    delta_rule,
    exact_attention,
    matmul,
    scaled_groups,
    sparse_attention,
    state_space,
)
# Each constant of a module of kernels that is an operation of the package, by its name there.
OPERATIONS = {
    name: value
    for module in KERNELS
    for name, value in vars(module).items()
    if isinstance(value, torch._ops.OpOverloadPacket) and name.isupper()
    if str(value).startswith("moewright.")
}


def test_a_made_up_operation_is_counted_by_what_it_is_registered_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "_REGISTERED", {})
    work = OperationWork(op=FlopOp.SCAN, count=lambda x, factor: 2 * x.numel())
    shapes = lambda x, factor: x.new_empty(x.shape[1:])  # noqa: E731
    tulip = define_operation(
        "tulip_sum(Tensor x, float factor) -> Tensor",
        lambda x, factor: factor * x.sum(0),
        shapes,
        work,
    )
    back = define_operation(
        "tulip_sum_backward(Tensor grad, Tensor x, float factor) -> Tensor",
        lambda grad, x, factor: factor * grad.expand_as(x),
        lambda grad, x, factor: x.new_empty(x.shape),
        work.backward(),
    )
    counted = []
    counter = FlopCounter(lambda op, flops: counted.append((op, flops)))
    for device in ("cpu", "meta"):
        x = torch.ones(3, 5, device=device)
        with ObservingMode(before=[counter.count]):
            assert back(tulip(x, 2.0), x, 2.0).shape == x.shape
    assert counted == [(FlopOp.SCAN, 30), (FlopOp.SCAN, 60)] * 2


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_work_of_an_operation_takes_the_arguments_of_its_schema(name: str) -> None:
    """Their names and order, so that no figure is read from another argument."""
    work = find_work(OPERATIONS[name])
    if work is None:
        return
    stated = list_arguments(name)
    parameters = signature(work.count).parameters.values()
    if any(item.kind is Parameter.VAR_POSITIONAL for item in parameters):
        # Twice the forward: behind the gradient stand the forward's arguments.
        assert stated[1:] == list_arguments(name.removesuffix("_BACKWARD"))
    else:
        assert stated == [
            (item.name, item.kind is Parameter.KEYWORD_ONLY, item.default is not Parameter.empty)
            for item in parameters
        ]


def list_arguments(name: str) -> list[tuple[str, bool, bool]]:
    """List the arguments of an operation: name, whether by name alone, whether one may omit it."""
    schema = OPERATIONS[name].default._schema
    return [(item.name, item.kwarg_only, item.has_default_value()) for item in schema.arguments]


def test_all_operations_but_what_no_ledger_counts_have_work() -> None:
    assert len(OPERATIONS) == 20
    unpriced = {name for name, operation in OPERATIONS.items() if find_work(operation) is None}
    # Of an indexer's objective: scores that attention and the choice of keys have computed before.
    assert unpriced == {"SUM_BLOCK_SHARES", "SUM_SHARES", "DIVERGE"}
