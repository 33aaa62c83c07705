"""A proof of a layout: its ranks run it once, and one process says what they must compute.

Compared with the one process are logits and token losses, every gradient, and the curves of four
plain SGD steps (which show a wrong scale) and four clipped AdamW steps, with the norm as each rank
saw it. Compared among the ranks are replicated tensors: the same bits after every step of SGD and
at the end. Compared with the planner is every rank's ledger of the second step, exactly.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import ceil, log2, prod
from operator import add
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import tiny_jobs
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import (
    LedgerComparison,
    LineStatus,
    Section,
    compare_ledgers,
)
from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm import collectives
from moewright.engine.kernels import sparse_attention
from moewright.engine.kernels.attention import Segments
from moewright.engine.kernels.fused import reference as reference_kernels
from moewright.engine.model import router
from moewright.engine.model.layers import NamedParameter, list_parameters
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, sgd_update
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.corpus_loader import local_rows
from moewright.engine.run.launch import launch
from moewright.engine.run.ledger_record import record_ledger
from moewright.engine.run.step import apply_update, forward_backward, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.verify import FixedBatches, _compute_outputs
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job, plan_job
from moewright.spec.ledger import Ledger, Selection
from moewright.spec.model import ModelSpec, RouterSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    FusedKernels,
    LossSpec,
    OptimizerSpec,
    Routing,
    Workload,
)

BATCH = 8
LENGTH = 16
STEPS = 3
_BATCHES = 4
_COUNTED_STEP = 2  # the step whose ledger is kept
_SEEDS = 20  # that may be tried
# A least distance of routing scores, above what legal rounding moves them by in these few steps.
_MIN_MARGIN = 3e-6
_SGD_LR = 0.05
_ADAMW_LR = 2e-3
# The lengths of the documents of each row: they lie within a chunk of 8 ranks, over several chunks,
# over all, and from the edge of one chunk to that of another.
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
    routing=Routing.BALANCED,
    seq_len=LENGTH,
    global_batch=BATCH,
    steps=STEPS,
    precision=Dtype.FP32,
    # A large eps: Adam divides near-zero gradients by themselves, which would show rounding as a
    # difference.
    optimizer=OptimizerSpec(clip_norm=0.0, weight_decay=0.1, eps=1e-6, bucket_elements=4000),
    loss=LossSpec(aux_coeff=0.02, seq_aux_coeff=0.01, z_coeff=0.001, indexer_coeff=0.5),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """A training curve under one update rule, as one rank saw it.

    A step is (loss, aux loss, gradient norm). The digests of this rank's weights are taken after
    every step of SGD and after the last step of AdamW.
    """

    steps: tuple[tuple[float, float, float], ...]
    digests: tuple[Mapping[str, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankObservation:
    """A report of one rank."""

    shards: tuple[LocalShard, ...]
    grad_norm: float
    sgd: StepCurve
    adamw: StepCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A run of one process, with a seed whose routing has a clear margin all along its curves."""

    seed: int
    observation: RankObservation
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatches:
    """Fixed batches whose rows consist of documents.

    Every batch has the same `lengths` [B][documents].
    """

    fixed: FixedBatches
    lengths: tuple[tuple[int, ...], ...]

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        rows = local_rows(runtime, micro_batch, global_batch=runtime.workload.global_batch)
        batch = step % len(self.fixed.inputs)
        lengths = tuple(length for row in self.lengths[rows.start : rows.stop] for length in row)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        inputs = self.fixed.inputs[batch, rows.start : rows.stop]
        targets = self.fixed.targets[batch, rows.start : rows.stop]
        segments = Segments(lengths=lengths, cu_seqlens=cu_seqlens)
        return build_micro_batch(runtime, inputs, targets, segments)


def build_batches(workload: Workload, model: ModelSpec) -> FixedBatches | PackedBatches:
    """Draw batches, packed in documents where the workload masks them.

    The last token of a document has no target.
    """
    fixed = draw_batches(model)
    if workload.data.documents is DocumentMasking.JOINED:
        return fixed
    for row, lengths in enumerate(_DOCUMENTS):
        fixed.targets[:, row, [end - 1 for end in accumulate(lengths)]] = -100
    return PackedBatches(fixed=fixed, lengths=_DOCUMENTS)


