"""Isolated packs in a running ComfyUI: what its own files call at start-up and around a prompt.

Without an isolated pack every function here returns at once and nothing is changed.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import pack as packs_module
from .descriptions import Description, last
from .failures import WorkerDied
from .pack import Pack, PackConfigError

if TYPE_CHECKING:
    from .proxy import Interface

START = 300.0
"""Seconds that a worker may take to start and to import its packs before they count as failed."""

SETTLE = 1.0
"""Seconds that a server has to itself to begin to answer, before workers that nobody has called yet are started."""

NOTHING: dict[str, Any] = {"classes": [], "display_names": {}, "web_directories": {}, "folders": {}, "edits": []}
"""The description of a pack that has failed."""

current: Isolation | None = None
"""Set when a pack is isolated."""


class Isolation:
    """The packs of this server that are isolated, and the workers that they run in."""

    def __init__(self, packs: list[Pack]):
        from .station import PackStation
        self.packs = {os.path.abspath(pack.path): pack for pack in packs}
        self.hosted: dict[str, str] = {}        # name of a pack that could not be isolated -> why
        self.failed: dict[str, str] = {}        # name of a pack that could not be imported -> why
        self._stations: dict[str, PackStation] = {}
        self._registered: dict[str, dict[str, Any]] = {}        # what a station said when its routes were registered, by its name
        self._known: dict[str, Description] = {}        # what a station said at an earlier start, by its name
        self._interfaces: dict[str, Interface] = {}     # of loaded packs by their names
        self._asked = time.monotonic()
        self._groups: dict[str, list[Pack]] = {}        # all that were meant for a worker, by its name
        for pack in packs:
            if pack.isolated:
                self._groups.setdefault(pack.worker, []).append(pack)
        for name, members in self._groups.items():
            members = list(members)
            for pack in self._fitting(members):
                logging.debug("pack %s runs in worker %s", pack.name, name)
            if members:
                station = self._stations[name] = PackStation(name, members)
                station.worker.on_ready = functools.partial(self._up, station)

    def _fitting(self, members: list[Pack]) -> list[Pack]:
        """Take those out of a group that cannot be in it."""
        first: Any = None
        for pack in list(members):
            try:
                python = pack.python
                if pack is not members[0] and python != first:
                    raise PackConfigError(f"pack {pack.name} has another environment than the rest of group {pack.worker}")
                first = python
            except PackConfigError as error:
                members.remove(pack)
                self._give_up(pack, str(error))
        return members

    def start(self) -> None:
        """Start the workers that loading has to wait for: those whose packs have not said before what they offer."""
        for station in self.stations():
            known = self._known[station.name] = Description(station.name, station.packs)
            if known.said is None:
                self._start(station)

    def start_rest(self) -> None:
        """Start the other workers, one after the other, so that the server does not have to share every core with them."""
        def start() -> None:
            for station in self.stations():
                if station.name in self._known and not station.worker.starts and (ready := self._start(station)) is not None:
                    try:
                        ready.result(START)
                    except WorkerDied:
                        pass    # it has been said
                    except Exception as error:
                        logging.error("Worker %s did not start: %s", station.name, error or type(error).__name__)
        threading.Thread(target=start, name="comfy_multiproc: start", daemon=True).start()

    def _start(self, station: Any) -> Future[Any] | None:
        try:
            return station.worker.start()
        except (OSError, RuntimeError) as error:
            logging.error("Worker %s cannot be started: %s", station.name, error)
            return None

    def named(self, name: str) -> Any:
        """The station of that name; one for a worker without packs if there is none."""
        from .station import PackStation
        if name not in self._stations:
            self._stations[name] = PackStation(name, ())
        return self._stations[name]

    def stations(self) -> Iterator[Any]:
        return iter(list(self._stations.values()))

    def station_of(self, pack: str) -> Any:
        """The station of an isolated pack, by the pack's name. Raises LookupError, with the reason if it was refused."""
        for station in self.stations():
            if any(member.name == pack for member in station.packs):
                return station
        if pack in self.failed:
            raise LookupError(f"pack {pack} is not loaded: {self.failed[pack]}")
        raise LookupError(refusal(pack, self.hosted[pack]) if pack in self.hosted else f"pack {pack} is not isolated")

    # what proxies and calls need

    def inputs(self, pack: str) -> dict[str, Any] | None:
        try:
            return self.station_of(pack).inputs(pack)
        except LookupError:
            return None

    def call(self, node: Any, method: str, inputs: dict[str, Any]) -> Any:
        from . import calls
        assert calls.current is not None
        return calls.current.call(node, method, inputs)

    def forget(self, recipe: int) -> None:
        for station in self.stations():
            station.forget(recipe)

    def prompt_begins(self, executor: Any, prompt: Any, extra_data: Any) -> None:
        """Results that were in a worker which has ended are no results any more: their nodes run again when they are needed."""
        from . import calls
        cache = getattr(getattr(executor, "caches", None), "outputs", None)
        if calls.current is not None:
            calls.current.results = cache
            calls.current.metadata = (extra_data.get("extra_pnginfo") if isinstance(extra_data, dict) else None), prompt
        if any(station.lost_handles for station in self.stations()):
            for station in self.stations():
                station.lost_handles = False
            dropped = calls.drop_lost(cache)
            if dropped:
                logging.info("Cached results that were in a worker which has ended: %d; their nodes run again when they are needed", dropped)

    def prompt_ended(self, prompt: str) -> None:
        from . import calls
        if calls.current is not None:
            calls.current.prompt_ended()
        for station in self.stations():
            station.prompt_ended(prompt)

    # loading

    def module(self, pack: Pack) -> ModuleType | None:
        """What the host loads in place of the pack; None if it is loaded here after all. Raises ImportError as the pack would have."""
        from .interface import InterfaceError
        try:
            station = self.station_of(pack.name)
        except LookupError:
            return self._refuse(pack)
        known = self._known.get(station.name)
        if known is not None and known.said is not None:
            try:
                return self._module_of(pack, station, known.said)
            except Exception as error:
                logging.debug("what is remembered of worker %s cannot be used: %s", station.name, error)
                known.said = None
        try:
            said = station.worker.start().result(max(1.0, self._asked + START - time.monotonic())).body
            description = said["packs"][pack.name]
        except WorkerDied as error:
            # Whatever ended the worker would end the server too.
            reason = self.failed[pack.name] = (f"{error.while_it('loaded its packs').partition(chr(10))[0]}; they are not loaded in the host, "
                                               "which might end as well (isolate = false loads them there)")
            self._leave(pack, station)
            return self._remembered(pack, f"pack {pack.name} is not loaded: {reason}")
        except Exception as error:
            text = str(error) or f"{type(error).__name__}: its worker did not start within {START:g} s"
            return self._refuse(pack, text, station)
        if "error" in description:
            self.failed[pack.name] = description["error"]
            self._leave(pack, station)
            raise ImportError(f"in worker {station.name}, whose log says where: {description['error']}")
        if "cannot" in description:
            return self._refuse(pack, f"its nodes cannot be described: {description['cannot']}", station)
        if description["edits"]:
            return self._refuse(pack, f"it changes ComfyUI itself, which only helps in the host: {'; '.join(description['edits'])}", station)
        try:
            return self._module_of(pack, station, said)
        except (InterfaceError, KeyError, TypeError) as error:
            return self._refuse(pack, f"its nodes cannot be described: {error}", station)

    def _module_of(self, pack: Pack, station: Any, said: dict[str, Any]) -> ModuleType:
        module, interface = self._nodes_of(pack, said)
        self._register(station, said)
        self._interfaces[pack.name] = interface
        return module

    def _nodes_of(self, pack: Pack, said: dict[str, Any]) -> tuple[ModuleType, Interface]:
        from .proxy import Interface, module_of
        description = said["packs"][pack.name]
        interface = Interface(pack.name, description, self)
        module = module_of(interface)
        self._take_over(description)
        return module, interface

    def _up(self, station: Any, worker: Any, said: dict[str, Any]) -> None:
        """A worker of packs has started: what it says of them now holds, whatever was known. On a thread of its own."""
        import nodes

        from .interface import InterfaceError
        from .proxy import exchange
        before = self._registered.get(station.name)
        for pack in list(station.packs):
            interface, now = self._interfaces.get(pack.name), said["packs"].get(pack.name)
            if interface is None or now is None or before is None:
                continue    # loading has not come to it yet
            self.failed.pop(pack.name, None)
            if (error := now.get("error") or now.get("cannot")) is not None:
                self.failed[pack.name] = error
                logging.error("Pack %s cannot be imported any more, and its nodes are gone: %s", pack.name, error)
                now = NOTHING
            elif now["edits"]:
                logging.warning("Pack %s changes ComfyUI itself now, which only helps in the host; restart the server: %s", pack.name,
                                "; ".join(now["edits"]))
            try:
                changed = exchange(interface, now, nodes)
            except (InterfaceError, KeyError, TypeError) as error:
                logging.error("What pack %s offers now cannot be described: %s", pack.name, error)
                continue
            if changed and error is None:
                logging.info("Pack %s offers something else than it did when it was last described: %s", pack.name, ", ".join(changed))
            self._take_over(now)
        if before is not None:
            if said["routes"] != before["routes"]:
                logging.warning("The routes of worker %s are others than they were: restart the server to have them", station.name)
            # The worker had the folders from the host this time, and names only those that are new.
            folders = {name: pack["folders"] for name, pack in before["packs"].items()}
            said = {**said, "packs": {name: {**now, "folders": {**folders.get(name, {}), **now.get("folders", {})}} for name, now in said["packs"].items()}}
        known = self._known.get(station.name)
        if known is not None and said != known.said:
            known.keep(said)

    def _refuse(self, pack: Pack, reason: str | None = None, station: Any = None) -> ModuleType | None:
        if reason is not None:
            self._give_up(pack, reason)
            if station is not None:
                self._leave(pack, station)
        return self._remembered(pack, refusal(pack.name, self.hosted.get(pack.name, "unknown"))) if pack.config.fallback == "refuse" else None

    def _remembered(self, pack: Pack, reason: str) -> ModuleType:
        """A workflow keeps the nodes that the pack had at an earlier start, and what runs one is told why it cannot."""
        known = last(pack.worker, self._groups[pack.worker])
        try:
            if known is not None:
                return self._nodes_of(pack, known)[0]
        except Exception as error:
            logging.debug("what is remembered of pack %s cannot be used: %s", pack.name, error)
        raise ImportError(reason)

    def _leave(self, pack: Pack, station: Any) -> None:
        station.without(pack)
        if not station.packs:
            del self._stations[station.name]

    def _give_up(self, pack: Pack, reason: str) -> None:
        self.hosted[pack.name] = reason
        where = "is not loaded" if pack.config.fallback == "refuse" else "runs in the host instead"
        logging.warning("Pack %s cannot be isolated and %s: %s", pack.name, where, reason)

    def _take_over(self, description: dict[str, Any]) -> None:
        """What the pack has registered besides nodes: folders of models, front-end folders."""
        import folder_paths
        import nodes
        nodes.EXTENSION_WEB_DIRS.update(description["web_directories"])
        for name, (paths, extensions) in description["folders"].items():
            known = folder_paths.folder_names_and_paths.get(name)
            if known is None:
                folder_paths.folder_names_and_paths[name] = (list(paths), set(extensions))
                continue
            known[0].extend(path for path in paths if path not in known[0])
            if isinstance(known[1], set):
                known[1].update(extensions)

    def _register(self, station: Any, said: dict[str, Any]) -> None:
        """Its routes and handlers, once for all packs of a worker."""
        from .progress import server_instance
        from .routes import Forwarder, register
        server = server_instance()
        if station.name in self._registered:
            return
        self._registered[station.name] = said
        if server is None:
            return
        forwarder = Forwarder(station)
        register(server, said["routes"], forwarder)
        if said["routes"]:
            async def close(app: Any) -> None:
                await forwarder.close()
            server.app.on_cleanup.append(close)
        if said["prompt_handlers"]:
            server.add_on_prompt_handler(station.on_prompt)
        for replacement in said["replacements"]:
            from comfy_api.latest import io
            server.node_replace_manager.register(io.NodeReplace(**replacement))

    def listing(self) -> list[str]:
        """For every pack where it runs and why, in words."""
        lines = []
        for pack in self.packs.values():
            if pack.name in self.failed:
                where, why = "nowhere", self.failed[pack.name]
            elif missing := self._missing(pack):
                where, why = "nowhere", missing
            elif pack.name in self.hosted:
                where, why = ("nowhere" if pack.config.fallback == "refuse" else "host"), self.hosted[pack.name]
            elif pack.isolated:
                station = self.station_of(pack.name)
                pid = station.worker.pid
                where, why = f"worker {station.name} ({f'pid {pid}' if pid else 'not started yet'})", pack.reason
                interface = self._interfaces.get(pack.name)
                if interface is not None and (objects := interface.objects()):
                    taken = ", ".join(f"{kind} ({', '.join(ids)})" for kind, ids in sorted(objects.items()))
                    why = f"{why}; takes {taken}, which is not sent: one of another process is made again there"
            else:
                where, why = "host", pack.reason
            lines.append(f"  {pack.name}: {where}: {why}")
        return lines

    def _missing(self, pack: Pack) -> str | None:
        """Why ComfyUI has not loaded the pack, if it has not."""
        import nodes
        # By their names, those that are files by their paths without suffix.
        if pack.path.name in nodes.LOADED_MODULE_DIRS or os.path.splitext(pack.path)[0] in nodes.LOADED_MODULE_DIRS:
            return None
        return f"its import failed; the log says why{f' ({hosted})' if (hosted := self.hosted.get(pack.name)) else ''}"

    def report(self) -> list[dict[str, Any]]:
        """The same for programs."""
        report = []
        for pack in self.packs.values():
            out = self.failed.get(pack.name) or self._missing(pack) or self.hosted.get(pack.name)
            entry: dict[str, Any] = {"name": pack.name, "isolated": pack.isolated and not out, "reason": out or pack.reason}
            if entry["isolated"]:
                worker = self.station_of(pack.name).worker
                entry.update(worker=worker.name, pid=worker.pid, state=worker.state.value, starts=worker.starts)
                if (interface := self._interfaces.get(pack.name)) is not None:
                    entry["takes_objects"] = interface.objects()
            report.append(entry)
        return report


