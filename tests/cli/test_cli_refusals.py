from __future__ import annotations

import json
import os
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moewright.cli.main import main
from moewright.cli.verbs import build_app
from selection import thorough

ROOT = Path(__file__).resolve().parents[2]
VERIFY = ("x", "--batch", "b", "--layout", "tp1", "--out", "o")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is refused, and return its one line without the program's name."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("moewright: ")
    return lines[0].removeprefix("moewright: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plna",), "plan"),
        (("data", "buidl"), "build"),
        (("plan", "Qwen3-30B-A3B", "--tpo", "3"), "--top"),
        (("plan",), "MODEL"),
        (("plan", "Qwen3-30B-A3B", "--on"), "--on"),
        (("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--top", "many"), "--top"),
        (("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--precision", "bf61"), "bf16"),
        (("plan", "Qwen3-30B-A3B"), "--on: is needed"),
        (("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--top", "0"), "--top=0: must be in 1..100"),
        (
            ("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--seq-len", "-1"),
            "--seq-len=-1: must be in 1..",
        ),
        (("plan", "Qwen3-30B-A3B", "surplus", "--on", "8xH100"), "surplus"),
        (("plan", "Qwen3-30B-A3", "--on", "8xH100"), "Qwen3-30B-A3B"),
        (("plan", "Qwen3-30B-A3B", "--on", "8xH1O0"), "H100"),
        (("estimate", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "epp8"), "ep"),
        (
            ("estimate", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "ep3"),
            "--layout ep=3: etp * ep = 3 must divide",
        ),
        (
            ("estimate", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "ep8,"),
            "--layout: has an empty place",
        ),
        (
            ("estimate", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "layout=Et*47L"),
            "--layout layout=Et*47L: ",
        ),
        (("plan", "Qwen3-30B-A3B", "--on", "0xH100"), "--on=0xH100: the count must be"),
        (
            ("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--why-not", "tp2,dp8"),
            "--why-not dp=8: must be",
        ),
        (
            ("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--top", "1000000"),
            "--top=1000000: must be in 1..100",
        ),
        (("plan", "Qwen3-235B-A22B", "--on", "1xH100"), "nearest legal value: more devices"),
        (
            ("estimate", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "tp2,dp8"),
            "nearest legal value: 4",
        ),
        (("data", "build"), "--out"),
        (("data", "build", "--out", "x", "--tokenizer", "bep"), "bpe"),
        (("bench", "machine", "--out", "/proc/x.toml"), "/proc/x.toml: cannot be written"),
        (("bench", "machine", "--out", "m.json"), "--out=m.json: a hardware file is TOML"),
        (("bench", "machine", "--out", ""), ".: is a folder, a file is wanted"),
        (("bench", "machine", "--nproc", "0"), "--nproc=0: must be in 1.."),
        (("bench", "machine", "--nproc", "1.5"), "--nproc=1.5: must be a whole number"),
        (("dryrun", "nowhere.toml", "--rank", "0.4"), "--rank=0.4: must be a whole number"),
        (("train", "nowhere.toml", "--nproc", "3.5"), "--nproc=3.5: must be a whole number"),
        (("verify", *VERIFY, "--nproc", "1.5"), "--nproc=1.5: must be a whole number"),
        (
            ("verify", *VERIFY, "--lr", "nan"),
            "--lr=nan: must be a number from 0; nearest legal value: 0.01",
        ),
        (
            ("verify", *VERIFY, "--clip", "-1"),
            "--clip=-1: must be a number from 0; nearest legal value: 0",
        ),
        (("capture", "--seconds", "0.5", "true"), "--seconds=0.5: must be a whole number"),
        (("studio", "--port", "80.5"), "--port=80.5: must be a whole number"),
        (("upcycle", "x", "--out", "y", "--experts", "8.5"), "--experts=8.5: must be a whole"),
        (
            ("plan", "Qwen3-30B-A3B", "--on", "8xH100", "--top", "2.5"),
            "--top=2.5: must be a whole number",
        ),
        (
            ("plan", "Qwen3-30B-A3B", "--rampup-batch-size", "2.5", "2", "12"),
            "--rampup-batch-size=2.5: must be a whole number",
        ),
        (
            ("budget", "Qwen3-30B-A3B", "--tokens", "1T", "--devices", "8.5"),
            "--devices=8.5: must be a whole number",
        ),
        (
            ("budget", "Qwen3-30B-A3B", "--on", "8xH100", "--tokens", "1T", "--mtbf", "soon"),
            "--mtbf=soon: must be auto or hours above 0.001, such as 8; nearest legal value: auto",
        ),
        (
            ("fit", "nowhere.csv", "--on", "H800", "--out", "hw.json"),
            "--out=hw.json: a hardware file is TOML, and is known by its name; "
            "nearest legal value: hw.toml",
        ),
        (
            (
                *("estimate", "Qwen3-30B-A3B", "--on", "8xH100"),
                *("--layout", "ep8,zero3,recompute=full", "--json", ""),
            ),
            ".: cannot be written: Is a directory",
        ),
        (("report", "nowhere"), "no such run folder"),
        (("train", "nowhere.toml"), "no such file"),
        (
            ("train", str(ROOT / "recipes/quickstart_2cpu_bf16.toml"), "--nproc", "0"),
            "--nproc=0: must be in 1..1000000",
        ),
        (("studio", "--port", "99999999"), "--port=99999999: must be in 0..65535"),
    ],
)
def test_a_refusal_is_one_line_and_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def test_a_config_that_contradicts_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "recipes/quickstart/config.json").read_text()
    config = tmp_path / "config.json"
    config.write_text(text.replace('"num_experts_per_tok": 4', '"num_experts_per_tok": 40'))
    message = refusal(capsys, "plan", str(config), "--on", "8xH100")
    assert "num_experts_per_tok=40" in message
    assert "16" in message


