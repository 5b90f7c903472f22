"""A card for tests of sharing its memory: files in a folder, which every process has that is given the folder."""

import secrets
import threading
import weakref
from pathlib import Path

import numpy as np
import torch

from comfy_multiproc import gpu

NAME = "cuda:GPU-of-files"


class FileCard:
    """Tensors of float64 are on it. `fails` names what goes wrong: "room", "export", "open", "pattern", "absent" or "hang"."""

    def __init__(self, folder, fails=()):
        self.folder, self.fails = Path(folder), set(fails)
        self.exports = self.opened = 0
        self.exported = 0       # bytes
        self.go_on = threading.Event()

    @property
    def occupied(self):
        """Whether any memory of it is allocated, by whichever process."""
        return bool(list(self.folder.iterdir()))

    def card(self, tensor):
        return NAME if tensor.dtype == torch.float64 else None

    def allocate(self, like, size):
        if "room" in self.fails:
            raise torch.cuda.OutOfMemoryError("no room")
        path = self.folder / secrets.token_hex(8)
        array = np.memmap(path, np.uint8, "w+", shape=(size,))
        weakref.finalize(array, path.unlink)
        memory = torch.from_numpy(array)
        memory.path = path
        return memory

    def export(self, memory):
        self.exports += 1
        if "export" in self.fails:
            raise RuntimeError("CUDA error: invalid argument\nand more of it")
        self.exported += memory.nbytes
        return {"file": memory.path.name, "size": memory.nbytes}

    def open(self, card, exported):
        if "hang" in self.fails:
            self.go_on.wait(60)
        if "absent" in self.fails or card != NAME:
            raise gpu.NoCard(card)
        if "open" in self.fails:
            raise RuntimeError("pidfd_getfd: Operation not permitted")
        self.opened += 1
        memory = torch.from_numpy(np.memmap(self.folder / exported["file"], np.uint8, "c", shape=(exported["size"],)))
        return torch.zeros_like(memory) if "pattern" in self.fails else memory

    def finish(self, memory):
        pass

    def collect(self):
        pass
