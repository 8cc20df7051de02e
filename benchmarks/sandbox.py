"""Memory of the kernel that code in the Python tool's sandbox can hold, attack by attack.

    python benchmarks/sandbox.py [--seconds 5] [--memory 128] [--usage FILE | --field NAME] \
      [ATTACK ...]

Prints the most memory that a call took, its processes' included, less that of an idle call, and the
call's output. On an idle machine the memory is MemAvailable. Where other programs run beside it: by
--usage, or by a --field of /proc/meminfo that an attack fills and others leave alone (Shmem,
PageTables). Ends an attack that took 2 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from onepolicy.config import PythonTool
from onepolicy.envs.tools import PythonSandbox

MOST_KIB = 2 * 2**20
WORKERS = 13

SPREAD = f"""
import ctypes, fcntl, mmap, os, select, signal, socket, struct, threading, time
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
    "shared memory": """
def work(number):
    for i in range(30):
        area = mmap.mmap(-1, 2**22)  # shared
        area[:] = bytes(2**22)
        area.resize(4096)  # the rest stays in the kernel's object
        kept.append(area)
kept = []
spread(work)""",
    "files kept by AIO": """
SETUP, SUBMIT = {"x86_64": (206, 209), "aarch64": (0, 2)}[os.uname().machine]
def work(number):
    ring = ctypes.c_ulong()
    if libc.syscall(SETUP, 400, ctypes.byref(ring)) != 0:
        raise OSError(ctypes.get_errno(), "io_setup")
    for i in range(200):
        pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
            try:
                while True: end.send(bytes(2**15))
            except BlockingIOError: pass
            # a poll, for POLLPRI
            never = struct.pack("<QIIHhIQQqQII", 0, 0, 0, 5, 0, end.fileno(), 2, 0, 0, 0, 0, 0)
            piece = ctypes.create_string_buffer(never, 64)
            pieces = (ctypes.c_void_p * 1)(ctypes.addressof(piece))
            if libc.syscall(SUBMIT, ring, ctypes.c_long(1), pieces) != 1:
                raise OSError(ctypes.get_errno(), "io_submit")
spread(work)""",
    "pages in sockets": """
def work(number):
    file, kept = os.open(str(number), os.O_CREAT | os.O_RDWR), []
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while True:
                    os.ftruncate(file, 0)
                    os.pwrite(file, bytes(4096), 0)
                    os.sendfile(end.fileno(), file, 0, 1)
            except BlockingIOError: pass
spread(work)""",
    "parts of huge pages": """
def work(number):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [*libc.munmap.argtypes, ctypes.c_int]
    for i in range(60):
        area = libc.mmap(2**36 + i * 2**30, 2**21, 3, 0x22, -1, 0)
        if area == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
        libc.madvise(area, 2**21, 14)
        ctypes.memset(area, 1, 1)
        libc.munmap(area + 4096, 2**21 - 4096)
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
    "tables of a lost thread": """
def work(number):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    def rest():
        for i in range(12000):
            area = libc.mmap(2**36 + i * 2**30, 4096, 3, 0x22, -1, 0)
            if area == 2**64 - 1: return
            ctypes.memset(area, 1, 1)
        time.sleep(60)
    threading.Thread(target=rest).start()
    libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
for number in range(6):
    if os.fork() == 0: work(number)
time.sleep(60)""",
    "memory areas": """
def work(number):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    failed = 2**64 - 1
    while libc.mmap(None, 4096, 1, 0x22, -1, 0) != failed != libc.mmap(None, 4096, 3, 0x22, -1, 0):
        pass
spread(work)""",
    "epoll entries": """
def work(number):
    polls = [select.epoll() for _ in range(30)]
    numbers = [os.eventfd(0) for _ in range(31)]
    os.close(numbers[-1])
    for i in range(30 * 31):  # until each of 30 files has been at each of 31 numbers
        source, target = numbers[(29 - i) % 31], numbers[(30 - i) % 31]
        os.dup2(source, target)
        os.close(source)
        for poll in polls: poll.register(target, 0)
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
        if libc.timer_create(1, None, ctypes.byref(timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create")
spread(work)""",
}


Held = Callable[[], int]
"""What programs and the kernel hold now, in KiB."""


def held_by_cgroup(usage: Path) -> int:
    return int(usage.read_text()) // 1024


def held_by_machine(field: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    value = next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return -value if field in ("MemAvailable", "MemFree") else value


async def attack(tool: PythonSandbox, code: str, held: Held) -> tuple[int, str]:
    """Return the most memory that the attack took, in KiB, and the errors that the call
    returned."""
    before, taken = held(), 0
    call = asyncio.ensure_future(tool.call(SPREAD + code))
    while not call.done():
        await asyncio.sleep(0.02)
        taken = max(taken, held() - before)
        if taken > MOST_KIB:
            call.cancel()
            break
    try:
        lines = (await call).splitlines()
    except asyncio.CancelledError:
        lines = ["error: stopped, 2 GiB are gone"]
    return taken, "; ".join(
        sorted({line for line in lines if re.match(r"(\w+Error |error: ).*", line)})
    )


async def gone(most: int, held: Held) -> None:
    """Wait until the kernel has freed an attack's memory."""
    for _ in range(200):
        if held() < most:
            return
        await asyncio.sleep(0.1)


async def measure(names: list[str], seconds: float, memory: int, held: Held) -> None:
    tool = PythonSandbox(PythonTool(seconds=seconds, memory_mib=memory, output_chars=4000))
    start = held()
    idle, _ = await attack(tool, ATTACKS["idle"], held)
    for name in names:
        await gone(start + 2**15, held)
        taken, said = await attack(tool, ATTACKS[name], held)
        print(f"{name:22} {(taken - idle) / 1024:8.0f} MiB   {said}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], default=[])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--memory", type=int, default=128)
    parser.add_argument(
        "--usage",
        type=Path,
        help="memory.current or memory.usage_in_bytes of the cgroup this runs in",
    )
    parser.add_argument("--field", default="MemAvailable", help="of /proc/meminfo")
    given = parser.parse_args()
    held = (
        partial(held_by_machine, given.field)
        if given.usage is None
        else partial(held_by_cgroup, given.usage)
    )
    print(
        f"user {os.geteuid()}, Linux {os.uname().release}, {os.cpu_count()} cores", file=sys.stderr
    )
    asyncio.run(measure(given.attacks or list(ATTACKS), given.seconds, given.memory, held))
