"""Constants of the time model from measured runs: bounded, with priors, and with what stays
uncertain.

A constant is prior * exp(shared + site), where `site` is a hardware's own part. The sum of squares
of log(predicted / measured) / NOISE, robust against rows that nothing explains (Huber), and of
every deviation over its spread is least (Gauss-Newton); the inverse of its second derivative says
how uncertain each constant stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from moewright.cost.constants import Constants
from moewright.cost.repricing import RepriceableStep
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.sourced import Sourced, SourceKind

# of a row that the model describes in full: repeats differ by 0-5 %, and more between releases
RUN_NOISE = 0.05
_HUBER = 1.5
_STEP = 0.02  # for derivatives by differences, in the logarithm of a constant
_LARGEST_MOVE = 0.5
_MAX_ITERATIONS = 8
_CONVERGED = 0.003
_HARDWARE_PRIOR_SHARE = (
    0.6  # of the neutral spread that constants fitted on published runs are given
)

Vector = npt.NDArray[np.float64]


class PriorCentre(StrEnum):
    """What the priors stand on: round numbers and kernel tables, or the constants that the hardware
    has already."""

    NEUTRAL = "neutral"
    HARDWARE = "hardware"


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeConstant:
    """A constant that runs may move. Spreads are standard deviations of its logarithm;
    `site_spread` 0 says that it belongs to the software and not to a machine."""

    name: str
    prior: float
    spread: float
    site_spread: float = 0.0
    low: float = 0.0
    high: float = float("inf")
    tied_names: tuple[str, ...] = ()  # constants that take the same value


# Kernel tables and nominal bandwidths as they are (1), and round numbers where nothing is tabled.
FREE_CONSTANTS = (
    FreeConstant(name="gemm_time_scale", prior=1.0, spread=0.25, site_spread=0.15),
    FreeConstant(name="gemm_8bit_time_scale", prior=1.0, spread=0.25, site_spread=0.1),
    FreeConstant(name="gemm_mx_time_scale", prior=1.1, spread=0.05),
    FreeConstant(name="grouped_gemm_time_scale", prior=1.0, spread=0.2),
    FreeConstant(name="biased_expert_time_scale", prior=2.0, spread=0.3),
    FreeConstant(
        name="attention_time_scale",
        prior=1.0,
        spread=0.2,
        tied_names=("attention_backward_time_scale",),
    ),
    FreeConstant(name="elementwise_time_scale", prior=1.3, spread=0.25),
    FreeConstant(name="weight_traffic_time_scale", prior=0.6, spread=0.4, high=1.2),
    # 6 ms in quadrature with the device (time_model_findings) are 4.7 ms at an exponent of 1.5; 8.3
    # ms a year before.
    FreeConstant(name="host_s_per_layer_microbatch", prior=4.7e-3, spread=0.4, site_spread=0.15),
    FreeConstant(name="host_per_year", prior=1.3, spread=0.1, low=1.0, high=2.0),
    FreeConstant(name="host_exponent", prior=1.5, spread=0.2, low=1.0, high=3.0),
    FreeConstant(name="host_exponent_synced", prior=1.3, spread=0.2, low=1.0, high=3.0),
    FreeConstant(name="host_graphed_attention", prior=0.25, spread=0.3, high=0.5),
    FreeConstant(name="host_graphed_router", prior=0.3, spread=0.3, high=0.5),
    FreeConstant(name="ep_overlap_host", prior=1.25, spread=0.15, low=1.0, high=2.0),
    FreeConstant(name="tp_host", prior=1.2, spread=0.1, low=1.0, high=1.6),
    FreeConstant(name="dp_overlap_host", prior=1.05, spread=0.15, low=1.0, high=1.4),
    FreeConstant(name="sync_s_alltoall", prior=9e-4, spread=0.4),
    FreeConstant(name="alltoall_inside_time_scale", prior=1.0, spread=0.25),
    FreeConstant(name="alltoall_between_time_scale", prior=1.1, spread=0.25, site_spread=0.15),
    FreeConstant(name="dedup_inside_time_scale", prior=0.9, spread=0.25, site_spread=0.1),
    FreeConstant(name="dedup_between_time_scale", prior=1.0, spread=0.25, site_spread=0.1),
    FreeConstant(name="ep_overlap_hidden", prior=0.7, spread=0.25, high=0.95),
    FreeConstant(name="tp_time_scale", prior=0.85, spread=0.25, site_spread=0.1),
    FreeConstant(name="tp_overlap_hidden", prior=0.4, spread=0.4, high=0.9),
    FreeConstant(name="overlapped_dp_share", prior=0.25, spread=0.2, high=1.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One measured step. `weight` below 1 is for runs that repeat another."""

    id: str
    prepared: RepriceableStep
    hardware: Hardware
    measured_s: float
    weight: float = 1.0

    @property
    def site(self) -> str:
        return self.hardware.name


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedConstant:
    """A constant on one site: its value before and after, and standard deviations of its logarithm
    before and after."""

    name: str
    prior: float
    value: float
    prior_sd: float
    sd: float


