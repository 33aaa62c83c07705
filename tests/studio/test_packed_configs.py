"""A config.json in an address: any model comes back, and no text of it does harm."""

import json
import random
import zlib
from base64 import urlsafe_b64encode

import pytest

from moewright.intake import catalogue, hf
from moewright.spec.errors import BadInput
from moewright.studio.queries import MOST_LETTERS, pack_config, read_query, unpack_model

NAMES = ("OLMoE-1B-7B-0924", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-120b", "Mixtral-8x7B")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_from_an_address(name):
    model = catalogue.model(name)
    packed = pack_config("mine", hf.build_config(model))
    assert 0 < len(packed) <= MOST_LETTERS
    query = read_query({"model": packed, "on": "8xH100", "layout": "ep8"})
    assert hf.build_config(query.model) == hf.build_config(model)
    assert query.model.name == "mine"


def test_what_is_cut_changed_or_endless_is_refused():
    packed = pack_config("mine", hf.build_config(catalogue.model(NAMES[0])))
    draws = random.Random(34)
    for _ in range(200):
        at = draws.randrange(len("mine~") + 1, len(packed))
        letter = draws.choice("abcXYZ019-_")
        changed = packed[:at] + draws.choice(("", letter)) + packed[at + 1 :]
        try:
            model = unpack_model(changed)
        except BadInput:
            continue
        assert model == unpack_model(packed)  # bits beyond the last byte
    endless = zlib.compress(json.dumps({"a": "x" * (1 << 22)}).encode(), 9)
    with pytest.raises(BadInput, match="whole config"):
        unpack_model(f"mine~{urlsafe_b64encode(endless).decode().rstrip('=')}")
    assert unpack_model("Qwen/Qwen3-30B-A3B") is None
    assert unpack_model("~/models/config.json") is None


def test_what_is_too_long_for_an_address_is_not_packed():
    draws = random.Random(34)
    noise = {f"field{number}": draws.random() for number in range(400)}
    assert pack_config("mine", noise) == ""
