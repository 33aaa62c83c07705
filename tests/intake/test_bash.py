"""Scripts read without running them, against bash itself, which runs them with a stand-in."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moewright.codec import foreign
from moewright.intake.megatron.bash import read_commands
from moewright.intake.megatron.unknown import UNKNOWN_VALUE, find_unknown
from moewright.spec.errors import BadInput

ENV_FILE = "TP=4\n"
INNER_FILE = 'if [ "$1" = 3 ]; then torchrun p.py --tp "$TP"; fi\n'
# What the script says, and the words behind its name.
SCRIPTS = {
    "a pattern": ("M=Qwen3-235B-A22B\nif [[ $M == *235B* ]]; then TP=4; else TP=8; fi", ()),
    "a quoted pattern is a text": ('M=a\nif [[ $M == "*" ]]; then TP=8; else TP=4; fi', ()),
    "a function": ("TP=1\nset_tp() {\n  local x=$1\n  TP=$x\n}\nset_tp 4", ()),
    "a function with return": ("f() { if [ $1 = a ]; then TP=4; return; fi; TP=8; }\nf a", ()),
    "local variables": ("TP=4\nf() { local TP=8; : $TP; }\nf", ()),
    "a sourced file": ("source ./env.sh", ()),
    "a file sourced from the script's folder": (
        'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource $D/env.sh',
        (),
    ),
    "an arithmetic command": ("TP=1\n((TP*=4))", ()),
    "let": ("let TP=2*2", ()),
    "printf into a variable": ('a=(4)\nprintf -v TP "%s" "${a[*]}"', ()),
    "joined by IFS": (
        'a=(4 4)\nT="$(IFS=\', \'; echo "${a[*]}")"\nif [ "$T" = 4,4 ]; then TP=4; fi',
        (),
    ),
    "counting up": ("TP=3\n((TP++))", ()),
    "a number that grows past 64 bits": (
        "N=3\nfor i in {1..40}; do N=$((N*N)); done\nTP=$((N == -7860764868738023423 ? 4 : N))",
        (),
    ),
    "powers": ("TP=$((2**2))", ()),
    "a choice": ("N=3\nTP=$(( N > 2 ? 4 : 1 ))", ()),
    "a subshell": ("TP=4\n( TP=8; export TP )", ()),
    "a subshell that is left": ("TP=4\n( TP=8; exit 1; TP=9 )", ()),
    "a here-document": ("TP=4\ncat <<EOF > /dev/null\nTP=8\nEOF", ()),
    "a here-document with tabs": ("TP=4\ncat <<-EOF > /dev/null\n\tTP=8\n\tEOF", ()),
    "a here-document for a shell": ("TP=4\nbash <<'EOF'\nTP=8\nEOF", ()),
    "the last match replaced": ("A=a48a; TP=${A/%a/}; TP=${TP/#a/}\nTP=${TP%8}", ()),
    "a set in a pattern": ("A=x4y; TP=${A//[a-z]/}", ()),
    "a set that is left out": ("A=x4y; TP=${A//[^[:digit:]]/}", ()),
    "a quoted star in a pattern": ("A='4*5'; TP=${A%\\**}", ()),
    "a blank in a pattern": ('A="4 x y"; TP=${A%% *}', ()),
    "an escaped stroke": ("A=a/b/4; A=${A//\\//.}; TP=${A##*.}", ()),
    "more letters than there are": ("A=4; TP=4${A: -2}", ()),
    "a here-document keeps its quotes": (
        'V=4\ncat <<EOF > s.sh\nA="x\\$V"; TP="$V" # \\"\nEOF\nsource ./s.sh',
        (),
    ),
    "fields of its own": ('read -r A TP <<< "1 4"\nIFS=, read -r TP PP <<< "4,2"', ()),
    "a check that only ends the script": (
        'TP=4\n[ "$(nproc)" -ge 1 ] || { echo few; exit 1; }\n'
        'if [ "$(nproc)" -lt 1 ]; then exit; fi',
        (),
    ),
    "a here-string": ('read -r TP PP <<< "4 2"', ()),
    "the tenth word": ("TP=${10}", (*"123456789", "4")),
    "options by hand": (
        "while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2;; *) shift;; esac; done",
        ("--x", "--tp", "4"),
    ),
    "getopts": ('while getopts "t:" o; do case $o in t) TP=$OPTARG;; esac; done', ("-t", "4")),
    "words behind set": ("set -- 1 4\nTP=$2", ()),
    "a loop over words": ("for x in 1 2 4; do TP=$x; done", ()),
    "a loop over numbers": ("for i in {1..4}; do TP=$i; done", ()),
    "a loop over seq": ("for i in $(seq 1 4); do TP=$i; done", ()),
    "a counted loop": ("for ((i=0;i<=4;i++)); do TP=$i; done", ()),
    "a loop that is left": (
        "for i in 1 4 8; do if [ $i -gt 4 ]; then break; fi; TP=$i; done",
        (),
    ),
    "a loop that goes on": ("for i in 4 8; do [ $i = 8 ] && continue; TP=$i; done", ()),
    "a loop under a condition": ("TP=1\nwhile [ $TP -lt 4 ]; do TP=$((TP*2)); done", ()),
    "case with patterns": ('case "$1" in 1|2) TP=4;; *) TP=8;; esac', ("2",)),
    "case that falls through": ("case a in a) X=1;& b) TP=4;; c) TP=8;; esac", ()),
    "a regular expression": (
        "M=qwen3-4b\nif [[ $M =~ ^qwen3-([0-9]+)b$ ]]; then TP=${BASH_REMATCH[1]}; fi",
        (),
    ),
    "joined tests": ("A=1;B=2\nif [[ $A -eq 1 && ( $B == 2 || $B == 3 ) ]]; then TP=4; fi", ()),
    "tests joined the old way": ("A=1\nif [ $A = 1 -a ! $A = 2 ]; then TP=4; fi", ()),
    "a group behind ||": ('TP=""\n[ -n "$TP" ] || { TP=4; }', ()),
    "an associative array": ("declare -A M=([a]=1 [b]=4)\nM[c]=5\nK=b\nTP=${M[$K]}", ()),
    "an element that is set": ("A=(1 2 3)\nA[1]=4\nTP=${A[1]}", ()),
    "the last element": ("A=(1 2 4)\nTP=${A[-1]}", ()),
    "the number of elements": ("A=(1 2 4 5)\nTP=${#A[@]}", ()),
    "a part of a value": ("X=tp4pp2\nTP=${X:2:1}", ()),
    "a value without its ends": ("X=run_4.sh\nY=${X%.sh}\nTP=${Y#run_}", ()),
    "a value with something replaced": ("X=a-4-b\nY=${X//a-/}\nTP=${Y/-b/}", ()),
    "the variable of a name": ("X=TP\nTP=4\nTP=${!X}", ()),
    "capital letters": ("X=abcd\nX=${X^^}\nTP=4\n[ $X = ABCD ] || TP=8", ()),
    "the length of a value": ("X=abcd\nTP=${#X}", ()),
    "a default that is kept": (": ${TP:=4}", ()),
    "a script in quotes": ("export TP=4\nbash -x -c 'torchrun p.py --tp $TP'\nexit", ()),
    "a script that is called": ("export TP=4\nbash inner.sh 3\nexit", ()),
    "a script that is written": (
        "cat > go.sh <<EOF\ntorchrun p.py --tp 4\nEOF\nbash go.sh\nexit",
        (),
    ),
    "what a pipe sets is gone": ("TP=4\necho 8 | while read x; do TP=$x; done", ()),
    "output into a program": ("TP=4\nexec 2> >(cat)\ntrue &> /dev/null", ()),
    "a failing program": ("if ! command -v no_such_program &> /dev/null; then TP=4; fi\nTP=4", ()),
    "nested quotes": ('A="x \\"y\\" \'z\'"\nTP=4', ()),
    "an array in quotes": ('A=(--tp 4)\ntorchrun p.py "${A[@]}"\nexit', ()),
    "printf": ("TP=$(printf '%d' 4)", ()),
    "expr": ("TP=$(expr 2 + 2)", ()),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "env.sh").write_text(ENV_FILE)
    (tmp_path / "inner.sh").write_text(INNER_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_tp(text, arguments, folder):
    """Return the value of --tp that the reader makes of a script."""
    reading = read_commands(text, {}, arguments, script=folder / "run.sh")
    (words,) = [command.words for command in reading.commands if command.words[0] == "torchrun"]
    return words[words.index("--tp") + 1]


def run_tp(text, arguments, folder):
    """Return the value of --tp that bash makes of it, with a stand-in for torchrun."""
    programs = folder / "bin"
    programs.mkdir()
    stand_in = programs / "torchrun"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\n')
    stand_in.chmod(0o755)
    script = folder / "run.sh"
    script.write_text(text)
    subprocess.run(
        ["bash", str(script), *arguments],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    words = (folder / "words").read_text().splitlines()
    return words[words.index("--tp") + 1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("text", "arguments"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_is_read_as_bash_runs_it(text, arguments, folder):
    whole = f'{text}\ntorchrun p.py --tp "$TP"\n'
    assert run_tp(whole, arguments, folder) == "4"
    assert read_tp(whole, arguments, folder) == "4"


@pytest.mark.parametrize("digits", ["²", "--3", "9" * 5000])
@pytest.mark.parametrize("use", ["X=$(seq {} 9)", "X=$(expr {} + 2)", "set a b\nshift {}"])
def test_digits_that_are_no_number_stop_no_reading(use, digits, folder):
    text = f'{use.format(digits)}\nTP=4\ntorchrun p.py --tp "$TP"\n'
    assert read_tp(text, (), folder) == "4"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("for x in $(nvidia-smi -L); do torchrun $x; done", "depends on what nvidia-smi prints"),
        ("while read x; do torchrun $x; done < list", "depends on what read reads"),
        ("f() { if grep -q x y; then f; f; else f; f; fi; }\nf", "deep"),
        ("for i in {1..999}; do if a | b; then B=1; elif c | d; then B=2; fi; done", "branches"),
        ("while true; do TP=4; done", "loops more than 10000 times"),
        ("f() { f; }\nf", "deep"),
        ("cat <<EOF\nTP=4\n", "the here-document EOF is not closed"),
        ("ls | torchrun p.py --tp 4", "behind a pipe"),
        ("case a in a) TP=4;;", "the script ends inside"),
        ("if [[ a == @(a|b) ]]; then TP=4; fi", "the pattern @(a|b) is not read"),
        ("A=xx\nfor i in {1..40}; do A=$A$A; done", "a word of more than 131072 characters"),
        ("A=xx\nfor i in {1..40}; do A+=$A; done", "a word of more than 131072 characters"),
        ('A=(x x)\nfor i in {1..40}; do A+=("${A[@]}"); done', "stands for too many words"),
        ("A=({1..9999}{1..9999})", "stands for too many words"),
        ("A[1000000000]=4", "too many elements"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(text, rule, folder):
    with pytest.raises(BadInput, match=r"^line \d+") as caught:
        read_commands(text, {}, script=folder / "run.sh")
    assert rule in str(caught.value)


def test_scripts_are_found_from_the_folder_that_a_run_starts_in(folder):
    """Launch scripts of a folder are started from the one above, of which they tell their paths."""
    (folder / "launch_scripts").mkdir()
    text = 'source env.sh\ntorchrun p.py --tp "$TP"\n'
    reading = read_commands(text, {}, script=folder / "launch_scripts/run.sh")
    assert reading.commands[-1].words[-1] == "4"


def test_the_first_task_of_srun_is_read(folder):
    (folder / "task.sh").write_text('[ $SLURM_LOCALID -eq 0 ] && TP=4\ntorchrun p.py --tp "$TP"\n')
    assert read_tp("srun --label ./task.sh pretrain", (), folder) == "4"


def test_files_of_a_run_are_taken_to_be_there_and_a_note_says_so(folder):
    text = "if [ ! -f /no/such/vocab ]; then echo missing; exit 1; fi\ntorchrun p.py --tp 4\n"
    reading = read_commands(text, {}, script=folder / "run.sh")
    assert reading.commands[-1].words == ("torchrun", "p.py", "--tp", "4")
    assert reading.notes == ("line 1: -f /no/such/vocab is taken to be there",)


def test_scripts_of_an_installation_are_not_read_and_a_note_says_so(folder):
    text = "source ~/.bashrc\nsource /opt/conda/bin/activate moe\ntorchrun p.py --tp 4\n"
    reading = read_commands(text, {}, script=folder / "run.sh")
    assert reading.commands[-1].words[0] == "torchrun"
    assert reading.notes == (
        "line 1: ~/.bashrc is not read",
        "line 2: /opt/conda/bin/activate is not read",
    )


@pytest.mark.parametrize("operation", ["#*b", "##*b", "%b*", "%%b*", "//a*b/x", "//a/x", "/*b/"])
def test_a_pattern_takes_time_in_proportion_to_the_value(operation, folder):
    text = f"A={'a' * (1 << 17)}\nB=${{A{operation}}}\ntorchrun p.py --tp ${{#B}}"
    assert read_tp(text, (), folder) == str(1 << 17)


@pytest.mark.parametrize("expression", ["^(a+)+$", "(a|aa)+c", "(a|a)" * 30 + "c"])
def test_an_expression_that_backtracks_without_end_is_refused(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "CPU_S", 0.2)
    text = f"A={'a' * 50}b\n[[ $A =~ {expression} ]] && B=1\ntorchrun p.py --tp $B\n"
    with pytest.raises(BadInput, match=r"line 2: the expression .* takes more than 0 s of"):
        read_commands(text, {})


def test_a_branch_that_only_prints_needs_no_answer(folder):
    text = "if nvidia-smi | grep -q H100; then echo yes; fi\ntorchrun p.py --tp 4\n"
    assert read_commands(text, {}, script=folder / "run.sh").commands[-1].words[0] == "torchrun"


@pytest.mark.parametrize(
    "head",
    ["for x in $(hosts)", "while ssh host true", "for ((i=0; i <= count-1; i++))"],
)
def test_a_loop_that_trains_nothing_leaves_what_it_sets_unknown(head, folder):
    """As of DeepSpeed's scripts, which look for the newest checkpoint on every node."""
    text = f"count=$(wc hosts)\nA=1\n{head}; do A=$x; done\ntorchrun p.py --a $A --b 2\n"
    words = read_commands(text, {}, script=folder / "run.sh").commands[-1].words
    assert words[:3] == ("torchrun", "p.py", "--a")
    assert UNKNOWN_VALUE.search(words[3])
    assert words[4:] == ("--b", "2")


