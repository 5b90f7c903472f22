"""The node classes that the host registers for an isolated pack, made from the description that its worker sent.

They look to ComfyUI like the pack's own: names, inputs, outputs, flags and the methods that it asks. A call of one goes to
the worker; `calls.py` makes the scheduler do that without waiting.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from .interface import InterfaceError, decode

OBJECTS = frozenset(("MODEL", "CLIP", "VAE", "CONTROL_NET", "CLIP_VISION", "STYLE_MODEL", "GLIGEN", "UPSCALE_MODEL", "LATENT_UPSCALE_MODEL",
                     "MODEL_PATCH", "AUDIO_ENCODER", "SAMPLER", "GUIDER", "NOISE", "HOOKS"))
"""Types of ComfyUI whose values stay in the process that made them."""
FRESH = 1.0     # seconds for which what a class says of its inputs is not asked again


class Host(Protocol):
    """What the classes need of the process that they are registered in."""

    def inputs(self, pack: str) -> dict[str, Any] | None:
        """What the classes of `pack` say of their inputs now, as `describe.input_types` puts it, by class id. None if its worker
        is not there or does not answer at once. Bounded; any thread."""

    def call(self, node: Any, method: str, inputs: dict[str, Any]) -> Any:
        """Run a method of `node`, an instance or class of this module, in its worker, and wait for it."""


class Interface:
    """What a worker said of a pack, kept fresh. Any thread."""

    def __init__(self, pack: str, description: Mapping[str, Any], host: Host):
        self.pack = pack
        self.host = host
        self.description = description
        self._inputs = {data["id"]: data for data in description["classes"]}
        self._asked = time.monotonic()
        self._lock = threading.Lock()

    def renew(self, description: Mapping[str, Any]) -> None:
        """The worker says something else now."""
        with self._lock:
            self.description = description
            self._inputs = {data["id"]: data for data in description["classes"]}

    def inputs(self, id_: str) -> Any:
        """The class's INPUT_TYPES. Raises what the class raised, as RuntimeError."""
        return self._said(id_, "inputs")

    def info(self, id_: str) -> dict[str, Any]:
        """A V3 class's entry in ``/object_info``."""
        return self._said(id_, "info")

    def objects(self) -> dict[str, list[str]]:
        """Which classes take objects that cannot be sent, as they were described last: class ids by type."""
        found: dict[str, list[str]] = {}
        for id_, said in self._inputs.items():
            groups = decode(said["inputs"]) if "inputs" in said else {}
            kinds = {entry[0] for name in ("required", "optional") for _, entry in (groups.get(name) or {}).items() if entry and isinstance(entry[0], str)}
            for kind in sorted(OBJECTS.intersection(map(str, kinds))):
                found.setdefault(kind, []).append(id_)
        return found

    def _said(self, id_: str, key: str) -> Any:
        with self._lock:
            if time.monotonic() - self._asked >= FRESH:
                self._inputs.update(self.host.inputs(self.pack) or {})
                self._asked = time.monotonic()
            said = self._inputs.get(id_, {})
        if key not in said:
            raise RuntimeError(said.get("inputs_error") or f"node {id_} of pack {self.pack} does not say what its inputs are")
        return decode(said[key])


class Isolated:
    """Marks the classes of this module. `isolated_id` is the class in its worker, `isolated_pack` the pack's interface."""
    isolated_id: str
    isolated_pack: Interface
    isolated_async: bool = False


def module_of(interface: Interface) -> ModuleType:
    """A module that ComfyUI can load in place of the pack's own. Raises InterfaceError."""
    description = interface.description
    module = ModuleType(interface.pack)
    classes = {}
    for data in description["classes"]:
        try:
            classes[data["id"]] = class_of(data, interface)
        except (InterfaceError, KeyError, TypeError, ValueError) as error:
            raise InterfaceError(f"node {data.get('id')!r} of pack {interface.pack}: {error}") from error
    if isinstance(web := description.get("web_directory"), str):
        module.WEB_DIRECTORY = web          # type: ignore[attr-defined]
    if description.get("v3"):
        module.comfy_entrypoint = entrypoint_of(list(classes.values()))     # type: ignore[attr-defined]
    else:
        module.NODE_CLASS_MAPPINGS = classes        # type: ignore[attr-defined]
        module.NODE_DISPLAY_NAME_MAPPINGS = dict(description.get("display_names") or {})      # type: ignore[attr-defined]
    return module


