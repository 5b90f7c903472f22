"""Exceptions that cross between processes: as data, rebuilt from a closed list of classes.

`describe` turns an exception into JSON: its class name, text and traceback, and nothing that would keep a tensor or a
frame alive. `rebuild` makes an exception of it that can be raised: the classes that ComfyUI reacts to are themselves
again, every other one is a `WorkerError` under its own name. No class is looked up by a name that was received.
"""
from __future__ import annotations

import builtins
import functools
import linecache
import os
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

REMOTE = "comfy_multiproc: of another process"      # a global of the frames of rebuilt tracebacks
MAX_TEXT = 64 << 10
MAX_FRAMES = 100
MAX_CHAIN = 4

Failure = dict[str, Any]

LOADER = re.compile(r"shared object|undefined symbol|version `.+' not found|DLL load failed|Could not find module|procedure could not be found"
                    r"|Library not loaded|image not found|Symbol not found")
"""What the loaders of the systems say when a library cannot be loaded."""


class WorkerError(RuntimeError):
    """An exception of another process whose class this one does not rebuild. Its subclasses carry the names of those classes.

    remote_type: the full name of the class there. remote_traceback: the traceback as that process would have printed it.
    """

    remote_type = ""
    remote_traceback = ""


class WorkerDied(WorkerError):
    """The process that ran the node has ended.

    pid: of that process; None: it could not be started. signal: the number of the signal that ended it, or None. exitcode: as in
    `multiprocessing.Process`; None where it is not known. log: the last lines of what it wrote. hint: the end of the text, which
    says what is usual.
    """

    pid: int | None = None
    signal: int | None = None
    exitcode: int | None = None
    log: tuple[str, ...] = ()
    hint: str = ""

    def while_it(self, did: str) -> str:
        """The text with what the process did then."""
        return f"{str(self).removesuffix(self.hint)} while it {did}{self.hint}"


# By name alone, because the text of these is one argument and their constructors do nothing.
BUILTINS: dict[str, type[Exception]] = {
    name: getattr(builtins, name)
    for name in (
        "ArithmeticError", "AssertionError", "AttributeError", "BufferError", "EOFError", "Exception", "FloatingPointError",
        "ImportError", "IndexError", "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError", "NameError",
        "NotImplementedError", "OverflowError", "RecursionError", "ReferenceError", "RuntimeError", "TypeError", "ValueError",
        "ZeroDivisionError", "OSError", "FileNotFoundError", "FileExistsError", "PermissionError", "IsADirectoryError",
        "NotADirectoryError", "TimeoutError", "ConnectionError", "BrokenPipeError",
    )
}


def _known() -> dict[str, type[BaseException]]:
    """The classes besides builtins that are rebuilt; those of modules that are not loaded here are left out."""
    known: dict[str, type[BaseException]] = {}
    torch = sys.modules.get("torch")
    for name in ("OutOfMemoryError", "AcceleratorError"):
        if isinstance(class_ := getattr(torch, name, None), type):
            known[f"torch.{name}"] = class_
    management = sys.modules.get("comfy.model_management")
    if isinstance(class_ := getattr(management, "InterruptProcessingException", None), type):
        known["comfy.model_management.InterruptProcessingException"] = class_
    return known


def full_name(class_: type) -> str:
    """The name that ComfyUI shows: the module and the qualified name, for a builtin the name alone."""
    module = class_.__module__
    return class_.__qualname__ if module in (None, "builtins") else f"{module}.{class_.__qualname__}"


def describe(error: BaseException, *, depth: int = 0) -> Failure:
    """The exception as JSON. Never raises, whatever its class does."""
    class_ = type(error)
    failure: Failure = {"type": full_name(class_), "text": text_of(error)}
    if isinstance(error, WorkerError) and error.remote_type:
        failure["type"] = error.remote_type
    for name, known in _known().items():
        # A subclass counts as the class: that is how ComfyUI would have taken it.
        if isinstance(error, known):
            failure["as"] = name
    code = _attribute(error, "error_code")
    if isinstance(code, int):
        failure["code"] = int(code)
    args = _attribute(error, "args")
    args = args if isinstance(args, tuple) else ()
    if where := searched(error):
        failure["text"] = f"{failure['text']}{where}"
        args = ()
    if isinstance(error, OSError) and len(args) == 2 and isinstance(filename := _attribute(error, "filename"), str):
        args = (*args, filename)
    if class_ is BUILTINS.get(class_.__name__) and 0 < len(args) <= 3 and all(type(a) in (str, int) for a in args):
        failure["args"] = [a[:MAX_TEXT] if isinstance(a, str) else a for a in args]
    notes = _attribute(error, "__notes__")
    if isinstance(notes, list):
        failure["notes"] = [str(n)[:MAX_TEXT] for n in notes[:20] if isinstance(n, str)]
    try:
        stack = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
        failure["frames"] = [[f.filename, f.lineno or 0, f.name] for f in stack]
        failure["lines"] = "".join(traceback.format_list(stack))[-MAX_TEXT:]
    except Exception:
        failure["frames"] = []
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and earlier is not error and depth < MAX_CHAIN:
        failure["cause" if error.__cause__ is not None else "context"] = describe(earlier, depth=depth + 1)
    return failure


