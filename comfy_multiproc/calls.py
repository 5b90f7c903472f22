"""In the host: where the call of a node is made.

An isolated node runs in its pack's worker. A core node that gets an object of a worker runs there too, instead of the
object coming here. Every other node runs as it always did. Calls into workers are asynchronous, so that the scheduler
goes on with what does not depend on them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol

from comfy.process_memory import moments

from . import failures, metadata, runtime
from .handles import Handle, handles_in
from .nodecall import Call, is_v3, packed_prompt
from .proxy import Isolated, Tokens
from .recipes import Recipes

VALIDATION = 10.0   # seconds that a pack's own validation may take: the page waits for it
ANYTHING = ("*", "COMFY_MATCHTYPE_V3")
CORE_MODULES = ("comfy_extras.", "comfy_api_nodes.")

current: Calls | None = None
"""Set where packs are isolated."""


class Station(Protocol):
    """A worker as calls see it."""
    name: str

    def send(self, call: Call, values: dict[str, Any], aside: bool = False) -> Future[Any]:
        """Make a call; the future has the result as the executor expects it. Starts the worker if need be. May be slow: off the
        server's loop. Cancelling the future cancels the call. `aside`: not on the execution thread, so that it does not
        wait for what runs there."""

    def running(self) -> bool:
        """Whether a call would find the worker started."""

    def owns(self, handle: Handle) -> bool:
        """Whether the object of the handle is in this worker."""

    def drop(self, instance: int) -> None:
        """The node instance of that number is gone. Any thread, also a finalizer's."""


