"""RunRecord: what a run left behind, as its files say it."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.ledger import Ledger, Selection, TimeRow
from moewright.spec.plan import Plan
from moewright.spec.workload import RouterForce


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """Tokens per expert of one MoE layer in one step, over all data-parallel ranks."""

    layer: int
    max_over_mean: float
    dead_experts: int  # experts that got no token
    entropy: float  # of the load, in units of log(experts): 1 is even
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of steps.jsonl, kind "step". Rates are per rank; `loss` is nats per valid target of the global batch."""

    step: int  # 1 is the first update
    loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_s: float
    tokens_per_s_per_rank: float
    tflops_per_rank: float
    mfu: float
    skipped: bool
    phases: tuple[TimeRow, ...]
    loads: tuple[LayerLoad, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """One line of steps.jsonl, kind "eval": mean nats per target over the held-out batches after `step` updates."""

    step: int
    heldout_loss: float
    unigram_entropy: float  # of the held-out corpus' tokens under the training unigram distribution
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One process start of the run (a resume opens another)."""

    first_step: int
    started: str  # ISO 8601, UTC
    world_size: int
    torch_version: str
    device_name: str
    threads_per_rank: int
    routing: RouterForce = RouterForce.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run directory, read back. `ledgers` are counted, one a rank, on the step of `selection`."""

    plan: Plan
    sessions: tuple[Session, ...]
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    ledgers: tuple[Ledger, ...]
    selection: Selection | None
    notes: tuple[str, ...] = ()  # what had to be left out when reading
