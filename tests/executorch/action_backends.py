"""Backends for tests of actions: well-behaved ones, and some that hide what they depend on."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar, final

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult

#: The backends that compiled something, in order.
COMPILED: list[str] = []
#: What `ReadsHidden` obeys.
HIDDEN = {"value": b"one"}
#: What `ReadsGlobal` and `ReadsClass` obey.
SETTINGS = {"value": b"one"}


def _out_of_sight(name: str) -> Any:
    """A global value that no code names, so that no key depends on it."""
    return vars(sys.modules[__name__])[name]


def _note(backend: str) -> None:
    _out_of_sight("COMPILED").append(backend)


def _named(program: Any, specs: Any, prefix: str = "") -> NamedDataStore:
    store = NamedDataStore()
    for name, tensor in program.state_dict.items():
        key = prefix + name
        store.add_named_data(key, tensor.detach().contiguous().numpy().tobytes(), 16)
        store.add_named_data(f"{key} as a tensor", tensor.detach(), 32, external_tag="ext")
    for spec in specs:
        store.add_named_data(f"option {spec.key}", bytes(spec.value))
    return store


@final
class Plain(BackendDetails):
    """A blob, named data in both places, and a debug handle map."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Plain")
        handles = {0: (1, 2), 7: (3,)}
        output = _named(edge_program, compile_specs).get_named_data_store_output()
        return PreprocessResult(b"blob" * 3000, handles, output)


@final
class Together(BackendDetails):
    """Compiles all methods at once; its results share one store of named data."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        raise NotImplementedError

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        _note("Together")
        store, results = NamedDataStore(), {}
        for method, programs in edge_programs.items():
            for n, program in enumerate(programs):
                own = _named(program, compile_specs[method][n], f"{method} {n} ")
                store.merge_named_data_store(own.get_named_data_store_output())
        output = store.get_named_data_store_output()
        for method, programs in edge_programs.items():
            blobs = [f"{method} {n}".encode() for n in range(len(programs))]
            results[method] = [PreprocessResult(blob, {"a": [1]}, output) for blob in blobs]
        return results


@final
class LiveObjects(BackendDetails):
    """Hands over something that cannot be kept."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("LiveObjects")
        return PreprocessResult(b"blob", _delegate_info_meta=object())


@final
class ReadsVariable(BackendDetails):
    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("ReadsVariable")
        return PreprocessResult(os.environ.get("SECRET_OF_THE_BACKEND", "none").encode())


@final
class ReadsFile(BackendDetails):
    """The option says which file, and the key knows nothing of what is in it."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("ReadsFile")
        return PreprocessResult(Path(compile_specs[0].value.decode()).read_bytes())


@final
class ReadsHidden(BackendDetails):
    """Nothing can observe this one."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("ReadsHidden")
        return PreprocessResult(_out_of_sight("HIDDEN")["value"])


@final
class ReadsGlobal(BackendDetails):
    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("ReadsGlobal")
        return PreprocessResult(SETTINGS["value"])


@final
class ReadsClass(BackendDetails):
    """Obeys a list that a program may change."""

    WORDS: ClassVar[list[bytes]] = [b"one"]

    @classmethod
    def preprocess(cls, edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("ReadsClass")
        return PreprocessResult(b" ".join(cls.WORDS))


@final
class Remembers(BackendDetails):
    """Makes something else each time."""

    TIMES: ClassVar[list[int]] = []

    @classmethod
    def preprocess(cls, edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Remembers")
        cls.TIMES.append(1)
        return PreprocessResult(b"%d" % len(cls.TIMES))


@final
class Opaque(BackendDetails):
    """Refers to something that has no content to go by."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Opaque")
        with _LOCK:
            return PreprocessResult(b"blob")


_LOCK = threading.Lock()


@final
class Looks(BackendDetails):
    """The option says for which file, or for which variable in a copy of the environment."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Looks")
        name = compile_specs[0].value.decode()
        found = Path(name).exists() if "/" in name else dict(os.environ).get(name)
        return PreprocessResult(repr(found).encode())


@final
class SetsVariable(BackendDetails):
    """Changes a declared variable while it compiles, as the CUDA backend does."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("SetsVariable")
        os.environ["TORCH_TEST_OF_ACTIONS"] = "set by the compile"
        return PreprocessResult(b"blob")


@final
class Connects(BackendDetails):
    """Asks another machine; there is none at this address, which is for documentation."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Connects")
        with socket.socket() as connection:
            connection.settimeout(0.001)
            connection.connect_ex(("192.0.2.1", 9))
        return PreprocessResult(b"blob")


@final
class FailsSecond(BackendDetails):
    """Compiles one program, and not the next one while ``HIDDEN`` says so."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        if _out_of_sight("COMPILED") and _out_of_sight("HIDDEN")["value"] == b"fail":
            raise RuntimeError("this operator is not supported")
        _note("FailsSecond")
        return PreprocessResult(b"blob")


@final
class Changes(BackendDetails):
    """Changes the weights of its copy, out of sight of the version counter."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        _note("Changes")
        for tensor in edge_program.state_dict.values():
            tensor.data.mul_(2.0)
        output = _named(edge_program, compile_specs).get_named_data_store_output()
        return PreprocessResult(b"blob", None, output)
