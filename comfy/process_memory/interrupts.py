"""A prompt that is cancelled here is cancelled for those who work on it in other processes."""
from __future__ import annotations

import logging
import sys
import threading

from . import registry


def tell_interrupt(value: bool) -> None:
    """The flag that interrupts the prompt was set, or taken back before the next one. Any thread; waits for nobody."""
    for entry in registry.entries:
        if registry.overridden(entry, "interrupt"):
            # Not on the provider's helper thread: the call that runs there may be what is to be interrupted.
            threading.Thread(target=_tell, args=(entry, _prompt_id(), bool(value)), daemon=True, name=f"process memory: {entry.name}, interrupt").start()


def _tell(entry: registry.Entry, prompt_id: str | None, value: bool) -> None:
    try:
        entry.provider.interrupt(prompt_id, value)
    except Exception as error:
        logging.warning("Process memory: %s was not interrupted: %s: %s", entry, type(error).__name__, error)


def _prompt_id() -> str | None:
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    return getattr(server, "last_prompt_id", None)
