"""Adapters of a run: in PEFT's format, or merged into the weights that they were trained beside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moewright.codec import from_data
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    CheckpointIndex,
    PayloadReader,
    TensorHeader,
    read_index,
    read_tensor_box,
    verify_file,
    write_tensors,
    write_text,
)
from moewright.engine.hf.candidates import HfTensor
from moewright.engine.hf.export_weights import Companions, parse_stored_model, write_folder
from moewright.engine.hf.folder import HfReader, fingerprint_hf_folder, is_hf_folder, open_hf_folder
from moewright.engine.hf.names import (
    NameTable,
    build_name_table,
    family_name_table,
    find_nesting,
)
from moewright.engine.hf.packed import PACKED_DTYPES
from moewright.families.table import find_family
from moewright.rules.adapters import ADAPTER_PARTS, adapter_parameters
from moewright.rules.shapes.param import Param
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import FineTuningSpec, Task

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
# PEFT's model wraps that of transformers under this name.
_PEFT_PREFIX = "base_model.model."
# PEFT refuses adapters of these, which Mamba's kernels multiply by themselves
# (`_check_lora_target_modules_mamba`).
_NO_MODULES = (".mixer.out_proj",)
_PEFT_PARTS = ("lora_A", "lora_B")
_TEXT_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapters:
    """The adapters of a checkpoint, and the base that they were trained beside."""

    checkpoint: Path
    index: CheckpointIndex
    model: ModelSpec
    fine_tuning: FineTuningSpec
    base: str  # fingerprint of the base's folder, or the path of a checkpoint


def find_adapters(checkpoint: Path) -> StoredAdapters | None:
    """Return the adapters that a checkpoint holds; None where it holds whole weights."""
    index = read_index(checkpoint)
    train = index.extra.get("train", {})
    if not isinstance(train, dict) or "fine_tuning" not in train:
        return None
    fine_tuning = from_data(FineTuningSpec, train["fine_tuning"], where=f"{checkpoint}: train")
    if fine_tuning.task is not Task.LORA:
        return None
    return StoredAdapters(
        checkpoint=checkpoint,
        index=index,
        model=parse_stored_model(index, checkpoint),
        fine_tuning=fine_tuning,
        base=str(train.get("base", "")),
    )


def export_peft(adapters: StoredAdapters, out: Path, *, base: str) -> None:
    """Write a folder that `peft` loads onto the base: its configuration, and the matrices in fp32.

    Raises:
        BadInput: when `out` holds something, or the model has weights that PEFT has no name for.
    """
    table = _find_names(adapters.model, Path(base))
    headers = []
    sources = []
    for param, part in _iterate_parts(adapters):
        for hf_tensor in table[_base_name(param)]:
            module = _module_name(adapters.model, hf_tensor)
            lead = len(hf_tensor.index)
            name = f"{_PEFT_PREFIX}{module}.{_PEFT_PARTS[part]}.weight"
            # The second matrix has a row for each row of the weight.
            rows = hf_tensor.rows if part else ()
            count = sum(map(len, rows)) or param.shape[lead]
            shape = (count, *param.shape[lead + 1 :])
            headers.append(TensorHeader(name=name, dtype="F32", shape=shape))
            sources.append((name, param.name, hf_tensor.index, rows))
    modules = {name.removeprefix(_PEFT_PREFIX).rpartition(".lora_")[0] for name, *_ in sources}
    # By name, as safetensors' own writer lays out tensors of one dtype.
    order = sorted(range(len(headers)), key=lambda place: headers[place].name)

    def read(reader: PayloadReader) -> Iterator[torch.Tensor]:
        for place in order:
            _, own_name, index, rows = sources[place]
            value = _read_part(adapters.index, reader, own_name, index)
            yield torch.cat([value[part.start : part.stop] for part in rows]) if rows else value

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.fine_tuning.lora_rank,
        "lora_alpha": adapters.fine_tuning.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **_list_targets(adapters, modules),
    }
    nbytes = sum(header.nbytes for header in headers)
    with write_folder(out, nbytes) as working, PayloadReader(adapters.checkpoint) as reader:
        for entry in adapters.index.files:
            verify_file(adapters.checkpoint, entry)
        write_tensors(
            working / _WEIGHTS_FILE, [headers[place] for place in order], read(reader), {}
        )
        write_text(working / _CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _list_targets(adapters: StoredAdapters, modules: Collection[str]) -> dict[str, object]:
    """Return the fields of PEFT's configuration that name what has an adapter.

    That is modules, and parameters where transformers has no module of a linear's own. Linears that
    one parameter has side by side add up their ranks.
    """
    patterns = find_family(adapters.model.family).weights.module_parameters
    linears: dict[str, set[str]] = {}
    plain = []
    for module in sorted(modules):
        matches = (
            match.expand(parameter)
            for pattern, parameter in patterns.items()
            if (match := re.fullmatch(pattern, module))
        )
        parameter = next(matches, None)
        if parameter is None:
            plain.append(module)
        else:
            linears.setdefault(parameter, set()).add(module.rpartition(".")[2])
    fields: dict[str, object] = {"target_modules": plain}
    if linears:
        fields["target_parameters"] = sorted(linears)
    stacks = {name: len(parts) for name, parts in linears.items() if len(parts) > 1}
    if stacks:
        tuning = adapters.fine_tuning
        fields["rank_pattern"] = {name: n * tuning.lora_rank for name, n in stacks.items()}
        fields["alpha_pattern"] = {name: n * tuning.lora_alpha for name, n in stacks.items()}
    return fields


def _find_names(model: ModelSpec, base: Path) -> NameTable:
    """Return the names of a base whose language model is nested; else those of the family."""
    if is_hf_folder(base):
        folder = open_hf_folder(base)
        if find_nesting(folder.tensors):
            return build_name_table(model, folder)
    return family_name_table(model)


def export_merged(
    adapters: StoredAdapters,
    base: Path,
    out: Path,
    companions: Companions,
    on_progress: Callable[[int], None],
) -> None:
    """Write the base with the adapters added to its weights, in its own files and dtypes.

    Raises:
        BadInput: when `base` is not the folder that the adapters were trained beside, is packed, or
            `out` holds something.
    """
    folder = open_hf_folder(base)
    if fingerprint_hf_folder(base) != adapters.base:
        rule = f"is not the base that the adapters of {adapters.checkpoint} were trained beside"
        raise BadInput(Reason(field=str(base), rule=rule))
    if any(stored.dtype in PACKED_DTYPES for stored in folder.tensors.values()):
        rule = "holds packed weights, to which nothing can be added"
        nearest = "the adapters in PEFT's format: --adapters"
        raise BadInput(Reason(field=str(base), rule=rule, nearest=nearest))
    table = build_name_table(adapters.model, folder)
    deltas = _map_deltas(adapters, table)
    nbytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    with write_folder(out, nbytes) as working, PayloadReader(adapters.checkpoint) as reader:
        for entry in adapters.index.files:
            verify_file(adapters.checkpoint, entry)

        def read(names: Sequence[str], hf_reader: HfReader) -> Iterator[torch.Tensor]:
            for name in names:
                value = hf_reader.read(name)
                if name in deltas:
                    parts = [_read_delta(adapters, reader, *source) for source in deltas[name]]
                    value = (value.float() + torch.cat(parts)).to(
                        SAFETENSORS_DTYPES[folder.tensors[name].dtype]
                    )
                yield value
                on_progress(value.nbytes)

        for file, names in folder.files.items():
            headers = [
                TensorHeader(
                    name=name, dtype=folder.tensors[name].dtype, shape=folder.tensors[name].shape
                )
                for name in names
            ]
            with HfReader(folder) as hf_reader:
                write_tensors(working / file, headers, read(names, hf_reader), {"format": "pt"})
        for name in _TEXT_FILES:
            if (base / name).is_file():
                shutil.copyfile(base / name, working / name)
        for name, text in companions.texts.items():
            write_text(working / name, text)
        for name, path in companions.copies.items():
            shutil.copyfile(path, working / name)


def _map_deltas(
    adapters: StoredAdapters, table: NameTable
) -> Mapping[str, Sequence[tuple[str, HfTensor]]]:
    """Map the tensors of a base that have an adapter to the weights of ours that they are part of.

    Raises:
        BadInput: for experts that a tensor holds together.
    """
    deltas: dict[str, list[tuple[str, HfTensor]]] = {}
    for param, part in _iterate_parts(adapters):
        if part:
            continue
        name = _base_name(param)
        for hf_tensor in table[name]:
            if hf_tensor.dim_order:
                rule = "holds all experts, into which the engine merges no adapters yet"
                raise BadInput(Reason(field=hf_tensor.name, rule=rule))
            deltas.setdefault(hf_tensor.name, []).append((name, hf_tensor))
    return deltas


def _read_delta(
    adapters: StoredAdapters, reader: PayloadReader, name: str, hf_tensor: HfTensor
) -> torch.Tensor:
    """Return what an adapter adds to a tensor of the base, or to rows of it, in fp32."""
    stem = name.removesuffix("weight")
    a, b = (
        _read_part(adapters.index, reader, f"{stem}{part}.weight", hf_tensor.index)
        for part in ADAPTER_PARTS
    )
    factor = adapters.fine_tuning.lora_alpha / adapters.fine_tuning.lora_rank
    return hf_tensor.to_hf(b @ a * factor)


def _iterate_parts(adapters: StoredAdapters) -> Iterator[tuple[Param, int]]:
    """Yield the matrices of all adapters, with 0 for the first of each and 1 for the second."""
    for place, param in enumerate(adapter_parameters(adapters.model, adapters.fine_tuning)):
        yield param, place % 2


def _base_name(param: Param) -> str:
    stem, _, _ = param.name.removesuffix(".weight").rpartition(".")
    return f"{stem}.weight"


def _module_name(model: ModelSpec, hf_tensor: HfTensor) -> str:
    module = hf_tensor.name.removesuffix(".weight")
    is_part = bool(hf_tensor.dim_order or hf_tensor.fused_shape)
    is_part |= bool(hf_tensor.whole_shape and not hf_tensor.rows)
    if is_part or module == hf_tensor.name:
        rule = "is no module of its own, so PEFT has no name for its adapter"
        nearest = "the merged weights"
        if ".experts." in hf_tensor.name:
            nearest = "train.lora_experts = false, or the merged weights"
        raise BadInput(Reason(field=hf_tensor.name, rule=rule, nearest=nearest))
    if module.endswith(_NO_MODULES):
        rule = "is multiplied inside of Mamba's kernels, so PEFT takes no adapter of it"
        raise BadInput(Reason(field=hf_tensor.name, rule=rule, nearest="the merged weights"))
    for part, own in find_family(model.family).weights.module_names.items():
        module = module.replace(part, own)
    return module


def _read_part(
    index: CheckpointIndex, reader: PayloadReader, name: str, part: tuple[int, ...]
) -> torch.Tensor:
    entry = next((entry for entry in index.tensors if entry.name == name), None)
    if entry is None:
        raise BadInput(Reason(field=name, rule="is not in the checkpoint"))
    lead = len(part)
    shape = entry.shape[lead:]
    box = read_tensor_box(reader, entry, (*part, *(0,) * len(shape)), (*(1,) * lead, *shape))
    return box.view(shape)
