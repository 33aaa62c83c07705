"""A refusal of a script says what to add, and what it says to add leads to an answer."""

from __future__ import annotations

import random
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from docs.tools.reading_table import read_file
from moewright.api.launch_scripts import read_flags
from moewright.api.script_requests import ScriptAdditions, gather_requests
from moewright.spec.errors import BadInput, Reason

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


# What has no default, for which a typical value stands while the rest is asked for.
NEEDED = (
    *("--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size"),
    *("--vocab-size", "--max-position-embeddings"),
)
COMPLETE = f"{SWITCHES} --sequence-parallel"
NO_ADDITIONS = ScriptAdditions(devices="H100")


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


@pytest.mark.parametrize("seed", range(12))
def test_what_a_script_lacks_is_asked_for_at_once(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    lacking = rng.sample(NEEDED, rng.randint(2, len(NEEDED)))
    words = []
    told = {}
    for name, value in OPTIONS:
        if name not in lacking:
            words.append(f"{name} {value}")
        elif rng.random() < 0.5:
            variable = name.strip("-").replace("-", "_").upper()
            words.append(f"{name} ${variable}")
            told[variable] = value
        else:
            told[name] = value
    script = tmp_path / "run.sh"
    launcher = rng.choice(("torchrun --nproc_per_node 8", "torchrun --nproc_per_node $GPUS"))
    script.write_text(f"{launcher} pretrain_gpt.py {COMPLETE} {' '.join(words)}\n")
    with pytest.raises(BadInput) as refusal:
        read_flags(script, on="H100")
    asked = shlex.split(refusal.value.reasons[0].nearest)
    names = {word.partition("=")[0] for word in asked if "=" in word}
    assert names == told.keys()
    count = next((after for word, after in pairwise(asked) if word == "--on"), "H100")
    assert (count == "8xH100") == ("$GPUS" in launcher)
    answered = [f"{name}={value}" for name, value in told.items()]
    plan = read_flags(script, on=count, overrides=answered).plan
    whole = " ".join(f"{name} {value}" for name, value in OPTIONS)
    script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {COMPLETE} {whole}\n")
    assert plan == read_flags(script, on="H100").plan


def test_an_answer_that_changes_nothing_is_not_offered(tmp_path: Path):
    asked = Reason(field="--num-layers", rule="is missing", nearest="--set --num-layers=...")
    refusal = gather_requests(BadInput(asked), NO_ADDITIONS, lambda _: BadInput(asked))
    assert refusal.reasons[0].nearest == ""


def test_what_is_wrong_with_a_made_up_value_is_not_asked_for():
    asked = Reason(field="--hidden-size", rule="is missing", nearest="--set --hidden-size=...")
    wrong = Reason(field="--num-attention-heads", rule="must divide it", nearest="16")
    answers = iter((BadInput(wrong), None))
    refusal = gather_requests(BadInput(asked), NO_ADDITIONS, lambda _: next(answers))
    assert refusal.reasons == (asked,)


def test_a_program_that_no_launcher_starts_is_offered_one_device(tmp_path: Path):
    script = tmp_path / "run.sh"
    whole = " ".join(f"{name} {value}" for name, value in OPTIONS if "parallel" not in name)
    script.write_text(f"python pretrain_gpt.py {SWITCHES} {whole}\n")
    with pytest.raises(BadInput, match=r"one process.*1xH100"):
        read_flags(script, on="H100")
    script.write_text(script.read_text().rstrip() + " --tensor-model-parallel-size 16\n")
    with pytest.raises(BadInput, match=r"one process.*16xH100"):
        read_flags(script, on="H100")
