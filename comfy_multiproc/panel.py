"""The "Process memory" panel of the web interface: its data, live updates, and its two actions. See docs/panel.md."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from comfy import process_memory
from comfy.process_memory import admission, devices, own, registry, report
from comfy.process_memory.figures import here, manager
from comfy.process_memory.provider import DEADLINE, Candidate, Kind, Outcome, Reason, Receipt, ReleaseRequest

from . import isolation, runtime
from .peer import PeerProcess
from .safepoint import Ask

WEB = Path(__file__).parent / "web"
EVENT = "process_memory"
INTERVAL = 0.5
"""Seconds between two looks while somebody watches."""
WATCH = 15.0
"""Seconds for which one request for the data keeps the events coming."""
EVERYTHING = 1 << 62
ORIGIN = "the Process memory panel"
WITHOUT_BLOCKS = ("mps", "privateuseone")
"""Backends of which ComfyUI knows no allocator: it then calls all that is free unused blocks."""


class Refused(Exception):
    """A request that cannot be met. `status` is HTTP's; the text says why and what to do."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


# what there is to see

def data() -> dict[str, Any]:
    """Every device and every process, from local state only; docs/panel.md has the shape. Any thread."""
    places = {place: device for device in own.all_devices() if (place := devices.key(device)) is not None}
    processes = process_memory.processes()
    stations = _stations()
    peers = {entry.provider.pid: entry.provider for entry in registry.entries if isinstance(entry.provider, PeerProcess)}
    models = {place: _models(place, device) for place, device in places.items()}
    for row in processes:
        station, peer = stations.pop(row["pid"], None), peers.get(row["pid"])
        row["kind"] = _kind(row["pid"], station, peer)
        row["packs"] = [] if station is None else [pack.name for pack in station.packs]
        row["models"] = [model for place in places for model in models[place].get((row["pid"], row["name"]), ())]
    # A worker that is not in the books: it has just been started, or it has ended and the next call starts it.
    processes.extend(_row_of_worker(station) for station in stations.values())
    return {
        "pid": os.getpid(),
        "devices": [_device(place, device, processes) for place, device in places.items()],
        "ram": _ram(),
        "processes": processes,
    }


def _device(place: str, device: Any, processes: list[dict[str, Any]]) -> dict[str, Any]:
    held = [(row["pid"], figures["vram"] or 0) for row in processes for figures in row["devices"] if figures["device"] == place]
    total, free = int(manager().get_total_memory(device)), _free(device)
    if not devices.whole_card(device):
        free = max(0, free - sum(size for pid, size in held if pid != os.getpid()))
    return {"device": place, "name": str(manager().get_torch_device_name(device)), "total": total, "free": free,
            "other": max(0, total - free - sum(size for _, size in held))}


def _free(device: Any) -> int:
    """What the driver calls free: with the claims still in it, and without this process's own unused blocks."""
    here.raw = True
    try:
        free, blocks = manager().get_free_memory(device, torch_free_too=True)
    finally:
        here.raw = False
    return int(free) if device.type in WITHOUT_BLOCKS else max(0, int(free) - int(blocks))


def _ram() -> dict[str, int]:
    ram = manager().torch.device("cpu")
    return {"total": int(manager().get_total_memory(ram)), "free": int(manager().get_free_memory(ram))}


def _models(place: str, device: Any) -> dict[tuple[int | None, str], list[dict[str, Any]]]:
    """By pid and name of their process."""
    found: dict[tuple[int | None, str], Iterable[Candidate]] = {(os.getpid(), own.name): _own_models(device)}
    for entry, candidates, _ in registry.count("candidates", place):
        found[(entry.pid, entry.name)] = candidates or ()
    return {who: [{"device": place, "name": model.name, "resident": model.resident, "size": model.size, "in_use": model.in_use}
                  for model in models if model.kind is Kind.MODEL and model.size] for who, models in found.items()}


