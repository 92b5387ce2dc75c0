"""Action records: what a computation was made of, and what came out. Pure values, canonical JSON.

``docs/format.md`` specifies the encoding. A record may come from a shared or a copied store, and
what it holds is executed in the end, so `ActionRecord.parse` believes nothing: every key, size,
digest and type is checked, and the last line is the BLAKE3 of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from cas.digest import DIGEST_SIZE, Digest
from cas.errors import ActionDamaged, CasError, UsageError
from cas.layout import FORMAT
from cas.manifest import Recipe, chunk_sizes, encode_part, parse_part
from cas.strictjson import (
    Json,
    as_digest,
    as_int,
    as_list,
    as_text,
    canonical_json,
    check_json,
    load_json,
    require_keys,
)

#: Facts about an environment and a few digests per weight take tens of KiB.
MAX_RECORD_BYTES: Final = 16 << 20
MAX_RECIPES: Final = 65_536
#: The last line: ``blake3:``, the digest of all before it, a newline.
TRAILER_BYTES: Final = len("blake3:") + 2 * DIGEST_SIZE + 1
_KIND = re.compile(r"[a-z][a-z0-9-]{0,63}")
#: A part of a recipe that names a chunk. Inside of a text the quotes would be escaped.
_CHUNK = re.compile(rb'\["(?:chunk|slice)","([0-9a-f]{64})",([1-9][0-9]{0,8})[,\]]')
_KEYS = (
    "format",
    "key",
    "kind",
    "label",
    "factors",
    "result",
    "recipes",
    "dependencies",
    "microseconds",
    "created",
)

#: Section -> what it says, nested objects allowed; see docs/caching.md for the usual sections.
Factors: TypeAlias = "Mapping[str, Json]"


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """One computation that was done.

    ``key`` is the digest of everything that decides the outcome. ``kind`` says what sort of
    computation it was (``delegate``, ``whole-export``), ``label`` what a person calls it.
    ``factors`` are the parts of the key by section, for explaining a miss; ``dependencies`` what
    the computation was seen to read besides. ``result`` describes the outcome and refers to
    ``recipes`` by their position; those name the chunks. ``microseconds`` is what it took,
    ``created`` when it was recorded, in seconds since the epoch.
    """

    key: Digest
    kind: str
    factors: Factors
    result: Json
    recipes: tuple[Recipe, ...] = ()
    dependencies: Factors = field(default_factory=dict)
    label: str = ""
    microseconds: int = 0
    created: int = 0

    @property
    def seconds(self) -> float:
        """How long the computation took when it was done."""
        return self.microseconds / 1e6

    @property
    def short(self) -> str:
        """The first digits of the key, as `cas explain` accepts it."""
        return self.key.hex()[:12]

    def chunks(self) -> dict[Digest, int]:
        """Each distinct chunk of the result and its size in bytes."""
        return chunk_sizes(self.recipes)

    def encode(self) -> bytes:
        """The record's file: one line of canonical JSON, and one with the digest of the first.

        Raises:
            UsageError: it holds what a record cannot.
        """
        document = {
            "format": FORMAT,
            "key": self.key.hex(),
            "kind": self.kind,
            "label": self.label,
            "factors": check_json(self.factors, "factors"),
            "result": check_json(self.result, "result"),
            "recipes": [[encode_part(part) for part in recipe.parts] for recipe in self.recipes],
            "dependencies": check_json(self.dependencies, "dependencies"),
            "microseconds": self.microseconds,
            "created": self.created,
        }
        body = canonical_json(document) + b"\n"
        data = body + f"{Digest.of(body)}\n".encode()
        _parse(_checked_body(data), self.key)  # never write what a later reader would refuse
        return data

    @classmethod
    def parse(cls, data: bytes, key: Digest) -> ActionRecord:
        """Read what `encode` wrote under ``key``.

        Raises:
            ActionDamaged: it is not exactly that, with the reason.
        """
        try:
            return _parse(_checked_body(data), key)
        except ActionDamaged:
            raise
        except CasError as error:
            raise ActionDamaged(str(key), f"is not valid: {error}") from error


def scan_chunks(data: bytes, key: Digest) -> dict[Digest, int]:
    """At least the chunks of a record, in a fraction of the time that `ActionRecord.parse` takes.

    What else in the record looks like a part of a recipe counts as one: for who keeps what records
    name, and does not use it.

    Raises:
        ActionDamaged: its last line does not confirm the rest.
    """
    try:
        body = _checked_body(data)
    except UsageError as error:
        raise ActionDamaged(str(key), f"is not valid: {error}") from error
    return {Digest(bytes.fromhex(m[1].decode())): int(m[2]) for m in _CHUNK.finditer(body)}


def _checked_body(data: bytes) -> bytes:
    """The first line, if the last one confirms it."""
    if len(data) > MAX_RECORD_BYTES:
        raise UsageError(f"it has more than {MAX_RECORD_BYTES} bytes")
    body, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
    if not body.endswith(b"\n") or trailer != f"{Digest.of(body)}\n".encode():
        raise UsageError("its content does not match the digest in its last line")
    return body


def _parse(body: bytes, key: Digest) -> ActionRecord:
    top = require_keys(load_json(body), _KEYS, "an action record")
    if as_int(top["format"], "format") != FORMAT:
        raise UsageError(f"format {top['format']} is not known (this version reads {FORMAT})")
    if as_digest(top["key"], "the key") != key:
        raise UsageError("it is the record of another action")
    kind = as_text(top["kind"], "the kind")
    if not _KIND.fullmatch(kind):
        raise UsageError("the kind is not lower-case letters, digits and '-'")
    listed = as_list(top["recipes"], "recipes")
    if len(listed) > MAX_RECIPES:
        raise UsageError(f"there are more than {MAX_RECIPES} recipes")
    recipes = tuple(_parse_recipe(value) for value in listed)
    chunk_sizes(recipes)
    return ActionRecord(
        key=key,
        kind=kind,
        factors=_object(top["factors"], "factors"),
        result=check_json(top["result"], "result"),
        recipes=recipes,
        dependencies=_object(top["dependencies"], "dependencies"),
        label=as_text(top["label"], "the label"),
        microseconds=as_int(top["microseconds"], "microseconds"),
        created=as_int(top["created"], "created"),
    )


def _parse_recipe(value: Any) -> Recipe:
    recipe = Recipe(tuple(parse_part(part) for part in as_list(value, "a recipe")))
    as_int(recipe.size, "a recipe's size")
    return recipe


def _object(value: Any, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be an object")
    check_json(value, what)
    return value
