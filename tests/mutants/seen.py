"""Check that a user sees faults: in the comparison that ends a run, or by `moewright verify`.

    PYTHONPATH=tests python -m mutants.seen               run all of seen.toml (`make mutants`)
    PYTHONPATH=tests python -m mutants.seen ID [ID ...]   run some of them

Each mutant is one wrong line of the package, as in mutants.toml. A tiny job trains with it; a fault
is seen by the run where a row of its ledger breaks its rule, or where it fails. `verify` tries what
the run does not see. The exit status is 1 if neither sees a mutant, if runs see fewer than they
should, or if a job without a mutant does not hold; and 2 if the list no longer fits the package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import tiny_jobs
from moewright.codec import fingerprint, write_json
from moewright.spec.model import ModelSpec, MoeSpec, RouterSpec, ScoreFunction
from moewright.spec.workload import (
    BaseQuantization,
    Dtype,
    FineTuningSpec,
    LossSpec,
    RouterTraining,
    Task,
)
from mutants.run import REPOSITORY, Mutant, copied_package, find_list_faults

SEEN_FILE = Path(__file__).with_name("seen.toml")
# Of the whole list: what a user is told without asking.
LEAST_BY_RUN = 24
_TIME_LIMIT_S = 600
# How `verify` says that a figure is too far off, or that a setting is lost.
_TOLD = (" apart, at most ", "nothing changes")
_WIDE = replace(
    tiny_jobs.MODEL,
    hidden_size=128,
    attention=replace(tiny_jobs.MODEL.attention, head_dim=32, v_head_dim=32),
    dense_ffn_size=256,
)
# A bias moves towards an even load.
_BALANCED = replace(
    tiny_jobs.MODEL,
    moe=MoeSpec(
        experts=8,
        ffn_size=16,
        router=RouterSpec(top_k=2, score=ScoreFunction.SIGMOID, selection_bias=True),
    ),
)
_ADAPTERS = FineTuningSpec(
    task=Task.LORA,
    lora_rank=8,
    lora_alpha=16.0,
    lora_experts=True,
    quantize_base=BaseQuantization.NF4,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenJob:
    """A job that trains with a mutant."""

    layout: str
    ranks: int
    model: ModelSpec = tiny_jobs.MODEL
    tuning: FineTuningSpec | None = None
    precision: Dtype = Dtype.BF16
    jitter_eps: float = 0.0


JOBS = {
    "one": SeenJob(layout="mbs2", ranks=1),
    "recompute": SeenJob(layout="mbs2,recompute=moe_act+layernorm", ranks=1),
    "host": SeenJob(layout="mbs2,offload=core_attn+moe_act+expert_fc1", ranks=1),
    "packed": SeenJob(layout="mbs2", ranks=1, model=_WIDE, tuning=_ADAPTERS),
    "data": SeenJob(layout="mbs2", ranks=2),
    "sharded": SeenJob(layout="zero3,mbs2", ranks=2),
    "experts": SeenJob(layout="tp2,ep2,mbs2", ranks=2),
    "context": SeenJob(layout="cp2,cp_comm=allgather,mbs2", ranks=2),
    "pipeline": SeenJob(layout="pp2,schedule=zb-h1,layout='Et|ttL'", ranks=2),
    "depth": SeenJob(layout="ep2,mbs2", ranks=2, model=replace(tiny_jobs.MODEL, mtp_layers=1)),
    "balanced": SeenJob(layout="ep2,mbs2", ranks=2, model=_BALANCED),
    "jitter": SeenJob(layout="tp2,ep2,mbs2", ranks=2, jitter_eps=0.1),
    "narrow": SeenJob(layout="ep2,mbs2", ranks=2, precision=Dtype.MXFP8),
}


class Seer(StrEnum):
    """Who sees a fault."""

    RUN = "run"
    VERIFY = "verify"
    NOBODY = "NOBODY"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenMutant:
    """A mutant and the job that trains with it."""

    mutant: Mutant
    job: str


def read_seen_mutants(path: Path = SEEN_FILE) -> tuple[SeenMutant, ...]:
    """Read the list."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return tuple(
        SeenMutant(job=table.pop("plan"), mutant=Mutant(**table, tests=())) for table in tables
    )


def write_plans(folder: Path) -> None:
    """Write the plan of every job, with its data."""
    data = tiny_jobs.write_corpus(folder / "corpus")
    for name, job in JOBS.items():
        workload = tiny_jobs.build_workload(
            data,
            steps=3,
            precision=job.precision,
            eval_batches=0,
            fine_tuning=job.tuning or FineTuningSpec(),
            loss=LossSpec(aux_coeff=0.05, z_coeff=0.001),
            router=RouterTraining(jitter_eps=job.jitter_eps),
        )
        optimizer = replace(workload.optimizer, bucket_elements=5000, clip_norm=1.0)
        workload = replace(workload, optimizer=optimizer)
        plan = tiny_jobs.build_plan(workload, job.layout, world_size=job.ranks, model=job.model)
        own = fingerprint(plan.model, plan.workload, plan.hardware, plan.layout)
        write_json(folder / f"{name}.json", replace(plan, fingerprint=own))


