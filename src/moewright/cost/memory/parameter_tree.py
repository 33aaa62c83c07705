"""Buckets of many ranks at once: ranks whose first layers have equal parameters share the work.

A rank places the parameters of its layers one after another in buckets (rules.shapes.buckets).
Sequences of layers form a tree of common prefixes. For one way of sharding parameters every node of
the tree is placed once, and the buckets of any rank are those along the path from the root to its
node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.rules.shapes import buckets, shards
from moewright.rules.shapes.param import Param
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

_LocalParam = tuple[int, bool]  # elements on a rank, and whether they are counted apart


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSequences:
    """The parameters of a pipeline rank, as numbers of blocks and nodes of a ParameterTree.

    `layers` holds the block of each layer. `nodes` [sets] are the sequences in which the rank
    places them in buckets, and `holders` [sets] how many pipeline ranks hold the parameters of
    each: a table that several ranks hold has buckets of its own.
    """

    layers: tuple[int, ...]
    nodes: tuple[int, ...]
    holders: tuple[int, ...]


class ParameterTree:
    """A tree of sequences of blocks; a block is the parameters of a layer, whatever its number.

    `blocks` [blocks] holds the parameters; `parents` and `last_blocks` [nodes] hold, for each
    sequence, the node of the sequence without its last block (-1 for the root) and that block.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[Param, ...]] = []
        self.parents: list[int] = [-1]
        self.last_blocks: list[int] = [-1]
        self._numbers: dict[object, int] = {}
        self._by_layer: dict[int, int] = {}
        self._children: dict[tuple[int, int], int] = {}

    def rank_sequences(self, model: ModelSpec, layout: Layout, pp_rank: int) -> RankSequences:
        """Return what a pipeline rank of a layout holds."""
        layers = shards.layer_parameters(model, layout, pp_rank)
        tables = shards.shared_table_ranks(model, layout) if layout.pp > 1 else {}
        shared = {ranks for name, ranks in tables.items() if pp_rank in ranks}
        nodes = []
        holders = []
        for ranks in ((), *sorted(shared)):
            blocks = (
                self._block(model, layer, params, tables, ranks)
                for layer, params in reversed(layers)
            )
            nodes.append(self._node(block for block in blocks if block is not None))
            holders.append(max(1, len(ranks)))
        return RankSequences(
            layers=tuple(self._layer_block(model, layer, params) for layer, params in layers),
            nodes=tuple(nodes),
            holders=tuple(holders),
        )

    def _block(
        self,
        model: ModelSpec,
        layer: int,
        params: tuple[Param, ...],
        tables: Mapping[str, tuple[int, ...]],
        ranks: tuple[int, ...],
    ) -> int | None:
        """Return the block of a layer's parameters that just these `ranks` hold; None if empty."""
        if 0 <= layer < model.layers:
            if ranks:
                return None
            return self._layer_block(model, layer, params)
        held_params = tuple(param for param in params if tables.get(param.name, ()) == ranks)
        if held_params:
            return self._number(held_params)
        return None

    def _layer_block(self, model: ModelSpec, layer: int, params: tuple[Param, ...]) -> int:
        # A rank may hold a part of embeddings, head or MTP depths: no cache by layer for these.
        if not 0 <= layer < model.layers:
            return self._number(params)
        if layer not in self._by_layer:
            self._by_layer[layer] = self._number(params)
        return self._by_layer[layer]

    def _number(self, params: tuple[Param, ...]) -> int:
        """Return the number of the block with such parameters, a new one where there is none."""
        # Without names and numbers, so that equal layers share a block.
        key = tuple((param.shape, param.sharded_dims, param.module) for param in params)
        if key not in self._numbers:
            self._numbers[key] = len(self.blocks)
            self.blocks.append(params)
        return self._numbers[key]

    def _node(self, sequence: Iterable[int]) -> int:
        """Return the node of a sequence of blocks, and add the nodes that are missing."""
        node = 0
        for block in sequence:
            if (node, block) not in self._children:
                self._children[node, block] = len(self.parents)
                self.parents.append(node)
                self.last_blocks.append(block)
            node = self._children[node, block]
        return node


