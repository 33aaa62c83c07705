"""Upcycling: the tensors of a dense model become those of one with experts, layer by layer.

rules.upcycling says which tensor becomes which.

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
from moewright.engine.hf.import_weights import read_parameter_box
from moewright.engine.model.transformer import draw_normal
from moewright.rules.shapes.param import Param
from moewright.rules.shapes.parameters import parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec
from moewright.spec.upcycling import UpcyclingSpec
from moewright.spec.workload import CheckpointSpec

# Reads a parameter of the dense model: all of it, in fp32.
ReadParameter = Callable[[Param], torch.Tensor]

_DENSE_MLP = ".mlp."
_MOE_EXPERTS = ".moe.experts."


def read_checkpoint_model(path: Path) -> ModelSpec:
    """Read which model the newest checkpoint at `path` is of.

    Raises:
        BadInput: when there is no checkpoint, or it does not say so.
    """
    checkpoint = find_checkpoint(path)
    data = read_index(checkpoint).extra.get("model")
    if data is None:
        raise BadInput(Reason(field=str(checkpoint), rule="does not say which model it is of"))
    return from_data(ModelSpec, data, where=str(checkpoint))


@contextmanager
def open_checkpoint_parameters(path: Path) -> Iterator[ReadParameter]:
    """Open the newest checkpoint at `path`, once the checksum of every file holds.

    Raises:
        BadInput: when there is no checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(path)
    index = read_index(checkpoint)
    for file in index.files:
        verify_file(checkpoint, file)
    tensors = {tensor.name: tensor for tensor in index.tensors}
    with PayloadReader(checkpoint) as reader:

        def read_parameter(param: Param) -> torch.Tensor:
            offsets = (0,) * len(param.shape)
            return read_tensor_box(reader, tensors[param.name], offsets, param.shape)

        yield read_parameter


@contextmanager
def open_hf_parameters(model: ModelSpec, path: Path) -> Iterator[ReadParameter]:
    """Open a Hugging Face folder, once it is known to be of this model.

    Raises:
        BadInput: when it is not.
    """
    folder = open_hf_folder(path)
    table = names.build_name_table(model, folder)
    with HfReader(folder) as reader:

        def read_parameter(param: Param) -> torch.Tensor:
            offsets = (0,) * len(param.shape)
            return read_parameter_box(reader, table[param.name], offsets, param.shape)

        yield read_parameter


def upcycle(
    read_parameter: ReadParameter,
    dense: ModelSpec,
    model: ModelSpec,
    choice: UpcyclingSpec,
    *,
    seed: int,
    out: Path,
) -> Path:
    """Write `model`, which `choice` makes of `dense`, as a checkpoint in `out`; return its path.

    There is a file for each layer. At most one tensor of the dense model and one copy of it are in
    memory at a time.
    """
    dense_params = {param.name: param for param in parameters(dense)}
    params = {param.name: param for param in parameters(model)}
    up_factor, down_factor = choice.weight_factors

    def build_box(tensor: TensorEntry, shard: StoredShard) -> torch.Tensor:
        param = params[tensor.name]
        if param.name in dense_params:
            return read_parameter(dense_params[param.name])
        if not param.is_expert:
            return _build_router(model, param, choice, seed)
        dense_name = param.name.replace(_MOE_EXPERTS, _DENSE_MLP)
        weight = read_parameter(dense_params[dense_name])  # gate_up [2,F,H] or down [H,F]
        factor = down_factor if weight.dim() == 2 else up_factor
        # Slices of hidden units: [2,F,H] -> [G,2,F/G,H], and [H,F] -> [G,H,F/G].
        return weight.unflatten(1, (choice.granularity, -1)).transpose(0, 1) * factor

    request = SaveRequest(
        path=checkpoint_path(out, 0),
        step=0,
        extra={"model": to_data(model)},
        tensors=tuple(_plan_shards(param, choice) for param in params.values()),
        shards=(),
        retention=CheckpointSpec(),
    )
    return write_single_process(request, build_box)


def _plan_shards(param: Param, choice: UpcyclingSpec) -> TensorEntry:
    """Plan a box for each copy of an MLP, and one for any other tensor."""
    rows = choice.granularity if param.is_expert else param.shape[0]
    file = payload_file_name(param.layer + 1)  # the embedding's layer is -1
    inner_offsets = (0,) * (len(param.shape) - 1)
    shards = (
        StoredShard(box=((first, *inner_offsets), (rows, *param.shape[1:])), file=file)
        for first in range(0, param.shape[0], rows)
    )
    return TensorEntry(name=param.name, dtype="F32", shape=param.shape, shards=tuple(shards))


def _build_router(model: ModelSpec, param: Param, choice: UpcyclingSpec, seed: int) -> torch.Tensor:
    """Build [E,H]: a random row for each copy, the same for all of its slices."""
    shape = (choice.copies, model.hidden_size)
    rows = draw_normal(seed, param.name, shape, model.initializer_range)
    return rows.repeat_interleave(choice.granularity, 0)
