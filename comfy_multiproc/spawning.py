"""Starting a process from a running ComfyUI server without running ``main.py`` again, and ending one with all its children.

`multiprocessing` tells a spawned process to import the parent's main module, hands it the parent's ``sys.path`` as packs
have left it, and settles the start method of the whole process on the way. Ours gets none of that.
"""
from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.process
import multiprocessing.reduction
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TOKEN = "COMFY_MULTIPROC_WORKER"
"""The environment variable that names the worker a process belongs to, for itself and for whatever it starts."""

_starting = threading.Lock()


def context() -> Any:
    """The spawn context that `torch.multiprocessing` hands out.

    It is the standard library's own, with torch's types registered; torch is not loaded for it, because ComfyUI has to set up
    devices before torch is imported.
    """
    torch = sys.modules.get("torch")
    source = getattr(torch, "multiprocessing", multiprocessing)
    return source.get_context("spawn")


def start(target: Callable[..., None], args: Sequence[Any], *, name: str, path: Sequence[str], python: Path | None = None,
          environment: Mapping[str, str | None] | None = None) -> BaseProcess:
    """Spawn a process that calls `target(*args)`; any thread.

    path: its ``sys.path``, with another `python` only what comes before that one's own. environment: variables that it gets
    besides those of this process, None for one that it does not get; they are there before its libraries are loaded.
    Raises OSError when it cannot be started.
    """
    if python is not None and not os.access(python, os.X_OK):
        raise FileNotFoundError(errno.ENOENT, f"{name} cannot be started: there is no Python that can be run", os.fspath(python))
    if os.name == "posix":
        # Started along with the process otherwise, with that one's environment.
        multiprocessing.resource_tracker.ensure_running()
    process = context().Process(target=target, args=tuple(args), name=name)
    additions = dict(environment or {})
    if python is not None:
        additions["PYTHONPATH"] = os.pathsep.join(path)
        if os.name == "nt" and (base := base_of(python)) is not None:
            # Its own is a launcher, and the worker would be the launcher's child.
            additions["__PYVENV_LAUNCHER__"], python = os.fspath(python), base
    with _starting, _preparation(None if python else list(path), python, additions), _environment(additions if os.name == "nt" else {}), \
            _no_interrupt():
        process.start()
    return process


def base_of(python: Path) -> Path | None:
    """The Python that the virtual environment of `python` was made with; None where that is no virtual environment."""
    try:
        lines = (python.parent.parent / "pyvenv.cfg").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return None
    home = next((value.strip() for key, _, value in (line.partition("=") for line in lines) if key.strip().lower() == "home"), None)
    base = Path(home) / python.name if home else None
    return base if base is not None and base.is_file() else None


class Inherited:
    """A descriptor for a process that is being spawned, given among its arguments; there, `take` gives it."""

    def __init__(self, fd: int):
        self._fd: Any = fd

    def __reduce__(self) -> Any:
        if os.name == "posix":
            return Inherited, (multiprocessing.reduction.DupFd(self._fd),)
        import msvcrt
        write = 0x40000000
        return Inherited, (multiprocessing.reduction.DupHandle(msvcrt.get_osfhandle(self._fd), write),)     # type: ignore[attr-defined, unused-ignore]

    def take(self) -> int:
        handle = self._fd.detach()
        if os.name == "posix":
            return handle
        import msvcrt
        return msvcrt.open_osfhandle(handle, os.O_WRONLY)     # type: ignore[attr-defined, unused-ignore]


