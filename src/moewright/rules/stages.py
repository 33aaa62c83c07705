"""Which layers stand on which virtual pipeline stage: the even split, and layout strings
(docs/formulas.md 5).

Virtual stage i lies on pipeline rank i % pp as its chunk i // pp; V-shaped schedules lay the second
half of the stages in reverse order, so that the first rank holds the first and the last. Without a
layout string, pp * vpp must divide either the layers, or the layers plus two: then embedding and
loss count as a layer each and the first and the last stage hold one layer fewer (so Qwen3-235B's 94
layers run at pp=8 and pp=32).

A layout string spells each stage with the letters E (embedding), t (layer), m (MTP layer) and L
(final norm, head and loss), ends stages with `|`, and repeats with `x*n` or `(...)*n`; commas and
spaces say nothing; stages may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby

from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

_FIELD = "layout.stages"
_MAX_SYMBOLS = 100_000  # of an expanded layout string; stops t*1000000000


class EvenSplit(Enum):
    """What an even split counts besides the layers; the value is the number of extra layers."""

    EVEN = 0
    EMBEDDING_AND_LOSS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One virtual stage, in model order: what it holds and where it stands. `mtp` counts MTP
    layers."""

    pp_rank: int
    vpp_rank: int
    has_embedding: bool
    layers: tuple[int, ...]
    mtp_layers: int
    has_loss: bool


def chunk_layers(model: ModelSpec, chunk: Chunk) -> tuple[int, ...]:
    """Layers of a virtual stage as rules.inventory numbers them: MTP depth d is L + 1 + d; depths
    share a stage."""
    return chunk.layers + tuple(model.layers + 1 + depth for depth in range(chunk.mtp_layers))


def virtual_stage(layout: Layout, pp_rank: int, chunk: int) -> int:
    """The virtual stage that a pipeline rank holds as its `chunk`: round-robin, or down and back up
    a V."""
    if layout.schedule.is_v_shaped and chunk:
        return 2 * layout.pp - 1 - pp_rank
    return chunk * layout.pp + pp_rank


def stage_position(layout: Layout, stage: int) -> tuple[int, int]:
    """(pipeline rank, chunk) of a virtual stage; the inverse of `stage_of`."""
    chunk, place = divmod(stage, layout.pp)
    return (layout.pp - 1 - place if layout.schedule.is_v_shaped and chunk else place), chunk


def vpp_choices(layers: int, pp: int, *, split: EvenSplit = EvenSplit.EVEN) -> tuple[int, ...]:
    """Every vpp for which the split comes out even, ascending; () when there is none. One stage has
    no vpp but 1."""
    if pp == 1:
        return (1,)
    per_rank, rest = divmod(layers + split.value, pp)
    return () if rest else tuple(v for v in range(1, per_rank + 1) if per_rank % v == 0)


def even_layout_string(
    layers: int,
    *,
    mtp: int,
    stages: int,
    embedding: int = 1,
    loss: int = 1,
    mtp_apart: bool = False,
) -> str:
    """A legal layout string that spreads the layers evenly, embedding, loss and each MTP layer
    counting as so many.

    MTP layers go to the last stage, before the loss, or apart: to the stage before it, and the loss
    stands alone.
    """
    load = [0] * stages
    load[0] += embedding
    load[-1] += layers if mtp_apart else loss
    load[-1 - mtp_apart] += mtp
    counts = [0] * stages
    level = min(load) + 1
    left = layers
    while left:
        for stage in range(stages):
            if left and load[stage] + counts[stage] < level:
                counts[stage] += 1
                left -= 1
        level += 1
    texts = [_repeat("t", count) for count in counts]
    texts[0] = "E" + texts[0]
    texts[-1 - mtp_apart] += _repeat("m", mtp)
    texts[-1] += "L"
    pieces = []
    for text, run in groupby(texts[:-1]):
        times = len(list(run))
        pieces.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return "".join(pieces) + texts[-1]


