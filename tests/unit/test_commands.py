"""The command line as a person meets it: messages, exit codes, starting and stopping a server."""

import ast
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from comfy.process_memory import limits
from comfy_multiproc import doctor, launch
from comfy_multiproc.commands import main, parser, split, test, up
from comfy_multiproc.console import Console
from comfy_multiproc.environment import Torch, project_root
from comfy_multiproc.fork import process
from comfy_multiproc.fork.errors import ForkError

ROOT = project_root()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def comfy_multiproc(*arguments: str, python: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "comfy_multiproc", *arguments],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def tree(root: Path, main_py: str = "") -> Path:
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").write_text(textwrap.dedent(main_py))
    (root / "comfyui_version.py").write_text('__version__ = "0.30.0"\n')
    (root / "comfy/model_management.py").write_text("")
    return root


# --- the whole program ---


def test_it_runs_with_nothing_installed() -> None:
    done = comfy_multiproc("series", "show", python=("-S", "-E"))
    assert done.returncode == 0 and done.stdout, done.stderr


def test_an_old_python_can_read_the_file_that_refuses_it() -> None:
    for name in ("__init__.py", "__main__.py"):
        ast.parse((ROOT / "comfy_multiproc" / name).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "--upstream", "{tmp}"], "is not a ComfyUI tree"),
        (["build", "--release", "newest"], "is not a ComfyUI release"),
        (["series", "apply", "{tmp}/nothing"], "does not exist"),
        (["build", "--upstream", "~nobody-of-this-name/x"], "no home folder is known for ~nobody-of-this-name"),
        (["series", "export", "{tmp}", "--out", "{tmp}/out"], "is not a ComfyUI tree"),
        (["series", "show", "nothing"], "names no patch: choose from"),
        (["series", "export", "--out", "{tmp}/out", "--author", "nobody"], "is not of the form \"Name <mail>\""),
        (["test", "everything"], "there is no test level 'everything': choose from unit"),
        (["test", "tests/unit/test_nothing.py"], "there is no tests/unit/test_nothing.py below"),
        (["build", "--", "x"], "build takes nothing after --"),
        (["up", "--isolate", "my-pack"], "options of the server go behind --: up -- --isolate my-pack"),
        (["up", "--port", "8190", "--", "--cpu"], "up does not know --port 8190; options of the server go behind --: up -- --port 8190 --cpu"),
        (["test", "-x"], "options of pytest go behind --: test -- -x"),
        (["build", "--cpu"], "build does not know --cpu\n"),
        (["series", "show", "--cpu"], "series does not know --cpu\n"),
        (["up", "--", "--port", "many"], "server arguments are not understood"),
        (["up", "--", "--port", "70000"], "is no port"),
        (["fly"], "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_message_and_exit_code_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = comfy_multiproc(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(re.findall("error:", done.stderr)) == 1 and "Traceback" not in done.stderr
    assert done.stdout == "" and os.listdir(tmp_path) == []


def test_an_output_that_nobody_reads_is_no_crash() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run([sys.executable, "-m", "comfy_multiproc", "series", "show"], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_an_output_that_is_closed_is_no_crash() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$0" -m comfy_multiproc series show 01 >&- 2>&-', sys.executable], cwd=ROOT, timeout=60)
    assert done.returncode == 0


def test_a_tree_that_the_series_does_not_fit(tmp_path: Path) -> None:
    root = tree(tmp_path / "a tree ö")
    done = comfy_multiproc("series", "check", str(root))
    assert done.returncode == 2
    assert "ComfyUI 0.30.0" in done.stdout and "does not fit ComfyUI 0.30.0" in done.stderr
    done = comfy_multiproc("series", "check", str(root), "--json")
    (report,) = json.loads(done.stdout)
    assert done.returncode == 2 and report["ok"] is False


def test_arguments_after_the_dashes() -> None:
    assert split(["up", "--release", "1", "--", "--cpu", "--", "x"]) == (["up", "--release", "1"], ["--cpu", "--", "x"])
    assert split(["build"]) == (["build"], [])


def test_a_disk_error_that_nobody_expected_is_still_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, os.strerror(28), str(tmp_path / "f"))

    monkeypatch.setattr("comfy_multiproc.fork.upstream.find", full)
    err = io.StringIO()
    assert main(["build"], Console(io.StringIO(), err)) == 2
    assert err.getvalue() == f"comfy_multiproc: error: cannot write {tmp_path / 'f'}: the disk is full; free some space there or choose another folder\n"


def test_what_does_not_end_with_ctrl_c_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = [KeyboardInterrupt()]
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if interrupts:
            raise interrupts.pop()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.attached([sys.executable, "-c", "import time; time.sleep(300)"], cwd=tmp_path, grace=0.1)
    assert time.monotonic() - started < 60


def test_ctrl_c_while_setting_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("comfy_multiproc.fork.upstream.find", interrupted)
    err = io.StringIO()
    assert main(["build"], Console(io.StringIO(), err)) == 130
    assert err.getvalue() == "comfy_multiproc: error: interrupted\n"


# --- progress ---


def test_progress_in_a_pipe_is_a_line_per_step_and_now_and_then_a_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("comfy_multiproc.console.time.monotonic", lambda: now[0])
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    for at, line in ((0, "Installing"), (1, "Installing: a"), (9, "Installing: b"), (11, "Installing: c"), (12, "Installing: d"), (13, "Next")):
        now[0] = 100.0 + at
        console.progress(line)
    assert err.getvalue().splitlines() == ["Installing", "Installing: c", "Next"]
    assert "\x1b" not in err.getvalue()


def test_progress_on_a_terminal_replaces_the_detail_and_keeps_the_step() -> None:
    err = Terminal()
    console = Console(io.StringIO(), err)
    for line in ("Installing", "Installing: a", "Installing: b", "Next"):
        console.progress(line)
    console.error("no")
    shown = [line.split("\r\x1b[K")[-1] for line in err.getvalue().split("\n")]
    assert shown[:2] == ["Installing", "Next"] and shown[2].endswith(" no")


def test_a_letter_that_the_terminal_does_not_have() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(out, io.StringIO()).say("Bär")
    out.flush()
    assert raw.getvalue() == b"B\\xe4r\n"


# --- address and device ---


@pytest.mark.parametrize(
    ("arguments", "url", "hosts"),
    [
        ([], "http://127.0.0.1:8188", ("127.0.0.1",)),
        (["--cpu", "--port", "9000"], "http://127.0.0.1:9000", ("127.0.0.1",)),
        (["--port=9000", "--listen"], "http://127.0.0.1:9000", ("0.0.0.0", "::")),
        (["--listen", "--port", "9000"], "http://127.0.0.1:9000", ("0.0.0.0", "::")),
        (["--listen", "::1"], "http://[::1]:8188", ("::1",)),
        (["--listen", "10.0.0.7,127.0.0.1"], "http://10.0.0.7:8188", ("10.0.0.7", "127.0.0.1")),
        (["--tls-keyfile", "k", "--tls-certfile", "c"], "https://127.0.0.1:8188", ("127.0.0.1",)),
    ],
)
def test_the_address_is_the_servers(arguments: list[str], url: str, hosts: tuple[str, ...]) -> None:
    address = launch.Address.of(arguments)
    assert (address.url, address.hosts) == (url, hosts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = comfy_multiproc("up", "--upstream", "/nonexistent", "--", "--port", str(port))
    assert done.returncode == 2 and f"port {port} on 127.0.0.1 is in use" in done.stderr
    launch.Address.of(["--port", done.stderr.partition("-- --port ")[2].partition(")")[0]]).check_free()
    launch.Address.of(["--port", str(port)]).check_free()


def test_the_port_that_is_suggested_is_free() -> None:
    with ExitStack() as stack:
        for port in range(20000, 30000, 7):
            first, second = (stack.enter_context(socket.socket()) for _ in range(2))
            try:
                for number, listener in enumerate((first, second)):
                    listener.bind(("127.0.0.1", port + number))
                    listener.listen()
                break
            except OSError:
                continue
        with pytest.raises(ForkError, match="is in use") as raised:
            launch.Address.of(["--port", str(port)]).check_free()
        assert f"--port {port + 1})" not in str(raised.value)


def test_a_second_server_of_a_folder_gets_a_database_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "main.py").write_text("input()")
    with subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, stdin=subprocess.PIPE) as starting:
        assert launch.database_argument(tmp_path, [], 8190) != []
        starting.kill()
    assert launch.database_argument(tmp_path, [], 8190) == []
    lock = filelock.FileLock(tmp_path / "user" / "comfyui.db.lock")       # as ComfyUI holds it
    with lock:
        assert launch.database_argument(tmp_path, [], 8190) == ["--database-url", f"sqlite:///{tmp_path}/user/comfyui-8190.db"]
        assert launch.database_argument(tmp_path, ["--database-url=sqlite://"], 8190) == []
    assert launch.database_argument(tmp_path, [], 8190) == []


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ForkError, match="--listen nowhere.invalid is no address of this machine"):
        launch.Address.of(["--listen", "nowhere.invalid"]).check_free()