def _own_models(device: Any) -> Iterator[Candidate]:
    running = admission.node_running()
    for loaded in own.loaded_models(device):
        yield Candidate(id="", name=type(loaded.model.model).__name__, resident=int(loaded.model_loaded_memory()),
                        size=int(loaded.model_memory()), in_use=bool(running and loaded.currently_used))


def _stations() -> dict[int | str, Any]:
    """The stations of this server's workers, by pid; of those without a process, by name."""
    return {} if isolation.current is None else {station.worker.pid or station.name: station for station in isolation.current.stations()}


def _kind(pid: int | None, station: Any, peer: PeerProcess | None) -> str:
    if pid == os.getpid():
        return "self"
    if station is not None:
        return "worker"
    if peer is None:
        return "provider"
    return "server" if peer.family == peer.pid else "foreign_worker"


def _row_of_worker(station: Any) -> dict[str, Any]:
    return {"pid": station.worker.pid, "name": f"worker {station.name}", "state": station.worker.state.value, "age": None,
            "ram": None, "pinned": None, "devices": [], "kind": "worker", "packs": [pack.name for pack in station.packs], "models": []}


# what can be done

async def release(pid: int | None, name: str | None, device: str | None) -> Receipt:
    """Have a process unload its models and empty its allocator's cache, on `device` or on all. Raises Refused."""
    places = [place for d in own.all_devices() if (place := devices.key(d)) is not None]
    if device is not None and device not in places:
        raise Refused(404, f"there is no device {device}: this server knows {', '.join(places) or 'none'}")
    if pid == os.getpid():
        return await _release_own(device)
    for entry in registry.entries:
        if entry.pid == pid if pid is not None else entry.pid is None and entry.name == name:
            return await asyncio.to_thread(_release_other, entry, places if device is None else [device])
    if pid in _stations():
        raise Refused(409, f"process {pid} is not ready yet; try again in a few seconds")
    raise Refused(404, f"there is no process {name if pid is None else pid}: it has ended, or it does not share its memory")


async def _release_own(device: str | None) -> Receipt:
    if runtime.current is None:
        raise Refused(409, "this server does not share its memory with other processes; use ComfyUI's own \"Unload models\"")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Receipt] = loop.create_future()

    def given(receipt: Receipt) -> None:
        if not answer.done():
            answer.set_result(receipt)

    def answered(receipt: Receipt) -> None:
        loop.call_soon_threadsafe(given, receipt)
    runtime.current.inbox.submit(Ask(kind="unload", answer=answered, device=device, bytes=EVERYTHING, reason=Reason.USER_FREE,
                                     origin=ORIGIN, patience=time.monotonic() + DEADLINE))
    try:
        return _unless_busy(await asyncio.wait_for(answer, 2 * DEADLINE), "this server")
    except asyncio.TimeoutError:
        raise Refused(409, "this server is still unloading; look again in a moment") from None


def _release_other(entry: registry.Entry, places: list[str]) -> Receipt:
    until = time.monotonic() + DEADLINE
    requests = [(entry, ReleaseRequest(device=place, bytes=EVERYTHING, reason=Reason.USER_FREE, deadline=until, origin=ORIGIN))
                for place in places if _holds(entry, place)]
    receipts = registry.ask("unload", requests)
    if None in receipts:
        raise Refused(409, f"{entry} does not answer; try again later, or end it")
    given = [receipt for receipt in receipts if receipt is not None]
    freed = sum(receipt.freed for receipt in given)
    # What is best known: freed somewhere, else refused somewhere.
    outcome = Outcome.FREED if freed else next((o for o in (Outcome.GONE, Outcome.BUSY) if any(r.outcome is o for r in given)), Outcome.NOTHING)
    resident = [receipt.resident for receipt in given]
    return _unless_busy(Receipt(outcome=outcome, freed=freed, resident=None if None in resident else sum(r or 0 for r in resident)), str(entry))


def _holds(entry: registry.Entry, place: str) -> bool:
    return any(usage is None or usage.resident is None or report.in_use(usage) > 0
               for counted, usage, _ in registry.count("usage", place) if counted is entry)


