import ctypes
import mmap
import os

from . import control


class ModelMMAP:
    """A model file in memory: a mapping of its own, whose pages are the page cache's."""

    def __init__(self, filepath):
        control.note("ModelMMAP")
        self._file = os.open(filepath, os.O_RDONLY)
        self._map = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def get(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def get_file_handle(self):
        return self._file

    def bounce(self):
        """Let the pages go; they are read again when they are needed."""
        control.note("bounce")
        self._map.madvise(mmap.MADV_DONTNEED)
        return True

    def __del__(self):
        os.close(self._file)