def draw_batches(model: ModelSpec) -> FixedBatches:
    """Draw random tokens.

    In each batch one row has no target at all, and the others have different numbers of them.
    """
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, model.vocab_size, (_BATCHES, BATCH, LENGTH + 1), generator=generator)
    targets = ids[:, :, 1:].clone()
    for batch in range(_BATCHES):
        targets[batch, batch % BATCH] = -100
        for row in range(BATCH):
            targets[batch, row, : (3 * row + batch) % 7] = -100
    return FixedBatches(inputs=ids[:, :, :-1], targets=targets)


def prove_layout(plan: Plan, folder: Path) -> None:
    """Assert that a plan's layout computes what one process does, and that its ledger is exact."""
    assert_ledgers(prove_computation(plan, folder, plan.layout.mbs), folder / "ledger")


def prove_computation(plan: Plan, folder: Path, reference_mbs: int) -> Plan:
    """Assert that a plan's layout computes what one process does with so large micro-batches.

    Return the plan with the seed whose routing has a clear margin.
    """
    reference = run_reference(
        plan.model, replace(plan.workload, fused_kernels=FusedKernels.AUTO), reference_mbs
    )
    plan = replace(plan, workload=replace(plan.workload, seed=reference.seed))
    observations = run_ranks(plan, folder)
    assert_tensors(assemble_tensors(observations), reference.tensors)
    expected = reference.observation
    for rank, observed in enumerate(observations):
        label = f"rank {rank}"
        assert_close(observed.grad_norm, expected.grad_norm, 1e-5, f"{label}: gradient norm")
        # Norms after three large steps: 1.5e-5 at most in 450 draws.
        assert_curve(observed.sgd, expected.sgd, 3e-5, f"{label}: SGD")
        assert_curve(observed.adamw, expected.adamw, 1e-4, f"{label}: AdamW")
    assert_replicas_agree(observations)
    return plan


def assert_tensors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        scale = reference.norm()
        if scale == 0:  # an expert without a row
            assert not actual[name].any(), name
        else:
            error = float((actual[name] - reference).norm() / scale)
            tolerance = 3e-5
            if name.endswith("streams.scale"):  # terms of all tokens that cancel: 4e-5 at most in
                tolerance = 2e-4  # 300 draws, where other gradients differ by 1e-5
            assert error <= tolerance, (name, error)
    # Every position is compared by itself, so that the last one counts too.
    worst = (actual["logits"] - expected["logits"]).abs().amax(2)
    assert float((worst / expected["logits"].abs().amax(2)).max()) <= 3e-5


def assert_curve(actual: StepCurve, expected: StepCurve, norm_tolerance: float, label: str) -> None:
    tolerances = (1e-5, 1e-5, norm_tolerance)
    pairs = zip(actual.steps, expected.steps, strict=True)
    for step, (actual_step, expected_step) in enumerate(pairs, 1):
        for value, reference, tolerance, name in zip(
            actual_step, expected_step, tolerances, ("loss", "aux loss", "norm"), strict=True
        ):
            assert_close(value, reference, tolerance, f"{label} step {step}: {name}")


def assert_close(actual: float, expected: float, tolerance: float, label: str) -> None:
    assert abs(actual - expected) <= tolerance * abs(expected), (label, actual, expected)


def assert_replicas_agree(observations: list[RankObservation]) -> None:
    """Assert that a part which several ranks have is the same bits on each, after every step."""
    for rule in ("sgd", "adamw"):
        for index in range(len(getattr(observations[0], rule).digests)):
            first_digest: dict[str, bytes] = {}
            for rank, observed in enumerate(observations):
                for part, digest in getattr(observed, rule).digests[index].items():
                    expected = first_digest.setdefault(part, digest)
                    assert expected == digest, (rule, index, rank, part)


def assert_ledgers(plan: Plan, ledger_dir: Path) -> None:
    selection = read_json(Selection, ledger_dir / "selection.json")
    for rank in range(plan.layout.world_size):
        counted = read_json(Ledger, ledger_dir / f"rank{rank:05d}.json")
        assert_equal_lines(predict_ledger(plan, rank=rank, selection=selection), counted)


