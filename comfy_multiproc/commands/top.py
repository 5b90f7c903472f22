"""top: every device and every ComfyUI process of this user, and who holds what. Reads the ledger; asks nobody."""

import argparse
import json
import shutil
import time
from collections.abc import Iterable
from typing import Any

from comfy_multiproc.console import Console
from comfy_multiproc.ledger import Ledger, LedgerError
from comfy_multiproc.records import Process

SHORTEST = 12
"""Letters that a name keeps at least, however narrow the terminal is."""

COLUMNS = ("pid", "name", "state", "weights", "cached", "other", "claimed", "give", "pinned", "RAM")


def configure(commands: Any) -> None:
    parser = commands.add_parser("top", help="show every device and every ComfyUI process, refreshed live; Ctrl-C ends it")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--json", action="store_true", help="for a program: one JSON object a line, sizes in bytes, null is unknown")
    parser.add_argument("--interval", type=interval, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.set_defaults(run=run)


def interval(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("from 0.05 to 3600 seconds")
    return seconds


def run(args: argparse.Namespace, console: Console) -> int:
    """Exit code 2 where there is no ledger to read and nobody waits for one to appear."""
    try:
        return show(args, console)
    except KeyboardInterrupt:
        return 0    # the way to end it


def show(args: argparse.Namespace, console: Console) -> int:
    """Until somebody ends it, or once."""
    live = console.out.isatty() and not args.json and not args.once
    while True:
        try:
            rows = look()
        except LedgerError as error:
            if args.once:
                console.error(str(error))
                return 2
            rows = []
        if args.json:
            console.say(json.dumps({"time": time.time(), "processes": rows}))
        else:
            if live:
                size = shutil.get_terminal_size()
                lines = table(rows, size.columns)
                console.out.write("\x1b[H" + "".join(f"{line[:size.columns]}\x1b[K\n" for line in lines[:size.lines - 1]) + "\x1b[J")
                console.out.flush()
            else:
                console.say("\n".join([*([] if args.once else [time.strftime("-- %H:%M:%S")]), *table(rows)]))
        if args.once:
            return 0
        time.sleep(args.interval)


def look() -> list[dict[str, Any]]:
    """Every process as plain data. Raises LedgerError."""
    ledger = Ledger(create=False)
    try:
        return [row(process, ledger) for process in ledger.processes(exact=True)]
    finally:
        ledger.close()


def row(process: Process, ledger: Ledger) -> dict[str, Any]:
    """One process as plain data."""
    from comfy.process_memory.devices import is_card
    from comfy.process_memory.figures import STALE
    age = ledger.age(process.slot)
    return {
        "pid": process.pid, "name": process.name, "age": age, "prompts": process.prompts,
        "state": "silent" if age > STALE else "busy" if process.busy else "idle",
        "ram": process.ram.resident, "pinned": process.ram.pinned,
        "devices": [{
            "device": key, "total": report.total, "weights": report.usage.resident, "cached": report.usage.cached,
            "scratch": report.usage.scratch, "claimed": ledger.claimed(process.slot, key), "reclaimable": report.usage.reclaimable,
            "committed": report.usage.committed, "allocator": report.allocator, "pager": report.pager,
            "capturing": report.usage.capturing,
            "models": [{"name": c.name, "resident": c.resident, "size": c.size, "in_use": c.in_use, "kind": c.kind.value}
                       for c in report.candidates],
        } for key, report in process.devices.items() if is_card(key)],
    }


def table(rows: list[dict[str, Any]], width: int = 1 << 16) -> list[str]:
    """The same for people, names shortened so that the lines are no longer than `width`, if that can be."""
    lines = []
    devices: dict[str, int | None] = {}
    for process in rows:
        for held in process["devices"]:
            devices[held["device"]] = devices.get(held["device"]) or held["total"]
    for device, total in devices.items():
        holders = [(p, held) for p in rows for held in p["devices"] if held["device"] == device]
        known = [occupied(held) for _, held in holders]
        used = sum(k for k in known if k is not None)
        lines.append(f"{device}   {size(used)} of {size(total)} held by {count(len(holders))}{' or more' if None in known else ''}")
        lines += columns(((p["pid"], p["name"], p["state"], *map(short, (
            held["weights"], held["cached"], held["scratch"], held["claimed"], held["reclaimable"], p["pinned"], p["ram"])))
            for p, held in holders), width)
        lines.append("")
    without = [p for p in rows if not p["devices"]]
    if without:
        lines.append("no card")
        lines += columns(((p["pid"], p["name"], p["state"], "", "", "", "", "", short(p["pinned"]), short(p["ram"])) for p in without), width)
        lines.append("")
    return lines[:-1] or ["no ComfyUI process is running"]


def occupied(held: dict[str, Any]) -> int | None:
    """What a process occupies on a device, beside its context."""
    if held["allocator"] is None or held["pager"] is None:
        return held["weights"]
    return int(held["allocator"] + held["pager"])


def count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def columns(cells: Iterable[tuple[Any, ...]], width: int) -> list[str]:
    """Lines with the texts to the left and the figures to the right."""
    whole = [COLUMNS, *(tuple(str(cell) for cell in line) for line in cells)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(COLUMNS))]
    names = min(widths[1], max(SHORTEST, widths[1] + width - sum(widths) - len(widths) + 1))
    lines = [[*line[:1], line[1] if len(line[1]) <= names else f"{line[1][:names - 2]}..", *line[2:]] for line in whole]
    widths[1] = names
    return [" ".join(cell.ljust(wide) if 0 < i < 3 else cell.rjust(wide) for i, (cell, wide) in enumerate(zip(line, widths))) for line in lines]


def size(value: int | None) -> str:
    """Bytes for people."""
    if value is None:
        return "?"
    return f"{value / 1024**3:.1f} GB" if value >= 1024**3 else f"{value / 1024**2:.0f} MB"


def short(value: int | None) -> str:
    """The same for a table: 7.0G, 512M."""
    return size(value).replace(" ", "").removesuffix("B")
