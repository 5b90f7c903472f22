"""Starting, failing, interrupting and ending of workers, with real processes."""
from __future__ import annotations

import asyncio
import logging
import multiprocessing.resource_tracker
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comfy_multiproc import boot, failures, headroom, host, link, logs, spawning
from tests.unit.workers import SECONDS, host_program, make_tree, read_pids, runs, strays, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("tree") / "ComfyUI")


@pytest.fixture
def make(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., host.Worker]]:
    """Workers of the test; afterwards none of their processes is left, nor a descriptor."""
    monkeypatch.setattr(boot, "ROOT", tree)
    monkeypatch.setattr(host, "_sharing", lambda: False)
    host.guard.close()
    multiprocessing.resource_tracker.ensure_running()       # there from now on
    files = len(os.listdir("/proc/self/fd"))
    tokens: set[str] = set()
    made: list[host.Worker] = []
    spawn = host.Worker._spawn

    def noted(worker: host.Worker) -> host._Run:
        run = spawn(worker)
        tokens.add(run.token)
        return run
    monkeypatch.setattr(host.Worker, "_spawn", noted)

    def make(name: str = "zoo", **spec: object) -> host.Worker:
        made.append(host.Worker(host.Spec(**{"name": name, "entry": "zoo", "grace": 2.0, **spec})))
        return made[-1]
    yield make
    for worker in made:
        worker.stop(1.0)
    host.guard.close()
    until(lambda: not strays(tokens))
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("comfy_multiproc: worker")])     # whose last step may be to come


def ask(worker: host.Worker, kind: str, body: object = None, **options: object) -> object:
    return worker.call(kind, body, **options).result(SECONDS).body


def shown(error: BaseException) -> str:
    return failures.full_name(type(error))


# starting


def test_a_worker_answers_from_its_own_session_and_main_thread(make):
    worker = make()
    assert worker.state is host.State.STOPPED
    about = ask(worker, "about")
    assert about["pid"] == worker.pid == about["session"] != os.getpid()
    assert about["thread"]
    assert worker.start().result(SECONDS).body["pid"] == worker.pid
    assert worker.state is host.State.IDLE


def test_main_is_not_run_again_and_utils_is_comfyuis(tree, tmp_path):
    """With ComfyUI/comfy and a pack's own utils.py first on the path, from another folder."""
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "utils.py").write_text("raise RuntimeError('the pack has got here')")
    process = host_program(tree, tmp_path, f"""
sys.path[:0] = [{str(tree / 'comfy')!r}, {str(tree / 'custom_nodes' / 'pack')!r}]
about = worker.call("about").result(30).body
print(about["main"], about["utils"], about["path"][0], {str(tree / 'custom_nodes' / 'pack')!r} in about["path"], sep="\\n")
worker.stop()
""")
    out, err = process.communicate(timeout=SECONDS)
    assert out.splitlines() == ["None", str(tree / "utils" / "install_util.py"), str(tree), "False"], err
    assert (tmp_path / "main.log").read_text().count("main ran") == 1


def test_a_worker_asked_for_at_import_time_is_started_once(tree, tmp_path):
    """The start method of the process is neither read nor changed."""
    (tmp_path / "pack.py").write_text("import __main__\nprint(__main__.worker.call('echo', 'from the import').result(30).body)\n")
    process = host_program(tree, tmp_path, """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)
sys.path.insert(0, os.getcwd())
import pack
print(multiprocessing.get_start_method(), worker.call("about").result(30).body["start_method"], worker.starts)
worker.stop()
""")
    out, err = process.communicate(timeout=SECONDS)
    assert out.split("\n")[:2] == ["from the import", "fork None 1"], err
    assert (tmp_path / "main.log").read_text().count("main ran") == 1


def test_starting_leaves_the_start_method_open(tree, tmp_path):
    process = host_program(tree, tmp_path, """
import multiprocessing
worker.call("echo").result(30)
print(multiprocessing.get_start_method(allow_none=True))
worker.stop()
""")
    assert process.communicate(timeout=SECONDS)[0] == "None\n"