def test_a_refusal_inside_another_file_names_it(folder):
    (folder / "env.sh").write_text("X=1\nfor x in $(hostnames); do torchrun $x; done\n")
    with pytest.raises(
        BadInput, match=r"line 2: of \./env\.sh: what follows depends on what hostnames prints"
    ):
        read_commands("source ./env.sh\n", {}, script=Path(folder / "run.sh"))


def test_what_an_undecided_branch_sets_is_unknown_until_the_command_needs_it(folder):
    text = (
        'if [ "$(nvidia-smi -L | wc -l)" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi\n'
        "if grep -q H100 /proc/x; then TP=4; elif grep -q H800 /proc/x; then export TP=8; fi\n"
        "torchrun p.py --pp 4\n"
        'torchrun p.py --tp "$TP"\n'
    )
    first, second = read_commands(text, {}, script=folder / "run.sh").commands[-2:]
    assert first.words == ("torchrun", "p.py", "--pp", "4")
    unknown = find_unknown(second.words[-1])
    assert unknown is not None
    assert unknown.name == "TP"
    assert unknown.origin == "whether `grep` succeeds"
    assert set(unknown.words) >= {"4", "8"}


def test_the_folder_of_a_script_is_told_by_its_own_name(folder):
    """`dirname -- run.sh` starts no run.sh."""
    script = folder / "run.sh"
    script.write_text("torchrun p.py\n")
    text = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\ntorchrun $D\n'
    (command,) = read_commands(text, {}, script=script).commands
    assert command.words == ("torchrun", str(folder))


