"""The layers of each virtual pipeline stage: the even split, and layout strings.

See docs/formulas.md 5. Virtual stage i lies on pipeline rank i % pp as its chunk i // pp; V-shaped
schedules lay the second half of the stages in reverse order, so that the first rank holds the first
and the last. Without a layout string, pp * vpp must divide either the layers, or the layers plus
two: then embedding and loss count as a layer each, and the first and the last stage hold one layer
fewer (so Qwen3-235B's 94 layers run at pp=8 and pp=32).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import groupby

from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.stage_string import Stages, StageString, parse_stages
from moewright.spec.units import mention, shorten

_FIELD = "layout.stages"


class EvenSplit(Enum):
    """What an even split counts besides the layers; the value is the number of extra layers."""

    EVEN = 0
    EMBEDDING_AND_LOSS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One virtual stage: what it holds, and the pipeline rank and chunk index it stands at.

    `mtp_layers` counts MTP layers.
    """

    pp_rank: int
    vpp_rank: int
    has_embedding: bool
    layers: tuple[int, ...]
    mtp_layers: int
    has_loss: bool


def chunk_layers(model: ModelSpec, chunk: Chunk) -> tuple[int, ...]:
    """Return the layers of a virtual stage as rules.shapes.parameters numbers them.

    MTP depth d is layer L + 1 + d; all depths are in one stage.
    """
    return chunk.layers + tuple(model.layers + 1 + depth for depth in range(chunk.mtp_layers))


def virtual_stage(layout: Layout, pp_rank: int, chunk: int) -> int:
    """Return the virtual stage that a pipeline rank holds as its `chunk`.

    Stages are laid round-robin, or down and back up a V.
    """
    if layout.schedule.is_v_shaped and chunk:
        return 2 * layout.pp - 1 - pp_rank
    return chunk * layout.pp + pp_rank


def stage_position(layout: Layout, stage: int) -> tuple[int, int]:
    """Return (pipeline rank, chunk) of a virtual stage; the inverse of `virtual_stage`."""
    chunk, index = divmod(stage, layout.pp)
    if layout.schedule.is_v_shaped and chunk:
        return layout.pp - 1 - index, chunk
    return index, chunk


def vpp_choices(layers: int, pp: int, *, split: EvenSplit = EvenSplit.EVEN) -> tuple[int, ...]:
    """Return every vpp for which `split` is even, ascending; () when there is none.

    Without a pipeline the only vpp is 1.
    """
    if pp == 1:
        return (1,)
    per_rank, remainder = divmod(layers + split.value, pp)
    if remainder:
        return ()
    return tuple(v for v in range(1, per_rank + 1) if per_rank % v == 0)


def even_layout_string(
    layers: int,
    *,
    mtp: int,
    stages: int,
    embedding: int = 1,
    loss: int = 1,
    mtp_apart: bool = False,
) -> StageString:
    """Return a legal layout string that spreads the layers evenly over the stages.

    `embedding` and `loss` are the layers that these count as; each MTP layer counts as one. MTP
    layers go to the last stage, before the loss. With `mtp_apart` they go to the stage before it,
    and the loss stands alone.
    """
    load = [0] * stages
    load[0] += embedding
    load[-1] += layers if mtp_apart else loss
    load[-1 - mtp_apart] += mtp
    texts = [_repeat("t", count) for count in _fill_evenly(load, layers)]
    texts[0] = "E" + texts[0]
    texts[-1 - mtp_apart] += _repeat("m", mtp)
    texts[-1] += "L"
    parts = []
    for text, run in groupby(texts[:-1]):
        times = len(list(run))
        parts.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return StageString("".join(parts) + texts[-1])


def _fill_evenly(load: Sequence[int], layers: int) -> list[int]:
    """Return how many layers each stage gets on top of its load, the least loaded stages first."""
    counts = [0] * len(load)
    level = min(load) + 1
    left = layers
    while left:
        for stage in range(len(load)):
            if left and load[stage] + counts[stage] < level:
                counts[stage] += 1
                left -= 1
        level += 1
    return counts


def _repeat(letter: str, count: int) -> str:
    if count < 2:
        return letter * count
    return f"{letter}*{count}"


def check_stages(model: ModelSpec, layout: Layout) -> tuple[Reason, ...]:
    """Return the rules of the stage split that are broken; () when there are `pipeline_chunks`."""
    if not layout.stages:
        return _check_even_split(model, layout)
    try:
        stages = parse_stages(layout.stages)
    except BadInput as error:
        example = spread_stages(model, layout)
        return tuple(replace(reason, nearest=example) for reason in error.reasons)
    reasons = [_string_reason(rule, model, layout) for rule in _broken_rules(stages, model, layout)]
    if len(stages) != layout.pp * layout.vpp:
        reasons.append(_stage_count_reason(len(stages), model, layout))
    return tuple(reasons)


def spread_stages(model: ModelSpec, layout: Layout) -> str:
    """Return a legal layout string for these degrees.

    "" when there are more stages than things to stand on them.
    """
    if layout.pp * layout.vpp > model.layers + 2:
        return ""
    return even_layout_string(model.layers, mtp=model.mtp_layers, stages=layout.pp * layout.vpp)


def _string_reason(rule: str, model: ModelSpec, layout: Layout) -> Reason:
    value = shorten(layout.stages)
    return Reason(field=_FIELD, value=value, rule=rule, nearest=spread_stages(model, layout))