class Fit:
    """Constants fitted to runs, for every site among them, and for others by what sites share."""

    __slots__ = (
        "_covariance",
        "_parts",
        "_priors",
        "_spreads",
        "_theta",
        "free_constants",
        "jacobian",
        "run_count",
    )

    def __init__(
        self,
        *,
        free_constants: tuple[FreeConstant, ...],
        run_count: int,
        parts: tuple[tuple[int, str], ...],
        spreads: Vector,
        priors: Mapping[str, tuple[float, ...]],
        log_shifts: Vector,
        covariance: Vector,
        jacobian: Vector,
    ) -> None:
        self.free_constants, self.run_count, self.jacobian = free_constants, run_count, jacobian
        self._parts, self._spreads, self._priors = parts, spreads, priors
        self._theta, self._covariance = log_shifts, covariance

    @property
    def log_shifts(self) -> Vector:
        return self._theta

    def restrict_to_runs(self, indices: Sequence[int]) -> Fit:
        """This fit as the start of another on some of its runs, given by their places."""
        return Fit(
            free_constants=self.free_constants,
            run_count=self.run_count,
            parts=self._parts,
            spreads=self._spreads,
            priors=self._priors,
            log_shifts=self._theta,
            covariance=self._covariance,
            jacobian=self.jacobian[list(indices)],
        )

    def constants_for(self, hardware: Hardware) -> tuple[Constant, ...]:
        """What the fit says of every free constant on this hardware."""
        priors = self._priors.get(hardware.name) or tuple(one.prior for one in self.free_constants)
        values = _values(self.free_constants, self._parts, priors, self._theta, hardware.name)
        return _as_constants(self.free_constants, values, f"fit of {self.run_count} runs")

    def fitted_constants(self, site: str) -> tuple[FittedConstant, ...]:
        """Every free constant on a site, the best known first."""
        return self._estimated(site, self._covariance)

    def fitted_constants_after(self, run: MeasuredRun, site: str) -> tuple[FittedConstant, ...]:
        """What `estimated` would say of the uncertainty if this run were measured too."""
        gradient = self.log_time_gradient(run)
        seen = self._covariance @ gradient
        covariance = self._covariance - np.outer(seen, seen) / (
            RUN_NOISE**2 + float(gradient @ seen)
        )
        return self._estimated(site, covariance)

    def _estimated(self, site: str, covariance: Vector) -> tuple[FittedConstant, ...]:
        priors = self._priors.get(site) or tuple(one.prior for one in self.free_constants)
        values = _values(self.free_constants, self._parts, priors, self._theta, site)
        found = []
        for j, (one, prior, value) in enumerate(
            zip(self.free_constants, priors, values, strict=True)
        ):
            mine = np.array(
                [1.0 if k == j and where in ("", site) else 0.0 for k, where in self._parts]
            )
            prior_sd = sqrt(float((mine * self._spreads**2).sum()))
            sd = sqrt(float(mine @ covariance @ mine))
            found.append(
                FittedConstant(name=one.name, prior=prior, value=value, prior_sd=prior_sd, sd=sd)
            )
        return tuple(sorted(found, key=lambda one: one.sd / one.prior_sd))

    def log_time_gradient(self, run: MeasuredRun) -> Vector:
        """How the logarithm of a run's predicted seconds moves with each part of each constant."""
        (row,) = _jacobian([run], self.free_constants, self._parts, self._priors, self._theta)
        found: Vector = row
        return found

    def log_time_sd(self, run: MeasuredRun) -> float:
        """Standard deviation of the logarithm of a run's predicted seconds, from the constants
        alone."""
        gradient = self.log_time_gradient(run)
        return sqrt(float(gradient @ self._covariance @ gradient))


def fit_constants(
    runs: Sequence[MeasuredRun],
    *,
    free_constants: tuple[FreeConstant, ...] = FREE_CONSTANTS,
    centre: PriorCentre = PriorCentre.NEUTRAL,
    start: Fit | None = None,
) -> Fit:
    """Fit the constants to the runs; with few of them the priors hold what the runs do not tell.

    `start` is a fit of these runs and others: its constants and derivatives are the first guess,
    which makes cross-validation fast.
    """
    sites = tuple(sorted({run.site for run in runs}))
    parts = start._parts if start else _parts(free_constants, sites)
    share = _HARDWARE_PRIOR_SHARE if centre is PriorCentre.HARDWARE else 1.0
    spreads = np.array(
        [
            share * (free_constants[j].site_spread if site else free_constants[j].spread)
            for j, site in parts
        ]
    )
    priors = dict(start._priors) if start else {}
    for run in runs:
        if run.site not in priors:
            priors[run.site] = _priors(free_constants, run.hardware, centre)
    theta = start.log_shifts.copy() if start else np.zeros(len(parts))
    weights = np.array([run.weight for run in runs]) / RUN_NOISE
    frozen = start.jacobian if start is not None and len(start.jacobian) == len(runs) else None
    jacobian = np.zeros((len(runs), len(parts)))
    hessian = np.diag(1 / spreads**2)
    for _ in range(_MAX_ITERATIONS):
        errors = log_residuals(runs, free_constants, parts, priors, theta)
        jacobian = (
            frozen
            if frozen is not None
            else _jacobian(runs, free_constants, parts, priors, theta, errors)
        )
        robust = weights * np.sqrt(
            np.minimum(1.0, _HUBER / np.maximum(1e-9, np.abs(errors * weights)))
        )
        scaled = jacobian * robust[:, None]
        hessian = scaled.T @ scaled + np.diag(1 / spreads**2)
        move = -np.linalg.solve(hessian, scaled.T @ (errors * robust) + theta / spreads**2)
        largest = float(np.abs(move).max())
        theta = theta + move * min(1.0, _LARGEST_MOVE / max(largest, 1e-12))
        if largest < _CONVERGED:
            break
    return Fit(
        free_constants=free_constants,
        run_count=len(runs),
        parts=parts,
        spreads=spreads,
        priors=priors,
        log_shifts=theta,
        covariance=np.asarray(np.linalg.inv(hessian), dtype=np.float64),
        jacobian=jacobian,
    )