def _repeat(letter: str, count: int) -> str:
    return letter * count if count < 2 else f"{letter}*{count}"


def parse_stages(text: str) -> tuple[tuple[str, ...], ...]:
    """A layout string as letters per virtual stage. Only the grammar is checked here; raises
    BadInput."""
    symbols = "".join(text.replace(",", "").split())
    open_groups: list[list[str]] = [[]]
    at = 0
    while at < len(symbols):
        symbol, at = symbols[at], at + 1
        if symbol == "(":
            open_groups.append([])
            continue
        if symbol == ")":
            if len(open_groups) == 1:
                raise _bad(text, f"`)` without `(` at symbol {at}")
            item = open_groups.pop()
        elif symbol in "EtmL|":
            item = [symbol]
        else:
            raise _bad(text, f"`{symbol}` is none of E t m L | ( ) *n")
        times, at = _times(text, symbols, at)
        if len(open_groups[-1]) + len(item) * times > _MAX_SYMBOLS:
            raise _bad(text, f"spells out more than {_MAX_SYMBOLS} symbols")
        open_groups[-1].extend(item * times)
    if len(open_groups) > 1:
        raise _bad(text, "`(` is not closed")
    return tuple(tuple(stage) for stage in "".join(open_groups[0]).split("|"))


def _times(text: str, symbols: str, at: int) -> tuple[int, int]:
    """The count of a `*n` that may start at `at` (1 when there is none), and where it ends."""
    if at == len(symbols) or symbols[at] != "*":
        return 1, at
    end = at + 1
    while end < len(symbols) and symbols[end] in "0123456789":
        end += 1
    digits = symbols[at + 1 : end]
    if not digits or len(digits) > 6 or int(digits) == 0:
        raise _bad(text, f"`*` needs a count of 1 to {_MAX_SYMBOLS} after it")
    return int(digits), end


def _bad(text: str, rule: str, nearest: str = "") -> BadInput:
    return BadInput(Reason(field=_FIELD, value=_short(text), rule=rule, nearest=nearest))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_stages(model: ModelSpec, layout: Layout) -> tuple[Reason, ...]:
    """Rules of the stage split that are broken; () when `chunks` has an answer."""
    if not layout.stages:
        return _even_reasons(model, layout)
    try:
        stages = parse_stages(layout.stages)
    except BadInput as bad:
        return tuple(
            Reason(
                field=reason.field,
                rule=reason.rule,
                value=reason.value,
                nearest=_example(model, layout),
            )
            for reason in bad.reasons
        )
    reasons = [_string_reason(rule, model, layout) for rule in _broken(stages, model, layout)]
    if len(stages) != layout.pp * layout.vpp:
        reasons.append(_count_reason(len(stages), model, layout))
    return tuple(reasons)


def _example(model: ModelSpec, layout: Layout) -> str:
    """A legal layout string for these degrees; "" when there are more stages than things to stand
    on them."""
    if layout.pp * layout.vpp > model.layers + 2:
        return ""
    return even_layout_string(model.layers, mtp=model.mtp_layers, stages=layout.pp * layout.vpp)


def _string_reason(rule: str, model: ModelSpec, layout: Layout) -> Reason:
    return Reason(
        field=_FIELD, value=_short(layout.stages), rule=rule, nearest=_example(model, layout)
    )


def _count_reason(stages: int, model: ModelSpec, layout: Layout) -> Reason:
    rule = f"spells {stages} stages; pp * vpp = {layout.pp * layout.vpp} are needed"
    vpp, rest = divmod(stages, layout.pp)
    if rest or layout.pp == 1:
        return _string_reason(rule, model, layout)
    return Reason(
        field="layout.vpp", value=str(layout.vpp), rule=f"{_FIELD} {rule}", nearest=str(vpp)
    )


