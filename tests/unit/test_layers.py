"""Who may import whom. The arrows of docs/design.md, checked on the syntax tree."""

import ast
import sys
from pathlib import Path

import pytest

from tests.unit.sources import imports

ROOT = Path(__file__).resolve().parents[2]
STANDARD = sys.stdlib_module_names
COMMAND_LINE = {"fork", "testing", "demo", "commands", "doctor.py", "environment.py", "launch.py", "console.py", "__main__.py"}


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py")) if (ROOT / folder).is_dir() else [ROOT / folder]
    return [path for path in found if path.is_file()]


def outside(names: set[str], *allowed: str) -> set[str]:
    return {name for name in names if not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed) and name.partition(".")[0] not in STANDARD}


@pytest.mark.parametrize("path", modules("comfy/process_memory"), ids=lambda path: path.name)
def test_the_interface_stands_alone(path):
    """Neither torch nor comfy.model_management at import, nothing of the runtime ever."""
    assert outside(imports(path, top_level_only=True), "comfy.process_memory") == set()
    assert not {name for name in imports(path) if name.startswith(("comfy_multiproc", "comfy_extras", "multiprocessing"))}


@pytest.mark.parametrize("path", modules("comfy_multiproc/fork"), ids=lambda path: path.name)
def test_the_series_engine_needs_nothing_installed(path):
    assert outside(imports(path), "comfy_multiproc.fork") == set()


@pytest.mark.parametrize("path", [*modules("comfy_multiproc/commands"), ROOT / "comfy_multiproc/__main__.py", ROOT / "comfy_multiproc/environment.py",
                                  ROOT / "comfy_multiproc/launch.py", ROOT / "comfy_multiproc/console.py"], ids=lambda path: path.name)
def test_the_commands_start_on_a_bare_python(path):
    assert outside(imports(path, top_level_only=True), "comfy_multiproc") == set()


@pytest.mark.parametrize("path", [path for path in modules("comfy_multiproc") if not COMMAND_LINE & set(path.relative_to(ROOT).parts)], ids=lambda path: path.name)
def test_the_runtime_knows_neither_engine_nor_tests(path):
    assert not {name for name in imports(path) if name.startswith(("comfy_multiproc.fork", "comfy_multiproc.testing", "comfy_multiproc.commands", "comfy_extras"))}


def test_namespace_packages_stay_namespace_packages():
    assert not (ROOT / "comfy" / "__init__.py").exists() and not (ROOT / "comfy_extras" / "__init__.py").exists()


def test_nothing_from_another_process_is_unpickled_or_evaluated():
    """No pickle, eval or exec in what talks to other processes; multiprocessing's own start is the one exception."""
    for path in [*modules("comfy/process_memory"), *modules("comfy_multiproc")]:
        used = {name.partition(".")[0] for name in imports(path)}
        assert not used & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, path
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)}
        assert not calls & {"eval", "exec", "torch.load"}, path
