"""Write which options trainers on Megatron-core have, from checkouts of them, and say what changed.

docs/tools/trainer_names.toml says where each trainer names its options. `make trainer-names
CHECKOUTS=DIR` reads the commit that each checkout below DIR stands at, and writes a table a trainer
to src/moewright/intake/megatron/data/trainers: the name, its default, how many values it takes
where a command has it, its group in the parser or its record, the file, and the file of the core
that reads it. The arguments that releases of Megatron-LM had and its parser has no more go to
former_arguments.csv with their defaults, for the dumps of logs, and the options of each release
with their defaults to release_options.csv, for commands of that time. Nothing else is kept.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moewright.codec.yaml_text import parse_yaml
from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.parser_source import (
    ParsedOption,
    constant_text,
    core_use,
    is_core_file,
    parse_options,
    shorten_default,
)
from moewright.intake.megatron.settings import flatten
from moewright.spec.errors import BadInput

TABLES = Path(__file__).parents[2] / "src/moewright/intake/megatron/data/trainers"
CONVERTED = Path(__file__).parents[2] / "src/moewright/exporters/data/bridge_models.csv"
FORMER = TABLES.parent / "former_arguments.csv"
RELEASES = TABLES.parent / "releases.csv"
RELEASE_OPTIONS = TABLES.parent / "release_options.csv"
SOURCES = Path(__file__).with_suffix(".toml")
_COLUMNS = ("name", "default", "values", "group", "source", "core")
_PATCHED_OPTION = re.compile(r"^\+.*add_argument\(\s*['\"](--[\w-]+)['\"](.*)$", re.MULTILINE)
_OF_EVERY_PARSER = "--num-layers"
_NEGATIONS = frozenset(("no", "disable"))  # in the name of a switch that clears its argument
_SWITCHES = ("store_true", "store_false", "store_const")
# A test's or another model's own configuration names no option of pre-training.
_LEFT_OUT = ("*inference*", "*/test*")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedOption:
    """An option of a trainer; `values` is as argparse's nargs, "" where a file alone sets it.

    `group` is that of its parser, or the record that has it, `dest` the argument that it sets, ""
    where it is no option of a command.
    """

    name: str
    default: str
    values: str
    source: str
    group: str = ""
    dest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    """The commit of a repository that is on this machine."""

    folder: Path
    commit: str

    def list_files(self, patterns: Sequence[str]) -> Iterator[str]:
        """Yield the files whose names match a pattern, in which * does not cross folders."""
        names = self._run("ls-tree", "-r", "--name-only", "HEAD").splitlines()
        for name in names:
            is_named = any(_matches(name, pattern) for pattern in patterns)
            if is_named and not any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT):
                yield name

    def list_core_files(self) -> Iterator[str]:
        """Yield the files of the model, the optimizer and what sends their messages."""
        names = self._run("ls-tree", "-r", "--name-only", "HEAD").splitlines()
        yield from filter(is_core_file, names)

    def read(self, name: str) -> str:
        """Return the text of a file."""
        return self._run("show", f"HEAD:{name}")

    def read_release(self, tag: str, names: Sequence[str]) -> str:
        """Return the text of the first of some files that a release has."""
        listed = self._run("ls-tree", "--name-only", tag, *names).splitlines()
        return self._run("show", f"{tag}:{listed[0]}") if listed else ""

    def month(self, tag: str) -> str:
        """Return the month of a release's commit."""
        return self._run("log", "-1", "--format=%cs", tag).strip()[: len("2026-08")]

    def _run(self, *words: str) -> str:
        command = ("git", "-C", str(self.folder), *words)
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True
        ).stdout


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def find_checkout(folder: Path, repository: str) -> Checkout | None:
    """Return the checkout of owner/name below a folder, under one of the names it may have."""
    owner, _, name = repository.partition("/")
    for place in (f"{owner}+{name}/repo", f"{owner}+{name}", f"{owner}/{name}", name):
        path = folder / place
        if path.is_dir():
            words = ("git", "-C", str(path), "rev-parse", "--short=10", "HEAD")
            found = subprocess.run(words, capture_output=True, text=True, check=False)
            if not found.returncode:
                return Checkout(folder=path, commit=found.stdout.strip())
    return None


