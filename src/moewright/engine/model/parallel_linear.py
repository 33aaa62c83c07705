"""Linear layers: column-parallel, row-parallel and replicated ones, the router and the experts.

Column- and row-parallel layers are split over a tensor-parallel group, with sequence parallelism as
in Korthikanti et al. 2022: between blocks a rank holds t of the T tokens of its group. A
column-parallel layer gathers them; a row-parallel layer sums over the ranks and leaves each rank
its t tokens; backward does the transpose. Without sequence parallelism t is T, and every rank keeps
the whole sum. A group of one rank communicates nothing.

A weight that does not train (requires_grad) has no gradient, and its input is not kept.

Shapes: t, T tokens as above, K in, N out, R routed rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moewright.engine.comm.collectives import Group, RingShift, TensorParallel
from moewright.engine.kernels.matmul import matmul
from moewright.engine.kernels.products import Gradient, HeldInput, Input, Products
from moewright.engine.memory.weight_gradients import Operands, WeightGradStore
from moewright.engine.model.autograd import CountedFunction
from moewright.engine.observe.counters import Counters

# Products that run beside the exchange of their rows over a tensor-parallel group.
#
# With overlap=tp, rows of a product travel round the ring of the group's ranks, a rank's at a time:
# while a product of one rank's rows runs, those of the next are under way. A gather hands on what
# it has received, so that all ranks have had all rows after size - 1 shifts. A reduction hands on
# sums, to which each rank adds its part, so that each ends where it belongs. (Wang et al., "Overlap
# Communication with Dependent Computation via Decomposition", ASPLOS 2023.)
#
# Shapes: t, T tokens of this rank and of its group, K in, N out.

# A product of rows and a weight, such as a linear layer's forward; or with each of some weights.
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MultiplyEach = Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def gather_and_multiply(
    x_tK: torch.Tensor, weights: Sequence[torch.Tensor], tp: TensorParallel, multiply: MultiplyEach
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return x [T,K] gathered over the group, and its product with each weight [T,N]."""
    if not tp.is_pipelined:
        x_TK = tp.gather(x_tK)
        return x_TK, tuple(multiply(x_TK, weights))
    size, own = tp.group.size, tp.group.index
    rows = x_tK.contiguous()
    rows_by_rank = [rows] * size
    products = [[rows] * size for _ in weights]
    for step in range(size):
        rank = (own - step) % size
        rows_by_rank[rank] = rows
        shift = RingShift(rows, tp.group) if step < size - 1 else None
        for product, part in zip(products, multiply(rows, weights), strict=True):
            product[rank] = part
        if shift is not None:
            rows = shift.wait()
    return torch.cat(rows_by_rank), tuple(torch.cat(product) for product in products)


def multiply_and_reduce(
    x_TK: torch.Tensor, weight: torch.Tensor, tp: TensorParallel, multiply: Multiply
) -> torch.Tensor:
    """Return this rank's rows [t,N] of the sum over ranks of the product of x and its weight."""
    if not tp.is_pipelined:
        return tp.reduce(multiply(x_TK, weight))
    size, own = tp.group.size, tp.group.index
    rows_by_rank = x_TK.chunk(size)
    # A sum starts at the rank after its owner, and is home after size - 1 shifts.
    sum_tN = multiply(rows_by_rank[(own - 1) % size], weight)
    for step in range(1, size):
        shift = RingShift(sum_tN, tp.group)
        part = multiply(rows_by_rank[(own - 1 - step) % size], weight)
        sum_tN = shift.wait().add_(part)
    return sum_tN


def _save_input(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor, is_whole: bool = True) -> None:
    """Save what backward reads: the input, where the weight trains, and `tensors`.

    An input that the products keep in fewer bits is held as it is kept, where it `is_whole` what
    they multiply. Called when they have multiplied it: what is held may leave for the host.
    """
    ctx.held_input = ctx.products.hold_input(x) if ctx.is_trained and is_whole else None
    ctx.save_for_backward(x if ctx.is_trained and ctx.held_input is None else None, *tensors)


def _take_input(ctx: Any, saved: torch.Tensor | None) -> Input | None:
    """Return the input that `_save_input` saved or holds; None where the weight does not train.

    What waits for its W row waits as a tensor.
    """
    held_input: HeldInput | None = ctx.held_input
    if held_input is None:
        return saved
    return held_input.take_wide() if ctx.weight_grads.is_deferring else held_input.take()


