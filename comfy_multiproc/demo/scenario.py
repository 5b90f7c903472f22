"""What the demonstration runs, and the checks that its verdict is made of.

With the series: one server whose two example packs are isolated, so that the second checkpoint lives in a worker. Without
it: two unmodified servers that stand for the same two processes. Both on a card that holds one of the two checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfy_multiproc.testing import CardSettings, read_card, start_server, tiny_models, workflows
from comfy_multiproc.testing.server import Result, Server, ServerError

from .recorder import Recorder, Recording

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKS = [EXAMPLES / "packs" / name for name in ("checkpoint_pack", "tint_pack")]
CARD = CardSettings(size=300 << 20)
"""Room for one of the two checkpoints (about 250 MiB each), not for both."""

TOGETHER = 5
"""How often the card is read again, at most, because claims have changed meanwhile."""

CANCEL_SECONDS = 15.0
"""Within which a cancelled prompt has ended: the grace period of 5 s and a slow machine."""


@dataclass
class Report:
    """What happened: checks in order, pictures, recordings by title."""
    say: Callable[[str], None]
    checks: list[tuple[bool, str]] = field(default_factory=list)
    recordings: dict[str, Recording] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)

    def check(self, ok: bool, text: str) -> bool:
        self.checks.append((ok, text))
        self.say(f"  {'ok  ' if ok else 'FAIL'} {text}")
        return ok

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(ok for ok, _ in self.checks)


def workflow(name: str, **inputs: Any) -> dict[str, Any]:
    """A prompt of the examples, with these inputs in every node that has them, so that it runs again."""
    graph = json.loads((EXAMPLES / "workflows" / f"{name}.json").read_text("utf-8"))
    for node in graph.values():
        node["inputs"].update({key: value for key, value in inputs.items() if key in node["inputs"]})
    return graph


def make_models() -> Path:
    """The folder of the models that the workflows name."""
    return tiny_models.ensure(workflows.models_of(workflow("host")))


def ledger_rows(runtime: Path) -> list[dict[str, Any]]:
    """Every process in the ledger of this demonstration, as `top --json` says it."""
    from comfy_multiproc.commands import top
    from comfy_multiproc.ledger import LedgerError
    before = os.environ.get("COMFY_MULTIPROC_RUNTIME")
    os.environ["COMFY_MULTIPROC_RUNTIME"] = str(runtime)
    try:
        return top.look()
    except LedgerError:
        return []
    finally:
        os.environ.pop("COMFY_MULTIPROC_RUNTIME") if before is None else os.environ.update(COMFY_MULTIPROC_RUNTIME=before)


def claims_of(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Bytes claimed by process id."""
    return {row["pid"]: held["claimed"] or 0 for row in rows for held in row["devices"]}


def with_series(report: Report, tree: Path, work: Path, *, card: CardSettings | None, keep: Callable[[Server], None] | None = None) -> None:
    """The fork, its two example packs isolated in workers."""
    models = make_models()
    report.say("  starting the server ...")
    runtime, card_file = work / "runtime", work / "card"
    runtime.mkdir(mode=0o700)

    def read() -> tuple[dict[int, int], dict[int, int], dict[int, str]]:
        rows = ledger_rows(runtime)
        for _ in range(TOGETHER):
            # The card and the claims of one moment: between the two somebody may have given back what another claims.
            reading, before = read_card(card_file) if card is not None else None, rows
            rows = ledger_rows(runtime)
            if claims_of(rows) == claims_of(before):
                break
        names = {row["pid"]: row["name"] for row in rows}
        claimed = claims_of(rows)
        if reading is None:
            return {row["pid"]: top_occupied(held) for row in rows for held in row["devices"]}, claimed, names
        held = {process.pid: process.total for process in reading.processes if process.total}
        recording.peak, recording.refusals = reading.peak, reading.refusals
        return held, claimed, {pid: name for pid, name in names.items() if held.get(pid)}

    with start_server(tree, ["--verbose", "DEBUG", "--process-memory-name", "ComfyUI"], models=models, packs=PACKS, card=card, card_file=card_file if card else None,
                      environment={"COMFY_MULTIPROC_RUNTIME": str(runtime)}) as server:
        size = card.size if card else server.get("/system_stats")["devices"][0]["vram_total"]
        recorder = Recorder(size, read, {"ComfyUI": server.log_path})
        recording = report.recordings["with the series"] = recorder.recording
        with recorder:
            _run_all(report, server, recorder, runtime, card is not None)
        pids = [row["pid"] for row in ledger_rows(runtime)]
        if keep is not None:
            keep(server)
        report.say("  stopping the server ...")
    left = [pid for pid in pids if alive(pid)]
    report.check(not left, f"no process is left after the server has stopped ({len(pids)} had run)")


