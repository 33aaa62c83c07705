"""Records of options that belong together, with their help; verbs share them.

A record is one parameter of a verb; its fields are options of the command line. A record that
derives from one of the package states again what has a converter here, and what has an enumeration
for its type: annotations are read by the names of this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moewright.cli.option_types import (
    Count,
    Flag,
    FrozenParts,
    JsonOption,
    LoraRank,
    NoOption,
    OptionalCount,
    OptionalCounts,
    OptionalLength,
    PrecisionChoice,
    Quiet,
    SetOption,
    ShellWords,
    Verbose,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.options import (
    BudgetOptions,
    DesignOptions,
    FineTuningOptions,
    JobAxes,
    JobSwitchKind,
    Launcher,
    RunOptions,
    SearchOptions,
    TrialPlace,
    TrialTrainer,
    WorkloadOptions,
)
from moewright.spec.upcycling import RouterWeighting, UpcyclingScaling, UpcyclingSpec
from moewright.spec.workload import BaseQuantization, Dtype, SaveMode, Task


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions(WorkloadOptions):
    """Options that describe the workload, and the network it runs over.

    Parameters
    ----------
    seq_len
        Tokens a sequence, such as 4096, 128k (128,000) or 128Ki (131,072); 4096 when neither this
        nor a job says it.
    global_batch
        Sequences a step, such as 512 or 1k; 16 a device when neither this nor a job says it.
    precision
        Compute precision; bf16 when neither this nor a job says it.
    network
        The network in place of the hardware's own: ib, roce, efa or tcp between fast domains;
        nvlink, nvl36, nvl72 or pcie inside them; two joined by +, such as nvl36+efa; and levels of
        switches, such as tree:3072:7 (units of 3,072 devices, oversubscribed 7 to 1).
    rampup_batch_size
        A global batch that grows: START INCREMENT SAMPLES, as Megatron-LM takes them.
    task
        What the model is trained for: pretrain, sft or lora; pretrain when neither this nor a job
        says it. Under LoRA the weights are frozen: without gradients and moments.
    lora_rank
        The rank of LoRA's adapters, such as r=16; it implies --task lora.
    quantize_base
        The form of the frozen linears under LoRA's adapters: nf4 for 4 bits (QLoRA), fp8 for
        e4m3 in blocks of 128, none for the precision.
    load
        The load of the experts, in place of that of published runs whose routers decided:
        balanced; the hottest rank's rows over the mean, such as 1.5; or tokens an expert of each
        layer, measured: a .json list of layers, a .csv with a line of counts a layer (or the
        columns layer,expert,tokens), the folder of a run, or Megatron-LM's .log, whose balance
        loss says how far experts lie apart.
    from_trace
        A traced step of these devices, whose kernels calibrate the constants of the prediction: the
        folder of a run of this engine with traces, or a trace with its job as plan.json beside it.
    """

    seq_len: OptionalLength = None
    global_batch: OptionalCount = None
    precision: Dtype | None = None
    rampup_batch_size: OptionalCounts = None
    task: Task | None = None
    lora_rank: LoraRank = None
    quantize_base: BaseQuantization | None = None
    load: Path | None = None
    from_trace: Path | None = None
    # Not of every verb: those that plan have them.
    steps: NoOption = None
    tokens: NoOption = None
    lengths: NoOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions(BatchOptions):
    """Options that describe the workload, with the length of its training and of its samples.

    Parameters
    ----------
    steps
        Steps of the training; launch files say it, and no prediction depends on it.
    tokens
        Tokens of the training, such as 300B, in place of --steps.
    lengths
        A histogram of the samples that are packed into sequences: a .csv with the columns
        tokens,samples. What packing leaves empty is told; attention stays within a sample.
    """

    steps: OptionalCount = None
    tokens: OptionalCount = None
    lengths: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AxesOptions(PlanningOptions):
    """Options that describe the workload, and what of it a plan may choose.

    Parameters
    ----------
    batches
        Sequences a step, such as 512 or 1k; 16 a device when neither this nor a job says it. A
        range, such as 512..4096, lets the plan choose: up to your critical batch, where a
        token teaches as much in any of them.
    format
        Compute precision; bf16 when neither this nor a job says it; any lets the plan choose among
        those that the devices multiply in.
    switches
        What of the job the plan may set: bf16-gradients, bf16-moments, fused-experts, narrow-head.
        The best layouts with and without are compared.
    """

    # `batches` and `format` take more than one value, under the same names.
    global_batch: NoOption = None
    precision: NoOption = None
    batches: Annotated[str | None, Parameter(name="--global-batch")] = None
    format: PrecisionChoice = None
    switches: Annotated[
        tuple[JobSwitchKind, ...], Parameter(name="--try", negative="", consume_multiple=True)
    ] = ()

    def split(self) -> tuple[WorkloadOptions, JobAxes]:
        """Return the workload with its largest batch, and what of it may vary."""
        from moewright.api.requests import read_axes, translate_fields

        with translate_fields(lambda field: f"--{field.replace('_', '-')}"):
            precision, global_batch, axes = read_axes(self.format, self.batches)
        axes = replace(axes, switches=tuple(dict.fromkeys(self.switches)))
        return replace(self, precision=precision, global_batch=global_batch), axes


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CalendarOptions(BudgetOptions):
    """Options that say what a budget compares, and how the job is run.

    Parameters
    ----------
    devices
        Numbers of devices to compare; a quarter to four times those of --on when not given.
    price
        What an hour of a device costs you; without it no costs are shown.
    mtbf
        Hours between failures of the job on the devices of --on, or auto for the published rates;
        with it, days are by the calendar: failures, saves, planned stops, spares, energy. The
        other options of this list need it.
    checkpoint
        Whether training waits while a checkpoint is written: sync or async; async when neither this
        nor a job says it.
    save_every
        Minutes between saves; those that lose the least when not given.
    restart
        Minutes from a failure to where loading begins: detection, replacement, start; 10 when not
        given.
    storage
        GB/s that the whole job writes and reads checkpoints with; 0.122 a device when not given.
    spares
        Devices kept as spares, in whole nodes, or NVLink domains of racks; those that cost least
        when not given.
    repair
        Hours until a part that failed is back.
    slowdown
        Share by which stragglers lengthen steps, such as 0.03; when not given, that of the slowest
        links of described levels, and published delays of jobs in the interval of days.
    deadline
        Days by which training has to end: the cheapest number of devices that meets it is named.
    max_cost
        The most that training may cost, in the money of --price: the number of devices that ends
        soonest for it is named, or with --deadline the cheapest that meets both.
    watts
        Watts that a device is rated at; its datasheet's when not given.
    pue
        The data centre's energy over that of its machines.
    grid
        Kilograms of CO2 that a kWh of the grid emits; without it none are told.
    """

    devices: Annotated[tuple[Count, ...], Parameter(negative="", consume_multiple=True)] = ()
    checkpoint: SaveMode | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PortionOptions(FineTuningOptions):
    """Options that say how long and in which portions a model is fine-tuned.

    Parameters
    ----------
    nproc
        Processes to start; those of --on, or the GPUs of this machine, when not given.
    epochs
        Passes over the chats; 3 when not given.
    seq_len
        Tokens a sequence, into which chats are packed; when not given, the power of two that holds
        the longest chat.
    global_batch
        Sequences a step; what makes some steps an epoch when not given.
    lr
        Peak learning rate; when not given 1e-5, or 2e-4 with --lora.
    lora_rank
        Train low-rank adapters beside frozen weights, of this rank, such as r=16.
    quantize_base
        The form of the frozen linears under the adapters: nf4 for 4 bits (QLoRA), fp8 for
        e4m3 in blocks of 128, none for bf16.
    freeze
        Parts that do not train, such as router,embeddings: embeddings, attention, mlp, router,
        experts, shared_experts.
    heldout
        Share of the chats that is held out of training.
    chat_template
        A file with the chat template, in place of the folder's own.
    columns
        The fields of records where they are not recognized: prompt=instruction,answer=output.
    skip_bad
        Leave out so many bad records at most, and list them in data/bad_records.txt.
    """

    nproc: OptionalCount = None
    seq_len: OptionalLength = None
    global_batch: OptionalCount = None
    lora_rank: LoraRank = None
    quantize_base: BaseQuantization = BaseQuantization.NONE
    freeze: FrozenParts = ()
    chat_template: Path | None = None
    columns: str = ""
    skip_bad: Count = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RankingOptions(SearchOptions):
    """Options that say which layouts are shown, and in which order.

    Parameters
    ----------
    top
        How many layouts to show.
    layout
        Layout keys that must hold, such as "ep8,recompute=select".
    fewest
        Plan for the fewest devices, up to those of --on, on which a layout fits; the global batch
        stays that of --on.
    fit_probability
        Layouts that fit with at least this probability come first.
    risk
        Layouts are ranked by the seconds that a step exceeds with this probability; 0.5: by the
        predicted step.
    runs_on
        Take layouts that this trainer starts: engine, megatron or torchtitan.
    why_not
        A layout, such as "tp2,ep8,pp4": say what speaks against it.
    """

    top: Count = 5
    fewest: Flag = False
    why_not: str = ""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchScriptOptions:
    """A launch script of Megatron-LM that stands in place of a job or a plan.

    Parameters
    ----------
    from_flags
        A launch script of Megatron-LM: it says layout, batches and precision. Or a configuration in
        YAML: Megatron-LM's MODEL_ARGS, Megatron Bridge, NeMo, NeMo-RL, verl, Primus, FlagScale,
        ROLL. Variables that it does not set are taken from the environment.
    script_args
        What stands behind the script's name, in quotes: "dlc A22B 1 2048"; behind a configuration
        settings such as "model.num_layers=4".
    set_
        NAME=VALUE, which wins over the script's: of a variable, of an option (--num-layers=4; null
        leaves one out) or of a setting. Can stand several times.
    strict
        Refuse options that are not Megatron-LM's, and settings that are not read; else they are
        left out with a note.
    verbose
        Print memory, time and assumptions of the script's job too.
    """

    from_flags: Path | None = None
    script_args: str = ""
    set_: SetOption = None
    strict: Flag = False
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """Where an answer goes besides the terminal.

    Parameters
    ----------
    html
        Write the answer to this file, one page that opens offline.
    """

    html: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOptions(TrialPlace):
    """Where trials run, what runs in them, and where the answer goes besides the terminal.

    Parameters
    ----------
    launcher
        What starts a trial. local: this program. torchrun: torchrun on this machine. slurm: sbatch,
        a job a trial; a full queue is waited for, a lost job submitted again.
    trainer
        What runs in a trial. ours: moewright's engine. megatron: pretrain_gpt.py of Megatron-LM,
        with the flags that `export` writes; its log says steps, memory and timers.
    megatron
        The checkout of Megatron-LM, or its pretrain_gpt.py.
    megatron_args
        Further flags of Megatron-LM, in quotes: "--data-path DIR --tokenizer-model FILE".
    setup
        Lines of shell that run before each trial: "module load cuda; source env/bin/activate".
    sbatch
        Options of sbatch, in quotes: "--partition gpu --account me --time 30".
    at_once
        Trials that may run at the same time in Slurm's queue; those known ahead are one job array.
    quiet
        Show no panel of a trial of the engine on a terminal.
    html
        Write the answer to this file, one page that opens offline.
    """

    launcher: Launcher = Launcher.LOCAL
    trainer: TrialTrainer = TrialTrainer.OURS
    megatron_args: ShellWords = ""
    setup: ShellWords = ""
    sbatch: ShellWords = ""
    at_once: Count = 1
    quiet: Quiet = False
    html: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TuningOutputs(TrialOptions):
    """Where trials of a tuning run, and where its answer goes besides the terminal.

    Parameters
    ----------
    json
        Write what was tried, measured and chosen (result, plan) to this file; "-": to standard
        output, and the text to standard error.
    """

    json: JsonOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions(PageOptions):
    """How much of an answer is printed, and where it goes besides the terminal.

    Parameters
    ----------
    verbose
        Print the rest of the answer too.
    """

    verbose: Verbose = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosisOutputs(AnswerOptions):
    """How much of a diagnosis is printed, and where it goes besides the terminal.

    Parameters
    ----------
    json
        Write the diagnosis (findings, waterfall, job and what was measured) to this file; "-": to
        standard output, and the text to standard error. A figure that was not printed is null.
    perfetto
        Write the trace to this file for ui.perfetto.dev, with the findings, the longest gaps,
        exposed communication and compute as tracks on top; of a folder of traces, a folder of them.
    what_if
        Of a trace: say what a step would take if parts were faster, such as
        "gemm=2x,network=1.5x,host=inf"; parts are gemm, grouped_gemm, attention, other, copy,
        network and host. Or with graphs=on, overlap=grad; of a run with the traces of all ranks
        also ep=4, schedule=1f1b.
    """

    json: JsonOption = None
    perfetto: Path | None = None
    what_if: str = ""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOptions:
    """What launch scripts leave open.

    Parameters
    ----------
    on
        The devices of scripts, count x device, or the device alone.
    model
        The model of scripts that give no sizes.
    script_args
        What stands behind the name of a script, in quotes.
    network
        Kinds of network in place of the hardware's own, such as ib or nvl72+efa.
    set_
        NAME=VALUE, which wins over that of both scripts: of a variable, of an option
        (--vocab-size=128000; null leaves one out) or of a setting. Can stand several times.
    """

    on: str = ""
    model: str = ""
    script_args: ShellWords = ""
    network: str = ""
    set_: SetOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions(AnswerOptions):
    """How a log is followed, whom alarms are told, and where the answer goes.

    Parameters
    ----------
    layout
        The layout of --model, such as "tp2,ep8,pp4".
    once
        Read what is there, and end.
    interval
        Seconds between two looks at the log.
    patience
        End when no step has come for so many seconds; 0: wait for ever.
    live
        Draw the state over itself while the log grows, on a terminal.
    webhook
        Post each alarm to this address as JSON, with the `text` that Slack and others show.
    json
        Write the last state (speed, changes, what recurs, alarms) to this file; "-": to standard
        output, and the text to standard error.
    """

    layout: str = ""
    once: Flag = False
    interval: float = 10.0
    patience: float = 0.0
    live: Flag = False
    webhook: str = ""
    json: JsonOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOutputs(AnswerOptions):
    """How much of a check is printed, and where it goes besides the terminal.

    Parameters
    ----------
    json
        Write the check (switches, measures, rows, broken budgets) to this file; "-": to standard
        output, and the text to standard error.
    markdown
        Write the check to this file as Markdown, for a comment on a pull request.
    sarif
        Write the broken budgets to this file as SARIF 2.1.0, for code scanning.
    junit
        Write the jobs to this file as a test suite of JUnit.
    """

    json: JsonOption = None
    markdown: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOutputs(AnswerOptions):
    """How much of a budget is printed, and where it goes besides the terminal.

    Parameters
    ----------
    json
        Write the budget to this file; "-": to standard output, and the table to standard error.
    """

    json: JsonOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOutputs(AnswerOptions):
    """How much of a comparison is printed, and where it goes besides the terminal.

    Parameters
    ----------
    json
        Write the comparison (published runs, gaps, what closes them) to this file; "-": to standard
        output, and the text to standard error.
    """

    json: JsonOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions(PageOptions):
    """Where an estimate goes besides the terminal.

    Parameters
    ----------
    trace
        Write the predicted pipeline timetable to this file, a Chrome trace that Perfetto opens.
    places
        Choose which node has which ranks, where the network has levels of switches, and write the
        places to this file: a line for each fast domain, in rank order.
    """

    trace: Path | None = None
    places: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFileOptions(RunOptions):
    """What a launch file says of its run beyond the plan.

    Parameters
    ----------
    job
        The job file of the plan; torchrun needs it, slurm and k8s start our own engine with it and
        Megatron-LM without.
    image
        The container image of k8s, and of slurm, which starts it by Pyxis.
    data
        The prefix of the training .bin/.idx pair, or a blend: "0.7 a/train 0.3 b/train".
    eval_data
        The same, of held-out data.
    tokenizer
        A tokenizer of Hugging Face: a name or a folder.
    save
        The folder of checkpoints, from which a run also goes on.
    save_interval
        Steps between checkpoints. Left out, those that lose the least time, by how often so many
        devices fail and how long a save stops training.
    load
        A checkpoint of the trainer whose weights the run starts from.
    wandb
        A project of Weights & Biases that gets the run's figures.
    recipe
        Write what the model's makers published, or what is usual, where the plan has defaults:
        learning rate, warm-up, decay, balancing loss, z-loss.
    traces
        A folder for the predicted step as Chakra execution traces, one a rank, with the network
        and the groups as ASTRA-sim reads them.
    """

    job: Path | None = None
    image: str = ""
    eval_data: Annotated[str, Parameter(name="--eval")] = ""
    save_interval: OptionalCount = None
    recipe: Flag = False
    traces: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class UpcyclingOptions(UpcyclingSpec):
    """The model that a dense one becomes.

    Parameters
    ----------
    experts
        Experts of a layer: copies of its MLP times --granularity.
    top_k
        Experts a token: a multiple of --granularity.
    granularity
        Slices that each MLP is cut into; experts are that much narrower.
    dense_first
        How many layers at the start stay dense.
    every
        Of the others, those whose number this divides get experts.
    scaling
        exact keeps the function; published spreads the factor over gate, up and down, which keeps
        it only about.
    weighting
        post-softmax: the weights of the chosen experts sum to 1; pre-softmax: they are shares of
        all.
    """

    experts: Count
    top_k: Annotated[Count, Parameter(name="--top-k")]
    granularity: Count = 1
    dense_first: Count = 0
    every: Count = 1
    scaling: UpcyclingScaling = UpcyclingScaling.EXACT
    weighting: Annotated[RouterWeighting, Parameter(name="--router")] = RouterWeighting.POST_SOFTMAX


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedRun:
    """The run that `verify` starts.

    Parameters
    ----------
    layout
        The layout, such as "ep2,mbs1"; dp is the rest of --nproc. A job has its own.
    nproc
        Processes to start: the world size; 1 or the job's own number when not given.
    steps
        Updates: 1 of a checkpoint, where step s uses batch s mod N, and 3 of a job.
    """

    layout: str = ""
    nproc: OptionalCount = None
    steps: OptionalCount = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOptions:
    """The update rule of `verify`, at a constant learning rate.

    Parameters
    ----------
    optimizer
        Plain SGD or AdamW, at a constant rate.
    lr
        Learning rate.
    betas
        AdamW's two decay rates, as one value: 0.9,0.95.
    eps
        AdamW's epsilon.
    weight_decay
        Decoupled weight decay of matrices; norm weights never decay.
    clip
        Largest gradient norm; 0: no clipping.
    """

    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.01
    betas: str = "0.9,0.95"
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedWeights:
    """The weights that `convert export` writes, and what goes with them.

    Parameters
    ----------
    dtype
        Dtype of the weights; when not given, that in which they were imported (bf16 for packed
        ones) or in which the run computed.
    optimizer
        Write to Megatron-LM the main weights, the moments of AdamW and the schedule too, for a run
        with expert parallelism (split) or without (joint) that has --use-distributed-optimizer.
    """

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    optimizer: Literal["joint", "split"] | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutputs:
    """How much a run shows while it trains, and where its record goes.

    Parameters
    ----------
    quiet
        Show nothing while it trains, neither a panel on a terminal nor a line a step elsewhere.
    json
        Write what `report --json` says of the run (run, findings, comparisons) to this file once it
        has trained; "-": to standard output, and all else to standard error.
    """

    quiet: Quiet = False
    json: JsonOption = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class EnduranceOptions:
    """Options for what a run does about damage and failures.

    Parameters
    ----------
    fall_back
        Put damaged checkpoints aside, and go on from the newest that is whole, here or in
        `checkpoint.copy_to`.
    supervise
        Start the ranks again when one crashes, hangs or is not finite; give up, with the reason,
        when the same step fails twice. incidents.jsonl and the report tell of it.
    min_ranks
        With --supervise: when ranks are gone for good, plan again for those that are left, down to
        so many, and take the others back when they return.
    """

    fall_back: Flag = False
    supervise: Flag = False
    min_ranks: OptionalCount = None

    def check(self) -> None:
        """Raise BadInput for options that do not go together."""
        if self.min_ranks is None or (self.supervise and self.min_ranks >= 1):
            return
        rule = "must be at least 1" if self.supervise else "goes with --supervise"
        nearest = "1" if self.supervise else "--supervise"
        raise BadInput(
            Reason(field="--min-ranks", value=str(self.min_ranks), rule=rule, nearest=nearest)
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeOptions(DesignOptions):
    """Options that say what a model is designed for, and what bounds its size.

    Parameters
    ----------
    days
        Days by the calendar that the training may take.
    tokens
        Tokens to train on, such as 2T, in place of --days.
    until
        A held-out loss in nats a token to train to, in place of --days: the shape that has it first
        is chosen.
    goodput
        The share of the calendar that goes into steps (see budget --mtbf).
    max_total
        The most parameters, such as 40B; as many as fit when not given.
    max_active
        The most parameters that a token activates.
    serve
        Hardware that must hold the model when it is served, such as 1xH200; any number of the
        training's devices when not given.
    context
        Tokens of each sequence that is served.
    batch
        Sequences that are served at a time.
    served_tokens
        Tokens that the model decodes in its life, such as 10T: device-hours of training and serving
        together are compared too.
    attention_kinds
        Kinds of attention to compare, gqa and mla (latent, in DeepSeek-V2's proportions); that of
        --like when not given.
    kv_heads
        Numbers of heads of keys and values to compare; that of --like when not given.
    vocab_sizes
        Sizes of the vocabulary to compare; that of --like when not given.
    shared_experts
        Numbers of shared experts to compare, each as wide as a routed one; one where --like has
        shared experts when not given.
    fit_loss
        Folders of own runs, whose last held-out losses set the level of the prediction.
    out
        A folder for the chosen shape's config.json, plan.json and job.toml.
    """

    batch: Count = 64
    context: Count = 8192
    attention_kinds: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True)] = ()
    kv_heads: Annotated[tuple[int, ...], Parameter(negative="", consume_multiple=True)] = ()
    vocab_sizes: Annotated[tuple[int, ...], Parameter(negative="", consume_multiple=True)] = ()
    shared_experts: Annotated[tuple[int, ...], Parameter(negative="", consume_multiple=True)] = ()
    fit_loss: Annotated[tuple[Path, ...], Parameter(negative="", consume_multiple=True)] = ()
    out: Path | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DesignOutputs(AnswerOptions):
    """How much of a design is printed, and where it goes besides the terminal.

    Parameters
    ----------
    json
        Write the front, the chosen shape and its plan to this file; "-": to standard output, and
        the tables to standard error.
    """

    json: JsonOption = None