def list_options(checkout: Checkout, entry: Mapping[str, Any]) -> tuple[NamedOption, ...]:
    """Return the options of a trainer by name; of two with one name the first with a default."""
    options: dict[str, NamedOption] = {}
    for option in _read_all(checkout, entry):
        first = options.get(option.name)
        if first is None or (not first.default and option.default):
            options[option.name] = option
    return tuple(options[name] for name in sorted(options))


def _read_all(checkout: Checkout, entry: Mapping[str, Any]) -> Iterator[NamedOption]:
    for name in checkout.list_files(entry.get("parsers", ())):
        text = checkout.read(name)
        yield from _patched_options(text, name) if name.endswith(".patch") else _parsed(text, name)
    for name in checkout.list_files(entry.get("records", ())):
        yield from _record_fields(checkout.read(name), name)
    for name in checkout.list_files(entry.get("constructors", ())):
        yield from _constructor_fields(checkout.read(name), name)
    for pattern in entry.get("settings", ()):
        path, _, prefix = pattern.partition(">")
        for name in checkout.list_files((path,)):
            for setting, default in _settings(checkout.read(name), prefix):
                yield NamedOption(name=setting, default=default, values="", source=name)
    for pattern in entry.get("flat", ()):
        for name in checkout.list_files((pattern,)):
            for setting, default in _settings(checkout.read(name), ""):
                short = setting.rpartition(".")[2]
                yield NamedOption(name=short, default=default, values="", source=name)


def _settings(text: str, prefix: str) -> Iterator[tuple[str, str]]:
    try:
        data = parse_yaml(text, where="file")
    except BadInput:
        return
    for name, value in flatten(data, prefix).items():
        plain = value if isinstance(value, str) else "[" + ",".join(value) + "]"
        yield name, shorten_default(plain)


def _parsed(text: str, source: str) -> Iterator[NamedOption]:
    """Yield the options that a parser is given; one that does not parse names none."""
    for option in parse_options(text):
        yield NamedOption(
            name=option.name,
            default=option.default,
            values=option.values,
            source=source,
            group=option.group,
            dest=option.dest,
        )


def _patched_options(text: str, source: str) -> Iterator[NamedOption]:
    """Yield the options that a patch adds; its lines are no whole program."""
    for match in _PATCHED_OPTION.finditer(text):
        following = text[match.end() : match.end() + 300].partition("add_argument")[0]
        is_switch = any(action in match[2] + following for action in _SWITCHES)
        yield NamedOption(
            name=match[1],
            default="",
            values="0" if is_switch else "1",
            source=source,
            dest=match[1].lstrip("-").replace("-", "_"),
        )


def _record_fields(text: str, source: str) -> Iterator[NamedOption]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for record in ast.walk(tree):
        if not isinstance(record, ast.ClassDef):
            continue
        for line in record.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                name = line.target.id
                default = constant_text(line.value)
                yield NamedOption(
                    name=name, default=default, values="", source=source, group=record.name
                )


