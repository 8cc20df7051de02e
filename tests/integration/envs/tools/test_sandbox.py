"""The Python tool's sandbox: nothing gets out of it, as root and as an ordinary user."""

from __future__ import annotations

import ast
import json
import os
import platform
import socket
from pathlib import Path

import pytest

from onepolicy.envs.tools import sandbox as sandboxing
from onepolicy.envs.tools import seccomp
from support.sandbox_driver import SECRET, Driver, processes_with
from support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.process
LIBC = "import ctypes; l = ctypes.CDLL(None); "
X86 = {"clone": 56, "vmsplice": 278, "exit": 60, "remap": 216, "seccomp": 317}
X86 |= {"tee": 276, "splice": 275, "io_setup": 206, "io_destroy": 207, "io_getevents": 208}
X86 |= {"io_submit": 209, "io_cancel": 210, "io_pgetevents": 333}
ARM = {"clone": 220, "vmsplice": 75, "exit": 93, "remap": 234, "seccomp": 277}
ARM |= {"tee": 77, "splice": 76, "io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_cancel": 3}
ARM |= {"io_getevents": 4, "io_pgetevents": 292}
NUMBER = {"x86_64": X86, "aarch64": ARM}.get(platform.machine(), dict.fromkeys(X86))
"""Of the kernel's calls. Those of io_ are its asynchronous I/O."""
PREFACE = """
import ctypes, fcntl, mmap, os, resource, socket, sys, time
l = ctypes.CDLL(None, use_errno=True)
l.mmap.restype = ctypes.c_void_p
l.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def mapping(flags, file=-1):
    if l.mmap(None, 2**14, 3, flags, file, 0) == 2**64 - 1:
        raise OSError(ctypes.get_errno(), 'mmap')
def by_the_filter(*numbers):
    l.syscall(*numbers)
    if ctypes.get_errno() == 1: raise OSError
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
FILE = "f = open('a', 'w+b'); f.truncate(2**14); "
ESCAPES = {
    "read the host's files": "print(open('/etc/passwd').read())",
    "read this repository": f"print(open({str(Path(__file__).resolve())!r}).read())",
    "read the home folder": f"print(os.listdir({os.path.expanduser('~')!r} + '/.ssh'))",
    "write outside the scratch folder": "open('/usr/x', 'w')",
    "write to the root": "open('/x', 'w')",
    "fill memory through /dev": "open('/dev/shm/x', 'w').write('x')",
    "reach the network": "socket.create_connection(('1.1.1.1', 53), 2)",
    "reach this host": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "resolve a name": "print(socket.getaddrinfo('localhost.example', 80))",
    "mount": "assert l.mount(b'x', b'/scratch', b'tmpfs', 0, 0) == 0",
    "a user namespace": "assert l.unshare(0x10000000) == 0",
    "a user namespace by clone": f"pid = l.syscall({NUMBER['clone']}, 0x10000011, 0, 0, 0, 0)\n"
    "if pid == 0: os._exit(0)\nassert pid > 0",
    "mount in a user namespace": f"os.execv(sys.executable, [sys.executable, '-c', {MOUNT!r}])",
    "memory in files of no folder": "f = [os.memfd_create(str(i)) for i in range(9)]",
    "memory of no process": "assert l.shmget(0, 2**28, 0o1600) >= 0",
    "trace a process": "assert l.ptrace(0, 0, 0, 0) == 0",
    "open files without end": f"f = [open('/dev/null') for _ in range({sandboxing.FILES})]",
    "become root": "os.setuid(0)",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "signal a process outside": "os.kill({pid}, 0)",
    "trace the parent": "print(open('/proc/{pid}/environ').read())",
    "make a device": "os.mknod('d', 0o600 | 0o060000, os.makedev(8, 0)); open('d')",
    "fill the scratch folder": "f = open('a', 'wb')\nfor i in range(64): f.write(bytes(2**20))\n"
    "f.flush()",
    "take memory": "x = bytearray(2**29)",
    "write into the first process": "open('/proc/1/mem', 'r+b')",
    "what the first process has open": "print(os.listdir('/proc/1/fd'))",
    "the first process's folder": "print(os.listdir('/proc/1/root'))",
    "the hypervisor": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "the kernel's ciphers": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "routes": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a unix socket by name": "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "a name for a pair": "socket.socketpair()[0].bind('\\0name')",
    "a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a pair of another family": "socket.socketpair(socket.AF_TIPC, socket.SOCK_STREAM)",
    "larger buffers": "socket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 2**24)",
    "park open files in messages": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "larger pipes": "fcntl.fcntl(os.pipe()[1], 1031, 2**20)",
    "pages in pipes": "piece = (ctypes.c_size_t * 2)(id(os), 1)\n"
    f"assert l.syscall({NUMBER['vmsplice']}, os.pipe()[1], ctypes.byref(piece), 1, 0) == 1",
    "shared memory": "mapping(0x21)",
    "shared memory by Python": "mmap.mmap(-1, 2**14)",
    "shared memory that is filled at once": "mapping(0x21 | 0x4000 | 0x8000)",
    "shared memory by a device": "mapping(0x1, os.open('/dev/zero', os.O_RDWR))",
    "shared memory of a file": f"{FILE}mapping(0x1, f.fileno())",
    "shared memory of the newer type": f"{FILE}mapping(0x3, f.fileno())",
    "shared memory with other bits": "mapping(0x21 | 0x4000000)",
    "pages of a mapping elsewhere": f"by_the_filter({NUMBER['remap']}, 0, 0, 0, 0, 0)",
    "pages of files in sockets": "open('a', 'w').write('x')\npair = socket.socketpair()\n"
    "assert os.sendfile(pair[0].fileno(), os.open('a', 0), 0, 1) == 1",
    "own filters by prctl": "piece = (ctypes.c_uint64 * 1)(0x7FFF000000000006)  # allow all\n"
    "program = (ctypes.c_size_t * 2)(1, ctypes.addressof(piece))\n"
    "assert l.prctl(22, 2, program) == 0",
    "own filters": f"assert l.syscall({NUMBER['seccomp']}, 2, 0, 0) == 0",
    "huge pages again": "assert l.prctl(41, 0, 0, 0, 0) == 0",
    "huge pages where they are asked for": "l.prctl(41, 1, 2, 0, 0)\n"
    "if ctypes.get_errno() == 1: raise OSError",
    "attributes of files": "open('a', 'w').close(); os.setxattr('a', 'user.x', bytes(9))",
    "watch files": "assert l.inotify_init() >= 0",
    "a message queue": "assert l.mq_open(b'/x', 0o102, 0o600, None) >= 0",
    "a pseudo terminal": "os.openpty()",
    "calls that nobody reviewed": f"assert l.syscall({seccomp.NEWEST + 1}, 0, 0, 0, 0) >= 0",
    "slow down the first process": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "starve the first process": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "lift the first process's limits": "resource.prlimit(1, resource.RLIMIT_AS, (-1, -1))",
    "take its open files": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "debug the first process": "assert l.ptrace(16, 1, 0, 0) == 0",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
}
for name in NUMBER:
    if name.startswith(("tee", "splice", "io_")):
        ESCAPES[f"by the call {name}"] = f"by_the_filter({NUMBER[name]}, 8, 0, 0, 0, 0, 0)"
if platform.machine() == "x86_64":
    ESCAPES["the second table of calls"] = f"assert l.syscall({0x40000000 + 39}) >= 0"
    ESCAPES["calls of 32 bits"] = (
        "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "m.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # getpid by int 0x80\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )


TRY = """
for code in {codes!r}:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try: exec(code); print('got through')
        except BaseException as error: print(repr(error))
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print('error:' * bool(status), status, '# next')
"""
"""Every attempt in a process of its own, many in one call."""
ALONE = ("fill the scratch folder",)
"""Attempts that change what the next one finds."""


def test_no_way_out(driver, subtests):
    assert driver.call(f"{PREFACE}print('nothing was tried')") == "nothing was tried"
    together = [what for what in ESCAPES if what not in ALONE]
    groups = [*(together[first::4] for first in range(4)), *([what] for what in ALONE)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"{port}": str(server.getsockname()[1]), "{pid}": str(driver.process.pid)}
        codes = []
        for group in groups:
            code = PREFACE + TRY.format(codes=[ESCAPES[what] for what in group])
            for place, number in places.items():
                code = code.replace(place, number)
            codes.append(code)
        replies = driver.replies(*codes)
    for group, reply in zip(groups, replies, strict=True):
        attempts = reply.split("# next\n")
        assert len(attempts) == len(group), reply
        for what, said in zip(group, attempts, strict=True):
            with subtests.test(what):
                assert "got through" not in said
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
    known = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD"}
    assert set(ast.literal_eval(said.splitlines()[-2])) <= known


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
    assert driver.replies(code, code) == [str(sandboxing.PROCESSES - 2)] * 2


def test_files_in_the_scratch_folder_are_bounded(driver):
    for make in ("os.symlink('x', '%d' % i)", "os.mkdir('%d' % i)", "os.link('a', '%d' % i)"):
        code = "import os; open('a', 'w').close()\nfor i in range(10**8): " + make
        fewer = code.replace("10**8", str(sandboxing.INODES // 2)) + "\nprint('made')"
        too_many = sandboxing.STATUS_ERRORS[sandboxing.sandbox_init.TOO_MANY_FILES]
        assert driver.replies(code, fewer) == [too_many, "made"], make


def test_page_tables_are_bounded(driver):
    """One mapped page per gigabyte costs three more pages of the kernel's each."""
    code = f"""{PREFACE}
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
l.mallopt(-8, 1)  # M_ARENA_MAX
l.mmap.restype = ctypes.c_void_p
l.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def work():
    while 'Z' not in open('/proc/self/stat').read().rpartition(')')[2]: pass
    kept = [l.mmap(2**36 + i * 2**30, 4096, 3, 0x22, -1, 0) for i in range(15000)]
    assert 2**64 - 1 not in kept, 'no address space'
    for page in kept: ctypes.memset(page, 1, 1)
    import signal; signal.pause()
threading.Thread(target=work).start()
l.syscall({NUMBER["exit"]}, 0)
"""
    assert driver.call(code) == sandboxing.STATUS_ERRORS[sandboxing.sandbox_init.TOO_MANY_TABLES]


def test_no_process_has_huge_pages(driver):
    """A huge page keeps its 2 MiB of memory while any 4 KiB of it are mapped, and only those are
    counted."""
    show = """
for line in open('/proc/self/status'):
    if line.startswith('THP_enabled'): print(line.split()[1])
"""
    code = f"""{show}
import subprocess, sys
print(subprocess.check_output([sys.executable, '-c', {show!r}]).decode())
"""
    assert driver.call(code).split() == ["0", "0"]


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


@pytest.mark.full
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