def _run_all(report: Report, server: Server, recorder: Recorder, runtime: Path, small_card: bool) -> None:
    recording = recorder.recording

    def step(text: str, prompt: dict[str, Any]) -> Result:
        recorder.mark("step", text)
        report.say(f"  {text} ...")
        began = time.monotonic()
        result = server.run(prompt)
        recorder.mark("end", text)
        if result.error and "out of memory" in str(result.error.get("exception_message", "")).lower():
            recorder.mark("out of memory", text)
        report.say(f"       {'; '.join(filter(None, [_outcome(result), f'{time.monotonic() - began:.1f} s']))}")
        return result

    alone = step("in the host", workflow("host"))
    worker = step("in a worker", workflow("worker"))
    report.check(alone.ok and worker.ok and alone.images == worker.images != [], "the worker makes the host's picture, pixel for pixel")
    _keep_images(report, server, alone, "host")
    _keep_images(report, server, worker, "worker")
    both = step("both together", workflow("both", seed=2))
    report.check(both.ok and len(both.images) == 2 and len(set(both.images)) == 1, "both together in one prompt: two pictures, the same")
    again = step("in the host again", workflow("host", seed=1))
    report.check(again.ok and again.images == alone.images, "the first picture again, after the card has changed hands")
    if small_card:
        report.check(len(recording.releases()) >= 2, f"processes gave memory to each other ({len(recording.releases())} releases)")

    def busy() -> bool:
        return any("tint" in row["name"] and row["state"] == "busy" for row in ledger_rows(runtime))

    recorder.mark("step", "cancelled")
    report.say("  cancelled ...")
    ended, seconds = asyncio.run(_while_running(server, workflow("tint", steps=600), busy, lambda: server.post("/interrupt", {})))
    report.check(ended.error is not None and "exception_message" not in ended.error and seconds < CANCEL_SECONDS,
                 f"a cancelled prompt ended as interrupted, {seconds:.1f} s after the click")
    report.check(step("after it", workflow("tint", steps=1)).ok, "the next prompt runs")

    recorder.mark("step", "worker killed")
    report.say("  worker killed ...")
    victim = next((row["pid"] for row in ledger_rows(runtime) if "tint" in row["name"]), None)
    ended, seconds = asyncio.run(_while_running(server, workflow("tint", steps=601), busy, lambda: os.kill(victim, signal.SIGKILL) if victim else None))
    message = str((ended.error or {}).get("exception_message", ""))
    report.check(victim is not None and "signal 9" in message.lower() or "SIGKILL" in message, f"a killed worker is named in the error: {message.strip().splitlines()[0] if message else 'no error'}")
    report.check(step("after it", workflow("tint", steps=2)).ok, "the next prompt runs in a new worker")
    if small_card:
        report.check(recording.peak <= recording.size, f"never more on the card than it holds ({recording.peak >> 20} of {recording.size >> 20} MB at most)")
    report.check(not any(event.kind == "out of memory" for event in recording.events), "no prompt ran out of memory")


async def _while_running(server: Server, prompt: dict[str, Any], busy: Callable[[], bool], act: Callable[[], object]) -> tuple[Result, float]:
    """Runs a prompt and does `act` once the worker is `busy` with it; gives the result and the seconds from there to the end."""
    running = asyncio.create_task(server.run_async(prompt))
    deadline = time.monotonic() + 60
    while not await asyncio.to_thread(busy):
        if time.monotonic() > deadline or running.done():
            raise ServerError(f"the worker did not start on the prompt:\n{server.log()[-3000:]}")
        await asyncio.sleep(0.05)
    began = time.monotonic()
    await asyncio.to_thread(act)
    return await running, time.monotonic() - began


def without_series(report: Report, tree: Path, work: Path, *, card: CardSettings) -> None:
    """Two unmodified servers in the same roles."""
    models = make_models()
    report.say("  starting two servers ...")
    card_file = work / "card-without"
    with ExitStack() as stack:
        first, second = (stack.enter_context(start_server(tree, models=models, card=card, card_file=card_file)) for _ in range(2))
        names = {first.pid: "server 1", second.pid: "server 2"}

        def read() -> tuple[dict[int, int], dict[int, int], dict[int, str]]:
            reading = read_card(card_file)
            recording.peak, recording.refusals = reading.peak, reading.refusals
            return {process.pid: process.total for process in reading.processes if process.total}, {}, names

        recorder = Recorder(card.size, read, {})
        recording = report.recordings["without the series, two servers"] = recorder.recording
        failures = 0
        with recorder:
            for text, server, seed in (("server 1", first, 1), ("server 2", second, 1), ("server 1", first, 2), ("server 2", second, 2)):
                recorder.mark("step", text)
                report.say(f"  {text} makes a picture ...")
                result = server.run(workflow("host", seed=seed))
                if not result.ok:
                    failures += 1
                    recorder.mark("out of memory", text)
                report.say(f"       {_outcome(result)}")
    report.check(failures > 0, f"without the series the same work fails: {failures} of 4 prompts ran out of memory beside a model that nobody used")


def _outcome(result: Result) -> str:
    if result.ok:
        return f"{len(result.images)} picture{'s' if len(result.images) != 1 else ''}" if result.images else "done"
    assert result.error is not None
    message = str(result.error.get("exception_message", "interrupted")).strip()
    return message.splitlines()[0] if message else "interrupted"


def _keep_images(report: Report, server: Server, result: Result, name: str) -> None:
    for outputs in result.outputs.values():
        for image in outputs.get("images", []):
            query = f"filename={image['filename']}&subfolder={image['subfolder']}&type={image['type']}"
            with urllib.request.urlopen(f"{server.url}/view?{query}", timeout=30) as answer:
                report.images[f"{name}.png"] = answer.read()


def top_occupied(held: dict[str, Any]) -> int:
    from comfy_multiproc.commands import top
    return top.occupied(held) or 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def summary(report: Report) -> str:
    """The report as JSON, for a program."""
    return json.dumps({"ok": report.ok, "checks": [{"ok": ok, "text": text} for ok, text in report.checks],
                       "peaks": {title: recording.peak for title, recording in report.recordings.items()}}, indent=1)
