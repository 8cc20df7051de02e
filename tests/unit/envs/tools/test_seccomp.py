"""The filter of system calls, run on the kernel's numbers by an interpreter of its own."""

import errno
import struct
from pathlib import Path

import pytest

from onepolicy.envs.tools import seccomp
from onepolicy.envs.tools.seccomp import REFUSED, REFUSED_TO_PROGRAMS, build_filter

ALLOWED = 0x7FFF0000
KILLED = 0x80000000
CHECKED = {"socket", "socketpair", "fcntl", "clone", "clone3", "mmap", "prctl", "prlimit64"}
"""Calls some of whose arguments are refused, and those that fail with an error of their own."""


def refused(error):
    return 0x00050000 | error


def numbers(machine):
    """Return the number of each call that the machine has."""
    column = ("x86_64", "aarch64").index(machine)
    lines = Path(__file__).with_name("syscalls.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: int(row[column]) for name, *row in rows if row[column] != "-"}


def verdict(machine, number, *arguments, sockets=False, arch=None):
    """Return what the filter says of a call (linux/bpf_common.h, struct seccomp_data)."""
    arch = seccomp.MACHINES[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("<HBBI", build_filter(machine, sockets=sockets)))
    value = place = 0
    while True:
        operation, if_true, if_false, constant = code[place]
        place += 1
        if operation == 0x06:  # return
            return constant
        if operation == 0x20:  # load a word
            (value,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:  # and
            value &= constant
        else:
            taken = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant != 0}
            place += if_true if taken[operation] else if_false


@pytest.mark.parametrize("machine", seccomp.MACHINES)
@pytest.mark.parametrize("sockets", [False, True])
def test_the_filter_refuses_the_calls_that_it_names_and_no_others(machine, sockets, subtests):
    named = REFUSED_TO_PROGRAMS if sockets else REFUSED
    known = numbers(machine)
    absent = {name for name in named if named[name][list(seccomp.MACHINES).index(machine)] is None}
    assert set(named) - set(known) == absent
    for name in sorted(set(known) - CHECKED):
        expected = refused(errno.EPERM) if name in named else ALLOWED
        with subtests.test(name):
            assert verdict(machine, known[name], sockets=sockets) == expected


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_other_machines_and_newer_calls_are_refused(machine):
    call = numbers(machine)
    assert verdict(machine, call["read"], arch=0x40000003) == KILLED  # 32-bit x86
    assert verdict(machine, 462) == ALLOWED
    for number in (463, 0x40000000 + call["read"], call["clone3"]):
        assert verdict(machine, number) == refused(errno.ENOSYS)


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_arguments_decide(machine):
    call = numbers(machine)
    not_permitted, no_family = refused(errno.EPERM), refused(errno.EAFNOSUPPORT)
    assert verdict(machine, call["socket"], 1, 1) == no_family
    assert verdict(machine, call["socketpair"], 1, 1 | 0o2000000) == ALLOWED  # SOCK_CLOEXEC
    assert verdict(machine, call["socketpair"], 1, 2) == no_family
    for name in ("socket", "socketpair"):  # of a program: of Unix and the internet, not of TIPC
        assert verdict(machine, call[name], 1, 2, sockets=True) == ALLOWED
        assert verdict(machine, call[name], 2, 1, sockets=True) == ALLOWED
        assert verdict(machine, call[name], 30, 1, sockets=True) == no_family
    assert verdict(machine, call["fcntl"], 3, 1) == ALLOWED
    assert verdict(machine, call["fcntl"], 3, 1031) == not_permitted  # F_SETPIPE_SZ
    assert verdict(machine, call["clone"], 0x3D0F00) == ALLOWED  # a thread
    assert verdict(machine, call["clone"], 0x10000000) == not_permitted  # CLONE_NEWUSER
    assert verdict(machine, call["prlimit64"], 0) == ALLOWED
    assert verdict(machine, call["prlimit64"], 1) == not_permitted
    private, shared = 0x22, 0x21
    assert verdict(machine, call["mmap"], 0, 4096, 3, private) == ALLOWED
    assert verdict(machine, call["mmap"], 0, 4096, 3, shared) == not_permitted
    assert verdict(machine, call["prctl"], 15) == ALLOWED  # PR_SET_NAME
    assert verdict(machine, call["prctl"], 22, 2) == not_permitted  # PR_SET_SECCOMP
