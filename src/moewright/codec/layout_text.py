"""Layouts as people write them: "tp2,ep8,pp32,vpp3,mbs1,recompute=moe_act+layernorm"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moewright.codec.names import closest_match
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)

_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")
_NUMBERS = (
    *_DEGREES,
    "dp",
    "zero",
    "shard",
    "vpp_group",
    "ep_node",
    "spare",
    "sp",
    "capacity",
)  # may be written without "="
_CHOICES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("schedule", Schedule),
    ("cp_comm", CpComm),
    ("dispatcher", DispatcherKind),
    ("expert_placement", ExpertPlacement),
    ("capacity_fill", CapacityFill),
)
_SETS: tuple[tuple[str, type[StrEnum]], ...] = (
    ("recompute", Recompute),
    ("offload", Offload),
    ("overlap", Overlap),
    ("graphs", CudaGraphScope),
)
LAYOUT_KEYS = (*_NUMBERS, *(key for key, _ in _CHOICES), *(key for key, _ in _SETS), "layout")

MAX_DIGITS = 18  # far beyond any size, below 2**63

_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")
_ALONE = (Recompute.FULL, CudaGraphScope.FULL)
_BESIDE = frozenset({Recompute.LOSS})  # no module of a layer
_SELECT = (Recompute.LAYERNORM, Recompute.MOE_ACT)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    key: str
    value: str


def parse_layout(text: str, *, world_size: int) -> Layout:
    """The layout that `text` writes over `world_size` ranks; "" is the default layout.

    Not given: sp is on when tp > 1, the schedule is interleaved when vpp > 1, vpp is 2 on a V (zbv,
    dualpipev). dp is derived; when given it must agree. Raises BadInput with one Reason a fault.
    Whether the degrees suit a model is rules.legality's question.
    """
    if world_size < 1:
        raise BadInput(
            Reason(
                field="world_size", value=str(world_size), rule="must be at least 1", nearest="1"
            )
        )
    values, dp = _fields(text)
    if values.get("tp", 1) > 1:
        values.setdefault("sp", True)
    if values.get("schedule") in (Schedule.ZBV, Schedule.DUALPIPEV):
        values.setdefault("vpp", 2)
    if values.get("vpp", 1) > 1:
        values.setdefault("schedule", Schedule.INTERLEAVED)
    layout = Layout(world_size=world_size, **values)
    dense = layout.tp * layout.cp * layout.pp
    if dp is not None and dp * dense != world_size:
        fits = world_size % dense == 0
        rule = f"must be the {world_size} ranks over tp * cp * pp = {dense}" + (
            "" if fits else ", which do not divide"
        )
        raise BadInput(
            Reason(field="dp", value=str(dp), rule=rule, nearest=str(layout.dp) if fits else "")
        )
    return layout


def explicit_fields(text: str) -> frozenset[str]:
    """The fields of Layout that `text` itself sets, without defaults: what a search must keep."""
    return frozenset(_fields(text)[0])


def format_layout(layout: Layout) -> str:
    """The shortest text that parse_layout reads back to `layout`, degrees first; ep, pp and mbs
    always shown."""
    shown = ("tp", "pp", "ep", "mbs", *(("vpp",) if layout.schedule.is_v_shaped else ()))
    parts = [
        f"{key}{getattr(layout, key)}"
        for key in _DEGREES
        if key in shown or getattr(layout, key) != 1
    ]
    if layout.sp != (layout.tp > 1):
        parts.append(f"sp{int(layout.sp)}")
    if layout.zero != 1:
        parts.append(f"zero{layout.zero}")
    if layout.shard:
        parts.append(f"shard{layout.shard}")
    if layout.schedule is not (Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B):
        parts.append(f"schedule={layout.schedule}")
    if layout.vpp_group:
        parts.append(f"vpp_group{layout.vpp_group}")
    if layout.cp_comm is not CpComm.P2P:
        parts.append(f"cp_comm={layout.cp_comm}")
    if layout.dispatcher is not DispatcherKind.ALL_TO_ALL:
        parts.append(f"dispatcher={layout.dispatcher}")
    if layout.ep_node:
        parts.append(f"ep_node{layout.ep_node}")
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        parts.append(f"expert_placement={layout.expert_placement}")
    if layout.spare:
        parts.append(f"spare{layout.spare}")
    if layout.capacity:
        parts.append(f"capacity={layout.capacity!r}")
    if layout.capacity_fill is not CapacityFill.USED:
        parts.append(f"capacity_fill={layout.capacity_fill}")
    parts += [f"{key}={'+'.join(_words(layout, key))}" for key, _ in _SETS if getattr(layout, key)]
    if layout.stages:
        parts.append(f"layout='{layout.stages}'")
    return ",".join(parts)


def _fields(text: str) -> tuple[dict[str, Any], int | None]:
    """Fields of Layout given in `text`, and dp when it is given; every fault in one BadInput."""
    values: dict[str, Any] = {}
    faults: list[Reason] = []
    seen: set[str] = set()
    for part in _parts(text):
        try:
            item = _item(part)
            if item.key in seen:
                raise BadInput(Reason(field=item.key, value=item.value, rule="is given twice"))
            seen.add(item.key)
            values["stages" if item.key == "layout" else item.key] = _value(_counted(item, values))
        except BadInput as error:
            faults += error.reasons
    if faults:
        raise BadInput(*faults)
    return values, values.pop("dp", None)


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside quotes."""
    part, quote = "", ""
    for letter in text:
        if letter == "," and not quote:
            yield part
            part = ""
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        part += letter
    if quote:
        raise BadInput(
            Reason(field="layout", value=part.strip(), rule=f"the quote {quote} is not closed")
        )
    if part.strip() or "," in text:
        yield part