def rebuild(failure: Any, where: str = "another process", *, depth: int = 0) -> BaseException:
    """The exception that `failure` describes, with the traceback of the other process as its own. Never raises: what is no
    description becomes a `WorkerError` that says so. `where` is put into the text of the printed traceback."""
    if not isinstance(failure, dict):
        failure = {}
    name = failure.get("type")
    name = name if isinstance(name, str) and name else "an unknown error"
    text = failure.get("text")
    text = text if isinstance(text, str) else ""
    error = _make(name, text, failure)
    lines = failure.get("lines")
    head = f"Traceback (most recent call last, in {where}):\n{lines}" if isinstance(lines, str) and lines else ""
    if isinstance(error, WorkerError):
        error.remote_type = name
        error.remote_traceback = f"{head}{name}: {text}\n"
    notes = failure.get("notes")
    for note in notes if isinstance(notes, list) else ():
        if isinstance(note, str):
            error.add_note(note)
    if depth < MAX_CHAIN:
        if "cause" in failure:
            error.__cause__ = rebuild(failure["cause"], where, depth=depth + 1)
        elif "context" in failure:
            error.__context__ = rebuild(failure["context"], where, depth=depth + 1)
    return error.with_traceback(_traceback(failure.get("frames")))


def _attribute(error: BaseException, name: str) -> Any:
    try:
        return getattr(error, name, None)
    except Exception:
        return None     # a property of its class that fails


def text_of(error: BaseException) -> str:
    """What the exception says. Never raises."""
    try:
        return str(error)[:MAX_TEXT]
    except Exception as e:
        return f"(its text cannot be had: {type(e).__name__})"


def searched(error: BaseException) -> str:
    """Where libraries are looked for, to be said after an error of the system's loader; nothing for any other error.

    It names the library at most, and a worker with an environment of its own looks elsewhere than its host does.
    """
    if not isinstance(error, (OSError, ImportError)) or not LOADER.search(text_of(error)):
        return ""
    name = "PATH" if os.name == "nt" else "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    return f" (Python: {sys.prefix}; libraries are looked for in {name}={os.environ.get(name, '')} and the system's folders)"


def _make(name: str, text: str, failure: Failure) -> BaseException:
    code = failure.get("code")
    known = _known().get(str(failure.get("as")))
    if known is not None:
        error = known(text)
        if isinstance(code, int):
            error.error_code = code     # type: ignore[attr-defined]
        return error
    if (class_ := BUILTINS.get(name)) is not None:
        args = failure.get("args")
        if isinstance(args, list) and len(args) <= 3 and all(type(a) in (str, int) for a in args):
            return class_(*args)
        return class_(text)
    return _named(name)(text)


@functools.lru_cache(maxsize=256)
def _named(name: str) -> type[WorkerError]:
    """A WorkerError that ComfyUI shows under that name."""
    module, _, qualified = name.rpartition(".")
    last = qualified or "WorkerError"
    return type(last, (WorkerError,), {"__module__": module or "builtins", "__qualname__": last, "__doc__": WorkerError.__doc__})


def _here() -> FrameType:
    return sys._getframe()


def _traceback(frames: Any) -> TracebackType | None:
    """A traceback with these places, so that whoever formats it shows where in the other process it happened."""
    result: TracebackType | None = None
    for place in reversed(frames[-MAX_FRAMES:] if isinstance(frames, list) else []):
        if not (isinstance(place, list) and len(place) == 3 and isinstance(place[0], str) and type(place[1]) is int and isinstance(place[2], str)):
            continue
        file, line, name = place
        code: CodeType = _here.__code__.replace(co_filename=file, co_name=name, co_qualname=name)
        frame = FunctionType(code, {"sys": sys, REMOTE: True})()
        # Without an instruction Python takes the line from the traceback, not from the code.
        result = TracebackType(result, frame, -1, max(0, line))
        linecache.checkcache(file)
    return result


def cut(trace: TracebackType | None) -> None:
    """Take out of a traceback that leads into another process what is the way there: our frames on both sides, and those of the
    futures between them. The first frame stays, and so does what happened in our own code."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    there = next((i for i, frame in enumerate(frames) if REMOTE in frame.tb_frame.f_globals), None)
    if there is None:
        return
    theirs = next((i for i in range(there, len(frames)) if not _on_the_way(frames[i])), there)
    kept = [frame for i, frame in enumerate(frames) if i == 0 or i >= theirs or (i < there and not _on_the_way(frame))]
    for frame, following in zip(kept, kept[1:], strict=False):
        frame.tb_next = following


def cut_start(error: BaseException) -> None:
    """Have the exception's traceback begin with the first frame that is neither ours nor one of the import system, if there is any."""
    trace = error.__traceback__
    while trace is not None and (_on_the_way(trace) or "importlib" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is not None:
        error.with_traceback(trace)


def _on_the_way(frame: TracebackType) -> bool:
    file = Path(frame.tb_frame.f_code.co_filename)
    return file.parent.name == "comfy_multiproc" or file.parts[-3:-1] == ("concurrent", "futures") or file.parent.name == "asyncio"


def interrupted() -> BaseException:
    """ComfyUI's own exception for a prompt that was interrupted."""
    management = sys.modules.get("comfy.model_management")
    class_: Any = getattr(management, "InterruptProcessingException", None) or _named("comfy.model_management.InterruptProcessingException")
    return class_()


def forget(error: BaseException | None) -> None:
    """Let go of the frames of the exception and of those that led to it, and so of all that they refer to."""
    for _ in range(100):
        if error is None:
            return
        following = error.__cause__ or error.__context__
        traceback.clear_frames(error.__traceback__)
        for name in ("__traceback__", "__cause__", "__context__"):
            BaseException.__setattr__(error, name, None)        # their class may not let its attributes be set
        error = following
