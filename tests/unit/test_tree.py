"""Building, updating, applying and exporting, on a small tree with git."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_multiproc.fork import commits, git, locking, series, tree
from comfy_multiproc.fork.errors import ForkError, TargetError, UpstreamError
from comfy_multiproc.fork.plan import PlanError
from comfy_multiproc.fork.upstream import Source, checkout

PATCH = '''
subject = "model_management: {name}"
body = "why"
[[insert]]
file = "comfy/model_management.py"
where = "after"
what = "assign x"
code = "hook_{name} = 1"
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A series of two patches and the file that the first one adds."""
    ours = tmp_path / "ours"
    (ours / "comfy" / "process_memory").mkdir(parents=True)
    (ours / "comfy" / "process_memory" / "provider.py").write_text("API = 1\n")
    (ours / "comfy" / "process_memory" / "__pycache__").mkdir()
    (ours / "comfy" / "process_memory" / "__pycache__" / "x.pyc").write_bytes(b"0")
    (ours / "patches").mkdir()
    (ours / "patches" / "01-a.toml").write_text(PATCH.format(name="a") + '[[add]]\npath = "comfy/process_memory"\n')
    (ours / "patches" / "02-b.toml").write_text(PATCH.format(name="b"))
    monkeypatch.setattr(series, "PROJECT", ours)
    monkeypatch.setattr(series, "folder", lambda: ours / "patches")
    monkeypatch.setenv("COMFY_MULTIPROC_CACHE", str(tmp_path / "cache"))
    return ours


@pytest.fixture
def plain(tmp_path):
    """An upstream tree that is not in git, with things in it that are a person's own."""
    root = tmp_path / "Käse und Brot" / "ComfyUI"
    (root / "comfy").mkdir(parents=True)
    (root / "main.py").write_text("pass\n")
    (root / "comfyui_version.py").write_text('__version__ = "0.30.0"\n')
    (root / "comfy" / "model_management.py").write_bytes(b"# caf\xc3\xa9\r\nx = 1\r\ny = 2\r\n")
    (root / ".gitignore").write_text("/models/\n/output/\n")
    (root / "models" / "vae").mkdir(parents=True)
    (root / "models" / "vae" / "put_vae_here").touch()
    (root / "models" / "vae" / "mine.safetensors").write_bytes(b"weights")
    (root / "run.sh").write_text("true\n")
    os.chmod(root / "run.sh", 0o755)
    return root


@pytest.fixture
def repository(plain):
    git.run("init", "-q", "-b", "master", cwd=plain)
    git.run("config", "user.name", "Somebody", cwd=plain)
    git.run("config", "user.email", "somebody@example.com", cwd=plain)
    git.run("add", "-A", cwd=plain)
    git.run("commit", "-q", "-m", "upstream", cwd=plain)
    return plain


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def series_of(path: Path) -> list[str]:
    return git.run("log", "--reverse", "--format=%s", cwd=path).splitlines()


def test_builds_a_commit_per_patch_from_a_plain_folder(project, plain, tmp_path):
    before = snapshot(plain)
    built = tree.build(checkout(plain), tmp_path / "fork")
    assert not built.reused
    assert series_of(built.path) == ["ComfyUI 0.30.0", "model_management: a", "model_management: b"]
    assert (built.path / "comfy/model_management.py").read_bytes() == b"# caf\xc3\xa9\r\nx = 1\r\nhook_a = 1\r\nhook_b = 1\r\ny = 2\r\n"
    assert (built.path / "comfy/process_memory/provider.py").exists() and not (built.path / "comfy/process_memory/__pycache__").exists()
    assert git.run("diff", "--numstat", built.base, built.head, cwd=built.path).split() == ["2", "0", "comfy/model_management.py", "1", "0", "comfy/process_memory/provider.py"]
    assert (built.path / "models/vae/put_vae_here").exists() and not (built.path / "models/vae/mine.safetensors").exists()
    assert os.access(built.path / "run.sh", os.X_OK)
    assert git.run("status", "--porcelain", cwd=built.path) == ""
    assert snapshot(plain) == before


