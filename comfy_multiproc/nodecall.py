"""In a worker: one call of a node, as ComfyUI's executor would have made it here.

A call names a class, a method and where in the workflow it belongs; inputs and result are values that have crossed already.
All of this runs on the worker's execution thread.
"""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass, fields
from typing import Any

from comfy.process_memory import moments

from . import boot, metadata, spawning
from .progress import for_page

OUTPUT = "comfy_multiproc.output"       # marks a result in the newer style
UI = "what the node returns as ui"
RECIPE = "comfy_multiproc.recipe"       # marks an input that is to be made here


@dataclass(frozen=True)
class Call:
    """Which method of which node, and for which place in which prompt. Crosses as JSON."""
    node: str                       # class id, as in NODE_CLASS_MAPPINGS
    method: str
    instance: int | None            # number of the instance; None: the class is asked
    prompt: str = ""
    id: str = ""                    # of the node in the prompt
    index: int | None = None        # which item of a list
    executes: bool = False          # it is the node's own function, not one that is asked
    nested: bool = False            # in the newer style: inputs are restructured as `values["paths"]` say
    preview: str | None = None      # the preview method of the prompt
    client: str | None = None       # the client that the prompt belongs to

    def data(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if value is not None}

    @classmethod
    def of(cls, data: Any) -> Call:
        """Raises ValueError if `data` describes no call."""
        known = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not known >= set(data) or not all(isinstance(data.get(k), str) for k in ("node", "method")):
            raise ValueError("not a node call of this version")
        if data["method"].startswith("_"):
            raise ValueError(f"no node has a method {data['method']}")
        return cls(**{"instance": None, **data})


class Nodes:
    """The node instances of this worker, and the running of their methods."""

    def __init__(self) -> None:
        self._instances: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._tracker: Any = None
        self._prompt: str | None = None

    def drop(self, number: int) -> None:
        """The host's instance is gone. Any thread."""
        self._instances.pop(number, None)

    def forget(self, recipe: int) -> None:
        """What was made from that recipe is not needed any more. Any thread."""
        self._made.pop(recipe, None)

    def drop_all(self) -> None:
        """Remember nothing; whatever is needed again is made again."""
        self._instances.clear()
        self._made.clear()

    async def run(self, call: Call, values: dict[str, Any]) -> Any:
        """The result of the method, in a form that crosses: see :func:`packed`.

        `values`: ``inputs`` by name; in the newer style also ``hidden`` by name, and ``paths`` and what else the executor passes
        along as `v3_data`; ``metadata`` as `metadata.places_of` gives it. Raises whatever the method raises.
        """
        self._enter_prompt(call)
        if call.executes:
            moments.before_node()
        watched = metadata.Watched(values)
        try:
            return watched.with_changes(packed(await self._call(call, values, self._tracker)))
        finally:
            if call.executes:
                end_of_node()
                moments.after_node()

    async def ask(self, call: Call, values: dict[str, Any]) -> Any:
        """As :meth:`run` for a method that is asked outside of any prompt; on any thread."""
        return packed(await self._call(call, values, None))

    def suspends(self, call: Call, values: dict[str, Any]) -> bool:
        """Whether the call may have to wait for something other than the node itself."""
        cls = class_of(call.node)
        method = cls.FUNCTION if is_v3(cls) and call.method == "execute" else call.method
        return inspect.iscoroutinefunction(getattr(cls, method, None)) or any(follows(value) for value in values["inputs"].values())

    async def _call(self, call: Call, values: dict[str, Any], tracker: Any, throw_away: bool = False) -> Any:
        from comfy_execution.graph_utils import GraphBuilder
        from comfy_execution.utils import CurrentNodeContext
        inputs = {name: await self._here(unpacked_prompt(value), tracker) for name, value in values["inputs"].items()}
        if tracker is not None:
            tracker.add(inputs)
        cls = class_of(call.node)
        function = self._function(cls, call, values, throw_away)
        if call.nested:
            from comfy_api.latest import _io
            inputs = _io.build_nested_inputs(inputs, values["v3"])
        if call.executes:
            # Only this process knows its own counter; the executor sets it before each call.
            GraphBuilder.set_default_prefix(call.id, call.index, 0)
        with CurrentNodeContext(call.prompt, call.id, call.index), spawning.one_process():
            result = await function(**inputs) if inspect.iscoroutinefunction(function) else function(**inputs)
        if tracker is not None:
            tracker.add(outputs_of(result))
        return result

    async def _here(self, value: Any, tracker: Any) -> Any:
        """The value with every recipe in it followed."""
        if not follows(value):
            return value
        if type(value) is list:
            return [await self._here(item, tracker) for item in value]
        number = value[RECIPE]
        if number not in self._made:
            result = await self._call(Call.of(value["call"]), value["values"], tracker, throw_away=True)
            self._made[number] = result.get("result") if isinstance(result, dict) else getattr(result, "args", result)
        return self._made[number][value["slot"]]

    def _function(self, cls: Any, call: Call, values: dict[str, Any], throw_away: bool) -> Any:
        if is_v3(cls):
            from comfy_api.internal import make_locked_method_func
            from comfy_api.latest import io
            hidden = {io.Hidden[name]: unpacked_prompt(value) for name, value in values.get("hidden", {}).items()}
            cls.VALIDATE_CLASS()
            clone = cls.PREPARE_CLASS_CLONE({**values.get("v3", {}), "hidden_inputs": hidden})
            return make_locked_method_func(cls, cls.FUNCTION if call.method == "execute" else call.method, clone)
        if call.instance is None:
            return getattr(cls() if throw_away else cls, call.method)
        node = self._instances.get(call.instance)
        if node is None:
            node = self._instances[call.instance] = cls()
        return getattr(node, call.method)

    def _enter_prompt(self, call: Call) -> None:
        if call.preview is not None:
            import latent_preview
            latent_preview.set_preview_method(call.preview)
        if call.prompt and call.prompt != self._prompt:
            self._prompt = call.prompt
            self.begin_prompt()

    def begin_prompt(self) -> None:
        """The models that the coming calls use are in use from now on."""
        import comfy.model_patcher
        tracker = getattr(comfy.model_patcher, "PromptModelTracker", None)      # since 0.30.0
        if tracker is not None and self._tracker is None:
            self._tracker = tracker()
        if self._tracker is not None:
            self._tracker.start()

    def end_prompt(self, prompt: str | None = None) -> None:
        """The prompt is over, in this worker too: its models may be given back first. On the execution thread."""
        boot.restore_functions()
        if prompt is None or prompt == self._prompt:
            self._prompt = None
            if self._tracker is not None:
                self._tracker.end()


