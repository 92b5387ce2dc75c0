"""Hooks: deep copies of exported programs, and of weights that several partitions share.

ExecuTorch copies a program for each backend, for each partition, for an ETRecord and in some
transforms, so that a backend may change its copy. This hook keeps that isolation and drops the
memory: it decides, before the stock copy runs, what the large tensors become, and leaves all else
(graph, aliases, small tensors, subclasses, attributes) to the stock code by way of its memo.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram

from cas.executorch.copies import PrivateCopies
from cas.executorch.patches import Patches
from cas.executorch.seams import DUPLICATES
from cas.torch.streaming import is_plain

Memo: TypeAlias = "dict[Any, Any]"


def install(patches: Patches, copies: PrivateCopies) -> None:
    # torch 2.13 defines no such method; one that a later torch defines is called, not replaced.
    original = vars(ExportedProgram).get("__deepcopy__")

    def deepcopy(self: ExportedProgram, memo: Memo) -> Any:
        if patches.active():
            seed_memo(self, memo, copies)
        return _reconstruct(self, memo) if original is None else original(self, memo)

    patches.set(ExportedProgram, "__deepcopy__", deepcopy)
    # A weight that a delegate and somebody else use is copied with `copy.deepcopy`, once per user.
    patches.set(importlib.import_module(DUPLICATES), "copy", _Copy(patches, copies))


class _Copy:
    """The standard module, except that ``deepcopy`` makes private mapped copies of tensors."""

    def __init__(self, patches: Patches, copies: PrivateCopies) -> None:
        self._patches = patches
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(copy, name)

    def deepcopy(self, value: Any, memo: Memo | None = None) -> Any:
        if isinstance(value, torch.Tensor) and self._patches.active():
            memo = {} if memo is None else memo
            seed_tensor(value, memo, self._copies)
        return copy.deepcopy(value, memo)


def seed_memo(program: ExportedProgram, memo: Memo, copies: PrivateCopies) -> None:
    """Enter private copies of the program's large tensors into a deepcopy's memo.

    The two kinds follow what torch's own ``__deepcopy__`` does with them. A parameter is cloned by
    itself, so a view of a large storage becomes a compact tensor. Any other tensor has its whole
    storage copied once for all tensors that share it, so aliases stay aliases.
    """
    for tensor in _tensors(program):
        seed_tensor(tensor, memo, copies)


def seed_tensor(tensor: torch.Tensor, memo: Memo, copies: PrivateCopies) -> None:
    # CudaBackend in its low-memory mode enters the tensors themselves: its copy shares them.
    if id(tensor) in memo or not is_plain(tensor) or not tensor.is_leaf:
        return
    if isinstance(tensor, torch.nn.Parameter):
        _seed_parameter(tensor, memo, copies)
    else:
        _seed_storage(tensor, memo, copies)


def _seed_parameter(parameter: torch.nn.Parameter, memo: Memo, copies: PrivateCopies) -> None:
    if type(parameter).__deepcopy__ is not torch.nn.Parameter.__deepcopy__:
        return
    private = copies.of_tensor(parameter.detach())
    if private is not None:
        memo[id(parameter)] = type(parameter)(private, parameter.requires_grad)


def _seed_storage(tensor: torch.Tensor, memo: Memo, copies: PrivateCopies) -> None:
    storage = tensor.untyped_storage()
    # Where `UntypedStorage.__deepcopy__` looks, and under which key.
    copied = memo.setdefault("torch", {})
    if storage._cdata in copied:
        return
    private = copies.of_storage(storage)
    if private is not None:
        copied[storage._cdata] = private


def _tensors(program: ExportedProgram) -> Iterator[torch.Tensor]:
    for values in (program.state_dict, program.constants):
        for value in values.values():
            if isinstance(value, torch.Tensor):
                yield value


def _reconstruct(program: ExportedProgram, memo: Memo) -> ExportedProgram:
    """What `copy.deepcopy` does with an object that has no ``__deepcopy__``."""
    reduced: tuple[Any, ...] = tuple(program.__reduce_ex__(4))
    function, args, state = reduced[:3]
    duplicate: ExportedProgram = function(*args)
    memo[id(program)] = duplicate
    duplicate.__dict__.update(copy.deepcopy(state, memo))
    return duplicate
