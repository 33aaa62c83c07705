"""A refusal of a script says what to add, and what it says to add leads to an answer."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from docs.tools.reading_table import read_file

OPTIONS = (
    ("--num-layers", "8"),
    ("--hidden-size", "1024"),
    ("--num-attention-heads", "8"),
    ("--num-query-groups", "4"),
    ("--max-position-embeddings", "2048"),
    ("--seq-length", "2048"),
    ("--micro-batch-size", "1"),
    ("--global-batch-size", "64"),
    ("--vocab-size", "32000"),
    ("--num-experts", "8"),
    ("--moe-router-topk", "2"),
    ("--moe-ffn-hidden-size", "512"),
    ("--tensor-model-parallel-size", "2"),
    ("--pipeline-model-parallel-size", "2"),
    ("--expert-model-parallel-size", "2"),
    ("--context-parallel-size", "1"),
    ("--moe-token-dispatcher-type", "alltoall"),
    ("--recompute-granularity", "selective"),
    ("--optimizer", "adam"),
)
RENAMED = re.compile(r"(--[\w-]+): is no option .*; nearest legal value: (--[\w-]+)(?: \(|$)")
SWITCHES = "--bf16 --swiglu --group-query-attention --use-distributed-optimizer --moe-grouped-gemm"


def leave_out(rng: random.Random, words: list[list[str]]) -> None:
    words.pop(rng.randrange(len(words)))


def take_variable(rng: random.Random, words: list[list[str]]) -> None:
    word = rng.choice(words)
    word[1] = f"${word[0].strip('-').replace('-', '_').upper()}"


def take_argument(rng: random.Random, words: list[list[str]]) -> None:
    rng.choice(words)[1] = f"${rng.randint(1, 3)}"


def misspell(rng: random.Random, words: list[list[str]]) -> None:
    word = rng.choice(words)
    place = rng.randrange(3, len(word[0]) - 1)
    word[0] = word[0][:place] + word[0][place + 1 :]


def add_foreign(rng: random.Random, words: list[list[str]]) -> None:
    name = rng.choice(("moe-swap", "tp-lanes", "attention-mixer", "fp6-format", "layer-scale"))
    words.append([f"--{name}-{rng.randint(2, 9)}x", "3"])


def break_number(rng: random.Random, words: list[list[str]]) -> None:
    word = rng.choice([word for word in words if word[1].isdecimal()])
    word[1] = rng.choice(("0", "3", "7", "many"))


def break_choice(rng: random.Random, words: list[list[str]]) -> None:
    rng.choice([word for word in words if not word[1].isdecimal()])[1] = "other"


FAULTS = (
    *(leave_out, take_variable, take_argument, misspell),
    *(add_foreign, break_number, break_choice),
)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_refusal_asks_for_leads_to_an_answer(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    words = [list(pair) for pair in OPTIONS]
    faults = rng.sample(FAULTS, rng.randint(1, 3))
    for fault in faults:
        fault(rng, words)
    command = " ".join(f"{name} {value}" for name, value in words)
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SWITCHES} {command}\n")
    reading = read_file(script, script.name)
    while renamed := RENAMED.match(reading.words):  # a name is mended where it stands
        text = script.read_text()
        assert f" {renamed[1]} " in text
        script.write_text(text.replace(f" {renamed[1]} ", f" {renamed[2]} "))
        reading = read_file(script, script.name)
    kinds = [fault.__name__ for fault in faults]
    assert reading.outcome.startswith("planned"), (kinds, reading)