def exchange(interface: Interface, description: Mapping[str, Any], nodes: Any) -> list[str]:
    """Register in `nodes` what the worker says now in place of what was known; gives the ids of the nodes that differ.

    Inputs alone are no difference: the classes ask for them anyway. Raises InterfaceError before anything is changed.
    """
    def lasting(data: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in ("inputs", "inputs_error", "info")}

    def ours(id_: str) -> bool:
        cls = nodes.NODE_CLASS_MAPPINGS.get(id_, BaseV1)
        return getattr(cls, "isolated_pack", interface) is interface and issubclass(cls, Isolated)
    before = {data["id"]: lasting(data) for data in interface.description["classes"]}
    classes = {data["id"]: class_of(data, interface) for data in description["classes"]
               if before.get(data["id"]) != lasting(data) and ours(data["id"])}
    gone = [id_ for id_ in before if ours(id_) and id_ not in {data["id"] for data in description["classes"]}]
    interface.renew(description)
    for id_ in gone:
        nodes.NODE_CLASS_MAPPINGS.pop(id_, None)
        nodes.NODE_DISPLAY_NAME_MAPPINGS.pop(id_, None)
    names = dict(description.get("display_names") or {})
    for id_, cls in classes.items():
        cls.RELATIVE_PYTHON_MODULE = f"custom_nodes.{interface.pack}"       # type: ignore[attr-defined]
        nodes.NODE_CLASS_MAPPINGS[id_] = cls
        if name := getattr(cls, "display_name", None):
            names.setdefault(id_, name)
    nodes.NODE_DISPLAY_NAME_MAPPINGS.update(names)
    return sorted([*gone, *classes])


def entrypoint_of(classes: list[type]) -> Callable[[], Any]:
    from comfy_api.latest import ComfyExtension

    class Extension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return classes

    async def comfy_entrypoint() -> Extension:
        return Extension()
    return comfy_entrypoint


def class_of(data: Mapping[str, Any], interface: Interface) -> type:
    """The host's class for one class of the pack."""
    if "error" in data:
        logging.warning("Node %s of pack %s cannot be described: %s", data["id"], interface.pack, data["error"])
    body: dict[str, Any] = {name: decode(value) for name, value in data["attributes"].items()}
    body.update(isolated_id=data["id"], isolated_pack=interface, isolated_async=bool(data.get("async")),
                __module__=str(data.get("module", interface.pack)), __qualname__=str(data.get("class", data["id"])))
    base = base_v3() if data["v3"] else BaseV1
    if not data["v3"]:
        body["FUNCTION"] = str(data.get("function", "execute"))
        body[body["FUNCTION"]] = method(body["FUNCTION"])
    else:
        body["display_name"] = data.get("display_name")
    for name, spec in data.get("methods", {}).items():
        # check_lazy_status is asked of the instance, the others of the class.
        body[name] = classmethod(method(name, spec)) if data["v3"] or name != "check_lazy_status" else method(name, spec)
    return type(body["__qualname__"].rpartition(".")[2], (base,), body)


def method(name: str, spec: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A function that runs the method `name` in the worker, with the parameters that the original has: validation reads them."""
    def call(self: Any, *args: Any, **inputs: Any) -> Any:
        if args:
            raise TypeError(f"{name} of the isolated node {self.isolated_id} takes its inputs by name")
        return self.isolated_pack.host.call(self, name, inputs)
    call.__name__ = call.__qualname__ = name
    if spec is not None:
        parameters = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in spec["parameters"]]
        if spec["any"]:
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        call.__signature__ = inspect.Signature(parameters)      # type: ignore[attr-defined]
    return call


class BaseV1(Isolated):
    """Base of the classes in the older style."""

    RETURN_TYPES: tuple[Any, ...] = ()

    @classmethod
    def INPUT_TYPES(cls) -> Any:
        return cls.isolated_pack.inputs(cls.isolated_id)


_base_v3: type | None = None


def base_v3() -> type:
    """Base of the classes in the newer style; made at the first one, because it derives from ComfyUI's own."""
    global _base_v3
    if _base_v3 is None:
        from comfy_api.latest import io

        class BaseV3(Isolated, io.ComfyNode):
            FUNCTION = "execute"

            def __init__(self) -> None:
                pass

            @classmethod
            def define_schema(cls) -> Any:
                return io.Schema(node_id=cls.isolated_id, display_name=cls.display_name)

            @classmethod
            def GET_SCHEMA(cls) -> Any:
                return cls.define_schema()

            @classmethod
            def INPUT_TYPES(cls) -> Any:
                return cls.isolated_pack.inputs(cls.isolated_id)

            @classmethod
            def GET_NODE_INFO_V1(cls) -> dict[str, Any]:
                info = cls.isolated_pack.info(cls.isolated_id)
                info["python_module"] = getattr(cls, "RELATIVE_PYTHON_MODULE", "nodes")
                return info

            execute = classmethod(method("execute"))

        _base_v3 = BaseV3
    return _base_v3


class Loader(importlib.machinery.SourceFileLoader):
    """Loads the module of an isolated pack: the host's classes, not the pack's file."""

    def __init__(self, name: str, path: str, make: Callable[[], ModuleType]):
        super().__init__(name, path)
        self._make = make

    def exec_module(self, module: ModuleType) -> None:
        made = self._make()
        module.__dict__.update({k: v for k, v in vars(made).items() if not k.startswith("__")})


class Tokens:
    """Numbers for node instances: the worker keeps its own instance under the number, until the host's is gone."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._lock = threading.Lock()

    def of(self, node: Any, gone: Callable[[int], None]) -> int:
        """The number of `node`; `gone` is called with it when the instance is no more. Any thread."""
        with self._lock:
            number = self._numbers.get(node)
            if number is None:
                self._next += 1
                number = self._numbers[node] = self._next
                weakref.finalize(node, gone, number).atexit = False
            return number