def assert_equal_lines(predicted: Ledger, counted: Ledger) -> None:
    """Assert that all lines but times are equal, and that all storages are accounted for."""
    assert_equal_rows(predicted, counted)
    comparison = compare_ledgers(predicted, counted)
    assert comparison.is_accounted, (counted.rank, *explain_storages(comparison))


def explain_storages(comparison: LedgerComparison) -> Iterator[str]:
    """Yield the moments at which more lives than may, and the largest places that no row lists."""
    for line in comparison.lines_in(Section.STORAGES):
        if not line.keeps_rule:
            _, moment = line.key
            yield f"{moment}: {line.predicted} + {line.allowance} predicted, {line.counted} counted"
            for row in comparison.unlisted:
                if row.moment == moment:
                    yield f"{row.module} {row.place}: {row.bytes}"


def assert_equal_rows(predicted: Ledger, counted: Ledger) -> None:
    """Assert that all lines but times and storages are equal."""
    comparison = compare_ledgers(predicted, counted)
    unequal = (Section.TIME, Section.STORAGES)
    lines = [line for line in comparison.lines if line.section not in unequal]
    wrong = [line for line in lines if line.status is not LineStatus.EQUAL]
    assert not wrong, (counted.rank, wrong)
    assert comparison.is_exact


def assemble_tensors(observations: list[RankObservation]) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the boxes of all ranks.

    The boxes must cover all of each tensor, and where boxes overlap they must hold the same bits.
    """
    tensors: dict[str, torch.Tensor] = {}
    for observed in observations:
        for shard in observed.shards:
            full = tensors.setdefault(shard.name, torch.full(shard.global_shape, float("nan")))
            box = tuple(
                slice(start, start + size)
                for start, size in zip(shard.offsets, shard.tensor.shape, strict=True)
            )
            is_filled = ~full[box].isnan()
            assert torch.equal(full[box][is_filled], shard.tensor[is_filled]), shard.name
            full[box] = shard.tensor
    for name, full in tensors.items():
        assert not full.isnan().any(), name
    return tensors


class _CloseCall(Exception):
    """A choice of the router that legal rounding may turn."""


@cache
def run_reference(model: ModelSpec, workload: Workload, mbs: int) -> Reference:
    """Run one process with the same micro-batches, on which the auxiliary losses depend."""
    plan = tiny_jobs.build_plan(workload, f"mbs{mbs}", world_size=1, model=model)
    with tempfile.TemporaryDirectory() as folder:
        worker = partial(_run_reference_rank, plan, Path(folder))
        assert launch(worker, nproc=1, run_dir=Path(folder, "run")) is ExitCode.DONE
        seed, observed = pickle.loads(Path(folder, "reference").read_bytes())
    return Reference(seed=seed, observation=observed, tensors=assemble_tensors([observed]))


def _run_reference_rank(plan: Plan, folder: Path, context: RankContext) -> RankOutcome:
    """Take the first seed without a close call; the others end at their first one."""
    device = init_distributed(context)
    _refuse_close_calls()
    for seed in range(_SEEDS):
        seeded = replace(plan, workload=replace(plan.workload, seed=seed))
        with suppress(_CloseCall):
            observed = _observe(seeded, folder, context, device)
            (folder / "reference").write_bytes(pickle.dumps((seed, observed)))
            collectives.leave_world()
            return RankOutcome.DONE
    raise AssertionError(f"{plan.model.name}: no weights whose routing has a clear margin")


def run_ranks(plan: Plan, folder: Path) -> list[RankObservation]:
    """Run the plan's ranks and return what each of them observed."""
    world_size = plan.layout.world_size
    code = launch(partial(_run_rank, plan, folder), nproc=world_size, run_dir=folder / "run")
    assert code is ExitCode.DONE
    observations = []
    for rank in range(world_size):
        with (folder / f"observed{rank}").open("rb") as file:
            observations.append(pickle.load(file))
    return observations


def _run_rank(plan: Plan, folder: Path, context: RankContext) -> RankOutcome:
    observed = _observe(plan, folder, context, init_distributed(context))
    with (folder / f"observed{context.rank}").open("wb") as file:
        pickle.dump(observed, file)
    collectives.leave_world()
    return RankOutcome.DONE


