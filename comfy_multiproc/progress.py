"""Progress of nodes in workers: bars, previews and messages to the page, each with the ids of the node whose code made it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

EVERY = 0.02    # seconds between two updates of one node that bring neither a preview nor the end

PICTURES = (2, 4)       # BinaryEventTypes that come with a picture: UNENCODED_PREVIEW_IMAGE, PREVIEW_IMAGE_WITH_METADATA


# in a worker

class Reporter:
    """Sends what nodes report to the host. `tell(kind, value)` is called on the thread that reports, and may raise ConnectionError."""

    def __init__(self, tell: Callable[[str, Any], None]):
        self._tell = tell
        self._last: dict[str, float] = {}

    def install(self) -> None:
        """Be where ComfyUI looks for it."""
        import comfy.utils
        from comfy_execution.progress import ProgressHandler, add_progress_handler
        reporter = self

        class Forward(ProgressHandler):
            """What the newer API reports. Its registry knows the node and not the prompt."""

            def __init__(self) -> None:
                super().__init__("comfy_multiproc")

            def update_handler(self, node_id: str, value: float, max_value: float, state: Any, prompt_id: str, image: Any = None) -> None:
                context = executing()
                reporter.report(node_id, context and context.prompt_id, value, max_value, image, bar=False)

        add_progress_handler(Forward())
        comfy.utils.set_progress_bar_global_hook(self.hook)

    def hook(self, value: float, total: float, preview_image: Any, prompt_id: str | None = None, node_id: str | None = None) -> None:
        """ComfyUI's progress bar hook."""
        import comfy.model_management
        comfy.model_management.throw_exception_if_processing_interrupted()
        context = executing()
        self.report(node_id or (context and context.node_id), prompt_id or (context and context.prompt_id), value, total, preview_image, bar=True)

    def report(self, node: str | None, prompt: str | None, value: float, total: float, preview: Any, *, bar: bool) -> None:
        value, total = number(value), number(total)
        now = time.monotonic()
        key = node or ""
        if preview is None and value < total and now - self._last.get(key, 0.0) < EVERY:
            return
        if len(self._last) > 1000:
            self._last.clear()
        self._last[key] = now
        update = {"node": node, "prompt": prompt, "value": value, "max": total, "bar": bar}
        if preview is not None:
            update["preview"] = packed_preview(preview)
        try:
            self._tell("progress", update)
        except ConnectionError:
            pass    # the host is gone, and this process with it


def executing() -> Any:
    from comfy_execution.utils import get_executing_context
    return get_executing_context()


def number(value: Any) -> Any:
    """The number that the page is shown, also of an array or a tensor with one. Raises TypeError for what is none."""
    try:
        return value if type(value) in (int, float) else float(value)
    except Exception as error:
        raise TypeError(f"progress must be a number, not {type(value).__name__}: {error}") from None


def for_page(value: Any, what: str) -> Any:
    """The value as the page will have it: JSON. Raises TypeError, which names it as `what`, where it is none.

    ComfyUI's server ends when it is given anything else to send; a node that does so is to fail alone.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} cannot be sent to the page, which takes JSON: {error}") from None


def message_for_page(event: Any, data: Any, sid: Any) -> dict[str, Any]:
    """What `send` takes, from what a pack gives ``send_sync``. Raises TypeError."""
    event = event if isinstance(event, str) else int(event)
    what = f"message {event!r}"
    if sid is not None and not isinstance(sid, str):
        raise TypeError(f"{what}: the page is named by a text, not by {type(sid).__name__}")
    if event in PICTURES:
        picture, metadata = data if event == PICTURES[1] else (data, None)
        for_page(metadata, what)
        if not (isinstance(picture, (tuple, list)) and len(picture) == 3 and picture[0] in ("JPEG", "PNG") and hasattr(picture[1], "save")
                and isinstance(picture[2], (int, type(None)))):
            raise TypeError(f"{what}: a preview is (\"JPEG\" or \"PNG\", picture, its largest side or None)")
    elif isinstance(data, (bytes, bytearray)):
        if isinstance(event, str):
            raise TypeError(f"{what}: bytes are sent with a number for an event")
        data = bytes(data)
    else:
        data = for_page(data, what)
    return {"event": event, "data": data, "sid": sid}


def packed_preview(preview: Any) -> Any:
    """A preview (format, picture, largest side) as values that cross."""
    kind, image, size = preview
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGB")
    return {"format": kind, "size": size, "mode": image.mode, "width": image.width, "height": image.height, "data": image.tobytes()}


# in the host

def show(update: dict[str, Any]) -> None:
    """Show what a worker's node reports, as if it had been reported here. Any thread."""
    from comfy_execution.progress import get_progress_state
    server = server_instance()
    if server is None:
        return
    registry = get_progress_state()
    node, prompt = update["node"], update["prompt"]
    prompt = prompt if prompt is not None else server.last_prompt_id
    if registry.prompt_id and prompt != registry.prompt_id:
        return      # of a prompt that is over
    node = node if node is not None else server.last_node_id
    preview = unpacked_preview(update["preview"]) if update.get("preview") is not None else None
    if node is not None:
        registry.update_progress(node, update["value"], update["max"], preview)
    if not update["bar"]:
        return
    server.send_sync("progress", {"value": update["value"], "max": update["max"], "prompt_id": prompt, "node": node}, server.client_id)
    if preview is not None and not knows_metadata(server):
        from protocol import BinaryEventTypes
        server.send_sync(BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, preview, server.client_id)


def unpacked_preview(data: dict[str, Any]) -> Any:
    from PIL import Image
    return data["format"], Image.frombytes(data["mode"], (data["width"], data["height"]), bytes(data["data"])), data["size"]


def knows_metadata(server: Any) -> bool:
    """Whether the page takes previews in the newer form, which the registry's handler has sent already."""
    try:
        from comfy_api import feature_flags
        return bool(feature_flags.supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata"))
    except ImportError:
        return False


def send(message: dict[str, Any]) -> None:
    """What a pack sends to the page. Any thread."""
    server = server_instance()
    if server is not None:
        server.send_sync(message["event"], message["data"], message["sid"])


def queue_call(server: Any, allowed: tuple[str, ...], request: dict[str, Any]) -> Any:
    """A worker's question to the queue. Raises AttributeError for what workers may not ask."""
    if request["method"] not in allowed:
        raise AttributeError(f"prompt_queue.{request['method']} is not for workers")
    return getattr(server.prompt_queue, request["method"])(*request["args"], **request["kwargs"])


def server_instance() -> Any:
    try:
        from server import PromptServer
    except ImportError:
        return None
    instance = getattr(PromptServer, "instance", None)
    if instance is None:
        logging.debug("A worker has a message for a server that is not there yet")
    return instance


def queue_updated() -> None:
    """A pack says that the queue has changed."""
    server = server_instance()
    if server is not None:
        server.queue_updated()
