"""The filter of system calls that bubblewrap loads for the Python tool.

Namespaces hide files, network and processes. They leave three things to a filter:
- Code could make user namespaces of its own, in which it has every capability.
- Some address families (AF_VSOCK) belong to no network namespace.
- Some calls make the kernel hold memory that no limit of a process counts. RLIMIT_AS counts
  mapped memory, but a shared mapping keeps its pages when most of it is unmapped. The memory that
  a socket or a ring of the kernel refers to stays when its file is closed.

A calculation needs none of these calls, so they fail.
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
from collections.abc import Iterator

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their AUDIT_ARCH (linux/audit.h)
CLONE3 = 435
"""Its flags are in memory, which a filter cannot read. It fails with ENOSYS, so libc uses clone."""
NEWEST = 462
"""mseal, of Linux 6.10.

Later calls were not reviewed and fail with ENOSYS. So do those of x86_64's second table (x32).
"""
NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
AF_UNIX, SOCK_STREAM, SOCKET_TYPES = 1, 1, 0xF
F_SETPIPE_SZ = 1031
MAP_TYPE, MAP_PRIVATE = 0xF, 2
PR_SET_SECCOMP, PR_SET_THP_DISABLE = 22, 41

Numbers = tuple[int | None, int | None]

NO_NAMESPACES: dict[str, Numbers] = {  # system call -> (number on x86_64, number on aarch64)
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
NO_KERNEL_MEMORY: dict[str, Numbers] = {  # their memory counts in no limit of a process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "remap_file_pages": (216, 234),
    "sendfile": (40, 71),  # one byte in a socket holds a page of a file, even after truncation
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),  # one byte in a pipe can hold a huge page
    "io_setup": (206, 0),  # a ring keeps a file open that no process has open any more
    "io_destroy": (207, 1),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_getevents": (208, 4),
    "io_pgetevents": (333, 292),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "modify_ldt": (154, None),
}
NO_SOCKETS: dict[str, Numbers] = {  # except AF_UNIX pairs, which asyncio uses to wake up
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),  # messages could keep files open
    "sendmmsg": (307, 269),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
    "setsockopt": (54, 208),  # larger buffers
}
NO_INTERFERENCE: dict[str, Numbers] = {  # with other processes and with the first process's watch
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
NO_USE: dict[str, Numbers] = {  # interfaces of the kernel with vulnerabilities in the past
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
}
REFUSED = NO_NAMESPACES | NO_KERNEL_MEMORY | NO_SOCKETS | NO_INTERFERENCE | NO_USE
HARMLESS = {"setpriority", "ioprio_set", "sched_setscheduler", "sched_setattr"}
HARMLESS |= {"sched_setparam", "sched_setaffinity", "process_madvise"}
KEYS = ("add_key", "request_key", "keyctl", "memfd_secret", "fanotify_init", "modify_ldt")
REFUSED_TO_PROGRAMS = {
    **NO_NAMESPACES,
    **NO_USE,
    **{name: numbers for name, numbers in NO_INTERFERENCE.items() if name not in HARMLESS},
    **{name: NO_KERNEL_MEMORY[name] for name in KEYS},
}
"""Calls that a program in its own network namespace (gateway/program_sandbox.py) may not make.

Runtimes such as node need sockets, shared mappings and inotify, so the kernel's memory is not
bounded as it is for the Python tool."""
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
# Calls whose arguments are checked: (number on x86_64, number on aarch64).
SOCKET, SOCKETPAIR, FCNTL = (41, 198), (53, 199), (72, 25)
CLONE, PRLIMIT64, MMAP, PRCTL = (56, 220), (302, 261), (9, 222), (157, 167)

# Classic BPF (linux/bpf_common.h).
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH = 0, 4  # offsets in struct seccomp_data, little-endian
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT, FOURTH_ARGUMENT = 16, 24, 32, 40
KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


def is_supported_machine() -> bool:
    return platform.machine() in MACHINES


def build_filter(machine: str, *, sockets: bool = False) -> bytes:
    """Return struct sock_filter[] as `bwrap --seccomp` reads it: 8 bytes per instruction.

    An instruction is (code, jump if true, jump if false, constant). A jump is the number of
    instructions to skip. sockets: for a program, see `REFUSED_TO_PROGRAMS`.
    """
    refused, checks = REFUSED, _argument_checks()
    if sockets:
        refused, checks = REFUSED_TO_PROGRAMS, _program_checks(checks)
    column = list(MACHINES).index(machine)
    code = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    code += [(AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, FAIL | ENOSYS)]
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | ENOSYS)]
    if not sockets:
        code += [(EQUAL, 0, 1, SOCKET[column]), (RETURN, 0, 0, FAIL | EAFNOSUPPORT)]
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | EPERM)]
    for numbers, block in checks.items():
        block.append((RETURN, 0, 0, ALLOW))
        code += [(EQUAL, 0, len(block), numbers[column]), *block]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _argument_checks() -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """Return, by system call, the instructions that refuse some of its arguments.

    Other arguments pass on to the next instruction.
    """
    refuse = (RETURN, 0, 0, FAIL | EPERM)
    only_streams = [
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 3, AF_UNIX),
        (LOAD, 0, 0, SECOND_ARGUMENT),
    ]
    only_streams += [
        (AND, 0, 0, SOCKET_TYPES),
        (EQUAL, 1, 0, SOCK_STREAM),
        (RETURN, 0, 0, FAIL | EAFNOSUPPORT),
    ]
    no_large_pipes = [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUAL, 0, 1, F_SETPIPE_SZ), refuse]
    no_namespaces = [(LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, NEW_NAMESPACE), refuse]
    only_own_limits = [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 1, 0, 0), refuse]
    only_private = [
        (LOAD, 0, 0, FOURTH_ARGUMENT),
        (AND, 0, 0, MAP_TYPE),
        (EQUAL, 1, 0, MAP_PRIVATE),
        refuse,
    ]
    # A process may disable huge pages for itself, as sandbox_init.py does (third argument 0), but
    # never enable them again.
    no_filters_nor_huge_pages = [(LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 5, 0, PR_SET_SECCOMP)]
    no_filters_nor_huge_pages += [
        (EQUAL, 0, 5, PR_SET_THP_DISABLE),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (EQUAL, 0, 2, 1),
    ]
    no_filters_nor_huge_pages += [(LOAD, 0, 0, THIRD_ARGUMENT), (EQUAL, 1, 0, 0), refuse]
    return {
        SOCKETPAIR: only_streams,
        FCNTL: no_large_pipes,
        CLONE: no_namespaces,
        PRLIMIT64: only_own_limits,
        MMAP: only_private,
        PRCTL: no_filters_nor_huge_pages,
    }


def _program_checks(
    checks: dict[tuple[int, int], list[tuple[int, int, int, int]]],
) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """Return the checks for a program: of `checks` those of namespaces, limits and filters.

    Sockets may be of the families that its network namespace separates, or of Unix, whose paths the
    program sees or does not see.
    """
    families = [(LOAD, 0, 0, FIRST_ARGUMENT)]
    families += [(EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    families.append((RETURN, 0, 0, FAIL | EAFNOSUPPORT))
    kept = {number: checks[number] for number in (CLONE, PRLIMIT64, PRCTL)}
    return kept | {SOCKET: families, SOCKETPAIR: list(families)}


@contextlib.contextmanager
def open_filter(*, sockets: bool = False) -> Iterator[int]:
    """Open a file descriptor that this machine's filter can be read from, once.

    sockets: see `build_filter`.
    """
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, build_filter(platform.machine(), sockets=sockets))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