def _observe(
    plan: Plan, folder: Path, context: RankContext, device: torch.device
) -> RankObservation:
    batches = build_batches(plan.workload, plan.model)

    def start(rule: UpdateRule, workload: Workload) -> TrainState:
        state = build_train_state(
            Job(model=plan.model, workload=workload, layout=plan.layout),
            batches,
            rank=context.rank,
            device=device,
            initial_value=draw_test_weight,
            update_rule=rule,
        )
        for layer_router in router.list_routers(state.model):
            bias = layer_router.selection_bias
            if bias is not None:
                bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))
        return state

    state = start(sgd_update, plan.workload)
    shards = _compute_outputs(state, batches)
    first = forward_backward(state, build_phase_clock(state.runtime.device), step=1)
    shards += [
        replace(shard, tensor=shard.tensor.clone()) for shard in state.optimizer.gradient_shards()
    ]
    apply_update(state, build_phase_clock(state.runtime.device), first, lr=0.0)
    # Steps as long as weights would make rounding grow from one to the next.
    sgd_lr = _SGD_LR * 0.5 ** ceil(log2(max(1.0, first.grad_norm)))
    sgd = _train_curve(state, sgd_lr, context, folder, digest_steps=range(1, STEPS + 1))
    clipped = replace(
        plan.workload, optimizer=replace(plan.workload.optimizer, clip_norm=first.grad_norm / 2)
    )
    adamw_state = start(adamw_update, clipped)
    adamw = _train_curve(adamw_state, _ADAMW_LR, context, folder, digest_steps=(STEPS,))
    return RankObservation(shards=tuple(shards), grad_norm=first.grad_norm, sgd=sgd, adamw=adamw)


def prove_job(plan: Plan, folder: Path) -> None:
    """Assert that a plan's ledger is exact, and its computation where one process has the same."""
    if is_layout_free(plan_job(plan)):
        prove_layout(plan, folder)
    else:
        count_layout(plan, folder)


def is_layout_free(job: Job) -> bool:
    """Return whether a job computes the same in every layout, but for the rounding of fp32.

    It does not where numbers are rounded to fewer bits, or where a source of rows decides by itself
    which rows a capacity drops. Nor do ranks that share a batch know of each other's rows what a
    global balance loss counts so far.
    """
    workload = job.workload
    if workload.loss.global_aux_coeff and job.layout.dp > 1:
        return False
    dtypes = (workload.precision, workload.grad_dtype, *workload.optimizer.moment_dtypes)
    is_wide = all(dtype is Dtype.FP32 for dtype in dtypes)
    return is_wide and not job.layout.capacity


def count_layout(plan: Plan, folder: Path) -> None:
    """Assert that every rank of a plan counts in its second step what is predicted for it."""
    code = launch(
        partial(_count_rank, plan, folder), nproc=plan.layout.world_size, run_dir=folder / "run"
    )
    assert code is ExitCode.DONE
    assert_ledgers(plan, folder / "ledger")


def _count_rank(plan: Plan, folder: Path, context: RankContext) -> RankOutcome:
    state = build_train_state(
        plan_job(plan),
        build_batches(plan.workload, plan.model),
        rank=context.rank,
        device=init_distributed(context),
        initial_value=draw_test_weight,
    )
    for step in (1, _COUNTED_STEP):
        context.beat(step)
        is_counted = step == _COUNTED_STEP
        result = train_step(
            state, step=step, lr=_ADAMW_LR, stop_requested=False, count_ledger=is_counted
        )
    record_ledger(state, folder, _COUNTED_STEP, result, context)
    state.optimizer.finish_pending()
    collectives.leave_world()
    return RankOutcome.DONE


