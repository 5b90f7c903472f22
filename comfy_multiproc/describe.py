"""In a worker: import a pack as ComfyUI would, and tell the host what it offers, as data."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import boot, failures, spawning
from .edits import Snapshot
from .interface import Files, encode

METHODS = ("IS_CHANGED", "VALIDATE_INPUTS", "check_lazy_status")
METHODS_V3 = ("fingerprint_inputs", "validate_inputs", "check_lazy_status")


def load(path: Path, module_parent: str = "custom_nodes") -> dict[str, Any]:
    """Import the pack at `path` and describe it: JSON data, see :func:`describe`; or why that cannot be, as ``error`` where it
    cannot be imported and as ``cannot`` where it cannot be described. Never raises, whatever the pack does."""
    before, there = Snapshot(), registered()
    try:
        module, classes = import_pack(path)
    except BaseException as error:      # a KeyboardInterrupt too: here it is the pack's own
        text = failures.text_of(error)
        failures.cut_start(error)
        logging.warning("The import of %s has failed:\n%s", path, "".join(traceback.format_exception(error)).rstrip())
        return {"error": f"{type(error).__name__}: {text}{failures.searched(error)}{_remedy(error, path)}"}
    try:
        said = describe_pack(path, module, classes, there, module_parent)
        said["edits"] += before.changes()
        json.dumps(said)
        return said
    except BaseException as error:
        text = failures.text_of(error)
        logging.warning("Cannot describe %s: %s\n%s", path, text, traceback.format_exc())
        return {"cannot": f"{type(error).__name__}: {text}"}


def _remedy(error: BaseException, path: Path) -> str:
    """How to install what an import has not found, to be said after the error."""
    missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    try:
        if not missing or importlib.util.find_spec(missing) is not None:
            return ""
    except (ImportError, ValueError):
        return ""
    needed = path / "requirements.txt"
    what = f"-r {needed}" if needed.is_file() else missing
    return f"; install what it needs into the environment that it runs in: {sys.executable} -m pip install {what}"


def registered() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[Any]]]:
    """The nodes, front-end folders and model folders that ComfyUI knows now."""
    import folder_paths
    import nodes
    core_nodes()
    return dict(nodes.NODE_CLASS_MAPPINGS), dict(nodes.EXTENSION_WEB_DIRS), folders_of(folder_paths)


def describe_pack(path: Path, module: ModuleType, classes: dict[str, Any], there: tuple[Any, Any, Any], module_parent: str) -> dict[str, Any]:
    """Register the classes of the imported pack, and describe what it has added to what was `there` before. Raises for nonsense."""
    import folder_paths
    import nodes
    mappings, web, folders = there
    # A pack may also have put its classes there by itself.
    direct = {name: cls for name, cls in nodes.NODE_CLASS_MAPPINGS.items() if name not in mappings and name not in classes}
    replaced = [f"node {name} was replaced" for name, cls in mappings.items() if nodes.NODE_CLASS_MAPPINGS.get(name, cls) is not cls]
    for name, cls in classes.items():
        if name not in core_nodes():        # of two packs with one node id the last has it, and none takes ComfyUI's own
            nodes.NODE_CLASS_MAPPINGS[name] = cls
        if getattr(cls, "RELATIVE_PYTHON_MODULE", None) is None:
            cls.RELATIVE_PYTHON_MODULE = f"{module_parent}.{path.name.removesuffix('.py')}"
    types = known_types(nodes)
    boot.restore_functions()    # what ComfyUI undoes is no change
    web_directory = getattr(module, "WEB_DIRECTORY", None)
    return {
        "classes": [describe(name, cls, types) for name, cls in {**classes, **direct}.items()],
        "display_names": {str(k): str(v) for k, v in (getattr(module, "NODE_DISPLAY_NAME_MAPPINGS", None) or {}).items()},
        "v3": not getattr(module, "NODE_CLASS_MAPPINGS", None) and hasattr(module, "comfy_entrypoint"),
        "web_directory": None if web_directory is None else os.fspath(web_directory),
        "web_directories": {name: os.fspath(where) for name, where in nodes.EXTENSION_WEB_DIRS.items() if web.get(name) != where},
        "folders": {name: value for name, value in folders_of(folder_paths).items() if folders.get(name) != value},
        "edits": replaced,
    }


@functools.cache
def core_nodes() -> frozenset[str]:
    """The ids of ComfyUI's own nodes: those that were there when this was asked first, before any pack."""
    import nodes
    return frozenset(nodes.NODE_CLASS_MAPPINGS)


def prestart(path: Path) -> None:
    """Run the pack's ``prestartup_script.py``, if it has one. What goes wrong there is logged, as ComfyUI does it."""
    script = path / "prestartup_script.py"
    if path.is_dir() and script.is_file():
        try:
            run_module(str(script.with_suffix("")), script, register=False)
        except (Exception, SystemExit) as error:
            logging.error("Failed to execute startup-script: %s / %s: %s", script, type(error).__name__, failures.text_of(error))


