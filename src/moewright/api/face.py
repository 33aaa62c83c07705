"""The Python face: what the verbs of the command line do, as functions that return records.

Every name is reached as `import moewright as mw; mw.plan(...)`. The records print as short tables,
show as tables in notebooks, and convert with `to_dict()` and `to_rows()`.
"""

from moewright.api.budgets import Budget, budget
from moewright.api.catalogues import HardwareTable, ModelTable, hardware, model, models
from moewright.api.checking import check
from moewright.api.comparison import PlanComparison, compare
from moewright.api.designing import Design, design
from moewright.api.diagnosing import Diagnosis, diagnose, read_run
from moewright.api.job_axes import plan
from moewright.api.judging import judge
from moewright.api.launch_scripts import ScriptPlan, read_flags
from moewright.api.measuring import FitResult, SweepResult, fit, sweep, validate
from moewright.api.placing import place
from moewright.api.planning import Plans, WhyNot, estimate, why_not
from moewright.api.run_comparisons import (
    StepChanges,
    TraceReplays,
    compare_run,
    compare_steps,
    forecast_loads,
    what_if,
)
from moewright.api.running import export, export_traces, train
from moewright.api.views import show
from moewright.api.watching import watch
from moewright.calibration.score import Score
from moewright.diagnosis.checks import Check
from moewright.diagnosis.judgement import Judgement
from moewright.diagnosis.load_forecast import LoadForecast
from moewright.diagnosis.run_comparison import RunComparison
from moewright.diagnosis.run_watch import RunWatch
from moewright.search.node_places import NodePlaces
from moewright.view.plan_view import PlanView, RefusalView

__all__ = [
    "Budget",
    "Check",
    "Design",
    "Diagnosis",
    "FitResult",
    "HardwareTable",
    "Judgement",
    "LoadForecast",
    "ModelTable",
    "NodePlaces",
    "PlanComparison",
    "PlanView",
    "Plans",
    "RefusalView",
    "RunComparison",
    "RunWatch",
    "Score",
    "ScriptPlan",
    "StepChanges",
    "SweepResult",
    "TraceReplays",
    "WhyNot",
    "budget",
    "check",
    "compare",
    "compare_run",
    "compare_steps",
    "design",
    "diagnose",
    "estimate",
    "export",
    "export_traces",
    "fit",
    "forecast_loads",
    "hardware",
    "judge",
    "model",
    "models",
    "place",
    "plan",
    "read_flags",
    "read_run",
    "show",
    "sweep",
    "train",
    "validate",
    "watch",
    "what_if",
    "why_not",
]
