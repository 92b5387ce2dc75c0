"""An ExecuTorch that is not as expected is refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
from executorch import version
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.emit import _emitter

import cas
from cas.errors import Refused
from cas.executorch import SUPPORTED_VERSIONS, SeamMismatch, UnsupportedVersion, capture, seams
from cas.executorch.patches import Patches


def test_this_installation_is_supported() -> None:
    assert seams.check_version().split("+")[0] in SUPPORTED_VERSIONS
    seams.check_seams()


@pytest.mark.parametrize("found", ["1.4.1", "1.6.0+cpu", "2.0.0a0", "1.5.10"])
def test_another_version_is_refused(
    found: str, store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = NamedDataStore.add_named_data
    monkeypatch.setattr(version, "__version__", found)
    with pytest.raises(UnsupportedVersion) as caught:
        capture(store).__enter__()
    assert isinstance(caught.value, Refused)
    assert caught.value.found == found
    assert caught.value.supported == SUPPORTED_VERSIONS
    assert found in str(caught.value)
    assert SUPPORTED_VERSIONS[-1] in str(caught.value)
    assert NamedDataStore.add_named_data is before


def test_another_torch_is_refused(store: cas.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.torch, "__version__", "2.14.0")
    with pytest.raises(UnsupportedVersion, match=r"supports torch 2\.13\.\*, found 2\.14\.0"):
        capture(store).__enter__()


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name)
def test_a_missing_seam_is_refused_by_name(
    seam: seams.Seam, store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = seams.Seam(seam.name, seam.module, seam.path + "_gone", seam.parameters)
    monkeypatch.setattr(seams, "check_seams", lambda: _check([broken]))
    with pytest.raises(SeamMismatch) as caught:
        capture(store).__enter__()
    assert caught.value.seam == seam.name
    assert seam.name in str(caught.value)
    assert version.__version__ in str(caught.value) or "torch 2" in str(caught.value)


_check = seams.check_seams


def test_a_changed_signature_is_refused(store: cas.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_named_data(self: Any, key: str, blob: bytes) -> None: ...

    monkeypatch.setattr(NamedDataStore, "add_named_data", add_named_data)
    with pytest.raises(SeamMismatch, match=r"'named data'.*key, blob"):
        capture(store).__enter__()
    assert NamedDataStore.add_named_data is add_named_data


def test_a_removed_function_is_refused(store: cas.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_emitter._Emitter, "_save_new_const_tensor")
    with pytest.raises(SeamMismatch, match="emitted constants"):
        capture(store).__enter__()


def test_an_optional_module_may_be_missing() -> None:
    seam = seams.Seam("x", "executorch.backends.no_such_backend", "thing", optional=True)
    assert seams.resolve(seam) is None
    with pytest.raises(SeamMismatch, match="cannot be imported"):
        seams.resolve(seams.Seam("x", "executorch.backends.no_such_backend", "thing"))


class Base:
    value = "base"

    @property
    def prop(self) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 2


class Derived(Base):
    pass


def test_patches_put_descriptors_and_absence_back() -> None:
    prop, static = vars(Base)["prop"], vars(Base)["static"]
    patches = Patches()
    patches.set(Base, "prop", property(lambda self: 10))
    patches.set(Base, "static", staticmethod(lambda: 20))
    patches.set(Derived, "value", "derived")
    patches.set(Derived, "value", "twice")
    assert (Base().prop, Base.static(), Derived.value, len(patches)) == (10, 20, "twice", 4)
    patches.undo()
    assert vars(Base)["prop"] is prop
    assert vars(Base)["static"] is static
    assert "value" not in vars(Derived)
    assert len(patches) == 0
