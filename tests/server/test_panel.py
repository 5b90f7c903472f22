"""The Process memory panel: its endpoint and events over HTTP and websocket, and itself in a real browser."""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import threading
import urllib.error
import urllib.request

import pytest
import websocket

from comfy_multiproc.testing import CardSettings, ServerError
from comfy_multiproc.testing.workflows import txt2img_sd3
from tests.server.browser import browser, chromium

MIB = 1 << 20
SEEDS = itertools.count(1)
CARD = {"size": 80 * MIB, "inference": 2 * MIB, "reserved": 0}


@pytest.fixture(scope="module")
def one(serve, fork_tree):
    """A server with a worker, and with a provider that is no process of ComfyUI."""
    server = serve(fork_tree, ["--isolate", "zoo_loader"], packs=("zoo_loader", "panel_probe"), card=CardSettings(**CARD))
    server.post("/settings", {"Comfy.TutorialCompleted": True})
    return server


@pytest.fixture(scope="module")
def other(serve, fork_tree, one):
    """Another server on the same card."""
    return serve(fork_tree, packs=(), card=CardSettings(**CARD), card_file=one.card_path)


@pytest.fixture(scope="module")
def open_page():
    program = chromium()
    if program is None:
        pytest.skip("needs chromium")
    with browser(program) as open_page:
        yield open_page


@pytest.fixture
def page(open_page, one):
    page = open_page()
    page.open(one.url)
    page.until("document.querySelector('.process-memory-tab-button')", "the tab in the sidebar")
    yield page
    page.send("Page.close")


def look(server, **query):
    return server.get("/process_memory" + "".join(f"?{key}={value}" for key, value in query.items()))


def row(server, pid):
    """What the server says of a process, given by pid or name."""
    return next(row for row in look(server)["processes"] if pid in (row["pid"], row["name"]))


def soon(what, seconds=60.0):
    """Wait until something holds that another process brings about."""
    end = threading.Event()
    timer = threading.Timer(seconds, end.set)
    timer.start()
    try:
        while not (value := what()):
            assert not end.wait(0.1), "it did not come about in time"
        return value
    finally:
        timer.cancel()


def worker_of(server):
    return soon(lambda: next((row for row in look(server)["processes"] if row["kind"] == "worker" and row["devices"]), None), 120)


def refused(server, path, value, **headers):
    """Status and text of a request that is refused."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(server.url + path, data=body, headers=headers), timeout=30).close()
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text)["error"] if text else ""
    raise AssertionError(f"{path} {value} was not refused")


def load(server):
    """Have the server's models on the card."""
    prompt = txt2img_sd3()
    prompt["sampler"]["inputs"]["seed"] = next(SEEDS)     # what was run before would not be run again
    result = server.run(prompt)
    assert result.ok, result.error
    return prompt


def writer(fifo):
    """None while nobody reads."""
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


