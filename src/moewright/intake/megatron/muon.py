"""Muon's options of a Megatron-LM command."""

from __future__ import annotations

from moewright.intake.megatron.arguments import Arguments
from moewright.spec.workload import MuonCoefficients, MuonScale, MuonSpec

# What Megatron-LM can do otherwise, which no prediction here depends on and training here would.
_OTHER_CHOICES = (
    ("--muon-tp-mode", "duplicated", ("duplicated", "distributed")),
    ("--muon-scalar-optimizer", "adam", ("adam",)),
    ("--muon-coefficient-type", "quintic", tuple(MuonCoefficients)),
)


def read_muon(arguments: Arguments) -> tuple[MuonSpec, tuple[str, ...]]:
    """Return how Muon updates matrices, and notes on what is taken for something else."""
    arguments.ignore("--muon-use-syrk", "--muon-fp32-matmul-prec")
    default = MuonSpec()
    notes = [
        f"{name} {value} is taken for {taken_for}: no prediction depends on it, training here would"
        for name, taken_for, run_here in _OTHER_CHOICES
        if (value := arguments.text(name, taken_for)) not in run_here
    ]
    if arguments.has("--muon-no-split-qkv"):
        notes.append("--muon-no-split-qkv is not taken: training here updates q, k and v apart")
    coefficients = arguments.text("--muon-coefficient-type", default.muon_coefficient_type)
    if coefficients not in tuple(MuonCoefficients):
        coefficients = default.muon_coefficient_type
    muon = MuonSpec(
        muon_momentum=arguments.number("--muon-momentum", default.muon_momentum),
        muon_nesterov=arguments.has("--muon-nesterov"),
        muon_num_ns_steps=arguments.integer("--muon-num-ns-steps", default.muon_num_ns_steps),
        muon_coefficient_type=MuonCoefficients(coefficients),
        muon_scale_mode=MuonScale(
            arguments.text("--muon-scale-mode", default.muon_scale_mode.value)
        ),
        muon_extra_scale_factor=arguments.number(
            "--muon-extra-scale-factor", default.muon_extra_scale_factor
        ),
    )
    return muon, tuple(notes)