def _broken(stages: tuple[tuple[str, ...], ...], model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Rules, in words, that the letters break; where m stands is asked only of the right number of
    stages."""
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
    with_mtp = [stage for stage, held in enumerate(stages) if "m" in held]
    if len(with_mtp) > 1:
        yield "all m stand in one stage"
    elif with_mtp and layout.pp > 1 and len(stages) == layout.pp * layout.vpp:
        pp_rank, chunk = stage_position(layout, with_mtp[0])
        if pp_rank == 0 and not layout.schedule.is_v_shaped:
            yield "m cannot stand on pipeline rank 0"
        elif chunk != layout.vpp - 1:
            yield "m stands in the last chunk of its pipeline rank"


def _even_reasons(model: ModelSpec, layout: Layout) -> tuple[Reason, ...]:
    layers, pp, stages = model.layers, layout.pp, layout.pp * layout.vpp
    if _even_split(layers, stages) is not None:
        return ()
    text = _example(model, layout)
    example = f"stages '{text}'" if text else ""
    choices = sorted({v for split in EvenSplit for v in vpp_choices(layers, pp, split=split)})
    below = [v for v in choices if v < layout.vpp][-1:]
    near = below + [v for v in choices if v > layout.vpp][:1]
    rule = f"pp * vpp = {stages} divides neither the {layers} layers nor {layers} + 2 (embedding and loss counted)"
    if near:
        nearest = _either(near, example)
        return (Reason(field="layout.vpp", value=str(layout.vpp), rule=rule, nearest=nearest),)
    fewest = 1 if layout.vpp == 1 else 2
    legal = [
        degree
        for degree in range(fewest, min(layers + 2, layout.world_size) + 1)
        if layout.world_size % degree == 0 and _even_split(layers, degree * layout.vpp) is not None
    ]
    near = [p for p in legal if p < pp][-1:] + [p for p in legal if p > pp][:1]
    return (
        Reason(
            field="layout.pp",
            value=str(pp),
            rule=rule,
            nearest=_either(near, example) or "1 with vpp 1",
        ),
    )


def _either(values: list[int], example: str) -> str:
    return ", or ".join(part for part in (" or ".join(map(str, values)), example) if part)


def _even_split(layers: int, stages: int) -> EvenSplit | None:
    return next((split for split in EvenSplit if (layers + split.value) % stages == 0), None)


@lru_cache(maxsize=4)  # an estimate asks for every rank of one pipeline
def pipeline_chunks(model: ModelSpec, layout: Layout) -> tuple[Chunk, ...]:
    """The virtual stages in model order, pp * vpp of them. Raises BadInput where the split is not
    legal.

    Without a layout string MTP layers stand with the loss.
    """
    reasons = check_stages(model, layout)
    if reasons:
        raise BadInput(*reasons)
    stages = parse_stages(layout.stages) if layout.stages else _even_stages(model, layout)
    result = []
    first = 0
    for index, letters in enumerate(stages):
        count = letters.count("t")
        result.append(
            Chunk(
                pp_rank=stage_position(layout, index)[0],
                vpp_rank=stage_position(layout, index)[1],
                has_embedding="E" in letters,
                layers=tuple(range(first, first + count)),
                mtp_layers=letters.count("m"),
                has_loss="L" in letters,
            )
        )
        first += count
    return tuple(result)


def _even_stages(model: ModelSpec, layout: Layout) -> tuple[tuple[str, ...], ...]:
    stages = layout.pp * layout.vpp
    split = _even_split(model.layers, stages)
    assert split is not None  # stage_reasons has said so
    each = (model.layers + split.value) // stages
    counts = [each] * stages
    if split is EvenSplit.EMBEDDING_AND_LOSS:
        counts[0] -= 1
        counts[-1] -= 1
    letters = [["t"] * count for count in counts]
    letters[0].insert(0, "E")
    letters[-1] += [*("m" * model.mtp_layers), "L"]
    return tuple(tuple(stage) for stage in letters)
