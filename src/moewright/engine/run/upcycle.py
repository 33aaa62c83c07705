"""Upcycling: the tensors of a dense model as those of one with experts, layer by layer
(rules.upcycling says which).

Why the default changes nothing (docs/adr/0014): the hidden units of a gated MLP do not mix, so the
sum over slices of down_g(silu(gate_g x) * up_g x) is the MLP. All slices of a copy have one logit,
hence all or none are among the top k, with one weight; the weights of the chosen sum to 1, so those
of the slices with number g sum to 1 / G, whichever copies were chosen. Down times G makes that the
MLP again: for every token and every router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moewright.codec import from_data, to_data
from moewright.engine.checkpoint import (
    PayloadReader,
    SaveRequest,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    find_checkpoint,
    payload_file_name,
    read_index,
    read_tensor_box,
    verify_file,
    write_single_process,
)
from moewright.engine.hf import names
from moewright.engine.hf.folder import HfReader, open_hf_folder
from moewright.engine.model.transformer import draw_normal
from moewright.rules.parameters import Param, parameters
from moewright.rules.upcycling import UpcyclingSpec
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec

ReadParameter = Callable[[Param], torch.Tensor]  # a parameter of the dense model, whole, fp32

_MLP, _EXPERTS = ".mlp.", ".moe.experts."


def read_checkpoint_model(path: Path) -> ModelSpec:
    """The model of our newest checkpoint at `path`. Raises BadInput when there is none."""
    checkpoint = find_checkpoint(path)
    found = read_index(checkpoint).extra.get("model")
    if found is None:
        raise BadInput(Reason(field=str(checkpoint), rule="does not say which model it is of"))
    return from_data(ModelSpec, found, where=str(checkpoint))


@contextmanager
def open_checkpoint_parameters(path: Path) -> Iterator[ReadParameter]:
    """Parameters of our newest checkpoint at `path`, once the checksum of every file holds. Raises
    BadInput."""
    checkpoint = find_checkpoint(path)
    index = read_index(checkpoint)
    for file in index.files:
        verify_file(checkpoint, file)
    tensors = {tensor.name: tensor for tensor in index.tensors}
    with PayloadReader(checkpoint) as reader:
        yield lambda param: read_tensor_box(
            reader, tensors[param.name], (0,) * len(param.shape), param.shape
        )


@contextmanager
def open_hf_parameters(model: ModelSpec, path: Path) -> Iterator[ReadParameter]:
    """Parameters of a Hugging Face folder, once it is known to be of this model. Raises
    BadInput."""
    folder = open_hf_folder(path)
    table = names.build_name_table(model, folder)
    with HfReader(folder) as reader:
        yield lambda param: names.read_parameter_box(
            reader, table[param.name], (0,) * len(param.shape), param.shape
        )


def upcycle(
    read_parameter: ReadParameter,
    dense: ModelSpec,
    model: ModelSpec,
    choice: UpcyclingSpec,
    *,
    seed: int,
    out: Path,
) -> Path:
    """Write `model`, which `choice` makes of `dense`, as a checkpoint in `out`; its path.

    A file a layer; what is in memory at a time is one tensor of the dense model and one copy of it.
    """
    ours = {param.name: param for param in parameters(dense)}
    theirs = {param.name: param for param in parameters(model)}
    up, down = choice.weight_factors

    def made(tensor: TensorEntry, shard: StoredShard) -> torch.Tensor:
        param = theirs[tensor.name]
        if param.name in ours:
            return read_parameter(ours[param.name])
        if not param.is_expert:
            return _build_router(model, param, choice, seed)
        whole = read_parameter(ours[param.name.replace(_EXPERTS, _MLP)])  # [2,F,H] or [H,F]
        return whole.unflatten(1, (choice.granularity, -1)).transpose(0, 1) * (
            down if whole.dim() == 2 else up
        )

    order = SaveRequest(
        path=checkpoint_path(out, 0),
        step=0,
        extra={"model": to_data(model)},
        tensors=tuple(_plan_shards(param, choice) for param in theirs.values()),
        pieces=(),
        retention=CheckpointSpec(),
    )
    return write_single_process(order, made)


def _plan_shards(param: Param, choice: UpcyclingSpec) -> TensorEntry:
    """A box a copy of an MLP, and one for any other tensor."""
    rows = choice.granularity if param.is_expert else param.shape[0]
    shards = (
        StoredShard(
            box=((first, *(0,) * (len(param.shape) - 1)), (rows, *param.shape[1:])),
            file=payload_file_name(param.layer + 1),  # the embedding's is -1
        )
        for first in range(0, param.shape[0], rows)
    )
    return TensorEntry(name=param.name, dtype="F32", shape=param.shape, shards=tuple(shards))


def _build_router(model: ModelSpec, param: Param, choice: UpcyclingSpec, seed: int) -> torch.Tensor:
    """[E,H]: a random row a copy, the same for all of its slices."""
    rows = draw_normal(
        seed, param.name, (choice.copies, model.hidden_size), model.initializer_range
    )
    return rows.repeat_interleave(choice.granularity, 0)