def predict_left_out(
    runs: Sequence[MeasuredRun],
    key: Callable[[MeasuredRun], Hashable],
    *,
    free_constants: tuple[FreeConstant, ...] = FREE_CONSTANTS,
    centre: PriorCentre = PriorCentre.NEUTRAL,
) -> tuple[float, ...]:
    """Seconds of every run, predicted by constants fitted without the runs that share its key."""
    whole = fit_constants(runs, free_constants=free_constants, centre=centre)
    predicted = [0.0] * len(runs)
    for left in dict.fromkeys(key(run) for run in runs):
        inside = [i for i, run in enumerate(runs) if key(run) == left]
        others = [i for i, run in enumerate(runs) if key(run) != left]
        start = whole.restrict_to_runs(others)
        found = fit_constants(
            [runs[i] for i in others], free_constants=free_constants, centre=centre, start=start
        )
        for i in inside:
            predicted[i] = runs[i].prepared.step_s(found.constants_for(runs[i].hardware))
    return tuple(predicted)


def log_residuals(
    runs: Sequence[MeasuredRun],
    free: tuple[FreeConstant, ...],
    parts: tuple[tuple[int, str], ...],
    priors: Mapping[str, tuple[float, ...]],
    theta: Vector,
) -> Vector:
    """log(predicted / measured) of every run."""
    named = {
        site: _as_constants(free, _values(free, parts, priors[site], theta, site), "")
        for site in {run.site for run in runs}
    }
    return np.array([log(run.prepared.step_s(named[run.site]) / run.measured_s) for run in runs])


def _jacobian(
    runs: Sequence[MeasuredRun],
    free: tuple[FreeConstant, ...],
    parts: tuple[tuple[int, str], ...],
    priors: Mapping[str, tuple[float, ...]],
    theta: Vector,
    errors: Vector | None = None,
) -> Vector:
    """Derivatives of the residuals by differences. A site's part and the shared one move a run
    alike."""
    base = log_residuals(runs, free, parts, priors, theta) if errors is None else errors
    found = np.zeros((len(runs), len(parts)))
    for k, (j, site) in enumerate(parts):
        if site:
            continue
        moved = theta.copy()
        moved[k] += _STEP
        slope = (log_residuals(runs, free, parts, priors, moved) - base) / _STEP
        for k2, (j2, site2) in enumerate(parts):
            if j2 == j:
                mine = np.array([site2 in ("", run.site) for run in runs])
                found[:, k2] = np.where(mine, slope, 0.0)
    return found


def _parts(free: tuple[FreeConstant, ...], sites: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """(constant, site) of every unknown; site "" is what all share. One site alone has no part of
    its own."""
    shared = [(j, "") for j in range(len(free))]
    own = (
        [(j, site) for j, one in enumerate(free) if one.site_spread for site in sites]
        if len(sites) > 1
        else []
    )
    return (*shared, *own)


def _priors(
    free: tuple[FreeConstant, ...], hardware: Hardware, centre: PriorCentre
) -> tuple[float, ...]:
    if centre is PriorCentre.NEUTRAL:
        return tuple(one.prior for one in free)
    known = Constants(hardware)
    return tuple(known[one.name] for one in free)


def _values(
    free: tuple[FreeConstant, ...],
    parts: tuple[tuple[int, str], ...],
    priors: Sequence[float],
    theta: Vector,
    site: str,
) -> tuple[float, ...]:
    sums = [0.0] * len(free)
    for (j, where), value in zip(parts, theta, strict=True):
        if where in ("", site):
            sums[j] += float(value)
    return tuple(
        min(max(prior * exp(total), one.low), one.high)
        for one, prior, total in zip(free, priors, sums, strict=True)
    )


def _as_constants(
    free: tuple[FreeConstant, ...], values: Sequence[float], source: str
) -> tuple[Constant, ...]:
    return tuple(
        Constant(name=name, value=Sourced(value=value, kind=SourceKind.FITTED, source=source))
        for one, value in zip(free, values, strict=True)
        for name in (one.name, *one.tied_names)
    )
