"""What comes from others is what it is said to be: files, actions, packages."""

from __future__ import annotations

import re
import subprocess
import tomllib
from hashlib import sha256

import pytest
import yaml
from test_packaging_files import ROOT, _canonical, _pins

VENDORED = tomllib.loads((ROOT / "vendored.toml").read_text())["files"]


@pytest.mark.parametrize("file", VENDORED, ids=lambda file: file["name"])
def test_a_file_of_others_is_the_published_one(file: dict[str, str]) -> None:
    content = (ROOT / file["path"]).read_bytes()
    assert sha256(content).hexdigest() == file["sha256"]
    assert file["version"].encode() in content
    assert file["package"].endswith(f"/{file['name']}@{file['version']}")
    assert file["licence_files"]
    for name in file["licence_files"]:
        assert (ROOT / name).stat().st_size > 100


def test_no_file_of_others_is_left_out() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.min.*"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.split()) == {file["path"] for file in VENDORED}


def test_actions_are_pinned_by_commit() -> None:
    paths = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert paths
    for path in paths:
        text = path.read_text()
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        for used in re.findall(r"uses: *(.*)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[0-9]+\.[0-9]+\.[0-9]+", used), used


def test_the_lock_has_the_hashes_of_every_pin() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert len(entries) == len(re.findall(r"^[^#\s]", text, re.M))
    locked = {_canonical(name): version for name, version, _ in entries}
    pins = _pins()
    assert {name: locked.get(name) for name in pins} == pins
    (torch,) = (hashes for name, _, hashes in entries if name == "torch")
    assert torch.count("--hash") == 1  # the CUDA build asks for packages that the lock has not
