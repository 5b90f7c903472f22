"""The timeline as a picture and as text."""

from __future__ import annotations

from pathlib import Path

from .recorder import Recording, Sample

COLOURS = ["#4878d0", "#ee854a", "#6acc64", "#956cb4", "#d65f5f", "#8c613c"]
BARS = " ▁▂▃▄▅▆▇█"
MARKS = {"release": "▼", "out of memory": "×"}
MB = 1 << 20
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 1400, 470, 90, 80, 24, 150
SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
CLAIMED, RELEASED, FAILED = "#c8c8c8", "#007a33", "#c00000"


def draw(recordings: dict[str, Recording], path: Path) -> None:
    """One panel per recording, stacked by process, claims grey on top, marks for steps, releases and failures."""
    from PIL import Image, ImageDraw, ImageFont
    image = Image.new("RGB", (WIDTH, HEIGHT * len(recordings)), "white")
    canvas = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    for number, (title, recording) in enumerate(recordings.items()):
        _panel(canvas, HEIGHT * number, title, recording, font, small)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def _panel(canvas, top: int, title: str, recording: Recording, font, small) -> None:
    left, right, upper, lower = LEFT, WIDTH - RIGHT, top + TOP, top + HEIGHT - BOTTOM
    ceiling = max(recording.size, recording.peak) * 1.12
    length = min(recording.length, recording.eventful * 1.04) or 1.0

    def x(at: float) -> float:
        return min(right, left + (right - left) * at / length)

    def y(size: float) -> float:
        return lower - (lower - upper) * size / ceiling

    canvas.text((left, top + 10), f"{title}: bytes on a card of {recording.size // MB} MB, by process", fill="black", font=font)
    if recording.length - length >= 1:
        canvas.text((right, top + 12), f"nothing on the card in the {recording.length - length:.0f} s that follow", fill="#333333", font=small, anchor="ra")
    order = list(recording.names)
    for before, after in zip(recording.samples, recording.samples[1:]):
        base = 0
        for pid in order:
            size = before.held.get(pid, 0)
            if size:
                canvas.rectangle([x(before.at), y(base + size), max(x(before.at) + 1, x(after.at)), y(base)], fill=COLOURS[order.index(pid) % len(COLOURS)])
                base += size
        claimed = sum(before.claimed.values())
        if claimed:
            canvas.rectangle([x(before.at), max(upper, y(base + claimed)), max(x(before.at) + 1, x(after.at)), y(base)], fill=CLAIMED)
    canvas.line([left, y(recording.size), right, y(recording.size)], fill=FAILED, width=2)
    canvas.text((right - 130, y(recording.size) - 16), "size of the card", fill=FAILED, font=small)
    for share in (0, 0.25, 0.5, 0.75, 1):
        canvas.text((left - 70, y(recording.size * share) - 7), f"{recording.size * share / MB:.0f} MB", fill="black", font=small)
    canvas.line([left, lower, right, lower], fill="black")
    tick = next((seconds for seconds in SECONDS if length / seconds <= 16), length)
    for number in range(int(length / tick) + 1):
        canvas.line([x(number * tick), lower, x(number * tick), lower + 4], fill="black")
        canvas.text((x(number * tick), lower + 6), f"{number * tick:g} s", fill="black", font=small, anchor="ma")
    for number, event in enumerate(event for event in recording.events if event.kind == "step"):
        canvas.line([x(event.at), upper, x(event.at), lower + 20], fill="#999999")
        canvas.text((min(x(event.at) + 2, right - canvas.textlength(event.text, font=small)), lower + 22 + 13 * (number % 5)), event.text, fill="#333333", font=small)
    ends = [0.0, 0.0]       # of the words in each of two lines
    for at, words in released(recording, 30 * length / (right - left)):
        canvas.line([x(at), upper - 12, x(at), lower], fill=RELEASED)
        triangle(canvas, x(at), upper - 12)
        wide = canvas.textlength(words, font=small)
        place = min(x(at) - 5, right - wide)
        row = 0 if ends[0] <= place else 1
        ends[row] = place + wide + 8
        canvas.text((place, upper - 28 - 14 * row), words, fill=RELEASED, font=small)
    for event in recording.events:
        if event.kind == "out of memory":
            cross(canvas, min(x(event.at), right - 6), upper - 9)
    place, key = left, lower + 100
    for number, pid in enumerate(order):
        canvas.rectangle([place, key, place + 12, key + 12], fill=COLOURS[number % len(COLOURS)])
        place = legend(canvas, place, key, f"{recording.names[pid]} ({pid})", small)
    if any(any(sample.claimed.values()) for sample in recording.samples):
        canvas.rectangle([place, key, place + 12, key + 12], fill=CLAIMED)
        place = legend(canvas, place, key, "claimed: admitted, not allocated yet", small)
    if recording.releases():
        triangle(canvas, place + 6, key + 1)
        place = legend(canvas, place, key, "given back because another process asked", small)
    if any(event.kind == "out of memory" for event in recording.events):
        cross(canvas, place + 6, key + 6)
        legend(canvas, place, key, "out of memory", small)