@pytest.mark.behaviour(14)
@pytest.mark.behaviour(18)
def test_the_resolved_options_and_folders_are_there(make, monkeypatch):
    import enum

    class PerformanceFeature(enum.Enum):
        Fp16Accumulation = "fp16_accumulation"
    usual = {".safetensors", ".added"}
    args = types.SimpleNamespace(cpu=True, reserve_vram=3.0, fast={PerformanceFeature.Fp16Accumulation}, disable_process_memory=True,
                                 extra_model_paths_config=[["a", "b"]], verbose="WARNING", strange=object())
    monkeypatch.setitem(sys.modules, "comfy.cli_args", types.SimpleNamespace(args=args))
    monkeypatch.setitem(sys.modules, "folder_paths", types.SimpleNamespace(
        output_directory="/out", supported_pt_extensions=usual, get_folder_paths=lambda name: ["/packs"],
        folder_names_and_paths={"checkpoints": (["/models/a", "/models/b"], usual), "custom_nodes": (["/packs"], set())}))
    monkeypatch.setattr(sys, "path", ["/packs/one/lib", *sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    worker = make()
    about = ask(worker, "about")
    assert {k: about["args"][k] for k in ("cpu", "reserve_vram", "fast", "extra_model_paths_config")} == {
        "cpu": "True", "reserve_vram": "3.0", "fast": "{<PerformanceFeature.Fp16Accumulation: 'fp16_accumulation'>}",
        "extra_model_paths_config": "[['a', 'b']]"}
    assert "strange" not in about["args"]
    assert about["folders"] == ["/out", ["/models/a", "/models/b"]]
    assert "/packs/one/lib" not in about["path"]
    assert about["environment"]["CUDA_VISIBLE_DEVICES"] == "0"      # what the host does not see its workers do not see
    monkeypatch.setattr(sys, "argv", ["main.py", "--lowvram"])
    assert ask(worker, "about")["args"] == about["args"]


def test_packs_reach_their_side_as_data(make):
    worker = make(packs=({"name": "one", "path": "/packs/one"},))
    assert worker.start().result(SECONDS).body["packs"] == [{"name": "one", "path": "/packs/one"}]


def test_a_pack_that_cannot_be_imported_says_why_and_the_next_start_tries_again(make):
    worker = make(environment={"ZOO_BROKEN": "1"})
    with pytest.raises(ImportError, match="needs something") as caught:
        worker.start().result(SECONDS)
    assert 'in load\n    raise ImportError("the pack needs' in "".join(traceback.format_tb(caught.value.__traceback__))
    until(lambda: worker.pid is None)
    assert worker.state is host.State.STOPPED
    with pytest.raises(ImportError):
        worker.start().result(SECONDS)
    assert worker.starts == 2


def test_a_call_of_a_worker_that_cannot_start_says_why(make):
    with pytest.raises(ImportError, match="needs something"):
        make(environment={"ZOO_BROKEN": "1"}).call("echo").result(SECONDS)


def test_a_worker_that_could_not_start_ends_even_if_its_exit_hangs(make):
    worker = make(environment={"ZOO_BROKEN": "hangs"}, grace=0.5)
    with pytest.raises(ImportError):
        worker.start().result(SECONDS)
    until(lambda: worker.pid is None)


def test_whoever_stops_waiting_for_a_start_stops_it_for_nobody_else(make):
    worker = make()

    async def impatient() -> None:
        await asyncio.wait_for(asyncio.wrap_future(worker.start()), 0.001)
    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert worker.start().result(SECONDS).body["pid"] == worker.pid


def test_what_others_start_meanwhile_is_not_taken_for_the_workers(make, monkeypatch):
    started: list[str] = []
    own = subprocess.Popen

    def popen(*args: object, **options: object) -> object:
        monkeypatch.setattr(subprocess, "Popen", own)
        started.append(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
        return own(*args, **options)
    worker = make()
    host.guard.watch(0, "none", False)      # started first, so that only the worker is
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert ask(worker, "about")["environment"][spawning.TOKEN]
    assert [spawning.TOKEN in text for text in started] == [False]
    host.guard.forget("none")


def test_the_python_of_a_virtual_environment_is_found_without_its_launcher(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    base = spawning.base_of(tmp_path / "environment" / "bin" / "python")
    assert base is not None and os.path.samefile(base, os.path.realpath(sys.executable))
    assert spawning.base_of(base) is None


def test_caches_of_compilers_are_a_workers_own_and_stay_the_same(make, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    one, two = make("one"), make("two")
    of_one, of_two = ([ask(w, "about")["environment"][v] for v in variables] for w in (one, two))
    assert not set(of_one) & {*of_two, str(tmp_path)}
    assert of_one[1].startswith(str(tmp_path))
    one.restart().result(SECONDS)
    assert [ask(one, "about")["environment"][v] for v in variables] == of_one
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_environment_finds_its_own_libraries(make, monkeypatch, tmp_path):
    for version, folder in ((1, tmp_path / "host"), (2, tmp_path / "environment" / "lib")):
        folder.mkdir(parents=True)
        source = folder / "tiny.c"
        source.write_text(f"int version(void) {{ return {version}; }}")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libtiny.so", source], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "host"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "host"))
    worker = make(python=tmp_path / "environment" / "bin" / "python")
    assert ask(worker, "library") == 2
    about = ask(worker, "about")
    assert about["python"].startswith(str(tmp_path / "environment"))
    assert "PYTHONPATH" not in about["environment"]
    assert not any("site-packages" in p and not p.startswith(str(tmp_path)) for p in about["path"])
    assert ask(make("plain"), "library") == 1
    with pytest.raises(OSError, match=rf"libmissing\.so.*{tmp_path / 'environment'}.*LD_LIBRARY_PATH={tmp_path / 'environment' / 'lib'}"):
        ask(worker, "library", "libmissing.so")
    assert os.environ["LD_LIBRARY_PATH"] == str(tmp_path / "host")


def test_an_environment_without_python_is_an_error_at_once(make, tmp_path):
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        make(python=tmp_path / "no" / "bin" / "python").start()
    assert len(os.listdir("/proc/self/fd")) <= files + 1     # the first start of all also starts multiprocessing's tracker


def test_a_start_that_fails_half_way_leaves_no_process(make):
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")
    worker = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.logs, "WorkerLog", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.start()
    assert worker.state is host.State.STOPPED
    assert not multiprocessing.active_children()
    assert ask(worker, "echo", 1) == 1


def test_no_worker_is_started_without_commit_headroom(make, monkeypatch):
    """With figures instead of Windows."""
    gigabyte = 1 << 30
    alive: list[host.Worker] = []
    monkeypatch.setattr(headroom, "commit", lambda: (40 * gigabyte, (36 + 3 * sum(w.pid is not None for w in alive)) * gigabyte))
    one, two, three = (make(name) for name in ("one", "two", "three"))
    alive += [one, two, three]
    assert ask(one, "echo", 1) == 1
    one.pins = lambda: 1
    with pytest.raises(headroom.NoHeadroom, match=r"worker two .* 3 GB .* 39\.0 GB of 40\.0 GB .* paging file"):
        two.call("echo")
    one.pins = lambda: 0
    assert ask(three, "echo", 3) == 3       # the idle one was ended for it
    assert one.pid is None
    assert ask(three, "echo", 3) == 3


# failures


@pytest.mark.parametrize(("body", "name", "text"), [
    ("two", "zoo.TwoArguments", "about this"), ("local", "zoo.fail.<locals>.OnlyHere", "nobody else knows it"),
    ("file", "OSError", "[Errno 28] no space"), ("frozen", "zoo.Frozen", "it cannot be changed"), ("exit", "SystemExit", "3"), ("chain", "ValueError", "second"),
])
def test_every_exception_arrives_with_its_name_text_and_traceback(make, body, name, text):
    worker = make()
    with pytest.raises(Exception) as caught:
        ask(worker, "fail", body)
    assert (shown(caught.value), str(caught.value)) == (name, text)
    assert "in fail\n" in "".join(traceback.format_tb(caught.value.__traceback__))
    if body == "chain":
        assert isinstance(caught.value.__cause__, KeyError)
    assert ask(worker, "echo", "again") == "again"
    assert worker.starts == 1


def test_interrupts_that_the_node_raises_itself_arrive_as_such(make, monkeypatch):
    worker = make()
    with pytest.raises(BaseException) as caught:
        ask(worker, "fail", "interrupted")
    assert shown(caught.value) == "comfy.model_management.InterruptProcessingException"


def test_a_kind_that_nobody_answers_is_an_error(make):
    worker = make()
    with pytest.raises(failures.WorkerError, match="nothing here answers 'nonsense'"):
        ask(worker, "nonsense")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "signal 9 (SIGKILL) while it ran node 7 (Loader); the usual cause of that signal is"),
                                               (signal.SIGSEGV, "signal 11 (SIGSEGV) while it ran node 7 (Loader)")])
def test_a_worker_that_dies_says_how_and_the_next_call_works(make, number, name, caplog):
    caplog.set_level(logging.INFO)
    ended = threading.Event()
    worker = make()
    worker.on_end = lambda w, error: ended.set()
    pid = ask(worker, "about")["pid"]
    with pytest.raises(failures.WorkerDied) as caught:
        ask(worker, "die", int(number), label="node 7 (Loader)")
    assert (caught.value.pid, caught.value.signal) == (pid, number)
    for part in (f"worker zoo (pid {pid})", name, "the last thing it says"):
        assert part in str(caught.value)
    assert "was ended by" not in caplog.text, "whoever has made the call says it"
    assert "Starting worker zoo ..." in caplog.messages and "Worker zoo is ready after" in caplog.text
    if number == signal.SIGSEGV:
        assert "zoo.py" in str(caught.value), "where it crashed"
    assert ended.wait(SECONDS)
    assert ask(worker, "echo", "again") == "again"
    assert worker.pid != pid


def test_other_calls_of_a_worker_that_dies_fail_too_and_none_hangs(make):
    worker = make()
    ask(worker, "echo")
    futures = [worker.call("die", 9), *(worker.call("echo", i) for i in range(20))]
    for future in futures:
        with pytest.raises(failures.WorkerDied):
            future.result(SECONDS)


# calls


def test_coroutines_of_one_worker_run_at_the_same_time(make):
    worker = make()
    first, second = worker.call("slow_async", 1), worker.call("slow_async", 2)
    assert first.result(SECONDS).body == second.result(SECONDS).body == [1, 2]
    assert ask(worker, "echo", "after") == "after"


def test_two_workers_run_at_the_same_time(make, tmp_path):
    began = [tmp_path / "one", tmp_path / "two"]
    workers = [make(file.name) for file in began]
    for worker, file in zip(workers, began):
        worker.call("spin", {"began": str(file)})
    until(lambda: all(file.exists() for file in began))
    for worker in workers:
        assert worker.state is host.State.BUSY
        worker.kill()


def test_a_call_that_was_cancelled_before_it_began_is_not_made(make, tmp_path):
    worker = make()
    first = worker.call("stubborn", {"began": str(tmp_path / "began"), "end": str(tmp_path / "end")}, prompt="one")
    until((tmp_path / "began").exists)
    second = worker.call("program", {"began": str(tmp_path / "second")}, prompt="one")
    assert second.cancel()
    assert worker.call("freed").result(SECONDS).body is None        # the worker has heard of it
    (tmp_path / "end").touch()
    first.result(SECONDS)
    assert ask(worker, "echo", 1) == 1
    assert not (tmp_path / "second").exists()


def test_a_call_that_was_made_for_another_process_is_refused(make):
    worker = make()
    ask(worker, "echo")
    before = worker.link
    worker.restart().result(SECONDS)
    with pytest.raises(link.LinkClosed, match="has ended before the call"):
        worker.call("echo", over=before)
    assert worker.call("echo", 1, over=worker.link).result(SECONDS).body == 1


def test_what_was_let_go_of_is_free_while_the_worker_is_idle(make):
    worker = make()
    ask(worker, "let_go")
    until(lambda: ask(worker, "freed"))


# interrupting


@pytest.mark.row(39)
@pytest.mark.behaviour(21)
@pytest.mark.parametrize("swallow", [False, True])
def test_an_interrupt_ends_the_call_and_not_the_worker(make, tmp_path, swallow):
    began = str(tmp_path / "began")
    worker = make(grace=SECONDS)
    pid = ask(worker, "about")["pid"]
    future, other = worker.call("steps", {"began": began, "swallow": swallow}, prompt="one"), worker.call("echo", 1, prompt="two")
    until((tmp_path / "began").exists)
    worker.interrupt("one")
    with pytest.raises(BaseException) as caught:
        future.result(SECONDS)
    assert shown(caught.value) == "comfy.model_management.InterruptProcessingException"
    assert other.result(SECONDS).body == 1      # the interrupt was not meant for it
    assert ask(worker, "about", prompt="three")["pid"] == pid
    with pytest.raises(BaseException) as caught:
        ask(worker, "echo", prompt="one")       # a node of the same prompt that was already on its way
    assert shown(caught.value) == "comfy.model_management.InterruptProcessingException"


@pytest.mark.row(39)
def test_an_interrupt_of_another_prompt_does_nothing(make, tmp_path):
    worker = make()
    future = worker.call("stubborn", {"began": str(tmp_path / "began"), "end": str(tmp_path / "end")}, prompt="one")
    until((tmp_path / "began").exists)
    host.interrupt("other")
    (tmp_path / "end").touch()
    assert future.result(SECONDS).body == "a result that nobody wants"
    assert ask(worker, "interrupted", prompt="two") is False


@pytest.mark.row(39)
def test_an_interrupt_that_no_one_took_does_not_reach_the_next_prompt(make, tmp_path):
    worker = make(grace=SECONDS)
    future = worker.call("stubborn", {"began": str(tmp_path / "began"), "end": str(tmp_path / "end")}, prompt="one")
    until((tmp_path / "began").exists)
    host.interrupt("one")
    (tmp_path / "end").touch()
    with pytest.raises(BaseException) as caught:
        future.result(SECONDS)
    assert shown(caught.value) == "comfy.model_management.InterruptProcessingException"
    assert ask(worker, "interrupted", prompt="two") is False
    assert worker.starts == 1


@pytest.mark.row(39)
@pytest.mark.parametrize("keep_lock", [False, True])
def test_a_worker_in_a_native_call_is_killed_after_the_grace_period(make, tmp_path, keep_lock):
    worker = make(grace=0.5)
    future = worker.call("native", {"began": str(tmp_path / "began"), "keep_lock": keep_lock}, prompt="one")
    until((tmp_path / "began").exists)
    pid = worker.pid
    worker.interrupt("one")
    with pytest.raises(BaseException) as caught:
        future.result(SECONDS)
    assert shown(caught.value) == "comfy.model_management.InterruptProcessingException"
    assert not runs(pid)
    assert ask(worker, "echo", 1) == 1


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_programs_that_a_node_has_started_end_with_it_unless_the_pack_keeps_them(make, tmp_path, detach, keep):
    worker = make(grace=0.3, keep_processes=keep)
    future = worker.call("program", {"began": str(tmp_path / "began"), "detach": detach}, prompt="one")
    program, = read_pids(tmp_path / "began")
    worker.interrupt("one")
    with pytest.raises(BaseException):
        future.result(SECONDS)
    until(lambda: worker.pid is None)
    if keep:
        assert runs(program)
        os.kill(program, signal.SIGKILL)
    else:
        until(lambda: not runs(program))


def test_a_program_that_was_left_behind_ends_when_the_worker_dies_by_itself(make, tmp_path):
    worker = make()
    ask(worker, "program", {"began": str(tmp_path / "began"), "detach": True, "leave": True})
    program, = read_pids(tmp_path / "began")
    assert runs(program)
    with pytest.raises(failures.WorkerDied):
        ask(worker, "die", 9)
    until(lambda: not runs(program))


# the end of the host


BUSY = """
import pathlib
workers = [host.Worker(host.Spec(name, entry="zoo", grace=2.0)) for name in ("idle", "busy", "native", "locked", "pool")]
for w in workers:
    w.call("echo").result(30)
def begin(w, kind, **body):
    began = os.path.join(os.getcwd(), w.name)
    w.call(kind, {"began": began, **body})
    while not os.path.exists(began):
        pass
begin(workers[1], "spin")
begin(workers[2], "native")
begin(workers[3], "native", keep_lock=True)
begin(workers[4], "pool", stay=True)
pids = [w.pid for w in workers] + [int(p) for p in pathlib.Path("pool").read_text().split()]
print(*pids, flush=True)
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.execv('/bin/sleep', ['sleep', '3'])", "os._exit(1)", "sys.exit(0)",
                                 "os.kill(os.getpid(), 15)", "os.fork() or time.sleep(3); os.kill(os.getpid(), 9)"],
                         ids=["killed", "replaced", "hard exit", "exit", "terminated", "killed with a fork left"])
def test_no_worker_outlives_its_host(tree, tmp_path, end):
    """Idle, in a Python loop, in native code with and without the lock, with processes of its own."""
    process = host_program(tree, tmp_path, BUSY + f"import time\n{end}\n")
    try:
        line = process.stdout.readline()
        pids = [int(pid) for pid in line.split()]
        assert len(pids) == 7, process.communicate(timeout=SECONDS)
        until(lambda: not any(runs(pid) for pid in pids))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("threads", [True, False], ids=["as it is", "no thread starts at exit, as since Python 3.12"])
def test_ctrl_c_is_one_clean_stop(tree, tmp_path, threads):
    """The whole group gets it, twice."""
    process = host_program(tree, tmp_path, f"""
import atexit, threading, time
def none(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(lambda: {threads} or setattr(threading.Thread, "start", none))
workers = [host.Worker(host.Spec(name, entry="zoo", grace=2.0)) for name in ("one", "two")]
for w in workers:
    w.call("echo").result(30)
    w.call("steps", {{"began": os.path.join(os.getcwd(), w.name)}})
try:
    print(*[w.pid for w in workers], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    try:
        print("Stopped server", flush=True)
        time.sleep(0.5)
    except KeyboardInterrupt:
        pass
""")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "Stopped server\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (out, err, process.returncode) == ("", "", 0)
    assert not any(runs(pid) for pid in pids)


def test_a_node_may_have_processes_of_its_own(make, tmp_path):
    assert len(ask(make(), "pool", {"began": str(tmp_path / "began")})) == 2


# output


def test_output_is_logged_with_the_workers_name_and_never_stops_a_node(make, caplog):
    """Ten MiB, progress bars, letters that the locale does not know."""
    worker = make(environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    with caplog.at_level(logging.INFO):
        assert ask(worker, "write", 10 << 20) == "written"
        until(lambda: worker.log_tail[-1:] == ("a warning",))
    assert worker.log_tail[-2:] == ("äöü \N{SNOWMAN}", "a warning")
    assert all(r.getMessage().startswith("[zoo] ") for r in caplog.records if "x" * 50 in r.getMessage())


def test_a_log_that_stands_still_stops_nothing_and_what_is_lost_is_counted(make, monkeypatch):
    go, lines = threading.Event(), []

    def log(level: int, text: str, *args: object) -> None:
        lines.append((level, text % args))
        go.wait(SECONDS)
    worker = make()
    ask(worker, "echo")
    monkeypatch.setattr(logs.logging, "log", log)
    try:
        assert ask(worker, "write", 1_000_000) == "written"
        until(lambda: worker.log_tail[-1:] == ("a warning",))
        assert len(lines) == 1
    finally:
        go.set()
    until(lambda: any("lines were not shown" in text for _, text in lines))


def test_a_worker_without_output_goes_on(make):
    assert ask(make(), "close_streams") == "still here"


# recycling


def test_an_idle_worker_is_ended_and_the_next_call_starts_it_again(make):
    worker = make(idle_seconds=0.3)
    pid = ask(worker, "about")["pid"]
    ask(worker, "kept", 200)
    until(lambda: not runs(pid))
    assert worker.state is host.State.STOPPED
    assert ask(worker, "echo", 1) == 1


def test_a_worker_in_use_is_not_idle(make, tmp_path):
    worker = make(idle_seconds=0.3)
    future = worker.call("steps", {"began": str(tmp_path / "began")}, prompt="one")     # twelve seconds
    time.sleep(1.5)
    assert worker.state is host.State.BUSY
    worker.interrupt("one")
    with pytest.raises(BaseException):
        future.result(SECONDS)
    assert worker.starts == 1


def test_a_worker_that_is_kept_is_not_idle(make):
    worker = make(idle_seconds=0.3)
    with worker.kept():
        pid = ask(worker, "about")["pid"]
        time.sleep(1.5)
        assert worker.pid == pid
    until(lambda: not runs(pid))


def test_a_worker_above_its_ram_limit_is_ended_and_one_that_is_referred_to_only_trimmed(make, caplog):
    worker = make(ram_limit=200 << 20)
    worker.pins = lambda: 1
    pid = ask(worker, "about")["pid"]
    with caplog.at_level(logging.INFO):
        ask(worker, "grow", 300 << 20)
        until(lambda: "objects in it are in use" in caplog.text)
    assert runs(pid)
    worker.pins = lambda: 0
    ask(worker, "echo")
    until(lambda: not runs(pid))
    assert ask(worker, "echo", 1) == 1


# many


def test_descriptors_do_not_pile_up(make):
    worker = make()
    files = [ask(worker, "about")["files"] for _ in range(50)]
    assert files[-1] == files[0]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        worker.restart().result(SECONDS)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_calls_of_many_threads_get_their_own_answers(make):
    worker = make()
    wrong: list[object] = []

    def calls(base: int) -> None:
        for i in range(100):
            if ask(worker, "echo", base + i) != base + i:
                wrong.append(i)
    threads = [threading.Thread(target=calls, args=(n * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert worker.starts == 1
