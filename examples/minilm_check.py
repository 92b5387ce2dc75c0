"""Runs exported MiniLM programs with ExecuTorch's runtime and compares them with PyTorch.

    python examples/minilm_check.py DIRECTORY...      (each named ...-LENGTH, with a model.pte)

Prints a JSON object: directory name -> largest absolute difference of the sentence vector.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import minilm_model
import torch
from executorch.runtime import Runtime

SENTENCE = "Every weight is stored once."


def main() -> None:
    module = minilm_model.SentenceEncoder().eval()
    errors = {}
    for directory in map(Path, sys.argv[1:]):
        inputs = minilm_model.tokens(SENTENCE, int(directory.name.rpartition("-")[2]))
        with torch.no_grad():
            expected = module(*inputs)
        method = Runtime.get().load_program(directory / "model.pte").load_method("forward")
        (actual,) = method.execute(list(inputs))
        errors[directory.name] = float((actual - expected).abs().max())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
