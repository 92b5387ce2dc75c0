"""Fuzz the parsers of manifests, refs, headers, configs, leases and names.

    python bench/fuzz.py [--seconds 600] [--seed N] [--corpus DIR] [--keep DIR]

Prints how many inputs each parser took and refused. Whatever raises anything but the library's own
errors, or takes too long or too much memory, is printed and, with ``--keep``, written to a file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from cas import Digest
from cas.testing.fuzzing import MAX_GROWTH, Fuzzer

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--keep", type=Path, help="where to write inputs that went wrong")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="cas-fuzz-") as scratch:
        outcome = Fuzzer(arguments.corpus, Path(scratch), arguments.seed).run(arguments.seconds)
    for name, counts in outcome.counts.items():
        print(
            f"{name:10}{counts.inputs:9} inputs, {counts.accepted:8} accepted, "
            f"{counts.messages:4} kinds of answers, slowest {counts.slowest * 1000:.1f} ms"
        )
    print(f"memory grew by {outcome.grown >> 10} KiB; {len(outcome.findings)} findings")
    for finding in outcome.findings:
        print(f"{finding.target}: {finding.problem}: {finding.data[:200]!r}")
        if arguments.keep is not None:
            name = f"{finding.target}-{Digest.of(finding.data).hex()[:12]}"
            (arguments.keep / name).write_bytes(finding.data)
    return 1 if outcome.findings or outcome.grown > MAX_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