class Calls:
    """`of_pack(name)` gives the station of an isolated pack; `stations()` all of them."""

    def __init__(self, of_pack: Callable[[str], Station], stations: Callable[[], Iterator[Station]], forget: Callable[[int], None]):
        self._of_pack = of_pack
        self._stations = stations
        self._tokens = Tokens()
        self._inputs: dict[str, dict[str, Any]] = {}    # of the nodes that run in workers now, by their ids
        self.results: Any = None        # the executor's cache of results while a prompt runs
        self.metadata: tuple[Any, ...] = ()     # what nodes of that prompt get as EXTRA_PNGINFO and PROMPT
        self._running: dict[Any, list[weakref.ref[asyncio.Task[Any]]]] = {}
        self._names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
        self.recipes = Recipes(forget)

    async def map(self, original: Callable[..., Awaitable[Any]], prompt_id: str, unique_id: str, obj: Any, input_data_all: dict[str, Any],
                  func: str, *args: Any, v3_data: Any = None, **kwargs: Any) -> Any:
        """Stands before the executor's mapping of a node over its lists of inputs."""
        cls = obj if isinstance(obj, type) else type(obj)
        station = self.place(cls, input_data_all)
        if station is None:
            results = await original(prompt_id, unique_id, obj, input_data_all, func, *args, v3_data=v3_data, **kwargs)
            if func == getattr(obj, "FUNCTION", None) and not isinstance(obj, type):
                self._record(cls, prompt_id, unique_id, input_data_all, func, results, v3_data)
            return results
        call = Call(self.name_of(cls), func, None if obj is cls else self._tokens.of(obj, station.drop), prompt=prompt_id or "",
                    id=unique_id, nested=is_v3(cls) and v3_data is not None, executes=obj is not cls and func == obj.FUNCTION)
        extra = extra_of(v3_data) if is_v3(cls) else {}
        concurrent = getattr(cls, "isolated_async", None)
        if concurrent is None:
            concurrent = inspect.iscoroutinefunction(getattr(cls, func, None))
        known = key_of(self.results, unique_id) if call.executes and not concurrent else None
        if call.executes:
            if known is not None and (same := await self._of_equal(known)) is not None:
                return same
            self._inputs[unique_id] = input_data_all
        stand_in = StandIn()
        stand_in.INPUT_IS_LIST = getattr(obj, "INPUT_IS_LIST", False)
        setattr(stand_in, func, self._remote(station, cls, call, extra, concurrent))
        results = await original(prompt_id, unique_id, stand_in, input_data_all, func, *args, v3_data=v3_data, **kwargs)
        if known is not None and all(isinstance(result, asyncio.Task) for result in results):
            # Weak: the executor lets go of them when it has put what they give into its cache.
            self._running[known] = [weakref.ref(task) for task in results]
        return results

    async def _of_equal(self, key: Any) -> list[Any] | None:
        """The results of an equal node that runs now, waited for: natively it would have ended before, and this one be served from the
        cache. None if there is none, or if it grows the graph, which each node does for itself. Raises what the other one raised."""
        refs = self._running.get(key, [])
        tasks = [task for ref in refs if (task := ref()) is not None]
        if not tasks or len(tasks) < len(refs):
            self._running.pop(key, None)
            return None
        await asyncio.wait(tasks)
        results = [task.result() for task in tasks]
        return None if any(grows(result) for result in results) else results

    def _remote(self, station: Station, cls: type, call: Call, extra: dict[str, Any], concurrent: bool) -> Callable[..., Awaitable[Any]]:
        """The method of a node that a stand-in has instead of its own: called by the executor once for each item of the lists."""
        one_by_one = asyncio.Lock()
        failed: list[BaseException] = []

        async def once(inputs: dict[str, Any]) -> Any:
            from comfy_execution.utils import get_executing_context
            context = get_executing_context()
            here = described(call, context.list_index if context is not None else None)
            values = {**extra, "inputs": {name: self._crossing(cls, name, value) for name, value in inputs.items()}}
            if call.executes:
                values["metadata"] = metadata.places_of(self.metadata, values)
                result = self._received(cls, await answered(await sent(station, here, values)))
                self._inputs.pop(call.id, None)
                return result
            return await asked(station, here, values)

        async def remote(**inputs: Any) -> Any:
            if concurrent:
                return await once(inputs)
            async with one_by_one:      # as the executor would have: the second item after the first, none after a failure
                if failed:
                    raise failed[0]
                try:
                    return await once(inputs)
                except BaseException as error:
                    failed.append(error)
                    raise
        return remote

    def call(self, node: Any, method: str, inputs: dict[str, Any]) -> Any:
        """A direct call of an isolated node's method, by another node: waits for the result."""
        from comfy_execution.utils import get_executing_context
        cls: Any = node if isinstance(node, type) else type(node)
        station = self._of_pack(cls.isolated_pack.pack)
        instance = None if node is cls else self._tokens.of(node, station.drop)
        within = get_executing_context()        # the other node's, so that an interrupt of its prompt is meant for this call too
        call = described(Call(cls.isolated_id, method, instance, prompt=within.prompt_id if within else "", id=within.node_id if within else "",
                              executes=method == getattr(cls, "FUNCTION", None)), 0)
        values = {"inputs": {name: self._crossing(cls, name, value) for name, value in inputs.items()}, "v3": {}}
        future = station.send(call, values)
        try:
            while not wait([future], 0.05).done:
                if on_execution_thread():
                    moments.before_node()
                    throw_if_interrupted()
            return self._received(cls, future.result())
        finally:
            future.cancel()

    def inputs_of(self, unique_id: str) -> dict[str, Any] | None:
        """The inputs of a node that has just run in a worker and failed."""
        return self._inputs.get(unique_id)

    def prompt_ended(self) -> None:
        self._inputs.clear()
        self._running.clear()
        self.results, self.metadata = None, ()
        self.recipes.prune()

    # where

    def place(self, cls: type, input_data_all: dict[str, Any]) -> Station | None:
        """The worker that a call with these inputs is made in; None: this process. Raises RuntimeError if there is no such place."""
        if issubclass(cls, Isolated):
            return self._of_pack(cls.isolated_pack.pack)
        found: dict[str, tuple[Station, list[str]]] = {}
        for name, values in input_data_all.items():
            for handle in handles_in(values):
                handle.check()
                station = next((s for s in self._stations() if s.owns(handle)), None)
                if station is not None:
                    names = found.setdefault(station.name, (station, []))[1]
                    text = f"{name} ({handle.io_type or handle.type_name})"
                    if text not in names and not passes_on(cls, name):
                        names.append(text)
        needing = {name: entry for name, entry in found.items() if entry[1]}
        if not needing:
            return None     # a node that only passes objects on does so anywhere
        if not core(cls):
            station, names = next(iter(needing.values()))
            raise RuntimeError(f"{', '.join(names)} is in worker {station.name}, and this node's pack runs in the host, where it cannot be used. "
                               f"Isolate this pack too, in the same group: group = \"{station.name}\" in [tool.comfyui-multiproc] of its pyproject.toml.")
        if len(needing) > 1:
            parts = "; ".join(f"{', '.join(names)} is in worker {name}" for name, (_, names) in needing.items())
            raise RuntimeError(f"{parts}: one node cannot use objects of several workers. Put their packs into one group "
                               "([tool.comfyui-multiproc] group in each pyproject.toml).")
        return next(iter(needing.values()))[0]

    def name_of(self, cls: type) -> str:
        """The id of a node class. Raises LookupError."""
        if issubclass(cls, Isolated):
            return cls.isolated_id
        name = self._names.get(cls)
        if name is None:
            import nodes
            name = next((n for n, c in nodes.NODE_CLASS_MAPPINGS.items() if c is cls), None)
            if name is None:
                raise LookupError(f"{cls.__name__} is no registered node")
            self._names[cls] = name
        return name

    # what crosses

    def _crossing(self, cls: type, name: str, value: Any) -> Any:
        value = packed_prompt(value)
        crossing = self.recipes.crossing(value)
        return value if crossing is value or passes_on(cls, name) else crossing

    def _received(self, cls: type, result: Any) -> Any:
        """Tell handles what they are, for messages and for the choice of a place, and make the node's changes of what is
        saved with pictures."""
        result = metadata.take_over(result, self.metadata)
        outputs = result.get("result") if isinstance(result, dict) else getattr(result, "args", result)
        if isinstance(outputs, (tuple, list)):
            for value, kind in zip(outputs, getattr(cls, "RETURN_TYPES", ()), strict=False):
                for handle in (value if isinstance(value, list) else [value]):
                    if isinstance(handle, Handle) and not handle.io_type and isinstance(kind, str):
                        handle.io_type = str(kind)
        return result

    def _record(self, cls: type, prompt_id: str, unique_id: str, input_data_all: dict[str, Any], func: str, results: Any, v3_data: Any) -> None:
        if getattr(cls, "OUTPUT_NODE", False) or not core(cls):
            return
        is_list = getattr(cls, "INPUT_IS_LIST", False)
        extra = extra_of(v3_data) if is_v3(cls) else {}
        for index, result in enumerate(results):
            outputs = result.get("result") if isinstance(result, dict) else getattr(result, "args", result)
            if isinstance(result, asyncio.Task) or not isinstance(outputs, tuple):
                continue
            inputs = input_data_all if is_list else {k: v[min(index, len(v) - 1)] for k, v in input_data_all.items()}
            call = Call(self.name_of(cls), func, None, prompt=prompt_id or "", id=unique_id, index=index, nested=is_v3(cls) and v3_data is not None)
            self.recipes.record(call, {**extra, "inputs": inputs}, outputs)


