"""The record of one trained tensor, and which of its dims tensor parallelism shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moewright.spec.ledger import Module

EMBEDDING_LAYER = -1  # before layer 0

ShardedDims = tuple[tuple[str, int], ...]

# What TP shards of weights [out, in]: the rows of the first of two linear layers, the columns of
# the second.
TP_ROWS: ShardedDims = (("tp", 0),)
TP_COLUMNS: ShardedDims = (("tp", 1),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One trained tensor, in HF orientation [out, in].

    `layer` is 0..L-1 for layers, -1 for the embeddings, L for the final norm and the head, L+1+d
    for everything of MTP depth d. `sharded_dims` holds (axis, dim) pairs; an axis that is not named
    holds a full copy. `module`: norms inside attention belong to attention, everything of an MTP
    depth to MTP.
    """

    name: str
    shape: tuple[int, ...]
    module: Module
    layer: int
    is_expert: bool
    sharded_dims: ShardedDims

    @property
    def has_weight_decay(self) -> bool:
        return has_weight_decay(self.name, len(self.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)


def has_weight_decay(name: str, dims: int) -> bool:
    """Return whether weight decay applies to a parameter.

    It applies to matrices and to no bias, of however many experts.
    """
    return dims > 1 and not name.endswith(".bias")


def name_in_layer(name: str) -> str:
    """Return a parameter's name without its layer's prefix and its own suffix: `attention.q`."""
    parts = name.split(".")
    if parts[0] == "layers":
        parts = parts[2:]
    elif parts[0] == "mtp":
        parts = parts[3:] if parts[2] == "layer" else parts[2:]
    return ".".join(parts).removesuffix(".weight")


def tensor(
    name: str,
    shape: tuple[int, ...],
    module: Module,
    layer: int,
    sharded_dims: ShardedDims = (),
    *,
    is_expert: bool = False,
) -> Param:
    """Return a parameter that no rank shares out but as `sharded_dims` says."""
    return Param(
        name=name,
        shape=shape,
        module=module,
        layer=layer,
        is_expert=is_expert,
        sharded_dims=sharded_dims,
    )
