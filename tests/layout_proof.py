"""One harness that proves a layout: W ranks run it once, and everything they did is held against
one process.

Against the one process: logits and token losses, every gradient, and the curves of eight plain SGD
steps (which show a wrong scale) and eight clipped AdamW steps, with the norm as each rank saw it.
Among the ranks: tensors held in copies are the same bits after every step of SGD and at the end.
Against the planner: every rank's ledger of the second step, exactly.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate as accumulated
from math import prod
from operator import add
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import tiny_jobs
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import LineStatus, Section, compare_ledgers
from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm import collectives
from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.fused import reference as reference_kernels
from moewright.engine.model import router
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, sgd_update
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.ledger_record import record_ledger
from moewright.engine.run.step import (
    PhaseClock,
    TrainState,
    apply_update,
    forward_backward,
    train_step,
)
from moewright.engine.run.verify import FixedBatches, _compute_outputs, local_rows
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.model import ModelSpec, RouterSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    FusedKernels,
    LossSpec,
    OptimizerSpec,
    Workload,
)

BATCH, LENGTH, STEPS = 8, 16, 4
_BATCHES = 4
_COUNTED_STEP = 2  # the step whose books are kept
_MIN_MARGIN = 3e-6  # of routing scores, above what legal rounding moves them by in these few steps
_SGD_LR, _ADAMW_LR = 0.05, 2e-3
# Of every row: within a chunk of 8 ranks, over several, over all, from the edge of one to that of
# another.
_DOCUMENTS = (
    (3, 1, 10, 2),
    (16,),
    (8, 8),
    (1,) * 5 + (11,),
    (4, 12),
    (12, 4),
    (5, 2, 9),
    (2, 6, 7, 1),
)

WORKLOAD = Workload(
    seq_len=LENGTH,
    global_batch=BATCH,
    steps=STEPS,
    precision=Dtype.FP32,
    # A large eps: Adam divides near-zero gradients by themselves, which would show rounding as a
    # difference.
    optimizer=OptimizerSpec(clip_norm=0.0, weight_decay=0.1, eps=1e-6, bucket_elements=4000),
    loss=LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, z_coeff=0.001),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """Of one rule: (loss, aux loss, gradient norm) by step as one rank saw it, and digests of its
    weights, after every step of SGD and after the last of AdamW.
    """

    steps: tuple[tuple[float, float, float], ...]
    digests: tuple[Mapping[str, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankObservation:
    """What one rank reports."""

    shards: tuple[LocalShard, ...]
    grad_norm: float
    sgd: StepCurve
    adamw: StepCurve
    margin: float  # least distance of a routing decision


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One process, and the seed of weights whose routing has a clear margin all along its
    curves."""

    seed: int
    observation: RankObservation
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatches:
    """Fixed batches whose rows consist of documents; of each, all batches alike, `lengths`
    [B][documents]."""

    fixed: FixedBatches
    lengths: tuple[tuple[int, ...], ...]

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        rows, batch = local_rows(run, micro_batch), step % len(self.fixed.inputs)
        lengths = tuple(length for row in self.lengths[rows.start : rows.stop] for length in row)
        starts = torch.tensor([0, *accumulated(lengths)], dtype=torch.int32)
        tokens = (x[batch, rows.start : rows.stop] for x in (self.fixed.inputs, self.fixed.targets))
        return build_micro_batch(run, *tokens, Segments(lengths=lengths, cu_seqlens=starts))


def build_batches(work: Workload, model: ModelSpec) -> FixedBatches | PackedBatches:
    """Those of `batches`, or the same in documents, after the last token of which no target
    follows."""
    fixed = draw_batches(model)
    if work.data.documents is DocumentMasking.JOINED:
        return fixed
    for row, lengths in enumerate(_DOCUMENTS):
        fixed.targets[:, row, [end - 1 for end in accumulated(lengths)]] = -100
    return PackedBatches(fixed=fixed, lengths=_DOCUMENTS)


def draw_batches(model: ModelSpec) -> FixedBatches:
    """Random tokens. In each batch one row has no target at all, and the others different numbers
    of them."""
    dice = torch.Generator().manual_seed(11)
    ids = torch.randint(0, model.vocab_size, (_BATCHES, BATCH, LENGTH + 1), generator=dice)
    targets = ids[:, :, 1:].clone()
    for batch in range(_BATCHES):
        targets[batch, batch % BATCH] = -100
        for row in range(BATCH):
            targets[batch, row, : (3 * row + batch) % 7] = -100
    return FixedBatches(inputs=ids[:, :, :-1], targets=targets)


