"""Where this user keeps what can be made again: descriptions of packs, tiny models, the built C++ card."""

from __future__ import annotations

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """$COMFY_MULTIPROC_CACHE, else comfyui-multiproc in the user's cache folder. It need not exist yet."""
    chosen = os.environ.get("COMFY_MULTIPROC_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "comfyui-multiproc"
