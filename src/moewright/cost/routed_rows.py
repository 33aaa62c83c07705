"""What one pipeline rank holds and how many rows its experts see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from moewright.rules import expert_placement, grid, recompute, routing, stages
from moewright.rules.context_parallel import rank_positions, twice_attended_pairs
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import CapacityFill, Layout
from moewright.spec.ledger import Selection
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DocumentMasking, Workload

Item = TypeVar("Item")


def is_moe_layer(model: ModelSpec, layer: int) -> bool:
    """Whether a layer has experts; MTP depths are like the last layer."""
    return model.moe_layers[layer if layer < model.layers else -1]


def rank_chunks(model: ModelSpec, layout: Layout, pp_rank: int) -> tuple[stages.Chunk, ...]:
    """The virtual stages of a pipeline rank, by chunk index."""
    return tuple(
        chunk for chunk in stages.pipeline_chunks(model, layout) if chunk.pp_rank == pp_rank
    )


def recomputed_layers(
    model: ModelSpec, layout: Layout, chunks: Sequence[stages.Chunk]
) -> frozenset[int]:
    """Layers of the chunks that some recompute policy touches: all, unless full recompute takes the
    first alone."""
    return frozenset(
        layer
        for chunk in chunks
        for place, layer in enumerate(stages.chunk_layers(model, chunk))
        if recompute.layer_recompute(layout, place)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Rows through one rank's experts, by micro-batch and MoE layer of the rank; `even` is the
    balanced count.

    `sent_here` of the rows come over the rank's own EP group; the ranks of its ETP group share
    theirs, the largest part being `widest`. `attended`: what documents left of its attention in the
    step, where they do (Selection); `near`: of that of layers with a sliding window, 0 where it is
    not known.
    """

    layers: tuple[int, ...]
    balanced: int
    rows: tuple[tuple[int, ...], ...]  # [micro_batch][index into layers]
    own_ep_rows: tuple[tuple[int, ...], ...]
    widest_etp_rows: tuple[tuple[int, ...], ...]
    dispatches: tuple[tuple[routing.DispatchCounts, ...], ...]
    attended_pairs: int = 0
    windowed_pairs: int = 0

    def dispatch_counts(self, micro_batch: int, layer: int) -> routing.DispatchCounts | None:
        """What the dispatch moves; None for a layer without experts."""
        return (
            self.dispatches[micro_batch][self.layers.index(layer)] if layer in self.layers else None
        )

    def load_factor(self, micro_batch: int, layer: int) -> float:
        """Rows over the mean; 1 for a layer without experts."""
        if layer not in self.layers or not self.balanced:
            return 1.0
        return self.rows[micro_batch][self.layers.index(layer)] / self.balanced

    @property
    def total(self) -> int:
        return sum_rows(self.rows)

    def count_rows(self, layers: Collection[int]) -> int:
        """Rows through these layers alone."""
        return sum(
            times * n
            for of_batch, times in run_lengths(self.rows)
            for layer, n in zip(self.layers, of_batch, strict=True)
            if layer in layers
        )

    def select_layers(self, layers: Collection[int]) -> ExpertRows:
        """The same of these layers alone."""
        places = [place for place, layer in enumerate(self.layers) if layer in layers]

        def picked(of_batches: Iterable[tuple[Item, ...]]) -> tuple[tuple[Item, ...], ...]:
            parts = (
                (tuple(of_batch[i] for i in places), times)
                for of_batch, times in run_lengths(of_batches)
            )
            return tuple(part for one, times in parts for part in (one,) * times)

        return replace(
            self,
            layers=tuple(self.layers[i] for i in places),
            rows=picked(self.rows),
            own_ep_rows=picked(self.own_ep_rows),
            widest_etp_rows=picked(self.widest_etp_rows),
            dispatches=picked(self.dispatches),
        )


def run_lengths(of_batches: Iterable[Item]) -> Iterator[tuple[Item, int]]:
    """Each run of equal micro-batches once, with its length: a prediction has one run, of up to
    millions."""
    for of_batch, same in groupby(of_batches):
        yield of_batch, len(list(same))


def sum_rows(counts: Iterable[tuple[int, ...]]) -> int:
    """Sum over all micro-batches and layers."""
    return sum(times * sum(of_batch) for of_batch, times in run_lengths(counts))