def refusal(pack: str, reason: str) -> str:
    return f"pack {pack} is not loaded: it cannot be isolated, and its pyproject.toml says fallback = \"refuse\". Reason: {reason}"


# what ComfyUI's files call

@functools.cache
def decided(path: str) -> Pack:
    """Where the pack at `path` runs."""
    return packs_module.decide(path, asked())


def asked() -> list[str]:
    from comfy.cli_args import args
    return list(getattr(args, "isolate", None) or ())


def runs_in_worker(script: str) -> bool:
    """Whether the prestart-up script is a worker's to run."""
    return decided(os.path.abspath(os.path.dirname(script))).isolated


def begin(packs: list[Pack]) -> Isolation:
    """Isolate packs from now on."""
    global current
    import folder_paths

    from . import calls, interface
    interface.file_list = folder_paths.get_filename_list
    current = Isolation(packs)
    calls.current = calls.Calls(current.station_of, current.stations, current.forget)
    return current


def check_name(name: str) -> None:
    """Raises PackConfigError for what is no name of a worker."""
    try:
        packs_module.value_of(Path(), "group", name)
    except packs_module.PackConfigError:
        raise packs_module.PackConfigError(f"{name!r:.200} is no name of a worker: letters, digits, '-', '_' and '.', 64 at most") from None


