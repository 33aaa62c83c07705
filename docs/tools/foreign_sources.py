"""Write the page that says what nobody here wrote each verb of the command line is held beside.

`python -m docs.tools.foreign_sources` writes it; a test holds it beside the verbs and the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "foreign_sources.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignSource:
    """What others wrote, and the test, or the target of make, that holds a verb beside it.

    `test` is a file below tests with the name of a test, or "make" and a target, which needs what a
    clone has not: a checkout, a cluster.
    """

    source: str
    test: str


def _list(source: str, test: str) -> ForeignSource:
    return ForeignSource(source=source, test=test)


_TRANSFORMERS = "transformers"
FOREIGN_SOURCES: Mapping[str, ForeignSource] = MappingProxyType(
    {
        "plan": _list(
            "layouts that others published for their jobs",
            "published/test_searched_layouts.py::test_so_many_published_layouts_are_searched_and_"
            "the_others_are_outside_by_these_fields",
        ),
        "estimate": _list(
            "every published run of the tables",
            "published/test_one_path.py::test_every_row_is_estimated_as_validated",
        ),
        "budget": _list(
            "the failures and the effective time of Llama 3 405B, as Meta reports them",
            "rules/test_goodput.py::test_llama_3_trained_over_90_percent_of_the_time",
        ),
        "design": _list(
            f"{_TRANSFORMERS}, which loads the config; papers' losses by `make design-evidence`",
            "api/test_design.py::test_transformers_loads_the_config",
        ),
        "validate": _list(
            "published runs that were scored before anybody here had seen them",
            "published/test_blind_runs.py::test_errors_stay_near_what_they_were_blind",
        ),
        "fit": _list(
            "published runs that are left out of the fit",
            "published/test_fit_time.py::test_constants_of_h800_predict_h100",
        ),
        "train": _list(
            f"{_TRANSFORMERS}: the loss and every gradient",
            "engine/test_model_oracle.py::test_loss_and_every_gradient_equal_transformers",
        ),
        "finetune": _list(
            f"{_TRANSFORMERS}, which answers with the folder",
            "spawn/test_finetune.py::test_the_run_learns_and_its_export_answers_in_transformers_"
            "as_here",
        ),
        "chat": _list(
            f"the answers of {_TRANSFORMERS}",
            "cli/test_cli_chat.py::test_an_answer_is_that_of_transformers",
        ),
        "verify": _list(
            f"{_TRANSFORMERS}: logits, losses, gradients",
            "spawn/test_verify.py::test_verify_equals_transformers",
        ),
        "dryrun": _list(
            f"FLOPs that torch counts of {_TRANSFORMERS}' model",
            "cli/test_cli_dryrun.py::test_flops_are_those_that_torch_counts_of_transformers",
        ),
        "upcycle": _list(
            f"a folder of {_TRANSFORMERS}, and its logits",
            "spawn/test_upcycle.py::test_a_hugging_face_folder_upcycles_too",
        ),
        "report": _list(
            "Chromium, which lays the page out",
            "browser/test_report_page.py::test_sections_come_in_their_order_and_nothing_sticks_out",
        ),
        "diagnose": _list(
            "traces that torch's profiler writes of a plain loop",
            "diagnosis/test_cpu_traces.py::test_what_the_profiler_writes_of_a_plain_loop_is_read",
        ),
        "watch": _list(
            "seconds of steps that others logged",
            "diagnosis/test_change_points.py::test_planted_slowdowns_of_published_series_are_found_"
            "where_that_is_promised",
        ),
        "forecast": _list("expert loads that others printed", "make load-records"),
        "compare": _list(
            "the published runs that it stands a run beside",
            "diagnosis/test_run_comparison.py::test_a_slow_log_stands_beside_the_published_runs_of_"
            "its_job",
        ),
        "check": _list(
            "pairs of published runs of one job",
            "published/test_checked_pairs.py::test_the_faster_run_of_a_published_pair_is_told",
        ),
        "studio": _list(
            "Chromium, whose figures are those of `estimate`",
            "browser/test_studio_plan.py::test_numbers_equal_those_of_estimate_digit_for_digit",
        ),
        "mcp": _list(
            "the client of the official Python SDK",
            "agents/test_mcp.py::test_an_agent_is_served_over_standard_input",
        ),
        "tune": _list("a real Slurm, which runs the trials", "make slurm"),
        "export": _list(
            "the parser of Megatron-LM; the trainers' own code by `make megatron`, `make bridge` "
            "and `make torchtitan`",
            "exporters/test_megatron_catalogue.py::test_every_option_is_one_that_megatron_parses",
        ),
        "capture": _list(
            "bash, which runs the script",
            "cli/test_cli_export.py::test_a_captured_command_is_planned_like_a_script_that_is_read",
        ),
        "models": _list(
            "published counts of parameters",
            "published/test_params.py::test_counts_equal_the_published_totals",
        ),
        "hardware": _list(
            "the peaks that torchtitan divides by",
            "intake/test_devices.py::test_peaks_are_those_that_torchtitan_divides_by",
        ),
        "completion": _list(
            "bash, which completes", "cli/test_cli_completion.py::test_bash_completes"
        ),
        "data build": _list(
            "a tokenizer of Hugging Face's library",
            "engine/test_data_build.py::test_a_published_tokenizer_encodes_the_text",
        ),
        "convert import": _list(
            f"experts that {_TRANSFORMERS} unpacks",
            "engine/test_convert.py::test_packed_experts_are_what_transformers_unpacks",
        ),
        "convert export": _list(
            f"{_TRANSFORMERS}, which loads the folder",
            "engine/test_convert.py::test_a_checkpoint_without_a_history_is_loaded_by_transformers",
        ),
        "bench machine": _list(
            "the bus bandwidth that nccl-tests defines",
            "diagnosis/test_bandwidth.py::test_bus_bandwidth_is_that_of_nccl_tests",
        ),
        "bench search": _list(
            "the measured speed of other planners",
            "bench/test_search_speed.py::test_rates_are_of_whole_searches",
        ),
        "bench sweep": _list(
            "published sweeps of layouts",
            "cli/test_cli_sweep.py::test_published_tables_stand_beside_predictions",
        ),
    }
)

_INTRODUCTION = """# What each verb is held beside

A verb may be wrong in a way that its own tests share. So each has a test that holds it beside
something that nobody here wrote: a library, a parser, a shell, a published figure. Paths start at
`tests`; what make starts needs more than a clone (`CONTRIBUTING.md`).
This page is made by `python -m docs.tools.foreign_sources`.

| verb | beside | by |
|---|---|---|
"""


def render_page() -> str:
    """Return the page."""
    rows = (
        f"| `{verb}` | {item.source} | `{item.test}` |\n" for verb, item in FOREIGN_SOURCES.items()
    )
    return _INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
