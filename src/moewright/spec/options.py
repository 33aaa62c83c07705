"""Options that a verb of the command line and a function of the package both take.

The command line derives records of its own from these, with its help and its spellings, and hands
them on as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from moewright.spec.workload import BaseQuantization, Dtype, FrozenPart, SaveMode, Task

Tell = Callable[[str], None]  # takes one line about progress
# What a plan is written for: a trainer, or what starts ours.
ExportTarget = Literal["megatron", "bridge", "torchtitan", "slurm", "k8s", "torchrun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """What the caller says of the workload; None leaves it to the job or to the default.

    `network` names kinds of network in place of the hardware's own; "" leaves them.
    """

    seq_len: int | None = None  # tokens
    global_batch: int | None = None  # sequences a step
    precision: Dtype | None = None
    network: str = ""
    # start, increment and samples of a batch that grows, as Megatron-LM takes them
    rampup_batch_size: tuple[int, int, int] | None = None
    task: Task | None = None
    lora_rank: int | None = None  # only beside the task LoRA, which it implies
    quantize_base: BaseQuantization | None = None  # only beside the task LoRA
    load: Path | None = None  # measured tokens of each expert
    from_trace: Path | None = None  # a traced step, whose constants the hardware gets
    steps: int | None = None
    tokens: int | None = None  # over the whole training
    lengths: Path | None = None  # a histogram of samples, which are packed into sequences


class JobSwitchKind(StrEnum):
    """The switches of a job that change the figures of its numbers or kernels, not its layout."""

    BF16_GRADIENTS = "bf16-gradients"
    BF16_MOMENTS = "bf16-moments"
    FUSED_EXPERTS = "fused-experts"  # products fused with activation and quantisation
    NARROW_HEAD = "narrow-head"  # the head in the job's 8 or 4 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAxes:
    """What of the job itself a plan may choose.

    `batches` are the least and the most sequences a step, None where the workload says how many;
    `switches` those that the plan may set.
    """

    any_precision: bool = False
    batches: tuple[int, int] | None = None
    switches: tuple[JobSwitchKind, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What a launch file says of a run beyond its plan; "" and None leave it to the plan.

    `eval_data` are held-out data, `load` is a checkpoint of the trainer whose weights the run
    starts from, `wandb` a project. `recipe` writes the published recipe of the model's family
    where the plan has defaults.
    """

    data: str = ""
    eval_data: str = ""
    tokenizer: str = ""
    save: str = ""
    save_interval: int | None = None  # steps; None: where the least time is lost
    load: str = ""
    wandb: str = ""
    recipe: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How many layouts are wanted, which keys are pinned, and the risks that a ranking takes."""

    top: int = 5
    layout: str = ""
    fewest: bool = False  # plan for the fewest devices on which a layout is safe
    fit_probability: float = 0.9
    risk: float = 0.1
    runs_on: str = ""  # a TargetTrainer that has to start the layouts; "": any layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """What a budget compares, and how the job is run, of which its calendar time follows.

    How it is run counts only with a `mtbf`: hours between failures of the job on the devices it
    names, or "auto" for the published rates. None and zeros leave a choice to published figures or
    to what is best.
    """

    devices: tuple[int, ...] = ()  # numbers to compare; (): those around the job's own
    price: float | None = None  # of an hour of a device
    mtbf: str = ""
    checkpoint: SaveMode | None = None  # None: as the job says, else asynchronous
    save_every: float = 0.0  # minutes
    restart: float | None = None  # minutes from a failure to where loading begins
    storage: float = 0.0  # GB/s, of the whole job
    spares: int | None = None  # devices
    repair: float = 24.0  # hours
    slowdown: float | None = None  # share that stragglers add to a step; None: published ones
    deadline: float = 0.0  # days
    max_cost: float = 0.0  # in the money of the price
    watts: float = 0.0  # of a device
    pue: float = 1.2
    grid: float = 0.0  # kg of CO2 a kWh


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuningOptions:
    """How long and in which portions a model is fine-tuned; None leaves a number to the data.

    Without a `lora_rank` whole weights train, but for the parts in `freeze`.
    """

    nproc: int | None = None
    epochs: float | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    lr: float | None = None
    lora_rank: int | None = None
    quantize_base: BaseQuantization = BaseQuantization.NONE
    freeze: tuple[FrozenPart, ...] = ()
    heldout: float = 0.05  # share of the chats
    chat_template: Path | None = None
    columns: str = ""  # of the chats' records, as name=column by commas
    skip_bad: int = 0  # most records that may be left out


class Launcher(StrEnum):
    """What starts a trial."""

    LOCAL = "local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


class TrialTrainer(StrEnum):
    """What runs in a trial."""

    OURS = "ours"
    MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlace:
    """Where trials run and what runs in them; `at_once` of them wait or run at the same time."""

    launcher: Launcher = Launcher.LOCAL
    trainer: TrialTrainer = TrialTrainer.OURS
    megatron: Path | None = None
    megatron_args: str = ""
    setup: str = ""
    sbatch: str = ""
    at_once: int = 1

    @property
    def is_in_process(self) -> bool:
        """Return whether this program itself starts the ranks of our engine."""
        return self.launcher is Launcher.LOCAL and self.trainer is TrialTrainer.OURS


HERE = TrialPlace()  # our engine, on this machine


# Keys of [train] that change how a step runs and nothing about what it trains.
TUNABLE_TRAIN_KEYS = ("bucket_elements", "gc_every_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningAxis:
    """A key that tuning may change, with its candidate values in no particular order.

    `key` is a key of the layout text or one of TUNABLE_TRAIN_KEYS; values are written as they are
    in the layout text or the job file.
    """

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignOptions:
    """What a model is designed for: `days`, `tokens` or `until`, and what bounds its size.

    Zeros are no bounds. `serve` is hardware that has to hold the weights in bf16 with the caches of
    `batch` sequences of `context` tokens.
    """

    days: float = 0.0
    tokens: str = ""
    until: float = 0.0  # held-out loss, nats a token
    goodput: float = 0.95
    max_total: str = ""  # parameters
    max_active: str = ""
    serve: str = ""
    context: int = 8192
    batch: int = 64
    served_tokens: str = ""  # decoded over the model's life
    # What shapes vary besides width, depth and routed experts; empty: as the model has it.
    attention_kinds: tuple[str, ...] = ()  # gqa, mla
    kv_heads: tuple[int, ...] = ()
    vocab_sizes: tuple[int, ...] = ()
    shared_experts: tuple[int, ...] = ()
    fit_loss: tuple[Path, ...] = ()  # folders of runs whose losses set the level
    out: Path | None = None  # a folder for config.json, plan.json and job.toml
