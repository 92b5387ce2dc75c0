"""The parsers of a store's files refuse or accept; nothing else ever comes out of them.

``bench/fuzz.py`` does this for as long as you like; inputs that it once found live in ``corpus/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cas.testing.fuzzing import MAX_GROWTH, Fuzzer

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("seconds", [5.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_mutated_files_bring_out_only_the_library_s_own_errors(
    tmp_path: Path, seconds: float, seed: int
) -> None:
    outcome = Fuzzer(CORPUS, tmp_path, seed).run(seconds)
    assert not outcome.findings
    assert outcome.grown < MAX_GROWTH
    for name, counts in outcome.counts.items():
        assert counts.inputs > 50, f"hardly anything was tried on {name}: {counts}"
        assert counts.accepted and counts.messages, f"only one answer of {name}: {counts}"