def _item(part: str) -> _Item:
    stripped = part.strip()
    key, equals, value = (piece.strip() for piece in stripped.partition("="))
    if not equals and stripped.casefold() == "sp":
        return _Item(key="sp", value="1")
    if not equals and (match := re.fullmatch(r"([A-Za-z_]+?)\s*(-?\d.*)", stripped)):
        key, value = match.groups()
    folded = key.casefold()
    if folded == "edp":
        raise BadInput(
            Reason(field="edp", value=value, rule="is derived from the other degrees; leave it out")
        )
    if folded not in LAYOUT_KEYS:
        if not stripped:
            raise BadInput(
                Reason(
                    field="layout", rule="has an empty place between commas", nearest="leave it out"
                )
            )
        rule = f"is no layout key; keys are {' '.join(LAYOUT_KEYS)}; a value with commas is quoted"
        raise BadInput(
            Reason(field=key or stripped, rule=rule, nearest=closest_match(folded, LAYOUT_KEYS))
        )
    if not equals and folded not in _NUMBERS:
        raise BadInput(Reason(field=folded, rule="needs a value", nearest=f"{folded}=..."))
    return _Item(key=folded, value=value)


def _words(layout: Layout, key: str) -> Iterator[str]:
    """Members of a set as text, with their numbers."""
    for member in getattr(layout, key):
        if member is Recompute.FULL and layout.recompute_block:
            yield f"block{layout.recompute_block}"
        elif member is Recompute.FULL and layout.recompute_span > 1:
            yield f"uniform{layout.recompute_span}"
        elif member is Offload.OPTIMIZER and layout.offload_fraction != 1:
            yield f"optimizer{layout.offload_fraction!r}"
        else:
            yield member.value


def _counted(item: _Item, values: dict[str, Any]) -> _Item:
    """The item without the numbers of its words, which go to fields of their own: "block5" and
    "uniform2" are full recompute of the first 5 layers of each chunk, and of 2 layers a checkpoint;
    "optimizer0.5" offloads half.
    """
    if item.key not in ("recompute", "offload"):
        return item
    words = []
    for word in item.value.split("+"):
        match = re.fullmatch(r"(block|uniform|optimizer)(\d.*)", word.strip().casefold())
        if not match or (match[1] == "optimizer") != (item.key == "offload"):
            words.append(word)
        elif match[1] == "optimizer":
            values["offload_fraction"] = _fraction(match[2], word)
            words.append(match[1])
        else:
            number = _whole(_Item(key=match[1], value=match[2]))
            values["recompute_block" if match[1] == "block" else "recompute_span"] = number
            words.append(Recompute.FULL)
    return _Item(key=item.key, value="+".join(words))


