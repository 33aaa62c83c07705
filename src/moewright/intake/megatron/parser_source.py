"""The options that a trainer's own source gives its parser, and what it says of them."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

_SWITCHES = ("store_true", "store_false", "store_const")
_MOST_OF_A_DEFAULT = 40  # a longer one is an expression
_MOST_OF_HELP = 200  # the first sentence says what an option is
_NAME_OF_A_GROUP = re.compile(r"^_*(?:add|get|extra)?_*(.*?)_*(?:args|arguments|options)?$")
# Where Megatron-LM and its forks give their parsers options, from the root of a checkout.
_PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")
# Those of packages beside it, which count where the program that a script runs is of the package.
_PACKAGE_PARSERS = (
    "*/training/arguments.py",
    "*/megatron/training/arguments.py",
    "*/arguments.py",
    "*/utils/arguments.py",
)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)
_LEVELS = 6  # folders above a script in which the root of its checkout may be
_MOST_ENTRIES = 256  # of the root of a checkout; a folder of temporary files has more
_MOST_BYTES = 1 << 20
# Where the model, its kernels and its messages are, and what stands beside them there.
_CORE = re.compile(
    r"(^|/)(core|models?|transformer|pipeline_parallel|tensor_parallel|distributed|optimizer)/"
)
_BESIDE_CORE = re.compile(
    r"(^|/)(tests?|tools|tasks|examples|datasets?|dist_checkpointing|inference|export|tokenizers"
    r"|post_training)/"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedOption:
    """An option as a call of add_argument has it.

    `values` is as argparse's nargs, "0" for a switch; `default` is "" where it is computed or none;
    `group` is the title of its group, or else what the function that adds it is called after, and
    `dest` the argument that it sets.
    """

    name: str
    dest: str
    default: str
    values: str
    group: str
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSource:
    """The source of the trainer that a script lies in: the options that its parsers take, by name.

    `root` is the folder of the checkout; None where a script lies in none.
    """

    root: Path | None
    options: Mapping[str, ParsedOption]


def parse_options(text: str) -> Iterator[ParsedOption]:
    """Yield the options that a program in Python gives a parser; none where it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from _options_of(tree, "", {})


