"""A language-model server that holds its weights on the virtual card. SIGUSR1: somebody asks it something, so it loads them."""

import signal
import sys

from comfy_multiproc.testing.card.capacity import CapacityFile

SIZE = 16 << 20

card = CapacityFile(sys.argv[1])
resident = 0


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def load(*_):
    global resident
    if not resident:
        card.allocate(0, SIZE)
        resident = SIZE
    say("state", resident, "idle")


def drop(ticket):
    global resident
    freed, resident = resident, 0
    card.release(0, freed)
    say("state", 0, "idle")
    say("dropped", ticket, freed)


signal.signal(signal.SIGUSR1, load)
load()
for line in sys.stdin:
    drop(line.split()[1])