def find_seer(plans: Path, seen: SeenMutant) -> Seer:
    """Train and, if need be, verify a mutant's job on a copy of the package; print who sees it."""
    started = time.monotonic()
    with (
        copied_package(REPOSITORY, seen.mutant) as source,
        tempfile.TemporaryDirectory(prefix="seen-") as folder,
    ):
        seer, said = _find_seer(source, plans / f"{seen.job}.json", Path(folder))
    seconds = time.monotonic() - started
    mutant = seen.mutant
    print(f"{seer:6} {seconds:6.1f} s  {mutant.id}: {mutant.fault} [{said}]", flush=True)
    return seer


def _find_seer(source: Path, plan: Path, folder: Path) -> tuple[Seer, str]:
    code, output = run_command(source, "train", plan, folder / "run")
    broken = list_broken(folder / "run")
    if broken:
        return Seer.RUN, ", ".join(dict.fromkeys(broken))
    if code:
        return Seer.RUN, _last_line(output)
    code, output = run_command(source, "verify", plan, folder / "verify")
    if code == 1:
        told = [line for line in output.splitlines() if any(word in line for word in _TOLD)]
        return Seer.VERIFY, told[0].strip()
    return Seer.NOBODY, _last_line(output)


def run_command(source: Path, verb: str, plan: Path, out: Path) -> tuple[int, str]:
    """Run a verb on the package below `source`; return the exit code and what it printed."""
    process = subprocess.run(
        [sys.executable, "-m", "moewright", verb, str(plan), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(source)},
        cwd=plan.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIME_LIMIT_S,
    )
    return process.returncode, process.stdout + process.stderr


def list_broken(run: Path) -> list[str]:
    """Return the rows of a run's comparison that break their rule."""
    path = run / "ledger" / "comparison.json"
    if not path.is_file():
        return []
    return [
        f"{line['section']} {'/'.join(line['key'])}"
        for comparison in json.loads(path.read_text(encoding="utf-8"))
        for line in comparison["lines"]
        if not line["keeps_rule"]
    ]


def _last_line(output: str) -> str:
    return (output.splitlines() or [""])[-1]


def check_job(plans: Path, verbs: tuple[str, ...], name: str) -> bool:
    """Train and verify a job without a mutant, and print what does not hold."""
    with (
        copied_package(REPOSITORY, None) as source,
        tempfile.TemporaryDirectory(prefix="seen-") as folder,
    ):
        for verb in verbs:
            out = Path(folder) / verb
            code, output = run_command(source, verb, plans / f"{name}.json", out)
            broken = list_broken(out)
            if code or broken:
                said = broken or _last_line(output)
                print(f"{name} does not hold without a mutant: {verb}: {said}", flush=True)
                return False
    return True


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(description="Check that a user sees faults.")
    parser.add_argument("ids", nargs="*", help="the mutants to run; all without any")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    arguments = parser.parse_args()
    mutants = read_seen_mutants()
    if unknown := set(arguments.ids) - {seen.mutant.id for seen in mutants}:
        parser.error(f"no such mutant: {' '.join(sorted(unknown))}")
    if faults := tuple(find_list_faults([seen.mutant for seen in mutants])):
        print(*faults, sep="\n")
        return 2
    chosen = [seen for seen in mutants if not arguments.ids or seen.mutant.id in arguments.ids]
    with (
        tempfile.TemporaryDirectory(prefix="seen-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        plans = Path(folder)
        write_plans(plans)
        trained = dict.fromkeys(seen.job for seen in chosen)
        holds = all(pool.map(partial(check_job, plans, ("train",)), trained))
        seers = list(pool.map(partial(find_seer, plans), chosen))
        verified = dict.fromkeys(
            seen.job for seen, seer in zip(chosen, seers, strict=True) if seer is Seer.VERIFY
        )
        holds &= all(pool.map(partial(check_job, plans, ("verify",)), verified))
        counts = Counter(seers)
    print(", ".join(f"{counts[seer]} seen by {seer}" for seer in Seer), f"of {len(chosen)}")
    is_enough = bool(arguments.ids) or counts[Seer.RUN] >= LEAST_BY_RUN
    return 0 if holds and is_enough and not counts[Seer.NOBODY] else 1


if __name__ == "__main__":
    sys.exit(main())