def legend(canvas, place: float, key: float, words: str, font) -> float:
    """Words beside a mark at `place`; where the next mark may be."""
    canvas.text((place + 17, key - 1), words, fill="black", font=font)
    return place + 40 + canvas.textlength(words, font=font)


def triangle(canvas, x: float, top: float) -> None:
    canvas.polygon([(x - 5, top), (x + 5, top), (x, top + 9)], fill=RELEASED)


def cross(canvas, x: float, y: float) -> None:
    canvas.line([x - 5, y - 5, x + 5, y + 5], fill=FAILED, width=3)
    canvas.line([x - 5, y + 5, x + 5, y - 5], fill=FAILED, width=3)


def released(recording: Recording, near: float) -> list[tuple[float, str]]:
    """When and what was given back; what one process has given within `near` seconds is one entry."""
    groups: list[tuple[float, str, int]] = []
    for event in recording.releases():
        if groups and groups[-1][1] == event.who and event.at - groups[-1][0] <= near:
            groups[-1] = (groups[-1][0], event.who, groups[-1][2] + event.size)
        else:
            groups.append((event.at, event.who, event.size))
    return [(at, f"{who}: {size} MB") for at, who, size in groups]


def text(recording: Recording, columns: int = 72) -> list[str]:
    """A line of bars per process, each column the most it held in that time, then what happened when, and the steps by number."""
    lines = []
    width = max((len(f"{name} ({pid})") for pid, name in recording.names.items()), default=4)
    for pid, name in recording.names.items():
        sizes = [most(recording.samples, pid, recording.length * column / columns, recording.length * (column + 1) / columns) for column in range(columns)]
        bars = "".join(BARS[min(8, -(-size * 8 // recording.size))] for size in sizes)
        lines.append(f"  {f'{name} ({pid})':<{width}} |{bars}| at most {max(sizes, default=0) / MB:.0f} MB")
    marks, steps = [" "] * columns, [" "] * columns
    for event in recording.events:
        column = min(columns - 1, int(event.at / (recording.length or 1.0) * columns))
        if event.kind in MARKS:
            marks[column] = MARKS[event.kind]
    names = [event for event in recording.events if event.kind == "step"]
    for number, event in enumerate(names, 1):
        column = min(columns - 1, int(event.at / (recording.length or 1.0) * columns))
        while column < columns - 1 and steps[column] != " ":
            column += 1
        steps[column] = str(number)[-1]
    meaning = {"▼": "given back to another process", "×": "out of memory"}
    if seen := [f"{mark} {words}" for mark, words in meaning.items() if mark in marks]:
        lines.append(f"  {'':<{width}} |{''.join(marks)}| {', '.join(seen)}")
    lines.append(f"  {'step':<{width}} |{''.join(steps)}| {recording.length:.0f} s: {', '.join(f'{number} {event.text}' for number, event in enumerate(names, 1))}")
    lines.append(f"  card: at most {recording.peak // MB} of {recording.size // MB} MB at any moment")
    return lines


def most(samples: list[Sample], pid: int, begin: float, end: float) -> int:
    """The most that a process held between two times."""
    best = 0
    for sample, after in zip(samples, samples[1:] + samples[-1:]):
        if sample.at <= end and after.at >= begin:
            best = max(best, sample.held.get(pid, 0))
    return best