def import_pack(path: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The pack's module and its node classes by id. The module has the name that ComfyUI would give it."""
    if path.is_dir():
        module = run_module(str(path).replace(".", "_x_"), path / "__init__.py")
    else:
        module = run_module(os.path.splitext(str(path))[0], path)
    mappings = getattr(module, "NODE_CLASS_MAPPINGS", None)
    if mappings is not None:
        return module, dict(mappings)
    if not hasattr(module, "comfy_entrypoint"):
        return module, {}
    return module, asyncio.run(extension_classes(module.comfy_entrypoint))


async def extension_classes(entrypoint: Callable[[], Any]) -> dict[str, Any]:
    extension = entrypoint()
    if inspect.isawaitable(extension):
        extension = await extension
    await extension.on_load()
    return {cls.GET_SCHEMA().node_id: cls for cls in await extension.get_node_list()}


def run_module(name: str, file: Path, register: bool = True) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    if register:
        sys.modules[name] = module
    with spawning.one_process():
        spec.loader.exec_module(module)
    return module


def known_types(nodes: ModuleType) -> set[str]:
    """The type names of all outputs of all nodes."""
    types: set[str] = set()
    for cls in nodes.NODE_CLASS_MAPPINGS.values():
        try:
            types.update(t for t in cls.RETURN_TYPES if type(t) is str)
        except Exception:
            continue
    return types


def folders_of(folder_paths: ModuleType) -> dict[str, list[Any]]:
    return {name: [[os.fspath(path) for path in paths], sorted(extensions)] for name, (paths, extensions) in folder_paths.folder_names_and_paths.items()}


def describe(name: str, cls: Any, types: set[str]) -> dict[str, Any]:
    """A node class as data: its plain attributes, its input types, and which of the methods it has that are asked."""
    v3 = is_v3(cls)
    data: dict[str, Any] = {"id": name, "v3": v3, "class": cls.__qualname__, "module": cls.__module__, "attributes": {}}
    try:
        if v3:
            schema = cls.GET_SCHEMA()
            data["display_name"], data["function"] = schema.display_name, "execute"
            data["async"] = inspect.iscoroutinefunction(cls.execute)
        else:
            data["function"] = str(cls.FUNCTION)
            data["async"] = inspect.iscoroutinefunction(getattr(cls, cls.FUNCTION, None))
        for attribute in dir(cls):
            value = getattr(cls, attribute, None) if attribute.isupper() and not attribute.startswith("_") else None
            if value is not None and attribute not in ("FUNCTION", "SCHEMA", "RELATIVE_PYTHON_MODULE") and not callable(value):
                data["attributes"][attribute] = encode(value, types)
        data["methods"] = methods_of(cls, v3)
    except Exception as error:
        data["error"] = f"{type(error).__name__}: {error}"
    data.update(input_types(cls, types))
    return data


def input_types(cls: Any, types: set[str]) -> dict[str, Any]:
    """What the class says of its inputs now; ``inputs_error`` and its text where it fails."""
    describing.now = True
    try:
        if not is_v3(cls):
            return {"inputs": encode(cls.INPUT_TYPES(), types)}
        return {"inputs": encode(cls.INPUT_TYPES(), types), "info": encode(cls.GET_NODE_INFO_V1(), types)}
    except Exception as error:
        return {"inputs_error": f"{type(error).__name__}: {error}"}
    finally:
        describing.now = False


class Describing(threading.local):
    """Whether this thread is asking a class for its inputs."""
    now = False


describing = Describing()


def remember_file_lists() -> None:
    """From now on, lists of files that classes name as their inputs say which folder they are of. Before packs are imported."""
    import folder_paths
    original = folder_paths.get_filename_list

    @functools.wraps(original)
    def get_filename_list(folder_name: str) -> list[str]:
        files = original(folder_name)
        return Files(files, folder_name) if describing.now else files
    folder_paths.get_filename_list = get_filename_list


def methods_of(cls: Any, v3: bool) -> dict[str, Any]:
    """The methods that ComfyUI asks, with the names of their parameters and whether they take any other."""
    found = {}
    for name in METHODS_V3 if v3 else METHODS:
        if v3:
            from comfy_api.internal import first_real_override
            method = first_real_override(cls, name)
        else:
            method = getattr(cls, name, None)
        if method is not None:
            spec = inspect.getfullargspec(method) if callable(method) else None
            found[name] = {"parameters": spec.args if spec else [], "any": bool(spec and spec.varkw is not None)}
    return found


def is_v3(cls: Any) -> bool:
    from comfy_api.internal import _ComfyNodeInternal
    return isinstance(cls, type) and issubclass(cls, _ComfyNodeInternal)