def test_a_script_that_starts_itself_is_refused(folder):
    script = folder / "run.sh"
    script.write_text("bash run.sh\n")
    with pytest.raises(BadInput, match="starts itself"):
        read_commands(script.read_text(), {}, script=script)


def test_commands_too_deep_inside_of_commands_are_refused(folder):
    text = f"X={'$(' * 5000}echo 4{')' * 5000}\ntorchrun p.py --tp $X"
    with pytest.raises(BadInput, match="too deep to be read"):
        read_commands(text, {}, script=folder / "run.sh")


def test_what_a_branch_starts_before_it_leaves_is_started(folder):
    """Neither `exit`, `return` nor `break` takes back what stands before it."""
    text = "if true; then torchrun a.py; exit 0; fi\ntorchrun b.py\n"
    assert [command.words for command in read_commands(text, {}).commands] == [("torchrun", "a.py")]
    text = "for i in 1 2; do torchrun $i.py; break; done\n"
    text += "f() { if true; then run x; return; fi; }; f\n"
    words = [command.words for command in read_commands(text, {}).commands]
    assert words == [("torchrun", "1.py"), ("run", "x")]


def test_a_script_that_submits_itself_goes_on_in_its_job(folder):
    script = folder / "job.sh"
    script.write_text(
        'if [ -z "$SLURM_JOB_ID" ]; then sbatch --nodes=4 "$0" "$@"; exit; fi\n'
        "srun torchrun --nnodes=$SLURM_NNODES $1\n"
    )
    reading = read_commands(script.read_text(), {}, ("train.py",), script=script)
    assert reading.commands[-1].words == ("srun", "torchrun", "--nnodes=4", "train.py")


