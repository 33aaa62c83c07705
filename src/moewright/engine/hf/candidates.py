"""The ways in which a Hugging Face checkpoint may hold a tensor of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from moewright.families.table import find_family
from moewright.families.weight_names import (
    MTP_NAMES,
    TOP_LEVEL_NAMES,
    USUAL_LAYER_NAMES,
    NamePattern,
)
from moewright.rules.shapes.parameters import expert_table_name, parameters, selection_bias_name
from moewright.spec.model import MixerKind, ModelSpec, MoeSpec

# The safetensors name of the dtype of tables of experts.
TABLE_DTYPE = "I64"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: `ours[index]` in `shape`.

    A tensor of all experts has them in its first dim, and our dims in `dim_order`; `inner_shape`
    has the sizes of our dims after the experts. `whole_shape` is that of `ours[index]` where no
    dim of this tensor is one of ours alone, so that it is read as a whole. With `rows`, it is these
    rows of `ours[index]`, one after the other, in `whole_shape`. With `fused_shape`, the tensor of
    that name and shape has several of ours; `ours` is its rows `fused_rows`.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] = ()
    inner_shape: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] = ()
    rows: tuple[range, ...] = ()
    fused_shape: tuple[int, ...] = ()
    fused_rows: range = range(0)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor of this name."""
        return self.fused_shape or self.shape

    def to_hf(self, part: torch.Tensor) -> torch.Tensor:
        """Convert `part`, which is `ours[index]`, to this tensor."""
        if self.dim_order:
            part = part.permute(self.dim_order)
        if self.rows:
            part = torch.cat([part[rows.start : rows.stop] for rows in self.rows])
        return part.reshape(self.shape).contiguous()

    def from_hf(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert some experts of this tensor to the same experts of `ours[index]`."""
        sizes = (len(stored), *self.inner_shape)
        reordered = stored.reshape([sizes[dim] for dim in self.dim_order])
        inverse = [self.dim_order.index(dim) for dim in range(len(self.dim_order))]
        return reordered.permute(inverse)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """A tensor of our checkpoints that Hugging Face's have too.

    It is a parameter, which is trained, or a state of a router: a selection bias, or a table of
    experts. `dtype` is the safetensors name of what our checkpoints hold it in.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    dtype: str = "F32"


def list_model_tensors(model: ModelSpec) -> tuple[ModelTensor, ...]:
    """List what goes in and out of a model: its parameters, then the states of its routers."""
    tensors = [
        ModelTensor(name=param.name, shape=param.shape, trained=True) for param in parameters(model)
    ]
    if model.moe is not None:
        tensors += _router_states(model, model.moe)
    return tuple(tensors)


def _router_states(model: ModelSpec, moe: MoeSpec) -> Iterator[ModelTensor]:
    for layer in model.routed_layers:
        if model.mtp_shared and layer > model.layers + 1:
            continue  # of the first depth
        if layer < moe.router.hash_layers:
            shape = (model.vocab_size, moe.router.top_k)
            yield ModelTensor(
                name=expert_table_name(layer), shape=shape, trained=False, dtype=TABLE_DTYPE
            )
        elif moe.router.selection_bias:
            yield ModelTensor(name=selection_bias_name(layer), shape=(moe.experts,), trained=False)


def candidate_names(model: ModelSpec, tensor: ModelTensor) -> tuple[tuple[HfTensor, ...], ...]:
    """Return the ways a checkpoint may hold a tensor, the family's own first.

    There may be none.
    """
    weights = find_family(model.family).weights
    top_names = weights.top_level.get(tensor.name, ())
    if tensor.name in TOP_LEVEL_NAMES:
        top_names = top_names or (TOP_LEVEL_NAMES[tensor.name],)
    if top_names:
        whole = HfTensor(name="", index=(), shape=tensor.shape)
        return tuple((replace(whole, name=hf_name),) for hf_name in top_names)
    if not tensor.name.startswith(("layers.", "mtp.")):
        return ()
    kind, number, suffix = tensor.name.split(".", 2)
    layer = int(number)
    if kind == "mtp":
        layer += model.layers
        if suffix in MTP_NAMES:
            hf_suffix = MTP_NAMES[suffix]
            if suffix == "final_norm.weight":
                hf_suffix = weights.mtp_final_norm or hf_suffix
            hf_name = f"{_layer_prefixes(model, layer, suffix)[0]}{hf_suffix}"
            return ((HfTensor(name=hf_name, index=(), shape=tensor.shape),),)
        suffix = suffix.removeprefix("layer.")
    elif layer > model.layers:  # the selection bias of a depth
        layer -= 1
    # Parameters of a recurrent mixer are named `attention.` too.
    is_recurrent = model.mixer(layer) is MixerKind.RECURRENT and suffix.startswith("attention.")
    own = weights.layers.get(suffix, ())
    patterns = dict.fromkeys((*own, *USUAL_LAYER_NAMES.get(suffix, ())))
    return tuple(
        _expand(model, pattern, prefix, tensor.shape)
        for prefix in _layer_prefixes(model, layer, suffix)
        for pattern in patterns
        if pattern.recurrent is is_recurrent
    )


def _layer_prefixes(model: ModelSpec, layer: int, suffix: str) -> list[str]:
    """Return what may stand before the name of a tensor of a layer; MTP depths follow the layers.

    An MTP depth of two blocks has attention in the first, and what follows it in the second.
    """
    weights = find_family(model.family).weights
    prefixes = weights.layer_prefixes
    blocks = weights.mtp_blocks
    if layer >= model.layers and blocks is not None:
        is_last = suffix.startswith(("post_norm.", "moe.", "mlp.", "final_norm."))
        layer = blocks.per_depth * (layer - model.layers) + (blocks.per_depth - 1) * is_last
        prefixes = (blocks.prefix,)
    return [f"{prefix}{layer}." for prefix in prefixes]


def _expand(
    model: ModelSpec, pattern: NamePattern, prefix: str, shape: tuple[int, ...]
) -> tuple[HfTensor, ...]:
    """Return the tensors of a pattern, which hold a tensor of ours of this shape."""
    expert_indices: list[tuple[int, ...]] = [()]
    if "{}" in pattern.names[0]:
        expert_indices = [(expert,) for expert in range(shape[0])]
    tensors = []
    for expert_index in expert_indices:
        for number, name in enumerate(pattern.names):
            # The gate and the up of a parameter are its entries 0 and 1.
            part_index = (number,) if len(pattern.names) > 1 and not pattern.head_parts else ()
            index = (*expert_index, *part_index)
            whole_shape = shape[len(index) :]
            rows: tuple[range, ...] = ()
            if pattern.head_parts:
                rows = tuple(_head_rows(model, pattern, number))
                whole_shape = (sum(map(len, rows)), *shape[1:])
            hf_shape = list(whole_shape)
            if pattern.dim_order:
                hf_shape = [hf_shape[dim] for dim in pattern.dim_order]
            if pattern.merged_dim is not None:
                first = pattern.merged_dim
                hf_shape[first : first + 2] = [hf_shape[first] * hf_shape[first + 1]]
            if pattern.unit_dim is not None:
                hf_shape.insert(pattern.unit_dim, 1)
            fused_shape, fused_rows = _fuse(model, pattern.fused_part, hf_shape)
            is_whole = pattern.unit_dim is not None or pattern.merged_dim == 0 or rows
            tensors.append(
                HfTensor(
                    name=prefix + name.format(*expert_index),
                    index=index,
                    shape=tuple(hf_shape),
                    dim_order=pattern.dim_order,
                    inner_shape=shape[1:] if pattern.dim_order else (),
                    whole_shape=whole_shape if is_whole else (),
                    rows=rows,
                    fused_shape=fused_shape,
                    fused_rows=fused_rows,
                )
            )
    return tuple(tensors)


def _fuse(model: ModelSpec, part: str, shape: Sequence[int]) -> tuple[tuple[int, ...], range]:
    """Return the shape of queries, keys and values as one tensor, and where `part` lies in it."""
    if not part:
        return (), range(0)
    spec = model.attention
    widths = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width}
    start = sum(widths[other] for other in "qkv"[: "qkv".index(part)])
    return (sum(widths.values()), *shape[1:]), range(start, start + widths[part])


def _head_rows(model: ModelSpec, pattern: NamePattern, number: int) -> Iterator[range]:
    """Yield which of our rows tensor `number` has, part by part and head by head."""
    heads = model.attention.heads
    widths = {"q": model.attention.head_dim, "g": model.attention.head_dim}
    if pattern.recurrent:
        spec = model.recurrent
        assert spec is not None  # its layers alone have such names
        heads = spec.key_heads
        sharing = spec.heads // heads
        value = sharing * spec.head_dim
        widths = {"q": spec.key_dim, "k": spec.key_dim, "v": value, "z": value}
        widths |= {"b": sharing, "a": sharing}
    letters = "".join(pattern.head_parts)
    head_width = sum(widths[letter] for letter in letters)
    for letter in pattern.head_parts[number]:
        first = sum(widths[other] for other in letters[: letters.index(letter)])
        for head in range(heads):
            start = head * head_width + first
            yield range(start, start + widths[letter])
