"""A process that makes sandboxes of the Python tool, as this user or as an ordinary one."""

import json
import os
import sys
from pathlib import Path

from support import other_user
from support.waiting import LIMIT_S

ROOT = os.geteuid() == 0
SECRET = "hunter2-of-the-driver"
SETTINGS = {"seconds": LIMIT_S, "memory_mib": 128, "output_chars": 3000}
"""Seconds: of calls that end by themselves."""
OUTSIDE = 40
"""Threads of the user outside the sandbox: more than the processes that are allowed inside."""
DRIVER = f"""
import asyncio, json, sys, threading
from onepolicy.config import PythonTool
from onepolicy.envs.tools.sandbox import PythonSandbox

for _ in range({OUTSIDE}): threading.Thread(target=threading.Event().wait, daemon=True).start()
tools = {{}}
async def all_of(tool, codes):
    return await asyncio.gather(*map(tool.call, codes))
for line in sys.stdin:
    settings, codes = json.loads(line)
    key = json.dumps(settings)
    tools[key] = tools.get(key) or PythonSandbox(PythonTool(**settings))
    print(json.dumps(asyncio.run(all_of(tools[key], codes))), flush=True)
"""


class Driver:
    """A process that makes sandboxes and asks them for the requests that it reads."""

    def __init__(self, user, spare):
        command = [sys.executable, "-c", DRIVER]
        if user == "user" and ROOT:
            command = other_user.command_as_user(DRIVER, spare)
        environment = other_user.environment_as_user(ENGINE_TOKEN=SECRET)
        self.process, self.user = other_user.start(command, environment), user

    def ask(self, *codes, **settings):
        self.process.stdin.write(json.dumps([SETTINGS | settings, codes]) + "\n")
        self.process.stdin.flush()

    def replies(self, *codes, **settings):
        """Return what each of these calls says. They run beside one another."""
        self.ask(*codes, **settings)
        reply = self.process.stdout.readline()
        assert reply, f"the driver ended with {self.process.wait()}"
        return json.loads(reply)

    def call(self, code):
        return self.replies(code)[0]

    def end(self):
        self.process.kill()
        self.process.communicate()


def processes_with(marker):
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                if marker in (process / "cmdline").read_text():
                    found.append(int(process.name))
            except OSError:
                continue
    return found
