"""Where in an upstream file a hook goes, said in words and found on the syntax tree.

An anchor names a scope, a statement in it, and a side of that statement. It never looks at line numbers or at
neighbouring lines, and it must find exactly one place: none or several is an :class:`AnchorError` that shows the
nearest candidates.

    scope   qualified name of a function or class (``PromptServer.__init__.system_stats``); empty: the module
    where   start, end                the scope's own body (start: after docstring and global lines)
            decorate, decorate-inner  the line above the scope's decorators; directly above its ``def``
            before, after             the statement that `what` selects
            before-top, after-top     the statement of the scope's own body that contains it
            first, last               inside the body of what `what` selects
    what    import M | from M import N | assign NAME | call F | return [EXPR] | raise [EXPR] | def NAME | class NAME
            if TEXT | while TEXT | for TEXT | with TEXT    the head contains TEXT
            try F | finally F         the try statement whose body calls F; its finally block
            except TEXT               a handler whose type contains TEXT
            oom-handler               a handler that upstream enters on out of memory: it calls raise_non_oom
                                      (`first` is then after that call) or catches OOM_EXCEPTION
    within  a `what` that opens a block: only look inside its body
    pick    first | last, where several are meant

Statements inside nested functions and classes belong to those, not to the scope around them.
"""

import ast
import difflib
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Union

FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)
ScopeNode = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Selected = Union[ast.stmt, ast.ExceptHandler, "Finally"]

SIDES = ("start", "end", "decorate", "decorate-inner", "before", "after", "before-top", "after-top", "first", "last")
SCOPE_SIDES = ("start", "end", "decorate", "decorate-inner")
HEADS: dict[str, type | tuple[type, ...]] = {"if": ast.If, "while": ast.While, "for": (ast.For, ast.AsyncFor), "with": (ast.With, ast.AsyncWith)}
KINDS = ("import", "from", "assign", "call", "return", "raise", "def", "class", *HEADS, "try", "finally", "except", "oom-handler")
BLOCKS = (*HEADS, "try", "finally", "except", "oom-handler", "def", "class")


class AnchorError(Exception):
    """An anchor that finds no place or several; the message says so in the file's own terms."""


@dataclass(frozen=True)
class Anchor:
    """Where one hook goes; the fields are explained at the top of this module."""
    file: str
    where: str
    what: str = ""
    scope: str = ""
    within: str = ""
    pick: str = ""

    def __str__(self) -> str:
        words = [self.where, self.what and f"`{self.what}`", self.within and f"within `{self.within}`", self.pick and f"[{self.pick}]"]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, order=True)
class Place:
    """Before which line of a file to insert, and how deep.

    Places of one line sort as the file nests: what closes a deeper block comes first, then what stands before the
    next statement.
    """
    line: int           # index into the file's lines; the number of lines is the end of the file
    side: int           # 0: after the statement above, 1: before the statement below
    depth: int          # minus the indentation for side 0
    indent: bytes


@dataclass(frozen=True)
class Finally:
    """The finally block of a try statement, which has no node of its own."""
    body: list[ast.stmt]


class SourceFile:
    """One upstream file: its bytes, its lines and its syntax tree."""

    def __init__(self, name: str, data: bytes):
        self.name = name
        self.data = data
        self.lines = data.splitlines(keepends=True)
        self.newline = b"\r\n" if self.lines and self.lines[0].endswith(b"\r\n") else b"\n"
        try:
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError) as error:
            raise AnchorError(f"{name} is not Python that this interpreter can read: {error}") from error
        self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]

    @cached_property
    def scopes(self) -> dict[str, list[ast.AST]]:
        """Every function and class by its qualified name."""
        found: dict[str, list[ast.AST]] = {}

        def visit(node: ast.AST, prefix: str) -> None:
            for statement in own_statements(body_of(node)):
                if isinstance(statement, ScopeNode):
                    name = prefix + statement.name
                    found.setdefault(name, []).append(statement)
                    visit(statement, name + ".")

        visit(self.tree, "")
        return found

    def indent_of(self, line: int) -> bytes:
        text = self.lines[line]
        return text[:len(text) - len(text.lstrip(b" \t\f"))]

    def utf8(self, line: int) -> bytes:
        """A line as the syntax tree counts its columns: in UTF-8, without a byte order mark."""
        return self.lines[line].decode(self.encoding, "replace").encode()

    def text(self, line: int) -> str:
        return self.lines[line].decode(self.encoding, "replace").strip()


