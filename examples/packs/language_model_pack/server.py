"""A language-model server: a program of its own that knows nothing of ComfyUI and keeps its weights on the card.

    python server.py DEVICE BYTES

It reads lines and writes lines. `ask TICKET TEXT` loads the weights if they are not on the card, and is answered by
`answer TICKET TEXT` or by `failed TICKET WHY`. `drop TICKET` takes them off the card and is answered by `dropped TICKET BYTES`.
It says `state BYTES busy` and `state BYTES idle` when that changes. The weights are random, so the answers are nonsense.
"""

import sys

WORDS = "soft bright misty golden quiet ancient distant blue warm silver winter evening glass paper velvet stormy".split()
LENGTH = 8


class Model:
    """Predicts the next word from one square matrix of about `size` bytes on `device`, a name that torch understands."""

    def __init__(self, device, size):
        if device.startswith("npu"):
            import torch_npu  # noqa: F401  torch knows Ascend cards from here on
        import torch
        self.torch, self.device = torch, torch.device(device)
        width = int((size / 4) ** 0.5)
        weights = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) * 3 / width ** 0.5
        self.weights = weights.to(self.device)

    @property
    def size(self):
        return self.weights.nbytes

    def words(self, text):
        torch = self.torch
        state = torch.randn(len(self.weights), generator=torch.Generator().manual_seed(sum(text.encode()))).to(self.device)
        for _ in range(LENGTH):
            state = torch.tanh(self.weights @ state)
            yield WORDS[int(state[:len(WORDS)].argmax())]

    def leave(self):
        """Off the card, the allocator's cache included."""
        del self.weights
        if self.device.type != "cpu":
            self.torch.get_device_module(self.device).empty_cache()


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(device, size):
    model = None
    say("state", 0, "idle")
    for line in sys.stdin:
        word, ticket, *rest = line.rstrip("\n").split(" ", 2)
        resident = model.size if model else 0
        if word == "ask":
            say("state", resident, "busy")
            try:
                model = model or Model(device, size)
                answer = "answer", ticket, " ".join(model.words(*rest))
            except RuntimeError as error:       # torch's OutOfMemoryError is one
                answer = "failed", ticket, " ".join(str(error).split()) or type(error).__name__
            say("state", model.size if model else 0, "idle")
            say(*answer)
        elif word == "drop":
            if model:
                model.leave()
                model = None
            say("state", 0, "idle")
            say("dropped", ticket, resident)


for stream in sys.stdin, sys.stdout:
    stream.reconfigure(encoding="utf-8")
main(sys.argv[1], int(sys.argv[2]))
