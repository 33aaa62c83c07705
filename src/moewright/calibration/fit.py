"""A fit of the time model's constants to measured runs, with priors, bounds and uncertainties.

A constant is prior * exp(shared + site), where `site` is a hardware's own part. The fit minimises
the sum of squares of log(predicted / measured) / RUN_NOISE, robust against rows that nothing
explains (Huber), and of every shift over its spread (Gauss-Newton). The inverse of the second
derivative at the minimum says how uncertain each constant stays.
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

# Standard deviation of the logarithm of a step's time, of a row that the model describes in full:
# repeats differ by 0-5 %, and more between releases.
RUN_NOISE = 0.05
_HUBER = 1.5
_STEP = 0.02  # for derivatives by differences, in the logarithm of a constant
_LARGEST_MOVE = 0.5
_MAX_ITERATIONS = 8
_CONVERGED = 0.003
# Spread of constants that were fitted on published runs already, over the neutral spread.
_HARDWARE_PRIOR_SHARE = 0.6

Vector = npt.NDArray[np.float64]


class PriorCentre(StrEnum):
    """The values that the priors are centred on."""

    NEUTRAL = "neutral"  # round numbers, and kernel tables as they are
    HARDWARE = "hardware"  # the constants that the hardware has already


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeConstant:
    """A constant that the fit may change.

    Spreads are standard deviations of its logarithm; a `site_spread` of 0 means that it belongs to
    the software and is the same on every machine. `tied_names` are constants that take its value.
    """

    name: str
    prior: float
    spread: float
    site_spread: float = 0.0
    low: float = 0.0
    high: float = float("inf")
    tied_names: tuple[str, ...] = ()


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
    # 6 ms in quadrature with the device are 4.7 ms at an exponent of 1.5; it was 8.3 ms a year
    # before.
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
    """A measured step; `weight` is below 1 for a run that repeats another."""

    id: str
    prepared: RepriceableStep
    hardware: Hardware
    measured_s: float
    weight: float = 1.0

    @property
    def site(self) -> str:
        """Return the name of the hardware, whose part of the constants the run shares."""
        return self.hardware.name


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedConstant:
    """A constant on one site: its prior and fitted value, with standard deviations of their log."""

    name: str
    prior: float
    value: float
    prior_sd: float
    sd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _ConstantParts:
    """The unknowns of a fit: a shift for each (constant, site) in `parts`.

    Site "" is the part that all sites share. `priors` holds the values of the free constants that
    the shifts of a site start from.
    """

    free_constants: tuple[FreeConstant, ...]
    parts: tuple[tuple[int, str], ...]
    priors: Mapping[str, tuple[float, ...]]

    def site_priors(self, site: str) -> tuple[float, ...]:
        """Return the priors of a site; the neutral ones where no run was measured."""
        return self.priors.get(site) or tuple(free.prior for free in self.free_constants)

    def values(self, site: str, log_shifts: Vector) -> tuple[float, ...]:
        """Return the value of each free constant on a site, inside its bounds."""
        sums = [0.0] * len(self.free_constants)
        for (index, part_site), shift in zip(self.parts, log_shifts, strict=True):
            if part_site in ("", site):
                sums[index] += float(shift)
        priors = self.site_priors(site)
        return tuple(
            min(max(prior * exp(total), free.low), free.high)
            for free, prior, total in zip(self.free_constants, priors, sums, strict=True)
        )

    def constants(self, site: str, log_shifts: Vector, *, source: str) -> tuple[Constant, ...]:
        """Return the constants of a site, those tied to a free one among them."""
        values = self.values(site, log_shifts)
        return tuple(
            Constant(name=name, value=Sourced(value=value, kind=SourceKind.FITTED, source=source))
            for free, value in zip(self.free_constants, values, strict=True)
            for name in (free.name, *free.tied_names)
        )


class Fit:
    """Constants fitted to runs: for every site among them, and for others by what sites share."""

    __slots__ = ("_covariance", "_spreads", "jacobian", "log_shifts", "parts", "run_count")

    def __init__(
        self,
        *,
        parts: _ConstantParts,
        run_count: int,
        spreads: Vector,
        log_shifts: Vector,
        covariance: Vector,
        jacobian: Vector,
    ) -> None:
        self.parts = parts
        self._spreads = spreads
        self._covariance = covariance
        self.run_count = run_count
        self.log_shifts = log_shifts
        self.jacobian = jacobian

    @property
    def free_constants(self) -> tuple[FreeConstant, ...]:
        return self.parts.free_constants

    def restrict_to_runs(self, indices: Sequence[int]) -> Fit:
        """Return this fit as the start of another on some of its runs, given by their indices."""
        return Fit(
            parts=self.parts,
            run_count=self.run_count,
            spreads=self._spreads,
            log_shifts=self.log_shifts,
            covariance=self._covariance,
            jacobian=self.jacobian[list(indices)],
        )

    def constants_for(self, hardware: Hardware) -> tuple[Constant, ...]:
        """Return what the fit says of every free constant on this hardware."""
        source = f"fit of {self.run_count} runs"
        return self.parts.constants(hardware.name, self.log_shifts, source=source)

    def fitted_constants(self, site: str) -> tuple[FittedConstant, ...]:
        """Return every free constant on a site, the best known first."""
        return self._fitted_constants(site, self._covariance)

    def fitted_constants_after(self, run: MeasuredRun, site: str) -> tuple[FittedConstant, ...]:
        """Return the constants with the uncertainty that they would have after measuring `run`."""
        gradient = self.log_time_gradient(run)
        seen = self._covariance @ gradient
        information = RUN_NOISE**2 + float(gradient @ seen)
        covariance = self._covariance - np.outer(seen, seen) / information
        return self._fitted_constants(site, covariance)

    def _fitted_constants(self, site: str, covariance: Vector) -> tuple[FittedConstant, ...]:
        priors = self.parts.site_priors(site)
        values = self.parts.values(site, self.log_shifts)
        constants = []
        for index, (free, prior, value) in enumerate(
            zip(self.free_constants, priors, values, strict=True)
        ):
            is_part = np.array(
                [
                    1.0 if part == index and part_site in ("", site) else 0.0
                    for part, part_site in self.parts.parts
                ]
            )
            prior_sd = sqrt(float((is_part * self._spreads**2).sum()))
            sd = sqrt(float(is_part @ covariance @ is_part))
            constants.append(
                FittedConstant(name=free.name, prior=prior, value=value, prior_sd=prior_sd, sd=sd)
            )
        return tuple(sorted(constants, key=lambda constant: constant.sd / constant.prior_sd))

    def log_time_gradient(self, run: MeasuredRun) -> Vector:
        """Return how the log of a run's predicted seconds moves with each part of each constant."""
        rows = _jacobian([run], self.parts, self.log_shifts)
        gradient: Vector = rows[0]
        return gradient

    def log_time_sd(self, run: MeasuredRun) -> float:
        """Return the standard deviation of the log of a run's seconds, from the constants alone."""
        gradient = self.log_time_gradient(run)
        return sqrt(float(gradient @ self._covariance @ gradient))