def prove_layout(plan: Plan, folder: Path) -> None:
    """Assert that a plan's layout computes what one process computes, and that its ledger is the
    predicted one."""
    one = run_reference(
        plan.model, replace(plan.workload, fused_kernels=FusedKernels.AUTO), plan.layout.mbs
    )
    plan = replace(plan, workload=replace(plan.workload, seed=one.seed))
    ranks = run_ranks(plan, folder)
    assert_tensors(assemble_tensors(ranks), one.tensors)
    for rank, seen in enumerate(ranks):
        where = f"rank {rank}"
        assert_close(seen.grad_norm, one.observation.grad_norm, 1e-5, f"{where}: gradient norm")
        assert_curve(seen.sgd, one.observation.sgd, 1e-5, f"{where}: SGD")
        assert_curve(seen.adamw, one.observation.adamw, 1e-4, f"{where}: AdamW")
    assert_replicas_agree(ranks)
    assert_ledgers(plan, folder / "ledger")


def assert_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, reference in wanted.items():
        scale = reference.norm()
        if scale == 0:  # an expert without a row
            assert not found[name].any(), name
        else:
            error = float((found[name] - reference).norm() / scale)
            assert error <= 3e-5, (name, error)
    worst = (
        (found["logits"] - wanted["logits"]).abs().amax(2)
    )  # every position by itself, the last one too
    assert float((worst / wanted["logits"].abs().amax(2)).max()) <= 3e-5


def assert_curve(found: StepCurve, wanted: StepCurve, norm_tolerance: float, where: str) -> None:
    for step, (ours, theirs) in enumerate(zip(found.steps, wanted.steps, strict=True), 1):
        for value, reference, tolerance, what in zip(
            ours, theirs, (1e-5, 1e-5, norm_tolerance), ("loss", "aux loss", "norm"), strict=True
        ):
            assert_close(value, reference, tolerance, f"{where} step {step}: {what}")


def assert_close(found: float, wanted: float, tolerance: float, what: str) -> None:
    assert abs(found - wanted) <= tolerance * abs(wanted), (what, found, wanted)


def assert_replicas_agree(ranks: list[RankObservation]) -> None:
    """A part that several ranks hold is the same bits on each, after every step."""
    for rule in ("sgd", "adamw"):
        for looked in range(len(getattr(ranks[0], rule).digests)):
            held: dict[str, bytes] = {}
            for rank, seen in enumerate(ranks):
                for part, digest in getattr(seen, rule).digests[looked].items():
                    assert held.setdefault(part, digest) == digest, (rule, looked, rank, part)


def assert_ledgers(plan: Plan, books: Path) -> None:
    selection = read_json(Selection, books / "selection.json")
    for rank in range(plan.layout.world_size):
        counted = read_json(Ledger, books / f"rank{rank:05d}.json")
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=selection), counted)


def assert_equal_lines(predicted: Ledger, counted: Ledger) -> None:
    """All of them but times."""
    comparison = compare_ledgers(predicted, counted)
    lines = [line for line in comparison.lines if line.section is not Section.TIME]
    wrong = [line for line in lines if line.status is not LineStatus.EQUAL]
    assert not wrong, (counted.rank, wrong)
    assert comparison.is_exact


