"""The gated delta rule, by products of torch on any device.

A head carries a state S [D, V]. A token decays it by exp(g), reads what it holds under the token's
key and writes the difference to the token's value back, in part: S <- exp(g) S,
S <- S + beta k (v - k' S)', and its output is q' S (Yang et al. 2024, arXiv 2412.06464). Tokens go
through in chunks: inside one, what each token writes follows from a unit triangular system, and
the state is carried from chunk to chunk in fp32. Backward makes the states again.

It is an operation of its own, so that its FLOPs count as those of a scan on any device.

Shapes: B sequences, S tokens, G key heads, H value heads (H / G to a key head), D and V the widths
of keys and values, W = 2 D + V H / G the columns of a key head (its query, its key, its values); N
chunks of C tokens; `lengths` as in kernels.causal_conv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moewright.engine.kernels.causal_conv import Tensors, map_documents, widen
from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp

CHUNK = 64  # flash-linear-attention's, to whose kernels this is equal
_NORM_EPS = 1e-6  # under the root of a query's or key's square sum (fla's l2norm)


class _Chunks(NamedTuple):
    """The chunks of some sequences, widened: [N,B,H,C,...].

    `q` is scaled, `k` and `q` are of unit length; `log_decay` sums g from the chunk's beginning.
    `pair_decay` [C,C] is what is left at a row's token of what a column's token wrote, `writes`
    the inverse of the unit triangular system of what tokens write, `reads` what a row's query finds
    of what a column's token wrote.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor
    pair_decay: torch.Tensor
    writes: torch.Tensor
    reads: torch.Tensor


class _Inputs(NamedTuple):
    """Queries, keys [B,S,G,D] and values [B,S,H,V], and the factors that norm the former two."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_factor: torch.Tensor
    k_factor: torch.Tensor


def _split_inputs(mixed: torch.Tensor, heads: int, key_dim: int) -> _Inputs:
    sharing = heads // mixed.shape[2]
    q, k, v = mixed.split((key_dim, key_dim, mixed.shape[3] - 2 * key_dim), -1)
    q, k = widen(q), widen(k)
    return _Inputs(
        q=q,
        k=k,
        v=widen(v).unflatten(-1, (sharing, -1)).flatten(2, 3),
        q_factor=torch.rsqrt(q.square().sum(-1, keepdim=True) + _NORM_EPS),
        k_factor=torch.rsqrt(k.square().sum(-1, keepdim=True) + _NORM_EPS),
    )


def to_chunks(x_BSH: torch.Tensor) -> torch.Tensor:
    """Return [B,S,H,...] as chunks [N,B,H,C,...], the last one padded with zeros."""
    tokens = x_BSH.shape[1]
    padding = -tokens % CHUNK
    padded = F.pad(x_BSH, (0, 0) * (x_BSH.dim() - 2) + (0, padding))
    return padded.unflatten(1, (-1, CHUNK)).movedim(1, 0).transpose(2, 3)


def from_chunks(x_NBHC: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [N,B,H,C,...] as [B,S,H,...], without the padding."""
    return x_NBHC.transpose(2, 3).movedim(0, 1).flatten(1, 2)[:, :tokens]


def _build_chunks(inputs: _Inputs, decay: torch.Tensor, beta: torch.Tensor) -> _Chunks:
    sharing = decay.shape[2] // inputs.q.shape[2]
    scale = inputs.q.shape[-1] ** -0.5
    q = to_chunks((inputs.q * (inputs.q_factor * scale)).repeat_interleave(sharing, 2))
    k = to_chunks((inputs.k * inputs.k_factor).repeat_interleave(sharing, 2))
    # Sums of logarithms, because products of decays would underflow.
    log_decay = to_chunks(decay).cumsum(-1)
    beta = to_chunks(beta)[..., None]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    differences = log_decay[..., :, None] - log_decay[..., None, :]
    # Before exp, which overflows where a later token's difference is positive.
    pair_decay = differences.masked_fill(later, float("-inf")).exp()
    # Below the diagonal: a token reads what those before it have written.
    system = (beta * (k @ k.mT) * pair_decay).tril(-1)
    unit = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    return _Chunks(
        q=q,
        k=k,
        v=to_chunks(inputs.v),
        beta=beta,
        log_decay=log_decay,
        pair_decay=pair_decay,
        writes=torch.linalg.solve_triangular(
            system + unit, unit.expand_as(system), upper=False, unitriangular=True
        ),
        reads=(q @ k.mT) * pair_decay,
    )


