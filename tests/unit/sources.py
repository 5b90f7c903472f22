"""What the project's own files import, from their syntax trees."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imports(path: Path, *, data: bytes | None = None, top_level_only: bool = False, type_checking: bool = False) -> set[str]:
    """Absolute names of what a module imports, with `data` for its content; what is in type-checking blocks only with `type_checking`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if not type_checking and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if top_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = ".".join((*package[:len(package) - child.level + 1], *(child.module or "").split("."))).rstrip(".") if child.level else child.module or ""
                found.update(f"{base}.{alias.name}" for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_bytes() if data is None else data))
    return found
