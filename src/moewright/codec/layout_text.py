"""Layouts as people write them: "tp2,ep8,pp32,vpp3,mbs1,recompute=moe_act+layernorm"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moewright.codec.names import closest_match
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Offload,
    Overlap,
    RankOrder,
    Recompute,
    Schedule,
)
from moewright.spec.stage_string import StageString, parse_stages

_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")
# Keys that may be written without "=".
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
    "rank_capacity",
)
_CHOICES: tuple[tuple[str, type[StrEnum]], ...] = (
    ("order", RankOrder),
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
_ZERO_ALLOWED = ("zero", "shard", "vpp_group", "ep_node", "spare")
_EXCLUSIVE = (Recompute.FULL, CudaGraphScope.FULL)
_COMBINABLE = frozenset({Recompute.LOSS})  # goes with FULL: it is no module of a layer
_OFFLOAD_WORDS = ("optimizer", "layers", "chunks")  # which of them take a number
_KEY_NOUNS = MappingProxyType({"layout": "a pipeline layout"})  # keys that are no noun alone
_SELECT = (Recompute.LAYERNORM, Recompute.MOE_ACT)  # what recompute=select stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    key: str
    value: str


def parse_layout(text: str, *, world_size: int) -> Layout:
    """Return the layout that `text` describes over `world_size` ranks; "" is the default layout.

    Defaults that depend on other keys: sp is on when tp > 1, the schedule is interleaved when
    vpp > 1, and vpp is 2 on a V (zbv, v-half, v-min, dualpipev). dp is derived; where it is given
    it must agree. Whether the degrees suit a model is rules.limits.legality's question.

    Raises:
        BadInput: The text is at fault; each fault is a Reason.
    """
    if world_size < 1:
        rule = "must be at least 1"
        raise BadInput(Reason(field="world_size", value=str(world_size), rule=rule, nearest="1"))
    values, dp = _parse_fields(text)
    if values.get("tp", 1) > 1:
        values.setdefault("sp", True)
    if values.get("schedule", Schedule.ONE_F_ONE_B).is_v_shaped:
        values.setdefault("vpp", 2)
    if values.get("vpp", 1) > 1:
        values.setdefault("schedule", Schedule.INTERLEAVED)
    layout = Layout(world_size=world_size, **values)
    dense_ranks = layout.tp * layout.cp * layout.pp
    if dp is not None and dp * dense_ranks != world_size:
        rule = f"must be the {world_size} ranks over tp * cp * pp = {dense_ranks}"
        near = str(layout.dp)
        if world_size % dense_ranks:
            rule += ", which do not divide"
            near = ""
        raise BadInput(Reason(field="dp", value=str(dp), rule=rule, nearest=near))
    return layout


def explicit_fields(text: str) -> frozenset[str]:
    """Return the fields of Layout that `text` itself sets, which a search must keep."""
    return frozenset(_parse_fields(text)[0])


def format_layout(layout: Layout) -> str:
    """Return the shortest text that parse_layout reads back to `layout`.

    Degrees come first; tp, pp, ep and mbs are always shown.
    """
    always_shown = ["tp", "pp", "ep", "mbs"]
    if layout.schedule.is_v_shaped:
        always_shown.append("vpp")
    parts = [
        f"{key}{getattr(layout, key)}"
        for key in _DEGREES
        if key in always_shown or getattr(layout, key) != 1
    ]
    if layout.sp != (layout.tp > 1):
        parts.append(f"sp{int(layout.sp)}")
    if layout.order is not RankOrder.PP_LAST:
        parts.append(f"order={layout.order}")
    if layout.zero != 1:
        parts.append(f"zero{layout.zero}")
    if layout.shard:
        parts.append(f"shard{layout.shard}")
    default_schedule = Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
    if layout.schedule is not default_schedule:
        parts.append(f"schedule={layout.schedule}")
    if layout.vpp_group:
        parts.append(f"vpp_group{layout.vpp_group}")
    if layout.cp_comm is not CpComm.P2P:
        parts.append(f"cp_comm={layout.cp_comm}")
    if layout.dispatcher is not DEFAULT_LAYOUT.dispatcher:
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
    if layout.rank_capacity:
        parts.append(f"rank_capacity={layout.rank_capacity!r}")
    parts += [
        f"{key}={'+'.join(_set_words(layout, key))}" for key, _ in _SETS if getattr(layout, key)
    ]
    if layout.stages:
        parts.append(f"layout='{layout.stages}'")
    return ",".join(parts)


def format_layout_changes(layout: Layout, base: Layout) -> str:
    """Return what a layout has that another does not, and lacks that it has, as a phrase.

    That is "with ep8, mbs2, without offload", or "" where they are the same.
    """
    parts = {_parse_item(part).key: part for part in _split_parts(format_layout(layout))}
    base_parts = {_parse_item(part).key: part for part in _split_parts(format_layout(base))}
    changes = [part for key, part in parts.items() if part != base_parts.get(key)]
    lacking = [f"without {_KEY_NOUNS.get(key, key)}" for key in base_parts if key not in parts]
    return ", ".join([*([f"with {', '.join(changes)}"] if changes else []), *lacking])


def _parse_fields(text: str) -> tuple[dict[str, Any], int | None]:
    """Return the fields of Layout given in `text`, and dp where it is given.

    Raises:
        BadInput: It has a Reason for every fault.
    """
    values: dict[str, Any] = {}
    faults: list[Reason] = []
    seen: set[str] = set()
    for part in _split_parts(text):
        try:
            item = _parse_item(part)
            if item.key in seen:
                raise BadInput(Reason(field=item.key, value=item.value, rule="is given twice"))
            seen.add(item.key)
            field = "stages" if item.key == "layout" else item.key
            values[field] = _parse_value(_take_numbers(item, values))
        except BadInput as error:
            faults += error.reasons
    if faults:
        raise BadInput(*faults)
    return values, values.pop("dp", None)


def _split_parts(text: str) -> Iterator[str]:
    """Split at commas outside quotes."""
    part = ""
    quote = ""
    for letter in text:
        if letter == "," and not quote:
            yield part
            part = ""
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        part += letter
    if quote:
        rule = f"the quote {quote} is not closed"
        raise BadInput(Reason(field="layout", value=part.strip(), rule=rule))
    if part.strip() or "," in text:
        yield part


def _parse_item(part: str) -> _Item:
    stripped = part.strip()
    key, equals, value = (side.strip() for side in stripped.partition("="))
    if not equals and stripped.casefold() == "sp":
        return _Item(key="sp", value="1")
    if not equals and (match := re.fullmatch(r"([A-Za-z_]+?)\s*(-?\d.*)", stripped)):
        key, value = match.groups()
    folded = key.casefold()
    if folded == "edp":
        rule = "is derived from the other degrees; leave it out"
        raise BadInput(Reason(field="edp", value=value, rule=rule))
    if folded not in LAYOUT_KEYS:
        raise BadInput(_unknown_key(stripped, key))
    if not equals and folded not in _NUMBERS:
        raise BadInput(Reason(field=folded, rule="needs a value", nearest=f"{folded}=..."))
    return _Item(key=folded, value=value)


def _unknown_key(part: str, key: str) -> Reason:
    if not part:
        rule = "has an empty place between commas"
        return Reason(field="layout", rule=rule, nearest="leave it out")
    rule = f"is no layout key; keys are {' '.join(LAYOUT_KEYS)}; a value with commas is quoted"
    near = closest_match(key.casefold(), LAYOUT_KEYS)
    return Reason(field=key or part, rule=rule, nearest=near)


def _set_words(layout: Layout, key: str) -> Iterator[str]:
    """Yield the members of a set as text, with their numbers."""
    for member in getattr(layout, key):
        if member is Recompute.FULL and layout.recompute_block:
            yield f"block{layout.recompute_block}"
        elif member is Recompute.FULL and layout.recompute_span > 1:
            yield f"uniform{layout.recompute_span}"
        elif member is Offload.OPTIMIZER and layout.offload_fraction != 1:
            yield f"optimizer{layout.offload_fraction!r}"
        else:
            yield member.value
    if key == "offload" and layout.offload_layers != 1:
        yield f"layers{layout.offload_layers!r}"
    if key == "offload" and layout.offload_chunks:
        yield f"chunks{layout.offload_chunks}"


def _take_numbers(item: _Item, values: dict[str, Any]) -> _Item:
    """Move the numbers of a set's words to fields of their own, and return the item without them.

    "block5" and "uniform2" are full recompute of the first 5 layers of each chunk, and of 2 layers
    per checkpoint; "optimizer0.5" offloads half of the optimizer, "layers0.5" the activations of
    half of the layers, "chunks1" those of the first chunk of each rank.
    """
    if item.key not in ("recompute", "offload"):
        return item
    words = []
    for word in item.value.split("+"):
        match = re.fullmatch(
            r"(block|uniform|optimizer|layers|chunks)(\d.*)", word.strip().casefold()
        )
        if not match or (match[1] in _OFFLOAD_WORDS) != (item.key == "offload"):
            words.append(word)
        elif match[1] == "layers":
            values["offload_layers"] = _parse_fraction(match[2], word)
        elif match[1] == "optimizer":
            values["offload_fraction"] = _parse_fraction(match[2], word)
            words.append(match[1])
        elif match[1] == "chunks":
            values["offload_chunks"] = _parse_integer(_Item(key=match[1], value=match[2]))
        else:
            number = _parse_integer(_Item(key=match[1], value=match[2]))
            values["recompute_block" if match[1] == "block" else "recompute_span"] = number
            words.append(Recompute.FULL)
    return _Item(key=item.key, value="+".join(words))


def _parse_fraction(text: str, word: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0 < number <= 1:
        return number
    rule = "takes a fraction above 0, at most 1"
    raise BadInput(Reason(field="offload", value=word, rule=rule, nearest="optimizer"))


def _parse_value(item: _Item) -> Any:
    if item.key == "layout":
        return _parse_stage_string(item)
    if item.key == "sp":
        return _parse_switch(item)
    if item.key in ("capacity", "rank_capacity"):
        return _parse_capacity(item)
    for key, choices in _CHOICES:
        if key == item.key:
            return _parse_choice(item.key, item.value, choices)
    for key, choices in _SETS:
        if key == item.key:
            return _parse_set(item, choices)
    return _parse_integer(item)


def _parse_integer(item: _Item) -> int:
    lowest = 0 if item.key in _ZERO_ALLOWED else 1
    if not re.fullmatch(r"-?[0-9]+", item.value):
        rule = "must be a whole number"
        raise BadInput(
            Reason(field=item.key, value=item.value[:60], rule=rule, nearest=str(lowest))
        )
    if len(item.value) > MAX_DIGITS:
        rule = f"must have {MAX_DIGITS} digits at most"
        raise BadInput(Reason(field=item.key, value=f"{item.value[:MAX_DIGITS]}...", rule=rule))
    number = int(item.value)
    if number < lowest:
        rule = f"must be at least {lowest}"
        raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest=str(lowest)))
    if item.key == "zero" and number > 3:
        rule = "must be 0, 1, 2 or 3"
        raise BadInput(Reason(field="zero", value=item.value, rule=rule, nearest="3"))
    return number


def _parse_switch(item: _Item) -> bool:
    folded = item.value.casefold()
    if folded in _ON or folded in _OFF:
        return folded in _ON
    raise BadInput(Reason(field=item.key, value=item.value, rule="must be 1 or 0", nearest="1"))


def _parse_capacity(item: _Item) -> float:
    try:
        number = float(item.value)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number + 0.0  # -0 reads as 0
    rule = "must be a factor, or 0 for dropless"
    raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest="1.0"))


def _parse_choice(key: str, text: str, choices: type[StrEnum]) -> StrEnum:
    legal = [member.value for member in choices]
    folded = text.strip().casefold()
    if folded in legal:
        return choices(folded)
    rule = f"must be one of {', '.join(legal)}"
    near = closest_match(folded, legal)
    raise BadInput(Reason(field=key, value=text.strip(), rule=rule, nearest=near))


def _parse_set(item: _Item, choices: type[StrEnum]) -> tuple[StrEnum, ...]:
    """Return the members of a set as a sorted tuple without repeats.

    "none" is the empty set; "select" is layernorm+moe_act, Megatron-LM's usual pair.
    """
    if item.value.casefold() == "none":
        return ()
    members: set[StrEnum] = set()
    for word in item.value.split("+"):
        if choices is Recompute and word.strip().casefold() == "select":
            members.update(_SELECT)
        else:
            members.add(_parse_choice(item.key, word, choices))
    exclusive = next(iter(members.intersection(_EXCLUSIVE)), None)
    if exclusive is not None and len(members - _COMBINABLE) > 1:
        rule = f"{exclusive} cannot be combined with others"
        raise BadInput(Reason(field=item.key, value=item.value, rule=rule, nearest=str(exclusive)))
    return tuple(sorted(members))


def _parse_stage_string(item: _Item) -> StageString:
    text = item.value
    is_quoted = len(text) > 1 and text[0] in ("'", '"') and text[-1] == text[0]
    if is_quoted:
        text = text[1:-1]
    try:
        parse_stages(text)
    except BadInput as error:
        example = "'Et*3|(tt|)*29,m|L'"
        reason = replace(error.reasons[0], field="layout", nearest=example)
        raise BadInput(reason) from None
    return StageString(text)