def follows(value: Any) -> bool:
    """Whether a recipe has to be followed for an input."""
    if type(value) is list:
        return any(type(item) is dict and RECIPE in item for item in value)
    return type(value) is dict and RECIPE in value


def class_of(name: str) -> Any:
    """The node class. Raises LookupError."""
    import nodes
    try:
        return nodes.NODE_CLASS_MAPPINGS[name]
    except KeyError:
        raise LookupError(f"there is no node {name} in this worker") from None


def is_v3(cls: Any) -> bool:
    from comfy_api.internal import _ComfyNodeInternal
    return isinstance(cls, type) and issubclass(cls, _ComfyNodeInternal)


def packed(result: Any) -> Any:
    """The result with what only this process knows turned into plain data: ``ui`` as JSON, exact tuples and lists. Raises TypeError
    for a ``ui`` that is none."""
    from comfy_api.internal import _NodeOutputInternal
    if isinstance(result, _NodeOutputInternal):
        ui = result.ui if result.ui is None or isinstance(result.ui, dict) else result.ui.as_dict()
        return {OUTPUT: True, "args": tuple(result.args), "ui": for_page(ui, UI), "expand": result.expand, "block": result.block_execution}
    for exact in (tuple, list, dict):
        if isinstance(result, exact) and type(result) is not exact:
            result = exact(result)
    if type(result) is dict and "ui" in result:
        result = {**result, "ui": for_page(result["ui"], UI)}
    return result


def unpacked(result: Any) -> Any:
    """In the host: what :func:`packed` made, as the executor expects it."""
    if isinstance(result, dict) and metadata.CHANGES in result:
        return {**result, "result": unpacked(result["result"])}
    if isinstance(result, dict) and result.get(OUTPUT) is True:
        from comfy_api.latest import io
        return io.NodeOutput(*result["args"], ui=result["ui"], expand=result["expand"], block_execution=result["block"])
    return result


DYNPROMPT = "comfy_multiproc.dynprompt"
DYNPROMPT_FIELDS = ("original_prompt", "ephemeral_prompt", "ephemeral_parents", "ephemeral_display")


def packed_prompt(value: Any) -> Any:
    """In the host: the workflow as it has grown (hidden input DYNPROMPT) as plain data; anything else as it is."""
    from comfy_execution.graph import DynamicPrompt
    if isinstance(value, DynamicPrompt):
        return {DYNPROMPT: {name: getattr(value, name) for name in DYNPROMPT_FIELDS}}
    return value


def unpacked_prompt(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1 and DYNPROMPT in value:
        from comfy_execution.graph import DynamicPrompt
        prompt = DynamicPrompt(value[DYNPROMPT]["original_prompt"])
        for name in DYNPROMPT_FIELDS:
            setattr(prompt, name, value[DYNPROMPT][name])
        return prompt
    return value


def outputs_of(result: Any) -> Any:
    if isinstance(result, dict):
        return result.get("result", ())
    return getattr(result, "args", result)


def end_of_node() -> None:
    """Give back what a node leaves on the card: cast buffers and prefetched weights, as the executor does it after each node."""
    import comfy.memory_management
    import comfy.model_management
    if not getattr(comfy.memory_management, "aimdo_enabled", False):
        return
    comfy.model_management.reset_cast_buffers()
    prefetch = sys.modules.get("comfy.model_prefetch")
    if prefetch is not None:
        prefetch.cleanup_prefetch_queues()
    try:
        import comfy_aimdo.model_vbar
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
    except Exception as error:
        logging.debug("aimdo: %s", error)
