"""A change of a job against budgets: two scripts, configurations, jobs, plans or commits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict, Unpack, cast

from moewright.api.launch_scripts import ScriptPlan, read_flags
from moewright.api.planning import estimate_request, is_plan_file
from moewright.codec import read_toml
from moewright.diagnosis.checks import ChangeBudgets, Check, JobCheck, OptionChange, find_breaches
from moewright.diagnosis.plan_changes import compare_plans
from moewright.intake.megatron.unknown import show_unknown
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan

_LACKS_FILE = "error: unable to read sha1 file of "  # git goes on with the other files
_TIMEOUT_S = 120  # git may have to fetch what a partial clone lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A commit of the repository that the working folder lies in; `path` is "" for all of it."""

    text: str
    commit: str
    path: str


def find_revision(text: str) -> Revision | None:
    """Return the revision that a text names; None for a path that exists, and for anything else."""
    if not text or Path(text).exists():
        return None
    name, _, path = text.partition(":")
    if not name:
        return None
    try:
        # ^0 is the commit of a tag; a name that begins with a dash is no option.
        commit = _run_git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^0"])
    except BadInput:
        return None
    return Revision(text=text, commit=commit.decode().strip(), path=path)


def find_root() -> Path:
    """Return the root of the repository that the working folder lies in.

    Raises:
        BadInput: there is none.
    """
    return Path(_run_git(["rev-parse", "--show-toplevel"]).decode().strip())


@contextmanager
def open_revision(revision: Revision) -> Iterator[Path]:
    """Give a folder with the files of a revision, which is gone afterwards.

    A path in it is that from the root of the repository. A symbolic link is a file that holds its
    target, so that none leads out of the folder. The index of the repository stays as it is. Files
    that a partial clone lacks are left out: jobs read few of a repository's files.

    Raises:
        BadInput: git does not give the files.
    """
    with TemporaryDirectory(prefix="moewright-") as folder:
        where = ["-C", str(find_root()), "-c", "core.symlinks=false", "--work-tree", folder]
        restore = [*where, "restore", "--worktree", "--source", revision.commit, "--", ":/"]
        _run_git(restore, ignored=_LACKS_FILE)
        yield Path(folder)


def _run_git(arguments: Sequence[str], *, ignored: str = "") -> bytes:
    """Return what git prints; what it says of errors may begin with `ignored`, line by line.

    Raises:
        BadInput: there is no git, or it fails.
    """
    try:
        return subprocess.run(
            ["git", *arguments], check=True, capture_output=True, timeout=_TIMEOUT_S
        ).stdout
    except OSError:
        rule = "is not installed here, or may not be started; give two files"
    except subprocess.TimeoutExpired:
        rule = f"does not answer within {_TIMEOUT_S} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode("utf-8", "replace").strip().splitlines() or ["fails"]
        if ignored and all(line.startswith(ignored) for line in lines):
            return bytes(error.stdout)
        rule = f"says: {lines[0]}"
    raise BadInput(Reason(field="git", rule=rule))


