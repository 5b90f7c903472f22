"""What a worker is told at its start, and how it becomes a ComfyUI process like its host.

The host's options are sent as they were resolved: parsing the command line again would miss what ComfyUI, the allocator
choice and packs have made of it since. They are in place before anything imports torch, because ComfyUI reads most of
them once, at import.
"""
from __future__ import annotations

import enum
import getpass
import importlib
import inspect
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the running ComfyUI: this package lies in it."""

FOLDERS = ("base_path", "models_dir", "output_directory", "temp_directory", "input_directory", "user_directory")
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
OTHER_PYTHON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")
"""Variables of the host's Python that would mislead another one."""


# the host's side

def collect() -> dict[str, Any]:
    """The state of this process that a worker takes over, as JSON. Leaves out what is not loaded."""
    state: dict[str, Any] = {"args": {}, "folders": {}, "paths": {}, "dynamic_vram": False}
    cli_args = sys.modules.get("comfy.cli_args")
    if cli_args is not None:
        for name, value in vars(cli_args.args).items():
            try:
                state["args"][name] = encode(value)
            except TypeError:
                logging.warning("The option %s is not passed on to workers: it is a %s", name, type(value).__name__)
    folder_paths = sys.modules.get("folder_paths")
    if folder_paths is not None:
        state["folders"] = {name: os.fspath(getattr(folder_paths, name)) for name in FOLDERS if hasattr(folder_paths, name)}
        state["paths"] = {str(name): [[os.fspath(p) for p in entry[0]], sorted(map(str, entry[1])), isinstance(entry[1], set)]
                          for name, entry in list(folder_paths.folder_names_and_paths.items())}
    memory = sys.modules.get("comfy.memory_management")
    state["dynamic_vram"] = bool(getattr(memory, "aimdo_enabled", False))
    return state