def named(name: str) -> Any:
    """The station of the worker of that name, whether or not any pack is isolated. Raises PackConfigError for what is no name."""
    check_name(name)
    return (current or begin([])).named(name)


def start_workers() -> None:
    """Find the packs and start the workers of those that are isolated. ComfyUI's devices are set up, its packs are not loaded."""
    import folder_paths
    from comfy.cli_args import args
    every = packs_module.find(folder_paths.get_folder_paths("custom_nodes"), asked())
    if getattr(args, "disable_all_custom_nodes", False):
        every = [pack for pack in every if pack.path.name in args.whitelist_custom_nodes]
    for value in packs_module.unknown(asked(), every):
        logging.warning("--isolate %s: there is no such pack in %s%s", value, ", ".join(folder_paths.get_folder_paths("custom_nodes")),
                        f"; did you mean {near}?" if (near := packs_module.nearest(value, every)) else "")
    if not any(pack.isolated for pack in every):
        return
    begin(every).start()


def proxy_spec(module_path: str, module_spec: Any, module_parent: str = "custom_nodes") -> Any:
    """What ComfyUI loads for the pack: `module_spec` as it is, or one that makes the host's classes for an isolated pack."""
    if current is None or module_parent != "custom_nodes" or module_spec is None:
        return module_spec
    pack = current.packs.get(os.path.abspath(module_path))
    if pack is None or not pack.isolated:
        return module_spec
    try:
        module = current.module(pack)
    except ImportError as error:
        raise error.with_traceback(None) from None      # ComfyUI logs it, and the pack's own part of it has been logged
    if module is None:
        if pack.path.is_dir():
            from .describe import prestart
            prestart(Path(pack.path))       # its worker's turn did not count
        return module_spec
    from .proxy import Loader
    loader = Loader(module_spec.name, module_spec.origin, lambda: module)
    replaced = importlib.util.spec_from_file_location(module_spec.name, module_spec.origin, loader=loader)
    return replaced if replaced is not None else module_spec