def _options_of(node: ast.AST, function: str, titles: dict[str, str]) -> Iterator[ParsedOption]:
    """Yield the options that are added inside of a node, in the order of the text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield from _options_of(child, _name_group(child.name), {})
            continue
        if isinstance(child, ast.Assign) and (title := _group_title(child.value)):
            titles |= {t.id: title for t in child.targets if isinstance(t, ast.Name)}
        if isinstance(child, ast.Call) and getattr(child.func, "attr", "") == "add_argument":
            yield from _added_options(child, function, titles)
        yield from _options_of(child, function, titles)


def _name_group(function: str) -> str:
    match = _NAME_OF_A_GROUP.match(function)
    return (match[1] if match else function).replace("_", " ")


def _group_title(node: ast.expr) -> str:
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument_group":
        return ""
    titles = [word.value for word in node.keywords if word.arg == "title"]
    return constant_text(next(iter((*titles, *node.args)), None))


def _added_options(call: ast.Call, function: str, titles: dict[str, str]) -> Iterator[ParsedOption]:
    keywords = {word.arg: word.value for word in call.keywords}
    is_pair = getattr(keywords.get("action"), "attr", "") == "BooleanOptionalAction"
    is_switch = is_pair or constant_text(keywords.get("action")) in _SWITCHES
    values = "0" if is_switch else constant_text(keywords.get("nargs")) or "1"
    parser = getattr(call.func, "value", None)
    group = titles.get(parser.id, function) if isinstance(parser, ast.Name) else function
    for argument in call.args:
        name = argument.value if isinstance(argument, ast.Constant) else ""
        if isinstance(name, str) and name.startswith("--"):
            option = ParsedOption(
                name=name,
                dest=constant_text(keywords.get("dest")) or name.lstrip("-").replace("-", "_"),
                default=constant_text(keywords.get("default")),
                values=values,
                group=group,
                help=_help_text(keywords.get("help")),
            )
            yield option
            if is_pair:
                yield replace(option, name=f"--no-{name.removeprefix('--')}")


def _help_text(node: ast.expr | None) -> str:
    text = node.value if isinstance(node, ast.Constant) else ""
    return " ".join(str(text).split())[:_MOST_OF_HELP]


def constant_text(node: ast.expr | None) -> str:
    """Return a constant as text; "" for none, and for what is computed."""
    if isinstance(node, ast.Constant) and node.value is not None:
        return shorten_default(str(node.value))
    return ""


def shorten_default(text: str) -> str:
    """Return a default in one plain line; "" for one that is long, or follows from others."""
    plain = " ".join(text.split())
    is_plain = plain.isascii() and plain.isprintable() and "$" not in plain
    return plain if is_plain and len(plain) <= _MOST_OF_A_DEFAULT else ""


_OF_MEGATRON = re.compile(r"megatron|mindspeed|flagscale|nemo", re.IGNORECASE)


def find_own_source(folder: Path, programs: Sequence[str]) -> TrainerSource:
    """Return the source of the trainer whose checkout a script lies in.

    `programs` are the programs of Python that its command names; where the script lies in no
    checkout of a trainer there are no options but theirs. A package beside a script is its trainer
    where such a program lies in it or imports it.
    """
    folders = (folder, *folder.resolve().parents)[:_LEVELS]
    files: list[Path] = []
    root = None
    for place in folders:
        files += [place / name for name in programs if not name.startswith(("/", "\0"))]
        parsers = _list_parsers(place, frozenset(_list_packages(place, programs)))
        if parsers:
            files += parsers
            root = place
            break
    options: dict[str, ParsedOption] = {}
    for file in dict.fromkeys(files):
        for option in parse_options(_read_source(file)):
            options.setdefault(option.name, option)
    return TrainerSource(root=root, options=options)


def find_other_package(folder: Path, programs: Sequence[str]) -> str:
    """Return the package beside a program that trains in Megatron's place, "" where none is seen.

    It is the first that the program imports from its own folder, and nothing of Megatron with it.
    """
    for name in programs:
        path = Path(name.rpartition("\0")[2].lstrip("/"))
        for place in dict.fromkeys((folder / path, folder / path.name)):
            text = _read_source(place)
            packages: dict[str, None] = dict.fromkeys(_IMPORT.findall(text))
            own = [package for package in packages if (place.parent / package).is_dir()]
            if own and not _OF_MEGATRON.search(" ".join(packages)):
                return own[0]
    return ""


def _list_packages(folder: Path, programs: Sequence[str]) -> Iterator[str]:
    """Yield the packages below a folder that programs lie in or import, by their first names."""
    for name in programs:
        path = Path(name.rpartition("\0")[2].lstrip("/"))
        yield from path.parts[:1]
        for place in dict.fromkeys((folder / path, folder / path.name)):
            yield from _IMPORT.findall(_read_source(place))


def _list_parsers(folder: Path, packages: frozenset[str]) -> list[Path]:
    """List the files of a checkout's root that may add options; none where it is no such root."""
    try:
        with os.scandir(folder) as entries:
            is_root = len(list(islice(entries, _MOST_ENTRIES + 1))) <= _MOST_ENTRIES
    except OSError:
        return []
    if not is_root:
        return []
    of_packages = (file for pattern in _PACKAGE_PARSERS for file in folder.glob(pattern))
    return [
        *(file for name in _PARSERS if (file := folder / name).is_file()),
        *(file for file in of_packages if file.relative_to(folder).parts[0] in packages),
    ]


def find_core_use(root: Path, dest: str) -> str:
    """Return the file of a trainer's core that reads an argument or a field of its configuration.

    The core is the model, its layers, the optimizer and what sends their messages: what is read
    there changes what a plan consists of. "" where none of its files reads it.
    """
    use = core_use((dest,))
    for file in sorted(root.rglob("*.py")):
        place = file.relative_to(root).as_posix()
        if is_core_file(place) and use.search(_read_source(file)):
            return place
    return ""


def is_core_file(place: str) -> bool:
    """Whether a file of a trainer, by its path in the checkout, is of its core."""
    is_core = _CORE.search(place) is not None
    return is_core and place.endswith(".py") and _BESIDE_CORE.search(place) is None


def core_use(names: Sequence[str]) -> re.Pattern[str]:
    """Return what finds uses of arguments: as attributes, or as fields of a record."""
    either = "|".join(map(re.escape, names))
    return re.compile(rf"\.({either})\b|^[ \t]+({either})[ \t]*:", re.MULTILINE)


def _read_source(file: Path) -> str:
    try:
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        pass
    return ""
