"""A config.json within an address: its name, and its fields compressed, so that nothing is kept."""

from __future__ import annotations

import json
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Mapping

from moewright.codec import parse_json
from moewright.intake import hf
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

MOST_LETTERS = 3500  # of what addresses of every browser and proxy hold
_MOST_BYTES = 1 << 18  # of fields
_PACKED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)~(?P<fields>[A-Za-z0-9_-]+)")


def pack_config(name: str, config: Mapping[str, object]) -> str:
    """Return a name and the fields of a config.json as text of an address; "" if it is too long."""
    fields = json.dumps(config, separators=(",", ":")).encode()
    packed = urlsafe_b64encode(zlib.compress(fields, 9)).decode().rstrip("=")
    text = f"{name}~{packed}"
    return text if len(text) <= MOST_LETTERS else ""


def unpack_model(text: str) -> ModelSpec | None:
    """Return the model that an address holds; None for a text of another kind.

    Raises:
        BadInput: the address was cut or changed, or its fields are no model's.
    """
    packed = _PACKED.fullmatch(text)
    if packed is None:
        return None
    name = packed["name"]
    try:
        data = urlsafe_b64decode(packed["fields"] + "=" * (-len(packed["fields"]) % 4))
        opened = zlib.decompressobj()
        fields = opened.decompress(data, _MOST_BYTES)
        is_whole = opened.eof and len(text) <= MOST_LETTERS
    except (Error, zlib.error):
        is_whole = False
    if not is_whole:
        rule = "is cut or changed: its address does not hold a whole config.json"
        raise BadInput(Reason(field="model", value=name, rule=rule, nearest="drop the file again"))
    config = parse_json(fields.decode(errors="replace"), where=name)
    if not isinstance(config, Mapping):
        raise BadInput(Reason(field="model", value=name, rule="must be an object"))
    return hf.parse_config(config, where=name, name=name)
