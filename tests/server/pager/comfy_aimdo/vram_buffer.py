class VRAMBuffer:
    def __init__(self, max_size, device):
        self.max_size, self.device, self.memory = max_size, device, None

    def size(self):
        return 0 if self.memory is None else self.memory.nbytes

    def get(self, size, offset=0):
        import torch
        if size + offset > self.size():
            self.memory = torch.empty(size + offset, dtype=torch.uint8, device=torch.device("npu", self.device))
        return (self, offset, size)
