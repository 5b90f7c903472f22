"""A prompt that is cancelled here is cancelled for those who work on it in other processes."""
from __future__ import annotations

import logging
import sys
import threading
from collections import deque

from . import registry

LATEST = 8
"""How much is kept for a provider that does not come back from what it is told."""

_lock = threading.Lock()
_untold: dict[registry.Entry, deque[tuple[str | None, bool]]] = {}      # of those that are being told just now


def tell_interrupt(value: bool) -> None:
    """The flag that interrupts the prompt was set, or taken back before the next one. Any thread; waits for nobody."""
    for entry in registry.entries:
        if registry.overridden(entry, "interrupt"):
            with _lock:
                telling = entry in _untold
                _untold.setdefault(entry, deque(maxlen=LATEST)).append((_prompt_id(), bool(value)))
            if not telling:
                # Not on the provider's helper thread: the call that runs there may be what is to be interrupted.
                threading.Thread(target=_tell, args=(entry,), daemon=True, name=f"process memory: {entry.name}, interrupt").start()


def _tell(entry: registry.Entry) -> None:
    # One after the other: a cancellation that came late would be the next prompt's.
    while True:
        with _lock:
            if not _untold[entry]:
                del _untold[entry]
                return
            told = _untold[entry].popleft()
        try:
            entry.provider.interrupt(*told)
        except BaseException as error:
            logging.warning("Process memory: %s was not interrupted: %s: %s", entry, type(error).__name__, error)


def _prompt_id() -> str | None:
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    return getattr(server, "last_prompt_id", None)
