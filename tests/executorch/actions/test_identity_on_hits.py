"""Delegates out of the store give the same files, in another process and another place.

Files of the first export, which records, are compared with stock ones in ``test_identity.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import executorch
import pytest
from action_replay import export_case
from export_cases import CASES

import cas
from cas.executorch.actions import cache, places

HERE = Path(__file__).resolve().parents[1]

#: What each of them is there for is in its name.
REPLAYED = (
    "mlp_xnnpack",
    "mlp_int8_dynamic_xnnpack",
    "mlp_int8_xnnpack",
    "mlp_xnnpack_two_tags",
    "methods_xnnpack",
    "mlp_xnnpack_dynamic",
    "attention_xnnpack",
    "named_backend",
)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def moved_package(target: Path) -> Path:
    """ExecuTorch once more, at another path, with what says that it was installed there."""
    source = Path(next(iter(executorch.__path__)))

    def link(old: str, new: str) -> str:
        try:
            os.link(old, new)
        except OSError:  # another file system
            shutil.copy2(old, new)
        return new

    ignored = shutil.ignore_patterns("__pycache__", "examples")
    shutil.copytree(source, target / "executorch", copy_function=link, ignore=ignored)
    for metadata in source.parent.glob("executorch-*.dist-info"):
        shutil.copytree(metadata, target / metadata.name)
    return target


def moved_sources(target: Path) -> Path:
    """The tests' models elsewhere, and every line of them further down."""
    target.mkdir()
    for path in HERE.glob("*.py"):
        text = path.read_text()
        if path.name in ("export_cases.py", "export_models.py"):
            first = "from __future__ import annotations\n"
            text = text.replace(first, first + "\n# Further down.\n" * 5, 1)
        (target / path.name).write_text(text)
    return target


def replay_elsewhere(store: Path, out: Path, tmp_path: Path, names: tuple[str, ...]) -> Any:
    """One process with another hash seed, directory, user, home, store and installation."""
    sources = moved_sources(tmp_path / "sources")
    site = moved_package(tmp_path / "site")
    (tmp_path / "work").mkdir()
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": os.pathsep.join([str(sources), str(site)]),
        "HOME": str(tmp_path / "work"),
        "USER": "somebody-else",
        "XDG_CACHE_HOME": str(tmp_path / "work"),
    }
    child = subprocess.run(
        [sys.executable, str(sources / "action_replay.py"), str(store), str(out), *names],
        cwd=tmp_path / "work",
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    return json.loads(child.stdout)


@pytest.mark.slow
def test_files_on_hits_are_those_of_the_first_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_dependencies", {})
    recorded = {}
    with cas.Store.open(tmp_path / "store", chunk_size=64 << 10) as store:
        for name in REPLAYED:
            out = tmp_path / "recorded" / name
            recorded[name] = export_case(store, name, CASES[name], out)
        factors = [record.factors for record in store.actions.list()]
    moved = (tmp_path / "store").rename(tmp_path / "another place")
    replayed = replay_elsewhere(moved, tmp_path / "replayed", tmp_path, REPLAYED)
    for name in REPLAYED:
        first, second = recorded[name], replayed[name]
        assert first["uncacheable"] == {}
        assert first["hits"] + sum(first["misses"].values()) > 0
        # Not one miss, so all keys are the same ones; and nothing was read that has changed.
        assert (second["misses"], second["notes"]) == ({}, [])
        assert second["keys"] == first["keys"]
        assert second["maps"] == first["maps"]
        assert digests(tmp_path / "replayed" / name) == digests(tmp_path / "recorded" / name)
    with cas.Store.open(moved) as store:
        for name in REPLAYED:  # which weight lies where, too
            recorded_tensors, replayed_tensors = (
                store.manifest(f"{name}@{generation}").tensors for generation in (1, 2)
            )
            assert replayed_tensors == recorded_tensors != ()
    assert len(digests(tmp_path / "replayed" / "mlp_xnnpack_two_tags")) == 3
    assert len(recorded["methods_xnnpack"]["keys"]) >= 3
    check_factors(factors)


def check_factors(factors: list[Any]) -> None:
    """Nothing that differs from machine to machine, or from day to day, is in a key."""
    text = json.dumps(factors)
    home, user = os.path.expanduser("~"), os.environ.get("USER", "nobody-of-this-name")
    private = [home, os.getcwd(), sys.prefix, str(HERE), *(root for _, root in places.roots())]
    assert [path for path in private if len(path) > 1 and path in text] == []
    assert not re.search(rf"\b{re.escape(user)}\b", text) or user in ("cpu", "torch")
    assert not re.search(r'"/|[ =:,(]/[a-z]', text)
    assert not re.search(r"\b20\d\d-\d\d-\d\d|\b\d\d:\d\d:\d\d\b", text)
    assert " at 0x" not in text