def encode(value: Any) -> Any:
    """An option's value as JSON. Raises TypeError for what it cannot hold."""
    if value is None or isinstance(value, (bool, int, float)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(name for name, class_ in COLLECTIONS.items() if isinstance(value, class_))
        items = [encode(v) for v in value]
        return {kind: sorted(items, key=json.dumps) if isinstance(value, (set, frozenset)) else items}     # the same in every process
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(type(value).__name__)


def decode(value: Any, enums: object) -> Any:
    """The value again; its enumerations are attributes of `enums`. Raises ValueError."""
    if not isinstance(value, dict):
        return value
    if "enum" in value:
        class_ = getattr(enums, str(value["enum"]), None)
        if not (isinstance(class_, type) and issubclass(class_, enum.Enum)):
            raise ValueError(f"there is no enumeration {value['enum']!r} here")
        return class_[value["name"]]
    (kind, items), = value.items()
    if kind == "dict":
        return {decode(k, enums): decode(v, enums) for k, v in items}
    return COLLECTIONS[kind](decode(v, enums) for v in items)


def search_path(own: bool) -> list[str]:
    """``sys.path`` for a worker: ComfyUI first, then what this process had, without what packs have put there and without
    ``ComfyUI/comfy``, which would hide ``utils``. Not `own`: the worker's Python brings its own, so only ComfyUI."""
    root = str(ROOT)
    if not own:
        return [root]
    folder_paths = sys.modules.get("folder_paths")
    packs = [os.path.realpath(p) for p in folder_paths.get_folder_paths("custom_nodes")] if folder_paths else [str(ROOT / "custom_nodes")]
    result = [root]
    for entry in sys.path:
        real = os.path.realpath(entry or os.getcwd())
        within = any(real == p or real.startswith(p + os.sep) for p in [*packs, str(ROOT / "comfy")])
        if entry and real != os.path.realpath(root) and not within and entry not in result:
            result.append(entry)
    return result


def environment(name: str, python: Path | None, additions: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Environment variables for the worker `name`; None: one that it does not get."""
    result: dict[str, str | None] = {}
    folder = re.sub(r"[^\w.-]", "_", name)
    # Two processes that compile the same kernel into one folder break each other's files; by name, so that it is found again.
    for variable, usual in (("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
                            ("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")):
        result[variable] = str(Path(os.environ.get(variable) or usual) / "workers" / folder)
    if python is not None:
        prefix = python.absolute().parent.parent
        result.update(dict.fromkeys(OTHER_PYTHON))
        result["PATH"] = os.pathsep.join([str(python.absolute().parent), os.environ.get("PATH", os.defpath)])
        result["VIRTUAL_ENV"] = str(prefix)
        # The host's libraries are of other versions than the ones this environment was made with.
        result["LD_LIBRARY_PATH"] = str(prefix / "lib") if os.environ.get("LD_LIBRARY_PATH") else None
    result.update(additions or {})
    return result


def _user() -> str:
    try:
        return re.sub(r"[^\w.-]", "_", getpass.getuser())
    except (OSError, KeyError, ImportError):
        return "user"


# the worker's side

def log_level(state: Mapping[str, Any]) -> int:
    """The level at which the host logs."""
    verbose = state["args"].get("verbose")
    names = re.findall(r"DEBUG|DETAIL|INFO|WARNING|ERROR|CRITICAL", json.dumps(verbose)) if verbose else []
    levels = [15 if n == "DETAIL" else getattr(logging, n) for n in names]
    return min(levels, default=logging.INFO)


def take_path(entries: Iterable[str] | None = None) -> None:
    """Put ComfyUI first on ``sys.path``, and ``ComfyUI/comfy``, which ``nodes`` puts there, behind it."""
    root, inner = str(ROOT), str(ROOT / "comfy")
    rest = [p for p in (sys.path if entries is None else entries) if p not in ("", root)]
    sys.path[:] = [root, *(p for p in rest if p != inner), *([inner] if inner in rest else [])]


def take_options(state: Mapping[str, Any]) -> None:
    """The host's resolved options. Before torch is imported."""
    import comfy.cli_args
    for name, value in state["args"].items():
        try:
            setattr(comfy.cli_args.args, name, decode(value, comfy.cli_args))
        except (ValueError, KeyError) as error:
            logging.warning("The option %s of the host cannot be used here: %s", name, error)


def take_folders(state: Mapping[str, Any]) -> None:
    """The host's folders, with what the command line and packs have made of them."""
    import folder_paths
    for name, value in state["folders"].items():
        if hasattr(folder_paths, name):
            setattr(folder_paths, name, value)
    usual = folder_paths.supported_pt_extensions
    for name, (paths, extensions, is_set) in state["paths"].items():
        known: Any = set(extensions) if is_set else list(extensions)
        # Shared where it is the usual set: packs add to that one and expect to see it everywhere.
        folder_paths.folder_names_and_paths[name] = (list(paths), usual if known == usual else known)


def pager_before_torch(state: Mapping[str, Any]) -> None:
    """The weight pager's first half, where the host uses it: its library has to be loaded before torch."""
    if state["dynamic_vram"]:
        import comfy_aimdo.control
        from comfy.cli_args import args
        reserve = getattr(args, "reserve_vram", None)
        wanted = {"simple_vram_headroom": None if reserve is None else int(reserve * 1024 ** 3),
                  "nvml_pressure": not getattr(args, "disable_nvml_pressure", False)}
        accepted = _parameters(comfy_aimdo.control.init)
        comfy_aimdo.control.init(**{k: v for k, v in wanted.items() if k in accepted})


def pager_after_torch(state: Mapping[str, Any]) -> None:
    """Its second half: the devices. A worker whose pager does not start says so and manages its models without it."""
    if not state["dynamic_vram"]:
        return
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control
    from comfy.cli_args import args
    every = getattr(comfy.model_management, "get_all_torch_devices", lambda: [comfy.model_management.get_torch_device()])
    devices = [d.index or 0 for d in every()]
    control = comfy_aimdo.control
    if hasattr(control, "init_devices"):
        headroom = int(getattr(args, "vram_headroom", 0) * 1024 ** 3)
        try:
            started = control.init_devices([(index, headroom) for index in devices])
        except TypeError:
            started = control.init_devices(devices)     # the releases before the headroom
    else:
        started = control.init_device(devices[0])
    if started:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    else:
        logging.warning("The weight pager that the host uses does not start here: models are loaded without it")


def guard_functions() -> None:
    """Remember the functions that ComfyUI does not let packs replace. Before any node is loaded."""
    if breaker := _hook_breaker():
        breaker.save_functions()


def restore_functions() -> None:
    """Put them back, as the server does it after its packs are loaded and after prompts."""
    if breaker := _hook_breaker():
        breaker.restore_functions()


def _hook_breaker() -> Any:
    try:
        return importlib.import_module("hook_breaker_ac10a0")
    except ImportError:
        return None     # a release that has none


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