def _unless_busy(receipt: Receipt, who: str) -> Receipt:
    if receipt.outcome is Outcome.BUSY:
        raise Refused(409, f"{who} is busy and keeps its models; try again when its node has ended")
    return receipt


async def restart(pid: int) -> dict[str, Any]:
    """Restart a worker of this server: what runs in it fails. Gives its name and its new pid, before it is ready. Raises Refused."""
    station = _stations().get(pid)
    if station is not None:
        logging.info("Process memory: worker %s (pid %d) is restarted, as asked for in the panel", station.name, pid)
        try:
            await asyncio.to_thread(station.worker.restart)
        except (OSError, RuntimeError) as error:
            raise Refused(409, f"worker {station.name} has been stopped and cannot be started: {error}") from error
        return {"name": station.name, "pid": station.worker.pid}
    if pid == os.getpid() or any(entry.pid == pid for entry in registry.entries):
        raise Refused(409, f"process {pid} is no worker of this server: restart it where it was started")
    raise Refused(404, f"there is no worker with pid {pid}: it has ended already")


# the server's side

class Watchers:
    """Who looks at the panel, and the task that sends them what has changed. On the server's loop."""

    def __init__(self, server: Any):
        self._server = server
        self._until: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self, client: str) -> None:
        """Send events to that websocket client for the next seconds."""
        if client in self._server.sockets:
            self._until[client] = time.monotonic() + WATCH
            if self._task is None:
                self._task = asyncio.create_task(self._send())

    async def close(self, app: Any) -> None:
        if self._task is not None:
            self._task.cancel()

    def _watching(self) -> list[str]:
        now = time.monotonic()
        self._until = {client: until for client, until in self._until.items() if until > now and client in self._server.sockets}
        return list(self._until)

    async def _send(self) -> None:
        sent: object = None
        try:
            while clients := self._watching():
                now = await asyncio.to_thread(data)
                ageless = {**now, "processes": [{**row, "age": None} for row in now["processes"]]}
                if ageless != sent:
                    sent = ageless
                    for client in clients:
                        self._server.send_sync(EVENT, now, client)
                await asyncio.sleep(INTERVAL)
        finally:
            self._task = None


def add_to(server: Any) -> None:
    """The panel's routes and its folder, for a PromptServer that is about to add its own."""
    import nodes
    from comfy.cli_args import args
    if getattr(args, "disable_process_memory", False):
        return
    nodes.EXTENSION_WEB_DIRS["comfy_multiproc"] = str(WEB)
    watchers = Watchers(server)
    server.app.on_cleanup.append(watchers.close)

    @server.routes.get("/process_memory")
    async def get(request: web.Request) -> web.Response:
        if client := request.rel_url.query.get("watch"):
            watchers.watch(client)
        return web.json_response(await asyncio.to_thread(data))

    @server.routes.post("/process_memory/release")
    async def post_release(request: web.Request) -> web.Response:
        try:
            body = await _body(request)
            pid, name, device = _field(body, "pid", int), _field(body, "name", str), _field(body, "device", str)
            if pid is None and name is None:
                raise Refused(400, "say which process: {\"pid\": 1234}, or {\"name\": \"...\"} for one without a pid")
            receipt = await release(pid, name, device)
        except Refused as refused:
            return _error(refused)
        return web.json_response({"outcome": receipt.outcome.value, "freed": receipt.freed, "resident": receipt.resident})

    @server.routes.post("/process_memory/restart")
    async def post_restart(request: web.Request) -> web.Response:
        try:
            pid = _field(await _body(request), "pid", int)
            if pid is None:
                raise Refused(400, "say which worker: {\"pid\": 1234}")
            return web.json_response(await restart(pid))
        except Refused as refused:
            return _error(refused)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and type(value) is not kind:
        raise Refused(400, f"{name} must be {'a whole number' if kind is int else 'a text'}, not {type(value).__name__}")
    return value


def _error(refused: Refused) -> web.Response:
    return web.json_response({"error": str(refused)}, status=refused.status)