def _constructor_fields(text: str, source: str) -> Iterator[NamedOption]:
    """Yield what the constructors of classes assign to their own names."""
    records = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    for record in records:
        methods = (line for line in record.body if isinstance(line, ast.FunctionDef))
        lines = (
            line for method in methods if method.name == "__init__" for line in ast.walk(method)
        )
        for line in lines:
            targets = line.targets if isinstance(line, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    yield NamedOption(
                        name=target.attr,
                        default=constant_text(line.value),
                        values="",
                        source=source,
                        group=record.name,
                    )


def find_core_uses(checkout: Checkout, options: Sequence[NamedOption]) -> dict[str, str]:
    """Return the first file of a trainer's core that reads each argument, by argument."""
    dests = sorted({option.dest for option in options if option.dest})
    use = core_use(dests)
    uses: dict[str, str] = {}
    for name in checkout.list_core_files() if dests else ():
        for match in use.finditer(checkout.read(name)):
            uses.setdefault(match[1] or match[2], name)
    return uses


def format_table(options: Sequence[NamedOption], uses: Mapping[str, str]) -> str:
    """Return the table of a trainer as CSV; the core's files are in it where it has options."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = _COLUMNS if uses else _COLUMNS[:-1]
    writer.writerow(columns)
    rows = ((o.name, o.default, o.values, o.group, o.source, uses.get(o.dest, "")) for o in options)
    writer.writerows(row[: len(columns)] for row in rows)
    return text.getvalue()


def describe_changes(old: str, new: str) -> Iterator[str]:
    """Yield what is new, gone or has another default in a table."""
    before = {row["name"]: row["default"] for row in csv.DictReader(old.splitlines())}
    after = {row["name"]: row["default"] for row in csv.DictReader(new.splitlines())}
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"  + {name} {after[name]}".rstrip()
        elif name not in after:
            yield f"  - {name}"
        elif before[name] != after[name]:
            yield f"  ~ {name}: {before[name] or 'none'} -> {after[name] or 'none'}"


def list_converted(checkout: Checkout, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the architectures that Megatron Bridge registers a converter for, with their files."""
    listed = {}
    for name in checkout.list_files(patterns):
        tree = ast.parse(checkout.read(name))
        constants = {
            target.id: constant_text(line.value)
            for line in tree.body
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            if getattr(call.func, "attr", "") != "register_bridge":
                continue
            source = next((word.value for word in call.keywords if word.arg == "source"), None)
            if isinstance(source, ast.Name):
                listed[constants.get(source.id) or source.id] = name
            elif source is not None and (text := constant_text(source)):
                listed[text] = name
    yield from sorted(listed.items())


def _find_source(folder: Path, name: str) -> tuple[dict[str, Any], Checkout | None]:
    """Return an entry of the sources and its checkout, None where it is not below the folder."""
    entry = tomllib.loads(SOURCES.read_text(encoding="utf-8"))[name]
    return entry, find_checkout(folder, entry["repository"])


def write_converted(folder: Path) -> Iterator[str]:
    """Write the table of the architectures that Megatron Bridge converts; yield what changed."""
    entry, checkout = _find_source(folder, "converters")
    if checkout is None:
        yield f"{entry['repository']} is not below {folder}; its table of models stays"
        return
    count, changes = _write_names(CONVERTED, "source", list_converted(checkout, entry["files"]))
    yield f"{entry['repository']} at {checkout.commit} converts {count} architectures"
    yield from changes


def _write_names(
    path: Path, column: str, rows: Iterable[tuple[str, str]]
) -> tuple[int, tuple[str, ...]]:
    """Write a table of names and one more column; return their count, and what is new or gone."""
    old = path.read_text(encoding="utf-8") if path.is_file() else f"name,{column}"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", column))
    writer.writerows(rows)
    before, after = (
        {row["name"] for row in csv.DictReader(table.splitlines())}
        for table in (old, text.getvalue())
    )
    path.write_text(text.getvalue(), encoding="utf-8")
    added = (f"  + {name}" for name in sorted(after - before))
    gone = (f"  - {name}" for name in sorted(before - after))
    return len(after), (*added, *gone)


def list_former_arguments(
    checkout: Checkout, entry: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the arguments of past releases that today's parser has not, with their defaults."""
    today = {option.dest for option in option_table().values()}
    defaults: dict[str, dict[str, None]] = {}
    for release in entry["releases"]:
        for option in parse_options(checkout.read_release(release, entry["files"])):
            if option.dest not in today:
                defaults.setdefault(option.dest, {})[_printed_default(option)] = None
    yield from ((name, "|".join(defaults[name])) for name in sorted(defaults))


def _printed_default(option: ParsedOption) -> str:
    """Return the default of an argument as a log prints it; what is computed counts as none."""
    if option.values == "0":
        is_other = option.dest != option.name.lstrip("-").replace("-", "_")
        return option.default or str(is_other and not _NEGATIONS.isdisjoint(option.name.split("-")))
    return option.default or "None"


def write_former_arguments(folder: Path) -> Iterator[str]:
    """Write the table of the arguments that releases of Megatron-LM had; yield what changed."""
    entry, checkout = _find_source(folder, "former")
    if checkout is None:
        yield f"{entry['repository']} is not below {folder}; its table of former arguments stays"
        return
    count, changes = _write_names(FORMER, "defaults", list_former_arguments(checkout, entry))
    yield f"{entry['repository']} had {count} arguments in releases that its parser has not"
    yield from changes


def list_releases(
    checkout: Checkout, entry: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (tag, month, defaults by option) of the releases whose text names their options.

    Later ones make most options of records, which the text does not name; the last of all is the
    parser that is read here.
    """
    for tag in entry["releases"]:
        options = parse_options(checkout.read_release(tag, entry["files"]))
        defaults = {option.name: _printed_default(option) for option in options}
        if _OF_EVERY_PARSER in defaults:
            yield tag, checkout.month(tag), defaults
    yield "d98e8a64", "2026-08", {o.name: o.default for o in option_table().values()}


def list_spans(columns: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, int, int, str]]:
    """Yield (option, first release, last release, default) for as long as a default stayed."""
    for name in sorted(set().union(*columns)):
        first = 0
        for index, column in enumerate(columns):
            following = columns[index + 1] if index + 1 < len(columns) else {}
            is_there = name in column
            if is_there and following.get(name) == column[name]:
                continue
            if is_there:
                yield name, first, index, column[name]
            first = index + 1


def write_releases(folder: Path) -> Iterator[str]:
    """Write which options the releases of Megatron-LM have, and since when by which default."""
    entry, checkout = _find_source(folder, "former")
    if checkout is None:
        yield f"{entry['repository']} is not below {folder}; its table of releases stays"
        return
    releases = list(list_releases(checkout, entry))
    rows = list(list_spans([defaults for _, _, defaults in releases]))
    months = [(tag, month) for tag, month, _ in releases]
    tables = (
        (RELEASES, ("tag", "month"), months),
        (RELEASE_OPTIONS, ("name", "first", "last", "default"), rows),
    )
    for path, columns, lines in tables:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
        path.write_text(text.getvalue(), encoding="utf-8")
    yield f"{entry['repository']}: {len(rows)} defaults of options in {len(months)} releases"


def write_tables(folder: Path) -> Iterator[str]:
    """Write the table of each trainer that is below a folder; yield what changed, line by line."""
    commits = dict(_read_commits())
    for entry in tomllib.loads(SOURCES.read_text(encoding="utf-8"))["trainer"]:
        checkout = find_checkout(folder, entry["repository"])
        if checkout is None:
            yield f"{entry['name']}: {entry['repository']} is not below {folder}; its table stays"
            continue
        path = TABLES / f"{entry['name']}.csv"
        old = path.read_text(encoding="utf-8") if path.is_file() else ",".join(_COLUMNS)
        options = list_options(checkout, entry)
        new = format_table(options, find_core_uses(checkout, options))
        changes = list(describe_changes(old, new))
        before = commits.get(entry["name"], ("", "none"))[1]
        yield f"{entry['name']}: {before} -> {checkout.commit}, {len(changes)} changes"
        yield from changes
        commits[entry["name"]] = (entry["repository"], checkout.commit)
        TABLES.mkdir(exist_ok=True)
        path.write_text(new, encoding="utf-8")
    lines = [f"{name},{repository},{commit}\n" for name, (repository, commit) in commits.items()]
    (TABLES / "commits.csv").write_text("trainer,repository,commit\n" + "".join(lines))


def _read_commits() -> Iterator[tuple[str, tuple[str, str]]]:
    path = TABLES / "commits.csv"
    if path.is_file():
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            yield row["trainer"], (row["repository"], row["commit"])


if __name__ == "__main__":
    for write in (write_tables, write_converted, write_former_arguments, write_releases):
        for printed in write(Path(sys.argv[1])):
            print(printed)