class StandIn:
    """What the executor maps over its lists in place of a node that runs elsewhere."""
    INPUT_IS_LIST: Any = False


def maps_in_workers(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorates the executor's _async_map_node_over_list; does nothing where no pack is isolated."""
    @functools.wraps(original)
    async def mapped(*args: Any, **kwargs: Any) -> Any:
        if current is None:
            return await original(*args, **kwargs)
        return await current.map(original, *args, **kwargs)
    return mapped


def inputs_for_report(unique_id: str, inputs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The inputs that an error report shows: those of a node that ran elsewhere are not at hand any more when it fails. Called where
    the report is made: the exception's traceback is freed of the way between the processes."""
    failures.cut(sys.exc_info()[2])
    return inputs if inputs is not None or current is None else current.inputs_of(unique_id)


def described(call: Call, index: int | None) -> Call:
    """The call with what belongs to its moment."""
    from dataclasses import replace

    from comfy.cli_args import args
    server = server_instance()
    preview = getattr(args, "preview_method", None)
    return replace(call, index=index, preview=getattr(preview, "value", preview), client=getattr(server, "client_id", None))


def server_instance() -> Any:
    from .progress import server_instance
    return server_instance()


async def sent(station: Station, call: Call, values: dict[str, Any], aside: bool = False) -> Future[Any]:
    """The future of a call. A worker that has to be started first is started on another thread."""
    if station.running():
        return station.send(call, values, aside)
    made: list[Future[Any]] = []
    unwanted = threading.Event()

    def send() -> Future[Any]:
        made.append(station.send(call, values, aside))
        if unwanted.is_set():
            made[0].cancel()
        return made[0]
    try:
        return await asyncio.get_running_loop().run_in_executor(None, send)
    except asyncio.CancelledError:
        unwanted.set()      # before the look, as the other thread looks after it has made the call
        for future in made:
            future.cancel()
        raise


async def answered(future: Future[Any]) -> Any:
    """The result of a call, on the execution thread. Meanwhile other processes get the memory that they ask for.

    Raises what the call raised; InterruptProcessingException once the prompt has been interrupted, whatever the node made of it.
    """
    wrapped = asyncio.wrap_future(future)
    here = runtime.current
    try:
        throw_if_interrupted()      # since the executor has looked: then the worker had no such call yet, and was not told
        if here is None or not here.inbox.on_execution_thread():
            result = await wrapped
        else:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                try:
                    loop.call_soon_threadsafe(moments.before_node)
                except RuntimeError:
                    pass    # the prompt is over, and its loop with it
            with here.inbox.waking(wake):
                result = await wrapped
    except BaseException as error:
        future.cancel()
        if isinstance(error, Exception):
            throw_if_interrupted()
        raise
    throw_if_interrupted()
    return result


async def asked(station: Station, call: Call, values: dict[str, Any]) -> Any:
    """The answer of a method that ComfyUI asks before it runs anything, on the server's loop or the execution thread."""
    validates = call.method in ("VALIDATE_INPUTS", "validate_inputs")
    future = await sent(station, call, values, aside=validates)
    if not validates:
        return await asyncio.wrap_future(future)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), VALIDATION)
    except TimeoutError:
        return f"{call.node} did not validate its inputs within {VALIDATION:g} s (worker {station.name})"