def test_builds_on_the_history_of_a_checkout_and_leaves_it_alone(project, repository, tmp_path):
    before = snapshot(repository)
    built = tree.build(checkout(repository), tmp_path / "fork")
    assert series_of(built.path) == ["upstream", "model_management: a", "model_management: b"]
    assert built.base == git.run("rev-parse", "HEAD", cwd=repository).strip()
    assert snapshot(repository) == before


def test_the_same_series_gives_the_same_commits(project, plain, tmp_path):
    assert tree.build(checkout(plain), tmp_path / "one").head == tree.build(checkout(plain), tmp_path / "two").head


def test_the_byte_order_mark_of_a_file_stays_its_only_one(project, plain, tmp_path):
    (plain / "comfy/model_management.py").write_bytes(b"\xef\xbb\xbfx = 1\ny = 2\n")
    built = tree.build(checkout(plain), tmp_path / "fork")
    assert (built.path / "comfy/model_management.py").read_bytes() == b"\xef\xbb\xbfx = 1\nhook_a = 1\nhook_b = 1\ny = 2\n"


def test_a_plain_folder_that_changed_is_built_anew(project, plain, tmp_path):
    tree.build(checkout(plain), tmp_path / "fork")
    assert tree.build(checkout(plain), tmp_path / "fork").reused
    (plain / "main.py").write_text("newer\n")       # no hook goes into it
    tree.build(checkout(plain), tmp_path / "fork")
    assert (tmp_path / "fork/main.py").read_text() == "newer\n"


@pytest.mark.parametrize("differs", ["line ends", "mode", "hidden edit"])
def test_what_a_checkout_makes_of_the_commit_is_in_no_patch(project, repository, tmp_path, differs):
    file = repository / "comfy/model_management.py"
    file.write_bytes(b"x = 1\ny = 2\n")
    git.run("commit", "-q", "-a", "-m", "LF", cwd=repository)
    if differs == "line ends":
        git.run("config", "core.autocrlf", "true", cwd=repository)
        file.unlink()
        git.run("checkout", "-q", "comfy", cwd=repository)
        assert b"\r\n" in file.read_bytes()
    elif differs == "mode":
        git.run("config", "core.fileMode", "false", cwd=repository)
        file.chmod(0o755)
    else:
        git.run("update-index", "--skip-worktree", "comfy/model_management.py", cwd=repository)
        file.write_text("x = 1\nmine = 3\n")
    built = tree.build(checkout(repository), tmp_path / "fork")
    changed = git.run("diff", "--numstat", "--summary", built.base, built.head, "--", "comfy/model_management.py", cwd=built.path)
    assert changed.split() == ["2", "0", "comfy/model_management.py"]


def test_a_shallow_checkout_that_moved_on(project, repository, tmp_path):
    mine = tmp_path / "mine"
    git.run("clone", "-q", "--depth=1", repository.as_uri(), str(mine))
    fork = tree.build(checkout(mine), tmp_path / "fork")
    for text in ("1\n", "2\n"):
        (repository / "main.py").write_text(text)
        git.run("commit", "-q", "-a", "-m", "newer", cwd=repository)
    git.run("fetch", "-q", "--depth=1", cwd=mine)
    git.run("reset", "-q", "--hard", "FETCH_HEAD", cwd=mine)
    assert not tree.build(checkout(mine), fork.path).reused
    assert series_of(fork.path) == ["newer", "model_management: a", "model_management: b"]


SETTINGS = """
[core]
    excludesFile = {home}/ignored
    attributesFile = {home}/attributes
    autocrlf = true
    hooksPath = {home}/hooks
[init]
    templateDir = {home}/template
[commit]
    gpgsign = true
[user]
    useConfigOnly = true
[diff]
    noprefix = true
    context = 0
[format]
    suffix = .eml
    coverLetter = true
    useAutoBase = true
    attach = true
[color]
    ui = always
"""


