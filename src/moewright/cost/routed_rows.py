"""The layers of one pipeline rank, and how many token rows its experts get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from moewright.rules import expert_placement, grid, routing
from moewright.rules.context_parallel import rank_positions, twice_attended_pairs
from moewright.rules.job import Job
from moewright.rules.saved import recompute
from moewright.rules.timetable import stages
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.ledger import Selection
from moewright.spec.model import ModelSpec
from moewright.spec.workload import DocumentMasking

Item = TypeVar("Item")
_Table = tuple[tuple[int, ...], ...]  # [micro_batch][layer]


def rank_chunks(model: ModelSpec, layout: Layout, pp_rank: int) -> tuple[stages.Chunk, ...]:
    """Return the model chunks of a pipeline rank, by chunk index."""
    chunks = stages.pipeline_chunks(model, layout)
    return tuple(chunk for chunk in chunks if chunk.pp_rank == pp_rank)


def recomputed_layers(
    model: ModelSpec, layout: Layout, chunks: Sequence[stages.Chunk]
) -> frozenset[int]:
    """Return the layers of the chunks that some recompute choice affects.

    They are all layers, unless full recompute takes only the first layers of each chunk.
    """
    return frozenset(
        layer
        for chunk in chunks
        for position, layer in enumerate(stages.chunk_layers(model, chunk))
        if recompute.layer_recompute(layout, position)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The rows through one rank's experts in a step, by micro-batch and MoE layer of the rank.

    Tables are [micro_batch][index into layers]. `balanced` is the value of one entry under even
    routing. `own_ep_rows` are those that arrive over the rank's own EP group; each rank of its ETP
    group has such a part, and `widest_etp_rows` is the largest of them. `attended_pairs` is twice
    the (query, key) pairs that documents left to the rank's attention in the step (see Selection),
    0 where they bound none; `windowed_pairs` is the same number for layers with a sliding window, 0
    where it is not known.
    """

    layers: tuple[int, ...]
    balanced: int
    rows: _Table
    own_ep_rows: _Table
    widest_etp_rows: _Table
    dispatches: tuple[tuple[routing.DispatchCounts, ...], ...]
    attended_pairs: int = 0
    windowed_pairs: int = 0

    @property
    def micro_batches(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        return sum_rows(self.rows)

    def dispatch_counts(self, micro_batch: int, layer: int) -> routing.DispatchCounts | None:
        """Return what the dispatch of a layer moves; None for a layer without experts."""
        if layer not in self.layers:
            return None
        return self.dispatches[micro_batch][self.layers.index(layer)]

    def load_factor(self, micro_batch: int, layer: int) -> float:
        """Return the rows of a layer over the balanced count; 1 for a layer without experts."""
        # The even share of a tiny job may round to no row, of which no load is a factor.
        if layer not in self.layers or not self.balanced:
            return 1.0
        return self.rows[micro_batch][self.layers.index(layer)] / self.balanced

    def count_rows(self, layers: Collection[int]) -> int:
        """Return the rows through these layers alone."""
        return sum(
            times * rows
            for micro_batch, times in run_lengths(self.rows)
            for layer, rows in zip(self.layers, micro_batch, strict=True)
            if layer in layers
        )

    def select_layers(self, layers: Collection[int]) -> ExpertRows:
        """Return the rows of these layers alone."""
        indices = [index for index, layer in enumerate(self.layers) if layer in layers]
        return replace(
            self,
            layers=tuple(self.layers[index] for index in indices),
            rows=_select_columns(self.rows, indices),
            own_ep_rows=_select_columns(self.own_ep_rows, indices),
            widest_etp_rows=_select_columns(self.widest_etp_rows, indices),
            dispatches=_select_columns(self.dispatches, indices),
        )


def _select_columns(
    table: tuple[tuple[Item, ...], ...], indices: Sequence[int]
) -> tuple[tuple[Item, ...], ...]:
    selected: list[tuple[Item, ...]] = []
    for micro_batch, times in run_lengths(table):
        selected += [tuple(micro_batch[index] for index in indices)] * times
    return tuple(selected)


def run_lengths(micro_batches: Iterable[Item]) -> Iterator[tuple[Item, int]]:
    """Yield each run of equal consecutive micro-batches once, with its length.

    A prediction is a single run of up to millions of equal micro-batches.
    """
    for micro_batch, equal in groupby(micro_batches):
        yield micro_batch, len(list(equal))


def sum_rows(table: Iterable[tuple[int, ...]]) -> int:
    """Return the sum over all micro-batches and layers."""
    return sum(times * sum(micro_batch) for micro_batch, times in run_lengths(table))


def count_expert_rows(
    job: Job,
    rank: int,
    *,
    micro_batches: int,
    selection: Selection | None,
    load: float = 1.0,
) -> ExpertRows:
    """Return the rows of a rank: those of a recorded selection, or `load` times the balanced ones.

    Where rows are padded to a budget their number is fixed, and `selection` is not used.

    Raises:
        BadInput: the selection is not one of this model, layout and batch.
    """
    chunks = rank_chunks(job.model, job.layout, grid.coordinate(job.layout, rank, "pp"))
    moe_layers: tuple[int, ...] = ()
    if job.model.moe:
        moe_layers = tuple(
            layer
            for chunk in chunks
            for layer in stages.chunk_layers(job.model, chunk)
            if job.model.has_experts(layer)
        )
    if selection is None or not moe_layers or job.layout.has_fixed_rows:
        rows = _predicted_rows(job, moe_layers, micro_batches, load)
    else:
        _check_selection(job.model, job.layout, micro_batches, selection)
        rows = _selected_rows(job, moe_layers, rank, selection)
    return _with_attention_pairs(rows, job, rank, selection)


def _predicted_rows(
    job: Job, moe_layers: tuple[int, ...], micro_batches: int, load: float
) -> ExpertRows:
    def fill(entry: Item) -> tuple[tuple[Item, ...], ...]:
        return ((entry,) * len(moe_layers),) * micro_batches

    rows = job.routed_rows(load)
    etp_rows = rows // job.layout.etp
    dispatch = routing.expected_dispatch(job)
    return ExpertRows(
        layers=moe_layers,
        balanced=job.routed_rows(),
        rows=fill(rows),
        own_ep_rows=fill(etp_rows),
        widest_etp_rows=fill(etp_rows),
        dispatches=fill(dispatch),
    )


def _selected_rows(
    job: Job, moe_layers: tuple[int, ...], rank: int, selection: Selection
) -> ExpertRows:
    model, layout = job.model, job.layout
    routed_layers = [model.routed_layers.index(layer) for layer in moe_layers]
    slots = [selection.slots[layer] for layer in routed_layers if selection.slots]
    slots = slots or [expert_placement.slot_experts(job, layer) for layer in moe_layers]
    etp_parts: list[_Table] = []
    for peer in grid.group_ranks(layout, "etp", rank):
        sources = _source_indices(layout, peer, selection)
        part = [
            tuple(
                routing.rank_rows(
                    model, layout, [counts[layer][source] for source in sources], rank, layer_slots
                )
                for layer, layer_slots in zip(routed_layers, slots, strict=True)
            )
            for counts in selection.counts
        ]
        etp_parts.append(tuple(part))
    return ExpertRows(
        layers=moe_layers,
        balanced=job.routed_rows(),
        rows=_join_parts(sum, etp_parts),
        own_ep_rows=etp_parts[grid.coordinate(layout, rank, "etp")],
        widest_etp_rows=_join_parts(max, etp_parts),
        dispatches=tuple(
            tuple(
                _selected_dispatch(layout, rank, selection, micro_batch, layer)
                for layer in routed_layers
            )
            for micro_batch in range(len(selection.counts))
        ),
    )


def _with_attention_pairs(
    rows: ExpertRows, job: Job, rank: int, selection: Selection | None
) -> ExpertRows:
    """Return the rows with the (query, key) pairs that the rank's attention computes.

    The pairs are recorded ones where documents decide them, else those of the rank's positions.
    """
    if selection and selection.attended:
        return replace(
            rows,
            attended_pairs=selection.attended[rank],
            windowed_pairs=selection.near[rank] if selection.near else 0,
        )
    window = job.model.max_window
    seq_len = job.workload.seq_len
    if not window or job.workload.data.documents is not DocumentMasking.JOINED:
        return rows
    kv_ranks = grid.group_ranks(job.layout, "cp_kv", rank)
    positions = rank_positions(seq_len, len(kv_ranks), kv_ranks.index(rank))
    pairs = twice_attended_pairs((seq_len,), seq_len, positions, window)
    return replace(rows, windowed_pairs=rows.micro_batches * job.layout.mbs * pairs)


def _selected_dispatch(
    layout: Layout, rank: int, selection: Selection, micro_batch: int, layer: int
) -> routing.DispatchCounts:
    """Return what one rank's dispatch moved, as recorded."""
    sources = _source_indices(layout, rank, selection)
    ep_rank = grid.coordinate(layout, rank, "ep")
    node_ranks = grid.axis_size(layout, "ep_near")
    node, local_rank = divmod(ep_rank, node_ranks)
    # The ep axis runs through a node before the next (grid: ep_near is the faster part).
    same_local_rank = sources[local_rank::node_ranks]  # one on every node
    counts = routing.DispatchCounts(
        rows_sent=sum(selection.counts[micro_batch][layer][sources[ep_rank]]),
        copies_out=0,
        copies_in=0,
        copies_gathered=0,
    )
    if selection.copies:
        copies = selection.copies[micro_batch][layer]
        node_peers = slice(node * node_ranks, (node + 1) * node_ranks)
        received = [
            sum(copies[source][ep_rank] for source in _source_indices(layout, peer, selection))
            for peer in (rank, *grid.group_ranks(layout, "etp", rank))
        ]
        counts = replace(
            counts,
            copies_out=sum(sum(copies[source][node_peers]) for source in same_local_rank),
            copies_in=received[0],
            copies_gathered=layout.etp * max(received),
        )
    if selection.nodes:
        node_copies = selection.nodes[micro_batch][layer]
        counts = replace(
            counts,
            node_copies_out=sum(node_copies[sources[ep_rank]]),
            node_copies_in=sum(node_copies[source][node] for source in same_local_rank),
        )
    return counts


def _join_parts(join: Callable[[Iterable[int]], int], etp_parts: Sequence[_Table]) -> _Table:
    """Join the tables of the ETP ranks into one of the same shape, entry by entry."""
    return tuple(
        tuple(join(entries) for entries in zip(*micro_batch, strict=True))
        for micro_batch in zip(*etp_parts, strict=True)
    )


def _source_indices(layout: Layout, rank: int, selection: Selection) -> tuple[int, ...]:
    """Return the indices into `selection` of the ranks that send to `rank`: its EP group.

    A selection lists the ranks of one pipeline stage in order; without sequence parallelism the
    ranks of a TP group have the same tokens and are listed once.
    """
    stage_ranks = layout.world_size // layout.pp
    repeats = stage_ranks // len(selection.counts[0][0])
    ep_group = grid.group_ranks(layout, "ep", rank)
    # Members that fall on one entry have the same tokens: each entry once, in the group's order.
    return tuple(dict.fromkeys(grid.stage_index(layout, member) // repeats for member in ep_group))


def _check_selection(
    model: ModelSpec, layout: Layout, micro_batches: int, selection: Selection
) -> None:
    stage_ranks = layout.world_size // layout.pp
    counts = selection.counts
    moe_layers = len(model.routed_layers)
    is_legal = (
        len(counts) == micro_batches
        and all(len(layers) >= moe_layers for layers in counts)
        and all(
            len(sources) in (stage_ranks, stage_ranks // layout.tp)
            for layers in counts
            for sources in layers
        )
    )
    if not is_legal:
        layers = len(counts[0]) if counts else 0
        rule = (
            f"a selection of this job has {micro_batches} micro-batches x {moe_layers} layers"
            f" x {stage_ranks} ranks"
        )
        raise BadInput(
            Reason(
                field="selection.counts",
                value=f"{len(counts)} micro-batches x {layers} layers",
                rule=rule,
            )
        )
