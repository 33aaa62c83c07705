"""Nodes of Chakra execution traces in protobuf's wire format.

The schema is et_def.proto of MLCommons Chakra: a file is a GlobalMetadata and the nodes of one
rank, each after its length. The few fields that a predicted step has need no protobuf runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from moewright.spec.hardware import Collective

SCHEMA_VERSION = "0.0.4"
_VARINT, _BYTES = 0, 2  # wire types


class NodeType(IntEnum):
    """The types of nodes that a predicted step has, by their number in the schema."""

    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


# CollectiveCommType of the schema.
COLLECTIVE_TYPES = {
    Collective.ALL_REDUCE: 0,
    Collective.ALL_GATHER: 2,
    Collective.BROADCAST: 5,
    Collective.ALL_TO_ALL: 6,
    Collective.REDUCE_SCATTER: 7,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceNode:
    """A node of a rank's trace: work that starts when all of `after` have ended."""

    id: int
    name: str
    type: NodeType
    after: tuple[int, ...] = ()
    micros: int = 0

    def encode(self) -> bytes:
        """Return the fields of the message, to which attributes can be added."""
        message = _number(1, self.id) + _text(2, self.name) + _number(3, self.type)
        if self.after:
            message += _field(5, b"".join(map(_varint, self.after)))
        message += _number(7, self.micros)
        return message + _field(10, _text(1, "is_cpu_op") + _number(27, 0))


def encode_attribute(name: str, value: int | str) -> bytes:
    """Return an attribute of a node."""
    encoded = _text(29, value) if isinstance(value, str) else _number(9, value)
    return _field(10, _text(1, name) + encoded)


def encode_trace(nodes: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages of a file, each after its length."""
    yield _delimit(_text(1, SCHEMA_VERSION))
    for node in nodes:
        yield _delimit(node)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    # Seven bits a byte, the lowest first; the high bit says that more follow.
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    # A key is the field's number and, in its three lowest bits, the wire type.
    return _varint(field << 3 | _VARINT) + _varint(value)


def _field(field: int, message: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _delimit(message)


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _delimit(message: bytes) -> bytes:
    return _varint(len(message)) + message
