"""The state space of Mamba-2 with the convolution before it, by products of torch on any device.

A head carries a state S [N, P]. A token decays it by exp(a dt) and writes its values, scaled by dt,
under its key: S <- exp(a dt) S + dt b x', and its output is c' S + d x (Dao and Gu 2024, arXiv
2405.21060). The heads of a group share keys b and queries c; dt is a softplus, a = -exp(A_log).
Tokens go through in chunks: inside one, outputs are a masked product of queries and keys, and the
state is carried from chunk to chunk in fp32. As in mamba_ssm's kernel, the convolution is part of
the operation, and backward makes all but its inputs again.

Shapes: B sequences, S tokens, G groups, H heads (R = H / G to a group), P and N the widths of
values and keys, W = R P + 2 N the columns of a group (its values, its keys, its queries), K the
width of the convolution; n chunks of C tokens; `lengths` as in kernels.causal_conv. `weights` are
those of the convolution [G*W,K], dt_bias, A_log and D [H], and the convolution's bias [G*W] where
it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moewright.engine.kernels.causal_conv import (
    Tensors,
    convolve,
    convolve_backward,
    map_documents,
    widen,
)
from moewright.engine.kernels.delta_rule import CHUNK, from_chunks, to_chunks
from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp


class _StateChunks(NamedTuple):
    """The chunks of some sequences, widened: [n,B,G,R,C,...], with R = 1 for keys and queries.

    `step` is dt, `written` dt x. `into` is what is left at a token of the state before its chunk,
    `onward` what the next chunk's state has of a token, `pair_decay` [C,C] what is left at a row's
    token of what a column's token wrote.
    """

    x: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    step: torch.Tensor
    written: torch.Tensor
    into: torch.Tensor
    onward: torch.Tensor
    pair_decay: torch.Tensor


def _build_chunks(
    mixed: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, state: int
) -> _StateChunks:
    """Return the chunks of convolved columns [B,S,G,W] and steps [B,S,H]."""
    groups = mixed.shape[2]
    x, keys, queries = mixed.split((mixed.shape[3] - 2 * state, state, state), -1)
    sharing = dt.shape[2] // groups
    steps = to_chunks(dt.unflatten(2, (groups, sharing))).transpose(-1, -2)
    values = to_chunks(x.unflatten(3, (sharing, -1))).transpose(3, 4)
    log_decay = (steps * a.view(groups, sharing, 1)).cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=dt.device).triu(1)
    differences = log_decay[..., :, None] - log_decay[..., None, :]
    return _StateChunks(
        x=values,
        keys=to_chunks(keys)[:, :, :, None],
        queries=to_chunks(queries)[:, :, :, None],
        step=steps[..., None],
        written=steps[..., None] * values,
        into=log_decay.exp()[..., None],
        onward=(log_decay[..., -1:] - log_decay).exp()[..., None],
        # Before exp, which overflows where a later token's difference is positive.
        pair_decay=differences.masked_fill(later, float("-inf")).exp(),
    )


def _carry(chunks: _StateChunks) -> torch.Tensor:
    """Return the state [n,B,G,R,N,P] that each chunk begins with."""
    added = (chunks.onward * chunks.keys).mT @ chunks.written
    states = torch.zeros_like(added)
    for place in range(1, len(states)):
        kept = chunks.into[place - 1, ..., -1:, :] * states[place - 1]
        states[place] = kept + added[place - 1]
    return states


def _state_space(
    inputs: torch.Tensor,
    step: torch.Tensor,
    weights: Sequence[torch.Tensor],
    state: int,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Return the outputs [B,S,H,P] of projected columns [B,S,G,W] and steps [B,S,H]."""
    conv, dt_bias, a_log, skip, *conv_bias = weights

    def run(inputs: torch.Tensor, step: torch.Tensor) -> Tensors:
        mixed = F.silu(convolve(inputs, conv, *conv_bias or (None,)))
        dt = F.softplus(widen(step) + widen(dt_bias))
        chunks = _build_chunks(mixed, dt, -widen(a_log).exp(), state)
        pairs = (chunks.queries @ chunks.keys.mT) * chunks.pair_decay
        outputs = pairs @ chunks.written + chunks.into * (chunks.queries @ _carry(chunks))
        outputs += widen(skip).view(*outputs.shape[2:4], 1, 1) * chunks.x
        # A copy, so that no chunk's padding is kept with it.
        out = inputs.new_empty(_out_shape(inputs, step, state))
        return (out.copy_(_from_groups(outputs, inputs.shape[1])),)

    return map_documents(run, lengths, inputs, step)[0]


