"""What workers said of their packs at earlier starts, kept in the user's cache folder: a server need not wait for them again.

An entry holds only for the very files, options and versions that it was made with, and it is compared with what the worker says
as soon as that is up. It is JSON and read as such; one that cannot be used is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import __version__, boot
from .cache import cache_folder
from .pack import Pack

ENTRIES = 64
"""Files that are kept; the oldest go."""
FILES = 20_000
"""Files of a pack that are looked at: one with more is compared with its worker's word anyway."""
READ = 64 << 20     # bytes; no description is larger
TOLD = frozenset((".py", ".so", ".pyd", ".toml", ".json", ".yaml", ".yml", ".txt", ".cfg", ".ini", ".csv"))
SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages"))
ELSEWHERE = frozenset(("port", "listen", "tls_keyfile", "tls_certfile", "auto_launch", "disable_auto_launch", "verbose", "log_stdout"))
"""Options that say nothing to a pack's nodes."""


class Description:
    """What the worker `name` with these packs is known to say. `said` is None if nothing is known that holds now."""

    def __init__(self, name: str, packs: Sequence[Pack]):
        self._names = [pack.name for pack in packs]
        self.path = place_of(name, packs)
        self._signature = digest(signature(packs))
        self.said = read(self.path, self._names, self._signature)

    def keep(self, said: Mapping[str, Any]) -> None:
        """Remember it for the next start, if it is all well. Any thread; what the disk refuses is not remembered."""
        if not usable(said, self._names):
            self.forget()
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=".", suffix=".new", delete=False) as file:
                try:
                    json.dump({"signature": self._signature, "said": said}, file)
                    file.close()
                    os.replace(file.name, self.path)
                except BaseException:
                    file.close()
                    os.unlink(file.name)
                    raise
            entries = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in entries[ENTRIES:]:
                old.unlink(missing_ok=True)
        except (OSError, TypeError, ValueError) as error:
            logging.debug("the description of %s is not remembered: %s", ", ".join(self._names), error)

    def forget(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            logging.debug("%s stays: %s", self.path, error)


def last(name: str, packs: Sequence[Pack]) -> dict[str, Any] | None:
    """What the worker `name` with these packs has said most recently, be it of other files or with other options."""
    return read(place_of(name, packs), [pack.name for pack in packs])


def place_of(name: str, packs: Sequence[Pack]) -> Path:
    places = [name, str(boot.ROOT), *(os.path.abspath(pack.path) for pack in packs)]
    return cache_folder() / "descriptions" / f"{digest(places)}.json"


def read(path: Path, packs: Sequence[str], signature: str | None = None) -> dict[str, Any] | None:
    """What the file holds of packs with these names; None if that is not usable, or was said of something with another signature."""
    try:
        with open(path, "rb") as file:
            entry = json.loads(file.read(READ))
        said = entry["said"] if signature in (None, entry["signature"]) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logging.debug("%s cannot be used: %s", path, error)
        return None
    return said if usable(said, packs) else None


def signature(packs: Sequence[Pack]) -> Any:
    """Everything that what a pack says may depend on, as far as it can be seen without running it."""
    state = boot.collect()
    options = {name: value for name, value in state["args"].items() if name not in ELSEWHERE}
    return [__version__, sys.version, options, list(files_of(boot.ROOT / "comfy_multiproc")), stamps([boot.ROOT / "nodes.py", boot.ROOT / "comfyui_version.py"]),
            [[pack.name, os.path.abspath(pack.path), str(pack.python), list(files_of(Path(pack.path)))] for pack in packs]]


def files_of(path: Path) -> Iterator[list[Any]]:
    """Name, size and time of change of each file of a pack that may have a say."""
    if path.is_file():
        yield from stamps([path])
        return
    count = 0
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        if "pyvenv.cfg" in files:
            folders.clear()
        there = [Path(folder, name) for name in sorted(files) if os.path.splitext(name)[1].lower() in TOLD]
        count += len(there) + 1
        if count > FILES:
            return
        yield from stamps(there)


def stamps(files: Sequence[Path]) -> Iterator[list[Any]]:
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        yield [str(file), stat.st_size, stat.st_mtime_ns]


def digest(value: Any) -> str:
    data = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(data.encode(errors="surrogatepass")).hexdigest()[:32]


def usable(said: Any, packs: Sequence[str]) -> bool:
    """Whether it is what a worker with these packs says when every one of them can be isolated."""
    if not isinstance(said, dict) or not isinstance(said.get("packs"), dict) or sorted(said["packs"]) != sorted(packs):
        return False
    if not all(isinstance(said.get(key), list) for key in ("routes", "replacements")) or not isinstance(said.get("prompt_handlers"), int):
        return False
    return all(isinstance(one, dict) and "error" not in one and one.get("edits") == [] and isinstance(one.get("classes"), list)
               and isinstance(one.get("folders"), dict) and isinstance(one.get("web_directories"), dict)
               and all(isinstance(data, dict) and isinstance(data.get("id"), str) for data in one["classes"]) for one in said["packs"].values())