def resolve(source: SourceFile, anchor: Anchor) -> Place:
    """The one place that `anchor` means in `source`. Raises AnchorError."""
    check(anchor)
    scope = find_scope(source, anchor.scope)
    if anchor.where in SCOPE_SIDES:
        return scope_place(source, scope, anchor.where)
    statements = list(own_statements(body_of(scope)))
    if anchor.within:
        block = one(source, anchor, select(statements, anchor.within), statements, anchor.within, "")
        statements = list(own_statements(body_of(block)))
    chosen: list[Selected] = select(statements, anchor.what)
    if anchor.where in ("before-top", "after-top"):
        # several assignments inside one if/else are one place here
        chosen = [top for top in body_of(scope) if any(is_inside(node, top) for node in chosen)]
    chosen = [node for node in chosen if not (anchor.where.startswith(("before", "after")) and is_elif(source, node))]
    node = one(source, anchor, chosen, statements, anchor.what, anchor.pick)
    if anchor.where in ("first", "last"):
        return block_place(source, anchor, node)
    if not isinstance(node, ast.stmt):
        raise AnchorError(f"`{anchor.what}` is a block, not a statement: use where = \"first\" or \"last\"")
    return before(source, node) if anchor.where.startswith("before") else after(source, node)


def check(anchor: Anchor) -> None:
    """Raises AnchorError for an anchor that could never resolve."""
    if anchor.where not in SIDES:
        raise AnchorError(f"where = \"{anchor.where}\" is none of {', '.join(SIDES)}")
    if anchor.pick not in ("", "first", "last"):
        raise AnchorError(f"pick = \"{anchor.pick}\" is neither first nor last")
    if anchor.where in SCOPE_SIDES:
        if anchor.what or anchor.within or anchor.pick:
            raise AnchorError(f"where = \"{anchor.where}\" is about the scope itself and takes no what, within or pick")
        if not anchor.scope and anchor.where.startswith("decorate"):
            raise AnchorError("a module cannot be decorated: name a scope")
        return
    for key, value in (("what", anchor.what), ("within", anchor.within)):
        kind, argument = split(value)
        if value and kind not in KINDS:
            raise AnchorError(f"{key} = \"{value}\" begins with none of {', '.join(KINDS)}")
        if value and not argument and kind not in ("return", "raise", "oom-handler"):
            raise AnchorError(f"{key} = \"{value}\" lacks its argument")
    if not anchor.what:
        raise AnchorError(f"where = \"{anchor.where}\" needs a what")
    if anchor.within and split(anchor.within)[0] not in BLOCKS:
        raise AnchorError(f"within = \"{anchor.within}\" opens no block")
    if anchor.where in ("first", "last") and split(anchor.what)[0] not in BLOCKS:
        raise AnchorError(f"what = \"{anchor.what}\" opens no block: where = \"{anchor.where}\" needs one")


def find_scope(source: SourceFile, name: str) -> ast.AST:
    if not name:
        return source.tree
    nodes = source.scopes.get(name, [])
    if len(nodes) == 1:
        return nodes[0]
    if nodes:
        raise AnchorError(f"{len(nodes)} functions or classes are called {name}: {listing(source, nodes)}")
    last = name.rpartition(".")[2]
    near = [known for known in source.scopes if known.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, source.scopes, n=3)
    raise AnchorError(f"no function or class {name}" + (f"; nearest: {', '.join(near)}" if near else ""))


def one(source: SourceFile, anchor: Anchor, chosen: list, statements: list[ast.stmt], what: str, pick: str) -> Selected:
    """The only node of `chosen`, or the one that `pick` means."""
    if chosen and (pick or len(chosen) == 1):
        return chosen[-1 if pick == "last" else 0]
    place = anchor.scope or "the module"
    if chosen:
        raise AnchorError(f"`{what}` matches {len(chosen)} times in {place}: {listing(source, chosen)}")
    near = nearest(source, statements, what)
    raise AnchorError(f"`{what}` matches nothing in {place}" + (f"; nearest: {listing(source, near)}" if near else ""))


