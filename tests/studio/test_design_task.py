"""The design task of a page: every choice of its form reaches the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.studio.confinement import Confinement
from moewright.studio.worker import answer


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ({"attention_kinds": "gqa, linear"}, "--attention-kinds=linear"),
        ({"kv_heads": "2 0"}, "--kv-heads=0"),
        ({"kv_heads": "two"}, "kv_heads=two"),
        ({"vocab_sizes": "65536,3"}, "--vocab-sizes=3"),
        ({"shared_experts": "1"}, "--shared-experts"),
        ({"max_active": "some"}, "--max-active"),
        ({"served_tokens": "many"}, "--served-tokens"),
    ],
)
def test_what_is_varied_on_the_page_is_read(
    choice: dict[str, str], rule: str, tmp_path: Path
) -> None:
    walls = Confinement(root=tmp_path, folder=tmp_path, hub_cache=tmp_path)
    job = {"model": "Qwen3-30B-A3B", "on": "8xH100", "days": "7"}
    (refusal,) = answer("design", {**job, **choice}, walls)
    assert rule in refusal.decode()
