"""Another process with ComfyUI's memory manager in it, driven from a test.

    # in the test's own file
    def load(nbytes):
        import comfy.model_management
        global model
        model = stub_patcher(nbytes)
        comfy.model_management.load_models_gpu([model])
        return model.loaded_size()

    peer = CardProcess(tree, __file__, environment=card.environment())
    assert peer.call("load", nbytes=64 << 20) == 64 << 20
    peer.kill()

The process imports the file by its path and runs the functions that it is told by name, one after the other, on its main thread.
Arguments and results are JSON. Every wait has a bound, and the process ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

SECONDS = 60.0      # importing ComfyUI takes about 3 s, several times that where tests share two cores
LOG_TAIL = 4000     # characters of the process's output in an error


class ProcessError(RuntimeError):
    """The process died, or did not answer in time; the message holds the end of its output."""


class RemoteError(RuntimeError):
    """The function raised. `type` is the name of the exception's class, `text` its message; the traceback is in this one's."""

    def __init__(self, type: str, text: str, trace: str):
        super().__init__(f"{type}: {text}\n{trace}")
        self.type, self.text = type, text


class CardProcess:
    """A started process. A context manager, which ends it. Times are in seconds."""

    def __init__(self, tree: str | os.PathLike[str], functions: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None,
                 arguments: Mapping[str, Any] | None = None):
        """`tree`: the ComfyUI to import from. `functions`: the Python file whose functions are to be called. `environment`: added to
        this process's. `arguments`: values for comfy.cli_args.args, set before anything else of ComfyUI is imported."""
        start = {"tree": os.path.abspath(tree), "functions": os.path.abspath(functions), "arguments": {"cpu": True, **(arguments or {})}}
        code = f"import sys, json; start = json.loads({json.dumps(json.dumps(start))}); sys.path[0] = start['tree']; " \
               "from comfy_multiproc.testing.process import serve; serve(start)"
        self._log = tempfile.TemporaryFile("w+b")
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                         env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}, cwd=tree, text=True)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, name: str, timeout: float = SECONDS, **arguments: Any) -> Any:
        """Run a function and return its result. Raises RemoteError, ProcessError."""
        self.begin(name, **arguments)
        return self.result(timeout)

    def begin(self, name: str, **arguments: Any) -> None:
        """Let a function start; `result` waits for it. Raises ProcessError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ProcessError(self._died()) from None

    def result(self, timeout: float = SECONDS) -> Any:
        """The result of the earliest function begun and not yet asked for. Raises RemoteError, ProcessError."""
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise ProcessError(f"process {self.pid} did not answer in {timeout:.0f} s:\n{self.log()[-LOG_TAIL:]}") from None
        if answer is None:
            self._answers.put(None)
            raise ProcessError(self._died())
        if "error" in answer:
            raise RemoteError(*answer["error"])
        return answer["result"]

    def kill(self) -> None:
        """End it as kill -9 does, and wait until it is gone."""
        self._process.kill()
        self._process.wait(SECONDS)

    def stop(self) -> None:
        """End it, whatever it does, and release what it holds here."""
        self.kill()
        self._reader.join(SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()

    def log(self) -> str:
        """Everything the process has written."""
        if self._log.closed:
            return ""
        # Not by seek and read: the process writes at the position that it shares with this file object.
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def __enter__(self) -> CardProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _died(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS)
        return f"process {self.pid} ended with {self._process.returncode}:\n{self.log()[-LOG_TAIL:]}"


def serve(start: Mapping[str, Any]) -> None:
    """The other end: answer calls until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)       # what ComfyUI prints is no answer
    calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, calls), daemon=True).start()
    import comfy.cli_args
    vars(comfy.cli_args.args).update(start["arguments"])
    path = pathlib.Path(start["functions"])
    spec = importlib.util.spec_from_file_location("card_process_functions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    while True:
        call = calls.get()
        try:
            answer = json.dumps({"result": getattr(module, call["call"])(**call["arguments"])})
        except BaseException as e:      # ComfyUI's interrupt is no Exception
            answer = json.dumps({"error": [type(e).__name__, str(e), traceback.format_exc()]})
        answers.write(answer + "\n")
        answers.flush()


def _listen(source: TextIO, calls: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in source:
        calls.put(json.loads(line))
    os._exit(0)         # the test is gone or done, and the main thread may be busy
