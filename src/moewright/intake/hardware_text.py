"""Hardware as people write it: how many devices, and which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moewright.intake.devices import device_names, find_device
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import MAX_DEVICES
from moewright.spec.names import closest_match

# 8xH100, 8 x H100, 8*H100, 8 H100. Any number is read here, so that a wrong count can be named.
_COUNT_FIRST = re.compile(r"([+-]?[\d.,_]*\d(?:e[+-]?\d+)?)(?:\s*[xX×*]\s*|\s+)(.*\S)")
# 16h100: what follows the digits has to be a device, for some names begin with digits.
_COUNT_JOINED = re.compile(r"(\d{1,9})([a-zA-Z].*\S)")
# 2 nodes H100, 2 nodes of 8xH100, 4 nodes x 8 H100
_NODES = re.compile(
    r"(\d{1,9})\s*nodes?(?:\s*[x×*,]\s*|\s+(?:of|with)\s+|\s+)(.*\S)", re.IGNORECASE
)
# H100x8, H100 x 8, H100*8, H100:8
_COUNT_LAST = re.compile(r"(.*\S)\s*[xX×*:]\s*([\d_]+)")

# 16xH100 with 96GB: the same device with another memory
_MEMORY = re.compile(r"(.*\S)\s+with\s+(\d{1,6}(?:\.\d+)?)\s*gi?b(?: each)?", re.IGNORECASE)
_MOST_MEMORY_GB = 10_000

_PLURAL = re.compile(r"s$", re.IGNORECASE)  # 16 H100s

# two nodes of H100, sixteen H100s
_WORDS: Mapping[str, int] = MappingProxyType(
    {
        "a": 1,
        "one": 1,
        "two": 2,
        "three": 3,
        "four": 4,
        "five": 5,
        "six": 6,
        "seven": 7,
        "eight": 8,
        "nine": 9,
        "ten": 10,
        "twelve": 12,
        "sixteen": 16,
        "thirty-two": 32,
        "sixty-four": 64,
    }
)
_IN_WORDS = re.compile(r"^[a-z-]+(?=\s)", re.IGNORECASE)

_SHORTEST = 2  # letters that may begin many a name, as RT does


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareText:
    """What a text says of hardware: the name of a device or the path of a file, and a count.

    The count is None where the text has none; `memory_gb`, a device's memory in place of its own,
    is 0 there.
    """

    name: str
    count: int | None
    memory_gb: float = 0.0

    @property
    def is_file(self) -> bool:
        return _is_file(self.name)


def parse_hardware_text(text: str) -> HardwareText:
    """Split "8xH100", "H100x8", "2xpath/machine.toml" or "NVIDIA H20" into a count and a name.

    "2 nodes of 8xH100" and "2x8xH100" are 16; without a count "two nodes of H100" takes the
    device's nodes. "16 H100s" and "16 H100 GPUs" are 16 H100; "16xH100 with 96GB" are of another
    memory.

    Raises:
        BadInput: the count is not a whole number in 1..MAX_DEVICES, or no device has such a memory.
    """
    other = _MEMORY.fullmatch(text.strip())
    if other is not None and find_device(text.strip()) is None:
        memory_gb = float(other[2])
        if not 0 < memory_gb <= _MOST_MEMORY_GB:
            rule = f"the memory must be above 0 and at most {_MOST_MEMORY_GB:,} GB"
            raise _refusal(text, rule, f"{other[1][:60]} with 80GB")
        return replace(parse_hardware_text(other[1]), memory_gb=memory_gb)
    split = _split_count(text.strip(), text)
    single = _PLURAL.sub("", split.name)
    if find_device(split.name) is None and find_device(single) is not None:
        return HardwareText(name=single, count=split.count)
    return split


def _split_count(plain: str, text: str) -> HardwareText:
    if find_device(plain) is not None:
        return HardwareText(name=plain, count=None)
    plain = _IN_WORDS.sub(_write_number, plain)
    nodes = _NODES.fullmatch(plain)
    if nodes is not None:
        return _read_nodes(nodes[1], nodes[2], text)
    joined = _COUNT_JOINED.fullmatch(plain)
    if joined is not None and find_device(joined[2]) is not None:
        return HardwareText(name=joined[2], count=_parse_device_count(joined[1], joined[2], text))
    first = _COUNT_FIRST.fullmatch(plain)
    if first is not None:
        node = _COUNT_FIRST.fullmatch(first[2])
        if node is not None and first[1].isdecimal() and _resembles_hardware(node[2]):
            return _read_nodes(first[1], first[2], text)
        return HardwareText(name=first[2], count=_parse_device_count(first[1], first[2], text))
    last = _COUNT_LAST.fullmatch(plain)
    # A number behind an x may belong to the name: RTX4090 is not 4,090 devices of a kind RT.
    if last is not None and _resembles_hardware(last[1]):
        return HardwareText(name=last[1], count=_parse_device_count(last[2], last[1], text))
    return HardwareText(name=plain, count=None)


def _write_number(word: re.Match[str]) -> str:
    return str(_WORDS.get(word[0].casefold(), word[0]))


def _read_nodes(nodes: str, node: str, text: str) -> HardwareText:
    """Return so many times what a node has, by the text or by the catalogue.

    The size of a node that a file describes is the file's to say, so it needs a count here.
    """
    if _NODES.fullmatch(node) is not None:
        raise _refusal(text, "says twice how many nodes there are", f"{nodes} nodes of 8xH100")
    one_node = parse_hardware_text(node)
    device = find_device(one_node.name)
    if one_node.count is not None:
        devices = one_node.count
    elif device is not None:
        devices = device.devices_per_node
    else:
        rule = "how many devices a node has is not known; say it"
        raise _refusal(text, rule, f"{nodes} nodes of 8x{one_node.name[:60]}")
    count = _parse_device_count(str(int(nodes) * devices), one_node.name, text)
    return HardwareText(name=one_node.name, count=count)


def _is_file(name: str) -> bool:
    return name.casefold().endswith(".toml")


def _resembles_hardware(name: str) -> bool:
    if _is_file(name) or find_device(name) is not None:
        return True
    return len(name) > _SHORTEST and bool(closest_match(name, device_names()))


def _parse_device_count(count: str, name: str, text: str) -> int:
    try:
        value = float(count.replace("_", ""))
    except ValueError:
        raise _refusal(text, "the count is not a number", f"1x{name[:60]}") from None
    legal = int(min(max(value, 1), MAX_DEVICES))
    if value != legal:
        rule = f"the count must be a whole number in 1..{MAX_DEVICES}"
        raise _refusal(text, rule, f"{legal}x{name[:60]}")
    return legal


def _refusal(text: str, rule: str, nearest: str) -> BadInput:
    return BadInput(Reason(field="hardware", value=text[:80], rule=rule, nearest=nearest))