def _scan(chunks: _Chunks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs and what tokens write [N,B,H,C,V], and each chunk's first state."""
    into = chunks.log_decay.exp()[..., None]  # of the state before, at each token
    onward = (chunks.log_decay[..., -1:] - chunks.log_decay).exp()[..., None]
    state = chunks.v.new_zeros(*chunks.q.shape[1:3], chunks.q.shape[-1], chunks.v.shape[-1])
    outputs, written, states = [], [], []
    for q, k, v, beta, writes, reads, before, after in zip(
        chunks.q,
        chunks.k,
        chunks.v,
        chunks.beta,
        chunks.writes,
        chunks.reads,
        into,
        onward,
        strict=True,
    ):
        states.append(state)
        # The paper's UT transform: what all tokens of a chunk write, at once.
        new = writes @ (beta * (v - (before * k) @ state))
        outputs.append((before * q) @ state + reads @ new)
        written.append(new)
        state = before[..., -1:, :] * state + (after * k).mT @ new
    return torch.stack(outputs), torch.stack(written), torch.stack(states)


def _delta_rule(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    key_dim: int,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Return the outputs [B,S,H,V] of mixed [B,S,G,W], g = `decay` and beta [B,S,H]."""

    def run(mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> Tensors:
        inputs = _split_inputs(mixed, decay.shape[2], key_dim)
        outputs, _, _ = _scan(_build_chunks(inputs, decay, beta))
        # A copy, so that no chunk's padding is kept with it.
        out = mixed.new_empty(_out_shape(mixed, decay, key_dim))
        return (out.copy_(from_chunks(outputs, mixed.shape[1])),)

    return map_documents(run, lengths, mixed, decay, beta)[0]


def _delta_rule_backward(
    grad: torch.Tensor,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    key_dim: int,
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of mixed, decay and beta."""

    def differentiate(
        grad: torch.Tensor, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> Tensors:
        tokens = mixed.shape[1]
        inputs = _split_inputs(mixed, decay.shape[2], key_dim)
        chunks = _build_chunks(inputs, decay, beta)
        grads = [from_chunks(x, tokens) for x in _differentiate(to_chunks(widen(grad)), chunks)]
        grad_q, grad_k, grad_v, grad_decay, grad_beta = grads
        grad_q = _unnorm(grad_q * key_dim**-0.5, inputs.q, inputs.q_factor)
        grad_k = _unnorm(grad_k, inputs.k, inputs.k_factor)
        grad_v = grad_v.unflatten(2, (mixed.shape[2], -1)).flatten(3)
        return torch.cat((grad_q, grad_k, grad_v), -1).to(mixed.dtype), grad_decay, grad_beta

    grad_mixed, grad_decay, grad_beta = map_documents(
        differentiate, lengths, grad, mixed, decay, beta
    )
    return grad_mixed, grad_decay, grad_beta


def _unnorm(grad: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x, which was scaled by `factor` to unit length and shared by heads."""
    grad = grad.unflatten(2, (x.shape[2], -1)).sum(3)
    unit = x * factor
    return factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))


def _differentiate(grad: torch.Tensor, chunks: _Chunks) -> Tensors:
    """Return the gradients of q, k, v, g and beta, all as chunks."""
    _, written, states = _scan(chunks)
    into = chunks.log_decay.exp()[..., None]
    onward = (chunks.log_decay[..., -1:] - chunks.log_decay).exp()[..., None]
    # What each chunk's last state is worth to the chunks after it, from the last one back.
    grad_state = torch.zeros_like(states[0])
    grad_written = chunks.reads.mT @ grad
    grad_targets = torch.empty_like(grad)
    later_states = torch.empty_like(states)
    for n in reversed(range(len(states))):
        later_states[n] = grad_state
        grad_written[n] += (onward[n] * chunks.k[n]) @ grad_state
        grad_targets[n] = chunks.writes[n].mT @ grad_written[n]
        scaled = into[n] * chunks.beta[n] * grad_targets[n]
        grad_state = (
            into[n, ..., -1:, :] * grad_state
            + (into[n] * chunks.q[n]).mT @ grad[n]
            - chunks.k[n].mT @ scaled
        )
    recalled = into * (chunks.k @ states)  # what the state before holds under each key
    grad_v = chunks.beta * grad_targets
    grad_beta = (grad_targets * (chunks.v - recalled)).sum(-1)
    grad_reads = (grad @ written.mT).tril() * chunks.pair_decay
    grad_system = -(grad_targets @ written.mT).tril(-1) * chunks.pair_decay
    grad_products = chunks.beta * grad_system
    products = chunks.k @ chunks.k.mT
    grad_beta += (grad_system * products).sum(-1)
    carried = onward * (written @ later_states.mT)
    grad_q = into * (grad @ states.mT) + grad_reads @ chunks.k
    grad_k = carried + grad_reads.mT @ chunks.q - into * (grad_v @ states.mT)
    grad_k += (grad_products + grad_products.mT) @ chunks.k
    # Every pair of tokens, what reads the state before, and what goes on to the next.
    pairs = grad_reads * (chunks.q @ chunks.k.mT) + grad_products * products
    passed = (carried * chunks.k).sum(-1)
    grad_log = pairs.sum(-1) - pairs.sum(-2) - passed
    grad_log += (into * (chunks.q @ states) * grad).sum(-1) - (grad_v * recalled).sum(-1)
    last = into[..., -1, :] * (states * later_states).sum((-2, -1))[..., None]
    grad_log[..., -1] += passed.sum(-1) + last[..., 0]
    # The log of a decay counts for its own token and all after it in the chunk.
    grad_decay = grad_log.flip(-1).cumsum(-1).flip(-1)
    return grad_q, grad_k, grad_v, grad_decay, grad_beta


def _out_shape(mixed: torch.Tensor, decay: torch.Tensor, key_dim: int) -> tuple[int, ...]:
    values = mixed.shape[2] * (mixed.shape[3] - 2 * key_dim)
    return (*decay.shape, values // decay.shape[2])


def _scan_flops(mixed: Any, decay: Any, key_dim: int) -> int:
    """Count four products of the state with a vector for each token and head (Megatron-Bridge)."""
    batch, tokens, heads, width = _out_shape(mixed, decay, key_dim)
    return 8 * int(batch) * int(tokens) * int(heads) * key_dim * int(width)


_WORK = OperationWork(
    op=FlopOp.SCAN,
    count=lambda mixed, decay, beta, key_dim, lengths: _scan_flops(mixed, decay, key_dim),
)
DELTA_RULE = define_operation(
    "delta_rule(Tensor mixed, Tensor decay, Tensor beta, int key_dim, int[] lengths) -> Tensor",
    _delta_rule,
    lambda mixed, decay, beta, key_dim, lengths: mixed.new_empty(_out_shape(mixed, decay, key_dim)),
    _WORK,
)
DELTA_RULE_BACKWARD = define_operation(
    "delta_rule_backward(Tensor grad, Tensor mixed, Tensor decay, Tensor beta, int key_dim, "
    "int[] lengths) -> (Tensor, Tensor, Tensor)",
    _delta_rule_backward,
    lambda grad, mixed, decay, beta, key_dim, lengths: (
        mixed.new_empty(mixed.shape),
        torch.empty_like(decay),
        torch.empty_like(beta),
    ),
    _WORK.backward(),
)
# Says how much work somebody else's kernel is about to do on the device of a tensor.
SCAN_WORK = define_operation(
    "scan_work(Tensor like, int flops) -> ()",
    lambda like, flops: None,
    lambda like, flops: None,
    OperationWork(op=FlopOp.SCAN, count=lambda like, flops: int(flops)),
)