def test_the_settings_of_whoever_runs_it_change_nothing(project, plain, tmp_path, monkeypatch, request):
    expected = tree.build(checkout(plain), tmp_path / "expected").head
    home = tmp_path / "home"
    for folder in ("hooks", "template/info"):
        (home / folder).mkdir(parents=True)
    (home / "ignored").write_text("*.sh\n")
    (home / "template/info/exclude").write_text("main.py\n")
    (home / "attributes").write_text("* text=auto eol=crlf\n")
    for hook in ("post-checkout", "reference-transaction"):
        (home / "hooks" / hook).write_text("#!/bin/sh\nexit 1\n")
        (home / "hooks" / hook).chmod(0o755)
    repository = request.getfixturevalue("repository")
    shutil.copytree(repository, tmp_path / "plain", ignore=shutil.ignore_patterns(".git"))
    (home / "settings").write_text(SETTINGS.format(home=home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / "settings"))
    fork = tree.build(checkout(tmp_path / "plain"), tmp_path / "fork")
    assert fork.head == expected and (fork.path / "main.py").read_bytes() == b"pass\n"
    files = tree.export(checkout(repository), tmp_path / "out")
    assert [file.name for file in files] == ["0001-model_management-a.patch", "0002-model_management-b.patch"]
    applied = tree.apply(repository)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    git.run("checkout", "-q", "--force", "--detach", applied.base, cwd=repository)
    git.run("am", "-q", "--keep-cr", *map(str, files), cwd=repository)
    assert git.run("rev-parse", "HEAD^{tree}", cwd=repository) == git.run("rev-parse", f"{applied.head}^{{tree}}", cwd=repository)


def test_nothing_of_the_users_is_swept(project, plain, tmp_path):
    """The folder that a fork is built in is often the home folder."""
    (tmp_path / ".old-dotfiles").mkdir()
    os.utime(tmp_path / ".old-dotfiles", (1, 1))
    tree.build(checkout(plain), tmp_path / "fork")
    assert (tmp_path / ".old-dotfiles").exists()


def test_a_full_disk_is_named(project, plain, tmp_path, monkeypatch):
    with monkeypatch.context() as full, pytest.raises(TargetError, match="temporary files .TMPDIR.: the disk is full"):
        full.setattr(commits.tempfile, "TemporaryFile", lambda: open("/dev/full", "wb"))
        tree.build(checkout(plain), tmp_path / "fork")
    monkeypatch.setattr(git, "ALMOST_FULL", 1 << 62)
    with pytest.raises(TargetError, match=f"cannot write {tmp_path}: the disk is full"):     # what `git reset` says of it
        git.run("-c", "alias.fill=!echo error: unable to write file x >&2; false", "fill", cwd=tmp_path)


def test_a_file_system_without_locks_stops_no_build(project, plain, tmp_path, monkeypatch):
    def none(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking, "_try", none)
    fork = tree.build(checkout(plain), tmp_path / "fork")
    (fork.path / "user").mkdir()
    (fork.path / "user/comfyui.db.lock").touch()
    assert not tree.build(checkout(plain), fork.path, force=True).reused


def test_a_tree_inside_another_repository_is_a_plain_folder(project, plain, tmp_path):
    git.run("init", "-q", cwd=plain.parent)
    built = tree.build(checkout(plain), tmp_path / "fork")
    assert series_of(built.path)[0] == "ComfyUI 0.30.0"


def test_reuses_updates_and_keeps_what_is_a_persons_own(project, repository, tmp_path):
    fork = tree.build(checkout(repository), tmp_path / "fork")
    (fork.path / "models" / "mine.safetensors").parent.mkdir(exist_ok=True)
    (fork.path / "models" / "mine.safetensors").write_bytes(b"weights")
    assert tree.build(checkout(repository), fork.path) == tree.Built(fork.path, "0.30.0", fork.base, fork.head, reused=True)
    (project / "patches" / "03-c.toml").write_text(PATCH.format(name="c"))
    updated = tree.build(checkout(repository), fork.path)
    assert series_of(fork.path)[-1] == "model_management: c" and updated.head != fork.head
    assert b"hook_c" in (fork.path / "comfy/model_management.py").read_bytes()
    assert (fork.path / "models" / "mine.safetensors").read_bytes() == b"weights"
    (repository / "new.py").write_text("pass\n")
    git.run("add", "new.py", cwd=repository)
    git.run("commit", "-q", "-m", "newer", cwd=repository)
    assert series_of(tree.build(checkout(repository), fork.path).path)[:2] == ["upstream", "newer"]


