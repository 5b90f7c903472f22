"""A card of any size on a machine without one, shared by all processes that use it.

In a test, around ComfyUI's own memory manager:

    with virtual_card("400M") as card:
        comfy.model_management.load_models_gpu([stub_patcher(64 << 20)])
        assert card.read().used == 64 << 20

Processes started inside inherit the card. A server gets one from its environment: see `server_environment`.

The Python form takes cpu:0, cpu:1, ... for cards. A tensor there says so by its `device`, is counted in the capacity file
(`capacity.py`), is really copied when it moves to the CPU and back, and must not meet a tensor of another device; what does
not fit raises torch.OutOfMemoryError. What a Python form cannot do, since the type of its devices is "cpu": code that compares
`device.type` itself. The C++ form (form=npu, `../cpp`) has a type of its own and needs no patch to ComfyUI; it takes a compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from comfy_multiproc.testing.card.capacity import CapacityFile, CardReading
from comfy_multiproc.testing.card.settings import FILE_VARIABLE, VARIABLE, CardSettings, parse_bytes

SITE = pathlib.Path(__file__).resolve().parent.parent / "site"     # on PYTHONPATH it arms the card in every Python started there


class VirtualCard:
    """The cards of one capacity file, in use by this process in the Python form."""

    def __init__(self, settings: CardSettings, file: CapacityFile, mm: types.ModuleType):
        import torch

        from comfy_multiproc.testing.card import comfy, identity, modes, npu
        from comfy_multiproc.testing.card.books import Books
        from comfy_multiproc.testing.card.patches import Patches
        self.settings, self.file = settings, file
        self.devices = [torch.device("cpu", i) for i in range(file.cards)]
        self._mm, self._patches, self._books = mm, Patches(), Books(file)
        self._modes = contextlib.ExitStack()
        try:
            comfy.pose(mm, settings, file, npu.interface(file), self._patches)
        except BaseException:
            self._patches.undo()
            raise
        identity.give(self._books, self._patches)
        # A mode belongs to a thread: this one, and every thread that starts from now on, whatever its run() is.
        self._modes.enter_context(modes.on_this_thread(self._books, settings.mixing))
        bootstrap, books = vars(threading.Thread)["_bootstrap_inner"], self._books

        def on_the_card(thread: threading.Thread) -> None:
            with modes.on_this_thread(books, settings.mixing):
                bootstrap(thread)

        self._patches.set(threading.Thread, "_bootstrap_inner", on_the_card)

    @property
    def path(self) -> str:
        """The capacity file."""
        return self.file.path

    @property
    def device(self) -> Any:
        """The first card, a torch.device."""
        return self.devices[0]

    def read(self, card: int = 0) -> CardReading:
        """Who holds what on a card, in bytes, over all processes."""
        return self.file.read(card)

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use the same cards."""
        return server_environment(self.settings, self.path)

    def close(self) -> None:
        """Take the card out of this process: call on the thread that made it. Nothing is unloaded: ComfyUI's list is emptied."""
        self._modes.close()
        del self._mm.current_loaded_models[:]
        self._patches.undo()
        self._books.close()


@contextlib.contextmanager
def virtual_card(size: str | int, *, path: str | os.PathLike[str] | None = None, **settings: Any) -> Iterator[VirtualCard]:
    """The Python form for the time of a block, in this thread, in threads and processes started inside.

    `size` in bytes or as `400M`; `path`: a capacity file to share or to make; the rest as in CardSettings. ComfyUI's tree must
    be on sys.path. Raises RuntimeError if ComfyUI has been imported for a real card.
    """
    chosen = CardSettings(size=parse_bytes(size) if isinstance(size, str) else size, **settings)
    if chosen.form != "python":
        raise ValueError("virtual_card(): the C++ form cannot be taken back; start a process with server_environment() instead")
    if "comfy.model_management" not in sys.modules:
        import comfy.cli_args
        comfy.cli_args.args.cpu = True
    import comfy.model_management as mm
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="virtual-card-"))
        file = _open(chosen, path or os.path.join(folder, "card"))
        card = VirtualCard(chosen, file, mm)
        stack.callback(card.close)
        stack.enter_context(_environment(card.environment()))
        yield card


def server_environment(settings: CardSettings, path: str | os.PathLike[str] | None = None, *,
                       tree: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Environment variables that give a Python process, ComfyUI's server above all, a virtual card.

    `path`: the capacity file, made if it is not there; without one the process makes its own and shares it with its children.
    `tree`: the ComfyUI it will run; one that has this package is armed with its own copy.
    The Python form also needs the argument --cpu; the C++ form needs --disable-dynamic-vram and a compiler at the first use.
    """
    site = SITE
    if tree is not None and (own := pathlib.Path(tree).resolve() / "comfy_multiproc" / "testing" / "site").is_dir():
        site = own
    others = (p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SITE))
    paths = [str(site), *others]
    environment = {VARIABLE: settings.text(), "PYTHONPATH": os.pathsep.join(paths)}
    if path is not None:
        environment[FILE_VARIABLE] = os.path.abspath(path)
    return environment


def install() -> None:
    """Arm what the environment asks for; without COMFY_VIRTUAL_CARD nothing happens. Call before ComfyUI is imported.

    Raises ValueError for settings that cannot be read, CardError for a file that cannot be used.
    """
    text = os.environ.get(VARIABLE)
    if not text or any(isinstance(f, _AfterImport) for f in sys.meta_path):
        return
    settings = CardSettings.parse(text)
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        folder = tempfile.TemporaryDirectory(prefix="virtual-card-")
        atexit.register(folder.cleanup)
        path = os.environ[FILE_VARIABLE] = os.path.join(folder.name, "card")
    file = _open(settings, path)
    if settings.form == "python":
        _AfterImport.add("comfy.model_management", lambda mm: _FOR_GOOD.append(VirtualCard(settings, file, mm)))
    else:
        from comfy_multiproc.testing.cpp import torch_npu
        torch_npu.install(file)
        _AfterImport.add("comfy.model_management", lambda mm: torch_npu.figures(mm, settings))


_FOR_GOOD: list[VirtualCard] = []       # cards from the environment stay until the process ends


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module once it has been imported."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], object]):
        self.name, self.then = name, then

    @classmethod
    def add(cls, name: str, then: Callable[[types.ModuleType], object]) -> None:
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, cls(name, then))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module       # type: ignore[method-assign]
        return spec


def _open(settings: CardSettings, path: str | os.PathLike[str]) -> CapacityFile:
    if os.path.exists(path):
        return CapacityFile(path)
    return CapacityFile.create(path, [settings.size] * settings.count, context=settings.context, keep_freed=settings.keep_freed)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
