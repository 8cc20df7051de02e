"""How much memory of the kernel code in the Python tool's sandbox can hold, attack by attack.

    python benchmarks/sandbox.py [--seconds 5] [--memory 128] [--usage FILE] [ATTACK ...]

Prints the most memory that a call took, its processes' included, less what an idle call takes, and what the call said:
by MemAvailable on an idle machine, or by --usage where other programs run beside it. Ends an attack that took 3 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from pathlib import Path

from onepolicy.config import PythonTool
from onepolicy.envs.tools import PythonSandbox

MOST_KIB = 3 * 2**20
WORKERS = 13

SPREAD = f"""
import ctypes, fcntl, mmap, os, signal, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def work(number):
    pass
def spread(work):
    for number in range({WORKERS}):
        if os.fork() == 0:
            try:
                work(number)
            except OSError as error:
                os.write(1, type(error).__name__.encode() + b" %a\\n" % str(error))
            time.sleep(60)
    time.sleep(60)
"""
ATTACKS = {
    "idle": "spread(work)",
    "symbolic links": """
def work(number):
    os.mkdir(str(number)); os.chdir(str(number))
    for i in range(10**7): os.symlink("x", str(i))
spread(work)""",
    "empty files": """
def work(number):
    os.mkdir(str(number)); os.chdir(str(number))
    for i in range(10**7): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))
spread(work)""",
    "unix sockets": """
def work(number):
    kept = []
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True: end.send(bytes(4096))
            except BlockingIOError: pass
spread(work)""",
    "large unix sockets": """
def work(number):
    kept = []
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)
            end.setblocking(False)
            try:
                while True: end.send(bytes(4096))
            except BlockingIOError: pass
spread(work)""",
    "TCP": """
def work(number):
    server, kept = socket.create_server(("127.0.0.1", 0)), []
    while True:
        end = socket.create_connection(server.getsockname())
        kept.append((end, server.accept()[0]))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)
        end.setblocking(False)
        try:
            while True: end.send(bytes(65536))
        except BlockingIOError: pass
spread(work)""",
    "pipes": """
def work(number):
    kept = []
    while True:
        kept.append(os.pipe())
        os.set_blocking(kept[-1][1], False)
        try:
            while True: os.write(kept[-1][1], bytes(4096))
        except BlockingIOError: pass
spread(work)""",
    "huge pages in pipes": """
def work(number):
    libc.mmap.restype = ctypes.c_void_p
    libc.vmsplice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    kept = []
    while True:
        kept.append(os.pipe())
        for i in range(15):
            area = mmap.mmap(-1, 2**22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            area.madvise(mmap.MADV_HUGEPAGE)
            buffer = (ctypes.c_char * 2**22).from_buffer(area)
            start = -(-ctypes.addressof(buffer) // 2**21) * 2**21
            ctypes.memset(start, 1, 1)
            piece = (ctypes.c_size_t * 2)(start, 1)
            if libc.vmsplice(kept[-1][1], ctypes.byref(piece), 1, 0) != 1:
                raise OSError(ctypes.get_errno(), "vmsplice")
            del buffer
            area.close()
spread(work)""",
    "page tables": """
def work(number):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long, ]
    for i in range(60000):
        area = libc.mmap(2**36 + i * 2**30, 4096, 3, 0x22, -1, 0)
        if area == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memset(area, 1, 1)
spread(work)""",
    "record locks": """
def work(number):
    files = [open(f"{number}-{i}", "w") for i in range(40)]
    for i in range(10**7):
        for file in files: fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * i)
spread(work)""",
    "inotify": """
def work(number):
    os.mkdir(str(number)); os.chdir(str(number))
    kept = []
    while True:
        kept.append(libc.inotify_init())
        if kept[-1] < 0: raise OSError(ctypes.get_errno(), "inotify_init")
        libc.inotify_add_watch(kept[-1], b".", 0xFFF)
        name = "x" * 200
        for i in range(8000): open(name + str(i % 2), "w").close()
spread(work)""",
    "timers": """
def work(number):
    timer = ctypes.c_void_p()
    while True:
        if libc.timer_create(1, None, ctypes.byref(timer)) != 0: raise OSError(ctypes.get_errno(), "timer_create")
spread(work)""",
}


def held_kib(usage: Path | None) -> int:
    """What programs and the kernel hold: of the whole machine, or by a cgroup's file of bytes."""
    if usage is not None:
        return int(usage.read_text()) // 1024
    lines = Path("/proc/meminfo").read_text().splitlines()
    return -next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


async def attack(tool: PythonSandbox, code: str, usage: Path | None) -> tuple[int, str]:
    """The most that was taken, in KiB, and the errors that the call returned."""
    before, taken = held_kib(usage), 0
    call = asyncio.ensure_future(tool.call(SPREAD + code))
    while not call.done():
        await asyncio.sleep(0.02)
        taken = max(taken, held_kib(usage) - before)
        if taken > MOST_KIB:
            call.cancel()
            break
    try:
        lines = (await call).splitlines()
    except asyncio.CancelledError:
        lines = ["error: stopped, 3 GiB are gone"]
    return taken, "; ".join(sorted({line for line in lines if re.match(r"(\w+Error |error: ).*", line)}))


async def gone(most: int, usage: Path | None) -> None:
    """Wait until the kernel has given back what an attack took."""
    for _ in range(200):
        if held_kib(usage) < most:
            return
        await asyncio.sleep(0.1)


async def measure(names: list[str], seconds: float, memory: int, usage: Path | None) -> None:
    tool = PythonSandbox(PythonTool(seconds=seconds, memory_mib=memory, output_chars=4000))
    start = held_kib(usage)
    idle, _ = await attack(tool, ATTACKS["idle"], usage)
    for name in names:
        await gone(start + 2**15, usage)
        taken, said = await attack(tool, ATTACKS[name], usage)
        print(f"{name:22} {(taken - idle) / 1024:8.0f} MiB   {said}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], default=[])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--memory", type=int, default=128)
    parser.add_argument("--usage", type=Path, help="memory.current or memory.usage_in_bytes of the cgroup this runs in")
    given = parser.parse_args()
    print(f"user {os.geteuid()}, Linux {os.uname().release}, {os.cpu_count()} cores", file=sys.stderr)
    asyncio.run(measure(given.attacks or list(ATTACKS), given.seconds, given.memory, given.usage))
