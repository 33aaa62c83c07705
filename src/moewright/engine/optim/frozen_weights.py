"""Weights that do not train: in the compute dtype or in fewer bits, without any states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import all_gather_rows
from moewright.engine.kernels.packed_base import Fp8Weight, Nf4Weight, pack_fp8, pack_nf4
from moewright.engine.model.layers import NamedParameter
from moewright.engine.optim.optimizer_states import OwnedRange, build_local_shards
from moewright.engine.runtime import Runtime
from moewright.engine.torch_private import storage_id
from moewright.rules.packed_base import is_packed
from moewright.spec.ledger import Component, MemoryRow
from moewright.spec.workload import BaseQuantization, FineTuningSpec


class FrozenWeights:
    """The frozen weights of this rank, each a tensor of its own, or packed in several.

    Every rank holds its whole shard: there is nothing of them to share out over data parallelism.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Sequence[NamedParameter],
        initial_value: Callable[[NamedParameter], torch.Tensor],
    ) -> None:
        self._runtime = runtime
        fine_tuning = runtime.workload.fine_tuning
        self._parameters = tuple(
            parameter for parameter in parameters if not _is_packed(parameter, fine_tuning)
        )
        self.packed_parameters = tuple(
            parameter for parameter in parameters if _is_packed(parameter, fine_tuning)
        )
        self._packed: dict[str, Nf4Weight | Fp8Weight] = {}
        for parameter in self._parameters:
            value = initial_value(parameter).to(runtime.device, runtime.dtype)
            parameter.owner.weight = nn.Parameter(value, requires_grad=False)
        runtime.saved_tensors.holds_packed |= bool(self.packed_parameters)
        for parameter in self.packed_parameters:
            value = initial_value(parameter)
            del parameter.owner.weight
            self.pack(parameter, value)
        self._storages = {storage_id(parameter.parameter) for parameter in self._parameters}

    def pack(self, parameter: NamedParameter, value: torch.Tensor) -> None:
        """Hold this rank's part of a weight in fewer bits; all ranks of its cut call this."""
        runtime = self._runtime
        placement = parameter.placement
        axis_of_dim = {dim: axis for axis, dim in placement.sharding}

        def gather(part: torch.Tensor, dim: int) -> torch.Tensor:
            # The last two dims of a weight are rows and columns; those of its scales are 1 and 2.
            axis = axis_of_dim[len(placement.global_shape) - 3 + dim]
            group = runtime.mesh.group(axis)
            rows = all_gather_rows(part.transpose(0, dim).contiguous(), group)
            return rows.transpose(0, dim)

        own: Nf4Weight | Fp8Weight
        if runtime.workload.fine_tuning.quantize_base is BaseQuantization.FP8:
            own = pack_fp8(value, runtime.dtype, runtime.device)
        else:
            own = pack_nf4(
                value,
                runtime.dtype,
                runtime.device,
                placement.global_shape,
                placement.offsets,
                gather,
            )
        self._packed[parameter.name] = own
        parameter.owner.unpack = lambda: runtime.saved_tensors.note_unpacked(
            own.unpack(), own.unpack
        )

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in one of them."""
        return storage_id(tensor) in self._storages

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of which `memory_rows` has the bytes."""
        yield from (parameter.parameter for parameter in self._parameters)
        for own in self._packed.values():
            yield from own.tensors

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of each."""
        nbytes = {parameter.name: parameter.parameter.nbytes for parameter in self._parameters} | {
            name: sum(tensor.nbytes for tensor in own.tensors) for name, own in self._packed.items()
        }
        return [
            MemoryRow(
                component=Component.WEIGHTS,
                module=parameter.module,
                bytes=nbytes[parameter.name],
            )
            for parameter in (*self._parameters, *self.packed_parameters)
        ]

    def unpack_all(self) -> list[tuple[NamedParameter, torch.Tensor]]:
        """Return the packed weights in the compute dtype, to be filled anew and packed."""
        return [
            (parameter, self._packed[parameter.name].unpack())
            for parameter in self.packed_parameters
        ]

    def local_shards(self) -> list[LocalShard]:
        """Return their boxes of the global tensors, in the compute dtype, to be filled.

        Packed weights are not among them.
        """
        return build_frozen_shards(
            (parameter, parameter.parameter.data) for parameter in self._parameters
        )


def build_frozen_shards(
    values: Iterable[tuple[NamedParameter, torch.Tensor]],
) -> list[LocalShard]:
    """Return the boxes of the global tensors that a rank's frozen weights are."""
    shards = []
    for parameter, value in values:
        flat = value.view(-1)
        owned = OwnedRange(
            parameter=parameter,
            first=0,
            last=flat.numel(),
            start=0,
            moment_start=0,
            has_momentum=False,
        )
        shards += build_local_shards([owned], "", flat)
    return shards


def _is_packed(parameter: NamedParameter, fine_tuning: FineTuningSpec) -> bool:
    shape = parameter.placement.global_shape
    return is_packed(parameter.name, parameter.module, shape, fine_tuning)
