"""Rotary frequencies and their scaling for longer contexts.

The names are those of Hugging Face configurations.
"""

from __future__ import annotations

import math

import torch

from moewright.spec.model import RopeSpec


def rope_frequencies(
    spec: RopeSpec, dim: int, *, seq_len: int, rounded: bool = True
) -> tuple[torch.Tensor, float]:
    """Return the angles per position [dim/2] fp64, and the factor on cos and sin.

    linear divides all frequencies by `factor`. yarn (Peng et al., arXiv 2309.00071) divides those
    that turn less than `beta_slow` times over the original context, keeps those above `beta_fast`,
    and blends between; `rounded` says whether the blend's bounds are rounded to whole dims. llama3
    blends by wavelength, between its low and high frequency factors. longrope (Ding et al., arXiv
    2402.13753) divides each frequency by its own factor, of sequences of `seq_len` tokens.
    """
    plain = spec.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if spec.scaling == "linear":
        return plain / spec.factor, 1.0
    if spec.scaling == "yarn":
        keep = _yarn_keep(spec, dim, rounded=rounded)
        return _blend(plain, spec, keep), _yarn_magnitude(spec)
    if spec.scaling == "llama3":
        turns = spec.original_max_position * plain / (2 * math.pi)  # over the original context
        factor_range = spec.high_freq_factor - spec.low_freq_factor
        keep = ((turns - spec.low_freq_factor) / factor_range).clamp(0, 1)
        return _blend(plain, spec, keep), 1.0
    if spec.scaling == "longrope":
        is_long = seq_len > spec.original_max_position
        factors = spec.long_factors if is_long else spec.short_factors
        magnitude = spec.long_magnitude if is_long else spec.short_magnitude
        return plain / torch.tensor(factors, dtype=torch.float64), magnitude
    return plain, 1.0


def softmax_factor(spec: RopeSpec) -> float:
    """Return what latent attention multiplies 1 / sqrt(head dim) by under yarn.

    The source is DeepSeek-V2's modeling code.
    """
    if spec.scaling == "default" or not spec.mscale_all_dim:
        return 1.0
    return _magnitude(spec.factor, spec.mscale_all_dim) ** 2


def _blend(plain: torch.Tensor, spec: RopeSpec, keep: torch.Tensor) -> torch.Tensor:
    """Divide frequencies by the factor where `keep` is 0, and leave them where it is 1."""
    return plain / spec.factor * (1 - keep) + plain * keep


def _yarn_keep(spec: RopeSpec, dim: int, *, rounded: bool) -> torch.Tensor:
    """Return 1 where the plain frequency stays, 0 where it is divided, [dim/2]."""

    def dim_that_turns(turns: float) -> float:
        # The paper's section 3.2: the pair that turns so often over the original context.
        wavelengths = math.log(spec.original_max_position / (turns * 2 * math.pi))
        return dim * wavelengths / (2 * math.log(spec.theta))

    low, high = dim_that_turns(spec.beta_fast), dim_that_turns(spec.beta_slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # both bounds may fall together
    return 1 - ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)


def _yarn_magnitude(spec: RopeSpec) -> float:
    if spec.mscale and spec.mscale_all_dim:
        return _magnitude(spec.factor, spec.mscale) / _magnitude(spec.factor, spec.mscale_all_dim)
    return _magnitude(spec.factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    # The paper's sqrt(1 / t), with its fitted 0.1.
    return 0.1 * scale * math.log(factor) + 1.0
