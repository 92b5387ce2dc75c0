"""ExecuTorch's own export scripts under `cas run`, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cas
from cas.verify import verify

ROOT = Path(__file__).resolve().parents[2]
AOT = "executorch.examples.xnnpack.aot_compiler"
LLM = "executorch.extension.llm.export.export_llm"

#: Python runs this first: the example models have random weights.
SEEDED = "import torch\ntorch.manual_seed(0)\n"

#: Both exports as Python runs them, in one process; and the checkpoint that one of them reads.
STOCK = """
import json, os, runpy, sys
import torch

from executorch.examples.models.llama.llama_transformer import construct_transformer
from executorch.examples.models.llama.model_args import ModelArgs

parameters = json.load(open("params.json"))
torch.save(dict(construct_transformer(ModelArgs(**parameters)).state_dict()), "model.pth")
os.mkdir("stock")
os.chdir("stock")
for command in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
"""

PARAMETERS = {
    "dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "multiple_of": 32,
    "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


def environment(directory: Path) -> dict[str, str]:
    site = directory / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SEEDED)
    paths = (str(site), str(ROOT), str(ROOT / "cli"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


def python(*arguments: object, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def llm(directory: Path) -> list[str]:
    return [
        LLM, "base.model_class=llama3", f"base.checkpoint={directory / 'model.pth'}",
        f"base.params={directory / 'params.json'}", "model.use_kv_cache=true",
        "export.max_seq_length=32", "export.max_context_length=32",
        "export.output_name=tiny.pte",
    ]  # fmt: skip


@pytest.mark.slow
def test_executorchs_own_scripts(tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(PARAMETERS))
    commands = [[AOT, "-m", "linear"], llm(tmp_path)]
    stock = python("-c", STOCK, json.dumps(commands), cwd=tmp_path, env=env)
    assert stock.returncode == 0, stock.stderr
    stored = tmp_path / "stored"
    stored.mkdir()
    refs: dict[str, Any] = {}
    for command in commands:
        report = tmp_path / "report.json"
        ran = python(
            "-m", "cas_cli", "--store", tmp_path / "store", "run", "-q", "--report", report, "-m",
            *command, cwd=stored, env=env,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "cas: " not in ran.stderr
        for artifact in json.loads(report.read_text())["artifacts"]:
            refs[artifact["ref"]] = [file["path"] for file in artifact["files"]]
    names = {"linear_xnnpack_fp32": "linear_xnnpack_fp32.pte", "tiny": "tiny.pte"}
    assert refs == {f"{ref}@1": [str(stored / file)] for ref, file in names.items()}
    with cas.Store.open(tmp_path / "store") as store:
        assert verify(store).clean
        for ref, file in names.items():
            (path,) = store.assemble(ref, tmp_path / "again")
            original = (tmp_path / "stock" / file).read_bytes()
            assert (stored / file).read_bytes() == path.read_bytes() == original


ENDINGS = """
import atexit, os, signal, sys, threading
import torch
from executorch.exir import to_edge_transform_and_lower

assert "cas.executorch" not in sys.modules

def save(name):
    with open(name, "wb") as file:
        program.write_to_file(file)

model = torch.nn.Linear(512, 512).eval()
program = to_edge_transform_and_lower(
    torch.export.export(model, (torch.zeros(1, 512),), strict=True)
).to_executorch()
save("first.pte")
child = os.fork()
if not child:
    atexit.register(save, "childs_end.pte")
    save("child.pte")
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
os.mkdir("elsewhere")
os.chdir("elsewhere")
atexit.register(save, "end.pte")
print(sorted(os.listdir("..")))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_a_script_that_forks_moves_and_is_interrupted(tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "script.py").write_text(ENDINGS)
    command = ("-m", "cas_cli", "--store", tmp_path / "store", "run")
    ends = []
    for name, start in (("stock", ()), ("stored", command)):
        (tmp_path / name).mkdir()
        ran = python(*start, tmp_path / "script.py", cwd=tmp_path / name, env=env)
        said = [line for line in ran.stderr.splitlines() if line.startswith("cas: ")]
        trace = ran.stderr[ran.stderr.find("Traceback") :]
        ends.append((ran.returncode, ran.stdout, trace, len(said)))
    assert ends[0] == (*ends[1][:3], 0)
    assert ends[0][0] == -signal.SIGINT
    assert ends[1][3] == 1
    files = sorted(
        path.relative_to(tmp_path / "stock") for path in (tmp_path / "stock").rglob("*.pte")
    )
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "stock" / file).read_bytes() == (tmp_path / "stored" / file).read_bytes()
    with cas.Store.open(tmp_path / "store") as store:
        assert list(store.refs()) == []
        assert verify(store).clean
