"""Python as an ordinary user, from tests that run as root."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onepolicy

USER = "12345"
PACKAGES = Path(onepolicy.__file__).parents[1]

# The interpreter and its packages may lie in a folder that is closed to others, as /root is. In a
# mount namespace of its own such a folder is replaced by one that is open and holds nothing else.
LAY_OPEN = """
import json, os, subprocess, sys
from pathlib import Path

def mount(*arguments): subprocess.run(["mount", *map(str, arguments)], check=True)

needed, spare, command = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
closed = {}
for path in map(Path, needed):
    for folder in reversed([path, *path.parents]):
        if not folder.stat().st_mode & 1:
            closed.setdefault(folder, set()).add(path)
            break
for folder, paths in closed.items():
    kept = {path: spare / str(number) for number, path in enumerate(sorted(paths))}
    mount("-t", "tmpfs", "-o", "mode=755", "spare", spare)
    for path, place in kept.items():
        place.mkdir()
        mount("--rbind", path, place)
    mount("-t", "tmpfs", "-o", "mode=755", "opened", folder)
    for path, place in kept.items():
        path.mkdir(parents=True, exist_ok=True)
        mount("--rbind", place, path)
os.execvp(command[0], command)
"""


def command_as_user(code, spare):
    """Return the command that runs this Python code as an ordinary user. spare: an empty folder.
    The caller needs `unshare` and `setpriv`, and is root."""
    needed = {sys.base_prefix, os.path.realpath(sys.prefix), str(PACKAGES.resolve())}
    python = os.path.realpath(sys.prefix) + "/bin/python"
    as_user = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", python, "-c", code]
    lay_open = [sys.executable, "-c", LAY_OPEN, json.dumps(sorted(needed)), str(spare)]
    return ["unshare", "--mount", "--propagation", "private", *lay_open, *as_user]


def environment_as_user(**more):
    own = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG"}}
    own |= {"PYTHONPATH": str(PACKAGES.resolve()), "HOME": "/nowhere"}
    return own | {"PYTHONDONTWRITEBYTECODE": "1"} | more


def start(command, environment):
    return subprocess.Popen(
        command, env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