@contextlib.contextmanager
def running_node(server, prompt, tmp_path):
    """Inside, a node of the server runs, beside a prompt that has run, so that its models stay."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    results = []
    prompt = {**prompt, "wait": {"class_type": "ProbeWait", "inputs": {"fifo": str(fifo)}}}
    thread = threading.Thread(target=lambda: results.append(server.run(prompt)))
    thread.start()
    end = soon(lambda: writer(fifo))
    try:
        yield
    finally:
        os.close(end)
        thread.join(60)
    assert results and results[0].ok


def test_every_process_and_device_is_listed_with_its_models(one, other):
    load(other)
    worker = worker_of(one)
    seen = look(one)
    kinds = {row["pid"]: row["kind"] for row in seen["processes"]}
    assert kinds == {one.pid: "self", worker["pid"]: "worker", other.pid: "server", None: "provider"}
    assert worker["packs"] == ["zoo_loader"]
    [device] = seen["devices"]
    [theirs] = row(one, other.pid)["devices"]
    assert device["total"] == 80 * MIB and theirs["vram"] > 8 * MIB
    assert device["free"] == 80 * MIB - theirs["vram"] - row(one, one.pid)["devices"][0]["vram"]
    assert sum(model["resident"] for model in row(one, other.pid)["models"]) == theirs["resident"]
    assert "SD3" in [model["name"] for model in row(one, other.pid)["models"]]
    assert kinds.keys() == {row["pid"] for row in one.get("/api/process_memory")["processes"]}
    assert {row["pid"]: row["kind"] for row in look(other)["processes"]}[worker["pid"]] == "foreign_worker"


def test_one_process_gives_its_memory_back_and_the_others_keep_theirs(one, other):
    load(one)
    load(other)
    held = row(one, one.pid)["devices"][0]["resident"]
    assert held > 8 * MIB
    assert one.post("/process_memory/release", {"pid": other.pid}) == {"outcome": "freed", "freed": held, "resident": 0}
    assert row(one, other.pid)["devices"][0]["resident"] == 0 and row(one, one.pid)["devices"][0]["resident"] == held
    assert one.post("/process_memory/release", {"pid": other.pid}) == {"outcome": "nothing", "freed": 0, "resident": 0}
    assert one.post("/process_memory/release", {"pid": one.pid, "device": "cpu:0"}) == {"outcome": "freed", "freed": held, "resident": 0}
    assert row(one, one.pid)["models"] == []


def test_a_busy_process_is_not_said_to_have_given_anything(one, other, tmp_path):
    prompt = load(one)
    with running_node(one, prompt, tmp_path):
        assert row(one, one.pid)["state"] == "busy" == soon(lambda: row(other, one.pid)["state"])
        for asking in one, other:
            status, text = refused(asking, "/process_memory/release", {"pid": one.pid})
            assert status == 409 and "is busy" in text
        assert row(one, one.pid)["devices"][0]["resident"] > 8 * MIB
    one.post("/process_memory/release", {"pid": one.pid})


def test_a_restarted_worker_is_another_process_that_works(one):
    before = worker_of(one)
    answer = one.post("/process_memory/restart", {"pid": before["pid"]})
    assert answer["name"] == "zoo_loader" and answer["pid"] != before["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)
    assert row(one, answer["pid"])["state"] in ("starting", "idle")
    result = one.run({"who": {"class_type": "ZooWho", "inputs": {"seed": 1}}})
    assert result.ok, result.error
    assert worker_of(one)["pid"] == answer["pid"]


@pytest.mark.parametrize("path, body, status, says", [
    ("release", {"pid": 0}, 404, "there is no process 0"),
    ("release", {"name": "nobody"}, 404, "there is no process nobody"),
    ("release", {"pid": "self", "device": "cuda:9"}, 404, "cpu:0"),
    ("release", {}, 400, "say which process"),
    ("release", {"pid": "12"}, 400, "pid must be a whole number"),
    ("release", {"pid": True}, 400, "pid must be a whole number"),
    ("release", b"{", 400, "JSON"),
    ("release", b"[" * 100000, 400, "JSON"),
    ("release", b"\xff\xfe", 400, "JSON"),
    ("restart", [], 400, "JSON object"),
    ("restart", {}, 400, "say which worker"),
    ("restart", {"pid": 0}, 404, "no worker"),
    ("restart", {"pid": "self"}, 409, "no worker of this server"),
    ("restart", {"pid": "other"}, 409, "no worker of this server"),
])
def test_what_cannot_be_done_is_refused_with_a_reason(one, other, path, body, status, says):
    look(one)
    if isinstance(body, dict) and body.get("pid") in ("self", "other"):
        body = {**body, "pid": (one if body["pid"] == "self" else other).pid}
    code, text = refused(one, f"/process_memory/{path}", body)
    assert code == status and says in text


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://elsewhere.example"}])
@pytest.mark.parametrize("path", ["/process_memory/release", "/api/process_memory/restart"])
def test_another_site_can_do_nothing(one, path, headers):
    before = worker_of(one)["pid"]
    assert refused(one, path, {"pid": before}, **headers)[0] == 403
    assert worker_of(one)["pid"] == before


def test_events_come_to_those_who_look_and_to_nobody_else(one, other):
    other.post("/free", {"unload_models": True})
    soon(lambda: row(one, other.pid)["models"] == [])
    address = one.url.replace("http", "ws") + "/ws?clientId="
    looking, not_looking = (websocket.create_connection(address + name, timeout=60) for name in ("looking", "not-looking"))
    try:
        look(one, watch="looking")
        load(other)

        def next_event():
            while True:
                message = json.loads(looking.recv())
                if message["type"] == "process_memory":
                    return message["data"]
        while not any(row["pid"] == other.pid and row["models"] for row in next_event()["processes"]):
            pass
        one.post("/settings", {"Comfy.TutorialCompleted": True})
        one.run({"who": {"class_type": "ZooWho", "inputs": {"seed": 2}}})
        not_looking.send("{}")
        not_looking.settimeout(0.5)
        with contextlib.suppress(websocket.WebSocketTimeoutException):
            while True:
                assert json.loads(not_looking.recv())["type"] != "process_memory"
    finally:
        looking.close()
        not_looking.close()


async def test_looking_ends(monkeypatch):
    from comfy_multiproc import panel
    sent = []
    done = asyncio.Event()

    class Server:
        sockets = {"here": None}

        def send_sync(self, *message):
            sent.append(message)

    class Watchers(panel.Watchers):
        async def _send(self):
            await super()._send()
            done.set()
    monkeypatch.setattr(panel, "WATCH", 0.2)
    monkeypatch.setattr(panel, "INTERVAL", 0.01)
    monkeypatch.setattr(panel, "data", lambda: {"processes": [{"pid": 1, "age": len(sent)}]})
    watchers = Watchers(Server())
    watchers.watch("elsewhere")
    watchers.watch("here")
    await asyncio.wait_for(done.wait(), 30)
    assert [(event, client) for event, _, client in sent] == [("process_memory", "here")], "what only grew older is not news"


PANEL = "document.querySelector('.pm-panel')"
PROCESS = "[...document.querySelectorAll('.pm-process')].find(e => e.querySelector('h4').textContent === '{}')"
CONTRAST = """(() => {
  const rgb = c => { const x = document.createElement('canvas').getContext('2d'); x.fillStyle = c; x.fillRect(0, 0, 1, 1); return x.getImageData(0, 0, 1, 1).data };
  const light = c => { const [r, g, b] = [...rgb(c)].slice(0, 3).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (rgb(c)[3] === 255) return c } };
  const ratio = (a, b) => { const [l, m] = [light(a), light(b)].sort((x, y) => y - x); return (l + 0.05) / (m + 0.05) };
  const texts = [...document.querySelectorAll('.pm-panel *')].filter(e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const parts = [...document.querySelectorAll('.pm-part')];
  return [...texts.map(e => [ratio(getComputedStyle(e).color, ground(e)) / 4.5, e.textContent]),
          ...parts.map(e => [ratio(getComputedStyle(e).backgroundColor, ground(e.parentElement)) / 3, e.title])].sort((a, b) => a[0] - b[0])[0];
})()"""


def show_panel(page):
    page.do("document.querySelector('.process-memory-tab-button').click()")
    page.until("document.querySelectorAll('.pm-process').length > 2", "the processes")


def test_the_panel_shows_both_servers_and_what_changes(page, one, other):
    load(one)
    other.post("/process_memory/release", {"pid": other.pid})
    show_panel(page)
    shown = f"{PANEL}.querySelector('.pm-device [role=img]')"
    name = row(one, other.pid)["name"]
    page.until(f"{shown}.ariaLabel.includes({json.dumps(row(one, one.pid)['name'])}) && !{shown}.ariaLabel.includes({json.dumps(name)})")
    width = f"[...{shown}.children].find(e => e.title.startsWith({json.dumps(name)}))?.getBoundingClientRect().width / {shown}.clientWidth"
    load(other)
    page.until(f"Math.abs({width} - {row(one, other.pid)['devices'][0]['vram'] / (80 * MIB)}) < 0.02", "its share of the bar")
    assert "SD3" in page.do(PROCESS.format(name) + ".innerText")
    assert page.do(f"[...{shown}.children].some(e => e.className.includes('pm-claim') && e.title === 'language server, claimed: 2.0 MB')")


def test_the_panel_without_a_mouse_and_without_seeing(page, one, other):
    load(other)
    show_panel(page)
    name = row(one, other.pid)["name"]
    said = page.tree()
    assert ("region", "Process memory") in said and ("list", "Processes") in said
    assert any(role in ("image", "img") and "80 MB in all" in text and name in text for role, text in said)
    assert ("button", f"Release memory of {name}") in said and ("button", "Restart worker zoo_loader") in said
    page.do("document.querySelector('.pm-panel button').focus()")
    for _ in range(10):
        if page.do("document.activeElement.ariaLabel") == f"Release memory of {name}":
            break
        page.key("Tab")
    page.key("Enter")
    page.until(f"{PANEL}.querySelector('[role=status]').textContent === '{name} gave back 9.3 MB.'")
    page.until(f"!({PROCESS.format(name)}).querySelector('.pm-models li')")
    assert page.do("document.activeElement.ariaLabel") == f"Release memory of {name}"
    assert row(one, other.pid)["devices"][0]["resident"] == 0


def test_restarting_a_worker_and_asking_a_process_without_a_pid_in_the_panel(page, one, other):
    before = worker_of(one)["pid"]
    show_panel(page)
    page.do(f"({PROCESS.format('worker zoo_loader')}).querySelector('[aria-label^=Restart]').click()")
    page.until(f"{PANEL}.querySelector('[role=status]').textContent.startsWith('zoo_loader is starting')")
    assert worker_of(one)["pid"] != before
    page.until(f"({PROCESS.format('worker zoo_loader')}).querySelector('.pm-state').textContent === 'idle'")
    page.do(f"({PROCESS.format('language server')}).querySelector('button').click()")
    page.until(f"{PANEL}.querySelector('[role=status]').textContent === 'language server gave back 4.0 MB.'")


FOCUS = "document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()"
DIALOG = "[...document.querySelectorAll('[role=dialog], [role=alertdialog]')].find(e => e.textContent.includes('Restart worker zoo_loader?'))"


def tab_to(page, name, most=25, shift=False):
    """Press Tab until what has that name has the focus, which must be seen."""
    for _ in range(most):
        if page.do(FOCUS) == name:
            assert page.do("getComputedStyle(document.activeElement).outlineStyle !== 'none' || getComputedStyle(document.activeElement).boxShadow !== 'none'"), name
            return
        page.key("Tab", shift=shift)
    raise AssertionError(f"Tab does not come to {name}, but to {page.do(FOCUS)}")


def test_restarting_a_busy_worker_is_asked_first_with_the_keyboard_alone(page, one):
    worker = worker_of(one)
    results = []
    prompt = {"who": {"class_type": "ZooWho", "inputs": {"seed": next(SEEDS), "seconds": 600.0}}}
    thread = threading.Thread(target=lambda: results.append(one.run(prompt)))
    thread.start()
    show_panel(page)
    restart = "Restart worker zoo_loader"
    busy = f"({PROCESS.format('worker zoo_loader')}).querySelector('.pm-state').textContent === 'busy'"
    page.until(busy)
    assert row(one, one.pid)["state"] == "busy", "a server is busy while its prompt runs in a worker, as it tells the others"
    page.do(f"{PANEL}.querySelector('button').focus()")
    tab_to(page, restart)

    page.key("Enter")
    page.until(DIALOG, "the question")
    page.until(f"({DIALOG}).contains(document.activeElement)", "the focus in the question")
    assert "The prompt that it belongs to will fail" in page.do(f"({DIALOG}).innerText")
    if folder := os.environ.get("COMFY_MULTIPROC_PICTURES"):
        page.picture(pathlib.Path(folder, "panel-dialog.png"))
    page.key("Escape")
    page.until(f"!({DIALOG})", "the question gone")
    page.until(f"{FOCUS} === {json.dumps(restart)}", "the focus where it was")
    assert page.do(f"{busy} && !document.activeElement.ariaDisabled") and worker_of(one)["pid"] == worker["pid"] and not results

    page.key("Space")
    page.until(f"({DIALOG})?.contains(document.activeElement)", "the question again")
    tab_to(page, "Restart")
    page.key("Enter")
    page.until(f"{PANEL}.querySelector('[role=status]').textContent.startsWith('zoo_loader is starting')")
    thread.join(60)
    assert results and not results[0].ok and worker_of(one)["pid"] != worker["pid"]
    page.until(f"({PROCESS.format('worker zoo_loader')}).querySelector('.pm-state').textContent === 'idle'")


def test_a_refusal_is_shown(page, one, other, tmp_path):
    prompt = load(one)
    show_panel(page)
    name = row(one, one.pid)["name"]
    with running_node(one, prompt, tmp_path):
        page.until(f"({PROCESS.format(name)}).querySelector('.pm-state').textContent === 'busy'")
        page.do(f"({PROCESS.format(name)}).querySelector('button').click()")
        page.until(f"{PANEL}.querySelector('.pm-alarm')?.textContent.includes('is busy')")


@pytest.mark.parametrize("palette", ["dark", "light"])
def test_everything_can_be_read(page, one, other, palette):
    load(one)
    load(other)
    page.do(f"app.extensionManager.setting.set('Comfy.ColorPalette', '{palette}')")
    show_panel(page)
    page.until(f"document.documentElement.classList.contains('dark-theme') === {json.dumps(palette == 'dark')}")
    page.until(f"{PANEL}.getAnimations({{subtree: true}}).length === 0")
    ratio, text = page.do(CONTRAST)
    assert ratio >= 1, text
    assert page.do(f"{PANEL}.scrollWidth <= {PANEL}.clientWidth"), "nothing sticks out"
    if folder := os.environ.get("COMFY_MULTIPROC_PICTURES"):
        page.picture(pathlib.Path(folder, f"panel-{palette}.png"))


def test_a_server_alone_and_one_that_is_gone(open_page, serve, fork_tree, tmp_path):
    lone = serve(fork_tree, packs=(), card=CardSettings(**CARD), environment={"COMFY_MULTIPROC_RUNTIME": str(tmp_path)})
    lone.post("/settings", {"Comfy.TutorialCompleted": True})
    page = open_page()
    page.open(lone.url)
    page.until("document.querySelector('.process-memory-tab-button')")
    page.do("document.querySelector('.process-memory-tab-button').click()")
    page.until(f"{PANEL}?.innerText.includes('No other process')")
    assert page.do("document.querySelectorAll('.pm-process').length") == 1
    if folder := os.environ.get("COMFY_MULTIPROC_PICTURES"):
        page.picture(pathlib.Path(folder, "panel-alone.png"))
    lone.stop()
    page.until(f"{PANEL}.querySelector('.pm-alarm')?.textContent.includes('does not answer')")


@pytest.mark.row(41)
def test_a_server_that_shares_nothing_has_no_panel_and_still_knows_the_providers_of_its_packs(serve, fork_tree):
    server = serve(fork_tree, ["--disable-process-memory"], packs=("panel_probe",), card=CardSettings(**CARD))
    with pytest.raises(ServerError, match="404"):
        look(server)
    assert not any("comfy_multiproc" in path for path in server.get("/extensions"))

    def held():
        return [(row["name"], row["devices"][0]["resident"]) for row in server.get("/system_stats")["processes"]][1:]
    assert held() == [("language server", 4 * MIB)]
    server.post("/free", {"unload_models": True})
    soon(lambda: held() == [("language server", 0)])
