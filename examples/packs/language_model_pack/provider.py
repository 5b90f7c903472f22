import queue
import threading

from comfy.process_memory import Candidate, DeviceUsage, Outcome, ProcessMemoryProvider, Receipt


class LanguageModel(ProcessMemoryProvider):
    """A language-model server (a subprocess.Popen with text pipes) that holds its weights on one device."""

    name = "language model"

    def __init__(self, server, device):
        self.pid = server.pid
        self._server, self.device = server, device
        self._resident, self._busy = 0, True
        self._sending = threading.Lock()
        self._dropped = queue.SimpleQueue()
        self.answers = queue.SimpleQueue()  # for whoever asks it something: (ticket, word, text)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, *words):
        with self._sending:
            self._server.stdin.write(" ".join(words) + "\n")
            self._server.stdin.flush()

    def _listen(self):
        for line in self._server.stdout:
            word, first, rest = line.rstrip("\n").split(" ", 2)
            if word == "state":
                self._resident, self._busy = int(first), rest == "busy"
            elif word == "dropped":
                self._dropped.put((first, int(rest)))
            else:
                self.answers.put((first, word, rest))
        self._resident = 0
        self._dropped.put(("", 0))  # wakes whoever waits: the server has ended

    # counting: from what the server has said last, never by asking it

    def usage(self, device):
        resident = self._resident if device == self.device else 0
        return DeviceUsage(resident=resident, reclaimable=0 if self._busy else resident, committed=resident, busy=self._busy)

    def candidates(self, device):
        if device != self.device or not self._resident:
            return []
        return [Candidate(id="weights", name=self.name, resident=self._resident, size=self._resident, in_use=self._busy)]

    # asking: on a thread of ComfyUI's that waits until the deadline and no longer

    def release(self, request):
        if request.device != self.device or request.candidate not in (None, "weights"):
            return Receipt(outcome=Outcome.NOTHING)
        try:
            self.send("drop", request.ticket)
            ticket = None
            while ticket != request.ticket and self._server.poll() is None:
                ticket, freed = self._dropped.get(timeout=request.remaining())
        except queue.Empty:
            return Receipt(outcome=Outcome.BUSY, resident=self._resident)
        except OSError:
            return Receipt(outcome=Outcome.GONE)
        if ticket != request.ticket:
            return Receipt(outcome=Outcome.GONE)
        return Receipt(outcome=Outcome.FREED if freed else Outcome.NOTHING, freed=freed, resident=self._resident)
