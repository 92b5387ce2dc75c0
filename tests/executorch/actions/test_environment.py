"""Facts about the environment, and where their sources lie."""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from action_backends import Plain
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

from cas.executorch.actions import aoti, backends, facts, places, sources
from cas.executorch.actions.errors import Unkeyable

# --- facts --------------------------------------------------------------------------------------


def all_facts(backend: type) -> dict[str, str]:
    return {
        **facts.fixed_facts(),
        **backends.fixed_facts(backend),
        **backends.ambient_facts(backend),
    }


@pytest.mark.parametrize("backend", [XnnpackBackend, Plain])
def test_no_fact_names_a_path_a_user_or_a_time(backend: type) -> None:
    found = all_facts(backend)
    assert "version: torch" in found
    for name, value in found.items():
        if name.startswith("variable: "):
            continue  # what a user sets may be anything; a path is shown as a digest, see below
        assert not places.names_a_path(value), (name, value)
        assert sys.prefix not in value and str(Path.home()) not in value
        assert not re.search(r"20\d\d-\d\d|\d\d:\d\d:\d\d| at 0x", value), (name, value)


def test_variables_that_count_and_variables_that_do_not() -> None:
    def with_variables(**values: str) -> dict[str, str]:
        return facts.ambient_facts({"PATH": "/bin", **values})

    base = with_variables()
    assert with_variables(HOME="/home/a", USER="a", PYTHONHASHSEED="1", MY_OWN="x") == base
    assert with_variables(TORCH_LOGS="+dynamo", TORCHINDUCTOR_CACHE_DIR="/tmp/b") == base
    for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "ET_CUDA_TARGET_SMEM_BYTES", "CFLAGS", "CUDA_HOME"):
        one, other = with_variables(**{name: "1"}), with_variables(**{name: "2"})
        assert base != one != other != base


def test_a_path_in_a_variable_is_shown_as_a_digest_and_one_of_the_installation_as_that() -> None:
    shown = facts.shown("/home/somebody/include")
    assert shown.startswith("blake3:")
    assert shown != facts.shown("/home/another/include")
    tool = str(Path(places.roots()[0][1]) / "nvidia" / "ptxas")
    assert facts.shown(tool) == f"{places.roots()[0][0]}/nvidia/ptxas"


def test_settings_of_torch_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.ambient_facts({})
    torch.set_default_dtype(torch.float64)
    try:
        assert facts.ambient_facts({}) != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert facts.ambient_facts({}) == before


def test_a_replaced_method_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    before = backends.ambient_facts(Plain)["backend: code"]
    assert backends.ambient_facts(Plain)["backend: code"] == before
    real = Plain.preprocess
    for number in (1, 2):
        replaced = staticmethod(lambda p, s, number=number: (number, real(p, s)))
        monkeypatch.setattr(Plain, "preprocess", replaced)
        found = backends.ambient_facts(Plain)["backend: code"]
        assert found != before
        before = found


SCALE = 1


def lowering(x: Any) -> Any:
    return x, SCALE


def test_a_lowering_of_the_users_is_a_fact_with_what_it_refers_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = types.SimpleNamespace(lowerings={"torch's": torch.relu})
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", registry)
    found = [aoti._foreign_lowerings()]
    registry.lowerings["the user's"] = functools.wraps(torch.nn.functional.relu)(lowering)
    del registry.lowerings["the user's"].__wrapped__
    found.append(aoti._foreign_lowerings())
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2)
    found.append(aoti._foreign_lowerings())
    assert found[0] == "none" and len(set(found)) == 3


# --- sources ------------------------------------------------------------------------------------


def test_a_tree_is_known_by_names_and_contents_and_not_by_its_place(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "inner" / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("a = 1\n")
        (tmp_path / name / "inner" / "b.fbs").write_text("b\n")
        (tmp_path / name / "inner" / "__pycache__" / "a.pyc").write_text(name)
    here = sources.tree_digest(tmp_path / "here")
    assert here == sources.tree_digest(tmp_path / "there")
    (tmp_path / "there" / "inner" / "b.fbs").write_text("c\n")
    assert here != sources.tree_digest(tmp_path / "there")
    (tmp_path / "here" / "a.py").rename(tmp_path / "here" / "c.py")
    assert here != sources.tree_digest(tmp_path / "here")


def test_a_module_is_known_with_the_modules_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cas_test_helper.py").write_text("def value(): return 1\n")
    (tmp_path / "cas_test_user.py").write_text("from cas_test_helper import value\nimport torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("cas_test_user")
    first = sources.module_digest("cas_test_user")
    assert first == sources.module_digest("cas_test_user")
    (tmp_path / "cas_test_helper.py").write_text("def value(): return 23\n")
    assert sources.module_digest("cas_test_user") != first
    for name in ("cas_test_user", "cas_test_helper"):
        del sys.modules[name]


def test_a_module_without_a_file_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typed_in", types.ModuleType("typed_in"))
    with pytest.raises(Unkeyable, match="no source file"):
        sources.module_digest("typed_in")


# --- places -------------------------------------------------------------------------------------


def test_a_path_of_the_installation_is_found_again() -> None:
    for path in (torch.__file__, os.__file__):
        name = places.portable(path)
        assert name.startswith("{") and sys.prefix not in name
        assert os.path.samefile(places.local(name), path)
    assert places.portable("/etc/hostname") == os.path.realpath("/etc/hostname")
    assert places.local("{site}/no/such/file") == "{site}/no/such/file"
