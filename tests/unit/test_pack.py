"""Which packs are isolated, and what is said about a configuration that cannot be used."""

import logging

import pytest

from comfy_multiproc import pack
from comfy_multiproc.pack import PackConfigError


def make(folder, name="one", table=None, project=None):
    path = folder / name
    path.mkdir()
    (path / "__init__.py").write_text("")
    text = f'[project]\nname = "{project}"\n' if project else ""
    if table is not None:
        text += f"[tool.comfyui-multiproc]\n{table}\n"
    if text:
        (path / "pyproject.toml").write_text(text)
    return path


@pytest.mark.parametrize("table, asked, isolated, reason", [
    (None, [], False, "nothing asks"),
    (None, ["one"], True, "--isolate one"),
    (None, ["ONE"], True, "--isolate ONE"),
    (None, ["all"], True, "--isolate all"),
    ("isolate = true", [], True, "isolate = true"),
    ("isolate = false", ["all"], False, "isolate = false"),
    ("isolate = false", ["one"], True, "--isolate one"),
    ('group = "g"', [], False, "nothing asks"),
])
def test_who_decides(tmp_path, table, asked, isolated, reason):
    found = pack.decide(make(tmp_path, table=table), asked)
    assert found.isolated is isolated and reason in found.reason


def test_a_pack_may_be_called_by_its_project_name(tmp_path):
    path = make(tmp_path, project="Great-Nodes")
    assert pack.decide(path, ["great-nodes"]).isolated
    assert pack.unknown(["great-nodes", "one", "all", "two"], pack.find([tmp_path])) == ["two"]


def test_a_name_with_a_letter_wrong_is_taken_for_a_guess(tmp_path):
    make(tmp_path, "my-pack")
    assert pack.nearest("MyPak", pack.find([tmp_path])) == "my-pack" and pack.nearest("other", pack.find([tmp_path])) is None


def test_every_key(tmp_path):
    path = make(tmp_path, table='isolate = true\ngroup = "g"\nram_limit = "1.5G"\nidle_seconds = 30\nenvironment = "env"\nfallback = "refuse"\n'
                                "keep_processes = true")
    config = pack.decide(path).config
    assert (config.ram_limit, config.idle_seconds, config.fallback, config.keep_processes) == (3 << 29, 30.0, "refuse", True)
    assert pack.decide(path).worker == "g"


@pytest.mark.parametrize("table, words", [
    ("isolate = 1", ("isolate", "true or false")),
    ('group = "../x"', ("group", "letters")),
    ('ram_limit = "much"', ("ram_limit", "6G")),
    ("ram_limit = -1", ("ram_limit",)),
    ("idle_seconds = 0", ("idle_seconds", "positive")),
    ("environment = 3", ("environment",)),
    ('fallback = "maybe"', ("fallback", "refuse")),
    ("isolated = true", ("isolated", "isolate, group")),
    (f'ram_limit = "{"9" * 400}T"', ("ram_limit", "6G")),
    ("isolate = 1\nidle_seconds = 0\nisolated = true", ("true or false", "positive", "no key 'isolated'")),
])
def test_what_cannot_be_used_is_named_with_its_file(tmp_path, caplog, table, words):
    path = make(tmp_path, table=table)
    with caplog.at_level(logging.WARNING):
        found = pack.decide(path)
    assert not found.isolated
    for word in (str(path / "pyproject.toml"), *words):
        assert word in found.reason and word in caplog.text


@pytest.mark.parametrize("text", ["[tool", "\0", f"a = {'[' * 5000}", f"a = {'9' * 5000}"], ids=["half", "zero", "deep", "number"])
def test_a_file_that_is_no_toml(tmp_path, text):
    path = make(tmp_path)
    (path / "pyproject.toml").write_text(text)
    assert "cannot be read" in pack.decide(path).reason
    assert pack.decide(path, ["one"]).isolated      # whoever starts the server has the last word


def test_only_what_comfyui_loads_is_a_pack(tmp_path):
    make(tmp_path)
    make(tmp_path, "two.disabled")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "single.py").write_text("")
    (tmp_path / "readme.txt").write_text("")
    assert sorted(p.name for p in pack.find([tmp_path, tmp_path / "missing"])) == ["one", "single"]


def test_the_environment_is_found_beside_the_pack(tmp_path):
    path = make(tmp_path, table='environment = ".venv"')
    with pytest.raises(PackConfigError, match="there is no Python"):
        assert pack.decide(path).python
    with pytest.raises(PackConfigError, match="there is no Python"):
        assert pack.decide(make(tmp_path, "long", table=f'environment = "{"x" * 5000}"')).python
    python = path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    assert pack.decide(path).python == python