def count_expert_rows(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    rank: int,
    *,
    micro_batches: int,
    selection: Selection | None,
    load: float = 1.0,
) -> ExpertRows:
    """Rows of a rank from a recorded selection, or `load` times the balanced rows everywhere; rows
    padded to a capacity are what they are.

    Raises BadInput when the selection is not one of this model, layout and batch.
    """
    pp_rank = grid.coordinate(layout, rank, "pp")
    chunks = rank_chunks(model, layout, pp_rank)
    layers = (
        tuple(
            i
            for chunk in chunks
            for i in stages.chunk_layers(model, chunk)
            if is_moe_layer(model, i)
        )
        if model.moe
        else ()
    )
    even = routing.routed_rows(model, workload, layout, 1.0)
    if selection is None or not layers or layout.capacity_fill is CapacityFill.PADDED:
        each = routing.routed_rows(model, workload, layout, load)
        whole, part = (((n,) * len(layers),) * micro_batches for n in (each, each // layout.etp))
        moves = (
            (routing.expected_dispatch(model, workload, layout),) * len(layers),
        ) * micro_batches
        found = ExpertRows(
            layers=layers,
            balanced=even,
            rows=whole,
            own_ep_rows=part,
            widest_etp_rows=part,
            dispatches=moves,
        )
        return _attending(found, model, workload, layout, rank, selection)
    _check(model, layout, micro_batches, selection)
    routed_layers = model.routed_layers
    slots = {i: expert_placement.slot_experts(model, workload, layout, i) for i in layers}
    parts = [
        tuple(
            tuple(
                routing.rank_rows(
                    model,
                    layout,
                    [of_batch[routed_layers.index(i)][s] for s in sources],
                    rank,
                    slots[i],
                )
                for i in layers
            )
            for of_batch in selection.counts
        )
        for sources in (
            _sources(layout, peer, selection) for peer in grid.group_ranks(layout, "etp", rank)
        )
    ]
    found = ExpertRows(
        layers=layers,
        balanced=even,
        rows=_over(sum, parts),
        own_ep_rows=parts[grid.coordinate(layout, rank, "etp")],
        widest_etp_rows=_over(max, parts),
        dispatches=tuple(
            tuple(
                _moved(layout, rank, selection, micro_batch, routed_layers.index(i)) for i in layers
            )
            for micro_batch in range(micro_batches)
        ),
    )
    return _attending(found, model, workload, layout, rank, selection)


def _attending(
    found: ExpertRows,
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    rank: int,
    selection: Selection | None,
) -> ExpertRows:
    """With the pairs that its attention works on: recorded where documents decide them, else those
    of its positions."""
    if selection and selection.attended:
        near = selection.near[rank] if selection.near else 0
        return replace(found, attended_pairs=selection.attended[rank], windowed_pairs=near)
    if not model.max_window or workload.data.documents is not DocumentMasking.JOINED:
        return found
    among, length = grid.group_ranks(layout, "cp_kv", rank), workload.seq_len
    pairs = twice_attended_pairs(
        (length,), length, rank_positions(length, len(among), among.index(rank)), model.max_window
    )
    return replace(found, windowed_pairs=len(found.rows) * layout.mbs * pairs)


def _moved(
    layout: Layout, rank: int, selection: Selection, micro_batch: int, layer: int
) -> routing.DispatchCounts:
    """What one rank's dispatch moved, as recorded."""
    sources = _sources(layout, rank, selection)
    here = grid.coordinate(layout, rank, "ep")
    out, received, crossing = 0, [0], (0, 0)
    near = grid.axis_size(layout, "ep_near")
    node, place = divmod(here, near)
    abreast = sources[place::near]  # at this rank's place in every node
    if selection.copies:
        of_source = selection.copies[micro_batch][layer]
        out = sum(sum(of_source[source][node * near : (node + 1) * near]) for source in abreast)
        peers = (rank, *grid.group_ranks(layout, "etp", rank))
        received = [
            sum(of_source[source][here] for source in _sources(layout, peer, selection))
            for peer in peers
        ]
    if selection.nodes:
        to_nodes = selection.nodes[micro_batch][layer]
        crossing = sum(to_nodes[sources[here]]), sum(to_nodes[source][node] for source in abreast)
    sent = sum(selection.counts[micro_batch][layer][sources[here]])
    gathered = layout.etp * max(received)
    return routing.DispatchCounts(
        rows_sent=sent,
        copies_out=out,
        copies_in=received[0],
        copies_gathered=gathered,
        node_copies_out=crossing[0],
        node_copies_in=crossing[1],
    )


def _over(
    join: Callable[[Iterable[int]], int], parts: Sequence[tuple[tuple[int, ...], ...]]
) -> tuple[tuple[int, ...], ...]:
    """Join the ETP ranks' parts, [micro_batch][layer] each, into one of the same shape."""
    return tuple(
        tuple(join(same) for same in zip(*of_batch, strict=True))
        for of_batch in zip(*parts, strict=True)
    )


def _sources(layout: Layout, rank: int, selection: Selection) -> tuple[int, ...]:
    """Places in `selection` of the ranks that send to `rank`: its EP group.

    A selection lists the ranks of one pipeline stage in order; without sequence parallelism the
    ranks of a TP group hold the same tokens and are listed once.
    """
    listed = len(selection.counts[0][0])
    stage = layout.world_size // layout.pp
    repeats = stage // listed
    group = grid.group_ranks(layout, "ep", rank)
    return tuple(dict.fromkeys(member % stage // repeats for member in group))


def _check(model: ModelSpec, layout: Layout, micro_batches: int, selection: Selection) -> None:
    stage = layout.world_size // layout.pp
    counts = selection.counts
    moe_layers = len(model.routed_layers)
    legal = (
        len(counts) == micro_batches
        and all(len(of_batch) >= moe_layers for of_batch in counts)
        and all(
            len(of_layer) in (stage, stage // layout.tp)
            for of_batch in counts
            for of_layer in of_batch
        )
    )
    if not legal:
        shape = f"{len(counts)} micro-batches x {len(counts[0]) if counts else 0} layers"
        rule = f"a selection of this job has {micro_batches} micro-batches x {moe_layers} layers x {stage} ranks"
        raise BadInput(Reason(field="selection.counts", value=shape, rule=rule))