def fit_constants(
    runs: Sequence[MeasuredRun],
    *,
    free_constants: tuple[FreeConstant, ...] = FREE_CONSTANTS,
    centre: PriorCentre = PriorCentre.NEUTRAL,
    start: Fit | None = None,
) -> Fit:
    """Fit the constants to the runs; the priors decide what few runs leave open.

    `start` is a fit of these runs and others: its constants and derivatives are the first guess,
    which makes cross-validation fast.
    """
    unknowns = _build_parts(runs, free_constants, centre, start)
    prior_share = _HARDWARE_PRIOR_SHARE if centre is PriorCentre.HARDWARE else 1.0
    spreads = np.array(
        [prior_share * _spread(free_constants[index], site) for index, site in unknowns.parts]
    )
    log_shifts = start.log_shifts.copy() if start else np.zeros(len(unknowns.parts))
    weights = np.array([run.weight for run in runs]) / RUN_NOISE
    known_jacobian = None
    if start is not None and len(start.jacobian) == len(runs):
        known_jacobian = start.jacobian
    jacobian = np.zeros((len(runs), len(unknowns.parts)))
    hessian = np.diag(1 / spreads**2)
    for _ in range(_MAX_ITERATIONS):
        errors = _log_residuals(runs, unknowns, log_shifts)
        if known_jacobian is not None:
            jacobian = known_jacobian
        else:
            jacobian = _jacobian(runs, unknowns, log_shifts, errors)
        huber = np.minimum(1.0, _HUBER / np.maximum(1e-9, np.abs(errors * weights)))
        robust_weights = weights * np.sqrt(huber)
        scaled = jacobian * robust_weights[:, None]
        hessian = scaled.T @ scaled + np.diag(1 / spreads**2)
        gradient = scaled.T @ (errors * robust_weights) + log_shifts / spreads**2
        move = -np.linalg.solve(hessian, gradient)
        largest = float(np.abs(move).max())
        log_shifts = log_shifts + move * min(1.0, _LARGEST_MOVE / max(largest, 1e-12))
        if largest < _CONVERGED:
            break
    return Fit(
        parts=unknowns,
        run_count=len(runs),
        spreads=spreads,
        log_shifts=log_shifts,
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
    """Predict every run's seconds with constants fitted without the runs that share its key."""
    fit_of_all = fit_constants(runs, free_constants=free_constants, centre=centre)
    predicted = [0.0] * len(runs)
    for left_out in dict.fromkeys(key(run) for run in runs):
        inside = [index for index, run in enumerate(runs) if key(run) == left_out]
        others = [index for index, run in enumerate(runs) if key(run) != left_out]
        fit = fit_constants(
            [runs[index] for index in others],
            free_constants=free_constants,
            centre=centre,
            start=fit_of_all.restrict_to_runs(others),
        )
        for index in inside:
            run = runs[index]
            predicted[index] = run.prepared.step_s(fit.constants_for(run.hardware))
    return tuple(predicted)


def _spread(free: FreeConstant, site: str) -> float:
    return free.site_spread if site else free.spread


def _log_residuals(
    runs: Sequence[MeasuredRun], unknowns: _ConstantParts, log_shifts: Vector
) -> Vector:
    """Return log(predicted / measured) of every run."""
    constants = {
        site: unknowns.constants(site, log_shifts, source="") for site in {run.site for run in runs}
    }
    return np.array(
        [log(run.prepared.step_s(constants[run.site]) / run.measured_s) for run in runs]
    )


def _jacobian(
    runs: Sequence[MeasuredRun],
    unknowns: _ConstantParts,
    log_shifts: Vector,
    errors: Vector | None = None,
) -> Vector:
    """Return the derivatives of the residuals, by differences [runs, parts].

    A run reacts alike to the shared part of a constant and to its own site's part, so one slope
    serves both. `errors` are the residuals at `log_shifts`, where they are known.
    """
    base = _log_residuals(runs, unknowns, log_shifts) if errors is None else errors
    jacobian = np.zeros((len(runs), len(unknowns.parts)))
    for shared, (index, site) in enumerate(unknowns.parts):
        if site:
            continue
        moved = log_shifts.copy()
        moved[shared] += _STEP
        slope = (_log_residuals(runs, unknowns, moved) - base) / _STEP
        for part, (part_index, part_site) in enumerate(unknowns.parts):
            if part_index == index:
                is_moved = np.array([part_site in ("", run.site) for run in runs])
                jacobian[:, part] = np.where(is_moved, slope, 0.0)
    return jacobian


def _build_parts(
    runs: Sequence[MeasuredRun],
    free_constants: tuple[FreeConstant, ...],
    centre: PriorCentre,
    start: Fit | None,
) -> _ConstantParts:
    """Build the unknowns of a fit, those of `start` where there is one."""
    sites = tuple(sorted({run.site for run in runs}))
    parts = start.parts.parts if start else _list_parts(free_constants, sites)
    priors = dict(start.parts.priors) if start else {}
    for run in runs:
        if run.site not in priors:
            priors[run.site] = _prior_values(free_constants, run.hardware, centre)
    return _ConstantParts(free_constants=free_constants, parts=parts, priors=priors)


def _list_parts(
    free_constants: tuple[FreeConstant, ...], sites: tuple[str, ...]
) -> tuple[tuple[int, str], ...]:
    """Return (constant, site) of every unknown; one site alone has no part of its own."""
    shared = [(index, "") for index in range(len(free_constants))]
    if len(sites) < 2:
        return tuple(shared)
    own = [
        (index, site)
        for index, free in enumerate(free_constants)
        if free.site_spread
        for site in sites
    ]
    return (*shared, *own)


def _prior_values(
    free_constants: tuple[FreeConstant, ...], hardware: Hardware, centre: PriorCentre
) -> tuple[float, ...]:
    if centre is PriorCentre.NEUTRAL:
        return tuple(free.prior for free in free_constants)
    constants = Constants(hardware)
    return tuple(constants[free.name] for free in free_constants)
