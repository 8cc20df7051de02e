"""A program without an SDK. Its first argument says what it does beside asking; stdin is asked."""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def ask(messages, key=None):
    """Return the message of an answer, or the status of an error."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return error.code


def tried(attempt):
    """Return what an attempt gives, or the name of its error."""
    try:
        return attempt()
    except OSError as error:
        return type(error).__name__


def escapes():
    """Return what was tried to leave the sandbox, and what came of it."""
    with open("/proc/net/dev") as devices:
        names = [line.split(":")[0].strip() for line in devices.readlines()[2:]]
    return {
        "network": tried(lambda: bool(socket.create_connection(("1.1.1.1", 53), 2))),
        "devices": names,
        "host": tried(lambda: bool(socket.create_connection(("127.0.0.1", int(sys.argv[2])), 2))),
        "vsock": tried(lambda: bool(socket.socket(40))),
        "packets": tried(lambda: bool(socket.socket(17))),
        "files": tried(lambda: open(sys.argv[3]).read()),
        "passwd": tried(lambda: open("/etc/passwd").read()),
        "socket": tried(lambda: os.chmod("/gateway.sock", 0)),
        "program": tried(lambda: bool(open("/program/x", "w"))),
        "secret": [name for name, value in os.environ.items() if "hunter2" in value],
        "others": [p for p in os.listdir("/proc") if p.isdecimal() and int(p) > 100],
        "key": ask([{"role": "user", "content": "x"}], f"other.{'0' * 32}"),
        "episodes": ask_path("/v1/episodes"),
    }


def ask_path(path):
    url = os.environ["ANTHROPIC_BASE_URL"] + path
    try:
        urllib.request.urlopen(urllib.request.Request(url, b'{"episode": "x"}'))
    except urllib.error.HTTPError as error:
        return error.code


def forge(report):
    """Write a report of the sandbox into every file of the parent process, and end that."""
    folder = f"/proc/{os.getppid()}/fd"
    for name in tried(lambda: os.listdir(folder)):
        tried(lambda path=Path(folder, name): path.write_text(report))
    os.kill(os.getppid(), 9)
    time.sleep(3600)


what = sys.argv[1]
messages = [{"role": "user", "content": sys.stdin.read()}]
if what == "silent":
    sys.exit("nothing to do")
for _ in range(2):
    answer = ask(messages)
    if isinstance(answer, int):
        print(f"refused: {answer}")
        break
    messages += [answer, {"role": "user", "content": "go on"}]
if what == "branch":
    ask([{"role": "user", "content": "another"}])
if what == "die":
    sys.exit("a bug")
if what == "hang":
    time.sleep(3600)
if what == "hold" and int(messages[0]["content"][0]) % 2 == 0:
    os.execvp("sleep", ["sleep", sys.argv[2]])
if what == "kill":
    os.kill(os.getppid(), 9)
    time.sleep(3600)
if what == "forge":
    forge(json.dumps({"status": 0, "error": "", "file": None}))
if what == "file":
    with open("result.txt", "w") as file:
        file.write(sys.argv[2])
if what == "escape":
    print(json.dumps(escapes()))
else:
    print("done")