def test_edits_in_the_fork_are_not_lost(project, repository, tmp_path):
    fork = tree.build(checkout(repository), tmp_path / "fork")
    (fork.path / "main.py").write_text("mine\n")
    (project / "patches" / "03-c.toml").write_text(PATCH.format(name="c"))
    with pytest.raises(TargetError, match=r"edits that a build would overwrite \(main.py\)"):
        tree.build(checkout(repository), fork.path)
    assert (fork.path / "main.py").read_text() == "mine\n"
    tree.build(checkout(repository), fork.path, force=True)
    assert (fork.path / "main.py").read_text() == "pass\n"
    git.run("-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty", "-m", "mine", cwd=fork.path)
    with pytest.raises(TargetError, match="commits of its own"):
        tree.build(checkout(repository), fork.path)


def test_refuses_a_folder_that_it_did_not_build(project, repository, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear")
    with pytest.raises(TargetError, match="exists and was not built by this command"):
        tree.build(checkout(repository), tmp_path / "full", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TargetError, match="exists and was not built by this command"):
        tree.build(checkout(repository), tmp_path / "file")
    with pytest.raises(TargetError, match="is the upstream tree itself"):
        tree.build(checkout(repository), repository)
    (tmp_path / "empty").mkdir()
    assert tree.build(checkout(repository), tmp_path / "empty").path == tmp_path / "empty"


def test_a_series_that_does_not_fit_writes_nothing(project, repository, tmp_path):
    (project / "patches" / "02-b.toml").write_text(PATCH.format(name="b").replace("assign x", "assign z"))
    before = snapshot(repository)
    for attempt in (lambda: tree.build(checkout(repository), tmp_path / "new" / "fork"), lambda: tree.apply(repository),
                    lambda: tree.export(checkout(repository), tmp_path / "new" / "out")):
        with pytest.raises(PlanError, match="patch 02-b"):
            attempt()
    assert snapshot(repository) == before and not (tmp_path / "new" / "fork").exists() and not (tmp_path / "new" / "out").exists()


def test_patched_trees_are_recognised_and_forced_from_their_base(project, repository, tmp_path):
    fork = tree.build(checkout(repository), tmp_path / "fork")
    (fork.path / "comfy_multiproc").mkdir()
    (fork.path / "comfy_multiproc" / "__init__.py").write_text('__version__ = "9.8.7"\n')
    with pytest.raises(UpstreamError, match="comfy_multiproc 9.8.7"):
        tree.check(fork.path)
    with pytest.raises(UpstreamError, match="comfy_multiproc 9.8.7.*--force"):
        checkout(fork.path)
    again = tree.build(checkout(fork.path, force=True), tmp_path / "again", force=True)
    assert series_of(again.path) == ["upstream", "model_management: a", "model_management: b"] and again.head == fork.head
    shutil.rmtree(fork.path / ".git")
    with pytest.raises(UpstreamError, match="no commit without it"):
        tree.build(checkout(fork.path, force=True), tmp_path / "third", force=True)


def test_apply_commits_on_a_branch_of_a_clean_checkout(project, repository, tmp_path):
    fork = tree.build(checkout(repository), tmp_path / "fork")
    applied = tree.apply(repository)
    assert git.run("rev-parse", "HEAD^{tree}", cwd=repository) == git.run("rev-parse", "HEAD^{tree}", cwd=fork.path)
    assert git.run("branch", "--show-current", cwd=repository).strip() == "multiproc"
    assert (repository / "models/vae/mine.safetensors").read_bytes() == b"weights"
    git.run("checkout", "-q", "master", cwd=repository)
    assert snapshot(repository / "comfy") == {"model_management.py": b"# caf\xc3\xa9\r\nx = 1\r\ny = 2\r\n"}
    with pytest.raises(UpstreamError, match="already has a branch multiproc"):
        tree.apply(repository)
    assert tree.apply(repository, force=True).head == applied.head
    (repository / "main.py").write_text("mine\n")
    with pytest.raises(UpstreamError, match="main.py"):
        tree.apply(repository, force=True)


def test_apply_needs_a_git_checkout(project, plain):
    with pytest.raises(UpstreamError, match="is not a git checkout"):
        tree.apply(plain)


@pytest.mark.parametrize("in_git", [True, False], ids=["checkout", "plain"])
def test_exported_patches_give_the_built_tree(project, plain, tmp_path, in_git, request):
    if in_git:
        request.getfixturevalue("repository")
    fork = tree.build(checkout(plain), tmp_path / "fork")
    files = tree.export(checkout(plain), tmp_path / "out", author="A Maintainer <a@example.com>")
    assert [file.name for file in files] == ["0001-model_management-a.patch", "0002-model_management-b.patch"]
    assert "From: A Maintainer <a@example.com>" in files[0].read_text() and "\nwhy\n" in files[0].read_text()
    fresh = tmp_path / "fresh"
    git.run("clone", "-q", str(fork.path), str(fresh))
    git.run("checkout", "-q", "--detach", fork.base, cwd=fresh)
    git.run("-c", "user.name=a", "-c", "user.email=b", "am", "-q", "--keep-cr", *map(str, files), cwd=fresh)
    assert git.run("rev-parse", "HEAD^{tree}", cwd=fresh) == git.run("rev-parse", "HEAD^{tree}", cwd=fork.path)
    with pytest.raises(TargetError, match="is not empty"):
        tree.export(checkout(plain), tmp_path / "out")


@pytest.mark.parametrize("step", ["write", "reset"])
def test_an_interrupted_build_is_mended_by_the_next(project, repository, tmp_path, monkeypatch, step):
    """Killed while the commits are written, or half-way through the work tree."""
    fork = tree.build(checkout(repository), tmp_path / "fork")
    (project / "patches" / "03-c.toml").write_text(PATCH.format(name="c"))
    with monkeypatch.context() as broken:
        if step == "write":
            broken.setattr(commits, "write", interrupt)
        else:
            honest = git.run
            broken.setattr(git, "run", lambda *args, **kwargs: interrupt() if args[0] == "reset" else honest(*args, **kwargs))
        with pytest.raises(KeyboardInterrupt):
            tree.build(checkout(repository), fork.path)
        with pytest.raises(KeyboardInterrupt):
            tree.build(checkout(repository), tmp_path / "second")
    if step == "reset":
        (fork.path / "main.py").unlink()        # what a half-done reset leaves behind
        (fork.path / ".git" / "index.lock").touch()
        (fork.path / ".git" / "refs" / "multiproc" / "new.lock").touch()
    assert not (tmp_path / "second").exists()
    for target in (fork.path, tmp_path / "second"):
        built = tree.build(checkout(repository), target)
        assert series_of(target)[-1] == "model_management: c" and git.run("status", "--porcelain", cwd=target) == "" and not built.reused


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_two_builds_of_one_folder_wait_for_each_other(project, repository, tmp_path):
    code = f"""
import sys
from pathlib import Path
from comfy_multiproc.fork import series, tree, upstream
series.PROJECT = Path({str(project)!r})
series.folder = lambda: series.PROJECT / "patches"
print(tree.build(upstream.checkout(Path({str(repository)!r})), Path({str(tmp_path / 'fork')!r})).reused)
"""
    env = os.environ | {"PYTHONPATH": str(Path(tree.__file__).parents[2])}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in running)
    assert said == ["False", "True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("command", [["main.py", "--port", "1"], ["{fork}/main.py"]])
def test_a_fork_is_not_changed_under_a_server_that_runs_from_it(project, repository, tmp_path, command):
    fork = tree.build(checkout(repository), tmp_path / "fork").path
    program = "import sys; print(flush=True); input()"
    (fork / "main.py").write_text(program)
    git.run("update-index", "--assume-unchanged", "main.py", cwd=fork)
    command = [argument.replace("{fork}", str(fork)) for argument in command]
    server = subprocess.Popen([sys.executable, *command], cwd=fork if command[0] == "main.py" else tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    reader = subprocess.Popen(["tail", "-f", "main.py"], cwd=fork, stdout=subprocess.DEVNULL)
    try:
        server.stdout.readline()
        assert tree.build(checkout(repository), fork).reused
        (project / "patches" / "03-c.toml").write_text(PATCH.format(name="c"))
        with pytest.raises(TargetError, match=rf"a server runs from it \(pid {server.pid}\): stop that first"):
            tree.build(checkout(repository), fork)
        assert len(series_of(fork)) == 3
    finally:
        server.kill()
        server.communicate(timeout=30)
        reader.kill()
        reader.wait(30)
    git.run("update-index", "--no-assume-unchanged", "main.py", cwd=fork)
    git.run("checkout", "--quiet", "main.py", cwd=fork)
    assert not tree.build(checkout(repository), fork).reused


def test_a_killed_builder_leaves_no_lock(project, repository, tmp_path):
    code = f"from pathlib import Path\nfrom comfy_multiproc.fork.locking import locked\nwith locked(Path({str(tmp_path / 'fork')!r}), print):\n    print('held', flush=True)\n    input()"
    holder = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(Path(tree.__file__).parents[2])},
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    said: list[str] = []
    with pytest.raises(TargetError, match="another process has been building"):
        with locking.locked(tmp_path / "fork", said.append, patience=0.2):
            pass
    assert "Waiting for another process" in said[0]
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=30)
    assert not tree.build(checkout(repository), tmp_path / "fork").reused


