"""The same layers and steps in HF transformers, whose experts run torch's grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.sizes import GpuSizes, draw_tokens
from moewright.intake.hf import build_config
from moewright.spec.model import ModelSpec


def build_transformers_model(sizes: GpuSizes, model: ModelSpec) -> Any:
    """Build a model of transformers in bf16 on the device, with random weights.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = build_config(model)
    config = AutoConfig.for_model(entries.pop("model_type"), **entries, use_cache=False)
    with torch.device(sizes.device):
        network = AutoModelForCausalLM.from_config(
            config, experts_implementation="grouped_mm", dtype=torch.bfloat16
        )
    return network.to(sizes.device).train()


def find_moe_layer(network: Any) -> Any:
    """Return the MoE layer of the first transformer layer."""
    layer = network.model.layers[0]
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def build_transformers_step(
    sizes: GpuSizes, model: ModelSpec, network: Any
) -> Callable[[], object]:
    """Build a training step with fused AdamW over fp32 master weights, as the engine keeps them."""
    tokens = draw_tokens(sizes, model)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    master = [weight.detach().float().requires_grad_() for weight in weights]
    spec = sizes.workload.optimizer
    optimizer = torch.optim.AdamW(
        master,
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )

    def step() -> None:
        network(input_ids=inputs, labels=targets, shift_labels=targets).loss.backward()
        for wide, weight in zip(master, weights, strict=True):
            wide.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(master, spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, master)

    return step
