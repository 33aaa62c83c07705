"""The pipeline stages of a Megatron-LM command."""

from __future__ import annotations

from dataclasses import replace

from moewright.codec.megatron_options import LAYOUT_OPTIONS
from moewright.intake.megatron.options import Arguments
from moewright.rules.timetable.stages import check_stages, pipeline_chunks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout, plain_schedule
from moewright.spec.model import ModelSpec
from moewright.spec.stage_string import StageString, parse_stages

_LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_STAGES_PER_RANK = LAYOUT_OPTIONS["vpp"]
_STAGE_TEXT = LAYOUT_OPTIONS["stages"]
_FIRST_RANK_LAYERS = "--decoder-first-pipeline-num-layers"
_LAST_RANK_LAYERS = "--decoder-last-pipeline-num-layers"
_COUNT_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_COUNT_LOSS = "--account-for-loss-in-pipeline-split"


def read_stages(arguments: Arguments, model: ModelSpec, layout: Layout) -> Layout:
    """Return the layout with its virtual stages.

    The layout gets a layout string where `vpp` alone would split the layers otherwise.

    Raises:
        BadInput: layers do not divide, or options exclude each other.
    """
    spellings = (_LAYERS_PER_STAGE, _STAGES_PER_RANK, _STAGE_TEXT)
    spelled = [name for name in spellings if arguments.has(name)]
    if len(spelled) > 1:
        rule = f"excludes {spelled[0]}"
        raise BadInput(Reason(field=spelled[1], rule=rule, nearest=f"{spelled[0]} alone"))
    text = arguments.text(_STAGE_TEXT)
    if text:
        return _read_stage_text(text, layout)
    counts_embedding = int(arguments.has(_COUNT_EMBEDDING))
    counts_loss = int(arguments.has(_COUNT_LOSS))
    first = arguments.integer(_FIRST_RANK_LAYERS, -1)
    last = arguments.integer(_LAST_RANK_LAYERS, -1)
    if layout.pp == 1:
        return layout
    counted = counts_embedding + counts_loss
    rank_layers = _split_over_ranks(model, layout.pp, counted, first, last)
    vpp = _read_vpp(arguments, rank_layers, is_uneven=max(first, last) >= 0)
    layout = _with_vpp(layout, vpp)
    stage_layers = [rank_layers[stage % layout.pp] // vpp for stage in range(layout.pp * vpp)]
    stage_layers[0] -= counts_embedding
    stage_layers[-1] -= counts_loss
    if not check_stages(model, layout):
        chunks = pipeline_chunks(model, layout)
        if stage_layers == [len(chunk.layers) for chunk in chunks]:
            return layout
    return replace(layout, stages=_format_stages(stage_layers, model.mtp_layers))


def _read_stage_text(text: str, layout: Layout) -> Layout:
    stages = StageString(" ".join(text.split()))  # in a script it may stand on several lines
    count = len(parse_stages(stages))
    if count % layout.pp:
        rule = f"spells {count} stages, which {LAYOUT_OPTIONS['pp']} {layout.pp} does not divide"
        raise BadInput(Reason(field=_STAGE_TEXT, value=text[:60], rule=rule))
    return _with_vpp(replace(layout, stages=stages), count // layout.pp)


def _split_over_ranks(
    model: ModelSpec, pp: int, counted: int, first: int, last: int
) -> tuple[int, ...]:
    """Return the layers of every pipeline rank.

    `counted` is how many of embedding and loss count as layers; they are among the layers returned.
    `first` and `last` are the layers of the outer ranks, -1 where they are not given.
    """
    if max(first, last) >= 0 and counted:
        rule = f"excludes {_COUNT_EMBEDDING} and {_COUNT_LOSS}"
        raise BadInput(Reason(field=_FIRST_RANK_LAYERS, rule=rule))
    head = (first,) if first >= 0 else ()
    tail = (last,) if last >= 0 else ()
    middle_ranks = pp - len(head) - len(tail)
    middle_layers = model.layers + counted - sum(head) - sum(tail)
    is_even = middle_layers % middle_ranks == 0 if middle_ranks else middle_layers == 0
    if middle_layers < 0 or not is_even:
        divides_counted = (model.layers + 2) % pp == 0
        raise BadInput(
            Reason(
                field="--num-layers",
                value=str(model.layers),
                rule=f"{middle_layers} layers do not divide over {middle_ranks} pipeline ranks",
                nearest=f"{_COUNT_EMBEDDING} {_COUNT_LOSS}" if divides_counted else "",
            )
        )
    rank_layers = middle_layers // middle_ranks if middle_ranks else 0
    return (*head, *(rank_layers,) * middle_ranks, *tail)


def _read_vpp(arguments: Arguments, rank_layers: tuple[int, ...], *, is_uneven: bool) -> int:
    """Return the virtual stages of a pipeline rank."""
    vpp = arguments.integer(_STAGES_PER_RANK, 1)
    if arguments.has(_LAYERS_PER_STAGE):
        stage_layers = arguments.integer(_LAYERS_PER_STAGE)
        if is_uneven:
            rule = "excludes uneven first and last ranks"
            raise BadInput(Reason(field=_LAYERS_PER_STAGE, rule=rule, nearest=_STAGES_PER_RANK))
        if not stage_layers or rank_layers[0] % stage_layers:
            rule = f"must divide the {rank_layers[0]} layers of a pipeline rank"
            raise BadInput(
                Reason(field=_LAYERS_PER_STAGE, value=str(stage_layers), rule=rule, nearest="1")
            )
        vpp = rank_layers[0] // stage_layers
    for count in set(rank_layers):
        if not vpp or count % vpp:
            rule = (
                f"must divide the {count} layers of a pipeline rank "
                "(embedding and loss as they are counted)"
            )
            raise BadInput(Reason(field=_STAGES_PER_RANK, value=str(vpp), rule=rule, nearest="1"))
    return vpp


def _format_stages(stage_layers: list[int], mtp_layers: int) -> StageString:
    """Return the layout string of stages with so many layers each."""
    words = ["t" * count if count < 2 else f"t*{count}" for count in stage_layers]
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp_layers + "L"
    return StageString("|".join(words))


def _with_vpp(layout: Layout, vpp: int) -> Layout:
    schedule = plain_schedule(vpp)
    return replace(layout, vpp=vpp, schedule=schedule)
