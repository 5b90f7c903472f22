"""Starting a ComfyUI server, saying when it answers, and stopping it with the terminal."""

import argparse
import errno
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fork import running
from .fork.errors import ForkError, ToolError

GRACE = 15.0
"""Seconds a server has to stop by itself once it was asked to."""

DEVICE_ARGUMENTS = frozenset(
    ("--cpu", "--directml", "--cuda-device", "--default-device", "--oneapi-device-selector")
    # These exclude --cpu in the server's own argument parser.
    + ("--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram")
)


PORTS = 50
"""How many ports above one that is in use are looked at."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: `hosts` to bind, and the URL to open."""

    hosts: tuple[str, ...]
    port: int
    url: str

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Address":
        """The address that the server arguments ask for."""
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--listen", nargs="?", const="0.0.0.0,::", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8188)
        parser.add_argument("--tls-keyfile")
        try:
            known, _ = parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise ForkError(f"the server arguments are not understood: {error}") from error
        if not 0 < known.port < 65536:
            raise ForkError(f"--port {known.port} is no port: choose one from 1 to 65535")
        hosts = tuple(host.strip() for host in known.listen.split(",") if host.strip()) or ("127.0.0.1",)
        show = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hosts[0], hosts[0])
        show = f"[{show}]" if ":" in show else show
        return cls(hosts, known.port, f"{'https' if known.tls_keyfile else 'http'}://{show}:{known.port}")

    def check_free(self) -> None:
        """Raises `ForkError` if something listens there already, or if this user may not."""
        for host in self.hosts:
            try:
                _bind(host, self.port)
            except socket.gaierror as error:
                raise ForkError(f"--listen {host} is no address of this machine ({error.strerror})") from error
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    free = self.another_port()
                    how = f" (-- --port {free})" if free else ""
                    raise ForkError(f"port {self.port} on {host} is in use: stop what listens there, or choose another port{how}") from error
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise ForkError(f"you may not listen on port {self.port}: choose one above 1023 (-- --port 8188)") from error
                if error.errno != errno.EAFNOSUPPORT:
                    raise ForkError(f"cannot listen on {host}, port {self.port}: {(error.strerror or str(error)).lower()}") from error

    def another_port(self) -> int | None:
        """A port above this one on which nothing listens now."""
        for port in range(self.port + 1, min(self.port + PORTS, 65535) + 1):
            try:
                for host in self.hosts:
                    _bind(host, port)
            except OSError:
                continue
            return port
        return None

    def answers(self) -> bool:
        """Whether a server answers there now (one request, at most 2 seconds)."""
        context = ssl.create_default_context()
        # A self-made certificate is the usual one, and nothing is sent.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        try:
            with opener.open(f"{self.url}/system_stats", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False


def _bind(host: str, port: int) -> None:
    """Listen there for a moment, as the server would. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, proto) as probe:
        if os.name == "posix":
            # Without this a port that was just given up still counts as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)


def database_argument(tree: Path, arguments: Sequence[str], port: int) -> list[str]:
    """A database of its own for a second server of `tree`, which cannot open the one that the first has locked."""
    given = any(argument.split("=")[0] == "--database-url" for argument in arguments)
    # One that is still starting has not locked it yet.
    if given or not (running.database_in_use(tree) or running.servers(tree)):
        return []
    return ["--database-url", f"sqlite:///{(tree / running.DATABASE).with_name(f'comfyui-{port}.db').absolute()}"]


def device_argument(arguments: Sequence[str]) -> str | None:
    """The first of the server arguments that chooses a device or what to keep on it."""
    return next((argument for argument in arguments if argument.split("=")[0] in DEVICE_ARGUMENTS), None)


def serve(python: Path, tree: Path, arguments: Sequence[str], *, answered: Callable[[], None], address: Address,
          variables: Mapping[str, str] | None = None) -> int:
    """Runs the server of `tree` until it ends; returns its exit code (128 + the signal if one ended it).

    `answered` is called once, in this thread, when the server answers. From then on Ctrl-C, SIGTERM and SIGHUP ask it to stop the
    way Ctrl-C does, while before there is nothing to finish and it is just ended; the second time it is told to, and whatever is left of its process group after `GRACE` seconds is killed.
    `variables` are added to the server's environment. Must be called in the main thread.
    """
    own_group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
    asked: list[float] = []
    waiting = True
    server: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        asked.append(time.monotonic())
        # Elsewhere than on posix the console has told the server already.
        if server is not None and os.name == "posix":
            _signal(server, signal.SIGTERM if waiting or len(asked) > 1 else signal.SIGINT)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        try:
            # A group of its own: a terminal's Ctrl-C reaches it once, through us, and its workers can be ended with it.
            server = subprocess.Popen([python, "main.py", *arguments], cwd=tree, stdin=subprocess.DEVNULL, env=os.environ | (variables or {}), **own_group)
        except OSError as error:
            raise ToolError(f"cannot start the server in {tree}: {(error.strerror or str(error)).lower()}") from error
        if asked:
            _signal(server, signal.SIGTERM)
        while True:
            try:
                code = server.wait(0.3)
                break
            except subprocess.TimeoutExpired:
                pass
            if asked and time.monotonic() - asked[0] > GRACE:
                _kill(server)
            elif waiting and not asked and address.answers():
                waiting = False
                answered()
        return code if code >= 0 else 128 - code
    finally:
        if server is not None:
            _kill(server)
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(server: subprocess.Popen[bytes], number: int) -> None:
    try:
        server.send_signal(number)
    except ProcessLookupError:
        pass


def _kill(server: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    elif server.poll() is None:
        server.kill()
    server.wait(GRACE)
