"""The MoE layer of DeepSpeed in the contest, in the backbone of transformers, dropping no token."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

from benchmarks.peers import transformers_moe
from benchmarks.peers.protocol import parse_request, take_turns
from benchmarks.workloads import CONTEST_MODEL


class SwiGluExpert(torch.nn.Module):
    """An expert, a SwiGLU of three linear layers."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden_size, ffn_size, bias=False)
        self.up = torch.nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = torch.nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class DeepSpeedMoeLayer(torch.nn.Module):
    """DeepSpeed's layer, which here returns its output alone, without the auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        moe = CONTEST_MODEL.moe
        assert moe is not None
        hidden_size = CONTEST_MODEL.hidden_size
        self.moe = MoE(
            hidden_size,
            SwiGluExpert(hidden_size, moe.ffn_size),
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
    request = parse_request()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = transformers_moe.build_model(request)
    for layer in model.model.layers:
        layer.mlp = DeepSpeedMoeLayer().to(request.torch_dtype)
    take_turns(transformers_moe.build_turn(request, model))
