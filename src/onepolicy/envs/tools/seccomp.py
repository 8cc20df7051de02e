"""The filter of system calls that bubblewrap loads for the Python tool.

Namespaces hide files, network and processes, but code in them may make user namespaces of its own, in which it has
every capability: it could mount file systems in memory of any size. Refused are therefore new namespaces, mounts,
memory that the limits of a process do not count, and parts of the kernel that a calculation has no use for.
"""

from __future__ import annotations

import contextlib
import os
import platform
import struct
from collections.abc import Iterator

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their AUDIT_ARCH (linux/audit.h)
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags are in memory, where no filter can look: "not there", upon which libc takes clone
NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
X32 = 0x40000000  # x86_64's second table of calls starts here

REFUSED = {  # system call: its number on x86_64, on aarch64
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
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
}

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF (linux/bpf_common.h)
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38


def known_machine() -> bool:
    return platform.machine() in MACHINES


def program(machine: str) -> bytes:
    """struct sock_filter[], as `bwrap --seccomp` reads it: 8 bytes per instruction."""
    column = list(MACHINES).index(machine)
    code = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, MACHINES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    code += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, FAIL | ENOSYS)]
    code += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | ENOSYS)]
    for numbers in REFUSED.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, FAIL | EPERM)]
    code += [(EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    code += [(ANY_BIT, 0, 1, NEW_NAMESPACE), (RETURN, 0, 0, FAIL | EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


@contextlib.contextmanager
def opened() -> Iterator[int]:
    """A file descriptor to read this machine's filter from, once."""
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, program(platform.machine()))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
