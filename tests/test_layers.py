"""What may import what, and what an import may cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "executorch", "torchao", "numpy", "transformers")


def python(*arguments: str) -> str:
    """Run the interpreter on the source tree and return its stdout."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code: str) -> set[str]:
    tail = (
        "import json, sys; print(file=sys.stderr)\n"
        "print(json.dumps([*sys.modules]), file=sys.stderr)"
    )
    script = f"{code}\n{tail}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_import_contracts_hold() -> None:
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}
    done = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_of_the_library_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = {c["id"]: c for c in settings["tool"]["importlinter"]["contracts"]}
    layered = {name.strip() for line in contracts["layers"]["layers"] for name in line.split("|")}
    modules = {
        f"cas.{path.stem}"
        for path in (ROOT / "cas").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert modules - {"cas.__init__"} == layered - {"cas_cli"}


def test_importing_the_library_loads_no_framework_and_no_user_interface() -> None:
    loaded = top_level(modules_after("import cas"))
    assert loaded.isdisjoint({*HEAVY, "click", "rich", "platformdirs", "cas_cli"})


def test_version_needs_neither_the_library_nor_a_renderer() -> None:
    code = (
        "import sys; sys.argv = ['cas', '--version']\n"
        "from cas_cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code in (0, None)"
    )
    modules = modules_after(code)
    unwanted = {*HEAVY, "cas", "rich", "lmdb", "blake3", "asyncio", "importlib.metadata"}
    assert not modules & unwanted
    assert len(modules) < 180, sorted(modules)


@pytest.mark.parametrize(
    "command",
    [["ls"], ["stats"], ["gc", "--dry-run"], ["verify"], ["config"], ["export", "--help"]],
    ids=" ".join,
)
def test_commands_other_than_export_load_no_framework(command: list[str], tmp_path: Path) -> None:
    code = (
        f"import cas, sys; cas.Store.open({str(tmp_path / 'store')!r}).close()\n"
        f"sys.argv = ['cas', '--store', {str(tmp_path / 'store')!r}, *{command!r}]\n"
        "from cas_cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code in (0, None), done.code"
    )
    assert top_level(modules_after(code)).isdisjoint(HEAVY)


def test_one_version_everywhere() -> None:
    shown = python("-m", "cas_cli", "--version").strip()
    assert shown == "cas " + python("-c", "import cas; print(cas.__version__)").strip()