def test_a_variable_that_a_comparison_lacks_is_named():
    with pytest.raises(BadInput, match="PP is not set, and -gt compares numbers"):
        read_commands("if [ $PP -gt 1 ]; then A=1; fi\n", {})


def test_what_a_file_of_a_cluster_may_set_is_unknown(folder):
    text = (
        "PP=2\nsource /cluster/start-prod\n"
        'if [ "$KIND" = large ]; then TP=8; else TP=4; fi\n'
        "torchrun p.py --tp $TP --cp ${CP:-1} --pp $PP --ep $EP $MORE\n"
    )
    reading = read_commands(text, {}, script=folder / "run.sh")
    words = reading.commands[-1].words
    assert words[4:7] == ("--cp", "1", "--pp")
    found = {name: find_unknown(words[place]) for name, place in (("tp", 3), ("ep", 9))}
    assert {name: value.name for name, value in found.items()} == {"tp": "KIND", "ep": "EP"}
    assert found["tp"].words == ("8", "4")
    assert {value.origin for value in found.values()} == {"what start-prod sets"}
    assert reading.notes == (
        "line 2: /cluster/start-prod is not beside the script, so that what it sets is not known; "
        "what stood before it is kept",
        "CP: taken as unset, for what start-prod sets is not known (--set CP=...)",
    )


