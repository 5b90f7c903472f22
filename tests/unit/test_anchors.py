"""Every kind of anchor: a source before and after, one where it finds nothing, one where it finds two."""

import textwrap
from dataclasses import dataclass

import pytest

from comfy_multiproc.fork.anchors import Anchor, AnchorError, SourceFile, resolve
from comfy_multiproc.fork.plan import Hook, render, without


@dataclass(frozen=True)
class Case:
    name: str
    anchor: dict
    after: str       # with HOOK lines; without them it is the source before
    nothing: str     # a source in which the anchor finds no place
    twice: str       # a source in which it finds two

    @property
    def before(self) -> str:
        return "".join(line for line in text(self.after).splitlines(keepends=True) if line.strip() != "HOOK()")


def text(source: str) -> str:
    return textwrap.dedent(source).lstrip("\n")


def insert(source: str | bytes, code: str = "HOOK()", **anchor: str) -> bytes:
    file = SourceFile("file.py", source if isinstance(source, bytes) else source.encode())
    place = resolve(file, Anchor(file="file.py", **anchor))
    lines = tuple(place.indent + line.encode() + file.newline for line in code.split("\n"))
    hook = Hook(place, 0, lines)
    data = render(file, [hook])
    assert without(data, [hook], file.newline, not file.data.endswith((b"\n", b"\r")) and place.line == len(file.lines)) == file.data
    return data