def local_params(
    params: Sequence[Param], layout: Layout, group: str, is_marked: Callable[[Param], bool]
) -> list[_LocalParam]:
    """Return the elements of the parameters that `group` reduces, in the order of buckets.

    Those that `is_marked` names are counted apart.
    """
    return [
        (prod(shards.local_shape(param, layout)), is_marked(param))
        for param in reversed(params)
        if shards.gradient_group(param.sharded_dims, layout) == group
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketTotals:
    """The buckets along the path to every node of a tree, in arrays [nodes].

    `numel` is their elements, padding included; `calls` their number; `marked` their elements that
    are counted apart; `own_marked` those of them in the slices of the group's first rank.
    """

    numel: Array
    calls: Array
    marked: Array
    own_marked: Array


class BucketFill:
    """The buckets that the sequences of a tree fill, for one way of sharding parameters.

    `local` returns the local parameters of a block on a rank. Without `follows_marked` the places
    of what is counted apart are not recorded, and `BucketTotals.own_marked` is 0.
    """

    def __init__(
        self,
        tree: ParameterTree,
        local: Callable[[Sequence[Param]], list[_LocalParam]],
        *,
        bucket_elements: int,
        shard_multiple: int,
        follows_marked: bool,
    ) -> None:
        self._tree = tree
        self._local = local
        self._bucket_elements = bucket_elements
        self._shard_multiple = shard_multiple
        self._follows_marked = follows_marked
        self._blocks: list[list[_LocalParam]] = []
        # For every node: where its last, open bucket ends; its marked elements; and (start,
        # elements) of the marked parameters in the open bucket.
        self._ends = [0]
        self._marked = [0]
        self._open: list[tuple[tuple[int, int], ...]] = [()]
        # Closed buckets: the node that closes one, its end, and its marked parameters as above.
        self._closed: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
        self._totals: dict[int, BucketTotals] = {}

    def totals(self, shard_count: int) -> BucketTotals:
        """Return the buckets of every node, each cut into `shard_count` shards."""
        if len(self._ends) < len(self._tree.parents):
            self._extend()
            # Totals are arrays over all nodes: new nodes make them too short.
            self._totals.clear()
        if shard_count not in self._totals:
            self._totals[shard_count] = self._sum(shard_count)
        return self._totals[shard_count]

    def _extend(self) -> None:
        """Place the last blocks of the nodes that were added to the tree since the last call."""
        tree = self._tree
        self._blocks += [self._local(params) for params in tree.blocks[len(self._blocks) :]]
        for node in range(len(self._ends), len(tree.parents)):
            parent = tree.parents[node]
            end, marked, entries = self._ends[parent], self._marked[parent], self._open[parent]
            for numel, is_marked in self._blocks[tree.last_blocks[node]]:
                start, end, closes = buckets.lay_parameter(
                    end, numel, bucket_elements=self._bucket_elements
                )
                if is_marked:
                    marked += numel
                    if self._follows_marked:
                        entries = (*entries, (start, numel))
                if closes:
                    self._closed.append((node, end, entries))
                    end, entries = 0, ()
            self._ends.append(end)
            self._marked.append(marked)
            self._open.append(entries)

    def _sum(self, shard_count: int) -> BucketTotals:
        count = len(self._ends)
        closed_node = np.array([node for node, _, _ in self._closed], dtype=int)
        closed, still_open = (
            buckets.padded_numel(np.array(ends, dtype=float), shard_count, self._shard_multiple)
            for ends in ([end for _, end, _ in self._closed], self._ends)
        )
        numel = np.bincount(closed_node, closed, minlength=count)
        calls = np.bincount(closed_node, minlength=count)
        own_marked = np.zeros(count)
        if self._follows_marked:
            own = [
                _inside(entries, stop)
                for (_, _, entries), stop in zip(
                    self._closed, (closed / shard_count).tolist(), strict=True
                )
            ]
            own_marked = self._along_paths(np.bincount(closed_node, own, minlength=count))
            own_marked += [
                _inside(entries, stop)
                for entries, stop in zip(
                    self._open, (still_open / shard_count).tolist(), strict=True
                )
            ]
        return BucketTotals(
            numel=self._along_paths(numel) + still_open,
            calls=self._along_paths(calls) + (still_open > 0),
            marked=np.array(self._marked, dtype=float),
            own_marked=own_marked,
        )

    def _along_paths(self, node_values: Array) -> Array:
        """Return, for every node, the sum of the values on the path from the root to it."""
        sums = node_values.tolist()
        # A parent is added before its children, so that its sum is complete here.
        for node, parent in enumerate(self._tree.parents):
            if node:
                sums[node] += sums[parent]
        return np.array(sums, dtype=float)


def _inside(entries: Sequence[tuple[int, int]], stop: float) -> float:
    """Return the elements of entries that lie before `stop`."""
    return sum(min(stop - start, numel) for start, numel in entries if start < stop)
