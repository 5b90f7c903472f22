"""A real ComfyUI server for a test: started on a free port, driven over HTTP and websocket, ended within a bound.

    with start_server(tree, models=tiny_models.ensure(["sd3"]), card=CardSettings(size=400 << 20)) as server:
        result = server.run(workflows.txt2img_sd3())
        assert result.images == expected

Needs the packages of ComfyUI itself (aiohttp, Pillow) and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comfy_multiproc.testing import workflows
from comfy_multiproc.testing.card.settings import CardSettings
from comfy_multiproc.testing.card.virtual import server_environment

START_SECONDS = 180.0       # a start takes 8 to 13 s, more where several tests share two cores
RUN_SECONDS = 300.0         # a prompt takes a second or two, a hundred times that on a machine with ten other jobs
STOP_SECONDS = 15.0
LOG_TAIL = 6000             # characters of the log in an error


class ServerError(RuntimeError):
    """The server did not start, refused a request, or did not answer in time; the message holds the end of its log."""


@dataclass
class Result:
    """What became of a prompt."""

    prompt_id: str
    images: list[str] = field(default_factory=list)                 # digest of the pixels of each image saved, by node id
    error: dict[str, Any] | None = None                             # ComfyUI's execution_error or execution_interrupted
    events: list[dict[str, Any]] = field(default_factory=list)      # websocket messages of this prompt, in order
    outputs: dict[str, Any] = field(default_factory=dict)           # the history's outputs, by node id

    @property
    def ok(self) -> bool:
        return self.error is None


class Server:
    """A running server. Times are in seconds."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, home: pathlib.Path):
        self.process, self.port, self.home = process, port, home
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = home / "server.log"

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """Everything the server has written."""
        return self.log_path.read_text(errors="replace")

    # ---- requests

    def request(self, path: str, data: bytes | None = None, kind: str = "application/json", timeout: float = 30.0) -> bytes:
        """GET, or POST if there is data. Raises ServerError with the server's answer."""
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": kind} if data is not None else {})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as e:
            raise ServerError(f"{path}: {e.code}: {e.read().decode(errors='replace')[:LOG_TAIL]}") from None
        except OSError as e:
            raise ServerError(f"{path}: {e}\n{self.log()[-LOG_TAIL:]}") from None

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """A GET request's JSON."""
        return json.loads(self.request(path, timeout=timeout))

    def post(self, path: str, value: Any, timeout: float = 30.0) -> Any:
        """POST a value as JSON; the JSON of the answer, None if it is empty."""
        body = self.request(path, json.dumps(value).encode(), timeout=timeout)
        return json.loads(body) if body else None

    def upload(self, name: str, png: bytes) -> None:
        """Put an input image where LoadImage finds it."""
        edge = uuid.uuid4().hex
        fields = "".join(f'--{edge}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in (("overwrite", "true"), ("type", "input")))
        head = f'{fields}--{edge}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\nContent-Type: image/png\r\n\r\n'
        self.request("/upload/image", head.encode() + png + f"\r\n--{edge}--\r\n".encode(), f"multipart/form-data; boundary={edge}")

    # ---- prompts

    def run(self, prompt: Mapping[str, Any], timeout: float = RUN_SECONDS) -> Result:
        """Run a prompt to its end. Raises ServerError if it is refused or has no end in time."""
        return asyncio.run(self.run_async(prompt, timeout))

    async def run_async(self, prompt: Mapping[str, Any], timeout: float = RUN_SECONDS) -> Result:
        """As `run`, for several at once."""
        for name in workflows.image_names(dict(prompt)):
            await asyncio.to_thread(self.upload, name, sample_image())
        try:
            result = await asyncio.wait_for(self._follow(prompt), timeout)
        except asyncio.TimeoutError:
            raise ServerError(f"no end of the prompt in {timeout:.0f} s:\n{self.log()[-LOG_TAIL:]}") from None
        return await asyncio.to_thread(self._collect, result)

    async def _follow(self, prompt: Mapping[str, Any]) -> Result:
        import aiohttp
        client = uuid.uuid4().hex
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket:
            answer = await asyncio.to_thread(self.post, "/prompt", {"prompt": prompt, "client_id": client})
            result = Result(answer["prompt_id"])
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:      # previews are binary
                    continue
                event = json.loads(message.data)
                if event.get("data", {}).get("prompt_id") != result.prompt_id:
                    continue
                result.events.append(event)
                if event["type"] in ("execution_error", "execution_interrupted"):
                    result.error = event["data"]
                    return result
                if event["type"] == "execution_success":
                    return result
        raise ServerError(f"the server closed the connection:\n{self.log()[-LOG_TAIL:]}")

    def _collect(self, result: Result) -> Result:
        # The history is written after the last event is sent.
        deadline = time.monotonic() + 30
        while not (entry := self.get(f"/history/{result.prompt_id}").get(result.prompt_id)):
            if time.monotonic() > deadline:
                raise ServerError(f"no history of {result.prompt_id}:\n{self.log()[-LOG_TAIL:]}")
            time.sleep(0.02)
        result.outputs = entry["outputs"]
        for id in sorted(result.outputs):
            for image in result.outputs[id].get("images", []):
                query = urllib.parse.urlencode({key: image[key] for key in ("filename", "subfolder", "type")})
                result.images.append(pixel_digest(self.request(f"/view?{query}")))
        return result

    # ---- the end

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """End the server as Ctrl-C does, and with it its process group after `timeout`. Returns the exit code."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout)
        finally:    # Ctrl-C may come once more
            # Whoever is left of its group has outlived it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(timeout)


@contextlib.contextmanager
def start_server(tree: str | os.PathLike[str], args: Sequence[str] = (), *, models: str | os.PathLike[str] | None = None,
                 packs: Iterable[str | os.PathLike[str]] = (), card: CardSettings | None = None,
                 card_file: str | os.PathLike[str] | None = None, environment: Mapping[str, str] | None = None,
                 python: str = sys.executable, timeout: float = START_SECONDS,
                 home: str | os.PathLike[str] | None = None) -> Iterator[Server]:
    """A server of the ComfyUI in `tree`, patched or not, with a folder of its own for everything it writes: `home`, which stays, or
    one that ends with the server.

    `args`: more arguments. `models`: a models directory. `packs`: node packs to install. `card`: a virtual card, whose capacity
    file is `card_file` (to read it, or to share it with other processes); --cpu or --disable-dynamic-vram are added for it.
    Raises ServerError if it does not answer in `timeout` seconds.
    """
    tree = pathlib.Path(tree)
    with contextlib.ExitStack() as stack:
        # The server runs in another folder: what is said relative to this one must not be so any more.
        home = pathlib.Path(home or stack.enter_context(tempfile.TemporaryDirectory(prefix="comfy-server-", ignore_cleanup_errors=True))).resolve()
        for name in ("input", "output", "temp", "user", "custom_nodes"):
            (home / name).mkdir(exist_ok=True, parents=True)
        if models is not None and not (home / "models").exists():
            (home / "models").symlink_to(pathlib.Path(models).resolve(), target_is_directory=True)
        for pack in map(pathlib.Path, packs):
            if not (home / "custom_nodes" / pack.name).exists():
                (home / "custom_nodes" / pack.name).symlink_to(pack.resolve(), target_is_directory=True)
        port = free_port()
        command = [os.path.abspath(python) if os.path.dirname(python) else python, "main.py", "--port", str(port), "--base-directory", str(home), "--database-url", "sqlite:///:memory:",
                   "--disable-api-nodes", *args]
        variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        if card is None or card.form == "python":
            variables["COMFY_MULTIPROC_CACHE"] = str(home / "cache")       # the other form is built into the user's
        if card is not None:
            command.append("--cpu" if card.form == "python" else "--disable-dynamic-vram")
            variables.update(server_environment(card, card_file or home / "card", tree=tree))
        variables.update(environment or {})
        with open(home / "server.log", "wb") as log:
            process = subprocess.Popen(command, cwd=tree, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables,
                                       start_new_session=True, preexec_fn=_listen_to_ctrl_c if _deaf() else None)
        server = Server(process, port, home)
        with _stopped_at_the_end(server):
            _wait_until_ready(server, timeout)
            yield server


def _deaf() -> bool:
    """Whether what is started from here ignores Ctrl-C, as a shell has it for what runs in its background."""
    return os.name == "posix" and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _listen_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _stopped_at_the_end(server: Server) -> Iterator[None]:
    """Also if this process is killed, which cannot clean up then: a server is a gigabyte."""
    code = f"import os, sys; sys.stdin.read(); os.killpg({server.pid}, 9)"
    with contextlib.ExitStack() as stack:
        try:
            watcher = subprocess.Popen([sys.executable, "-ISc", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
            stack.callback(watcher.communicate)
            stack.callback(watcher.kill)
            yield
        finally:
            server.stop()


def _wait_until_ready(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with {server.process.returncode}:\n{server.log()[-LOG_TAIL:]}")
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(server.url + "/system_stats", timeout=10):
                return
        if time.monotonic() > deadline:
            raise ServerError(f"the server did not answer in {timeout:.0f} s:\n{server.log()[-LOG_TAIL:]}")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sample_image(size: int = 64) -> bytes:
    """A colourful PNG."""
    from PIL import Image
    image = Image.new("RGB", (size, size))
    image.putdata([(x * 255 // (size - 1), y * 255 // (size - 1), x * y % 256) for y in range(size) for x in range(size)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pixel_digest(data: bytes) -> str:
    """A digest of an image's pixels, whatever its file format and metadata."""
    from PIL import Image
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()[:16]
