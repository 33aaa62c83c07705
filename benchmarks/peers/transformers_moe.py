"""The Qwen3-MoE of HF transformers in the contest, as it ships, in a loop with fused AdamW."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.protocol import (
    ContestPart,
    ContestRequest,
    TimedWork,
    Turn,
    draw_hidden,
    draw_tokens,
    parse_request,
    take_turns,
)
from benchmarks.workloads import CONTEST_MODEL, CONTEST_WORKLOAD
from moewright.intake.hf import build_config


def build_model(request: ContestRequest) -> Any:
    """Build the model of transformers, with random weights of the scale that the engine draws."""
    entries = build_config(CONTEST_MODEL)
    config = AutoConfig.for_model(entries.pop("model_type"), **entries, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    return model.to(request.torch_dtype).train()


def build_turn(request: ContestRequest, model: Any) -> Turn:
    """Build the turn of a model of transformers: a training step, or a pass of its first layer."""
    if request.part is ContestPart.STEP:
        return _build_step(model)
    layer = model.model.layers[0].mlp

    def turn(number: int) -> TimedWork:
        x, grad = draw_hidden(number, request.torch_dtype)
        leaf: Any = x[None].detach().requires_grad_()

        def run_layer() -> float:
            out = layer(leaf)
            hidden = out[0] if isinstance(out, tuple) else out
            hidden.backward(grad[None])
            for parameter in layer.parameters():
                parameter.grad = None
            return float(leaf.grad.norm())

        return run_layer

    return turn


def _build_step(model: Any) -> Turn:
    """Build a training step with the arithmetic of the engine's optimizer.

    Where the model is bf16, the optimizer updates fp32 master weights.
    """
    weights: list[Any] = [p for p in model.parameters() if p.requires_grad]
    has_master = weights[0].dtype != torch.float32
    master: list[Any] = weights
    if has_master:
        master = [weight.detach().float().requires_grad_() for weight in weights]
    spec = CONTEST_WORKLOAD.optimizer
    groups = [
        {"params": [p for p in master if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in master if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        if has_master:
            for wide, weight in zip(master, weights, strict=True):
                wide.grad = weight.grad.float()
                weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if has_master:
            with torch.no_grad():
                torch._foreach_copy_(weights, master)
        return float(loss.detach())

    return lambda number: partial(step, *draw_tokens(number))


if __name__ == "__main__":
    request = parse_request()
    take_turns(build_turn(request, build_model(request)))