BUDGETS_FILE = Path("moewright.toml")
_RECORDS = (".toml", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSource:
    """A file that states a job, and what it leaves open: `on` is count x device, or the device.

    `arguments` stand behind the name of a script; each of `overrides` is NAME=VALUE of a variable,
    an option or a setting of it.
    """

    path: str
    on: str = ""
    model: str = ""
    arguments: str = ""
    network: str = ""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFile:
    """The content of moewright.toml: budgets, and the jobs that commits are compared by."""

    budgets: ChangeBudgets = field(default_factory=ChangeBudgets)
    jobs: tuple[JobSource, ...] = ()


class ScriptChoices(TypedDict, total=False):
    """What launch scripts leave open; `overrides` are NAME=VALUE."""

    model: str
    arguments: str
    network: str
    overrides: tuple[str, ...]


def check(
    before: Path | str | Plan,
    after: Path | str | Plan = "",
    *,
    on: str | Hardware = "",
    budgets: Path | str | ChangeBudgets | None = None,
    **scripts: Unpack[ScriptChoices],
) -> Check:
    """Say exactly what a change of a job costs, and which budgets it breaks.

    Args:
        before: a launch script, a configuration in YAML, a job .toml, a plan, REV:PATH as git
            writes a file of a commit, or REV alone for all jobs of the file of budgets.
        after: the same; when not given, what the working folder has now.
        on: the hardware of scripts, as count x device, or the device alone.
        budgets: the file of budgets, moewright.toml when not given and there; or the budgets.
        **scripts: what scripts leave open, the keys of ScriptChoices: model where they give no
            sizes; arguments behind their names; network in place of the hardware's own; overrides,
            each NAME=VALUE of a variable, an option or a setting, which win over theirs.

    Raises:
        BadInput: a side cannot be read or planned, or the file of budgets is at fault.

    Example:
        >>> import moewright as mw
        >>> was = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
        >>> now = mw.estimate("Qwen3-30B-A3B", "tp2,ep8,recompute=full", on="8xH100")
        >>> [change.words for change in mw.check(was, now).jobs[0].changes.switches]
        ['tensor parallel', 'sp']
    """
    file = _read_budgets(budgets)
    if isinstance(before, Plan) or isinstance(after, Plan):
        if not (isinstance(before, Plan) and isinstance(after, Plan)):
            rule = "is a plan, and the other side is none"
            raise BadInput(Reason(field="plan", rule=rule, nearest="two plans, or their files"))
        job = _check_plans("plan", before, after, file.budgets)
        return Check(before=before.fingerprint, after=after.fingerprint, jobs=(job,))
    source = JobSource(path="", **scripts)
    with ExitStack() as stack:
        sides = _open_sides(str(before), str(after), stack)
        jobs = tuple(_check_files(sides, source, on, file))
    return Check(before=str(before), after=str(after) or "the working folder", jobs=jobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """A side of a check: a file, or the folder that the jobs of the file of budgets lie in.

    `shown` is the path that is told: the files of a commit lie in the folder `unpacked`, which goes
    again, "" for none.
    """

    place: Path
    shown: str
    is_folder: bool
    unpacked: str = ""


def _read_budgets(budgets: Path | str | ChangeBudgets | None) -> CheckFile:
    if isinstance(budgets, ChangeBudgets):
        return CheckFile(budgets=budgets)
    if budgets is None and not BUDGETS_FILE.is_file():
        return CheckFile()
    path = BUDGETS_FILE if budgets is None else Path(budgets)
    file = read_toml(CheckFile, path)
    file.budgets.check(str(path))
    return file


def _open_sides(before: str, after: str, stack: ExitStack) -> tuple[_Side, _Side]:
    """Return both sides; without the second it is that of the first in the working folder."""
    first = _open_side(before, stack)
    if after:
        second = _open_side(after, stack)
    elif first.is_folder:
        second = _Side(place=Path(), shown="", is_folder=True)
    else:
        revision = find_revision(before)
        if revision is None:
            rule = "is needed beside a file"
            raise BadInput(Reason(field="AFTER", rule=rule, nearest=f"HEAD:{before} {before}"))
        # git counts from the root, whatever the working folder is.
        path = os.path.relpath(find_root() / revision.path)
        second = _Side(place=Path(path), shown=path, is_folder=False)
    if first.is_folder != second.is_folder:
        rule = "is a commit, and the other side a file"
        name = before if first.is_folder else after
        raise BadInput(Reason(field=name[:60], rule=rule, nearest=f"{name}:PATH"))
    return first, second


def _open_side(text: str, stack: ExitStack) -> _Side:
    revision = find_revision(text)
    if revision is None:
        path = Path(text)
        if path.is_dir():
            return _Side(place=path, shown=text, is_folder=True)
        return _Side(place=path, shown=text, is_folder=False)
    files = stack.enter_context(open_revision(revision))
    if not revision.path:
        return _Side(place=files, shown=text, is_folder=True, unpacked=str(files))
    place = files / revision.path
    return _Side(place=place, shown=text, is_folder=False, unpacked=str(files))


def _check_files(
    sides: tuple[_Side, _Side], source: JobSource, on: str | Hardware, file: CheckFile
) -> Iterator[JobCheck]:
    before, after = sides
    if not before.is_folder:
        first, second = (_read_side(side, side.place, source, on) for side in sides)
        yield _check_readings(after.shown, after.place, first, second, file.budgets)
        return
    if not file.jobs:
        rule = "names no jobs to compare commits and folders by"
        nearest = '[[jobs]] with path = "train.sh" and on = "64xH100"'
        raise BadInput(Reason(field=f"{BUDGETS_FILE}: jobs", rule=rule, nearest=nearest))
    for job in file.jobs:
        places = [side.place / job.path for side in sides]
        if not all(place.is_file() for place in places):
            lacking = [
                side.shown or "the working folder"
                for side, place in zip(sides, places, strict=True)
                if not place.is_file()
            ]
            if len(lacking) == len(sides):
                rule = "is in neither side"
                raise BadInput(Reason(field=f"jobs: {job.path[:60]}", rule=rule))
            yield JobCheck(path=job.path, changes=None, note=f"not in {lacking[0]}")
            continue
        first, second = (
            _read_side(side, place, job, on or job.on)
            for side, place in zip(sides, places, strict=True)
        )
        yield _check_readings(job.path, places[1], first, second, file.budgets)


def _read_side(side: _Side, path: Path, source: JobSource, on: str | Hardware) -> ScriptPlan:
    """Read the job of a file of a side.

    Its own folder is that of the repository in what is told of it, so that a commit says the same
    as the working folder where both have the same text.
    """
    try:
        reading = _read_job(path, source, on)
    except BadInput as error:
        raise BadInput(*(_place_reason(reason, side, path) for reason in error.reasons)) from None
    if not side.unpacked:
        return reading
    return cast(ScriptPlan, _move(reading, side.unpacked, str(find_root())))


def _move(value: object, folder: str, other: str) -> object:
    """Return a record, or a part of one, with another folder in every text.

    Values that only running a script tells stand in its options as marks that no file may hold.
    """
    # Before texts: members of a StrEnum are texts too.
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return value.replace(folder, other)
    if isinstance(value, tuple):
        return tuple(_move(item, folder, other) for item in value)
    if isinstance(value, Mapping):
        return {key: _move(item, folder, other) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value)}
        new = {name: _move(item, folder, other) for name, item in old.items()}
        return replace(value, **{name: item for name, item in new.items() if item != old[name]})
    return value


def _place_reason(reason: Reason, side: _Side, path: Path) -> Reason:
    """Return a reason that names the file as git does, and no folder that is gone again."""
    if not side.unpacked:
        return reason
    shown = side.shown
    if side.is_folder:
        shown = f"{side.shown}:{path.relative_to(side.place)}"
    named = cast(Reason, _move(reason, str(path), shown))
    return cast(Reason, _move(named, side.unpacked, str(find_root())))


def _read_job(path: Path, source: JobSource, on: str | Hardware) -> ScriptPlan:
    if path.suffix in _RECORDS:
        if source.overrides:
            rule = f"is for scripts and configurations, and {path.name[:60]} is a job or a plan"
            raise BadInput(Reason(field="--set", value=source.overrides[0][:60], rule=rule))
        # A plan brings its own.
        hardware = "" if is_plan_file(path) else on
        options = WorkloadOptions(network=source.network)
        plan, notes = estimate_request(path, "", on=hardware, options=options)
        return ScriptPlan(plan=plan, notes=notes)
    return read_flags(
        path,
        on=on,
        model=source.model,
        arguments=source.arguments,
        network=source.network,
        overrides=source.overrides,
    )


def _check_readings(
    name: str, path: Path, before: ScriptPlan, after: ScriptPlan, budgets: ChangeBudgets
) -> JobCheck:
    options = tuple(list_option_changes(before.values, after.values))
    # What was read otherwise before as well is no part of the change.
    notes = tuple(note for note in after.notes if note not in before.notes)
    checked = _check_plans(name, before.plan, after.plan, budgets)
    return replace(checked, options=options, notes=notes, line=_find_line(path, options))


def _check_plans(name: str, before: Plan, after: Plan, budgets: ChangeBudgets) -> JobCheck:
    changes = compare_plans(before, after)
    # A budget that is broken already is not broken by a change that changes nothing.
    breaches = () if changes.is_neutral else tuple(find_breaches(changes, budgets))
    return JobCheck(path=name, changes=changes, breaches=breaches)


def list_option_changes(
    before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]
) -> Iterator[OptionChange]:
    """Yield the options that only one side has, or whose values differ, as numbers where they are.

    What is known when a script runs alone is written as a variable.
    """
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name), after.get(name)
        if was is None or now is None or not _say_the_same(was, now):
            yield OptionChange(name=name, before=_spell(was), after=_spell(now))


def _say_the_same(was: tuple[str, ...], now: tuple[str, ...]) -> bool:
    # 1e-4 and 0.0001 are one value.
    return list(map(_to_number, was)) == list(map(_to_number, now))


def _to_number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _spell(words: tuple[str, ...] | None) -> str:
    if words is None:
        return ""
    return show_unknown(" ".join(words)) or "on"


def _find_line(path: Path, options: tuple[OptionChange, ...]) -> int:
    """Return the first line of a file that names an option of these, from 1; 1 if none does."""
    names = tuple(option.name for option in options if option.after)
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if any(name in line for name in names):
                return number
    return 1
