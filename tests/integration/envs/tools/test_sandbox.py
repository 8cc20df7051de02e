"""The Python tool's sandbox: nothing gets out of it, as root and as an ordinary user.

As root every case runs twice: here, and in a Python of an ordinary user (other_user.py).
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from onepolicy.config import PythonTool, UsageError
from onepolicy.envs.tools import PythonSandbox, seccomp
from onepolicy.envs.tools import sandbox as sandboxing
from onepolicy.interfaces import EpisodeError
from support import other_user
from support.needs import need
from support.waiting import LIMIT_S, wait_until

ROOT = os.geteuid() == 0
SECRET = "hunter2-of-the-driver"
SETTINGS = {
    "seconds": LIMIT_S,
    "memory_mib": 128,
    "output_chars": 3000,
}  # seconds: calls that end by themselves
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
        self.process = other_user.start(
            command, other_user.environment_as_user(ENGINE_TOKEN=SECRET)
        )

    def ask(self, *codes, **settings):
        self.process.stdin.write(json.dumps([SETTINGS | settings, codes]) + "\n")
        self.process.stdin.flush()

    def call(self, code, **settings):
        self.ask(code, **settings)
        reply = self.process.stdout.readline()
        assert reply, f"the driver ended with {self.process.wait()}"
        return json.loads(reply)[0]

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module", params=["root", "user"] if ROOT else ["user"])
def driver(request, tmp_path_factory):
    need("bwrap")
    if ROOT and request.param == "user":
        need("setpriv", "unshare")
    driver = Driver(request.param, tmp_path_factory.mktemp("spare"))
    driver.user = request.param
    yield driver
    driver.end()


@pytest.fixture
def python():
    need("bwrap")
    return PythonSandbox(PythonTool(**SETTINGS))


def call(tool, text):
    return asyncio.run(tool.call(text))


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


def test_prints_come_back_and_errors_too(driver):
    assert driver.call("import math\nprint(math.comb(10, 3))") == "120"
    assert (
        driver.call("print('a'); 1 / 0").splitlines()[-1] == "ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in driver.call("print(")
    assert driver.call("") == ""
    assert driver.call("import sys; sys.exit(3)") == "error: ended with status 3"
    assert (
        driver.call("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        == "error: ended with status 137"
    )
    assert (
        driver.call("import signal; signal.raise_signal(signal.SIGALRM)")
        == "error: ended with status 142"
    )
    assert driver.call("print('\u00e9\ud800'.encode('utf8', 'replace'))") != ""


def test_ordinary_programs_work(driver):
    assert driver.call("import asyncio; print(asyncio.run(asyncio.sleep(0, 7)))") == "7"
    assert (
        driver.call("import subprocess; print(subprocess.check_output(['echo', 'a'], text=True))")
        == "a"
    )
    threads = (
        "from concurrent.futures import ThreadPoolExecutor as P; "
        "print(list(P(8).map(abs, range(-3, 1))))"
    )
    assert driver.call(threads) == "[3, 2, 1, 0]"
    database = (
        "import sqlite3; d = sqlite3.connect('a.db'); d.execute('create table t (x)'); "
        "d.commit(); print('made')"
    )
    assert driver.call(database) == "made"
    temporary = (
        "import tempfile\n"
        "with tempfile.TemporaryDirectory() as f: open(f + '/a', 'w').close(); print('made')"
    )
    assert driver.call(temporary) == "made"


def test_calls_with_a_fallback_work_where_the_filter_refuses(driver):
    """They are copies and sending of files (sendfile), private mappings, and libc's cache of
    character sets."""
    code = """
import ctypes, mmap, shutil, socket, subprocess, threading
data = bytes(range(256)) * 1000
with open('a', 'wb') as file: file.write(data)
shutil.copyfile('a', 'b')
print(open('b', 'rb').read() == data)
sender, receiver = socket.socketpair()
with open('a', 'rb') as file:
    sending = threading.Thread(target=lambda: (sender.sendfile(file), sender.close()))
    sending.start()
    print(b''.join(iter(lambda: receiver.recv(2**16), b'')) == data)
    sending.join()
    print(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)[:] == data)
