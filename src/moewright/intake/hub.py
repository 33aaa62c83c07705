"""Models of the Hugging Face hub by their id, such as "Qwen/Qwen3-30B-A3B".

What is fetched lies in the cache that `huggingface_hub` shares with transformers, and is taken from
there where the network is away. The endpoint, the cache and the token are that package's own
settings (HF_ENDPOINT, HF_HOME, `hf auth login`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moewright.intake import catalogue, hf
from moewright.spec.errors import BadInput, Reason

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_FILES = (".json", ".jsonl", ".toml", ".yaml", ".safetensors", ".sh")
_CONFIG = ("config.json",)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "*.jinja")
# What a model is loaded from: not the weights in other formats that many repositories hold too.
_MODEL = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors")


def is_hub_id(text: str) -> bool:
    """Tell whether a text is written as organisation/name, and is no path that there is."""
    is_id = _HUB_ID.fullmatch(text) is not None and not text.lower().endswith(_FILES)
    return is_id and not Path(text).exists()


def locate_config(name: str) -> str:
    """Return a model's name or path as it is, and for a hub id the folder of its config.json.

    What the catalogue knows is not looked up.

    Raises:
        BadInput: it is written as a hub id, and cannot be fetched (field "model").
    """
    if catalogue.has_model(name) or not is_hub_id(name):
        return name
    rule = "is neither a known model nor a path here"
    return str(_fetch(name, "model", rule, _CONFIG))


def locate_folder(path: Path, field: str) -> Path:
    """Return a folder as it is, and for a hub id the folder of its weights, fetched.

    A model that moewright does not know is refused before its weights are fetched.

    Raises:
        BadInput: it is written as a hub id, and cannot be fetched or read.
    """
    name = str(path)
    if not is_hub_id(name):
        return path
    hf.read_config(_fetch(name, field, "is no folder here", _CONFIG))
    return _fetch(name, field, "is no folder here", _MODEL)


def locate_tokenizer(path: Path, field: str) -> Path:
    """Return a tokenizer's path as it is, and for a hub id the folder of its tokenizer, fetched.

    Raises:
        BadInput: it is written as a hub id, and cannot be fetched.
    """
    return _fetch(str(path), field, "is no path here", _TOKENIZER) if is_hub_id(str(path)) else path


def _fetch(name: str, field: str, rule: str, patterns: Sequence[str]) -> Path:
    """Return the folder of the newest revision, with the files of these patterns at its top.

    Raises:
        BadInput: with `rule` and why the hub does not have it.
    """
    failure, nearest = "", ""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        failure = "what the hub has is fetched by huggingface_hub, which is not installed"
        nearest = "pip install 'moewright[hub]'"
    else:
        try:
            with _bars_of_weights_alone(patterns):
                folder = Path(
                    snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*")
                )
        except (OSError, ValueError) as error:
            failure = _explain(error)
        else:
            if any(folder.glob(patterns[0])):
                return folder
            failure = f"{constants.ENDPOINT} has it, without a {patterns[0]}"
    raise BadInput(
        Reason(
            field=field,
            value=name,
            rule=f"{rule}, and {failure}",
            nearest=nearest or catalogue.nearest_model(name),
        )
    )


@contextmanager
def _bars_of_weights_alone(patterns: Sequence[str]) -> Iterator[None]:
    """Show no progress and no warning over small files."""
    from huggingface_hub import utils

    if patterns is _MODEL or utils.are_progress_bars_disabled():
        yield
        return
    verbosity = utils.logging.get_verbosity()
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        utils.enable_progress_bars()
        utils.logging.set_verbosity(verbosity)


def _explain(error: Exception) -> str:
    """Return why a file of the hub could not be fetched."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, errors.GatedRepoError):
        return f"{endpoint} gives it only to those who accepted its terms: `hf auth login` first"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{endpoint} has no such model, or a private one (`hf auth login`)"
    if isinstance(error, errors.HfHubHTTPError):
        return f"{endpoint} answered {error.response.status_code}"
    if isinstance(error, errors.HFValidationError):
        return f"is no id of {endpoint}"
    strerror = getattr(error, "strerror", None)  # of a disk, say
    return f"{endpoint} cannot be reached" if strerror is None else f"cannot be kept: {strerror}"
