"""The real server that tests start, with a program in its place that only answers."""

import signal
import subprocess

import pytest

from comfy_multiproc.testing import CardSettings, start_server

PROGRAM = """
import http.server, os, signal, sys
if os.environ["STUBBORN"]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

home = sys.argv[sys.argv.index("--base-directory") + 1]
print(os.path.isdir(os.path.join(home, "custom_nodes")), os.path.exists(os.environ["COMFY_VIRTUAL_CARD_FILE"]), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
SECONDS = 60


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(): with all its paths relative to the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "main.py").write_text(PROGRAM)
    (tmp_path / "card").touch()

    def start(stubborn=""):
        return start_server("tree", home="home", card=CardSettings(size=1 << 20), card_file="card", timeout=SECONDS,
                            environment={"PYTHONPATH": "", "STUBBORN": stubborn})
    return start


def test_paths_are_those_of_the_test_and_not_of_the_server(start):
    with start() as server:
        assert server.log().startswith("True True"), server.log()
    assert server.process.poll() is not None


@pytest.mark.parametrize("when", ["Popen", "wait"])
def test_no_server_is_left_by_an_interruption(start, monkeypatch, when):
    """While the rest of it starts, and while it is awaited at the end."""
    started = []
    real = subprocess.Popen

    class Popen(real):
        interrupted = False

        def __init__(self, *args, **kwargs):
            if started and when == "Popen":
                raise KeyboardInterrupt
            super().__init__(*args, **kwargs)
            started.append(self)

        def wait(self, timeout=None):
            if when == "wait" and self is started[0] and not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        with start(stubborn="yes" if when == "wait" else ""):
            pass
    try:
        assert [real.wait(process, SECONDS) for process in started if process.args[1] == "main.py"] in ([-signal.SIGINT], [-signal.SIGKILL])
    finally:
        for process in started:
            process.kill()
