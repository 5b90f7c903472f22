import itertools
import weakref

from . import control

vbars = weakref.WeakSet()
_numbers = itertools.count(1)


class ModelVBAR:
    """Addresses for a model's weights; a page has memory from its first fault until it is freed."""

    def __init__(self, size, device):
        control.note("ModelVBAR")
        self.max_size, self.device, self.offset = size, device, 0
        self.pages = {}     # offset -> (memory, signature)
        self.turn = next(_numbers)
        vbars.add(self)

    def prioritize(self, malloc_async_clamp=None):
        control.note("prioritize")
        self.turn = next(_numbers)

    def deprioritize(self):
        self.turn = 0

    def alloc(self, num_bytes):
        self.offset = -(-self.offset // 512) * 512
        address, self.offset = self.offset, self.offset + num_bytes
        if self.offset > self.max_size:
            raise MemoryError("VBAR OOM")
        return (self, address, num_bytes)

    def fault(self, address, size):
        import torch
        control.note("fault")
        if address not in self.pages:
            short = control.get_total_vram_usage() + size - control.LIMIT
            for other in sorted(vbars, key=lambda vbar: vbar.turn):
                if other.turn < self.turn and short > 0:
                    short -= other.free_memory(short)
            if short > 0:
                control.note("fault refused")
                return None
            memory = torch.empty(size, dtype=torch.uint8, device=torch.device("npu", self.device))
            self.pages[address] = (memory, next(_numbers))
        return (self.pages[address][1],)

    def loaded_size(self):
        return sum(memory.nbytes for memory, _ in self.pages.values())

    def free_memory(self, size_bytes):
        control.note("free_memory")
        freed = 0
        for address in sorted(self.pages, reverse=True):
            if freed >= size_bytes:
                break
            memory, _ = self.pages.pop(address)
            freed += memory.nbytes
            memory.untyped_storage().resize_(0)     # the module's views of it are stale from here on
        return freed


def vbar_fault(alloc):
    vbar, address, size = alloc
    return vbar.fault(address, size)


def vbar_unpin(alloc):
    control.note("unpin")


def vbar_signature_compare(a, b):
    return a is not None and a == b


def vbars_reset_watermark_limits():
    control.note("vbars_reset_watermark_limits")


def vbars_analyze(device=None):
    return sum(vbar.loaded_size() for vbar in vbars if device is None or vbar.device == device)