@pytest.mark.parametrize("content", [b"\x80\x05pickle", b"[" * 100_000, b'{"a": 1, "a": 2}', b"{"])
def test_a_config_that_is_no_config(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(content)
    assert str(config) in refusal(capsys, "plan", str(config), "--on", "8xH100")


class Canary:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_nothing_that_is_read_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code beside a config, pickles, YAML tags, targets to be built and values that are code."""
    canary = tmp_path / "canary"
    folder = tmp_path / "hf"
    job = tmp_path / "job.toml"
    folder.mkdir()
    config = json.loads((ROOT / "recipes/quickstart/config.json").read_text())
    named = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": named, "trust_remote_code": True})
    )
    code = f"import os\nos.mkdir({str(canary)!r})\nclass Evil: pass\n"
    for name in (
        "evil.py",
        "__init__.py",
        "configuration_evil.py",
        "conftest.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    assert (
        main(("estimate", str(folder), "--on", "1xH100", "--global-batch", "1", "--seq-len", "128"))
        == 0
    )
    capsys.readouterr()
    assert "no such file" in refusal(
        capsys, "convert", "import", str(folder), "--out", str(tmp_path / "ours")
    )
    recipe = (ROOT / "recipes/quickstart_2cpu_bf16.toml").read_text()
    for content, message in (
        (f"model: !!python/object/apply:os.mkdir [{canary}]\n", "is not TOML"),
        (
            recipe.replace("[train]\n", f'[train]\n_target_ = "os.mkdir"\npath = "{canary}"\n'),
            "train._target_",
        ),
        (
            recipe.replace(
                "[train]\n", f"""[train]\nseed = "__import__('os').mkdir('{canary}')"\n"""
            ),
            "train.seed",
        ),
    ):
        job.write_text(content)
        assert message in refusal(capsys, "train", str(job), "--out", str(tmp_path / "run"))
    for name in ("trace.json", "run.log"):
        (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
        refusal(capsys, "diagnose", str(tmp_path / name))
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # the canary works
    assert canary.is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change", [{}, {"hidden_size": 131072, "num_hidden_layers": 1024, "vocab_size": 2**24}]
)
def test_a_million_devices_and_the_largest_model_are_answered_within_bounds(
    change: dict[str, int], tmp_path: Path
) -> None:
    """Ten seconds of a core, a gigabyte."""
    config = json.loads((ROOT / "recipes/quickstart/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    command = [
        sys.executable,
        "-m",
        "moewright.cli.main",
        "plan",
        str(tmp_path),
        "--on",
        "1000000xH100",
    ]

    def limit_resources() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))

    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=limit_resources
    )
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr


def test_an_unwritable_answer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = (
        "estimate",
        "Qwen3-30B-A3B",
        "--on",
        "8xH100",
        "--layout",
        "ep8",
        "--json",
        str(tmp_path / "file" / "x"),
    )
    assert "cannot be written" in refusal(capsys, *arguments)


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moewright.api.reporting.read_run", interrupted)
    assert main(["report", "x"]) == 130
    assert capsys.readouterr().err == "moewright: interrupted\n"


def test_a_verb_without_its_package_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['tokenizers'] = None; from moewright.cli.main import run; run()"
    )
    arguments = [sys.executable, "-c", program, "data", "build", "--out", "x"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "moewright: this verb needs tokenizers; install it with: pip install 'moewright[engine]'\n"
    )


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    program = "from moewright.cli.main import run; run()"
    arguments = [sys.executable, "-c", program, "plan", "--help"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        thorough("plan Qwen3-30B-A3B --on 8xH100 --top 1 | true", 141, ""),
        ("estimate Qwen3-30B-A3B --on 8xH100 --layout ep8,zero3,recompute=full >&-", 0, ""),
        ("plan Qwen3-30B-A3 --on 8xH100 2>&-", 2, ""),
        ("plan Qwen3-30B-A3 --on 8xH100 2>/dev/full", 2, ""),
        (
            "estimate Qwen3-30B-A3B --on 8xH100 --layout ep8,zero3,recompute=full >/dev/full",
            1,
            "moewright: system: No space left on device\n",
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_no_traceback(
    ending: str, code: int, message: str
) -> None:
    code_line = "from moewright.cli.main import run; run()"
    program = (
        f"moewright() {{ {sys.executable} -c '{code_line}' \"$@\"; }}\n"
        f"moewright {ending}; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


def test_help_loads_the_command_line_and_the_nouns_alone() -> None:
    """So what it takes is the time of its libraries and little more, on any machine."""
    program = (
        "import sys\n"
        "from moewright.cli.main import main\n"
        "main(['--help'])\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('moewright.')}\n"
        "heavy = {'torch', 'numpy', 'plotly', 'jinja2', 'scipy'} & set(sys.modules)\n"
        "print(sorted(ours), sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['cli', 'spec', 'version'] []"


def test_help_names_every_verb_once_and_each_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["--help"])
    verbs = [
        line[2:14].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│ ")
    ]
    verbs = [verb for verb in verbs if verb and not verb.startswith("-")]
    assert verbs == sorted(set(verbs))
    assert {"bench", "data", "estimate", "plan", "report", "train"} <= set(verbs)
    for verb in verbs:
        assert main([verb, "--help"]) == 0
        page = capsys.readouterr().out
        assert f"Usage: moewright {verb}" in page
        assert "\x1b" not in page
        assert max(map(len, page.splitlines())) <= 80
        doc = str(build_app()[verb].default_command.__doc__)
        for name in re.findall(r"[\w/]*<\w+", doc):
            assert name in page  # Markdown would take it for a tag of HTML


def test_more_processes_than_the_machine_survives_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for count in ("0", "100000"):
        assert main(["bench", "machine", "--nproc", count, "--out", "never.toml"]) == 2
        message = capsys.readouterr().err
        assert f"--nproc={count}: must be in 1.." in message
        assert message.count("\n") == 1


def test_an_interrupt_while_the_verbs_are_imported_is_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'moewright.cli.verbs':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from moewright.cli.main import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "moewright: interrupted\n")


QUICKSTART = str(ROOT / "recipes/quickstart_2cpu_bf16.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", QUICKSTART, "--nproc", "999"), "--nproc=999: must be in 1.."),
        (("train", QUICKSTART, "--set", "train.moment_dtype=fp16"), "train.moment_dtype=fp16"),
        (
            ("verify", str(ROOT / "recipes/quickstart"), "--batch", "nowhere", "--out", "x"),
            "nowhere: no such file",
        ),
        (
            (
                "verify",
                str(ROOT / "recipes/quickstart"),
                "--batch",
                "nowhere",
                "--out",
                "x",
                "--layout",
                "tpp2",
            ),
            "tpp",
        ),
        (("dryrun", QUICKSTART, "--rank", "9"), "--rank=9: ranks are 0 to 1"),
        (("dryrun", QUICKSTART, "--rank", "0", "--set", "layout.tp=3"), "layout.tp=3"),
        (("bench", "machine", "--nproc", "999"), "--nproc=999: must be in 1.."),
    ],
)
def test_what_needs_no_torch_to_be_refused_does_not_wait_for_it(
    arguments: tuple[str, ...], message: str
) -> None:
    program = (
        "import sys\n"
        "from moewright.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == "2 False\n"


def test_one_rank_of_a_machine_reports_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    errors = []
    for rank in range(4):
        for key, value in {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}.items():
            monkeypatch.setenv(key, value)
        assert main(["train", "nowhere.toml"]) == 2
        errors.append(capsys.readouterr().err)
    assert [bool(error) for error in errors] == [True, False, True, False]
    # Without this it is not torchrun, and a rank does not know its neighbours: each one reports.
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert main(["train", "nowhere.toml"]) == 2
    assert "nowhere.toml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("diagnose", "{path}"),
        ("validate", "{path}"),
        ("plan", "{path}", "--on", "8xH100"),
        ("train", "{path}", "--out", "run"),
        ("report", "{path}"),
    ],
)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_never_opened(
    arguments: tuple[str, ...], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would block for ever, and /dev/zero has no end."""
    path = Path("/dev/zero")
    if kind == "fifo":
        path = tmp_path / "fifo.csv"
        os.mkfifo(path)
    refusal(capsys, *(argument.format(path=path) for argument in arguments))


@pytest.mark.parametrize("verb", ["report", "diagnose", "watch", "compare"])
def test_a_name_that_no_file_can_have_is_refused(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "File name too long" in refusal(capsys, verb, "a" * 5000)
