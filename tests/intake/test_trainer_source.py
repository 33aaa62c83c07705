"""What the source of a fork says of its options, and what a switch in a configuration means."""

import random
from pathlib import Path

import pytest

from moewright.intake.megatron import unread
from moewright.intake.megatron.config_fields import ChosenOptions, SettingReader
from moewright.intake.megatron.launch_command import LaunchCommand
from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.spec.errors import BadInput
from moewright.spec.workload import AttentionBackend

SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --bf16 "
)
VOCABULARY = "--vocab-size 1000 "
PARSER = "megatron/training/arguments.py"
CORE = (
    "megatron/core/transformer/mlp.py",
    "megatron/core/models/gpt/gpt_model.py",
    "megatron/core/pipeline_parallel/schedules.py",
    "megatron/core/optimizer/distrib_optimizer.py",
    "megatron/model/transformer.py",
)
ELSEWHERE = (
    "megatron/training/training.py",
    "megatron/core/datasets/gpt_dataset.py",
    "megatron/core/dist_checkpointing/save.py",
    "tools/report.py",
)
USES = ("def run(args):\n    return args.{}\n", "class Config:\n    {}: int = 0\n")


def start(folder: Path, options: str) -> LaunchCommand:
    script = folder / "examples/job.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES}{options}\n")
    return read_launch(script, {})


def trainer(folder: Path, options: str = VOCABULARY):
    command = start(folder, options)
    return interpret_launch(command, world_size=8, folder=folder).workload.trainer


def write(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def fork(folder: Path, option: str, **keywords: str) -> None:
    words = "".join(f", {key}={value}" for key, value in keywords.items())
    text = f"def _add_own_args(parser):\n    parser.add_argument('{option}'{words})\n"
    write(folder, PARSER, text)


@pytest.mark.parametrize("place", CORE + ELSEWHERE)
def test_an_option_that_the_core_of_a_fork_reads_is_refused_whatever_its_name_is(place, tmp_path):
    draw = random.Random(place)
    name = "".join(draw.choice("bcdfgjz") for _ in range(7))
    is_core = place in CORE
    for number, use in enumerate(USES[: 2 if is_core else 1]):
        folder = tmp_path / str(number)
        fork(folder, f"--{name}-{name}", type="int", default="0")
        write(folder, place, use.format(f"{name}_{name}"))
        write(folder, "megatron/core/utils.py", f"# {name}_{name}s and my_{name}_{name}")
        if is_core:
            with pytest.raises(BadInput, match=f"is read by {place}"):
                start(folder, f"--{name}-{name} 3")
        else:
            notes = start(folder, f"--{name}-{name} 3").notes
            assert f"of the script's own checkout, left out: --{name}-{name}" in notes
        assert start(folder, f"--{name}-{name} 0").notes  # its default changes nothing


def test_the_default_of_a_fork_stands_in_for_megatrons_own(tmp_path):
    fork(tmp_path, "--transformer-impl", default="'local'", choices="['local']")
    assert trainer(tmp_path).attention_backend is AttentionBackend.LOCAL
    notes = start(tmp_path, VOCABULARY).notes
    assert "defaults of the script's own checkout: --transformer-impl local" in notes
    told = f"{VOCABULARY} --transformer-impl transformer_engine"
    assert trainer(tmp_path, told).attention_backend is AttentionBackend.FLASH
    fork(tmp_path, "--hidden-dropout", type="float", default="0.1000")
    assert not any("defaults of" in note for note in start(tmp_path, VOCABULARY).notes)
    fork(tmp_path, "--hidden-dropout", type="float", default="0.25")
    assert trainer(tmp_path).hidden_dropout == 0.25
    fork(tmp_path, "--log-interval", type="int", default="7")  # of no plan
    assert not any("defaults of" in note for note in start(tmp_path, VOCABULARY).notes)


def test_no_option_that_the_core_of_a_known_fork_reads_is_left_out(tmp_path):
    silent = []
    for trainer_name in unread._FORKS:
        for name, option in unread.read_table(trainer_name).items():
            if not option.core or unread.find_harmless(name, (trainer_name,), option.group):
                continue
            if name in option_table() or name.startswith(("--sglang", "--vllm")):
                continue
            silent.append((name, option))
    assert len(silent) > 200
    for name, option in random.Random(32).sample(silent, 15):
        value = "" if option.values == "0" else "17"
        try:
            command = start(tmp_path, f"{VOCABULARY} {name} {value}")
        except BadInput:
            continue
        assert name in command.foreign_options, (name, option)  # it has a meaning


@pytest.mark.parametrize("is_on", ["true", "false"])
def test_a_switch_sets_the_argument_that_a_configuration_says(is_on):
    wrong = []
    reader = SettingReader()
    for option in reader.table.values():
        if option.value_count != "0" or option.name == "--help" or option.dest in reader.fields:
            continue
        for name in {option.dest, option.name.lstrip("-").replace("-", "_")} - {*reader.fields}:
            chosen = ChosenOptions()
            reader.take(name, is_on, chosen)
            expected = is_on == "true"
            if name not in reader.by_dest:  # the option itself
                expected = expected != option.clears
            held = [reader.table[word] for word in chosen.options]
            if any(other.clears == expected for other in held):
                wrong.append((name, chosen.options))
            same = reader.by_dest.get(name, [])
            is_settable = any(other.clears != expected for other in same)
            if is_settable and not held and expected != (same[0].default == "True"):
                wrong.append((name, "says nothing"))
    assert not wrong


def test_a_switch_called_as_its_option_is_means_the_option():
    chosen = ChosenOptions()
    SettingReader().take("disable_bias_linear", "true", chosen)
    assert chosen.options == {"--disable-bias-linear": ()}


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("--decoder-seq-length 64 --disable-vision-class-token", "an encoder of pictures"),
        ("--img-h 448", "an encoder of pictures"),
        ("--top_k 1 --num-tokens-to-generate 30", "generates text"),
    ],
)
def test_what_trains_no_decoder_is_refused_before_its_other_options(options, rule, tmp_path):
    with pytest.raises(BadInput, match=rule):
        start(tmp_path, options)


