"""The claims of docs/security.md on the source: no call executes the content of a file or a network
message, no port is open to all, and no text reaches a terminal past `onepolicy.console`."""

import ast

import pytest

from support.paths import ROOT
from support.sources import nodes_of

PACKAGE = ROOT / "src" / "onepolicy"
FILES = sorted(PACKAGE.rglob("*.py"))

UNPICKLE = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jsonpickle"}
"""Modules whose readers build whatever objects the bytes name."""
CALLS = {
    "pickle.load": "",
    "pickle.loads": "",
    "pickle.Unpickler": "",
    "pandas.read_pickle": "",
    "os.system": "",
    "os.popen": "",
    "tempfile.mktemp": "",
    "eval": "",
    "exec": "",
    "__import__": "",
    # pickles between ranks
    "all_gather_object": "",
    "gather_object": "",
    "scatter_object_list": "",
    "broadcast_object_list": "",
    "send_object_list": "",
    "recv_object_list": "",
    # only so:
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
}


TO_A_TERMINAL = {
    "rich.print",
    "rich.console.Console",
    "rich.markup",
    "rich.progress.TextColumn",
    "rich.progress.track",
    "rich.prompt",
    "rich.status",
}
"""What onepolicy/console.py has in a form that takes plain text."""


def name_of(function: ast.expr) -> str:
    """Return `a.b.c` of an expression that is such a name."""
    match function:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{name_of(value)}.{attr}"
    return "?"


def nodes_in(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def literal(call: ast.Call, name: str) -> object:
    given = [k.value for k in call.keywords if k.arg == name]
    return given[0].value if given and isinstance(given[0], ast.Constant) else None


def faults(nodes: list[ast.AST]) -> list[str]:
    found = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            found += [f"imports {name}" for name in names if name.split(".")[0] in UNPICKLE]
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                found += [
                    f"imports pickle.{alias.name}"
                    for alias in node.names
                    if f"pickle.{alias.name}" in CALLS
                ]
        if isinstance(node, ast.List | ast.Tuple):
            words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
            if "-m" in words and "-P" not in words[: words.index("-m")]:
                found.append("starts Python without -P, on modules of the working folder too")
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        last = name.rpartition(".")[2]
        for forbidden, only in CALLS.items():
            if forbidden not in (
                name,
                last if "." not in forbidden and forbidden not in ("eval", "exec") else None,
            ):
                continue
            argument, _, value = only.partition("=")
            if not only or str(literal(node, argument)) != value:
                found.append(f"calls {name}" + (f" without {only}" if only else ""))
        if literal(node, "shell") is True:
            found.append(f"calls {name} with a shell")
        if literal(node, "trust_remote_code") is True:
            found.append(f"calls {name} with trust_remote_code=True")
        own_socket = "master_listen_fd" in {
            keyword.arg for keyword in node.keywords
        }  # torch's listens everywhere
        if last == "TCPStore" and literal(node, "is_master") is not False and not own_socket:
            found.append(f"calls {name} without a socket of ours")
        if last in ("create_server", "bind") and any(
            isinstance(part, ast.Constant) and part.value in ("", "0.0.0.0", "::")
            for part in ast.walk(node)
        ):
            found.append(f"calls {name} for every address")
    return found


def raw_output(nodes: list[ast.AST]) -> list[str]:
    """Return what writes to a terminal without onepolicy/console.py."""
    found = []
    for node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            if called in ("print", "Progress") or called.endswith((".from_markup", ".from_ansi")):
                found.append(f"calls {called}")
        found += [f"imports {name}" for name in names if name in TO_A_TERMINAL]
    return found


def test_text_reaches_a_terminal_in_one_way():
    others = [path for path in FILES if path != PACKAGE / "console.py"]
    found = {path: raw_output(nodes_of(path)) for path in others}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "source",
    [
        "print(path)",
        "from rich.console import Console",
        "from rich.progress import TextColumn",
        "bars = Progress()",
        "from rich import print",
        "import rich.markup",
        "Text.from_markup(title)",
    ],
)
def test_the_walk_sees_what_is_printed_raw(source):
    assert raw_output(nodes_in(source))


OTHER_CLIENTS = {"http.client", "urllib.request", "requests", "httpx", "aiohttp", "urllib3"}


def http_reads(nodes: list[ast.AST]) -> list[str]:
    """Return the methods of an HTTP client that a module of httpx2 calls, and other clients."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    found = sorted(modules & OTHER_CLIENTS)
    if "httpx2" in modules:
        calls = [name_of(node.func) for node in nodes if isinstance(node, ast.Call)]
        asked = ("httpx2.", "client.", "self._client.")
        found += [
            each for each in calls if each.startswith(asked) and each.rpartition(".")[2].islower()
        ]
    return found


def test_replies_are_read_in_one_place_with_a_bound():
    """httpx2's `get`, `post` and `aread` keep whatever a server sends."""
    read = {path.name: http_reads(nodes_of(path)) for path in FILES}
    assert {name: calls for name, calls in read.items() if calls} == {
        "client.py": ["client.stream"]
    }


@pytest.mark.parametrize(
    "source",
    ["import httpx2\nclient.get(url)", "import httpx2\nhttpx2.post(url)", "import requests"],
)
def test_the_walk_sees_another_read(source):
    assert http_reads(nodes_in(source))


def test_the_source_makes_no_forbidden_call():
    found = {path: faults(nodes_of(path)) for path in FILES}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(data)",
        "run([sys.executable, '-m', 'onepolicy', *words])",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "import yaml",
        "from cloudpickle import loads",
        "dist.broadcast_object_list(x)",
        "eval(text)",
        "exec(compile(text, 'a', 'exec'))",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "dist.TCPStore('localhost', 0, None, True)",
        "socket.create_server(('', 0))",
        "probe.bind(('0.0.0.0', 80))",
    ],
)
def test_the_walk_sees_it(source):
    assert faults(nodes_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "from pickle import UnpicklingError",
        "dist.TCPStore(host, port, is_master=True, master_listen_fd=fd)",
        "socket.create_server(('127.0.0.1', 0))",
    ],
)
def test_the_walk_lets_the_rest_through(source):
    assert faults(nodes_in(source)) == []