@contextmanager
def _preparation(path: list[str] | None, python: Path | None, additions: Mapping[str, str | None]) -> Iterator[None]:
    """What `multiprocessing.spawn` answers while it starts a process on this thread; other threads get its own answers."""
    module: Any = multiprocessing.spawn
    util: Any = multiprocessing.util
    here = threading.get_ident()
    own_data, own_python, own_line = module.get_preparation_data, module.get_executable, module.get_command_line
    own_spawn: Any = getattr(util, "spawnv_passfds", None)

    def get_preparation_data(name: str) -> dict[str, Any]:
        if threading.get_ident() != here:
            return own_data(name)
        data: dict[str, Any] = {
            "log_to_stderr": False,
            "authkey": multiprocessing.process.current_process().authkey,
            "name": name,
            "sys_argv": list(sys.argv),
            "orig_dir": getattr(multiprocessing.process, "ORIGINAL_DIR", None),
            "dir": os.getcwd(),
        }
        if path is not None:
            data["sys_path"] = path
        return data

    def get_executable() -> Any:
        if python is None or threading.get_ident() != here:
            return own_python()
        return os.fsencode(python) if os.name == "posix" else os.fspath(python)

    def get_command_line(**kwds: Any) -> list[Any]:
        line = own_line(**kwds)
        return [os.fspath(python), *line[1:]] if python and threading.get_ident() == here else line

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> int:
        if threading.get_ident() != here:
            return own_spawn(path, args, passfds)
        # With an environment of its own: what other threads start at this moment is not the worker's.
        environment = {key: value for key, value in {**os.environ, **additions}.items() if value is not None}
        process = subprocess.Popen(args, executable=path, env=environment, pass_fds=passfds)
        process.returncode = 0      # it is multiprocessing that waits for it
        return process.pid

    util.spawnv_passfds = spawnv_passfds
    module.get_preparation_data = get_preparation_data
    module.get_executable, module.get_command_line = get_executable, get_command_line
    try:
        yield
    finally:
        module.get_preparation_data, module.get_executable, module.get_command_line = own_data, own_python, own_line
        util.spawnv_passfds = own_spawn


@contextmanager
def _environment(additions: Mapping[str, str | None]) -> Iterator[None]:
    """Where a process cannot be given an environment: that of this one at the moment. The loader reads it before any code runs."""
    before = {key: os.environ.get(key) for key in additions}
    try:
        _set(additions)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """A Ctrl-C that comes between here and the process's own session would make it print a traceback."""
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_session() -> None:
    """Called first in a spawned process: a session of its own, and no notice taken of Ctrl-C."""
    if os.name == "posix":
        try:
            os.setsid()
        except PermissionError:
            pass    # it has one
        # A function rather than SIG_IGN, which programs that nodes start would inherit.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def one_process() -> Iterator[None]:
    """What a pack's code forks within, and forgets to end, ends here instead of going on as a second one of this process."""
    pid, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        code = 1
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        elif os.getpid() != pid:
            traceback.print_exception(error)
        raise
    finally:
        if os.getpid() != pid:
            os._exit(code & 255)


def keep_from_forks(fd: int) -> None:
    """What this process forks gets the null device in place of the descriptor, so that two never write to one end of a link."""
    if hasattr(os, "register_at_fork"):
        null = os.open(os.devnull, os.O_RDWR)
        os.register_at_fork(after_in_child=lambda: os.dup2(null, fd, inheritable=False) and None)


def end_tree(pid: int, token: str, *, keep: bool = False, rounds: int = 5) -> int:
    """Kill the process `pid` and everything that it has started, if it is the one with that token; how many were killed.

    What it has started is found by parentage, by session and by the token in the environment, so that a daemon does not
    escape. keep: leave those alone and kill only the process. Any thread; never raises; takes tens of milliseconds.
    """
    killed: set[int] = set()
    for _ in range(rounds):     # more than once, because they may be starting others meanwhile
        found = {p for p in _family(pid, token, keep) if p not in killed}
        for each in found:
            try:
                os.kill(each, getattr(signal, "SIGKILL", signal.SIGTERM))
            except OSError:
                pass
        if not found:
            break
        killed |= found
        time.sleep(0.002)
    return len(killed)


def _family(pid: int, token: str, keep: bool) -> Iterator[int]:
    import psutil
    children: set[int] = set()
    there = _belongs(pid, token)
    if there:
        try:
            children = {c.pid for c in psutil.Process(pid).children(recursive=True)}
        except (psutil.Error, OSError):
            pass
    for other in psutil.pids():
        if other == os.getpid() or (keep and other != pid):
            continue
        try:
            in_session = there and os.name == "posix" and os.getsid(other) == pid
            if (in_session or other in children or _belongs(other, token)) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
                yield other
        except (psutil.Error, OSError):
            continue


def _belongs(pid: int, token: str) -> bool:
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                return f"{TOKEN}={token}".encode() in f.read().split(b"\0")
        except OSError:
            return False
    import psutil
    try:
        return psutil.Process(pid).environ().get(TOKEN) == token
    except (psutil.Error, OSError):
        return False


def wait(process: BaseProcess, seconds: float) -> int | None:
    """The exit code of the process, waited for at most so long; None if it still runs."""
    until = time.monotonic() + seconds
    while True:
        try:
            process.join(min(0.2, max(0.0, until - time.monotonic())))
            code = process.exitcode
        except (AssertionError, ValueError):
            return None
        if code is not None or time.monotonic() >= until:
            return code
