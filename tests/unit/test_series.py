"""Patch files: what is read from them, and what is refused."""

import ast
import re
from pathlib import Path

import pytest

from comfy_multiproc.fork import growing, plan, series
from comfy_multiproc.fork.series import SeriesError, version_number
from tests.unit.sources import imports

GOOD = '''
subject = "a: b"
body = "why"
rows = [1, 42]

[[insert]]
file = "a.py"
where = "after"
what = "assign x"
code = """
    if x:
        hook()
"""
'''


def write(folder: Path, text: str, name: str = "01-first.toml") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def make_tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        (root / name.replace("__", ".")).write_bytes(text.encode())
    return root


def test_reads_in_the_order_of_names(tmp_path):
    write(tmp_path, GOOD.replace("a: b", "second"), "02-b.toml")
    write(tmp_path, GOOD, "01-a.toml")
    patches = series.load(tmp_path)
    assert [(patch.name, patch.subject, patch.rows) for patch in patches] == [("01-a", "a: b", (1, 42)), ("02-b", "second", (1, 42))]
    assert patches[0].message == "a: b\n\nwhy\n"


def test_no_message_names_what_a_reader_of_comfyui_cannot_see():
    """The mail of one patch is all that there is: no tests, rows or pages of this project. It is as wide as mail is."""
    for patch in series.load():
        assert max(map(len, patch.message.splitlines())) <= 76 and len(patch.subject) <= 72, patch.name
        assert not re.search(r"tests/|docs/|patches/|\bMultiproc\b|\brows?\b|\b(series|project)\b", patch.message), patch.name


def test_the_message_says_what_a_tree_is_too_old_for(tmp_path):
    write(tmp_path / "p", GOOD + 'scope = "f"\nsince = "0.31.0"\n' + GOOD.partition("[[insert]]")[2].join(["\n[[insert]]", ""]))
    patches = series.load(tmp_path / "p")
    tree = make_tree(tmp_path, a__py="x = 1\ndef f():\n    x = 1\n")
    assert plan.make_plan(tree, "0.31.0", patches).message(0) == "a: b\n\nwhy\n"
    assert plan.make_plan(tree, "0.30.0", patches).message(0) == "a: b\n\nwhy\n\nLeft out here, as ComfyUI 0.30.0 has no such code yet: hooks in f (a.py).\n"


def test_every_patch_names_tests_that_there_are_and_is_in_one_pull_request():
    root = Path(__file__).resolve().parents[2]
    patches = series.load()
    assert [test for patch in patches for test in patch.tests if not (root / test).exists()] == []
    assert [patch.name for patch in patches if not patch.tests] == []
    page = (root / "docs/maintainers.md").read_text("utf-8")
    assert re.findall(r"^\| `(\d\d-[\w-]+)` \|", page, re.MULTILINE) == [patch.name for patch in patches]


BUILDER = {"commands", "console.py", "demo", "doctor.py", "environment.py", "fork", "launch.py"}
"""What of comfy_multiproc makes the fork, and is no part of it."""


def test_new_files_come_once_and_import_nothing_that_comes_later():
    patches = series.load()
    ours = [path for patch in patches for add in patch.adds for path, _ in add.files() if path.endswith(".py")]
    modules = {".".join(Path(path).with_suffix("").parts).removesuffix(".__init__"): path for path in ours}
    there: set[str] = set()
    for order, patch in enumerate(patches):
        assert there.isdisjoint(path for add in patch.adds for path, _ in add.files()), patch.name
        new = growing.new_files(patches, order)
        there.update(new)
        needed = {path: {part for name in imports(series.PROJECT / path, data=data, type_checking=True) for part in (name, name.rpartition(".")[0])}
                  for path, data in new.items() if path in ours}
        later = {path: sorted(name for name in names if modules.get(name, path) not in there) for path, names in needed.items()}
        assert {path: names for path, names in later.items() if names} == {}, patch.name


def test_what_hooks_call_is_there_by_then():
    patches = series.load()
    there: dict[str, bytes] = {}
    for order, patch in enumerate(patches):
        there |= growing.new_files(patches, order)
        called = {name for insert in patch.inserts for name in re.findall(r"\bprocess_memory\.(\w+)", insert.code)}
        statements = ast.parse(there["comfy/process_memory/__init__.py"]).body
        names = {alias.asname or alias.name for node in statements if isinstance(node, ast.ImportFrom) for alias in node.names}
        modules = {Path(path).stem for path in there if path.startswith("comfy/process_memory/")}
        assert called <= names | modules, patch.name


