"""What somebody edited in an installed package counts, although its version is the same."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cas.executorch.actions import facts, facts_installed
from cas.executorch.actions.facts_installed import edited_facts, installation_of, is_edited

PACKAGE = "package_of_the_installed_test"
FILES = {"__init__.py": "A = 1\n", "inner.py": "B = 1\n", "later.py": "C = 1\n"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were one of those that are known by their versions."""
    monkeypatch.setattr(facts_installed, "DISTRIBUTIONS", {PACKAGE: PACKAGE})
    monkeypatch.setattr(facts_installed, "_installations", {})
    monkeypatch.setattr(facts_installed, "_plain", set())
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def install(site: Path) -> Path:
    """Write a package as installers do: the list of files comes last."""
    root, info = site / PACKAGE, site / f"{PACKAGE}-1.0.dist-info"
    root.mkdir(parents=True)
    info.mkdir()
    lines = [f"{PACKAGE}-1.0.dist-info/RECORD,,"]
    for name, text in FILES.items():
        (root / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        lines.append(f"{PACKAGE}/{name},sha256={digest.rstrip(b'=').decode()},{len(text)}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    time.sleep(0.02)
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    time.sleep(0.02)
    return root


def in_a_new_process(site: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a process that imports the package from ``site`` finds."""
    for name in (PACKAGE, f"{PACKAGE}.inner"):
        sys.modules.pop(name, None)
    facts_installed._installations.clear()
    facts_installed._plain.clear()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(site))
        importlib.import_module(f"{PACKAGE}.inner")
        found = edited_facts()
        assert edited_facts() == found
        assert found.items() <= facts.fixed_facts().items()
    return found


def test_an_edit_of_an_installed_package_is_a_fact(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "site")
    assert in_a_new_process(root.parent, monkeypatch) == {}
    (root / "inner.py").write_text("B = 2\n")
    first = in_a_new_process(root.parent, monkeypatch)
    assert [*first] == [f"sources: {PACKAGE}"]
    (root / "inner.py").write_text("B = 3\n")
    assert in_a_new_process(root.parent, monkeypatch) != first
    (root / "inner.py").write_text("B = 2\n")
    assert in_a_new_process(root.parent, monkeypatch) == first
    (root / "inner.py").write_text(FILES["inner.py"])  # as it was
    assert in_a_new_process(root.parent, monkeypatch) == {}


def test_a_copied_environment_is_the_same(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "site")
    (root / "inner.py").write_text("B = 2\n")
    edited = in_a_new_process(root.parent, monkeypatch)
    shutil.copytree(root.parent, tmp_path / "moved", copy_function=shutil.copy)
    for path in (tmp_path / "moved" / PACKAGE).rglob("*.py"):
        os.utime(path)  # younger than the list, all of them
    assert in_a_new_process(tmp_path / "moved", monkeypatch) == edited


def without_a_list(root: Path) -> None:
    shutil.rmtree(root.parent / f"{PACKAGE}-1.0.dist-info")


def in_a_checkout(root: Path) -> None:
    """As an editable installation: the list is elsewhere."""
    shutil.copytree(root, root.parent / "checkout" / PACKAGE)
    shutil.rmtree(root)
    (root.parent / "editable.pth").write_text(str(root.parent / "checkout"))
    root.parent.joinpath("checkout", PACKAGE).rename(root)
    info = root.parent / f"{PACKAGE}-1.0.dist-info"
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    info.rename(elsewhere / info.name)
    sys.path.append(str(elsewhere))


@pytest.mark.parametrize("change", [without_a_list, in_a_checkout])
def test_a_package_that_was_not_installed_is_known_by_its_sources(
    change: Callable[[Path], None], known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    root = install(tmp_path / "site")
    change(root)
    first = in_a_new_process(root.parent, monkeypatch)
    assert [*first] == [f"sources: {PACKAGE}"]
    (root / "later.py").write_text("C = 2\n")  # not imported yet
    assert in_a_new_process(root.parent, monkeypatch) != first


def test_a_module_that_a_compile_imports_is_looked_at_too(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(root.parent))
    later = str(root / "later.py")
    assert installation_of(PACKAGE).holds(later)
    assert not is_edited(f"{{site}}/{PACKAGE}/later.py", later)
    facts_installed._installations.clear()
    (root / "later.py").write_text("C = 2\n")
    assert is_edited(f"{{site}}/{PACKAGE}/later.py", later)
    assert not is_edited("{site}/another/later.py", later)