def _stage_count_reason(stages: int, model: ModelSpec, layout: Layout) -> Reason:
    rule = f"spells {stages} stages; pp * vpp = {layout.pp * layout.vpp} are needed"
    vpp, remainder = divmod(stages, layout.pp)
    # A string of whole multiples of pp may be meant for another vpp; any other is itself wrong.
    if remainder or layout.pp == 1:
        return _string_reason(rule, model, layout)
    return Reason(
        field="layout.vpp", value=str(layout.vpp), rule=f"{_FIELD} {rule}", nearest=str(vpp)
    )


def _broken_rules(stages: Stages, model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Yield, in words, the rules that the letters break.

    Where m stands is checked only in the right number of stages.
    """
    letters = [letter for stage in stages for letter in stage]
    if letters.count("E") != 1 or not stages[0] or stages[0][0] != "E":
        yield "must start with E and hold it once"
    if letters.count("L") != 1 or not stages[-1] or stages[-1][-1] != "L":
        yield "must end with L and hold it once"
    if letters.count("t") != model.layers:
        yield f"holds {letters.count('t')} t; the model has {model.layers} layers"
    if letters.count("m") != model.mtp_layers:
        yield f"holds {letters.count('m')} m; the model has {model.mtp_layers} MTP layers"
    if "m" in letters and "t" in letters[letters.index("m") :]:
        yield "every m comes after all t"
    mtp_stages = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(mtp_stages) > 1:
        yield "all m stand in one stage"
    elif mtp_stages and layout.pp > 1 and len(stages) == layout.pp * layout.vpp:
        pp_rank, chunk = stage_position(layout, mtp_stages[0])
        if pp_rank == 0 and not layout.schedule.is_v_shaped:
            yield "m cannot be on pipeline rank 0"
        elif chunk != layout.vpp - 1:
            yield "m must be in the last chunk of its pipeline rank"


def _check_even_split(model: ModelSpec, layout: Layout) -> tuple[Reason, ...]:
    layers = model.layers
    stages = layout.pp * layout.vpp
    if _find_even_split(layers, stages) is not None:
        return ()
    text = spread_stages(model, layout)
    example = mention("stages '{}'", text)
    rule = (
        f"pp * vpp = {stages} divides neither the {layers} layers nor {layers} + 2 "
        "(embedding and loss counted)"
    )
    choices = {v for split in EvenSplit for v in vpp_choices(layers, layout.pp, split=split)}
    near = _neighbours(layout.vpp, choices)
    if near:
        nearest = _join_choices(near, example)
        return (Reason(field="layout.vpp", value=str(layout.vpp), rule=rule, nearest=nearest),)
    fewest = 1 if layout.vpp == 1 else 2
    legal = {
        degree
        for degree in range(fewest, min(layers + 2, layout.world_size) + 1)
        if layout.world_size % degree == 0
        and _find_even_split(layers, degree * layout.vpp) is not None
    }
    nearest = _join_choices(_neighbours(layout.pp, legal), example) or "1 with vpp 1"
    return (Reason(field="layout.pp", value=str(layout.pp), rule=rule, nearest=nearest),)


def _neighbours(value: int, choices: set[int]) -> list[int]:
    """Return the closest choice below `value` and the closest above it, as far as there are any."""
    below = [choice for choice in sorted(choices) if choice < value][-1:]
    above = [choice for choice in sorted(choices) if choice > value][:1]
    return below + above


def _join_choices(values: list[int], example: str) -> str:
    numbers = " or ".join(map(str, values))
    return ", or ".join(part for part in (numbers, example) if part)


def _find_even_split(layers: int, stages: int) -> EvenSplit | None:
    # In the order of EvenSplit: layers alone first, as Megatron-LM splits by default.
    return next((split for split in EvenSplit if (layers + split.value) % stages == 0), None)


@lru_cache(maxsize=4)  # an estimate needs every rank of one pipeline
def pipeline_chunks(model: ModelSpec, layout: Layout) -> tuple[Chunk, ...]:
    """Return the virtual stages in model order, pp * vpp of them.

    Without a layout string, MTP layers stand with the loss.

    Raises:
        BadInput: The split is not legal.
    """
    reasons = check_stages(model, layout)
    if reasons:
        raise BadInput(*reasons)
    stages = parse_stages(layout.stages) if layout.stages else _even_stages(model, layout)
    chunks = []
    first = 0
    for stage, letters in enumerate(stages):
        count = letters.count("t")
        pp_rank, vpp_rank = stage_position(layout, stage)
        chunks.append(
            Chunk(
                pp_rank=pp_rank,
                vpp_rank=vpp_rank,
                has_embedding="E" in letters,
                layers=tuple(range(first, first + count)),
                mtp_layers=letters.count("m"),
                has_loss="L" in letters,
            )
        )
        first += count
    return tuple(chunks)


def _even_stages(model: ModelSpec, layout: Layout) -> Stages:
    stages = layout.pp * layout.vpp
    split = _find_even_split(model.layers, stages)
    assert split is not None  # check_stages has found one
    counts = [(model.layers + split.value) // stages] * stages
    if split is EvenSplit.EMBEDDING_AND_LOSS:
        counts[0] -= 1
        counts[-1] -= 1
    letters = [["t"] * count for count in counts]
    letters[0].insert(0, "E")
    letters[-1] += [*("m" * model.mtp_layers), "L"]
    return tuple(tuple(stage) for stage in letters)