def _compute_or_defer(
    ctx: Any,
    weights: slice,
    x: Input,
    others: Operands,
    compute: Callable[[Input, Operands], Sequence[torch.Tensor]],
) -> Sequence[torch.Tensor | None]:
    """Return compute(x, others), the gradients of `weights`, or None for those wanted later."""
    if isinstance(x, torch.Tensor):
        return CountedFunction.compute_or_defer_grads(
            ctx, weights, (x, *others), lambda kept: compute(kept[0], kept[1:])
        )
    with ctx.counters.scopes.enter(ctx.scope):  # nothing is deferred that is held as it is kept
        return compute(x, others)


def _begin_backward(
    ctx: Any, g: torch.Tensor, x: Input | None, ends: torch.Tensor | None = None
) -> Gradient:
    """Return the gradient of an output for the products of its backward.

    What waits for its W row is kept as it came, and a weight that does not train reads none.
    """
    if x is None or ctx.weight_grads.is_deferring:
        return g
    products: Products = ctx.products
    return products.begin_backward(g, x, ends)


InputNoise = Callable[[], torch.Tensor]


class ColumnParallelLinear(CountedFunction):
    """y_i [T,N_i] = x w_i^T for x [t,K] and each w_i [N_i,K], this rank's output columns.

    Keeps x [t,K], not the gathered x; backward gathers it again, as Megatron-LM does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_tK: torch.Tensor,
        tp: TensorParallel,
        products: Products,
        weight_grads: WeightGradStore,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        CountedFunction.save_scope(ctx, tp.group.counters)
        ctx.tp = tp
        ctx.products = products
        ctx.weight_grads = weight_grads
        # The weights come after x, tp, products and weight_grads.
        ctx.is_trained = any(ctx.needs_input_grad[4:])
        _, outputs = gather_and_multiply(x_tK, weights, tp, products.forward_each)
        # With more ranks the products have multiplied the gathered rows, not x.
        _save_input(ctx, x_tK, *weights, is_whole=tp.group.size == 1)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, *weights = ctx.saved_tensors
        x_tK = _take_input(ctx, saved)
        tp: TensorParallel = ctx.tp
        # In bulk: the gather for the weight gradients runs beside the products of the input's
        # gradient, and the sum of that beside the weight gradients.
        is_bulk = tp.is_pipelined and not ctx.weight_grads.is_deferring
        gathered = tp.start_gather(x_tK) if is_bulk and isinstance(x_tK, torch.Tensor) else None
        products: Products = ctx.products
        with ctx.counters.scopes.enter(ctx.scope):
            shared = [_begin_backward(ctx, g_TN, x_tK) for g_TN in grads]
            pairs = zip(shared, weights, strict=True)
            parts = [products.input_grad(g_TN, w_NK) for g_TN, w_NK in pairs]
            grad_TK = parts.pop()
            # Popped, so that each part is freed when it has been added.
            while parts:
                grad_TK = grad_TK + parts.pop()
            if x_tK is None:
                return tp.reduce(grad_TK), None, None, None, *(None for _ in weights)
            reduced = tp.start_reduce(grad_TK)
            if not is_bulk:
                reduced.wait()

        def compute_weight_grads(x_tK: Input, _: Operands) -> list[torch.Tensor]:
            x_TK = x_tK
            if gathered is not None:
                x_TK = gathered.wait()
            elif isinstance(x_tK, torch.Tensor):
                x_TK = tp.gather(x_tK)
            return products.weight_grad_each(shared, x_TK)

        # Among the tensors x comes first, then the weights.
        grad_weights = _compute_or_defer(ctx, slice(1, None), x_tK, grads, compute_weight_grads)
        grad_tK = reduced.wait() if is_bulk else reduced.out
        return grad_tK, None, None, None, *grad_weights


class RowParallelLinear(CountedFunction):
    """y [t,N]: this rank's tokens of the sum over ranks of x w^T.

    x [T,K] and w [N,K] are this rank's input columns; keeps x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        tp: TensorParallel,
        products: Products,
        weight_grads: WeightGradStore,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, tp.group.counters)
        ctx.tp = tp
        ctx.products = products
        ctx.weight_grads = weight_grads
        ctx.is_trained = ctx.needs_input_grad[1]
        y_tN = multiply_and_reduce(x_TK, w_NK, tp, products.forward)
        _save_input(ctx, x_TK, w_NK)
        return y_tN

    @staticmethod
    def backward(ctx: Any, g_tN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, w_NK = ctx.saved_tensors
        x_TK = _take_input(ctx, saved)
        tp: TensorParallel = ctx.tp
        products: Products = ctx.products

        def multiply(g_RN: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [products.input_grad(g_RN, weight) for weight in weights]

        with ctx.counters.scopes.enter(ctx.scope):
            if tp.is_pipelined:
                g_TN, (grad_TK,) = gather_and_multiply(g_tN, [w_NK], tp, multiply)
                shared: Gradient = g_TN
            else:
                g_TN = tp.gather(g_tN)
                shared = _begin_backward(ctx, g_TN, x_TK)
                grad_TK = products.input_grad(shared, w_NK)
        if x_TK is None:
            return grad_TK, None, None, None, None
        (grad_NK,) = _compute_or_defer(
            ctx, slice(1, 2), x_TK, (g_TN,), lambda x, _: [products.weight_grad(shared, x)]
        )
        return grad_TK, grad_NK, None, None, None


class RouterLinear(CountedFunction):
    """Router logits [T,E] in `dtype` from activations and weights of the compute dtype.

    Keeps x in the compute dtype. `noise` draws factors [T,K] that x is multiplied by, None for no
    noise; backward draws the same factors again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        w_EK: torch.Tensor,
        counters: Counters,
        dtype: torch.dtype,
        noise: InputNoise | None,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.is_trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(x_TK if ctx.is_trained else None, w_EK)
        ctx.dtype = x_TK.dtype
        ctx.noise = noise
        return matmul(_apply_noise(x_TK.to(dtype), noise), w_EK.to(dtype).T)

    @staticmethod
    def backward(ctx: Any, g_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, w_EK = ctx.saved_tensors
        grad_w = None
        with ctx.counters.scopes.enter(ctx.scope):
            grad_x = _apply_noise(matmul(g_TE, w_EK.to(g_TE.dtype)), ctx.noise)
            if ctx.is_trained:
                grad_w = matmul(g_TE.T, _apply_noise(x_TK.to(g_TE.dtype), ctx.noise))
                grad_w = grad_w.to(w_EK.dtype)
        return grad_x.to(ctx.dtype), grad_w, None, None, None


def _apply_noise(x_TK: torch.Tensor, noise: InputNoise | None) -> torch.Tensor:
    return x_TK if noise is None else x_TK * noise()


class ReplicatedLinear(CountedFunction):
    """y [T,N] = x w^T with w [N,K] whole on every rank, in the compute dtype; keeps x.

    The ranks of `replica_group` all have the same x and the same gradient of y; each contributes an
    equal share of the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        counters: Counters,
        products: Products,
        replica_group: Group | None = None,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.products = products
        ctx.replica_group = replica_group
        ctx.is_trained = ctx.needs_input_grad[1]
        y_TN = products.forward(x_TK, w_NK)
        _save_input(ctx, x_TK, w_NK)
        return y_TN

    @staticmethod
    def backward(ctx: Any, g_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, w_NK = ctx.saved_tensors
        with ctx.counters.scopes.enter(ctx.scope):
            if not ctx.is_trained:
                return ctx.products.input_grad(g_TN, w_NK), None, None, None, None
            x_TK = saved if ctx.held_input is None else ctx.held_input.take()
            shared = ctx.products.begin_backward(g_TN, x_TK)
            grad_x = ctx.products.input_grad(shared, w_NK)
            grad_w = ctx.products.weight_grad(shared, x_TK)
        if ctx.replica_group is not None:
            grad_w.div_(ctx.replica_group.size)
        return grad_x, grad_w, None, None, None


class GroupedLinear(CountedFunction):
    """y [R,N]: rows of expert e times w[e]^T, w [E,N,K]; keeps x.

    `ends` [E] int32 are the running ends of the groups: the cumulative sums of their row counts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RK: torch.Tensor,
        w_ENK: torch.Tensor,
        ends_E: torch.Tensor,
        counters: Counters,
        products: Products,
        weight_grads: WeightGradStore,
    ) -> torch.Tensor:
        CountedFunction.save_scope(ctx, counters)
        ctx.products = products
        ctx.weight_grads = weight_grads
        ctx.is_trained = ctx.needs_input_grad[1]
        y_RN = products.forward(x_RK, w_ENK, ends_E)
        _save_input(ctx, x_RK, w_ENK, ends_E)
        return y_RN

    @staticmethod
    def backward(ctx: Any, g_RN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, w_ENK, ends_E = ctx.saved_tensors
        x_RK = _take_input(ctx, saved)
        # torch's grouped product refuses an expanded gradient, such as that of a sum.
        g_RN = g_RN.contiguous()
        products: Products = ctx.products
        with ctx.counters.scopes.enter(ctx.scope):
            shared = _begin_backward(ctx, g_RN, x_RK, ends_E)
            grad_RK = products.input_grad(shared, w_ENK, ends_E)
        if x_RK is None:
            return grad_RK, None, None, None, None, None
        (grad_ENK,) = _compute_or_defer(
            ctx,
            slice(1, 2),
            x_RK,
            (g_RN, ends_E),
            lambda x, others: [products.weight_grad(shared, x, others[1])],
        )
        return grad_RK, grad_ENK, None, None, None, None
