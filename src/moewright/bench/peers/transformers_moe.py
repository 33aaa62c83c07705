"""HF transformers' Qwen3-MoE in the contest, as it ships, with torch's fused AdamW in a loop of its
own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moewright.bench.peers.contest import (
    MODEL,
    WORKLOAD,
    ContestPart,
    ContestRequest,
    Turn,
    draw_hidden,
    draw_tokens,
    parse_request,
    take_turns,
)
from moewright.intake.hf_write import build_config


def build_model(how: ContestRequest) -> Any:
    """Random weights of the scale that the engine draws."""
    entries = build_config(MODEL)
    config = AutoConfig.for_model(entries.pop("model_type"), **entries, use_cache=False)
    return (
        AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
        .to(how.torch_dtype)
        .train()
    )


def build_turn(how: ContestRequest, made: Any) -> Turn:
    """One training step of a model of transformers, or one pass of its first MoE layer."""
    if how.part is ContestPart.STEP:
        return _step(made)
    layer = made.model.layers[0].mlp

    def once(number: int) -> Callable[[], float]:
        x, grad = draw_hidden(number, how.torch_dtype)
        leaf: Any = x[None].detach().requires_grad_()

        def run() -> float:
            out = layer(leaf)
            (out[0] if isinstance(out, tuple) else out).backward(grad[None])
            for parameter in layer.parameters():
                parameter.grad = None
            return float(leaf.grad.norm())

        return run

    return once


def _step(made: Any) -> Turn:
    """Mixed precision with fp32 master weights where the model is bf16: the arithmetic of the
    engine's optimizer."""
    weights: list[Any] = [p for p in made.parameters() if p.requires_grad]
    narrow = weights[0].dtype != torch.float32
    master: list[Any] = (
        [p.detach().float().requires_grad_() for p in weights] if narrow else weights
    )
    spec = WORKLOAD.optimizer
    groups = [
        {"params": [p for p in master if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in master if p.dim() == 1], "weight_decay": 0.0},
    ]
    rule = torch.optim.AdamW(
        groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = made(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        if narrow:
            for wide, weight in zip(master, weights, strict=True):
                wide.grad, weight.grad = weight.grad.float(), None
        rule.step()
        rule.zero_grad()
        if narrow:
            with torch.no_grad():
                torch._foreach_copy_(weights, master)
        return float(loss.detach())

    return lambda number: partial(step, *draw_tokens(number))


if __name__ == "__main__":
    how = parse_request()
    take_turns(build_turn(how, build_model(how)))