def _fraction(text: str, word: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number <= 1:
        return number
    raise BadInput(
        Reason(
            field="offload",
            value=word,
            rule="takes a fraction above 0, at most 1",
            nearest="optimizer",
        )
    )


def _value(item: _Item) -> Any:
    if item.key == "layout":
        return _stages(item)
    if item.key == "sp":
        return _switch(item)
    if item.key == "capacity":
        return _capacity(item)
    for key, choices in _CHOICES:
        if key == item.key:
            return _choice(item.key, item.value, choices)
    for key, choices in _SETS:
        if key == item.key:
            return _set(item, choices)
    return _whole(item)


def _whole(item: _Item) -> int:
    lowest = 0 if item.key in ("zero", "shard", "vpp_group", "ep_node", "spare") else 1
    if not re.fullmatch(r"-?[0-9]+", item.value):
        raise BadInput(
            Reason(
                field=item.key,
                value=item.value[:60],
                rule="must be a whole number",
                nearest=str(lowest),
            )
        )
    if len(item.value) > MAX_DIGITS:
        rule = f"must have {MAX_DIGITS} digits at most"
        raise BadInput(Reason(field=item.key, value=f"{item.value[:MAX_DIGITS]}...", rule=rule))
    number = int(item.value)
    if number < lowest:
        raise BadInput(
            Reason(
                field=item.key,
                value=item.value,
                rule=f"must be at least {lowest}",
                nearest=str(lowest),
            )
        )
    if item.key == "zero" and number not in (0, 1, 3):
        raise BadInput(
            Reason(
                field="zero",
                value=item.value,
                rule="must be 0, 1 or 3",
                nearest="1" if number == 2 else "3",
            )
        )
    return number


def _switch(item: _Item) -> bool:
    folded = item.value.casefold()
    if folded in _ON or folded in _OFF:
        return folded in _ON
    raise BadInput(Reason(field=item.key, value=item.value, rule="must be 1 or 0", nearest="1"))


def _capacity(item: _Item) -> float:
    try:
        number = float(item.value)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number + 0.0  # -0 reads as 0
    raise BadInput(
        Reason(
            field="capacity",
            value=item.value,
            rule="must be a factor, or 0 for dropless",
            nearest="1.0",
        )
    )


def _choice(key: str, text: str, choices: type[StrEnum]) -> StrEnum:
    legal = [member.value for member in choices]
    folded = text.strip().casefold()
    if folded in legal:
        return choices(folded)
    rule = f"must be one of {', '.join(legal)}"
    raise BadInput(
        Reason(field=key, value=text.strip(), rule=rule, nearest=closest_match(folded, legal))
    )


def _set(item: _Item, choices: type[StrEnum]) -> tuple[StrEnum, ...]:
    """A sorted tuple without repeats; "none" is the empty one, "select" Megatron's usual pair."""
    if item.value.casefold() == "none":
        return ()
    members: set[StrEnum] = set()
    for word in item.value.split("+"):
        if choices is Recompute and word.strip().casefold() == "select":
            members.update(_SELECT)
        else:
            members.add(_choice(item.key, word, choices))
    if len(members - _BESIDE) > 1 and (alone := members.intersection(_ALONE)):
        rule = f"{next(iter(alone))} stands alone"
        raise BadInput(
            Reason(field=item.key, value=item.value, rule=rule, nearest=str(next(iter(alone))))
        )
    return tuple(sorted(members))


def _stages(item: _Item) -> str:
    quoted = item.value[:1] in ("'", '"')
    text = (
        item.value[1:-1]
        if quoted and len(item.value) > 1 and item.value[-1] == item.value[0]
        else item.value
    )
    if re.fullmatch(r"[EtmL|()*0-9, ]+", text):
        return text
    rule = "is made of E t m L | ( ) * and numbers"
    raise BadInput(
        Reason(field="layout", value=item.value, rule=rule, nearest="'Et*3|(tt|)*29,m|L'")
    )