def test_a_size_of_pictures_at_its_default_says_nothing(tmp_path):
    assert start(tmp_path, f"{VOCABULARY} --img-h 224").options["--img-h"] == ("224",)


def test_a_program_beside_the_script_is_what_its_folder_says(tmp_path):
    text = f"python main.py --task ARC {SIZES}"
    write(tmp_path, "tasks/main.py", "")
    write(tmp_path, "tasks/eval.sh", text)
    with pytest.raises(BadInput, match=r"tasks/main\.py trains no decoder"):
        read_launch(tmp_path / "tasks/eval.sh", {})


@pytest.mark.parametrize(
    ("spelled", "read"), [("1000000.0", "1000000"), ("1e6", "1000000"), ("500000.", "500000")]
)
def test_a_whole_number_with_a_fraction_is_read_with_a_note(spelled, read, tmp_path):
    command = start(tmp_path, f"{VOCABULARY} --rotary-base {spelled}")
    assert command.options["--rotary-base"] == (read,)
    assert any(f"--rotary-base {spelled} is read as {read}" in note for note in command.notes)
    with pytest.raises(BadInput, match="whole number"):
        start(tmp_path, f"{VOCABULARY} --rotary-base {spelled}1e")


def job(folder: Path, options: str):
    return interpret_launch(start(folder, options), world_size=8, folder=folder)


def test_windows_and_shared_experts_of_forks_are_read(tmp_path):
    assert job(tmp_path, f"{VOCABULARY} --sliding-window 16").model.attention.sliding_window == 16
    assert not job(tmp_path, f"{VOCABULARY} --sliding-window 32").model.attention.sliding_window
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --num-shared-experts 2"
    assert job(tmp_path, f"{VOCABULARY} {experts}").model.moe.shared_ffn_size == 96


def test_a_vocabulary_with_merges_is_gpt2s_whatever_the_files_are_called(tmp_path):
    for files in ("--vocab-file $3 --merge-file $4", "--vocab-file a.json --merge-file b.txt"):
        assert any("50,257" in note for note in job(tmp_path, files).notes)


def test_a_placeholder_in_angle_brackets_is_a_value_and_no_redirection(tmp_path):
    text = (
        "CHECKPOINT_PATH=<Specify path>\n"
        "export VOCAB=<Specify path to file>/gpt2-vocab.json # own\n"
        "MERGES=<path>/gpt2-merges.txt\ncat <in >out\nNAME=<in grep x\n"
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --vocab-file $VOCAB "
        "--merge-file $MERGES --save $CHECKPOINT_PATH"
    )
    (tmp_path / "job.sh").write_text(text)
    command = read_launch(tmp_path / "job.sh", {})
    read = interpret_launch(command, world_size=8, folder=tmp_path)
    assert any("50,257" in note for note in read.notes)
    assert command.options["--save"] == ("<Specify",)
    assert any("read as of a placeholder" in note for note in command.notes)


def test_a_comment_within_a_value_is_an_argument_that_no_trainer_takes(tmp_path):
    """Not even behind an option of files, whose placeholders may have several words."""
    lines = f'ARGS="{SIZES}{VOCABULARY} --save-interval 500\n # seldom\n --log-interval 1"\n'
    (tmp_path / "job.sh").write_text(f"{lines}torchrun --nproc-per-node 8 pretrain_gpt.py $ARGS")
    with pytest.raises(BadInput, match="is no comment where a variable's value becomes words"):
        interpret_launch(read_launch(tmp_path / "job.sh", {}), world_size=8, folder=tmp_path)


def test_lines_with_windows_ends_are_those_of_linux(tmp_path):
    lines = ('ARGS="\\', f"  {SIZES} \\", f'  {VOCABULARY}"', "torchrun pretrain_gpt.py $ARGS", "")
    commands = []
    for end in ("\n", "\r\n"):
        (tmp_path / "job.sh").write_bytes(end.join(lines).encode())
        commands.append(read_launch(tmp_path / "job.sh", {}).options)
    assert commands[0] == commands[1]
