"""A C++ compiler that remembers: the same command on the same sources gives the same output.

Compiling is nearly all that an AOTInductor export costs, and the tests export each model twice. Put
in the place of the compiler as ``python cxx_cache.py CACHE g++ ARGUMENTS...``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

SOURCES = (".cpp", ".S", ".o", ".h")

#: Inductor appends its commands to a source, as a comment, when it has compiled it.
APPENDIX = b"\n// Compile cmd\n"


def output_of(arguments: list[str]) -> str | None:
    return arguments[arguments.index("-o") + 1] if "-o" in arguments[:-1] else None


def key_of(arguments: list[str]) -> str:
    digest = hashlib.sha256()
    output = output_of(arguments)
    for argument in arguments:
        digest.update(argument.encode() + b"\0")
        if argument != output and argument.endswith(SOURCES) and os.path.isfile(argument):
            with open(argument, "rb") as file:
                source = file.read().partition(APPENDIX)[0]
            digest.update(hashlib.sha256(source).digest())
    return digest.hexdigest()


def main(cache: str, command: list[str]) -> int:
    output = output_of(command)
    if output is None or not output.endswith((".o", ".so")):  # precompiled headers are huge
        return subprocess.call(command)
    kept = os.path.join(cache, key_of(command))
    if os.path.exists(kept):
        shutil.copyfile(kept, output)
        return 0
    code = subprocess.call(command)
    if code == 0:
        shutil.copyfile(output, kept)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
