"""What a search would not try of a layout: the fields whose values lie outside of its space.

A search that does not have a layout among those that it ranks cannot say that another is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from moewright.rules.batch_rampup import deciding_batches
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.search.space import (
    MICRO_BATCHES,
    PipelineShape,
    SearchSpace,
    activation_policies,
    cp_comm_choices,
    dispatcher_choices,
    has_timetable,
    list_degrees,
    list_pipelines,
    state_policies,
    with_pipeline,
)
from moewright.spec.errors import Reason
from moewright.spec.layout import DEFAULT_LAYOUT, LAYOUT_FIELDS, Layout, Offload, plain_schedule
from moewright.spec.record import copy_with

_DEGREES = ("tp", "cp", "etp", "ep")
# Fields that a search never moves: what they change is trained otherwise, or nobody published how
# fast it is. They keep the user's values.
_KEPT = (
    "order",
    "shard",
    "vpp_group",
    "recompute_block",
    "recompute_span",
    "offload_fraction",
    "offload_layers",
    "offload_chunks",
    "ep_node",
    "expert_placement",
    "spare",
    "capacity",
    "capacity_fill",
    "rank_capacity",
)
_KEYS = {field.name: field.key or field.name for field in LAYOUT_FIELDS}
_Content = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SearchedChoices:
    """The choices of a space, each listed once, beside which layouts are held."""

    space: SearchSpace

    @cached_property
    def _degrees(self) -> frozenset[tuple[int, ...]]:
        return frozenset(
            tuple(getattr(cut, name) for name in _DEGREES) for cut in list_degrees(self.space)
        )

    @cached_property
    def _contents(self) -> dict[tuple[int, int], set[_Content]]:
        """Return the splits over stages by pp and vpp."""
        contents: dict[tuple[int, int], set[_Content]] = {}
        world = Layout(world_size=self.space.hardware.count)
        for shape in list_pipelines(self.space):
            split = self._content(with_pipeline(world, shape, self.space))
            contents.setdefault((shape.pp, shape.vpp), set()).add(split)
        return contents

    def _content(self, layout: Layout) -> _Content:
        return tuple(
            (chunk.pp_rank, len(chunk.layers), chunk.mtp_layers)
            for chunk in pipeline_chunks(self.space.model, layout)
        )

    def find_unsearched(self, layout: Layout) -> tuple[Reason, ...]:
        """Return the fields of a legal layout that no search of the space tries, with what it does.

        A layout whose CUDA graphs are narrower than those that the search captures counts as tried:
        the wider ones are never slower.
        """
        return (
            *self._unsearched_degrees(layout),
            *self._unsearched_pipeline(layout),
            *self._unsearched_policies(layout),
            *self._unsearched_exchanges(layout),
            *(
                _reason(layout, name, "is taken only where it is asked for")
                for name in _KEPT
                if getattr(layout, name) != getattr(DEFAULT_LAYOUT, name)
            ),
        )

    def _unsearched_degrees(self, layout: Layout) -> Iterator[Reason]:
        degrees = tuple(getattr(layout, name) for name in _DEGREES)
        if degrees not in self._degrees:
            for place, name in enumerate(_DEGREES):
                alike = {
                    tried[place] for tried in self._degrees if tried[:place] == degrees[:place]
                }
                if degrees[place] not in alike:
                    yield _reason(layout, name, f"searches try {_join(sorted(alike))}")
                    break
        if layout.sp != (layout.tp > 1):
            yield _reason(layout, "sp", "searches have it on wherever tp is over 1")
        if layout.mbs not in MICRO_BATCHES:
            yield _reason(layout, "mbs", f"searches try {_join(MICRO_BATCHES)}")

    def _unsearched_pipeline(self, layout: Layout) -> Iterator[Reason]:
        space = self.space
        if layout.schedule is not plain_schedule(layout.vpp):
            yield _reason(
                layout, "schedule", "searches take 1f1b, and interleaved on virtual stages"
            )
            return
        splits = self._contents.get((layout.pp, layout.vpp))
        if splits is None:
            tried = sorted(vpp for pp, vpp in self._contents if pp == layout.pp)
            rule = f"searches of {layout.pp} stages try {_join(tried) or 'none'}"
            yield _reason(layout, "vpp", rule)
        elif self._content(layout) not in splits:
            yield _reason(layout, "stages", "searches try other splits over as many stages")
        shape = PipelineShape(pp=layout.pp, vpp=layout.vpp, stages=layout.stages)
        pass_sequences = layout.mbs * space.hardware.count // (layout.tp * layout.cp * layout.pp)
        if not has_timetable(space, shape, pass_sequences, deciding_batches(space.workload)):
            yield _reason(
                layout, "pp", "searches let it divide the micro-batches of virtual stages"
            )

    def _unsearched_policies(self, layout: Layout) -> Iterator[Reason]:
        policies = activation_policies(self.space)
        recompute = set(layout.recompute)
        offload = set(layout.offload) - {Offload.OPTIMIZER}
        alike = [policy for policy in policies if set(policy.recompute) == recompute]
        if not alike:
            yield _reason(layout, "recompute", "searches try other sets of modules")
        elif not any(set(policy.offload) == offload for policy in alike):
            yield _reason(layout, "offload", "searches try other sets of modules")
        elif not any(
            set(layout.graphs) <= set(policy.graphs)
            for policy in alike
            if set(policy.offload) == offload
        ):
            yield _reason(layout, "graphs", "searches capture no more than their own scopes")
        on_host = set(layout.offload) & {Offload.OPTIMIZER}
        combined = copy_with(self.space, combines_savings=True)
        states = [state for state in state_policies(combined) if set(state.offload) == on_host]
        if layout.zero not in {state.zero for state in states}:
            levels = _join(sorted(state.zero for state in states))
            yield _reason(layout, "zero", f"searches try {levels}")

    def _unsearched_exchanges(self, layout: Layout) -> Iterator[Reason]:
        cut = copy_with(
            self.space.base,
            **{name: getattr(layout, name) for name in (*_DEGREES, "sp", "mbs")},
        )
        libraries = dispatcher_choices(self.space, cut)
        if layout.ep > 1 and layout.dispatcher not in libraries:
            yield _reason(layout, "dispatcher", f"searches here take {_join(libraries)}")
        exchanges = cp_comm_choices(self.space, cut)
        if layout.cp > 1 and layout.cp_comm not in exchanges:
            yield _reason(layout, "cp_comm", f"searches here take {_join(exchanges)}")


def _reason(layout: Layout, name: str, rule: str) -> Reason:
    value = getattr(layout, name)
    text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return Reason(field=f"layout.{_KEYS[name]}", value=text, rule=rule)


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
