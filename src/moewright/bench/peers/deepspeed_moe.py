"""DeepSpeed's MoE layer in the contest, in the place of transformers' own in the same backbone,
dropping no token."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

from moewright.bench.peers import transformers_moe
from moewright.bench.peers.contest import MODEL, parse_request, take_turns


class _Expert(torch.nn.Module):
    """One expert, SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class _Layer(torch.nn.Module):
    """The layer's output alone, without its auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        moe = MODEL.moe
        assert moe is not None
        expert = _Expert(MODEL.hidden_size, moe.ffn_size)
        self.moe = MoE(
            MODEL.hidden_size,
            expert,
            moe.experts,
            k=moe.router.top_k,
            drop_tokens=False,
            use_rts=False,
        )
        self.moe.set_deepspeed_parallelism()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.moe(x)[0]
        return out


if __name__ == "__main__":
    how = parse_request()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    made = transformers_moe.build_model(how)
    for layer in made.model.layers:
        layer.mlp = _Layer().to(how.torch_dtype)
    take_turns(transformers_moe.build_turn(how, made))