GPU = {"kind": "cuda", "index": 0, "name": "Card", "total": 1}


@pytest.mark.parametrize(
    ("devices", "arguments", "added", "says"),
    [
        ([], [], ["--cpu"], "running on the CPU"),
        ([], ["--port", "1"], ["--cpu"], "running on the CPU"),
        ([], ["--cpu"], [], ""),
        ([], ["--lowvram"], [], "not added because of --lowvram"),
        ([], ["--cuda-device=1"], [], "not added because of --cuda-device=1"),
        ([GPU], [], [], ""),
    ],
)
def test_cpu_is_added_only_when_nothing_else_can_be_meant(devices: list[dict[str, object]], arguments: list[str], added: list[str], says: str) -> None:
    err = io.StringIO()
    environment = SimpleNamespace(torch=lambda: Torch("2", "CPU", devices, []))
    assert up.device(environment, arguments, Console(io.StringIO(), err)) == added  # type: ignore[arg-type]
    assert says in err.getvalue()
    assert ("--cpu" in err.getvalue()) == bool(says)


# --- a virtual card ---


@pytest.mark.parametrize(
    ("text", "settings", "arguments", "added"),
    [
        ("400M", "size=419430400", [], ["--cpu"]),
        ("400M,count=2,state=low", "size=419430400,count=2,state=low", ["--cpu", "--port", "1"], []),
        ("size=1G", "size=1073741824", ["--port", "1"], ["--cpu"]),
        ("1G,form=npu", "size=1073741824,form=npu", ["--lowvram"], ["--disable-dynamic-vram"]),
    ],
)
def test_a_card_for_the_server(text: str, settings: str, arguments: list[str], added: list[str]) -> None:
    args = parser().parse_args(["up", "--card", text])
    assert args.card.text() == settings
    assert up.card_arguments(args.card, arguments) == added


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--card", "plenty"], "--card: virtual card: size=plenty: 'plenty' is no number of bytes; write 400M"),
        (["--card", "400M,colour=red"], "--card: virtual card: no setting 'colour'; there are size"),
        (["--card", "400M", "--", "--lowvram"], "--lowvram does not go with --card"),
        (["--card", "400M,form=npu", "--", "--cpu"], "--cpu does not go with a card of form=npu"),
        (["--card", "400M", "--demo"], "leave --card out"),
    ],
)
def test_a_card_that_cannot_be(arguments: list[str], says: str) -> None:
    done = comfy_multiproc("up", *arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_only_the_server_gets_the_card(tmp_path: Path) -> None:
    root = tree(tmp_path / "fork", "import os; print(os.environ['COMFY_VIRTUAL_CARD'], os.environ['PYTHONPATH'], flush=True)")
    (root / "comfy_multiproc/testing/site").mkdir(parents=True)
    code = ("import os, sys; from pathlib import Path; from comfy_multiproc import launch; from comfy_multiproc.commands import up\n"
            "variables = up.server_environment(up.card('400M'), tree=sys.argv[1]); before = dict(os.environ)\n"
            "code = launch.serve(Path(sys.executable), Path(sys.argv[1]), [], address=launch.Address.of([]), answered=print, variables=variables)\n"
            "sys.exit(code or os.environ != before)")
    done = subprocess.run([sys.executable, "-c", code, str(root)], cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": "mine"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"size=419430400 {root / 'comfy_multiproc/testing/site'}{os.pathsep}mine\n"


def test_the_command_is_found_where_it_is_run_although_a_card_is_in_the_environment(tmp_path: Path) -> None:
    copied = shutil.copytree(ROOT / "comfy_multiproc/testing", tmp_path / "fork/comfy_multiproc/testing")
    shutil.copy(ROOT / "comfy_multiproc/__init__.py", tmp_path / "fork/comfy_multiproc/__init__.py")
    done = comfy_multiproc("series", "show", PYTHONPATH=str(copied / "site"), COMFY_VIRTUAL_CARD="size=400M")
    assert done.returncode == 0 and "01-process-memory" in done.stdout, done.stderr


@pytest.mark.parametrize("built", ["project/build/ComfyUI", "elsewhere"])
def test_in_a_fork_the_command_says_where_it_is(tmp_path: Path, built: str) -> None:
    (tmp_path / "project/comfy_multiproc/commands").mkdir(parents=True)
    fork = tmp_path / built / "comfy_multiproc"
    fork.mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "comfy_multiproc" / name, fork / name)
    done = subprocess.run([sys.executable, "-m", "comfy_multiproc", "up"], cwd=fork.parent, capture_output=True, text=True, timeout=60)
    where = f"in {tmp_path / 'project'}" if built.startswith("project") else "in the folder of ComfyUI Multiproc that it was built from"
    assert done.returncode == 2
    assert done.stderr == f"comfy_multiproc: error: {tmp_path / built} is a fork, ComfyUI with the series; the commands are not in it: run them {where}\n"


# --- a server ---

SERVER = """
    import http.server, os, signal, subprocess, sys, time
    mode, port = sys.argv[1], int(sys.argv[3])
    if mode == "breaks":
        sys.exit(9)
    if mode == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"],
                              stdout=subprocess.PIPE)
    worker.stdout.readline()
    print("pids", os.getpid(), worker.pid, flush=True)
    if mode == "slow":
        try:
            time.sleep(600)
        finally:
            print("Traceback", flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args): pass
    try:
        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    except KeyboardInterrupt:
        print("stopped cleanly in", os.getcwd(), flush=True)
        sys.exit(7)
"""

RUN = """
    import sys
    from pathlib import Path
    from comfy_multiproc import launch
    launch.GRACE = 2.0
    arguments = sys.argv[2:]
    code = launch.serve(Path(sys.executable), Path(sys.argv[1]), arguments, address=launch.Address.of(arguments),
                        answered=lambda: print("answered", flush=True))
    sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    root = tree(tmp_path / "tree ö", SERVER)
    started: list[subprocess.Popen[str]] = []

    def begin(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(RUN), str(root), mode, "--port", str(free_port())]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for running in started:
        running.kill()
        running.communicate()


def until(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(f"the server never said {start!r}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


needs_posix = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_is_stopped_cleanly_and_gives_its_exit_code(start: Callable[[str], subprocess.Popen[str]], number: int) -> None:
    process = start("normal")
    pids = [int(pid) for pid in until(process, "pids").split()[1:]]
    until(process, "answered")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "stopped cleanly" in rest and "tree ö" in rest
    assert not any(alive(pid) for pid in pids)


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_while_it_starts_says_nothing(start: Callable[[str], subprocess.Popen[str]], number: int) -> None:
    process = start("slow")
    pids = [int(pid) for pid in until(process, "pids").split()[1:]]
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and rest == ""
    assert not any(alive(pid) for pid in pids)


@needs_posix
def test_a_server_that_does_not_listen_is_ended_with_its_workers(start: Callable[[str], subprocess.Popen[str]]) -> None:
    process = start("deaf")
    pids = [int(pid) for pid in until(process, "pids").split()[1:]]
    until(process, "answered")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_a_server_that_breaks_gives_its_exit_code_and_no_address(start: Callable[[str], subprocess.Popen[str]]) -> None:
    process = start("breaks")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 9 and "answered" not in out


# --- test ---


def test_levels_run_cheapest_first(tmp_path: Path) -> None:
    for name in ("server", "unit", "fork", "extra", "empty"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        if name != "empty":
            (tmp_path / "tests" / name / "test_it.py").write_text("")
    assert test.levels(tmp_path) == ["unit", "fork", "server", "extra"]
    assert test.choose(["server", "unit"], test.levels(tmp_path)) == ["unit", "server"]
    with pytest.raises(ForkError, match="run this in a checkout"):
        test.levels(tmp_path / "tests")


@pytest.mark.parametrize("own", [["-n0"], ["-n", "3"], ["--pdb"], ["-s"], ["--dist=no"]])
def test_the_user_decides_how_the_tests_are_spread(own: list[str]) -> None:
    assert test.parallel(own) == []
    assert test.parallel(["-x", "-k", "n"])[0] == "-n"


def test_a_file_among_the_levels_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")
    assert test.apart(ROOT, ["unit", "unit/test_commands.py::test_a"]) == (["unit"], ["tests/unit/test_commands.py::test_a"])
    with pytest.raises(ForkError, match="there is no ../README.md below"):
        test.apart(ROOT, ["../README.md"])


def test_files_of_the_user_are_run_in_their_own_level(tmp_path: Path) -> None:
    for name in ("unit", "fork"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / "test_it.py").write_text("")
    given = ["-k", "tests", "tests/fork/test_it.py::test_a", "tests/unit/test_it.py", "tests/fork", "tests/none.py"]
    assert test.places(tmp_path, given) == {"fork": ["tests/fork/test_it.py::test_a", "tests/fork"], "unit": ["tests/unit/test_it.py"]}


@pytest.mark.parametrize(
    ("codes", "code", "says"),
    [
        ({"unit": 0, "fork": 5}, 0, "Passed: unit"),
        ({"unit": 5, "fork": 5}, 5, "Passed: nothing, no test was chosen"),
        ({"unit": 0, "fork": 1, "docs/rows.md": 1}, 1, "Failed: fork, docs/rows.md"),
        ({"unit": 2, "fork": 1}, 2, "Failed: unit, fork"),
        ({"unit": 5}, 5, ""),
    ],
)
def test_one_level_that_fails_fails_the_run(codes: dict[str, int], code: int, says: str) -> None:
    out = io.StringIO()
    assert test.summary(codes, Console(out, io.StringIO())) == code
    assert out.getvalue().strip() == says.strip()


# --- doctor ---


def test_doctor_tells_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{3 << 29}\n")
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "mounts").write_text(f"35 31 0:32 / {tmp_path} rw,relatime - cgroup2 cgroup2 rw\n")
    real = limits.Groups
    monkeypatch.setattr(limits, "Groups", lambda: real(str(tmp_path / "membership"), str(tmp_path / "mounts")))
    found = doctor.memory()
    assert found.verdict == "fails" and found.detail.endswith(", container limit 1.5 GiB")


def test_doctor_says_what_is_wrong_and_the_way_out(tmp_path: Path) -> None:
    done = comfy_multiproc("doctor", "--json", "--upstream", str(tmp_path))
    report = json.loads(done.stdout)
    (finding,) = [finding for finding in report["findings"] if finding["verdict"] == "fails"]
    assert done.returncode == 1 and report["ok"] is False
    assert finding["name"] == "ComfyUI" and "is not a ComfyUI tree" in finding["way_out"]


def test_doctor_without_git(tmp_path: Path) -> None:
    done = comfy_multiproc("doctor", PATH="/nonexistent", COMFY_MULTIPROC_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert re.search(r"^fails +git +not found\n +git was not found: install git", done.stdout, re.MULTILINE)
