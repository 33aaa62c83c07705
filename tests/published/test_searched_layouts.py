"""Whether the layouts that others published are among those that a search of their job tries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from moewright.calibration.table import read_table
from moewright.codec import parse_layout
from moewright.intake import catalogue
from moewright.search.space import build_search_space
from moewright.search.unsearched import SearchedChoices
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

DATA = Path(__file__).parent / "data"
TABLES = ("measurements.csv", "measurements_more.csv", "blind_runs.csv")
# Timed rows by the fields of their layouts that no search tries; "" for those that one tries.
BY_FIELDS = {
    "": 760,
    "capacity+capacity_fill": 122,
    "recompute": 99,
    "zero": 78,
    "graphs": 73,
    "dispatcher": 60,
    "dispatcher+graphs": 17,
    "capacity+capacity_fill+graphs": 11,
    "capacity": 7,
    "sp": 5,
    "mbs": 3,
    "shard": 3,
    "capacity+capacity_fill+mbs": 8,
    "dispatcher+mbs": 4,
    "capacity+recompute_block+zero": 2,
    "recompute_block": 1,
    "offload": 1,
    "layout": 1,
    "layout+zero": 1,
    "layout+recompute_block": 1,
    "dispatcher+offload": 1,
    "cp+dispatcher": 1,
    "cp+cp_comm": 1,
}


def choices_of(model: ModelSpec, workload: Workload, hardware: Hardware) -> SearchedChoices:
    return SearchedChoices(space=build_search_space(model, workload, hardware, ""))


def test_so_many_published_layouts_are_searched_and_the_others_are_outside_by_these_fields() -> (
    None
):
    table = read_table(*(DATA / name for name in TABLES))
    choices: dict[tuple[ModelSpec, Workload, Hardware], SearchedChoices] = {}
    counts: Counter[str] = Counter()
    for row in table.rows:
        if row.oom or row.speed is None or row.duplicate_of:
            continue
        job = row.model, row.workload, row.hardware
        if job not in choices:
            choices[job] = choices_of(*job)
        reasons = choices[job].find_unsearched(row.layout)
        counts["+".join(sorted({reason.field.partition(".")[2] for reason in reasons}))] += 1
    assert counts == BY_FIELDS


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        # NVIDIA's splits of DeepSeek-V3 over 16 stages (Megatron-Bridge's recipes), NeMo
        # AutoModel's over 32, and one that leaves the last stage far fewer layers.
        ("pp2,vpp8,ep32,layout='Et*4|(t*4|)*14tmL'", []),
        ("pp4,vpp4,ep64,layout='Et*4|(t*4|)*14tmL',recompute=mlp", []),
        ("pp4,vpp8,ep64,layout='Et|(tt|)*30mL',recompute=full", []),
        ("pp4,vpp4,ep64,layout='Et*4|(t*4|)*13t*3|ttmL'", ["layout.layout"]),
        ("pp2,vpp8,ep32,mbs5,layout='Et*4|(t*4|)*14tmL'", ["layout.mbs"]),
        ("pp4,vpp4,ep64,zero0,layout='Et*4|(t*4|)*14tmL'", ["layout.zero"]),
        ("tp2,sp0,pp4,vpp4,ep64,layout='Et*4|(t*4|)*14tmL'", ["layout.sp"]),
    ],
)
def test_what_no_search_tries_is_told_by_field(text: str, fields: list[str]) -> None:
    hardware = catalogue.hardware("256xGB300")
    workload = Workload(seq_len=4096, global_batch=3840)
    choices = choices_of(catalogue.model("DeepSeek-V3"), workload, hardware)
    reasons = choices.find_unsearched(parse_layout(text, world_size=256))
    assert [reason.field for reason in reasons] == fields