def test_a_value_that_is_given_decides_what_a_file_left_open(folder):
    text = 'source ~/job\ncase $KIND in large) TP=8;; *) TP=4;; esac\ntorchrun p.py --tp "$TP"\n'
    reading = read_commands(text, {}, script=folder / "run.sh", constants={"KIND": "large"})
    assert reading.commands[-1].words[-1] == "8"


def test_branches_of_which_only_running_tells_agree_on_what_is_common(folder):
    text = (
        "A=(--bf16)\nB='--x 1'\n"
        'if grep -q H100 /proc/x; then A+=(--fp8 hybrid); B="$B --y"; C=1; else C=1; fi\n'
        "grep -q x /proc/y || { echo none; exit 1; }\n"
        '[ "$(nvidia-smi -L)" = 8 ] && D=8\n'
        '[ "$(nvidia-smi -L)" = 8 ] || exit 1\n'
        'torchrun p.py "${A[@]}" $B $C $D\n'
    )
    words = read_commands(text, {}, script=folder / "run.sh").commands[-1].words
    assert words[2:3] + words[4:6] == ("--bf16", "--x", "1")
    assert find_unknown(words[3]).words == ("--fp8", "hybrid")
    assert find_unknown(words[6]).words == ("--y",)
    assert words[7] == "1"
    assert find_unknown(words[8]).name == "D"


def test_the_length_of_what_a_program_prints_is_unknown(folder):
    text = "N=($(hosts))\ntorchrun p.py --n ${#N[@]} --m ${N[1]}\n"
    words = read_commands(text, {}, script=folder / "run.sh").commands[-1].words
    assert {find_unknown(words[place]).origin for place in (3, 5)} == {"what hosts prints"}


def test_a_path_of_another_machine_is_looked_for_by_its_last_parts(folder):
    (folder / "models").mkdir()
    (folder / "models/large.sh").write_text("TP=4\n")
    text = 'source "/root/slime/scripts/models/large.sh"\ntorchrun p.py --tp "$TP"\n'
    reading = read_commands(text, {}, script=folder / "run" / "run.sh")
    assert reading.commands[-1].words[-1] == "4"
