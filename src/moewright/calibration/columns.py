"""One spelling for the columns and cells of a table of measured runs, however its writer spelt
them.

Spreadsheets and data frames turn 256 into "256.0", true into "True" and silence into "nan"; people
write "4,096", "4k" and "Micro Batch Size". What a cell says is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from moewright.codec import explicit_fields, parse_layout
from moewright.spec.layout import CudaGraphScope, Overlap, Recompute

_SILENCE = frozenset(
    {"nan", "na", "n/a", "null", "unknown", "not stated", "-", "--", "?", "\u2013", "\u2014"}
)
_SWITCHES = frozenset(
    {
        *(
            "sp",
            "zero1",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "tp_comm_overlap",
            "overlap_moe_ep_comm",
        ),
        *("force_balance", "oom"),
    }
)
_SWITCHED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("true", "yes", "on", "1", "1.0"), "true"),
        **dict.fromkeys(("false", "no", "off", "0", "0.0"), "false"),
    }
)
_NUMBERS = frozenset(
    {
        *(
            "num_gpus",
            "seq_len",
            "gbs",
            "mbs",
            "tp",
            "pp",
            "vpp",
            "cp",
            "ep",
            "etp",
            "dp",
            "capacity_factor",
        ),
        *("time_per_iter_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "peak_memory_gb"),
    }
)
_THOUSAND = 1024  # sequence lengths in "k"
# What other tables call a column.
_ALSO: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("model_name", "model_id"), "model"),
        **dict.fromkeys(("gpu", "gpu_type", "device", "device_type"), "hardware"),
        **dict.fromkeys(("gpus", "num_devices", "devices", "world_size", "n_gpus"), "num_gpus"),
        **dict.fromkeys(("seq_length", "sequence_length", "seqlen"), "seq_len"),
        **dict.fromkeys(("global_batch_size", "global_batch"), "gbs"),
        **dict.fromkeys(("micro_batch_size", "micro_batch"), "mbs"),
        **dict.fromkeys(("dtype",), "precision"),
        **dict.fromkeys(("tensor_model_parallel_size", "tp_size"), "tp"),
        **dict.fromkeys(("pipeline_model_parallel_size", "pp_size"), "pp"),
        **dict.fromkeys(("virtual_pipeline_model_parallel_size", "vp", "vp_size"), "vpp"),
        **dict.fromkeys(("context_parallel_size", "cp_size"), "cp"),
        **dict.fromkeys(("expert_model_parallel_size", "ep_size"), "ep"),
        **dict.fromkeys(("expert_tensor_parallel_size", "etp_size"), "etp"),
        **dict.fromkeys(("sequence_parallel",), "sp"),
        **dict.fromkeys(("step_time_s", "iteration_time_s", "time_per_step_s"), "time_per_iter_s"),
        **dict.fromkeys(
            ("tokens_per_sec_per_gpu", "tokens/s/gpu", "tokens_per_gpu_per_s"),
            "tokens_per_s_per_gpu",
        ),
        **dict.fromkeys(
            ("tflops", "tflop_s_per_gpu", "tflop/s/gpu", "tflops/gpu", "model_tflops_per_gpu"),
            "tflops_per_gpu",
        ),
        **dict.fromkeys(("mfu_percent", "mfu_%"), "mfu_pct"),
        **dict.fromkeys(("peak_gb", "memory_gb", "max_memory_gb"), "peak_memory_gb"),
    }
)
_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "mbs")
_OVERLAPS: Mapping[Overlap, str] = MappingProxyType(
    {
        Overlap.GRAD: "overlap_grad_reduce",
        Overlap.PARAM: "overlap_param_gather",
        Overlap.TP: "tp_comm_overlap",
        Overlap.EP: "overlap_moe_ep_comm",
    }
)


def canonical_column(title: str) -> str:
    """The column that a header names: "Micro Batch Size" and "micro-batch-size" are mbs."""
    name = re.sub(r"[\s-]+", "_", title.strip().casefold())
    return _ALSO.get(name, name)


def canonical_cell(column: str, text: str) -> str:
    """A cell in this project's spelling."""
    said = text.strip()
    if said.casefold() in _SILENCE:
        return ""
    if column in _SWITCHES:
        return _SWITCHED.get(said.casefold(), said)
    return _number(column, said) if column in _NUMBERS else said


def _number(column: str, said: str) -> str:
    """Without separators of thousands and a zero after the point; whatever is no such number stays
    as it is."""
    plain = (
        said.replace(",", "").replace("_", "")
        if re.fullmatch(r"\d{1,3}([,_]\d{3})+(\.\d+)?", said)
        else said
    )
    in_k = re.fullmatch(r"(\d+) ?[kK]", plain)
    if in_k and column == "seq_len":
        return str(int(in_k[1]) * _THOUSAND)
    return re.sub(r"^(\d+)\.0+$", r"\1", plain)


def fill_from_layout(cells: Mapping[str, str]) -> dict[str, str]:
    """The cells, the empty ones read from a `layout` column as far as it is written like a layout
    and says so. Raises BadInput for other text.
    """
    text = cells.get("layout", "")
    if not text:
        return dict(cells)
    devices = cells.get("num_gpus", "")
    layout, given = (
        parse_layout(text, world_size=int(devices) if devices.isdecimal() else 1),
        explicit_fields(text),
    )
    said: dict[str, str] = {name: str(getattr(layout, name)) for name in _DEGREES if name in given}
    if "recompute" in given:
        said["recompute_modules"] = " ".join(
            one for one in layout.recompute if one is not Recompute.FULL
        )
        full = "full" if Recompute.FULL in layout.recompute else ""
        said["recompute_granularity"] = full or ("selective" if layout.recompute else "none")
    if "dispatcher" in given:
        said["dispatcher"] = layout.dispatcher
    if "graphs" in given:
        said["cuda_graph"] = f"scope: {' '.join(layout.graphs)}" if layout.graphs else "none"
        said["cuda_graph"] = (
            "scope: iteration" if CudaGraphScope.FULL in layout.graphs else said["cuda_graph"]
        )
    if "overlap" in given:
        said |= {column: str(one in layout.overlap).lower() for one, column in _OVERLAPS.items()}
    if "offload" in given:
        said["offload"] = "; ".join(layout.offload) or "none"
    if "stages" in given:
        said["pp_layout"] = layout.stages
    if "zero" in given:
        said |= {
            "fsdp": "fsdp" if layout.zero == 3 else "none",
            "zero1": str(layout.zero == 1).lower(),
        }
    return {**cells, **{column: value for column, value in said.items() if not cells.get(column)}}
