"""A torch_dist checkpoint of Megatron-LM becomes a checkpoint of ours.

It may have been saved in any TP, PP and EP: its tensors are whole, in chunks. One box is in memory
at a time. Weights become fp32, as all checkpoints of ours hold them. Where a job is to go on with
them, the main weights and the moments of AdamW come along, under that job's identity.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from moewright.codec import to_data
from moewright.codec.foreign import budget, read_apart
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    SaveRequest,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    payload_file_name,
    write_single_process,
)
from moewright.engine.hf.candidates import ModelTensor, list_model_tensors
from moewright.engine.hf.import_weights import plan_shards
from moewright.engine.torch_dist.metadata import METADATA_FILE, ChunkedTensor, TorchDistReader
from moewright.engine.torch_dist.names import PADDED, MegatronPlace, find_places
from moewright.engine.torch_dist.optimizer_state import LOSS_SCALE, UPDATES, find_states
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec, Dtype, Workload

# What a checkpoint of Megatron-LM holds beside tensors, read without executing its pickle.
#
# common.pt is a pickle in a zip file, of settings and counts, in classes of many modules. The
# reader here imports none of them: whatever the pickle names becomes an inert record.

COMMON_FILE = "common.pt"
_MAX_BYTES = 2**30  # of an unpacked member: pickles of metadata are small


class _Anything:
    """A record in the place of whatever a pickle names; what is done to it does nothing."""

    def __new__(cls, *values: Any, **fields: Any) -> _Anything:
        return super().__new__(cls)

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.values = values

    def __call__(self, *values: Any) -> _Anything:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def append(self, value: Any) -> None:
        """Drop a value."""

    def extend(self, values: Any) -> None:
        """Drop values."""

    def add(self, value: Any) -> None:
        """Drop a value."""

    # A pickle may use a record as a key.
    def __hash__(self) -> int:
        return id(self)


class _CommonReader(pickle.Unpickler):
    """A reader of a pickle that imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()