print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
print(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(abs)(-3))
command = ['iconv', '-f', 'KOI8-R', '-t', 'UTF-8']
print(subprocess.run(command, input=bytes([0xc1]), stdout=-1).stdout.decode())
"""
    assert driver.call(code).split() == ["True", "True", "True", "4096", "3", "\u0430"]


def test_a_database_with_a_write_ahead_log_works_for_one_connection(driver):
    """SQLite keeps the log's index in a shared mapping unless the connection has the file to
    itself."""
    code = """
import sqlite3
database = sqlite3.connect('a.db')
database.execute('pragma locking_mode = exclusive')
print(database.execute('pragma journal_mode = wal').fetchone()[0])
database.execute('create table t (x)')
database.commit()
print('made')
"""
    assert driver.call(code).split() == ["wal", "made"]


def test_scratch_is_writable_and_forgotten(driver):
    assert driver.call("open('a', 'w').write('x'); import os; print(os.listdir('.'))") == "['a']"
    assert driver.call("import os; print(os.listdir('.'))") == "[]"


LIBC = "import ctypes; l = ctypes.CDLL(None); "
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
VMSPLICE = {"x86_64": 278, "aarch64": 75}.get(platform.machine())
EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
ARENA_MAX = -8  # malloc.h: M_ARENA_MAX
PIPES = {"x86_64": {"tee": 276, "splice": 275}, "aarch64": {"tee": 77, "splice": 76}}.get(
    platform.machine(), {}
)
RINGS = {  # asynchronous I/O of the kernel's
    "x86_64": {
        "setup": 206,
        "destroy": 207,
        "getevents": 208,
        "submit": 209,
        "cancel": 210,
        "pgetevents": 333,
    },
    "aarch64": {
        "setup": 0,
        "destroy": 1,
        "submit": 2,
        "cancel": 3,
        "getevents": 4,
        "pgetevents": 292,
    },
}.get(platform.machine(), {})
REMAP = {"x86_64": 216, "aarch64": 234}.get(platform.machine())
REFUSED_BY_THE_FILTER = "if ctypes.get_errno() == 1: raise OSError\n"
MAPPING = """import ctypes
l = ctypes.CDLL(None, use_errno=True)
l.mmap.restype = ctypes.c_void_p
l.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def mapping(flags, file=-1):
    if l.mmap(None, 2**14, 3, flags, file, 0) == 2**64 - 1:
        raise OSError(ctypes.get_errno(), 'mmap')
