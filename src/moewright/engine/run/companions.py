"""What belongs to weights in a Hugging Face folder: tokenizer, generation config, model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moewright.codec import PLAN_FILE, read_json, read_json_data
from moewright.codec.files import as_table, name_model
from moewright.engine.data.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    find_token_id,
    load_tokenizer,
    read_eos_token,
)
from moewright.engine.hf.export_weights import Companions
from moewright.engine.hf.folder import is_hf_folder
from moewright.rules.batch_rampup import step_samples
from moewright.spec.plan import Plan
from moewright.version import __version__

GENERATION_FILE = "generation_config.json"
CARD_FILE = "README.md"
# Files that are taken as they are.
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def plan_companions(checkpoint: Path, tokenizer: Path | None = None) -> Companions:
    """Return what goes beside the weights of a run's checkpoint.

    The tokenizer is that of the folder `tokenizer`, else that of the folder which the run started
    from, else that of its data; a checkpoint of no run has none. A model card names what the run
    began with and how far it went.

    Raises:
        BadInput: when a file of them is damaged.
    """
    plan = _find_plan(checkpoint)
    folders = [] if tokenizer is None else [tokenizer]
    if plan is not None:
        folders += [Path(plan.workload.weights)] if plan.workload.weights else []
        folders += [Path(plan.workload.data.tokenizer).parent] if _has_tokenizer(plan) else []
    base = None
    if plan is not None and plan.workload.weights and is_hf_folder(Path(plan.workload.weights)):
        base = Path(plan.workload.weights)
    folder = next((path for path in folders if (path / TOKENIZER_FILE).is_file()), None)
    texts = {} if plan is None else {CARD_FILE: _write_card(plan, checkpoint)}
    if folder is None:
        return Companions(texts=texts, base=base)
    copies = {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    eos_token = _find_eos(folder)
    if TOKENIZER_CONFIG_FILE not in copies:
        # The class of transformers that loads any tokenizer.json.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
        texts[TOKENIZER_CONFIG_FILE] = json.dumps(config, indent=2) + "\n"
    generation = _find_generation(folders)
    if generation is not None:
        copies[GENERATION_FILE] = generation
    else:
        texts[GENERATION_FILE] = _write_generation(folder, eos_token)
    return Companions(copies=copies, texts=texts, base=base)


def _has_tokenizer(plan: Plan) -> bool:
    return bool(plan.workload.data.tokenizer)


def _find_plan(checkpoint: Path) -> Plan | None:
    """Return the plan of the run that a checkpoint is of; None where it is of none."""
    # A run keeps its checkpoints two folders below its plan.
    path = checkpoint.absolute().parent.parent / PLAN_FILE
    return read_json(Plan, path) if path.is_file() else None


def _find_generation(folders: Sequence[Path]) -> Path | None:
    paths = (folder / GENERATION_FILE for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _find_eos(folder: Path) -> str:
    """Return the token that ends a text: the eos_token of the folder, or a document's end."""
    eos_token = read_eos_token(folder)
    if eos_token:
        return eos_token
    tokenizer = load_tokenizer(folder)
    return str(tokenizer.inner.id_to_token(tokenizer.end_of_document))


def _write_generation(folder: Path, eos_token: str) -> str:
    eos_id = find_token_id(folder / TOKENIZER_FILE, eos_token)
    data: dict[str, Any] = {"do_sample": False}
    if eos_id is not None:
        data |= {"eos_token_id": eos_id, "pad_token_id": eos_id}
    return json.dumps(data, indent=2) + "\n"


def _write_card(plan: Plan, checkpoint: Path) -> str:
    """Return the stub of a model card, as the hub reads it."""
    workload = plan.workload
    base = workload.weights
    name = name_model(Path(base)) if base else plan.model.name
    steps = int(checkpoint.name.rpartition("-")[2])
    sequences = step_samples(workload, steps).first  # a batch may grow
    length = (
        f"{steps:,} steps on {sequences:,} sequences of {workload.seq_len:,} tokens "
        f"({sequences * workload.seq_len:,} in all)"
    )
    if workload.batch_samples:  # as many sequences a step as its samples fill
        length = f"{steps:,} steps of {workload.batch_samples:,} samples"
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if base and "/" in name:  # the id of a model of the hub
        lines.append(f"base_model: {name}")
        base = f"{name}, revision {Path(base).name}"
    lines += ["tags:", "- moewright", "---", "", f"# {name}, trained with moewright", ""]
    lines.append(f"* Architecture: {plan.model.family}; weights in {workload.precision}.")
    lines.append(f"* Started from: {base or 'fresh weights'}.")
    lines.append(f"* Trained for {length}, task {workload.fine_tuning.task}.")
    lines.append(f"* Peak learning rate {workload.optimizer.lr:g}; moewright {__version__}.")
    lines += ["", "Data, evaluation, intended use and license: to be filled in by its author.", ""]
    return "\n".join(lines)


def read_generation_stops(folder: Path) -> tuple[int, ...]:
    """Return the ids at which generation stops, as a folder's generation config names them."""
    path = folder / GENERATION_FILE
    data = read_json_data(path) if path.is_file() else {}
    value = as_table(data).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(number for number in ids if isinstance(number, int))