def packs_loaded() -> None:
    """All packs are loaded: say where each runs."""
    if current is not None and current.packs:
        logging.info("Packs and the process that each runs in:\n%s", "\n".join(current.listing()))
        from .progress import server_instance
        server = server_instance()
        if server is None:
            current.start_rest()
            return

        async def start_rest(app: Any) -> None:
            asyncio.get_running_loop().call_later(SETTLE, current.start_rest)
        server.app.on_startup.append(start_rest)


def interrupted(value: bool = True) -> None:
    """The user has pressed cancel; with False, a prompt begins."""
    if current is not None and value:
        from . import host
        from .progress import server_instance
        host.interrupt(getattr(server_instance(), "last_prompt_id", None))


def around_prompt(execute: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorates the executor's running of a prompt: workers hear of its end."""
    @functools.wraps(execute)
    async def executed(self: Any, prompt: Any, prompt_id: str, *args: Any, **kwargs: Any) -> Any:
        if current is not None:
            current.prompt_begins(self, prompt, args[0] if args else kwargs.get("extra_data"))
        try:
            return await execute(self, prompt, prompt_id, *args, **kwargs)
        finally:
            if current is not None:
                current.prompt_ended(prompt_id)
    return executed


def add_packs_to(stats: dict[str, Any]) -> None:
    """Add to the answer of ``/system_stats`` which pack runs where."""
    if current is not None and current.packs:
        stats["packs"] = current.report()
