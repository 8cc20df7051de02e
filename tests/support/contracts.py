"""Signatures of other trainers that our hooks rely on, and a check of a newer checkout.

    python tests/support/contracts.py slime CHECKOUT          # what moved; exit 1 if anything did
    python tests/support/contracts.py slime CHECKOUT --write  # take it over, then read the changes

`contracts.json` has them with the commit they were read from. Nothing of the checkout is run or
imported: its files are parsed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

STORED = Path(__file__).with_name("contracts.json")


def load(trainer=None):
    """Return the contracts of one trainer, or of all."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    return stored if trainer is None else stored[trainer]


def value_of(trainer, name):
    """Return the stored value of one fact of a trainer."""
    return next(fact["value"] for fact in load(trainer)["facts"] if fact["name"] == name)


def read(checkout, fact):
    """Return a fact's value in a checkout, or None if its place is gone."""
    path = Path(checkout) / fact["file"]
    if not path.is_file():
        return None
    node = ast.parse(path.read_text(encoding="utf-8"))
    for name in filter(None, fact.get("in", "").split(".")):
        node = next((n for n in ast.walk(node) if getattr(n, "name", None) == name), None)
        if node is None:
            return None
    return READERS[fact["kind"]](node, fact.get("of"))


def _parameters(node, _):
    names = node.args.posonlyargs + node.args.args
    defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
    found = [_parameter(a, d) for a, d in zip(names, defaults, strict=True)]
    if node.args.vararg:
        found.append(f"*{node.args.vararg.arg}")
    elif node.args.kwonlyargs:
        found.append("*")
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    found += [_parameter(a, d) for a, d in pairs]
    if node.args.kwarg:
        found.append(f"**{node.args.kwarg.arg}")
    return found


def _parameter(argument, default):
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _calls(node, function):
    """Return the arguments of every call of a function, without repetitions."""
    calls = [c for c in ast.walk(node) if isinstance(c, ast.Call)]
    found = []
    for call in calls:
        if ast.unparse(call.func) == function:
            arguments = [ast.unparse(a) for a in call.args]
            arguments += [f"{k.arg}=" if k.arg else "**" for k in call.keywords]
            if arguments not in found:
                found.append(arguments)
    return found or None


def _keys(node, name):
    """Return the keys of the dict that is assigned to a name."""
    for assign in ast.walk(node):
        is_dict = isinstance(assign, ast.Assign) and isinstance(assign.value, ast.Dict)
        if is_dict and ast.unparse(assign.targets[0]) == name:
            return [ast.literal_eval(key) for key in assign.value.keys]
    return None


def _fields(node, _):
    return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]


def _constant(node, name):
    for assign in node.body:
        if isinstance(assign, ast.Assign) and ast.unparse(assign.targets[0]) == name:
            return ast.literal_eval(assign.value)
    return None


READERS = {
    "parameters": _parameters,
    "calls": _calls,
    "keys": _keys,
    "fields": _fields,
    "constant": _constant,
}


def compare(trainer, checkout):
    """Return one line for every fact of a checkout that is another than the stored one."""
    moved = []
    for fact in load(trainer)["facts"]:
        found = read(checkout, fact)
        if found != fact["value"]:
            place = f"{fact['file']}:{fact.get('in', '')}"
            moved.append(f"{fact['name']} ({place}): {fact['value']} -> {found}")
    return moved


def write(trainer, checkout):
    """Store the values of a checkout, and its commit."""
    stored = load()
    for fact in stored[trainer]["facts"]:
        fact["value"] = read(checkout, fact)
    if (Path(checkout) / ".git").exists():
        command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        stored[trainer]["commit"], stored[trainer]["date"] = said.stdout.split()
    STORED.write_text(as_text(stored), encoding="utf-8")


def as_text(stored):
    """Return the contracts as JSON with one fact a line."""
    trainers = []
    for trainer, contract in stored.items():
        facts = ",\n".join("   " + json.dumps(fact) for fact in contract["facts"])
        head = {name: value for name, value in contract.items() if name != "facts"}
        text = json.dumps(head)[:-1] + f', "facts": [\n{facts}\n  ]}}'
        trainers.append(f" {json.dumps(trainer)}: {text}")
    return "{\n" + ",\n".join(trainers) + "\n}\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        write(*sys.argv[1:3])
    moved = compare(*sys.argv[1:3])
    print("\n".join(moved) or "nothing moved")
    sys.exit(bool(moved))
