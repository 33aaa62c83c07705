"""What a model takes to serve: bytes of weights and of the KV cache, and decoding by bandwidth.

A decoded token of a batch reads every weight that some sequence of the batch needs, and the keys
and values of its own context. The roofline is the longer of reading and computing; what a server
reaches is below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moewright.rules.shapes.parameters import count_parameters, parameters
from moewright.spec.hardware import Hardware
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.units import BF16_BYTES
from moewright.spec.workload import Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Serving of a batch at a context on so many devices, in bf16."""

    devices: int
    batch: int
    context: int
    weight_bytes: int
    cache_bytes: int  # of the whole batch
    unique_experts: float  # that a batch reads of a layer
    step_s: float  # for one token of every sequence
    tokens_per_s: float  # of the batch

    @property
    def memory_bytes(self) -> int:
        """The bytes of weights and cache."""
        return self.weight_bytes + self.cache_bytes


def unique_experts(experts: int, top_k: int, tokens: int) -> float:
    """Return the experts that some of the tokens choose, where all are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def cache_bytes_per_token(model: ModelSpec) -> int:
    """Return the bytes of keys and values of one token: of latent attention, its latent."""
    attention = model.attention
    width = 2 * attention.kv_width
    if attention.kind is AttentionKind.MLA:
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
    return model.layers * width * BF16_BYTES


def estimate_serving(model: ModelSpec, hardware: Hardware, *, batch: int, context: int) -> Serving:
    """Estimate the decoding of a batch whose sequences all have `context` tokens.

    Bandwidth and FLOPs are those of all devices, and what they send each other is left out.
    """
    counts = count_parameters(model)
    weight_bytes = counts.total * BF16_BYTES
    cache_bytes = batch * context * cache_bytes_per_token(model)
    expert_numel = sum(
        param.numel
        for param in parameters(model)
        if param.is_expert and param.layer <= model.layers
    )
    needed = 0.0
    share = 1.0
    if model.moe is not None:
        needed = unique_experts(model.moe.experts, model.moe.router.top_k, batch)
        share = needed / model.moe.experts
    # A lookup reads a row of the table; tied, the head reads all of it.
    embedding = counts.embedding if not model.tie_embeddings else 0
    read = counts.total - expert_numel * (1 - share) - embedding
    read_bytes = read * BF16_BYTES + cache_bytes
    peak = next(peak for peak in hardware.device.peaks if peak.dtype is Dtype.BF16).rate.value
    flops = 2 * counts.active_without_embedding * batch
    step_s = max(
        read_bytes / (hardware.count * hardware.device.memory_Bps.value),
        flops / (hardware.count * peak),
    )
    return Serving(
        devices=hardware.count,
        batch=batch,
        context=context,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        unique_experts=needed,
        step_s=step_s,
        tokens_per_s=batch / step_s,
    )