def assemble_tensors(ranks: list[RankObservation]) -> dict[str, torch.Tensor]:
    """Whole tensors from the boxes of all ranks; they cover all of it, and boxes that overlap hold
    the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for seen in ranks:
        for piece in seen.shards:
            full = whole.setdefault(piece.name, torch.full(piece.global_shape, float("nan")))
            box = tuple(
                slice(start, start + size)
                for start, size in zip(piece.offsets, piece.tensor.shape, strict=True)
            )
            known = ~full[box].isnan()
            assert torch.equal(full[box][known], piece.tensor[known]), piece.name
            full[box] = piece.tensor
    for name, full in whole.items():
        assert not full.isnan().any(), name
    return whole


@cache
def run_reference(model: ModelSpec, work: Workload, mbs: int) -> Reference:
    """One process with the same micro-batches, on which the auxiliary losses depend."""
    for seed in range(20):
        seeded = replace(work, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            (seen,) = run_ranks(
                tiny_jobs.build_plan(seeded, f"mbs{mbs}", world_size=1, model=model), Path(folder)
            )
        if seen.margin > _MIN_MARGIN:
            return Reference(seed=seed, observation=seen, tensors=assemble_tensors([seen]))
    raise AssertionError(f"{model.name}: no weights whose routing has a clear margin")


def run_ranks(plan: Plan, folder: Path) -> list[RankObservation]:
    """What each rank of the plan saw."""
    assert (
        launch(partial(_run_rank, plan, folder), nproc=plan.layout.world_size, run_dir=folder / "run")
        is ExitCode.DONE
    )
    found = []
    for rank in range(plan.layout.world_size):
        with (folder / f"seen{rank}").open("rb") as file:
            found.append(pickle.load(file))
    return found


def _run_rank(plan: Plan, folder: Path, seat: RankContext) -> RankOutcome:
    device = init_distributed(seat)
    data = build_batches(plan.workload, plan.model)
    margins = _record_margins()

    def start(rule: UpdateRule, work: Workload) -> TrainState:
        job = build_train_state(
            Job(model=plan.model, workload=work, layout=plan.layout),
            data,
            rank=seat.rank,
            device=device,
            initial_value=draw_test_weight,
            update_rule=rule,
        )
        for each in router.list_routers(job.model):
            if each.selection_bias is not None:
                each.selection_bias.copy_(torch.linspace(-0.1, 0.1, len(each.selection_bias)))
        return job

    job = start(sgd_update, plan.workload)
    pieces = _compute_outputs(job, data)
    first = forward_backward(job, PhaseClock(), step=1)
    pieces += [
        replace(piece, tensor=piece.tensor.clone()) for piece in job.optimizer.gradient_shards()
    ]
    apply_update(job, PhaseClock(), first, lr=0.0)
    sgd = _train_curve(job, _SGD_LR, seat, folder, looked=range(1, STEPS + 1))
    clipped = replace(
        plan.workload, optimizer=replace(plan.workload.optimizer, clip_norm=first.grad_norm / 2)
    )
    adamw = _train_curve(start(adamw_update, clipped), _ADAMW_LR, seat, folder, looked=(STEPS,))
    seen = RankObservation(
        shards=tuple(pieces),
        grad_norm=first.grad_norm,
        sgd=sgd,
        adamw=adamw,
        margin=min(margins, default=1.0),
    )
    with (folder / f"seen{seat.rank}").open("wb") as file:
        pickle.dump(seen, file)
    collectives.leave_world()
    return RankOutcome.DONE


def _train_curve(
    job: TrainState, lr: float, seat: RankContext, folder: Path, *, looked: Collection[int]
) -> StepCurve:
    """STEPS steps; the books of one of them go to `folder`, as training writes them.

    Weights are looked at after the steps `looked`, which ends what overlaps: gathers that the next
    forward would await.
    """
    steps, digests = [], []
    for step in range(1, STEPS + 1):
        seat.beat(step)
        result = train_step(
            job, step=step, lr=lr, stop_requested=False, count_ledger=step == _COUNTED_STEP
        )
        assert not result.skipped
        steps.append((result.loss, result.aux_loss, result.grad_norm))
        if step in looked:
            job.optimizer.finish_pending()
            digests.append(dict(_digest_weights(job)))
        if step == _COUNTED_STEP:
            record_ledger(job, folder, step, result, seat)
    return StepCurve(steps=tuple(steps), digests=tuple(digests))


def _digest_weights(job: TrainState) -> Iterator[tuple[str, bytes]]:
    """Each part of a weight that this rank holds, by name and box, and the biases that move with
    the load."""
    for slot in list_parameters(job.model):
        at = slot.placement
        weight = slot.owner.weight
        whole = (
            weight.full_tensor() if isinstance(weight, DTensor) else weight
        )  # of ZeRO-3, from all its parts
        yield f"{slot.name} {at.offsets} {at.local_shape}", _digest(whole)
    for each in router.list_routers(job.model):
        if each.selection_bias is not None:
            yield f"bias {each.layer_number}", _digest(each.selection_bias)


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).digest()


def draw_test_weight(slot: NamedParameter, run: Runtime) -> torch.Tensor:
    """As in training, but for norm weights and biases: ones and zeros would hide one that is left
    out."""
    at = slot.placement
    if slot.name.endswith(".weight") and len(at.global_shape) > 1:
        return draw_initial_value(slot, run)
    whole = 0.5 * torch.sin(torch.arange(prod(at.global_shape)) + len(slot.name)).view(
        at.global_shape
    )
    boxes = [
        tuple(map(slice, part.offsets, map(add, part.offsets, part.local_shape)))
        for part in at.split_rows() or (at,)
    ]
    return torch.cat([whole[box] for box in boxes]) + (1 if slot.name.endswith(".weight") else 0)


def _record_margins() -> list[float]:
    """The least margin of every choice of experts from now on, in this process."""
    margins: list[float] = []
    choose = reference_kernels.choose_experts

    @torch.no_grad()
    def watched(
        scores: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        wanted = scores if bias is None else scores + bias
        chosen = choose(scores, spec, bias)
        if spec.top_groups < spec.groups:
            of_group = wanted.unflatten(1, (spec.groups, -1))
            margins.append(
                _gap(of_group.topk(spec.scores_per_group, -1).values.sum(-1), spec.top_groups)
            )
            opened = torch.zeros_like(of_group[:, :, 0], dtype=torch.bool)
            opened.scatter_(1, chosen // of_group.shape[2], True)
            wanted = of_group.masked_fill(~opened[:, :, None], float("-inf")).flatten(1)
        margins.append(_gap(wanted, spec.top_k))
        return chosen

    reference_kernels.choose_experts = watched
    return margins


def _gap(scores: torch.Tensor, chosen: int) -> float:
    """Least distance between the last chosen and the first not chosen."""
    if chosen == scores.shape[1]:
        return 1.0
    best = scores.topk(chosen + 1, -1).values
    return float((best[:, -2] - best[:, -1]).min())