def throw_if_interrupted() -> None:
    import comfy.model_management
    if comfy.model_management.processing_interrupted():
        raise comfy.model_management.InterruptProcessingException()


def on_execution_thread() -> bool:
    return runtime.current is not None and runtime.current.inbox.on_execution_thread()


def extra_of(v3_data: Any) -> dict[str, Any]:
    """What the executor passes along to a node in the newer style, as values that cross."""
    v3_data = v3_data or {}
    hidden = {getattr(key, "name", str(key)): packed_prompt(value) for key, value in v3_data.get("hidden_inputs", {}).items()}
    return {"hidden": hidden, "v3": {key: value for key, value in v3_data.items() if key != "hidden_inputs"}}


def core(cls: type) -> bool:
    """Whether every worker has the node."""
    module = getattr(cls, "RELATIVE_PYTHON_MODULE", None)
    return cls.__module__ == "nodes" if module is None else str(module).startswith(CORE_MODULES)


def key_of(cache: Any, node_id: str) -> Any:
    """What the executor's cache knows the result of a node by, which equal nodes have in common; None if it keeps no results."""
    if hasattr(cache, "_get_cache_for"):
        cache = cache._get_cache_for(node_id)
    keys = getattr(cache, "cache_key_set", None)
    key = keys.get_data_key(node_id) if keys is not None else None
    return None if key is None else (id(cache), key)


def grows(result: Any) -> bool:
    """Whether a node's result adds nodes to the graph."""
    return (result.get("expand") if isinstance(result, dict) else getattr(result, "expand", None)) is not None


def drop_lost(cache: Any) -> int:
    """Take the results with lost handles out of one of the executor's caches; how many there were. On the execution thread."""
    entries = getattr(cache, "cache", None) or {}
    lost = [key for key, entry in entries.items() if any(handle.lost for handle in handles_in(list(getattr(entry, "outputs", None) or ())))]
    for key in lost:
        del entries[key]
    return len(lost) + sum(drop_lost(inner) for inner in (getattr(cache, "subcaches", None) or {}).values())


def passes_on(cls: type, name: str) -> bool:
    """Whether the node takes anything for that input, so that it can do no more with an object than pass it on."""
    try:
        from comfy_execution.graph import get_input_info
        kind = get_input_info(cls, name)[0]
    except Exception:
        return False
    return kind is None or (isinstance(kind, str) and (str(kind) in ANYTHING or not kind != "comfy_multiproc"))
