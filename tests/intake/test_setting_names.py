"""No word of a configuration vanishes: misspelt, it refuses, changes the answer or is named."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moewright.intake import catalogue
from moewright.intake.megatron.dialects import list_dialects
from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.read import ScriptJob, interpret_launch, read_launch
from moewright.intake.megatron.unread import find_topic, list_harmless, read_table
from moewright.spec.errors import BadInput

CONFIGURATIONS = Path(__file__).parent / "configurations"
FILES = sorted(path.name for path in CONFIGURATIONS.iterdir())
WORLD = 16


def read(text: str, path: Path) -> ScriptJob:
    path.write_text(text)
    command = read_launch(path, {})
    named = catalogue.model(command.model) if command.model else None
    return interpret_launch(command, world_size=WORLD, folder=path.parent, named_model=named)


def misspell(text: str) -> Iterator[tuple[str, str]]:
    """Yield (the misspelt word, the text with it) for each key, section or option of a text."""
    for place, word in find_words(text):
        wrong = word[:-2] + word[-1] + word[-2] if word[-1] != word[-2] else word[:-1] + "x"
        yield wrong, text[:place] + wrong + text[place + len(word) :]


def find_words(text: str) -> Iterator[tuple[int, str]]:
    is_script = text.startswith("#!")
    pattern = (
        r"(?<=\s)--[\w-]{4,}" if is_script else r"(?:(?<=^)|(?<=[\s{,]))[\w-]{4,}(?=:(?:\s|$))"
    )
    for match in re.finditer(pattern, text, re.MULTILINE):
        yield match.start(), match[0]


@pytest.mark.parametrize("name", FILES)
def test_a_misspelt_word_never_goes_unsaid(name, tmp_path):
    text = (CONFIGURATIONS / name).read_text()
    right = read(text, tmp_path / name)
    answer = (right.model, right.workload, right.layout)
    silent = []
    count = 0
    for wrong, misspelt in misspell(text):
        count += 1
        try:
            job = read(misspelt, tmp_path / name)
        except BadInput:
            continue
        is_named = any(wrong.strip("-") in note for note in job.notes)
        if (job.model, job.workload, job.layout) == answer and not is_named:
            silent.append(wrong)
    assert count > 10
    assert silent == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_a_file_is_its_own_framework_by_its_marks(name, tmp_path):
    expected = {
        "bridge": "Megatron Bridge",
        "flagscale": "FlagScale",
        "megatron": "Megatron-LM",
        "mindspeed_rl": "MindSpeed-RL",
        "nemo": "NeMo 1",
        "nemo_rl": "NeMo-RL",
        "primus": "Primus",
        "roll": "ROLL",
        "skyrl": "SkyRL",
        "verl": "verl",
        "verl_supervised": "verl's supervised trainer",
    }.get(name.removesuffix(".yaml"))
    notes = read((CONFIGURATIONS / name).read_text(), tmp_path / name).notes
    spoken = [note for note in notes if note.startswith("a configuration of ")]
    assert [note.partition(":")[0] for note in spoken] == (
        [f"a configuration of {expected}"] if expected else []
    )


def test_the_closed_list_says_nothing_of_what_a_plan_is_read_from():
    """An option of the layout, the batches or the precision is never taken for harmless."""
    sure = [
        name
        for name in option_table()
        if "model-parallel-size" in name or name in ("--micro-batch-size", "--bf16", "--fp16")
    ]
    reading = [name for name in sure if not name.startswith("--rl-")]
    for name in reading:
        assert not any(entry.covers(name, ("megatron",)) for entry in list_harmless()), name
    assert all(find_topic(name) for name in reading)


def test_each_dialect_has_its_table():
    for dialect in list_dialects():
        for table in dialect.tables:
            assert len(read_table(table)) > 50


# Numbers that a plan does not depend on although they stand beside what it is read from, by the
# last part of their names, with the reason.
WITHOUT_EFFECT = {
    "ranks, which this test gives beside the file": (
        *("nnodes", "nproc_per_node", "num_nodes", "devices", "num_npus"),
        *("num_gpus_per_node", "policy_num_nodes", "policy_num_gpus_per_node"),
    ),
    "how often something is printed, checked or swept": (
        *("log_interval", "log_every_n_steps", "val_check_interval", "limit_val_batches"),
        "gc_interval",
    ),
    "of saves, where no folder is given": ("save_interval", "save_steps"),
    "of the data and its draws": ("split", "seed", "dataset_num_proc"),
    "of the ranks that generate": ("infer_tensor_parallel_size",),
    "of a rollout, of which the actor takes mini-batches of their own size": (
        *("global_batch_size", "seq_length", "rollout_batch_size"),
    ),
}
# Files in which the last of these holds: elsewhere they are the batch that is planned.
OF_ROLLOUTS = ("mindspeed_rl.yaml", "roll.yaml")


def double_numbers(text: str) -> Iterator[tuple[str, str]]:
    """Yield (the name, the text with the number twice as large) for each whole number of a text."""
    is_script = text.startswith("#!")
    pattern = r"(--[\w-]+)[ =](\d+)(?=\s)" if is_script else r"([\w-]+): (\d+)(?=\s*(?:#.*)?$)"
    for match in re.finditer(pattern, text, re.MULTILINE):
        if int(match[2]):
            twice = str(int(match[2]) * 2)
            yield match[1], text[: match.start(2)] + twice + text[match.end(2) :]


def list_unsaid(name: str, folder: Path) -> Iterator[str]:
    """Yield the numbers of a golden configuration that change nothing and are not named."""
    text = (CONFIGURATIONS / name).read_text()
    right = read(text, folder / name)
    answer = (right.model, right.workload, right.layout)
    for word, doubled in double_numbers(text):
        try:
            job = read(doubled, folder / name)
        except BadInput:
            continue
        is_named = any(word.strip("-") in note for note in job.notes) or job.notes != right.notes
        if (job.model, job.workload, job.layout) == answer and not is_named:
            yield word


@pytest.mark.parametrize("name", FILES)
def test_a_number_changes_the_answer_or_is_known_to_change_none(name, tmp_path):
    reasons = list(WITHOUT_EFFECT.values())
    known = {word for words in reasons[: None if name in OF_ROLLOUTS else -1] for word in words}
    unsaid = {word.strip("-").replace("-", "_") for word in list_unsaid(name, tmp_path)}
    assert unsaid <= known
