"""The load of the hottest expert rank, by what a job says of its routing.

Where the router decides and nobody has measured, the load is a distribution. A step waits for the
hottest rank in every layer of every micro-batch. A peak is what one rank keeps of many layers and
micro-batches, in which it is not the hottest every time. Both are 1 + a log-normal excess, of which
published runs tell the middle, and how far runs lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean

from moewright.rules import expert_placement
from moewright.rules.job import Job, micro_batch_tokens, rows_for_peer
from moewright.rules.routing import is_even, largest_of_centred
from moewright.spec.layout import ExpertPlacement, Layout
from moewright.spec.model import MoeSpec
from moewright.spec.workload import RouterAssignment, Routing, Workload

# Deviation of a rank's rows over the mean that stays however much text an exchange has.
_LASTING_SPREAD = 0.1
# Text of one kind prefers few experts: so many tokens in a row do. Their deviation over the one
# that they would have if all of them took the same k experts, by what evens the load out.
_ALIKE_TOKENS = 4096
_EXPERT_SPREAD = 1.8  # an auxiliary loss over experts
_RANK_SPREAD = 1.1  # a selection bias, or losses over groups of experts too (DeepSeek-V2)
_SPECIAL_EXPERTS = 16  # experts over k from which on text has experts of its own
# Excess of a peak over even rows, times experts on a rank: FP8-Flow's peaks, selective less full
# recompute (1.14, 1.38, 2.39 at 16, 8, 4 experts a rank); with a selection bias they show none, nor
# do Megatron-LM's golden peaks of 8 experts with 2 chosen, one or two a rank.
_PEAK_EXCESS = 4.0
_BIAS_PEAK_TAIL = 2.0  # of its 90th percentile
# Deviation of the logarithm of an excess over the layers and micro-batches of a step, of which a
# capacity cuts the largest off; and over publishers.
_WITHIN_SPREAD = 0.6
_STEP_SPREAD = 0.35
_PEAK_SPREAD = 0.5
# The 90th percentile, in deviations above the middle.
TAIL_DEVIATIONS = NormalDist().inv_cdf(0.9)
# The middles of 16 equally likely parts of a normal variable: means over them have no noise.
_DRAWS = tuple(NormalDist().inv_cdf((draw + 0.5) / 16) for draw in range(16))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoad:
    """The rows of the hottest expert rank over the mean: in the middle, and where 9 of 10 runs are.

    `step` and `step_p90` are those that steps go by, `peak` and `peak_p90` those of peaks. `within`
    is the deviation of the logarithm of their excess over the layers and micro-batches of a step.
    """

    step: float = 1.0
    within: float = 0.0
    step_p90: float = 1.0
    peak: float = 1.0
    peak_p90: float = 1.0


def step_rows(job: Job, load: float, within: float) -> int:
    """Return the rows that a step waits for, of a rank with a mean `load` over the even one.

    Every layer and micro-batch has its own load, of which a capacity cuts the largest off.
    """
    if not within or not job.layout.capacity:
        return job.routed_rows(load)
    # Log-normal factors of mean 1: without a capacity the mean stays `load`.
    excesses = ((load - 1) * exp(within * draw - within**2 / 2) for draw in _DRAWS)
    return round(fmean(job.routed_rows(1 + excess) for excess in excesses))


def has_natural_load(workload: Workload) -> bool:
    """Return whether the router decides, and the job says nothing of the load."""
    is_learned = workload.routing is Routing.LEARNED and not workload.load_factor
    return is_learned and not is_even(workload)


def expected_load(job: Job, *, scale: float = 1.0) -> RankLoad:
    """Return the load of the hottest expert rank that a prediction assumes.

    A layer waits for its hottest rank, so layers of different load add up: for a histogram it is
    the mean over the layers. `scale` multiplies the excess that steps go by where the router
    decides and the job says nothing of the load.
    """
    moe = job.model.moe
    workload = job.workload
    if moe is None or is_even(workload):
        return RankLoad()
    if has_natural_load(workload):
        return _natural_load(job, moe, scale)
    load = workload.load_factor
    if workload.routing is Routing.SKEWED:
        load = skewed_load_factor(
            moe.experts,
            job.layout.ep,
            moe.router.top_k,
            workload.load_skew,
            capacity=job.layout.capacity,
        )
    elif workload.routing is Routing.MEASURED:
        load = fmean(layer_load_factors(workload, job.layout))
    return RankLoad(step=load, step_p90=load, peak=load, peak_p90=load)


def expected_repeats(job: Job) -> float:
    """Return the share of steps that are expected to be over their rank_capacity, and run twice.

    The rows of a rank for the hottest rank of its group, which has `load` times the mean n, are
    taken as normal with the variance of drawn ones, load n (1 - load / ep). A step is over where
    one rank is in one layer and micro-batch (docs/formulas.md 3). Balanced loads never are.
    """
    workload = job.workload
    layout = job.layout
    moe = job.model.moe
    if moe is None or not layout.rank_capacity or is_even(workload):
        return 0.0
    tokens = micro_batch_tokens(workload, layout)
    top_k = moe.router.top_k
    budget = rows_for_peer(tokens, top_k, layout)
    # The experts of a token are distinct, so no source ever has more rows for a rank.
    if budget >= tokens * min(top_k, moe.experts // layout.ep):
        return 0.0
    loads = (expected_load(job).step,) * len(job.model.routed_layers)
    if workload.routing is Routing.MEASURED:
        loads = layer_load_factors(workload, layout)
    even = tokens * top_k / layout.ep
    # Micro-batches of a step on all ranks with tokens of their own: N of docs/formulas.md 3.
    sources = workload.global_batch / layout.mbs * layout.cp * (layout.sp_degree)
    log_fits = 0.0
    for load in loads:
        # A rank that gets everything (load = ep) has no spread, by which the next line divides.
        deviation = sqrt(max(load * even * (1 - load / layout.ep), 1e-9))
        # Half a row more: rows are whole numbers, the normal distribution is not.
        fits = NormalDist().cdf((budget + 0.5 - load * even) / deviation)
        # The probability is 0 in floating point some 38 deviations below the mean, where log fails.
        log_fits += sources * log(max(fits, 1e-300))
    return 1 - exp(log_fits)


def _natural_load(job: Job, moe: MoeSpec, scale: float) -> RankLoad:
    """Return the load where the router decides and nobody has measured (docs/formulas.md 4)."""
    if job.layout.ep == 1 or job.workload.router.assignment is RouterAssignment.SINKHORN:
        return RankLoad()
    most = _most_load(moe, job.layout.ep)
    excess = scale * largest_of_centred(job.layout.ep) * _rank_spread(job, moe)
    # Squared: few experts have little text of their own, and it evens out over a peak's layers.
    peak_excess = _PEAK_EXCESS * _special_share(moe) ** 2 * job.layout.ep / moe.experts
    peak_tail = peak_excess * exp(TAIL_DEVIATIONS * _PEAK_SPREAD)
    if moe.router.selection_bias:
        peak_tail = peak_excess * _BIAS_PEAK_TAIL / _PEAK_EXCESS
        peak_excess = 0.0
    return RankLoad(
        step=min(1 + excess, most),
        within=_WITHIN_SPREAD,
        step_p90=min(1 + excess * exp(TAIL_DEVIATIONS * _STEP_SPREAD), most),
        peak=min(1 + peak_excess, most),
        peak_p90=min(1 + peak_tail, most),
    )


def _rank_spread(job: Job, moe: MoeSpec) -> float:
    """Return the deviation of the rows of an expert rank in one micro-batch, over their mean.

    Three parts add in squares: what stays, what text of one kind prefers, and the draws.
    """
    top_k = moe.router.top_k
    tokens = max(1, job.micro_batch_tokens)
    alike = min(_ALIKE_TOKENS, job.workload.seq_len)
    is_even_by_rank = moe.router.selection_bias or moe.router.top_groups < moe.router.groups
    spread = _RANK_SPREAD if is_even_by_rank else _EXPERT_SPREAD
    spread *= _special_share(moe)
    # All of `alike` tokens on the same k of E experts: (1 / k - 1 / E) EP a rank, over the EP
    # tokens / alike kinds of text that one exchange has.
    kinds = spread**2 * (1 / top_k - 1 / moe.experts) * alike / tokens
    return sqrt(_LASTING_SPREAD**2 + kinds + 1 / (tokens * top_k))


def _special_share(moe: MoeSpec) -> float:
    """Return how far the experts of a layer have text of their own, from 0 to 1."""
    return min(1.0, moe.experts / moe.router.top_k / _SPECIAL_EXPERTS)


def _most_load(moe: MoeSpec, ep: int) -> float:
    """Return the load of a rank that gets all rows that can go to it.

    A token goes to distinct experts, so a rank gets as many of its rows as it has experts.
    """
    return ep * min(moe.router.top_k, moe.experts // ep) / moe.router.top_k


def layer_load_factors(workload: Workload, layout: Layout) -> tuple[float, ...]:
    """Return the measured load of the hottest EP rank over the mean, of each layer with experts."""
    return tuple(_layer_load_factor(counts, layout) for counts in workload.load_histogram)


def _layer_load_factor(counts: tuple[int, ...], layout: Layout) -> float:
    if layout.spare:
        return expert_placement.place_with_replicas(counts, layout.ep, layout.spare).load_factor
    if layout.expert_placement is ExpertPlacement.BALANCED:
        counts = expert_placement.balanced_slot_loads(counts, layout.ep)
    return expert_placement.rank_load_factor(counts, layout.ep)


def skewed_load_factor(
    experts: int, ep: int, top_k: int, skew: float, *, capacity: float = 0.0
) -> float:
    """Return the expected load of the hottest of `ep` ranks over the mean (docs/formulas.md 4).

    The loads of experts have the standard deviation `skew` over their mean. A `capacity` cuts each
    expert's load off: the kept loads have a smaller mean and spread, and the result is over the
    mean that even loads have under that capacity.

    A rank's mean of n = experts / ep loads, drawn without replacement, has the deviation d = skew
    sqrt((1 - n / E) E / (E - 1) / n). Ranks are taken as log-normal: with s^2 = ln(1 + d^2) the
    hottest of N is exp(s z - s^2 / 2), z the expected largest of N normal draws whose sum is 0
    (Blom). No rank can get more than every token on each of its experts, nor more than everything.
    """
    if capacity > 0 and skew > 0:
        kept, kept_skew = _truncated_moments(skew, capacity)
        hottest = kept * skewed_load_factor(experts, ep, top_k, kept_skew)
        return min(hottest, capacity) / min(1.0, capacity)
    if ep == 1 or experts == 1:
        return 1.0
    local = experts // ep
    deviation = skew * sqrt((1 - local / experts) / local * experts / (experts - 1))
    largest = largest_of_centred(ep)
    spread = min(sqrt(log(1 + deviation**2)), largest)  # beyond, the formula would fall again
    return min(exp(spread * largest - spread**2 / 2), float(ep), max(1.0, experts / top_k))


def _truncated_moments(skew: float, most: float) -> tuple[float, float]:
    """Return the mean of min(X, most) and its deviation over that mean.

    X is log-normal of mean 1 and deviation `skew`.
    """
    cdf = NormalDist().cdf
    spread = sqrt(log(1 + skew**2))
    # The partial moments of a log-normal below the cap, and the cap itself times the part above it.
    edge = log(most) / spread + spread / 2
    mean = cdf(edge - spread) + most * cdf(-edge)
    square = (1 + skew**2) * cdf(edge - 2 * spread) + most**2 * cdf(-edge)
    # Rounding may leave the variance just below 0.
    return mean, sqrt(max(0.0, square - mean**2)) / mean