@read_apart
def read_common(folder: Path) -> Mapping[str, Any]:
    """Read what common.pt says in plain dictionaries, lists and numbers; {} without the file.

    Raises:
        BadInput: it is damaged.
    """
    path = folder / COMMON_FILE
    if not path.exists():
        return {}
    try:
        with budget(str(path), file_bytes=path.stat().st_size):
            archive = zipfile.ZipFile(path)
        with archive:
            (member,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if member.file_size > _MAX_BYTES:
                _refuse(path, "is longer than a gibibyte")
            with budget(str(path), file_bytes=path.stat().st_size), archive.open(member) as stream:
                common = _load(stream)
    except BadInput:
        raise
    except Exception as error:  # whatever bytes of a stranger make of an unpickler
        _refuse(path, f"cannot be read ({type(error).__name__}: {str(error)[:160]})")
    if not isinstance(common, dict):
        _refuse(path, "is no dictionary")
    return common


def _load(stream: IO[bytes]) -> Any:
    return _CommonReader(stream).load()


def _refuse(path: Path, rule: str) -> NoReturn:
    raise BadInput(Reason(field=str(path), rule=rule, nearest="a folder iter_*")) from None


_COUNT_END = 1 << 63  # a count is kept in int64


def find_counts(common: Any, name: str) -> Iterator[int]:
    """Yield every count under a name, wherever it stands: a whole number that int64 holds."""
    if isinstance(common, list | tuple):
        for value in common:
            yield from find_counts(value, name)
    if not isinstance(common, dict):
        return
    for key, value in common.items():
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if key == name and is_whole and 0 <= value < _COUNT_END:
            yield int(value)
        yield from find_counts(value, name)


TRACKER_FILE = "latest_checkpointed_iteration.txt"
# What is no weight: the optimizer, random states, the position in the data, and extra states.
_NO_WEIGHTS = re.compile(
    r"optimizer\.|rng_state|rerun_state|opt_param_scheduler|num_floating_point|"
    r".*_extra_state|chained_\d+\.|.*\.local_tokens_per_expert$"
)


def find_megatron_checkpoint(folder: Path) -> Path | None:
    """Return the torch_dist checkpoint that a folder is, or its newest one; None for neither."""
    if (folder / METADATA_FILE).is_file():
        return folder
    try:
        newest = (folder / TRACKER_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    name = f"iter_{int(newest):07d}" if newest.isdecimal() else newest
    path = folder / name
    # A name with folders in it would lead out of this one.
    if name and path.parent == folder and (path / METADATA_FILE).is_file():
        return path
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedJob:
    """The job that goes on with a checkpoint: what must be its own, and its numerics.

    `identity` is that of its checkpoints (run.restore).
    """

    identity: Mapping[str, Any]
    workload: Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronImportPlan:
    """A checkpoint of Megatron-LM that is known to be of a model, and what it becomes."""

    reader: TorchDistReader
    model: ModelSpec
    places: Mapping[str, tuple[MegatronPlace, ...]]
    counts: Mapping[str, torch.Tensor]  # small tensors of ours that are there as they stand
    request: SaveRequest

    @property
    def nbytes(self) -> int:
        return self.request.required_bytes


@read_apart
def plan_megatron_import(
    folder: Path, model: ModelSpec, out: Path, resumed: ResumedJob | None = None
) -> MegatronImportPlan:
    """Check that a checkpoint is of `model`, and plan what is written to `out`.

    With `resumed`, the state of the optimizer is read too, and `out` is the folder of its run.

    Raises:
        BadInput: naming the tensor that is missing, unknown, or of another shape.
    """
    reader = TorchDistReader(folder)
    names = {name for name in reader.tensors if not _NO_WEIGHTS.match(name)}
    has_depths = any(name.startswith("mtp.") for name in names)
    if model.mtp_layers and not has_depths and resumed is None:
        model = replace(model, mtp_layers=0)
    tensors = list_model_tensors(model)
    places = {tensor.name: find_places(model, tensor, names) for tensor in tensors}
    used = {name for part in places.values() for place in part for name in place.names}
    unknown = next(iter(sorted(names - used)), None)
    if unknown is not None:
        raise BadInput(
            Reason(field=f"{folder}: {unknown}", rule="is not a tensor of the model of config.json")
        )
    entries = list(plan_shards(tensors))
    counts: Mapping[str, torch.Tensor] = {}
    step = 0
    if resumed is not None:
        states = find_states(folder, (*reader.tensors, *reader.others))
        common = read_common(folder)
        step = _read_iteration(folder, common)
        path = folder / COMMON_FILE
        with budget(str(path)):  # what is named once may stand in many places
            updates = max(find_counts(common.get("optimizer"), "step"), default=step)
        counts = _build_counts(updates, resumed.workload)
        moments = []
        for tensor in tensors:
            if tensor.trained:
                own = _find_state_places(model, tensor, states)
                places |= own
                moments += [replace(tensor, name=name) for name in own if name != tensor.name]
        entries = [
            replace(entry, dtype=_stored_dtype(entry.name, resumed.workload))
            for entry in plan_shards((*tensors, *moments))
        ]
        entries += [_plan_count(name, count) for name, count in counts.items()]
    for entry in entries:
        for place in places.get(entry.name, ()):
            _check_shape(model, entry, place, reader.tensors)
    request = SaveRequest(
        path=checkpoint_path(out if resumed is None else out / "checkpoints", step),
        step=step,
        extra={"model": to_data(model)} if resumed is None else resumed.identity,
        tensors=tuple(entries),
        shards=(),
        retention=CheckpointSpec(),
    )
    return MegatronImportPlan(
        reader=reader, model=model, places=places, counts=counts, request=request
    )


def _read_iteration(folder: Path, common: Mapping[str, Any]) -> int:
    """Return the number of steps after which a checkpoint was saved."""
    iteration = common.get("iteration")
    if not isinstance(iteration, int) or iteration < 0:
        rule = "says no iteration, with which the schedule and the data go on"
        raise BadInput(Reason(field=str(folder / COMMON_FILE), rule=rule))
    return iteration


def _build_counts(updates: int, workload: Workload) -> Mapping[str, torch.Tensor]:
    """Return what checkpoints hold beside the tensors of parameters; losses are scaled anew."""
    counts = {UPDATES: torch.tensor([updates])}
    if workload.precision is Dtype.FP16:
        counts[LOSS_SCALE] = torch.tensor([workload.scaling.initial_loss_scale, 0.0])
    return counts


def _stored_dtype(name: str, workload: Workload) -> str:
    """Return the dtype in which the checkpoints of a job hold a tensor; narrow moments in bf16."""
    first, second = workload.optimizer.moment_dtypes
    moments = {"optim/exp_avg": first, "optim/exp_avg_sq": second}
    dtype = moments.get(name.rpartition("/")[0], Dtype.FP32)
    return "F32" if dtype is Dtype.FP32 else "BF16"


def _plan_count(name: str, count: torch.Tensor) -> TensorEntry:
    dtype = next(key for key, value in SAFETENSORS_DTYPES.items() if value == count.dtype)
    shard = StoredShard(box=((0,), tuple(count.shape)), file=payload_file_name(0))
    return TensorEntry(name=name, dtype=dtype, shape=tuple(count.shape), shards=(shard,))


def _find_state_places(
    model: ModelSpec, tensor: ModelTensor, states: Mapping[str, Mapping[str, str]]
) -> Mapping[str, tuple[MegatronPlace, ...]]:
    """Return the places of a parameter's main weight and moments, by our names.

    A weight in fp32 is its own main weight, and may have no other.
    """
    own = {}
    for prefix, names in states.items():
        try:
            places = find_places(model, tensor, names)
        except BadInput:
            if prefix:
                raise
            continue
        own[prefix + tensor.name] = tuple(
            replace(place, names=tuple(names[name] for name in place.names)) for place in places
        )
    return own


@read_apart
def run_megatron_import(
    plan: MegatronImportPlan, *, report_progress: Callable[[int], None]
) -> Path:
    """Write the checkpoint and return its path; all of it is committed, or nothing.

    `report_progress` is called with the bytes that were read so far.
    """
    done = 0

    def build_box(tensor: TensorEntry, shard: StoredShard) -> torch.Tensor:
        nonlocal done
        if tensor.name in plan.counts:
            return plan.counts[tensor.name]
        box = read_model_box(plan, tensor.name, tensor.shape, shard)
        done += box.nbytes
        report_progress(done)
        return box.to(SAFETENSORS_DTYPES[tensor.dtype])

    return write_single_process(plan.request, build_box)


def read_model_box(
    plan: MegatronImportPlan, name: str, shape: tuple[int, ...], shard: StoredShard
) -> torch.Tensor:
    """Return some rows, or some experts, of one of our tensors."""
    places = plan.places[name]
    (first, *_), (count, *_) = shard.box
    if len(places) > 1 or "moe.experts." in name:
        experts = [_read_part(plan, place, shape[1:]) for place in places[first : first + count]]
        return torch.stack(experts)
    rows = 0
    if name.rpartition("/")[2] in PADDED:
        rows = shape[0]
    whole = _read_part(plan, places[0], shape, rows)
    return whole[first : first + count].contiguous()


def _read_part(
    plan: MegatronImportPlan, place: MegatronPlace, shape: tuple[int, ...], rows: int = 0
) -> torch.Tensor:
    """Read what a place says in the shape of ours; `rows` leaves out rows that pad."""
    halves = []
    for name in place.names:
        stored = plan.reader.tensors[name].shape
        lead = len(place.index)
        sizes = ((rows or stored[lead]), *stored[lead + 1 :])
        offsets = (*place.index, *(0,) * len(sizes))
        box = plan.reader.read_box(name, offsets, (*(1,) * lead, *sizes))
        halves.append(box.reshape(sizes))
    value = torch.cat(halves)
    if place.part:
        value = _split_heads(plan.model, value)[place.part]
    return value.reshape(shape)


def _split_heads(model: ModelSpec, merged: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Split query, key and value, which lie group by group."""
    attention = model.attention
    groups = attention.kv_heads
    queries = attention.heads // groups
    grouped = merged.reshape(groups, queries + 2, attention.head_dim, *merged.shape[1:])
    return {
        "q": grouped[:, :queries].flatten(0, 2),
        "k": grouped[:, queries].flatten(0, 1),
        "v": grouped[:, queries + 1].flatten(0, 1),
    }


def _check_shape(
    model: ModelSpec,
    tensor: TensorEntry,
    place: MegatronPlace,
    stored: Mapping[str, ChunkedTensor],
) -> None:
    """Raise BadInput where a stored tensor cannot hold what a place says of it."""
    expected = tensor.shape[1:] if "moe.experts." in tensor.name else tensor.shape
    numel = 1
    for size in expected:
        numel *= size
    if place.part:
        attention = model.attention
        rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        numel = rows * (expected[1] if len(expected) > 1 else 1)
    if tensor.name.rpartition("/")[2] in PADDED:
        shape = stored[place.names[0]].shape
        if len(shape) == 2 and shape[0] >= expected[0] and shape[1] == expected[1]:
            return
    numel_stored = 0
    for name in place.names:
        lead = len(place.index)
        shape = stored[name].shape
        is_inside = len(shape) > lead and all(
            index < size for index, size in zip(place.index, shape, strict=False)
        )
        part = 1
        for size in shape[lead:]:
            part *= size
        numel_stored += part if is_inside else 0
    if numel_stored != numel:
        shapes = ", ".join(str(list(stored[name].shape)) for name in place.names)
        rule = f"has the shape {shapes}, which does not hold {list(expected)} of config.json"
        raise BadInput(Reason(field=place.names[0], rule=rule))