def listing(source: SourceFile, nodes: list) -> str:
    lines = [node.body[0].lineno if isinstance(node, Finally) else node.lineno for node in nodes]
    return ", ".join(f"line {line}: {source.text(line - 1)}" for line in lines[:4]) + (", ..." if len(lines) > 4 else "")


def nearest(source: SourceFile, statements: list[ast.stmt], what: str) -> list[ast.stmt]:
    """Statements of the same kind, the most alike first; for the message only."""
    kind, argument = split(what)
    shapes: dict[str, type | tuple[type, ...]] = {
        "import": ast.Import, "from": ast.ImportFrom, "assign": (ast.Assign, ast.AnnAssign), "return": ast.Return, "raise": ast.Raise,
        "def": FunctionNode, "class": ast.ClassDef, "try": ast.Try, "finally": ast.Try, "except": ast.Try, "oom-handler": ast.Try, **HEADS,
    }
    alike = [node for node in statements if isinstance(node, shapes.get(kind, ast.stmt))]
    scored = [(difflib.SequenceMatcher(None, argument, source.text(node.lineno - 1)).ratio(), node) for node in alike]
    return [node for score, node in sorted(scored, key=lambda pair: -pair[0])[:3] if score > 0.3]


def own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of `body` in order, those of nested blocks included, those of nested functions and classes not."""
    for statement in body:
        yield statement
        if isinstance(statement, ScopeNode):
            continue
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            for part in getattr(statement, name, []):
                if isinstance(part, ast.stmt):
                    yield from own_statements([part])
                else:
                    yield from own_statements(part.body)


def body_of(node) -> list[ast.stmt]:
    return node.body


def is_inside(node: Selected, top: ast.stmt) -> bool:
    return any(child is node for child in ast.walk(top))


def is_elif(source: SourceFile, node: Selected) -> bool:
    return isinstance(node, ast.If) and source.lines[node.lineno - 1].lstrip().startswith(b"elif")


def split(what: str) -> tuple[str, str]:
    kind, _, argument = what.strip().partition(" ")
    return kind, argument.strip()


def normal(text: str) -> str:
    """`text` as ast.unparse would write it, so that quotes and spacing do not matter; fragments stay as they are."""
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except SyntaxError:
        return text


def select(statements: list[ast.stmt], what: str) -> list[Selected]:
    """The statements, handlers and finally blocks that `what` means."""
    kind, argument = split(what)
    tries = [node for node in statements if isinstance(node, ast.Try)]
    if kind == "try":
        return [node for node in tries if calls(node.body, argument)]
    if kind == "finally":
        return [Finally(node.finalbody) for node in tries if node.finalbody and calls(node.body, argument)]
    if kind in ("except", "oom-handler"):
        handlers = [handler for node in tries for handler in node.handlers]
        if kind == "oom-handler":
            return [handler for handler in handlers if oom_call(handler) or "OOM_EXCEPTION" in head(handler)]
        return [handler for handler in handlers if normal(argument) in head(handler)]
    return [node for node in statements if matches(node, kind, argument)]


def matches(node: ast.stmt, kind: str, argument: str) -> bool:
    if kind in ("import", "from"):
        return f"{kind} {argument}" in imports(node)
    if kind == "assign":
        return normal(argument) in targets(node)
    if kind == "call":
        return is_simple(node) and calls([node], argument)
    if kind == "return":
        return isinstance(node, ast.Return) and (not argument or (node.value is not None and ast.unparse(node.value) == normal(argument)))
    if kind == "raise":
        return isinstance(node, ast.Raise) and (not argument or (node.exc is not None and ast.unparse(node.exc) == normal(argument)))
    if kind in ("def", "class"):
        return isinstance(node, ast.ClassDef if kind == "class" else FunctionNode) and node.name == argument
    return isinstance(node, HEADS[kind]) and normal(argument) in head(node)


def head(node: ast.AST) -> str:
    """What a block's first line says between its keyword and its colon."""
    if isinstance(node, (ast.If, ast.While)):
        return ast.unparse(node.test)
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return ", ".join(ast.unparse(item) for item in node.items)
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        return ast.unparse(node.type)
    return ""