CASES = [
    Case("start", {"where": "start", "scope": "f"}, """
        def f():
            "About f."
            global a
            HOOK()
            a = 1
        """, "def g(): pass\n", "def f():\n    a\ndef f():\n    b\n"),
    Case("end", {"where": "end", "scope": "f"}, """
        def f():
            if a:
                b()
            HOOK()

        c = 1
        """, "def g(): pass\n", "def f():\n    a\ndef f():\n    b\n"),
    Case("decorate", {"where": "decorate", "scope": "C.f"}, """
        class C:
            HOOK()
            @property
            def f(self):
                return 1
        """, "class C:\n    pass\n", "class C:\n    def f(s): pass\n    def f(s): pass\n"),
    Case("decorate-inner", {"where": "decorate-inner", "scope": "C.f"}, """
        class C:
            @property
            HOOK()
            async def f(self):
                return 1
        """, "class C:\n    pass\n", "class C:\n    def f(s): pass\n    def f(s): pass\n"),
    Case("import", {"where": "after", "what": "import a.b"}, """
        import a
        import a.b
        HOOK()
        import a.b as c
        """, "import a.b as c\n", "import a.b\nimport a.b\n"),
    Case("from import", {"where": "after", "what": "from a import b"}, """
        from a import c, b
        HOOK()
        from a import b as d
        """, "from a import b as d\n", "from a import b\nfrom a import b\n"),
    Case("assign", {"where": "after", "what": "assign x", "scope": "f"}, """
        def f():
            (x, y) = g(1,
                       2)
            HOOK()
            x += 1
            x == 2
            def inner():
                x = 3
        """, "def f():\n    y = x\n", "def f():\n    x = 1\n    if a:\n        x = 2\n"),
    Case("assign attribute", {"where": "before", "what": "assign self.backup[key]", "scope": "C.f"}, """
        class C:
            def f(self):
                for key in self.keys:
                    HOOK()
                    self.backup[key] = 1
        """, "class C:\n    def f(self):\n        self.backup = 1\n", "class C:\n    def f(self):\n        self.backup[key] = 1\n        self.backup[key] = 2\n"),
    Case("assign typed", {"where": "before", "what": "assign x"}, """
        HOOK()
        x: int = 1
        y: int
        """, "x: int\n", "x: int = 1\nx = 2\n"),
    Case("after-top", {"where": "after-top", "what": "assign x", "scope": "f"}, """
        def f():
            if a:
                x = 1
            else:
                x = 2
            HOOK()
            return x
        """, "def f():\n    return x\n", "def f():\n    x = 1\n    x = 2\n"),
    Case("before-top", {"where": "before-top", "what": "call g", "scope": "f"}, """
        def f():
            HOOK()
            for i in a:
                if i:
                    g(i)
        """, "def f():\n    h()\n", "def f():\n    g()\n    g()\n"),
    Case("call", {"where": "after", "what": "call a.insert", "scope": "f"}, """
        def f():
            if x:
                y = h(a.insert(0, x))  # why
                HOOK()
            b.insert(0, x)
        """, "def f():\n    if a.insert(0): pass\n", "def f():\n    a.insert(0)\n    a.insert(1)\n"),
    Case("call with text", {"where": "before", "what": "call Thread(target=work"}, """
        HOOK()
        Thread(target=work, daemon=True).start()
        Thread(target=other).start()
        """, "Thread(target=other)\n", "Thread(target=work)\nThread(target=work, daemon=True)\n"),
    Case("return", {"where": "before", "what": "return", "scope": "f"}, """
        def f():
            def g():
                return 2
            HOOK()
            return g
        """, "def f():\n    pass\n", "def f():\n    if a:\n        return 1\n    return 2\n"),
    Case("return expression", {"where": "before", "what": "return 'a'", "scope": "f"}, """
        def f():
            if b:
                HOOK()
                return "a"
            return "b"
        """, "def f():\n    return 'b'\n", "def f():\n    if b:\n        return 'a'\n    return 'a'\n"),
    Case("raise", {"where": "before", "what": "raise", "scope": "f"}, """
        def f():
            HOOK()
            raise ValueError(1)
        """, "def f():\n    pass\n", "def f():\n    if a:\n        raise A\n    raise B\n"),
    Case("def", {"where": "before", "what": "def g"}, """
        a = 1
        HOOK()
        @wraps(f)
        def g():
            pass
        """, "g = 1\n", "def g(): pass\ndef g(): pass\n"),
    Case("class", {"where": "after", "what": "class C"}, """
        class C:
            pass
        HOOK()
        b = 1
        """, "def C(): pass\n", "class C: pass\nclass C: pass\n"),
    Case("if before", {"where": "before", "what": "if x is not None", "scope": "f"}, """
        def f():
            HOOK()
            if x is not None and y:
                pass
        """, "def f():\n    if x is None: pass\n", "def f():\n    if x is not None: pass\n    if x is not None: pass\n"),
    Case("if after its else", {"where": "after", "what": "if x", "scope": "f"}, """
        def f():
            if x:
                pass
            else:
                y = 1
            HOOK()
            z = 2
        """, "def f():\n    while x: pass\n", "def f():\n    if x: pass\n    if x: pass\n"),
    Case("if first", {"where": "first", "what": "if is_oom(ex)", "scope": "f"}, """
        def f():
            if is_oom(ex):
                HOOK()
                a = 1
        """, "def f():\n    if oom: pass\n", "def f():\n    if is_oom(ex):\n        a\n    if is_oom(ex):\n        b\n"),
    Case("elif first", {"where": "first", "what": "if y", "scope": "f"}, """
        def f():
            if x:
                pass
            elif y:
                HOOK()
                a = 1
        """, "def f():\n    if x:\n        pass\n", "def f():\n    if y:\n        a\n    elif not y:\n        b\n"),
    Case("while", {"where": "first", "what": "while True", "scope": "f"}, """
        def f():
            while True:
                HOOK()
                a = 1
        """, "def f():\n    while a: pass\n", "def f():\n    while True:\n        a\n    while True:\n        b\n"),
    Case("for", {"where": "before", "what": "for range(len(models)", "scope": "f"}, """
        def f():
            HOOK()
            for i in range(len(models) - 1, -1, -1):
                pass
        """, "def f():\n    for i in models: pass\n", "def f():\n    for i in range(len(models)): pass\n    for j in range(len(models)): pass\n"),
    Case("for last", {"where": "last", "what": "for x in y", "scope": "f"}, """
        def f():
            for x in y:
                if x:
                    pass
                HOOK()
            return 1
        """, "def f():\n    for z in y: pass\n", "def f():\n    for x in y:\n        a\n    for x in y:\n        b\n"),
    Case("async for, async with", {"where": "first", "what": "with lock", "scope": "f"}, """
        async def f():
            async for x in y:
                async with a, lock as l:
                    HOOK()
                    b = 1
        """, "def f():\n    with a: pass\n", "def f():\n    with lock:\n        a\n    with lock:\n        b\n"),
    Case("with after", {"where": "after", "what": "with torch.cuda.graph(", "scope": "f"}, """
        def f():
            with torch.cuda.graph(g, stream=s):
                core()
            HOOK()
            done()
        """, "def f():\n    with a: pass\n", "def f():\n    with torch.cuda.graph(a): pass\n    with torch.cuda.graph(b): pass\n"),
    Case("try", {"where": "before", "what": "try g", "scope": "f"}, """
        def f():
            HOOK()
            try:
                if a:
                    g()
            except A:
                h()
        """, "def f():\n    try:\n        h()\n    except A:\n        g()\n", "def f():\n    try:\n        g()\n    finally:\n        a\n    try:\n        g()\n    finally:\n        b\n"),
    Case("finally first", {"where": "first", "what": "finally g", "scope": "f"}, """
        def f():
            try:
                a = g()
            finally:
                HOOK()
                h()
        """, "def f():\n    try:\n        g()\n    except A:\n        pass\n", "def f():\n    try:\n        g()\n    finally:\n        a\n    try:\n        g()\n    finally:\n        b\n"),
    Case("finally last", {"where": "last", "what": "finally g", "scope": "f"}, """
        def f():
            try:
                g()
            finally:
                h()
                HOOK()
        """, "def f():\n    try:\n        h()\n    finally:\n        g()\n", "def f():\n    try:\n        g()\n    finally:\n        a\n    try:\n        g()\n    finally:\n        b\n"),
    Case("except", {"where": "first", "what": "except OutOfMemory", "scope": "f"}, """
        def f():
            try:
                g()
            except (KeyError, torch.OutOfMemoryError) as e:
                HOOK()
                h()
            except ValueError:
                pass
        """, "def f():\n    try:\n        g()\n    except A:\n        pass\n", "def f():\n    try:\n        g()\n    except OutOfMemory:\n        a\n    except (B, OutOfMemory):\n        b\n"),
    Case("oom-handler, new", {"where": "first", "what": "oom-handler", "scope": "f"}, """
        def f():
            try:
                g()
            except Exception as e:
                model_management.raise_non_oom(e)
                HOOK()
                steps *= 2
        """, "def f():\n    try:\n        g()\n    except Exception:\n        pass\n", "def f():\n    try:\n        g()\n    except OOM_EXCEPTION:\n        a\n    try:\n        g()\n    except OOM_EXCEPTION:\n        b\n"),
    Case("oom-handler, old", {"where": "first", "what": "oom-handler", "scope": "f"}, """
        def f():
            try:
                g()
            except model_management.OOM_EXCEPTION as e:
                HOOK()
                steps *= 2
        """, "def f():\n    g()\n", "def f():\n    try:\n        g()\n    except OOM_EXCEPTION:\n        a\n    except (A, OOM_EXCEPTION):\n        b\n"),
    Case("within", {"where": "after", "what": "call soft_empty_cache", "within": "oom-handler", "scope": "f"}, """
        def f():
            soft_empty_cache()
            try:
                g()
            except OOM_EXCEPTION:
                soft_empty_cache()
                HOOK()
        """, "def f():\n    soft_empty_cache()\n    try:\n        g()\n    except OOM_EXCEPTION:\n        pass\n",
         "def f():\n    try:\n        g()\n    except OOM_EXCEPTION:\n        soft_empty_cache()\n        soft_empty_cache()\n"),
    Case("nested scope", {"where": "before", "what": "return", "scope": "Server.__init__.post_free"}, """
        class Server:
            def __init__(self):
                @routes.post("/free")
                async def post_free(request):
                    HOOK()
                    return 1
                return
        """, "class Server:\n    def __init__(self):\n        return\n", "class Server:\n    def __init__(self):\n        def post_free(): return\n        def post_free(): return\n"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inserts_at_its_place(case):
    assert insert(case.before, **case.anchor).decode() == text(case.after)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_finds_nothing(case):
    with pytest.raises(AnchorError, match="matches nothing|no function or class"):
        insert(case.nothing, **case.anchor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_ambiguous(case):
    with pytest.raises(AnchorError, match="matches 2 times|2 functions or classes are called"):
        insert(case.twice, **case.anchor)


@pytest.mark.parametrize(("pick", "line"), [("first", 2), ("last", 4)])
def test_picks_one_of_several(pick, line):
    data = insert("a = 1\nx = 1\nb = 2\nx = 2\n", where="before", what="assign x", pick=pick)
    assert data.split(b"\n")[line - 1 if pick == "first" else line - 1] == b"HOOK()"


def test_shows_the_nearest_candidates():
    with pytest.raises(AnchorError, match=r"nearest: line 2: can_unload_sortd = sorted\(can_unload\)"):
        insert("def f():\n    can_unload_sortd = sorted(can_unload)\n", where="after", what="assign can_unload_sorted", scope="f")
    with pytest.raises(AnchorError, match="nearest: LoadedModel.model_unload"):
        insert("class LoadedModel:\n    def model_unload(self): pass\n", where="start", scope="LoadModel.model_unload")
    with pytest.raises(AnchorError, match="line 1: x = 1, line 2: x = 2"):
        insert("x = 1\nx = 2\n", where="after", what="assign x")


@pytest.mark.parametrize(("source", "anchor", "message"), [
    ("a = 1; x = 2\n", {"where": "before", "what": "assign x"}, "shares line 1"),
    ("x = 2; a = 1\n", {"where": "after", "what": "assign x"}, "shares line 1"),
    ("if x: a = 1\n", {"where": "first", "what": "if x"}, "shares line 1 with its head"),
    ("def f():\n    return 1\n", {"where": "end", "scope": "f"}, "nothing runs after line 2"),
    ("def f():\n    return 1\n", {"where": "after", "what": "return", "scope": "f"}, "nothing runs after line 2"),
    ("if x:\n    pass\nelif y:\n    pass\n", {"where": "before", "what": "if y"}, "matches nothing"),
    ("def f(:\n", {"where": "start"}, "is not Python that this interpreter can read"),
])
def test_refuses_a_place_where_a_line_cannot_go(source, anchor, message):
    with pytest.raises(AnchorError, match=message):
        insert(source, **anchor)


@pytest.mark.parametrize(("anchor", "message"), [
    ({"where": "beside", "what": "assign x"}, "is none of"),
    ({"where": "before"}, "needs a what"),
    ({"where": "start", "what": "assign x"}, "takes no what"),
    ({"where": "decorate"}, "a module cannot be decorated"),
    ({"where": "before", "what": "asign x"}, "begins with none of"),
    ({"where": "before", "what": "call"}, "lacks its argument"),
    ({"where": "first", "what": "assign x"}, "opens no block"),
    ({"where": "before", "what": "assign x", "within": "assign y"}, "opens no block"),
    ({"where": "before", "what": "assign x", "pick": "second"}, "neither first nor last"),
    ({"where": "before", "what": "except A"}, "is a block, not a statement"),
])
def test_refuses_an_anchor_that_makes_no_sense(anchor, message):
    with pytest.raises(AnchorError, match=message):
        insert("try:\n    x = 1\nexcept A:\n    pass\n", **anchor)


@pytest.mark.parametrize("source", [
    pytest.param(b"x = 1\r\ny = 2\r\n", id="crlf"),
    pytest.param(b"y = 2\nx = 1", id="no newline at the end"),
    pytest.param(b"\xef\xbb\xbf# caf\xc3\xa9\nx = 1\n", id="byte order mark"),
    pytest.param(b"\xef\xbb\xbfx = 1\ny = 2\n", id="byte order mark before the statement"),
    pytest.param(b"# -*- coding: latin-1 -*-\nx = '\xe9\xe9'\ny = 2\n", id="latin-1 in the statement"),
    pytest.param(b"# -*- coding: latin-1 -*-\n# caf\xe9\nx = 1\n", id="latin-1"),
    pytest.param(b"a = '''\nx = 2\n'''\nx = 1\n", id="multi-line string"),
    pytest.param(b"if a:\n\tx = 1\n", id="tabs"),
    pytest.param(b"x = \\\n  1\n\x0c\ny = 2\n", id="continued line and form feed"),
])
def test_keeps_the_bytes_of_the_file(source):
    data = insert(source, where="after", what="assign x")
    compile(data, "file.py", "exec")
    lines = data.splitlines(keepends=True)
    hook = next(index for index, line in enumerate(lines) if line.strip() == b"HOOK()")
    assert b"HOOK()\r\n" in data or b"\r" not in data
    rest = b"".join(lines[:hook] + lines[hook + 1:])
    assert rest in (source, source + b"\n")


def test_depth_decides_the_order_on_one_line():
    """After the inner statement, after the outer one, before the next: three hooks at one line of the file."""
    source = SourceFile("file.py", b"if a:\n    x = 1\ny = 2\n")
    anchors = [Anchor("file.py", "before", "assign y"), Anchor("file.py", "after", "if a"), Anchor("file.py", "after", "assign x")]
    places = [resolve(source, anchor) for anchor in anchors]
    hooks = [Hook(place, 0, (place.indent + name + b"\n",)) for place, name in zip(places, (b"before_y()", b"after_if()", b"after_x()"), strict=True)]
    assert render(source, hooks) == b"if a:\n    x = 1\n    after_x()\nafter_if()\nbefore_y()\ny = 2\n"