def test_a_patch_of_which_nothing_exists_in_a_release_is_no_commit(project, repository, tmp_path):
    (project / "patches" / "01-a.toml").write_text(PATCH.format(name="a") + 'since = "9.0"\n')
    fork = tree.build(checkout(repository), tmp_path / "fork")
    assert series_of(fork.path) == ["upstream", "model_management: b"]
    assert [file.name for file in tree.export(checkout(repository), tmp_path / "out")] == ["0001-model_management-b.patch"]


def test_a_damaged_note_rebuilds(project, repository, tmp_path):
    fork = tree.build(checkout(repository), tmp_path / "fork")
    (fork.path / ".git" / tree.NOTE).write_text("{")
    assert not tree.build(checkout(repository), fork.path).reused


def test_check_reports_for_people_and_programs(project, repository):
    (project / "patches" / "03-c.toml").write_text(PATCH.format(name="c") + 'since = "9.0"\n')
    (project / "patches" / "04-d.toml").write_text(PATCH.format(name="d").replace("assign x", "assign z"))
    report = tree.check(repository)
    assert not report.ok and report.version == "0.30.0"
    rows = {line.split()[0]: line for line in report.table().splitlines()[2:6]}
    assert rows["01-a"].endswith("fits") and rows["03-c"].endswith("not in this release") and rows["04-d"].endswith("does not fit")
    data = report.to_json()
    assert data["ok"] is False and data["patches"]["04-d"] == {"ok": 0, "absent": 0, "error": 1}
    assert [hook["line"] for hook in data["hooks"]] == [3, 3, None, None] and "assign z" in data["reasons"][0]


def test_no_comfyui_tree(project, tmp_path):
    with pytest.raises(ForkError, match="is not a ComfyUI tree"):
        tree.check(tmp_path)
    with pytest.raises(ForkError, match="does not exist"):
        tree.build(Source(tmp_path / "x", "0.30.0", "checkout"), tmp_path / "fork") if (tmp_path / "x").exists() else checkout(tmp_path / "x")