"""
"""Shared mappings: the kernel keeps an unmapped page while another page of it is mapped, and no
limit counts it."""
MOUNT = f"""{LIBC}import os
user = os.getuid()
assert l.unshare(0x10020000) == 0  # CLONE_NEWUSER | CLONE_NEWNS
open('/proc/self/uid_map', 'w').write(f'0 {{user}} 1')
assert l.mount(b'x', b'/scratch', b'tmpfs', 0, b'size=200m') == 0
print('got through')
"""
ESCAPES = {
    "read the host's files": "print(open('/etc/passwd').read())",
    "read this repository": f"print(open({str(Path(__file__).resolve())!r}).read())",
    "read the home folder": f"import os; print(os.listdir({os.path.expanduser('~')!r} + '/.ssh'))",
    "write outside the scratch folder": "open('/usr/x', 'w')",
    "write to the root": "open('/x', 'w')",
    "fill memory through /dev": "open('/dev/shm/x', 'w').write('x')",
    "reach the network": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    "reach this host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "resolve a name": "import socket; print(socket.getaddrinfo('localhost.example', 80))",
    "mount": f"{LIBC}assert l.mount(b'x', b'/scratch', b'tmpfs', 0, 0) == 0",
    "a user namespace": f"{LIBC}assert l.unshare(0x10000000) == 0",
    "a user namespace by clone": f"{LIBC}pid = l.syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0)\n"
    "if pid == 0: import os; os._exit(0)\nassert pid > 0",
    "mount in a user namespace": f"import os, sys; "
    f"os.execv(sys.executable, [sys.executable, '-c', {MOUNT!r}])",
    "memory in files of no folder": "import os; f = [os.memfd_create(str(i)) for i in range(9)]",
    "memory of no process": f"{LIBC}assert l.shmget(0, 2**28, 0o1600) >= 0",
    "trace a process": f"{LIBC}assert l.ptrace(0, 0, 0, 0) == 0",
    "open files without end": f"f = [open('/dev/null') for _ in range({sandboxing.FILES})]",
    "become root": "import os; os.setuid(0)",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "signal a process outside": "import os; os.kill({pid}, 0)",
    "trace the parent": "print(open('/proc/{pid}/environ').read())",
    "make a device": "import os; os.mknod('disk', 0o600 | 0o060000, os.makedev(8, 0)); "
    "open('disk')",
    "fill the scratch folder": "f = open('a', 'wb')\nfor i in range(64): f.write(bytes(2**20))\n"
    "f.flush()",
    "take memory": "x = bytearray(2**29)",
    "write into the first process": "open('/proc/1/mem', 'r+b')",
    "what the first process has open": "import os; print(os.listdir('/proc/1/fd'))",
    "the first process's folder": "import os; print(os.listdir('/proc/1/root'))",
    "the hypervisor": "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "the kernel's ciphers": "import socket; socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "routes": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a unix socket by name": "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "a name for a pair": "import socket; socket.socketpair()[0].bind('\\0name')",
    "a pair of datagram sockets": "import socket; "
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a pair of another family": "import socket; "
    "socket.socketpair(socket.AF_TIPC, socket.SOCK_STREAM)",
    "larger buffers": "import socket; "
    "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24)",
    "park open files in messages": "import socket; "
    "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "larger pipes": "import fcntl, os; fcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "pages in pipes": f"{LIBC}import os\npiece = (ctypes.c_size_t * 2)(id(os), 1)\n"
    f"assert l.syscall({VMSPLICE}, os.pipe()[1], ctypes.byref(piece), 1, 0) == 1",
    "shared memory": f"{MAPPING}mapping(0x21)",
    "shared memory by Python": "import mmap; mmap.mmap(-1, 2**14)",
    "shared memory that is filled at once": f"{MAPPING}mapping(0x21 | 0x4000 | 0x8000)",
    "shared memory by a device": f"{MAPPING}import os; "
    f"mapping(0x1, os.open('/dev/zero', os.O_RDWR))",
    "shared memory of a file": f"{MAPPING}f = open('a', 'w+b'); f.truncate(2**14); "
    f"mapping(0x1, f.fileno())",
    "shared memory of the newer type": f"{MAPPING}f = open('a', 'w+b'); f.truncate(2**14); "
    f"mapping(0x3, f.fileno())",
    "shared memory with other bits": f"{MAPPING}mapping(0x21 | 0x4000000)",
    "pages of a mapping elsewhere": f"{MAPPING}l.syscall({REMAP}, 0, 0, 0, 0, 0)\n"
    f"{REFUSED_BY_THE_FILTER}",
    "pages of files in sockets": "import os, socket\nopen('a', 'w').write('x')\n"
    "pair = socket.socketpair()\n"
    "assert os.sendfile(pair[0].fileno(), os.open('a', 0), 0, 1) == 1",
    "own filters by prctl": f"{LIBC}piece = (ctypes.c_uint64 * 1)(0x7FFF000000000006)  # allow "
    f"everything\n"
    "program = (ctypes.c_size_t * 2)(1, ctypes.addressof(piece))\n"
    "assert l.prctl(22, 2, program) == 0",
    "huge pages again": f"{LIBC}assert l.prctl(41, 0, 0, 0, 0) == 0",
    "huge pages where they are asked for": f"{MAPPING}l.prctl(41, 1, 2, 0, 0)\n"
    f"{REFUSED_BY_THE_FILTER}",
    "attributes of files": "import os; open('a', 'w').close(); "
    "os.setxattr('a', 'user.x', bytes(9))",
    "watch files": f"{LIBC}assert l.inotify_init() >= 0",
    "a message queue": f"{LIBC}assert l.mq_open(b'/x', 0o102, 0o600, None) >= 0",
    "a pseudo terminal": "import os; os.openpty()",
    "calls that nobody reviewed": f"{LIBC}assert l.syscall({seccomp.NEWEST + 1}, 0, 0, 0, 0) >= 0",
    "slow down the first process": "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "starve the first process": "import os; "
    "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "lift the first process's limits": "import resource; "
    "resource.prlimit(1, resource.RLIMIT_AS, (-1, -1))",
    "take open files from the first process": "import resource; "
    "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "debug the first process": f"{LIBC}assert l.ptrace(16, 1, 0, 0) == 0",
    "own filters": f"{LIBC}assert "
    f"l.syscall({ {'x86_64': 317, 'aarch64': 277}.get(platform.machine()) }, 2, 0, 0) == 0",
    "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
}
CALLS = {f"pages in pipes by {name}": number for name, number in PIPES.items()}
CALLS |= {f"open files in rings: io_{name}": number for name, number in RINGS.items()}
for name, number in CALLS.items():
    ESCAPES[name] = f"{MAPPING}l.syscall({number}, 8, 0, 0, 0, 0, 0)\n{REFUSED_BY_THE_FILTER}"
if platform.machine() == "x86_64":
    ESCAPES["the second table of calls"] = f"{LIBC}assert l.syscall({0x40000000 + 39}) >= 0"
    ESCAPES["calls of 32 bits"] = (
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "m.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # getpid by int 0x80\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )


@pytest.mark.parametrize("what", ESCAPES)
def test_no_way_out(driver, what):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = ESCAPES[what].replace("{port}", str(server.getsockname()[1]))
        said = driver.call(
            code.replace("{pid}", str(driver.process.pid)) + "\nprint('got through')"
        )
    assert "got through" not in said, said
    assert "rror" in said, said


def test_no_address_family_and_no_type_makes_a_socket(driver):
    code = """
