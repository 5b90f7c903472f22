"""The series on every pinned release: it fits, it is additive, and what is exported is what is built."""

import ast
import shutil
from pathlib import Path

import pytest

from comfy_multiproc.fork import git, tree, upstream

RELEASES = sorted(upstream.PINNED)


@pytest.fixture(scope="module", params=RELEASES)
def source(request):
    return upstream.find(None, request.param)


def test_every_patch_fits(source):
    report = tree.check(source.path)
    assert report.ok, "\n".join(report.reasons())
    assert report.version == source.version


def test_export_gives_the_built_tree_and_nothing_is_removed(source, tmp_path):
    built = tree.build(source, tmp_path / "fork")
    removed = [line for line in git.run("diff", "--numstat", built.base, built.head, cwd=built.path).splitlines() if line.split("\t")[1] != "0"]
    assert removed == []
    files = tree.export(source, tmp_path / "patches", author="A Maintainer <a@example.com>")
    assert len(files) == len(git.run("rev-list", f"{built.base}..{built.head}", cwd=built.path).splitlines())
    fresh = tmp_path / "fresh"
    git.run("clone", "--quiet", "--no-checkout", str(built.path), str(fresh))
    git.run("checkout", "--quiet", "--detach", built.base, cwd=fresh)
    git.run("-c", "user.name=a", "-c", "user.email=b", "am", "--quiet", "--keep-cr", *map(str, files), cwd=fresh)
    assert git.run("rev-parse", "HEAD^{tree}", cwd=fresh) == git.run("rev-parse", "HEAD^{tree}", cwd=built.path)


class Noise(ast.NodeTransformer):
    """Puts a foreign statement between all statements, as years of development would."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, name, [part for index, statement in enumerate(block) for part in ([self.noise(statement)] if index and not self.ends(block, index) else []) + [statement]])
        return node

    @staticmethod
    def noise(near: ast.stmt) -> ast.stmt:
        return ast.copy_location(ast.Expr(ast.Call(ast.Name("something_new", ast.Load()), [ast.Constant("later")], [])), near)

    @staticmethod
    def ends(block: list[ast.stmt], index: int) -> bool:
        # docstrings, __future__ and global lines stay where Python wants them
        return isinstance(block[index], (ast.Global, ast.Nonlocal)) or (isinstance(block[index], ast.ImportFrom) and block[index].module == "__future__")


def test_fits_a_release_that_nobody_has_seen(tmp_path):
    """Other line numbers, other neighbours, other formatting, no comments: the same hooks in the same statements."""
    newest = upstream.find(None, RELEASES[-1])
    report = tree.check(newest.path)
    future = tmp_path / "ComfyUI"
    for mark in ("main.py", "comfyui_version.py", "comfy/model_management.py", *report.plan.sources):
        (future / mark).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(newest.path / mark, future / mark)
    for name in report.plan.sources:
        rewritten = ast.unparse(ast.fix_missing_locations(Noise().visit(ast.parse((newest.path / name).read_bytes()))))
        (future / name).write_text(rewritten + "\n", "utf-8")
    (future / "comfyui_version.py").write_text('__version__ = "0.30.99"\n')     # of later ones some hook what 0.30.0 does not have
    later = tree.check(future)
    assert later.version == "0.30.99"
    assert later.ok, "\n".join(later.reasons())
    for now, then in zip(report.plan.results, later.plan.results, strict=True):
        if now.status == "ok" == then.status:
            assert hooked_statement(Path(newest.path, now.insert.anchor.file), now) == hooked_statement(future / then.insert.anchor.file, then)


def hooked_statement(path: Path, result) -> str:
    """The function around a hook and the simple statements of the file before it, noise left out; what must not depend on text or place."""
    tree_ = ast.parse(path.read_bytes())
    before = [ast.unparse(node) for node in ast.walk(tree_) if isinstance(node, (ast.Assign, ast.Return, ast.Expr)) and node.lineno < result.line and "something_new" not in ast.unparse(node)]
    return "\n".join(sorted(before))
