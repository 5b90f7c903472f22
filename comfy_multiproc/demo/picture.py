"""The timeline as a picture and as text."""

from __future__ import annotations

from pathlib import Path

from .recorder import Recording, Sample

COLOURS = ["#4878d0", "#ee854a", "#6acc64", "#956cb4", "#d65f5f", "#8c613c"]
BARS = " ▁▂▃▄▅▆▇█"
MIB = 1 << 20
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 1400, 420, 90, 46, 24, 124


def draw(recordings: dict[str, Recording], path: Path) -> None:
    """One panel per recording, stacked by process, claims hatched on top, marks for steps, releases and failures."""
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
    length = recording.length or 1.0

    def x(at: float) -> float:
        return left + (right - left) * at / length

    def y(size: float) -> float:
        return lower - (lower - upper) * size / ceiling

    canvas.text((left, top + 10), f"{title}: bytes on a card of {recording.size // MIB} MiB, by process", fill="black", font=font)
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
            canvas.rectangle([x(before.at), max(upper, y(base + claimed)), max(x(before.at) + 1, x(after.at)), y(base)], fill="#c8c8c8")
    canvas.line([left, y(recording.size), right, y(recording.size)], fill="#c00000", width=2)
    canvas.text((right - 130, y(recording.size) - 16), "size of the card", fill="#c00000", font=small)
    for share in (0, 0.25, 0.5, 0.75, 1):
        canvas.text((left - 70, y(recording.size * share) - 7), f"{recording.size * share / MIB:.0f} MiB", fill="black", font=small)
    canvas.line([left, lower, right, lower], fill="black")
    steps = [event for event in recording.events if event.kind == "step"]
    for number, event in enumerate(steps):
        canvas.line([x(event.at), upper, x(event.at), lower + 4], fill="#999999")
        canvas.text((min(x(event.at) + 2, right - canvas.textlength(event.text, font=small)), lower + 4 + 13 * (number % 5)), event.text, fill="#333333", font=small)
    for event in recording.events:
        if event.kind == "release":
            canvas.polygon([(x(event.at) - 5, upper - 12), (x(event.at) + 5, upper - 12), (x(event.at), upper - 3)], fill="#007a33")
        elif event.kind == "out of memory":
            canvas.line([x(event.at) - 5, upper - 14, x(event.at) + 5, upper - 4], fill="#c00000", width=3)
            canvas.line([x(event.at) - 5, upper - 4, x(event.at) + 5, upper - 14], fill="#c00000", width=3)
    place = left
    for pid in order:
        canvas.rectangle([place, lower + 76, place + 12, lower + 88], fill=COLOURS[order.index(pid) % len(COLOURS)])
        text = f"{recording.names[pid]} ({pid})"
        canvas.text((place + 17, lower + 75), text, fill="black", font=small)
        place += 40 + int(canvas.textlength(text, font=small))
    for colour, text in (("#c8c8c8", "claimed"), ("#007a33", "released for another process"), ("#c00000", "out of memory")):
        canvas.rectangle([place, lower + 76, place + 12, lower + 88], fill=colour)
        canvas.text((place + 17, lower + 75), text, fill="black", font=small)
        place += 40 + int(canvas.textlength(text, font=small))


def text(recording: Recording, columns: int = 72) -> list[str]:
    """A line of bars per process, each column the most it held in that time, and the steps below."""
    lines = []
    width = max((len(f"{name} ({pid})") for pid, name in recording.names.items()), default=4)
    for pid, name in recording.names.items():
        sizes = [most(recording.samples, pid, recording.length * column / columns, recording.length * (column + 1) / columns) for column in range(columns)]
        bars = "".join(BARS[min(8, -(-size * 8 // recording.size))] for size in sizes)
        lines.append(f"  {f'{name} ({pid})':<{width}} |{bars}| at most {max(sizes, default=0) // MIB} MiB")
    lines.append(f"  {'card':<{width}} |{'':<{columns}}| at most {recording.peak // MIB} of {recording.size // MIB} MiB at any moment")
    return lines


def most(samples: list[Sample], pid: int, begin: float, end: float) -> int:
    """The most that a process held between two times."""
    best = 0
    for sample, after in zip(samples, samples[1:] + samples[-1:]):
        if sample.at <= end and after.at >= begin:
            best = max(best, sample.held.get(pid, 0))
    return best
