import ctypes
import mmap
import os

from . import control


def read_file_to_device(file_obj, file_offset, size, stream, device_ptr, device, mark_cold=True):
    control.note("read_file_to_device")
    ctypes.memmove(device_ptr, os.pread(file_obj, size, file_offset), size)


def cleanup_file_reader():
    pass


class HostBuffer:
    """Addresses for host memory of at most `max_grow_size` bytes."""

    def __init__(self, size, prewarm=0, max_grow_size=0, mark_cold=True):
        control.note("HostBuffer")
        self._memory = mmap.mmap(-1, max(size, int(max_grow_size), 1))
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size = size

    def get_raw_address(self):
        return self._start

    def extend(self, size, reallocate=False, register=True):
        if self.size + size > len(self._memory):
            raise RuntimeError("HostBuffer.extend failed")
        self.size += size
        return self._start

    def read_file_slice(self, file_obj, file_offset, size, offset=0, stream=0, device_ptr=0, device=-1):
        control.note("read_file_slice")
        ctypes.memmove(self._start + offset, os.pread(file_obj, size, file_offset), size)
        self.size = max(self.size, offset + size)
        if device_ptr:
            ctypes.memmove(device_ptr, self._start + offset, size)

    def truncate(self, size, do_unregister=True):
        if do_unregister:
            for address in [a for a in control.registered if self._start + size <= a < self._start + self.size]:
                del control.registered[address]
        self.size = size