import socket
for family in range(64):
    for kind in range(1, 11):
        for make in (socket.socket, socket.socketpair):
            try: make(family, kind)
            except OSError as error:
                if error.errno == 97: continue  # EAFNOSUPPORT, of the filter
            print(make.__name__, family, kind)
"""
    assert driver.call(code) == "socketpair 1 1"


def test_no_process_shows_the_drivers_environment(driver):
    code = """
import glob, os
paths = glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/task/*/environ')
for path in [*paths, '/proc/self/environ']:
    try: print(open(path).read().split(chr(0)))
    except PermissionError: print('refused')
print(sorted(os.environ))
print([process for process in os.listdir('/proc') if process.isdecimal()])
"""
    said = driver.call(code)
    assert SECRET not in said
    assert "TOKEN" not in said
    assert len(ast.literal_eval(said.splitlines()[-1])) == 2
    assert set(ast.literal_eval(said.splitlines()[-2])) <= {
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "PATH",
        "PWD",
    }


def test_every_process_has_the_limits(driver):
    code = """
import json, os
def rows(process):
    lines = open(f'/proc/{process}/limits')
    return {line[:26].strip(): line[26:].split()[:2] for line in lines}
print(json.dumps([rows(process) for process in (1, 'self')]))
"""
    first, own = json.loads(driver.call(code))
    assert first == own
    assert first["Max address space"] == [str(128 * 2**20)] * 2
    assert first["Max processes"] == [str(sandboxing.PROCESSES)] * 2
    assert first["Max open files"] == [str(sandboxing.FILES)] * 2
    assert first["Max cpu time"] == [str(int(LIMIT_S) + 1)] * 2
    for none in ("Max core file size", "Max locked memory", "Max msgqueue size"):
        assert first[none] == ["0"] * 2


def test_a_fork_bomb_gets_only_the_allowed_processes(driver):
    """Each of two sandboxes gets its limit, whatever else this user runs outside. Two processes are
    the first one and the code's."""
    code = """
import os
children = 0
try:
    while True:
        if os.fork() == 0:
            import signal; signal.pause()
        children += 1
except BlockingIOError:
    print(children)
"""
    driver.ask(code, code)
    assert json.loads(driver.process.stdout.readline()) == [str(sandboxing.PROCESSES - 2)] * 2


@pytest.mark.parametrize(
    "make", ["os.symlink('x', '%d' % i)", "os.mkdir('%d' % i)", "os.link('a', '%d' % i)"]
)
def test_files_in_the_scratch_folder_are_bounded(driver, make):
    code = "import os; open('a', 'w').close()\nfor i in range(10**8): " + make
    assert driver.call(code) == sandboxing.STATUS_ERRORS[sandboxing.sandbox_init.TOO_MANY_FILES]
    fewer = code.replace("10**8", str(sandboxing.INODES // 2))
    assert driver.call(fewer + "\nprint('made')") == "made"


def test_page_tables_are_bounded(driver):
    """One mapped page per gigabyte costs three more pages of the kernel's each."""
    code = f"""{LIBC}
l.mmap.restype = ctypes.c_void_p
l.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
kept = [l.mmap(2**36 + i * 2**30, 4096, 3, 0x22, -1, 0) for i in range(15000)]
for page in kept: ctypes.memset(page, 1, 1)
import signal; signal.pause()
"""
    assert driver.call(code) == sandboxing.STATUS_ERRORS[sandboxing.sandbox_init.TOO_MANY_TABLES]


def test_page_tables_are_bounded_when_the_first_thread_has_ended(driver):
    """When the first thread has ended, the process's own folder in /proc reports no memory.

    The heap of the second thread would reserve 64 MiB where it finds them aligned (by chance), and
    the pages below would then exceed the address space.
    """
    code = f"""
import ctypes, threading
l = ctypes.CDLL(None)
l.mallopt({ARENA_MAX}, 1)
l.mmap.restype = ctypes.c_void_p
l.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def work():
    while 'Z' not in open('/proc/self/stat').read().rpartition(')')[2]: pass
    kept = [l.mmap(2**36 + i * 2**30, 4096, 3, 0x22, -1, 0) for i in range(15000)]
    assert 2**64 - 1 not in kept, 'no address space'
    for page in kept: ctypes.memset(page, 1, 1)
    import signal; signal.pause()
threading.Thread(target=work).start()
l.syscall({EXIT}, 0)
"""
    assert driver.call(code) == sandboxing.STATUS_ERRORS[sandboxing.sandbox_init.TOO_MANY_TABLES]


def test_no_process_has_huge_pages(driver):
    """A huge page keeps its 2 MiB of memory while any 4 KiB of it are mapped, and only those are
    counted."""
    show = (
        "print([line.split()[1] for line in open('/proc/self/status') if "
        "line.startswith('THP_enabled')])"
    )
    code = (
        f"import subprocess, sys\n{show}\n"
        f"print(subprocess.check_output([sys.executable, '-c', {show!r}]).decode())"
    )
    assert driver.call(code).split() == ["['0']"] * 2


def test_socket_buffers_and_pipes_are_bounded_by_open_files(driver):
    code = """
import os, socket
def fill(make, write):
    kept, held = [], 0
    try:
        while True:
            kept.append(make())
            for end in kept[-1][-1:]:
                os.set_blocking(end if isinstance(end, int) else end.fileno(), False)
                try:
                    while True: held += write(end)
                except BlockingIOError: pass
    except OSError as error:
        assert error.errno == 24, error
    return held // 2**10, kept
sockets, kept = fill(socket.socketpair, lambda end: end.send(bytes(2**14)))
del kept
pipes, _ = fill(os.pipe, lambda end: os.write(end, bytes(4096)))
print(sockets, pipes)
"""
    sockets, pipes = map(int, driver.call(code).split())
    assert 0 < sockets <= sandboxing.FILES // 2 * 208
    assert 0 < pipes <= sandboxing.FILES // 2 * 64


def test_the_code_is_a_user_without_rights(driver):
    code = """
import json, os
names = ('CapPrm', 'CapEff', 'CapAmb')
rights = [line.split()[1] for line in open('/proc/self/status') if line.startswith(names)]
print(json.dumps([os.getresuid() + os.getresgid(), rights]))
"""
    users, rights = json.loads(driver.call(code))
    assert len(set(users)) == 1
    assert users[0] > 1000
    assert [int(capabilities, 16) for capabilities in rights] == [0, 0, 0]


def test_signals_do_not_end_the_first_process(driver):
    code = """
import os
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for _ in range(200): os.getppid() == 1 or print('another parent')
print('alive')
"""
    assert driver.call(code) == "alive"


def test_processes_of_the_code_end_with_it(driver):
    marker = f"left-{os.getpid()}-{driver.user}"
    code = f"""
import os, subprocess, sys
code = 'import signal; signal.pause() # {marker}'
subprocess.Popen([sys.executable, '-c', code], start_new_session=True)
print('done')
"""
    assert driver.call(code) == "done"
    wait_until(lambda: not processes_with(marker))


def test_ended_orphans_do_not_count_as_processes(driver):
    """More of them run one after another than may run at a time."""
    code = """
import os
def start():
    while True:
        try: return os.fork()
        except BlockingIOError: pass  # the last ones were not collected yet
for _ in range(40):
    child = start()
    if child == 0:
        start()  # whoever this is, nobody waits for it
        os._exit(0)
    os.waitpid(child, 0)
print('done')
"""
    assert driver.call(code) == "done"


def test_a_sandbox_ends_with_its_driver(driver, tmp_path):
    marker = f"outlives-{os.getpid()}-{driver.user}"
    code = f"""
import signal, subprocess, sys
code = 'import signal; signal.pause() # {marker}'
subprocess.Popen([sys.executable, '-c', code], start_new_session=True)
signal.pause()
"""
    other = Driver(driver.user, tmp_path)
    try:
        other.ask(code, code, seconds=1000)
        wait_until(lambda: len(processes_with(marker)) == 2)
    finally:
        other.end()
    wait_until(lambda: not processes_with(marker))


def test_the_first_process_ends_the_sandbox_of_a_lost_driver(monkeypatch):
    """The driver is busy, or was lost before it asked the kernel to end the sandbox with it."""
    need("bwrap")
    monkeypatch.setattr(sandboxing, "GRACE_S", -999.0)
    tool = PythonSandbox(PythonTool(seconds=1000, memory_mib=128))
    assert call(tool, "import signal; signal.pause()") == "error: ended with status 242"


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("--seccomp", 1), "sockets can be made"),
        (("--as-pid-1", 0), "its first process has other limits"),
        (("--clearenv", 0), "its environment is not empty"),
    ],
)
def test_a_leaking_sandbox_is_refused(monkeypatch, tmp_path, left_out, message):
    """The bubblewrap of this test leaves out a part of the isolation."""
    need("bwrap")
    option, values = left_out
    weak = tmp_path / "bwrap"
    weak.write_text(
        f"#!{sys.executable}\nimport os, sys\ngiven = sys.argv[1:]\nat = given.index('{option}')\n"
        f"os.environ['ENGINE_TOKEN'] = 'x'\ndel given[at : at + 1 + {values}]\n"
        f"os.execv('{shutil.which('bwrap')}', ['bwrap', *given])\n"
    )
    weak.chmod(0o755)
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: str(weak))
    with pytest.raises(UsageError, match=rf"does not hold \(.*{message}"):
        PythonSandbox(PythonTool())


def test_time_and_output_are_limited_and_nothing_is_left_running():
    need("bwrap")
    tool = PythonSandbox(PythonTool(seconds=1, memory_mib=128, output_chars=50))
    marker = f"left-{os.getpid()}"
    spawn = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(60) # {marker}'])"
    )
    for code in (
        "import time; time.sleep(60)",
        f"{spawn}\nimport time; time.sleep(60)",
        f"import os; os.setsid() if os.fork() == 0 else None\n{spawn}\nimport time; time.sleep(60)",
    ):
        assert call(tool, code) == "error: still running after 1 s"
    wait_until(lambda: not processes_with(marker))


def test_output_before_a_limit_is_kept():
    need("bwrap")
    for seconds in (1, 10, 100):  # until that is enough for Python to start
        tool = PythonSandbox(PythonTool(seconds=seconds, memory_mib=128))
        said = call(tool, "print('before', flush=True)\nwhile True: pass")
        if said.startswith("before"):
            break
    assert said == f"before\nerror: still running after {seconds} s"
    tool = PythonSandbox(PythonTool(seconds=LIMIT_S, memory_mib=128, output_chars=50))
    said = call(tool, "while True: print('x' * 40)")
    assert said.splitlines()[-1] == "error: too much output"
    assert len(said) < 50 + 40


def test_calls_run_in_parallel_within_a_bound(monkeypatch):
    """Two run at a time on one core. A call's time limit begins with its turn: no call is charged
    for waiting."""
    need("bwrap")
    monkeypatch.setattr(sandboxing.os, "cpu_count", lambda: 1)
    tool = PythonSandbox(PythonTool(seconds=LIMIT_S, memory_mib=128))
    running: list[int] = []
    limited: list[float] = []
    most = most_limited = 0
    timeout = asyncio.timeout

    @asynccontextmanager
    async def counted_timeout(seconds: float) -> AsyncIterator[None]:
        nonlocal most_limited
        limited.append(seconds)
        most_limited = max(most_limited, len(limited))
        try:
            async with timeout(seconds):
                yield
        finally:
            limited.pop()

    monkeypatch.setattr(asyncio, "timeout", counted_timeout)

    async def counted(i: int) -> str:
        return await tool.call(f"print({i})")

    inner = tool._call_now

    async def watched(text: str) -> str:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        try:
            return await inner(text)
        finally:
            running.pop()

    monkeypatch.setattr(tool, "_call_now", watched)

    async def together() -> list[str]:
        return await asyncio.gather(*(counted(i) for i in range(8)))

    for _ in range(2):  # in one event loop after another
        assert asyncio.run(together()) == [str(i) for i in range(8)]
    assert most == most_limited == 2


def test_a_sandbox_that_cannot_start_fails_the_episode(python, monkeypatch):
    monkeypatch.setattr(python, "_command", lambda rules: ["/nowhere/bwrap"])
    with pytest.raises(EpisodeError, match="could not be started"):
        call(python, "print(1)")


def test_without_bubblewrap_it_refuses_to_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"bwrap is not installed.*never runs without a sandbox"):
        PythonSandbox(PythonTool())
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permissions to create a new namespace >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: str(broken))
    with pytest.raises(
        UsageError, match=r"made no sandbox here \(no permissions.*never runs without a sandbox"
    ):
        PythonSandbox(PythonTool())


@pytest.mark.needs("bwrap")
def test_without_a_filter_for_the_processor_it_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        UsageError, match=r"riscv64 processor, only for x86_64, aarch64; .*never runs without"
    ):
        PythonSandbox(PythonTool())