def imports(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        prefix, names = "import ", node.names
    elif isinstance(node, ast.ImportFrom):
        prefix, names = f"from {'.' * node.level}{node.module or ''} import ", node.names
    else:
        return []
    return [prefix + name.name + (f" as {name.asname}" if name.asname else "") for name in names]


def targets(node: ast.stmt) -> list[str]:
    """The names that a statement assigns; a tuple's elements and the whole tuple."""
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        found = [node.target]
    else:
        return []
    parts = [part for target in found if isinstance(target, (ast.Tuple, ast.List)) for part in target.elts]
    return [ast.unparse(target) for target in [*found, *parts]]


def is_simple(node: ast.stmt) -> bool:
    return not hasattr(node, "body") and not isinstance(node, ast.Match)


def calls(body: list[ast.stmt], function: str) -> bool:
    """Whether a simple statement of `body` calls `function`; with a parenthesis, whether a call's text begins so."""
    for statement in own_statements(body):
        if not is_simple(statement):
            continue
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            if ast.unparse(call).startswith(function) if "(" in function else ast.unparse(call.func) == function:
                return True
    return False


def oom_call(handler: ast.ExceptHandler) -> ast.stmt | None:
    """The statement of a handler that passes on what is no out-of-memory error."""
    for statement in handler.body:
        if is_simple(statement) and any(calls([statement], name) for name in ("raise_non_oom", "model_management.raise_non_oom", "comfy.model_management.raise_non_oom")):
            return statement
    return None


def before(source: SourceFile, node: ast.stmt) -> Place:
    line = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    indent = source.indent_of(line)
    if source.utf8(node.lineno - 1)[:node.col_offset].strip():
        raise AnchorError(f"the statement shares line {line + 1} with another: {source.text(line)}")
    return Place(line=line, side=1, depth=len(indent), indent=indent)


def after(source: SourceFile, node: ast.stmt) -> Place:
    assert node.end_lineno is not None and node.end_col_offset is not None
    rest = source.utf8(node.end_lineno - 1)[node.end_col_offset:].strip()
    if rest and not rest.startswith(b"#"):
        raise AnchorError(f"the statement shares line {node.end_lineno} with another: {source.text(node.end_lineno - 1)}")
    if isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        raise AnchorError(f"nothing runs after line {node.end_lineno}: {source.text(node.end_lineno - 1)}")
    indent = before(source, node).indent
    return Place(line=node.end_lineno, side=0, depth=-len(indent), indent=indent)


def scope_place(source: SourceFile, scope: ast.AST, where: str) -> Place:
    if where == "decorate":
        assert isinstance(scope, ast.stmt)
        return before(source, scope)
    if where == "decorate-inner":
        assert isinstance(scope, ScopeNode)
        indent = source.indent_of(scope.lineno - 1)
        return Place(line=scope.lineno - 1, side=1, depth=len(indent), indent=indent)
    body = body_of(scope)
    if not body:
        return Place(line=0, side=1, depth=0, indent=b"")
    if where == "end":
        return after(source, body[-1])
    for node in body:
        is_docstring = node is body[0] and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (is_docstring or is_future or isinstance(node, (ast.Global, ast.Nonlocal))):
            return before(source, node)
    return after(source, body[-1])


def block_place(source: SourceFile, anchor: Anchor, node: Selected) -> Place:
    body = body_of(node)
    if not isinstance(node, Finally) and body[0].lineno == node.lineno:
        raise AnchorError(f"the block shares line {node.lineno} with its head: {source.text(node.lineno - 1)}")
    if anchor.where == "last":
        return after(source, body[-1])
    if isinstance(node, ast.ExceptHandler) and split(anchor.what)[0] == "oom-handler":
        check_statement = oom_call(node)
        if check_statement is not None:
            return after(source, check_statement)
    return before(source, body[0])