def _train_curve(
    state: TrainState,
    lr: float,
    context: RankContext,
    folder: Path,
    *,
    digest_steps: Collection[int],
) -> StepCurve:
    """Train STEPS steps; the ledger of one of them goes to `folder`, as training writes it.

    Weights are digested after the steps `digest_steps`. That ends what overlaps: gathers which the
    next forward would wait for.
    """
    steps = []
    digests = []
    for step in range(1, STEPS + 1):
        context.beat(step)
        result = train_step(
            state, step=step, lr=lr, stop_requested=False, count_ledger=step == _COUNTED_STEP
        )
        assert not result.skipped
        steps.append((result.backward.loss, result.backward.aux_loss, result.backward.grad_norm))
        if step in digest_steps:
            state.optimizer.finish_pending()
            digests.append(dict(_digest_weights(state)))
        if step == _COUNTED_STEP:
            record_ledger(state, folder, step, result, context)
    return StepCurve(steps=tuple(steps), digests=tuple(digests))


def _digest_weights(state: TrainState) -> Iterator[tuple[str, bytes]]:
    """Digest each part of a weight on this rank, by name and box, and the moving biases."""
    for slot in list_parameters(state.model):
        placement = slot.placement
        weight = slot.owner.weight
        if isinstance(weight, DTensor):  # ZeRO-3 has parts of it: gather them
            weight = weight.full_tensor()
        yield f"{slot.name} {placement.offsets} {placement.local_shape}", _digest(weight)
    for layer_router in router.list_routers(state.model):
        if layer_router.selection_bias is not None:
            yield f"bias {layer_router.layer_number}", _digest(layer_router.selection_bias)


def _digest(tensor: torch.Tensor) -> bytes:
    # Of a copy: numpy would fix the storage, which fully_shard frees and fills again.
    return hashlib.sha256(tensor.detach().clone().numpy().tobytes()).digest()


def draw_test_weight(slot: NamedParameter, runtime: Runtime) -> torch.Tensor:
    """Draw a weight as training does, but norm weights and biases from a sine.

    Ones and zeros would hide a norm weight or a bias that is left out.
    """
    placement = slot.placement
    if slot.name.endswith(".weight") and len(placement.global_shape) > 1:
        return draw_initial_value(slot, runtime)
    phases = torch.arange(prod(placement.global_shape)) + len(slot.name)
    values = 0.5 * torch.sin(phases).view(placement.global_shape)
    is_centered = runtime.model.zero_centered_norms and ".attention.norm." not in slot.name
    if slot.name.endswith(".weight") and not is_centered:
        values = values + 1
    boxes = [
        tuple(map(slice, part.offsets, map(add, part.offsets, part.local_shape)))
        for part in placement.split_rows() or (placement,)
    ]
    return torch.cat([values[box] for box in boxes])


def _refuse_close_calls() -> None:
    """Raise at each choice of experts or keys, from now on, that is within rounding of another."""
    choose = reference_kernels.choose_experts

    def check(scores: torch.Tensor, chosen: int) -> None:
        if _score_gap(scores, chosen) <= _MIN_MARGIN:
            raise _CloseCall

    @torch.no_grad()
    def choose_and_check(
        scores: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        biased = scores if bias is None else scores + bias
        chosen = choose(scores, spec, bias)
        if spec.top_groups < spec.groups:
            grouped = biased.unflatten(1, (spec.groups, -1))
            check(grouped.topk(spec.scores_per_group, -1).values.sum(-1), spec.top_groups)
            is_open = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool)
            is_open.scatter_(1, chosen // grouped.shape[2], True)
            biased = grouped.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
        check(biased, spec.top_k)
        return chosen

    reference_kernels.choose_experts = choose_and_check
    choose_keys = sparse_attention.choose_best

    def choose_best_and_check(scores: torch.Tensor, top_k: int) -> torch.Tensor:
        is_open = ~scores.isinf()
        rows = scores[is_open.sum(1) > top_k]
        if len(rows):
            # Rounding is as large as scores are, which have no scale of their own.
            check(rows / rows.masked_fill(rows.isinf(), 0).abs().amax(), top_k)
        return choose_keys(scores, top_k)

    sparse_attention.choose_best = choose_best_and_check


def _score_gap(scores: torch.Tensor, chosen: int) -> float:
    """Return the least distance between the last score chosen and the first one not chosen."""
    if chosen == scores.shape[1]:
        return 1.0
    best = scores.topk(chosen + 1, -1).values
    gaps = best[:, -2] - best[:, -1]
    gaps = gaps[gaps > 0]  # of equal scores the first are taken, in any layout
    return float(gaps.min()) if len(gaps) else 1.0