def test_a_package_imports_what_is_there_so_far(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "PROJECT", tmp_path / "ours")
    (tmp_path / "ours" / "p").mkdir(parents=True)
    whole = '"""P."""\nimport os\nfrom . import a\nfrom .b import (\n    c,\n    d,\n)\nfrom os import path\n'
    for name, text in (("__init__", whole), ("a", ""), ("b", "c = d = 1\n"), ("e", "")):
        (tmp_path / "ours" / "p" / f"{name}.py").write_text(text)
    for number, only in (("1", '"__init__.py", "a.py"'), ("2", '"b.py"'), ("3", '"e.py"')):
        write(tmp_path / "s", f'subject = "s"\nbody = "b"\n[[add]]\npath = "p"\nonly = [{only}]\n', f"{number}.toml")
    made = plan.make_plan(make_tree(tmp_path), "0.30.0", series.load(tmp_path / "s"))
    assert made.changed(0) == {"p/__init__.py": b'"""P."""\nimport os\nfrom . import a\nfrom os import path\n', "p/a.py": b""}
    assert made.changed(1) == {"p/__init__.py": whole.encode(), "p/b.py": b"c = d = 1\n"}
    assert made.changed(2) == {"p/e.py": b""}


def test_every_file_is_in_the_series_or_belongs_to_the_builder():
    top = series.PROJECT / "comfy_multiproc"
    added = {path for patch in series.load() for add in patch.adds for path, _ in add.files()}
    rest = {path.relative_to(top).parts[0] for path in top.rglob("*.py") if path.relative_to(series.PROJECT).as_posix() not in added}
    assert rest == BUILDER


def test_new_files_are_such_as_git_takes_without_a_warning():
    for patch in series.load():
        for add in patch.adds:
            for path, data in add.files():
                assert not re.search(rb"[ \t]$|\n\n\Z", data, re.MULTILINE) or not data, path


@pytest.mark.parametrize(("old", "new", "message"), [
    ('subject = "a: b"', "", "subject is missing"),
    ('file = "a.py"', "", "insert 1: file is missing"),
    ('what = "assign x"', 'waht = "assign x"', "insert 1: unknown key waht"),
    ('what = "assign x"', 'what = "asign x"', "insert 1: what = \"asign x\" begins with none of"),
    ("rows = [1, 42]", "rows = [43]", "rows is a list of numbers from 1 to 42"),
    ("rows = [1, 42]", "rows = [", "is not TOML"),
    ("rows =", "tests = 3\nrows =", "tests is a list of paths"),
    ("    if x:\n        hook()", "", "insert 1: code is empty"),
    ("        hook()", "        hook()\n    y = w\\\\", "insert 1: code is not whole statements"),
    ("        hook()", "", "insert 1: code is not whole statements"),
    ("[[insert]]", '[[add]]\npath = "comfy/nowhere"\n\n[[insert]]', "add 1: there is no comfy/nowhere"),
    ("[[insert]]", '[[add]]\npath = "patches"\nonly = ["none.toml"]\n\n[[insert]]', "add 1: there is no patches/none.toml"),
    ("[[insert]]", '[[add]]\npath = "patches"\nonly = "none.toml"\n\n[[insert]]', "add 1: only is a list of names in patches"),
    ("where = \"after\"", "where = 3", "insert 1: every value is a string"),
    ("where = \"after\"", "where = \"after\"\nwhere_present = 1", "insert 1: where_present is true or false"),
])
def test_refuses_a_patch_file(tmp_path, old, new, message):
    assert old in GOOD
    write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(SeriesError, match=message) as caught:
        series.load(tmp_path)
    assert "01-first.toml" in str(caught.value)


def test_refuses_an_empty_series(tmp_path):
    with pytest.raises(SeriesError, match="no patch files"):
        series.load(tmp_path)


@pytest.mark.parametrize(("text", "number"), [("0.30.0", (0, 30, 0)), ("0.33", (0, 33)), ("1.2.3rc1", (1, 2, 3)), ("0.31.0-dev+g12", (0, 31, 0))])
def test_version_number(text, number):
    assert version_number(text) == number


@pytest.mark.parametrize(("since", "until", "exists"), [("", "", True), ("0.30.0", "", True), ("0.31.0", "", False), ("", "0.30.0", False), ("0.18.0", "0.31.0", True)])
def test_since_and_until(since, until, exists):
    insert = series.Insert(anchor=None, code="x", since=since, until=until)
    assert insert.exists_in("0.30.0") is exists


def test_plan_leaves_out_what_a_release_lacks(tmp_path):
    write(tmp_path / "p", GOOD + 'since = "0.31.0"\n')
    made = plan.make_plan(make_tree(tmp_path, a__py="x = 1\n"), "0.30.0", series.load(tmp_path / "p"))
    assert made.ok and [result.status for result in made.results] == ["absent"] and made.changed(0) == {}