def _from_groups(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [n,B,G,R,C,...] as [B,S,H,...], without the padding."""
    return from_chunks(x.flatten(2, 3), tokens)


def _state_space_backward(
    grad: torch.Tensor,
    inputs: torch.Tensor,
    step: torch.Tensor,
    weights: Sequence[torch.Tensor],
    state: int,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of the inputs, the steps and the weights."""
    conv, dt_bias, a_log, skip, *conv_bias = weights
    grad_weights = [torch.zeros_like(widen(weight)) for weight in weights]
    a = -widen(a_log).exp()

    def differentiate(grad: torch.Tensor, inputs: torch.Tensor, step: torch.Tensor) -> Tensors:
        tokens = inputs.shape[1]
        convolved = convolve(inputs, conv, *conv_bias or (None,))
        raw_step = widen(step) + widen(dt_bias)
        chunks = _build_chunks(F.silu(convolved), F.softplus(raw_step), a, state)
        grads = _to_groups(widen(grad), inputs.shape[2])
        skipped = widen(skip).view(*grads.shape[2:4], 1, 1)
        slopes = _differentiate(grads, chunks)
        scaled = a.view(*grads.shape[2:4], 1, 1)
        grad_x = chunks.step * slopes.written + skipped * grads
        grad_step = scaled * slopes.log_decay + (slopes.written * chunks.x).sum(-1, keepdim=True)
        grad_raw = _from_groups(grad_step, tokens)[..., 0] * torch.sigmoid(raw_step)
        columns = _from_groups(grad_x, tokens).unflatten(2, (inputs.shape[2], -1)).flatten(3)
        keys, queries = (from_chunks(x, tokens) for x in (slopes.keys, slopes.queries))
        grad_mixed = torch.cat((columns, keys, queries), -1)
        grad_convolved = torch.ops.aten.silu_backward(grad_mixed, convolved)
        grad_inputs = convolve_backward(grad_convolved, inputs, conv, grad_weights[0])
        # By head; a step's rate is -exp(A_log), whose slope is itself.
        grad_weights[1] += grad_raw.sum((0, 1))
        grad_weights[2] += a * (slopes.log_decay * chunks.step).sum((0, 1, 4, 5)).flatten()
        grad_weights[3] += (grads * chunks.x).sum((0, 1, 4, 5)).flatten()
        if conv_bias:
            grad_weights[4] += grad_convolved.sum((0, 1)).flatten()
        return grad_inputs.to(inputs.dtype), grad_raw.to(step.dtype)

    grad_inputs, grad_step = map_documents(differentiate, lengths, grad, inputs, step)
    by_weight = zip(grad_weights, weights, strict=True)
    return grad_inputs, grad_step, [x.to(weight.dtype) for x, weight in by_weight]


def _to_groups(x_BSHP: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [B,S,H,P] as chunks [n,B,G,R,C,P]."""
    return to_chunks(x_BSHP).unflatten(2, (groups, -1))


class _StateSlopes(NamedTuple):
    """The gradients of chunks: of keys and queries [n,B,G,C,N], written and log decays [.,C,1]."""

    keys: torch.Tensor
    queries: torch.Tensor
    written: torch.Tensor
    log_decay: torch.Tensor


def _differentiate(grad: torch.Tensor, chunks: _StateChunks) -> _StateSlopes:
    """Return the gradients of chunks; those of log decays are summed over the tokens they reach."""
    states = _carry(chunks)
    later_states = torch.zeros_like(states)  # what a chunk's last state is worth after it
    read = (chunks.into * chunks.queries).mT @ grad
    for place in reversed(range(len(states) - 1)):
        passed_on = chunks.into[place + 1, ..., -1:, :] * later_states[place + 1]
        later_states[place] = passed_on + read[place + 1]
    grad_pairs = (grad @ chunks.written.mT) * chunks.pair_decay
    products = chunks.queries @ chunks.keys.mT
    recalled = chunks.keys @ later_states
    grad_written = (products * chunks.pair_decay).mT @ grad + chunks.onward * recalled
    # Every pair of tokens, what reads the state before, and what goes on to the next.
    pairs = grad_pairs * products
    passed = (chunks.onward * recalled * chunks.written).sum(-1)
    grad_log = pairs.sum(-1) - pairs.sum(-2) - passed
    grad_log += (chunks.into * (chunks.queries @ states) * grad).sum(-1)
    last = chunks.into[..., -1, 0] * (states * later_states).sum((-2, -1))
    grad_log[..., -1] += passed.sum(-1) + last
    grad_products = grad_pairs.sum(3)
    keys, queries = chunks.keys[:, :, :, 0], chunks.queries[:, :, :, 0]
    return _StateSlopes(
        keys=grad_products.mT @ queries
        + (chunks.onward * (chunks.written @ later_states.mT)).sum(3),
        queries=grad_products @ keys + (chunks.into * (grad @ states.mT)).sum(3),
        written=grad_written,
        log_decay=grad_log.flip(-1).cumsum(-1).flip(-1)[..., None],
    )


def _out_shape(inputs: Any, step: Any, state: int) -> tuple[int, ...]:
    values = int(inputs.shape[2]) * (int(inputs.shape[3]) - 2 * state)
    return (*step.shape, values // int(step.shape[2]))


def _state_space_flops(inputs: Any, step: Any, state: int) -> int:
    """Count 7 for each token and element of the state, as Megatron-Bridge does."""
    batch, tokens, heads, width = _out_shape(inputs, step, state)
    return 7 * int(batch) * int(tokens) * int(heads) * int(width) * state


_WORK = OperationWork(
    op=FlopOp.SCAN,
    count=lambda inputs, step, weights, state, lengths: _state_space_flops(inputs, step, state),
)
STATE_SPACE = define_operation(
    "state_space(Tensor inputs, Tensor step, Tensor[] weights, int state, int[] lengths) -> Tensor",
    _state_space,
    lambda inputs, step, weights, state, lengths: inputs.new_empty(_out_shape(inputs, step, state)),
    _WORK,
)
STATE_SPACE_BACKWARD = define_operation(
    "state_space_backward(Tensor grad, Tensor inputs, Tensor step, Tensor[] weights, int state, "
    "int[] lengths) -> (Tensor, Tensor, Tensor[])",
    _state_space_backward,
    lambda grad, inputs, step, weights, state, lengths: (
        inputs.new_empty(inputs.shape),
        step.new_empty(step.shape),
        [torch.empty_like(weight) for weight in weights],
    ),
    _WORK.backward(),
)
