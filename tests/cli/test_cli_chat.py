"""`moewright chat`: answers of a folder, token for token those of transformers, and of a run."""

from __future__ import annotations

import io
import json
from importlib.resources import files
from pathlib import Path

import pytest

from moewright.api.chatting import SamplingOptions, open_chat_partner
from moewright.cli.main import main
from moewright.engine.run.fresh_model import write_fresh_model
from moewright.engine.run.generate import AnsweringModel, build_sampler
from moewright.intake import hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the starter's model with fresh weights: it answers nonsense, the same each time."""
    starter = files("moewright.api") / "starter"
    config = (starter / "config.json").read_text("utf-8")
    out = tmp_path_factory.mktemp("hf")
    write_fresh_model(
        out,
        hf.parse_config(json.loads(config), where="starter", name="starter"),
        config=config,
        template=(starter / "chat_template.jinja").read_text("utf-8"),
        texts=["What is 2 plus 3? It is 5."] * 5,
    )
    return out


def test_an_answer_is_that_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    turns = [{"role": "user", "content": "What is 2 plus 3?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(turns, **options)
    # Beyond 64 tokens, where the model is built again with more room.
    expected = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0].tolist()
    length = prompt["input_ids"].shape[1]
    with open_chat_partner(folder) as partner:
        assert partner.encoder.encode_prompt(turns, "x") == expected[:length]
        answering = AnsweringModel(hf.read_config(folder), folder)
        tokens = list(answering.generate(expected[:length], new_tokens=60, stops=partner.stops))
        pieces = list(partner.answer(turns, SamplingOptions(new_tokens=60)))
    answer = [token for token in expected[length:] if token not in partner.stops]
    assert length + len(answer) > 64
    assert tokens == answer
    assert "".join(pieces) == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_conversation_goes_on_and_is_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd now?\n"))
    out = tmp_path / "talk.json"
    more = ["--max-tokens", "4", "--system", "Be brief.", "--json", str(out)]
    assert main(["chat", str(folder), *more]) == 0
    messages = json.loads(out.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_one_prompt_gives_one_answer_as_json_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(folder), "--prompt", "Hi", "--max-tokens", "3", "--json", "-"]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert messages[0] == {"role": "user", "content": "Hi"}
    assert len(messages) == 2


def test_a_temperature_draws_by_its_seed() -> None:
    import torch

    logits = torch.tensor([0.0, 2.0, 1.0])
    first, again, other = (build_sampler(1.0, seed) for seed in (7, 7, 8))
    drawn = [first(logits) for _ in range(50)]
    assert drawn == [again(logits) for _ in range(50)]
    assert drawn != [other(logits) for _ in range(50)]
    assert set(drawn) == {0, 1, 2}
    cold = build_sampler(0.0, 7)
    assert {cold(logits) for _ in range(5)} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["FOLDER", "--temperature=-1"], "--temperature=-1: must be 0 or more"),
        (["FOLDER", "--max-tokens", "0"], "--max-tokens=0: must be 1 or more"),
    ],
)
def test_what_cannot_answer_is_refused_in_a_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder) if word == "FOLDER" else word for word in arguments]
    assert main(["chat", *given, "--prompt", "x"]) == 2
    assert message in capsys.readouterr().err
