"""Selection and auxiliary losses of the router against closed forms.

They are also compared with transformers' own routers.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest
import torch

from layout_proof import WORKLOAD, draw_batches
from moewright.codec import parse_layout
from moewright.engine.comm.mesh import build_mesh
from moewright.engine.comm.pass_turns import PassTurns
from moewright.engine.dispatch.dedup import mask_repeats
from moewright.engine.kernels.fused.reference import choose_experts, compute_scores
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory.part_graphs import PartGraphs
from moewright.engine.memory.saved_tensors import SavedTensorManager
from moewright.engine.memory.weight_gradients import WeightGradStore
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.micro_batch import build_micro_batch
from moewright.engine.model.router import Router, select_experts, sinkhorn, uniform_noise
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.observe.counters import Counters
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import forward_backward
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec, RouterSpec, ScoreFunction
from moewright.spec.workload import (
    DataSpec,
    DropPolicy,
    LossSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
)
from tiny_jobs import MODEL, build_workload

transformers = pytest.importorskip("transformers")


NO_LOSS = LossSpec()
LEARNED = RouterTraining()


def draw_logits(tokens: int = 64, experts: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        tokens, experts, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )


def build_router(
    spec: RouterSpec, loss: LossSpec = NO_LOSS, training: RouterTraining = LEARNED
) -> Router:
    """Build a router of one process, 8 experts, sequences of 32 tokens, weights drawn wide."""
    moe = MODEL.moe
    assert moe is not None
    model: ModelSpec = replace(MODEL, moe=replace(moe, router=spec))
    counters = Counters()
    runtime = Runtime(
        job=Job(
            model=model,
            workload=build_workload(DataSpec(), loss=loss, router=training),
            layout=Layout(world_size=1),
        ),
        mesh=build_mesh(Layout(world_size=1), 0, counters),
        counters=counters,
        weight_grads=WeightGradStore(),
        saved_tensors=SavedTensorManager(counters, replaces_tensors=False),
        kernels=torch_kernels(),
        device=torch.device("cpu"),
        turns=PassTurns(torch.device("cpu"), ()),
        part_graphs=PartGraphs(torch.device("cpu"), WeightGradStore()),
    )
    router = Router(runtime, moe.experts, 2)
    router.weight = torch.nn.Parameter(torch.randn(moe.experts, model.hidden_size))
    return router


# A sparse mixer's weights are no scores over their sum: it has a test of its own.
RUN_SCORES = tuple(score for score in ScoreFunction if score is not ScoreFunction.SPARSE_MIXER)
MIXER = RouterSpec(top_k=2, score=ScoreFunction.SPARSE_MIXER, renormalize=False, mixer_eps=0.3)
SIGMOID = RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, scaling_factor=2.5, selection_bias=True)


@pytest.mark.parametrize("score", RUN_SCORES)
def test_weights_are_the_chosen_scores_over_their_sum_times_the_factor(
    score: ScoreFunction,
) -> None:
    x = draw_logits()
    spec = RouterSpec(top_k=4, score=score, scaling_factor=2.5)
    selection = select_experts(x, spec, torch_kernels())
    torch.testing.assert_close(selection.weights.sum(-1), torch.full((64,), 2.5))
    plain = {
        ScoreFunction.SOFTMAX: lambda v: v.exp(),  # any common factor of a token falls out
        ScoreFunction.SIGMOID: torch.sigmoid,
        ScoreFunction.SQRT_SOFTPLUS: lambda v: (1 + v.exp()).log().sqrt(),
    }[score](x)
    chosen = plain.gather(1, selection.experts)
    torch.testing.assert_close(selection.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    assert selection.counts.sum() == 64 * 4


def test_a_sparse_mixer_is_that_of_phi() -> None:
    """Choices, weights and their gradient equal transformers'; scores are the softmax of all.

    A choice that is forced, as in a repeated forward, leaves all as it was.
    """
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    expected_logits = draw_logits()
    weights, experts = phimoe.sparsemixer(expected_logits, jitter_eps=0.3, training=False)
    factors = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    (weights * factors).sum().backward()
    assert (weights < 1).float().mean() > 0.5  # the threshold lets most choices have neighbours
    for forced in (None, experts):
        logits = draw_logits()
        selection = select_experts(logits, MIXER, torch_kernels(), forced_Tk=forced)
        assert torch.equal(selection.experts, experts)
        torch.testing.assert_close(selection.weights, weights.detach())
        torch.testing.assert_close(selection.scores, torch.softmax(logits, -1))
        (selection.weights * factors).sum().backward()
        torch.testing.assert_close(logits.grad, expected_logits.grad)


def test_the_gradient_of_a_sparse_mixer_is_that_of_its_weights_and_scores() -> None:
    logits = draw_logits(tokens=6, experts=5).detach().double().requires_grad_()
    forced = torch.tensor([[0, 3]] * 3 + [[4, 1]] * 3)  # most of them are not the highest

    def select(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        selection = select_experts(values, MIXER, torch_kernels(), forced_Tk=forced)
        return selection.weights, selection.scores

    assert torch.autograd.gradcheck(select, (logits,))


def test_a_bias_moves_the_choice_and_leaves_the_weights() -> None:
    x = draw_logits()
    bias = torch.zeros(16)
    bias[3] = 10.0
    spec = RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, renormalize=False, selection_bias=True)
    selection = select_experts(x, spec, torch_kernels(), bias)
    assert (selection.experts == 3).any(1).all()
    torch.testing.assert_close(selection.weights, torch.sigmoid(x).gather(1, selection.experts))


@pytest.mark.parametrize("groups", [(4, 2), (4, 1), (2, 2), (1, 1)])
def test_experts_come_from_the_best_groups(groups: tuple[int, int]) -> None:
    count, kept = groups
    spec = RouterSpec(top_k=4, groups=count, top_groups=kept, group_scores=2)
    scores = compute_scores(draw_logits().detach(), ScoreFunction.SOFTMAX)
    chosen = choose_experts(scores, spec)
    size = 16 // count
    for token in range(64):
        group_scores = [
            scores[token, g * size : (g + 1) * size].topk(min(2, size)).values.sum()
            for g in range(count)
        ]
        best = sorted(range(count), key=lambda g: -group_scores[g])[:kept]
        inside = [e for g in best for e in range(g * size, (g + 1) * size)]
        expected = sorted(inside, key=lambda e: -scores[token, e])[:4]
        assert sorted(chosen[token].tolist()) == sorted(expected)


def test_the_choice_and_its_weights_are_those_of_deepseek_v3_in_transformers() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    hf_router = DeepseekV3TopkRouter(config)
    bias = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(5))
    hf_router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        hf_router.weight.copy_(torch.eye(16))  # its logits are its inputs
    x = draw_logits(256)
    _, hf_weights, hf_experts = hf_router(x.detach())
    spec = RouterSpec(
        top_k=4, score=ScoreFunction.SIGMOID, scaling_factor=2.5, groups=4, top_groups=2,
        group_scores=2, selection_bias=True,
    )  # fmt: skip
    selection = select_experts(x, spec, torch_kernels(), bias)
    experts, order = selection.experts.sort(-1)
    sorted_hf_experts, hf_order = hf_experts.sort(-1)
    assert torch.equal(experts, sorted_hf_experts)
    torch.testing.assert_close(selection.weights.gather(1, order), hf_weights.gather(1, hf_order))


def test_gradients_of_the_weights_are_those_of_the_plain_formula() -> None:
    for score in RUN_SCORES:
        x = draw_logits().detach().double().requires_grad_()
        spec = RouterSpec(top_k=3, score=score, scaling_factor=1.7)
        pull = torch.randn(64, 3, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda v, spec=spec: select_experts(v, spec, torch_kernels()).weights, (x,), eps=1e-6
        )
        (select_experts(x, spec, torch_kernels()).weights * pull).sum().backward()
        assert x.grad is not None
        assert (x.grad != 0).any()


def run_aux_losses(loss: LossSpec, spec: RouterSpec) -> torch.Tensor:
    torch.manual_seed(3)
    router = build_router(spec, loss)
    return router(torch.randn(64, MODEL.hidden_size))[1]


def test_an_even_router_has_a_balance_loss_of_its_coefficient() -> None:
    even = build_router(
        RouterSpec(top_k=2), LossSpec(aux_coeff=0.5), RouterTraining(force=RouterForce.BALANCED)
    )
    with torch.no_grad():
        even.weight.zero_()
        losses = even(torch.randn(64, MODEL.hidden_size))[1]
    assert losses.tolist() == pytest.approx([0.5, 0, 0, 0])


@pytest.mark.parametrize("spec", [RouterSpec(top_k=2), SIGMOID])
def test_the_sequence_loss_is_the_mean_of_the_balance_losses_of_single_sequences(
    spec: RouterSpec,
) -> None:
    torch.manual_seed(3)
    sequence_router = build_router(spec, LossSpec(seq_aux_coeff=1.0))
    batch_router = build_router(spec, LossSpec(aux_coeff=1.0))
    batch_router.weight = sequence_router.weight
    x = torch.randn(64, MODEL.hidden_size)
    losses = [batch_router(sequence)[1].sum() for sequence in x.split(32)]
    torch.testing.assert_close(sequence_router(x)[1].sum(), torch.stack(losses).mean())


def test_the_global_loss_uses_the_counts_of_the_batch_so_far() -> None:
    torch.manual_seed(3)
    router = build_router(RouterSpec(top_k=2), LossSpec(global_aux_coeff=1.0))
    x1, x2 = torch.randn(32, MODEL.hidden_size), torch.randn(32, MODEL.hidden_size)
    selection1, loss1 = router(x1)
    selection2, loss2 = router(x2)
    share = (selection1.counts + selection2.counts) / (2 * 32 * 2)
    torch.testing.assert_close(loss2.sum(), 8 * (share * selection2.scores.mean(0)).sum())
    alone1 = 8 * (selection1.counts / 64 * selection1.scores.mean(0)).sum()
    torch.testing.assert_close(loss1.sum(), alone1)
    router.begin_step()
    alone2 = 8 * (selection2.counts / 64 * selection2.scores.mean(0)).sum()
    torch.testing.assert_close(router(x2)[1].sum(), alone2)


def test_losses_add_up() -> None:
    parts = [
        LossSpec(aux_coeff=0.1),
        LossSpec(seq_aux_coeff=0.2),
        LossSpec(global_aux_coeff=0.3),
        LossSpec(z_coeff=0.4),
    ]
    together = LossSpec(aux_coeff=0.1, seq_aux_coeff=0.2, global_aux_coeff=0.3, z_coeff=0.4)
    for spec in (RouterSpec(top_k=2), SIGMOID):
        losses = run_aux_losses(together, spec)
        assert losses.all()
        torch.testing.assert_close(losses, sum(run_aux_losses(part, spec) for part in parts))


def gradients(
    layout: str, loss: LossSpec, *, flat: bool = False
) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """Return the gradient of every weight, after a step of one process.

    Routers that are `flat` score all experts alike.
    """

    def draw_value(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
        value = draw_initial_value(parameter, runtime)
        return torch.zeros_like(value) if flat and "router" in parameter.name else value

    job = Job(
        model=MODEL,
        workload=replace(WORKLOAD, loss=loss),
        layout=parse_layout(layout, world_size=1),
    )
    state = build_train_state(
        job, draw_batches(MODEL), rank=0, device=torch.device("cpu"), initial_value=draw_value
    )
    forward_backward(state, build_phase_clock(state.runtime.device), step=1)
    return {
        (shard.name, shard.offsets): shard.tensor.clone()
        for shard in state.optimizer.gradient_shards()
    }


def test_losses_of_sequences_and_tokens_do_not_depend_on_the_micro_batch() -> None:
    """They reach the gradients in proportion to their coefficients.

    The number of micro-batches of a batch does not matter.
    """
    none, once, twice = (
        gradients("mbs8", LossSpec(seq_aux_coeff=0.5 * c, z_coeff=0.1 * c)) for c in (0, 1, 2)
    )
    small = gradients("mbs1", LossSpec(seq_aux_coeff=0.5, z_coeff=0.1))
    for name, gradient in once.items():
        assert float((small[name] - gradient).norm()) <= 3e-5 * float(gradient.norm()), name
        part = gradient - none[name]
        if "router" in name[0]:
            assert float(part.norm()) > 0.1 * float(none[name].norm()), name
        rounding = 3e-5 * float(twice[name].norm())
        assert float((twice[name] - none[name] - 2 * part).norm()) <= rounding, name


def test_ties_fall_the_same_way_in_a_replay() -> None:
    loss = LossSpec(aux_coeff=0.02)
    plain, *others = (
        gradients(f"mbs4{more}", loss, flat=True)
        for more in ("", ",recompute=moe", ",recompute=full")
    )
    for replay in others:
        assert all(torch.equal(plain[name], replay[name]) for name in plain)


def test_the_bias_moves_by_its_rate_against_the_load() -> None:
    """The bias moves up by the rate where an expert got fewer rows than the mean.

    It moves down where it got more (arXiv 2408.15664).
    """
    router = build_router(SIGMOID, training=RouterTraining(bias_update_rate=0.01))
    router.update_selection_bias(torch.tensor([10, 0, 5, 5, 5, 5, 5, 5]))
    assert router.selection_bias is not None
    torch.testing.assert_close(
        router.selection_bias, 0.01 * torch.tensor([-1.0, 1, 0, 0, 0, 0, 0, 0])
    )


def test_forced_experts() -> None:
    even = build_router(RouterSpec(top_k=2), training=RouterTraining(force=RouterForce.BALANCED))
    selected, _ = even(torch.randn(64, MODEL.hidden_size))
    assert selected.counts.tolist() == [16] * 8
    assert (selected.experts[:, 0] != selected.experts[:, 1]).all()
    skewed = build_router(
        RouterSpec(top_k=2), training=RouterTraining(force=RouterForce.SKEWED, force_std=2.0)
    )
    loads = [skewed(torch.randn(640, MODEL.hidden_size))[0].counts for _ in range(2)]
    assert torch.equal(*loads)
    assert loads[0].max() > 1.5 * loads[0].float().mean()


def test_forced_preferences_draw_by_the_numbers_of_tokens() -> None:
    """However ranks and micro-batches part the sequences, a token has the same experts."""
    training = RouterTraining(force=RouterForce.SKEWED)
    router = build_router(RouterSpec(top_k=2), training=training)
    x = torch.randn(96, MODEL.hidden_size)
    together = router(x, first_sequence=0)[0].experts
    assert torch.equal(router(x[32:], first_sequence=1)[0].experts, together[32:])
    assert not torch.equal(together[:32], together[32:64])


@pytest.mark.parametrize("policy", list(DropPolicy))
def test_a_capacity_keeps_the_likeliest_rows_or_the_first(policy: DropPolicy) -> None:
    selection = select_experts(draw_logits(), RouterSpec(top_k=4), torch_kernels())
    kept = selection.drop_over_capacity(10, policy)
    assert torch.equal(selection.drop_over_capacity(64, policy), selection.experts)
    for expert in range(16):
        rows = (selection.experts == expert).nonzero()
        kept_slots = {tuple(slot) for slot in (kept == expert).nonzero().tolist()}
        order = list(range(len(rows)))
        if policy is DropPolicy.PROBS:
            order = sorted(order, key=lambda i: -selection.weights[tuple(rows[i])])
        assert kept_slots == {tuple(rows[i].tolist()) for i in order[:10]}
    assert ((kept == selection.experts) | (kept == 16)).all()


@pytest.mark.parametrize("skew", [0.0, 3.0, 40.0])
def test_sinkhorn_evens_the_load_whatever_the_preference(skew: float) -> None:
    """Rows sum to 1 and columns to T / E.

    Experts flooded and starved by preference get a like share of the rows.
    """
    x = draw_logits(256).detach() + skew * torch.linspace(-1, 1, 16)
    scaled = sinkhorn(x, 5000)
    torch.testing.assert_close(scaled.sum(1), torch.ones(256, dtype=torch.float64))
    torch.testing.assert_close(scaled.sum(0), torch.full((16,), 16.0, dtype=torch.float64))
    # What scales rows and columns alone leaves every ratio of four corners.
    ratio = (scaled[0, 0] * scaled[1, 1] / (scaled[0, 1] * scaled[1, 0])).log()
    torch.testing.assert_close(
        ratio, (x[0, 0] + x[1, 1] - x[0, 1] - x[1, 0]).double(), rtol=1e-4, atol=1e-6
    )
    loads = torch.bincount(
        choose_experts(sinkhorn(x, 0), RouterSpec(top_k=2)).flatten(), minlength=16
    )
    assert loads.max() < 1.5 * 32
    if skew:
        plain = torch.bincount(choose_experts(x, RouterSpec(top_k=2)).flatten(), minlength=16)
        assert plain.max() > 3 * 32
        assert plain.min() == 0


def test_one_sinkhorn_iteration_is_its_formula() -> None:
    x = draw_logits(8, 4).detach()
    kernel = x.double().exp()
    columns = 2.0 / (kernel / kernel.sum(1, keepdim=True)).sum(0)
    expected = kernel * columns / (kernel @ columns)[:, None]
    torch.testing.assert_close(sinkhorn(x, 1), expected)


def test_sinkhorn_chooses_in_training_alone_and_weighs_by_the_scores() -> None:
    torch.manual_seed(3)
    spec = RouterSpec(top_k=2, pre_softmax=True, renormalize=False)
    router = build_router(spec, training=RouterTraining(assignment=RouterAssignment.SINKHORN))
    x = torch.randn(64, MODEL.hidden_size)
    trained, evaluated = router(x, first_sequence=0)[0], router(x)[0]
    logits_TE = x @ router.weight.T
    assert torch.equal(evaluated.experts, choose_experts(logits_TE, spec))
    assert torch.equal(trained.experts, choose_experts(sinkhorn(logits_TE, 0), spec))
    probs = logits_TE.softmax(-1).gather(1, trained.experts)
    pull = torch.randn(64, 2)
    torch.testing.assert_close(trained.weights, probs)
    (gradient,) = torch.autograd.grad((trained.weights * pull).sum(), router.weight)
    (expected,) = torch.autograd.grad((probs * pull).sum(), router.weight)
    torch.testing.assert_close(gradient, expected)


def test_jitter_scales_the_routers_input_by_noise_of_the_token_alone() -> None:
    torch.manual_seed(3)
    router = build_router(RouterSpec(top_k=2), training=RouterTraining(jitter_eps=0.25))
    x = torch.randn(64, MODEL.hidden_size, requires_grad=True)
    noise = torch.stack(
        [
            uniform_noise(torch.tensor([n]), MODEL.hidden_size, seed=1234, stream=2)[0]
            for n in range(64)
        ]
    )
    noise = 0.75 + 0.5 * noise
    # The mean is 1 within four sigma.
    assert abs(float(noise.mean()) - 1) < 4 * 0.25 / (3 * noise.numel()) ** 0.5
    scores = router(x, first_sequence=0)[0].scores
    expected = ((x * noise) @ router.weight.T).softmax(-1)
    torch.testing.assert_close(scores, expected)
    pull = torch.randn(64, 8)
    leaves = (x, router.weight)
    gradients = torch.autograd.grad((scores * pull).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * pull).sum(), leaves)
    torch.testing.assert_close(gradients, expected_gradients)
    second_sequence = router(x[32:], first_sequence=1)[0].scores
    torch.testing.assert_close(second_sequence, scores[32:])
    torch.testing.assert_close(router(x)[0].scores, (x @ router.weight.T).softmax(-1))


def test_an_fp64_router_tells_apart_what_fp32_rounds_away() -> None:
    wide = build_router(
        RouterSpec(top_k=2),
        LossSpec(aux_coeff=1.0, z_coeff=1.0),
        RouterTraining(router_dtype=RouterDtype.FP64),
    )
    x = torch.randn(64, MODEL.hidden_size)
    selected, losses = wide(x)
    exact = (x.double() @ wide.weight.double().T).softmax(-1)
    assert float((selected.scores - exact).detach().abs().max()) < 1e-15
    assert losses.dtype == torch.float32
    (grad,) = torch.autograd.grad(selected.weights.sum() + losses.sum(), wide.weight)
    assert grad.dtype == torch.float32


def test_copies_are_the_distinct_ranks_of_each_token() -> None:
    """Uniform choice of k = 4 of 16 experts reaches the expected ranks of 4.

    That is 4 (1 - C(12,4)/C(16,4)) of them on average.
    """
    experts = torch.stack(
        [torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(4000)]
    )
    copies = torch.bincount(mask_repeats(experts // 4, 4).flatten(), minlength=5)[:4]
    assert copies.tolist() == [int((experts // 4 == rank).any(1).sum()) for rank in range(4)]
    reached = 4 * (1 - comb(12, 4) / comb(16, 4))
    assert copies.sum() / 4000 == pytest.approx(reached, abs=3 * 0.7 / 4000**0.5)
    assert (mask_repeats(torch.full((5, 4), 16) // 4, 4) == 4).all()  # dropped slots go nowhere


@pytest.mark.parametrize("spec", [RouterSpec(top_k=2), SIGMOID])
def test_losses_and_loads_are_those_of_the_tokens_that_count_alone(spec: RouterSpec) -> None:
    """Left out are ten tokens of the first sequence, and all of the third."""
    torch.manual_seed(3)
    x = torch.randn(96, MODEL.hidden_size)
    is_counted = torch.ones(3, 32, dtype=torch.bool)
    is_counted[0, 5:15] = False
    is_counted[2] = False
    for loss in (
        LossSpec(aux_coeff=0.1),
        LossSpec(global_aux_coeff=0.1),
        LossSpec(z_coeff=0.1),
    ):
        router = build_router(spec, loss)
        tokens = torch.zeros(3, 32, dtype=torch.int64)
        batch = build_micro_batch(router._runtime, tokens, tokens, None, is_counted)
        _, masked = router(x, counted=batch.counted)
        masked.sum().backward()
        masked_grad = router.weight.grad
        router.weight.grad = None
        router.begin_step()
        selection, alone = router(x[is_counted.flatten()])
        alone.sum().backward()
        torch.testing.assert_close(masked, alone)
        torch.testing.assert_close(masked_grad, router.weight.grad)
        router(x, counted=batch.counted)
        assert router.counted_loads.tolist() == selection.counts.tolist()
    sequences = build_router(spec, LossSpec(seq_aux_coeff=0.1))
    batch_router = build_router(spec, LossSpec(aux_coeff=0.1))
    batch_router.weight = sequences.weight
    rows = [part[mask] for part, mask in zip(x.split(32), is_counted, strict=True) if mask.any()]
    losses = [batch_router(row)[1].sum() for row in rows]
    expected = torch.stack(losses).sum() / 2  # the third sequence does not count
    torch.testing.assert_close(sequences(x, counted=batch.counted)[1].sum(), expected)
