"""Write the page of examples: every verb of the command line run once, with what it printed.

`python -m docs.tools.verb_examples` runs them all, in a folder that looks like the root of a clone
(minutes on two cores). A test holds the page beside the list of verbs, and runs again what prints
the same on any machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from cyclopts import App

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "examples.md"
_LIMIT_S = 600  # of one example
_COLUMNS = 120

JOB = """
[model]
model_type = "qwen3_moe"
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 128
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 64
norm_topk_prob = true
rms_norm_eps = 1e-6
max_position_embeddings = 128
vocab_size = 320

[data]
train = "runs/text/train"
heldout = "runs/text/heldout"
tokenizer = "runs/text/tokenizer.json"

[layout]
ep = 2
mbs = 2

[train]
nproc = 2
hardware = "runs/machine.toml"
seq_len = 64
global_batch = 8
steps = 40
precision = "fp32"
lr = 3e-3
eval_batches = 2
"""
_DENSE = JOB.replace("num_experts = 8\nnum_experts_per_tok = 2\n", "num_experts = 0\n")
_DENSE = _DENSE.replace('"qwen3_moe"', '"qwen3"').replace("ep = 2\n", "").replace("= 40", "= 4")
_DENSE = "\n".join(
    line
    for line in _DENSE.splitlines()
    if not line.startswith(("num_experts", "moe_intermediate_size", "norm_topk_prob"))
)
# What examples read that a clone has not.
FILES: Mapping[str, str] = MappingProxyType(
    {
        "tiny.toml": JOB.lstrip(),
        "dense.toml": _DENSE.lstrip(),
        "ask.json": json.dumps(
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": {"name": "example", "version": "1"},
                },
            }
        )
        + "\n",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A command of a verb, as it is typed; of its output the first and last lines are shown.

    `is_stable` is one that prints the same on any machine. `no_json` says why there is no --json.
    """

    command: str
    lines: int = 12
    last_lines: int = 0
    is_stable: bool = False
    no_json: str = ""
    code: int = 0


_SMALL = "Qwen3-30B-A3B --on 16xH100 --global-batch 64"
# In the order in which they run: later ones read what earlier ones wrote.
EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        "models": Example(command="moewright models", lines=8, is_stable=True),
        "hardware": Example(command="moewright hardware 8xH100", is_stable=True),
        "plan": Example(command=f"moewright plan {_SMALL} --top 2", lines=16, is_stable=True),
        "estimate": Example(
            command=f"moewright estimate {_SMALL} --layout ep8,recompute=full", is_stable=True
        ),
        "budget": Example(command=f"moewright budget {_SMALL} --tokens 1T", is_stable=True),
        "design": Example(
            command="moewright design --on 8xH100 --days 1 --max-total 2B --out runs/design"
        ),
        "export": Example(
            command="moewright export runs/estimate.json --to megatron",
            no_json="its answer is the launch file; with --from-flags the plan of a script is JSON",
            is_stable=True,
        ),
        "capture": Example(
            command="moewright capture --on H100 -- bash examples/qwen3_30b_16h100.sh",
            is_stable=True,
        ),
        "check": Example(
            command=(
                "moewright check examples/qwen3_30b_16h100.sh "
                "skills/moewright/files/out_of_memory.sh --on H100"
            ),
            is_stable=True,
            code=3,
        ),
        "validate": Example(
            command="moewright validate tests/published/data/measured_steps.csv", is_stable=True
        ),
        "fit": Example(
            command=(
                "moewright fit tests/published/data/measured_steps.csv --on H800 "
                "--out runs/h800.toml"
            )
        ),
        "completion": Example(
            command="moewright completion bash",
            lines=6,
            no_json="its answer is a script of a shell",
        ),
        "bench machine": Example(command="moewright bench machine --nproc 2"),
        "bench search": Example(command="moewright bench search"),
        "bench sweep": Example(
            command="moewright bench sweep recipes/seed0_ep.toml --predict --out runs/sweep",
            lines=20,
        ),
        "data build": Example(
            command="moewright data build LICENSE --out runs/text --tokenizer bytes"
        ),
        "dryrun": Example(command="moewright dryrun tiny.toml --rank 1"),
        "verify": Example(command="moewright verify tiny.toml --out runs/check", lines=20),
        "train": Example(
            command="moewright train tiny.toml --out runs/tiny", lines=5, last_lines=9
        ),
        "report": Example(command="moewright report runs/tiny"),
        "diagnose": Example(command="moewright diagnose runs/tiny"),
        "compare": Example(command="moewright compare runs/tiny"),
        "watch": Example(command="moewright watch runs/tiny --once"),
        "forecast": Example(command="moewright forecast runs/tiny --horizon 100", lines=20),
        "tune": Example(command="moewright tune tiny.toml --predict --out runs/tune"),
        "convert export": Example(command="moewright convert export runs/tiny --out runs/hf"),
        "convert import": Example(command="moewright convert import runs/hf --out runs/weights"),
        "upcycle": Example(
            command="moewright upcycle runs/dense --out runs/moe --experts 4 --top-k 2"
        ),
        "finetune": Example(command="moewright finetune --out runs/first", lines=8, last_lines=12),
        "chat": Example(command='moewright chat runs/first --prompt "What is 8 plus 3?"', lines=6),
        "studio": Example(
            command="timeout --preserve-status --signal INT 8 moewright studio --port 0",
            no_json="it serves pages until Ctrl-C",
        ),
        "mcp": Example(
            command="moewright mcp < ask.json",
            no_json="its answers are messages of the Model Context Protocol, which are JSON",
            lines=2,
        ),
    }
)
# What a verb needs besides the examples before it.
_BEFORE = {"upcycle": "moewright train dense.toml --out runs/dense --quiet"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an example printed, the keys of its JSON, and its exit code."""

    text: str
    keys: tuple[str, ...]
    code: int


def json_file(verb: str) -> str:
    """Return the file to which the example of a verb writes its JSON."""
    return f"runs/{verb.replace(' ', '_')}.json"


def write_command(verb: str) -> str:
    """Return the command of a verb with --json, where it has that."""
    example = EXAMPLES[verb]
    head, separator, rest = example.command.partition(" -- ")
    if example.no_json:
        return example.command
    return f"{head} --json {json_file(verb)}{separator}{rest}"


def prepare_folder(folder: Path) -> None:
    """Make a folder look like the root of a clone, with the files of the examples."""
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", ".git"):
            (folder / entry.name).symlink_to(entry)
    (folder / "runs").mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)


def run_example(verb: str, folder: Path) -> Answer:
    """Run the example of a verb in a folder."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": str(_COLUMNS),
    }
    for command in (_BEFORE.get(verb), write_command(verb)):
        if command is None:
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    expected = EXAMPLES[verb].code
    assert done.returncode == expected, (verb, done.returncode, done.stdout[-500:], done.stderr)
    keys: tuple[str, ...] = ()
    if not EXAMPLES[verb].no_json:
        keys = list_keys(json.loads((folder / json_file(verb)).read_text()))
    return Answer(text=done.stdout, keys=keys, code=done.returncode)


