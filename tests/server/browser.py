"""A headless Chromium, driven over its DevTools protocol; needs websocket-client and no driver program."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request

import websocket

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-port=0",
         "--remote-allow-origins=*")
START = 60.0
WAIT = 120.0


def chromium():
    """The program, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)


class PageError(AssertionError):
    """JavaScript raised, or what was waited for did not come."""


class Page:
    """One page. Times are in seconds; sizes in CSS pixels."""

    def __init__(self, url):
        self._socket = websocket.create_connection(url, timeout=WAIT)
        self._number = 0
        for domain in ("Page", "Runtime", "Accessibility"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """One command of the protocol, and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                return message["result"]
        raise PageError(f"{method}: no answer in {WAIT:g} s")

    def do(self, script):
        """The value of a JavaScript expression; a promise is waited for."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise PageError(f"{script}: {result['exceptionDetails'].get('exception', {}).get('description')}")
        return result["result"].get("value")

    def until(self, script, what="", seconds=WAIT):
        """Wait for an expression to be true, and give its value; True for an element."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(PageError):        # the page may be on its way to another document
                if value := self.do(f"(value => value instanceof Node || value)({script})"):
                    return value
            time.sleep(0.1)
        raise PageError(f"not in {seconds:g} s: {what or script}\nthe page says:\n{self.do('document.body.innerText')[:3000]}")

    def open(self, url):
        self.send("Page.navigate", url=url)

    def key(self, key, *, shift=False):
        """Press a key: Tab, Enter, Escape or Space."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, ""), "Space": (32, " ")}[key]
        about = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def tree(self):
        """What a screen reader is told: (role, name) of everything."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored") and "role" in node]

    def picture(self, path, width=1200, height=800):
        """A screenshot as a PNG file."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self._socket.close()


@contextlib.contextmanager
def browser(program):
    """open_page(): pages of a Chromium with a profile of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        with open(os.path.join(profile, "log"), "wb") as log:
            process = subprocess.Popen([program, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        pages = []
        try:
            port = _port(process, os.path.join(profile, "log"))

            def open_page():
                request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
                direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with direct.open(request, timeout=WAIT) as answer:
                    page = Page(json.load(answer)["webSocketDebuggerUrl"])
                pages.append(page)
                return page
            yield open_page
        finally:
            for page in pages:
                page.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _port(process, log):
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        with open(log, errors="replace") as file:
            if found := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", file.read()):
                return int(found[1])
        time.sleep(0.1)
    with open(log, errors="replace") as file:
        raise PageError(f"chromium did not start in {START:g} s:\n{file.read()[-3000:]}")
