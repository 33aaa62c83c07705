"""What frozen weights and adapters change in what a layer saves for backward.

A product keeps its input for the gradient of its weight alone. So inputs of frozen products are not
kept, unless an adapter, a trained product or attention keeps the same tensor. An adapter keeps what
is between its two matrices (docs/formulas.md 12).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from moewright.rules.adapters import AdaptedLinear, adapted_linears, has_adapter, is_trained
from moewright.rules.saved.saved_tensor import KeptFormat, SavedTensor, saved_tensor
from moewright.rules.shapes.param import name_in_layer
from moewright.rules.shapes.parameters import parameters_by_layer
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import FineTuningSpec

# The linears, by their names in a layer, that keep a saved tensor as their input.
_READERS: Mapping[tuple[Module, str], tuple[str, ...]] = MappingProxyType(
    {
        (Module.ATTENTION, "q_latent"): ("attention.q_up",),
        (Module.ATTENTION, "kv_latent"): ("attention.kv_up",),
        (Module.ATTENTION, "gated_out"): ("attention.o",),
        (Module.ATTENTION, "o_down"): ("attention.o",),
        (Module.ATTENTION, "mixer_out"): ("attention.o",),
        (Module.DENSE_MLP, "post_norm_out"): ("mlp.gate_up", "mlp.up"),
        (Module.DENSE_MLP, "activation"): ("mlp.down",),
        (Module.EXPERTS, "permuted"): ("moe.experts.gate_up", "moe.experts.up"),
        (Module.EXPERTS, "activation"): ("moe.experts.down",),
        (Module.EXPERTS, "latent_out"): ("moe.latent.up",),
        (Module.SHARED_EXPERTS, "activation"): ("moe.shared.down",),
        (Module.MTP, "joined"): ("proj", "embed_proj"),
    }
)
# Those that do not take the input of attention, among its linears.
_LATER_LINEARS = frozenset(("attention.o", "attention.o_down", "attention.q_up", "attention.kv_up"))
_MOE_INPUT = (Module.ROUTER, "post_norm_out")
_MLP_INPUT = (Module.DENSE_MLP, "post_norm_out")
_OUTPUT = (Module.ATTENTION, "attention_out")
_ATTENTION_INPUT = (Module.ATTENTION, "input_norm_out")
_LATENTS = frozenset(((Module.ATTENTION, "q_latent"), (Module.ATTENTION, "kv_latent")))
_RECOMPUTED_BY: Mapping[Module, tuple[Recompute, ...]] = MappingProxyType(
    {
        Module.ATTENTION: (),
        Module.DENSE_MLP: (Recompute.MLP,),
        Module.ROUTER: (Recompute.MOE,),
        Module.EXPERTS: (Recompute.MOE,),
        Module.SHARED_EXPERTS: (Recompute.SHARED_EXPERTS, Recompute.MOE),
    }
)


@lru_cache(maxsize=1024)
def reading_linears(model: ModelSpec, fine_tuning: FineTuningSpec, layer: int) -> frozenset[str]:
    """Return the linears of a layer that keep their input: what trains, or has an adapter."""
    return frozenset(
        name_in_layer(param.name)
        for param in parameters_by_layer(model).get(layer, ())
        if len(param.shape) > 1
        and (
            is_trained(fine_tuning, param.name)
            or has_adapter(param.name, param.module, param.shape, fine_tuning)
        )
    )


def drop_unread(
    rows: Collection[SavedTensor], model: ModelSpec, fine_tuning: FineTuningSpec, layer: int
) -> list[SavedTensor]:
    """Return what a layer saves without the inputs that no product of it keeps."""
    readers = reading_linears(model, fine_tuning, layer)
    names = {row.name for row in rows if row.bytes}
    # What takes attention's output; a gate keeps the output that it scales, whoever takes the
    # product.
    output_reader = "attention.o_down" if "o_down" in names else "attention.o"
    keeps_output = output_reader in readers or "output_gate" in names
    # The output stands twice where ranks exchange heads: for attention, and for its projection.
    outputs = sum((row.owner, row.name) == _OUTPUT for row in rows)
    kept = []
    for row in rows:
        if (row.owner, row.name) == _OUTPUT and not keeps_output:
            is_attention_own = Recompute.CORE_ATTN in row.freed_by
            if outputs > 1 and not is_attention_own:
                continue
            kept.append(replace(row, freed_by=(Recompute.FULL, Recompute.CORE_ATTN)))
        elif (row.owner, row.name) == _MOE_INPUT:
            kept += _moe_inputs(row, model, readers)
        elif _is_read(row, readers):
            kept.append(row)
        elif policy := _replayed_by(row, model):
            kept.append(replace(row, kept_by=(policy,)))
    return kept


def _replayed_by(row: SavedTensor, model: ModelSpec) -> Recompute | None:
    """Return the policy that computes again from an input which no product keeps, if any."""
    key = row.owner, row.name
    if key == _MLP_INPUT:
        return Recompute.MLP
    has_query_latent = model.attention.q_lora_rank > 0
    if key in _LATENTS or (key == _ATTENTION_INPUT and not has_query_latent):
        return Recompute.MLA_UP_PROJ
    return None


def _moe_inputs(
    row: SavedTensor, model: ModelSpec, readers: frozenset[str]
) -> Iterator[SavedTensor]:
    """Yield the input of an MoE block, booked to who keeps it.

    That is the router, unless it is frozen; else shared experts, or what is computed again from it.
    """
    if "moe.router" in readers:
        yield row
        return
    # A frozen router reads it in forward alone: only a replay of the block starts from it.
    yield replace(row, kept_by=(Recompute.MOE,))
    is_shared = any(name.startswith("moe.shared.") for name in readers)
    row = replace(row, freed_by=(*row.freed_by, Recompute.MOE))
    if "moe.latent.down" in readers:  # it runs before shared experts
        yield replace(row, module=Module.EXPERTS)
        return
    row = replace(row, module=Module.SHARED_EXPERTS, owner=Module.SHARED_EXPERTS)
    if is_shared:
        yield row
    elif model.moe is not None and model.moe.shared_ffn_size:
        yield replace(row, kept_by=(Recompute.SHARED_EXPERTS,))


def _is_read(row: SavedTensor, readers: frozenset[str]) -> bool:
    """Return whether a product keeps a tensor, or something else than a product does."""
    key = row.owner, row.name
    if key == _ATTENTION_INPUT:
        return any(name.startswith("attention.") and name not in _LATER_LINEARS for name in readers)
    return key not in _READERS or any(name in readers for name in _READERS[key])


def adapter_saved(
    model: ModelSpec,
    fine_tuning: FineTuningSpec,
    layer: int,
    *,
    token_bytes: int,
    router_token_bytes: int,
    router_format: KeptFormat,
    row_bytes: int,
) -> Iterator[SavedTensor]:
    """Yield what the adapters of a layer keep between their two matrices.

    `token_bytes`, `router_token_bytes` and `row_bytes` are those of one column of all the rank's
    tokens, of them in the router's dtype, and of the rows of its experts.
    """
    for linear in adapted_linears(model, fine_tuning, layer):
        column_bytes = token_bytes
        if linear.is_expert:
            column_bytes = row_bytes
        elif linear.module is Module.ROUTER:
            column_bytes = router_token_bytes
        nbytes = linear.stack * fine_tuning.lora_rank * column_bytes
        yield saved_tensor(
            linear.module,
            adapter_tensor(linear),
            nbytes,
            *_RECOMPUTED_BY[linear.module],
            kept_as=router_format if linear.module is Module.ROUTER else KeptFormat.ACTIVATION,
        )


def adapter_tensor(linear: AdaptedLinear) -> str:
    """Return the name of what an adapter keeps between its two matrices."""
    return f"{linear.name}.adapter"