def list_keys(data: object) -> tuple[str, ...]:
    """Return the keys of an answer in JSON."""
    assert isinstance(data, dict)
    return tuple(data)


def list_options(app: App) -> tuple[str, ...]:
    """Return the long options of a verb."""
    arguments = app.assemble_argument_collection()
    names = [name for argument in arguments if argument.show for name in argument.names]
    return tuple(name for name in names if name.startswith("--"))


def shorten(verb: str, text: str) -> str:
    """Return the lines of an output that the page shows."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    # A token is another at each start, and a fingerprint with each new field of a job.
    lines = [re.sub(r"token=\w+", "token=...", line) for line in lines]
    lines = [re.sub(r"\bplan [0-9a-f]{16}$", "plan ...", line) for line in lines]
    first, last = EXAMPLES[verb].lines, EXAMPLES[verb].last_lines
    if len(lines) > first + last:
        lines[first : len(lines) - last] = ["..."]
    return "\n".join(lines)


def render_example(verb: str, answer: Answer) -> str:
    """Return the section of a verb."""
    example = EXAMPLES[verb]
    json_line = f"`--json`: {', '.join(f'`{key}`' for key in answer.keys)}."
    if example.no_json:
        json_line = f"No `--json`: {example.no_json}."
    return (
        f"## {verb}\n\n    {write_command(verb)}\n\n```\n{shorten(verb, answer.text)}\n```\n\n"
        f"Exit code {answer.code}. {json_line}\n"
    )


def render_page(answers: Mapping[str, Answer]) -> str:
    """Return the page."""
    files = "\n".join(
        f"```toml\n# {name}\n{text}```\n" for name, text in FILES.items() if name == "tiny.toml"
    )
    sections = "\n".join(render_example(verb, answer) for verb, answer in answers.items())
    return f"{_INTRODUCTION}\n{files}\n{sections}"


_INTRODUCTION = """# An example of every verb

Every command ran from the root of a clone, one after the other, as
`python -m docs.tools.verb_examples` runs them again. What is shown is what it printed, long answers
in part, on two cores of an Intel Xeon, whose the times of training are. `tiny.toml` is below;
`dense.toml` is the same without experts. What `--json` writes has the keys that are named. All
options and exit codes: [the command line](command_line.md).
"""


def read_page() -> Mapping[str, str]:
    """Return the sections of the page by verb."""
    # An output may have headings of its own.
    head = re.compile(r"^## (?=[a-z ]+\n\n    )", flags=re.MULTILINE)
    sections = head.split(PAGE.read_text(encoding="utf-8"))[1:]
    return {section.partition("\n")[0]: section for section in sections}


def run_all(folder: Path) -> Iterator[tuple[str, Answer]]:
    """Run every example in a folder."""
    prepare_folder(folder)
    for verb in EXAMPLES:
        yield verb, run_example(verb, folder)


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        answers = {}
        for verb, answer in run_all(Path(name)):
            print(shlex.quote(verb), answer.code, flush=True)
            answers[verb] = answer
    PAGE.write_text(render_page(answers), encoding="utf-8")