@pytest.mark.parametrize(("source", "status"), [(None, "absent"), ("x = 1\n", "ok"), ("y = 1\n", "error")])
def test_plan_leaves_out_what_goes_into_a_file_that_is_in_no_release_yet(tmp_path, source, status):
    write(tmp_path / "p", GOOD + "where_present = true\n")
    made = plan.make_plan(make_tree(tmp_path, **({"a__py": source} if source else {})), "0.30.0", series.load(tmp_path / "p"))
    assert [result.status for result in made.results] == [status]


@pytest.mark.parametrize(("source", "status"), [("x = 1\n", "absent"), (None, "absent"), ("def f():\n    x = 1\n", "ok"), ("def f():\n    y = 1\n", "error")])
def test_plan_leaves_out_what_is_in_no_release_yet(tmp_path, source, status):
    """A scope that is not there is left out; a scope that has changed is an error."""
    write(tmp_path / "p", GOOD + 'scope = "f"\nwhere_present = true\n')
    made = plan.make_plan(make_tree(tmp_path, **({"a__py": source} if source else {})), "0.30.0", series.load(tmp_path / "p"))
    assert [result.status for result in made.results] == [status]


def test_plan_names_patch_file_function_anchor_and_release(tmp_path):
    write(tmp_path / "p", GOOD.replace('what = "assign x"', 'what = "assign x"\nscope = "f"'))
    made = plan.make_plan(make_tree(tmp_path, a__py="def f():\n    x = 1\n    x = 2\n"), "0.30.0", series.load(tmp_path / "p"))
    with pytest.raises(plan.PlanError) as caught:
        made.require_ok()
    for part in ("patch 01-first", "a.py in f", "after `assign x`", "matches 2 times", "line 2: x = 1", "ComfyUI 0.30.0", "nothing was written"):
        assert part in str(caught.value)


def test_plan_refuses_a_file_that_is_not_there(tmp_path):
    write(tmp_path / "p", GOOD)
    made = plan.make_plan(tmp_path, "0.30.0", series.load(tmp_path / "p"))
    assert made.results[0].message == "cannot read the file: no such file or directory"


def test_plan_refuses_code_that_does_not_compile(tmp_path):
    write(tmp_path / "p", GOOD.replace('"after"', '"decorate-inner"').replace('what = "assign x"', 'scope = "f"'))
    made = plan.make_plan(make_tree(tmp_path, a__py="@g\ndef f(): pass\n"), "0.30.0", series.load(tmp_path / "p"))
    assert not made.ok and "does not compile" in made.results[0].message


def test_plan_refuses_what_is_not_additive(tmp_path, monkeypatch):
    """An engine that changed an upstream byte is caught before anything is written."""
    write(tmp_path / "p", GOOD)
    honest = plan.render
    monkeypatch.setattr(plan, "render", lambda source, hooks: honest(source, hooks).replace(b"x = 1", b"x = 2"))
    made = plan.make_plan(make_tree(tmp_path, a__py="x = 1\n"), "0.30.0", series.load(tmp_path / "p"))
    assert not made.ok and "not additive" in made.results[0].message


def test_each_prefix_of_the_series_is_resolved_on_the_pristine_file(tmp_path):
    """A hook that assigns the very name a later anchor looks for does not confuse it."""
    write(tmp_path / "p", GOOD.replace("hook()", "x = 3"), "01-a.toml")
    write(tmp_path / "p", GOOD, "02-b.toml")
    made = plan.make_plan(make_tree(tmp_path, a__py="x = 1\ny = 2\n"), "0.30.0", series.load(tmp_path / "p"))
    assert made.ok
    assert made.changed(0)["a.py"] == b"x = 1\nif x:\n    x = 3\ny = 2\n"
    assert made.changed(1)["a.py"] == b"x = 1\nif x:\n    x = 3\nif x:\n    hook()\ny = 2\n"


def test_plan_refuses_to_add_what_upstream_has(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "PROJECT", tmp_path / "ours")
    (tmp_path / "ours" / "comfy").mkdir(parents=True)
    (tmp_path / "ours" / "comfy" / "new.py").write_text("a = 1\n")
    write(tmp_path / "p", 'subject = "s"\nbody = "b"\n[[add]]\npath = "comfy/new.py"\n')
    (tmp_path / "up" / "comfy").mkdir(parents=True)
    made = plan.make_plan(tmp_path / "up", "0.30.0", series.load(tmp_path / "p"))
    assert made.ok and made.changed(0) == {"comfy/new.py": b"a = 1\n"}
    (tmp_path / "up" / "comfy" / "new.py").write_text("b = 1\n")
    made = plan.make_plan(tmp_path / "up", "0.30.0", series.load(tmp_path / "p"))
    with pytest.raises(plan.PlanError, match="adds comfy/new.py, which ComfyUI 0.30.0 already has"):
        made.require_ok()
