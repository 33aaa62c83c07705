"""Write docs/reference/job_file.md: every key of a job file, from the records that read it.

A key's meaning is the comment at its field, its default the field's own; so the page cannot drift
from the code. `make docs` runs it, and a test compares the page with what it would write.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from moewright.spec import layout as layout_module
from moewright.spec import workload as workload_module
from moewright.spec.choices import FACTS
from moewright.spec.layout import Layout
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    DelayedScalingSpec,
    FineTuningSpec,
    LossScalingSpec,
    LossSpec,
    MuonSpec,
    OptimizerSpec,
    ProfileSpec,
    RouterTraining,
    RoutesSpec,
    TrainerSpec,
    Workload,
)

PAGE = Path(__file__).parents[1] / "reference" / "job_file.md"

_INTRODUCTION = """# The job file

A job is one TOML file. `moewright plan`, `estimate`, `train`, `dryrun` and `tune` read it. Paths
in it start at its folder, and `--set section.key=value` changes a key for one call.

This page is made from the records in `moewright.spec`; every default is the code's own.

```toml
[model]
config = "Qwen3-30B-A3B"      # a known name, a config.json, or its folder
# weights = "checkpoints"     # start from a checkpoint or from a Hugging Face folder

[data]
train = "data/train"          # moewright data build --out data

[layout]                      # what is left out is chosen by the planner
ep = 8

[train]
nproc = 8
hardware = "H100"
seq_len = 4096
global_batch = 256
steps = 1000
```

## [model]

| key | default | meaning |
|---|---|---|
| `config` | | a known model's name (`moewright models`), a config.json or its folder |
| `weights` | `""` | the folder of checkpoints or of Hugging Face weights to start from |
| any key of a config.json | | in place of `config`, the model itself |
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of the page: its heading, its text, and the records whose fields it lists."""

    heading: str
    text: str
    records: tuple[type, ...]
    left_out: tuple[str, ...] = ()


SECTIONS = (
    Section(heading="[data]", text="", records=(DataSpec,)),
    Section(
        heading="[layout]",
        text='Keys may be written one by one, or all as `text = "ep2,mbs2"`. What is absent is\n'
        "for the planner to choose. `dp` and `edp` follow from the other degrees.",
        records=(Layout,),
        left_out=("world_size",),
    ),
    Section(
        heading="[train]",
        text="`nproc` (default 1) is the number of processes to start, `hardware` (default\n"
        '`runs/machine.toml`) a device name or a hardware file, `network` (default `""`) the kind\n'
        "of network in place of the hardware's own: `ib`, `roce`, `efa`, `tcp`, `nvl36`, `pcie`\n"
        "and others, two joined by `+`.",
        records=(
            Workload,
            OptimizerSpec,
            MuonSpec,
            LossSpec,
            RouterTraining,
            TrainerSpec,
            FineTuningSpec,
            RoutesSpec,
            LossScalingSpec,
            DelayedScalingSpec,
            BatchRampSpec,
        ),
        left_out=(
            "profile",
            "optimizer",
            "muon",
            "loss",
            "router",
            "trainer",
            "fine_tuning",
            "routes",
            "scaling",
            "delayed",
            "ramp",
            "data",
            "checkpoint",
            "weights",
            "load_histogram",
        ),
    ),
    Section(
        heading="[train.profile]",
        text="A window of steps that some ranks trace kernel by kernel.",
        records=(ProfileSpec,),
    ),
    Section(heading="[checkpoint]", text="", records=(CheckpointSpec,)),
)

_ENDING = """
## [tune]

Each key names what `moewright tune` may change, with the list of its values: a key of [layout], or
`bucket_elements` or `gc_every_steps` of [train].
"""


def describe_fields(module: ModuleType, record: type) -> dict[str, str]:
    """Return the comment at each field of a record: behind it, or in the lines above it."""
    lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == record.__name__
    )
    comments = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = (node.end_lineno or node.lineno) - 1
            _, mark, behind = lines[end].partition("  # ")
            comments[node.target.id] = behind if mark else _read_above(lines, node.lineno - 1)
    return comments


def _read_above(lines: list[str], index: int) -> str:
    """Return the comment lines right above line `index` as one line of text."""
    above: list[str] = []
    while lines[index - 1].lstrip().startswith("# "):
        index -= 1
        above.insert(0, lines[index].lstrip().removeprefix("# "))
    return " ".join(above)


def list_undescribed() -> list[str]:
    """Return the fields on the page that have no comment."""
    return [
        f"{record.__name__}.{name}"
        for section in SECTIONS
        for record in section.records
        for name, comment in describe_fields(_module_of(record), record).items()
        if name not in section.left_out and not comment
    ]


def _module_of(record: type) -> ModuleType:
    return layout_module if record is Layout else workload_module


def render_page() -> str:
    """Return the text of the page."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"\n## {section.heading}\n")
        if section.text:
            parts.append(f"{section.text}\n")
        for record in section.records:
            if len(section.records) > 1:
                first = (record.__doc__ or "").strip().splitlines()[0]
                parts.append(f"### {record.__name__}\n\n{first}\n")
            parts.append(_render_table(record, section.left_out))
    parts.append(_ENDING)
    return "\n".join(parts)


def _render_table(record: type, left_out: tuple[str, ...]) -> str:
    comments = describe_fields(_module_of(record), record)
    hints = get_type_hints(record)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in fields(record):
        if field.name not in left_out:
            meaning = _add_choices(comments[field.name], hints[field.name])
            key = _format_key(record, field)
            rows.append(f"| {key} | {_format_default(field)} | {meaning} |")
    return "\n".join((*rows, ""))


def _format_key(record: type, field: Field[Any]) -> str:
    """Return the key of a field; of a number behind a word of a set, how it is written there."""
    if record is Layout:
        facts = field.metadata[FACTS]
        if facts.word is not None:
            return f'`{facts.word.field} = "{facts.word.word}..."`'
        return f"`{facts.key or field.name}`"
    return f"`{field.name}`"


def _format_default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required"
    value = field.default
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple):
        value = list(value)
    text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    return f"`{text}`"


def _add_choices(meaning: str, hint: Any) -> str:
    """Add the values of an enumeration to a meaning."""
    members = _enum_members(hint)
    if not members:
        return meaning
    choices = ", ".join(f"`{member.value}`" for member in members)
    return f"{meaning}: {choices}" if meaning else choices


def _enum_members(hint: Any) -> list[Enum]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint)
    for inner in getattr(hint, "__args__", ()):
        if isinstance(inner, type) and issubclass(inner, Enum):
            return list(inner)
    return []


if __name__ == "__main__":
    missing = list_undescribed()
    if missing:
        sys.exit(f"no comment at: {', '.join(missing)}")
    PAGE.write_text(render_page(), encoding="utf-8")
