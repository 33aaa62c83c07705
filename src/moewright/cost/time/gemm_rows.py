"""Rows of products, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.cost.symbols import Symbols
from moewright.cost.time.op_time import OpRow
from moewright.rules.adapters import trains_module
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.plan import TimePart

# How the name of a backward row ends whose weight gradient is never delayed.
NEVER_DELAYED = "at_once"
# The module of a product, by how the name of its row begins.
_ROW_MODULES: Mapping[str, Module] = MappingProxyType(
    {
        "attention": Module.ATTENTION,
        "mixer": Module.ATTENTION,
        "indexer": Module.ATTENTION,
        "mlp": Module.DENSE_MLP,
        "shared": Module.SHARED_EXPERTS,
        "router": Module.ROUTER,
        "latent": Module.EXPERTS,
        "experts": Module.EXPERTS,
        "head": Module.HEAD,
        "mtp": Module.MTP,
    }
)
# Elements of 16 bits in a cache line of 128 bytes; narrower matrices are joined to others.
_LINE = 64
_WIDE = 1024
_BACKWARD_PRODUCTS = 2.0  # a product's gradients are two products of its size


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOps:
    """The rows of one layer, forward and backward, without recompute and collectives."""

    forward: tuple[OpRow, ...]
    backward: tuple[OpRow, ...]


def gemm_row(
    name: str,
    sym: Symbols,
    tokens: int,
    n: float,
    k: float,
    part: TimePart,
    *recomputed_by: Recompute,
) -> OpRow:
    """Return the row of a product [tokens, k] x [k, n].

    Shards of wide matrices whose rows do not begin on a cache line cost more. Vocabularies are
    padded to whole lines.
    """
    is_aligned = part is not TimePart.DENSE or all(
        width < _WIDE or width % _LINE == 0 for width in (n, k)
    )
    product_flops = 2.0 * tokens * n * k
    return OpRow(
        name=name,
        part=part,
        op=Op.GEMM,
        amount=product_flops,
        x=product_flops,
        dtype=sym.product_dtype(name),
        recomputed_by=(Recompute.FULL, *recomputed_by),
        scale_constant="" if is_aligned else "misaligned_gemm_time_scale",
    )


def backward_gemms(row: OpRow, sym: Symbols) -> OpRow:
    """Return the backward of a product: twice the work, in calls of the same size.

    A frozen weight has no gradient, and nothing of its backward can be delayed.
    """
    module = _ROW_MODULES[row.name.partition(".")[0]]
    is_frozen = not trains_module(sym.workload.fine_tuning, module)
    # Written out, since dataclasses.replace takes five times as long and a search makes many.
    return OpRow(
        name=f"{row.name}.{NEVER_DELAYED}" if is_frozen else row.name,
        part=row.part,
        op=row.op,
        amount=row.amount if is_frozen else row.amount * _BACKWARD_PRODUCTS,
        x=row.x,
        dtype=row.dtype,
        efficiency=row.efficiency,
        scale_constant=row.scale_constant,
    )
