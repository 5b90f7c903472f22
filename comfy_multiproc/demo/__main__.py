"""Runs the demonstration with the Python of the server's environment; ``up --demo`` calls it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from comfy_multiproc.console import Console
from comfy_multiproc.testing.server import Server, ServerError

from . import picture, scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="comfy_multiproc up --demo")
    parser.add_argument("--fork", type=Path, required=True)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["card", "cuda"], default="card")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    console.say("This takes about five minutes on two cores. What follows names each step as it begins.")
    report = scenario.Report(console.say)
    card = scenario.CARD if args.device == "card" else None
    try:
        with tempfile.TemporaryDirectory(prefix="comfy-demo-", ignore_cleanup_errors=True) as work:
            console.say("Making tiny models, unless an earlier run has ...")
            scenario.make_models()
            if card is not None:
                console.say(f"Without the series: two servers on one virtual card of {card.size >> 20} MB")
                scenario.without_series(report, copied(args.upstream, Path(work)), Path(work), card=card)
            console.say("With the series: a server and its workers on the same card")
            scenario.with_series(report, args.fork, Path(work), card=card, keep=keep(console) if args.keep else None)
    except ServerError as error:
        console.error(str(error))
        report.check(False, "the servers started and answered")
    for name, data in report.images.items():
        (args.out / name).write_bytes(data)
    for title, recording in report.recordings.items():
        console.say("\n".join([f"Bytes on the card, {title}:", *picture.text(recording)]))
        for event in recording.releases():
            console.say(f"  {event.at:6.2f} s  {event.text}")
    picture.draw(report.recordings, args.out / "timeline.png")
    (args.out / "report.json").write_text(scenario.summary(report))
    failed = [text for ok, text in report.checks if not ok]
    console.say(f"Pictures, timeline and report: {args.out}")
    for title, recording in report.recordings.items():
        ran, failed_prompts = (sum(event.kind == kind for event in recording.events) for kind in ("step", "out of memory"))
        console.say(f"{title[0].upper()}{title[1:]}: {failed_prompts} of {ran} prompts ran out of memory, at most {recording.peak >> 20} of {recording.size >> 20} MB on the card")
    console.say(f"{len(report.checks) - len(failed)} of {len(report.checks)} checks hold" + ("" if not failed else ": " + "; ".join(f"NOT: {text}" for text in failed)))
    return 0 if report.ok else 1


def copied(tree: Path, work: Path) -> Path:
    """A copy of the pristine tree, which a server writes into."""
    import shutil
    return Path(shutil.copytree(tree, work / "upstream", ignore=shutil.ignore_patterns(".git", "__pycache__")))


def keep(console: Console):
    def wait(server: Server) -> None:
        console.say(f"The server is still running: {server.url} (Ctrl-C ends it)")
        try:
            while server.process.poll() is None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            console.say("stopping")
    return wait


if __name__ == "__main__":
    sys.exit(main())
