"""A stand-in for a language-model server: a process that holds memory, talks in lines, and knows nothing of ComfyUI.

    python language_server.py BYTES

It obeys its owner, too: `busy` and `idle` begin and end the answering of a question.
"""

import sys


def main():
    weights = bytearray(int(sys.argv[1]))
    busy = False
    waiting = []

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()

    def drop(ticket):
        nonlocal weights
        freed, weights = len(weights), bytearray()
        say("state", 0, "idle")
        say("dropped", ticket, freed)

    say("state", len(weights), "idle")
    for line in sys.stdin:
        word, *rest = line.split()
        if word in ("busy", "idle"):
            busy = word == "busy"
            say("state", len(weights), word)
        else:
            waiting.append(rest[0])
        while waiting and not busy:
            drop(waiting.pop(0))


main()
