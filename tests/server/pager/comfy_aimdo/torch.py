import ctypes

import torch


def aimdo_to_tensor(alloc, device):
    owner, address, size = alloc
    if hasattr(owner, "pages"):
        return owner.pages[address][0][:size]
    return owner.memory[address:address + size]


def hostbuf_to_tensor(hostbuf):
    return torch.frombuffer((ctypes.c_uint8 * hostbuf.size).from_address(hostbuf.get_raw_address()), dtype=torch.uint8)
