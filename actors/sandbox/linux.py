"""Calls of Linux that Python lacks: namespaces, mounts, and what becomes of a process with others.

Imports nothing of ours: the launcher of the sandbox imports it by its folder.
"""

import ctypes
import os
import signal
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def check(what: str, result: int) -> None:
    """Raise OSError from errno if a call of libc failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(what: str, option: int, *values: Any) -> None:
    """Change one setting of this process; raise OSError if the kernel refuses it."""
    check(what, libc.prctl(option, *values, *[0] * (4 - len(values))))


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    prctl("end with the parent", PR_SET_PDEATHSIG, number)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system or folder; raise OSError if the kernel refuses it."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(
        f"mount {target}",
        libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]),
    )


def unshare(flags: int) -> None:
    """Enter new namespaces, as CLONE_… flags say; without root, in a new user namespace too.

    Users and groups keep their ids. Raises OSError where the kernel does not allow it.
    """
    user, group, root = os.getuid(), os.getgid(), os.geteuid() == 0
    check("unshare", libc.unshare(flags | (0 if root else CLONE_NEWUSER)))
    if not root:
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def wait_as_init(child: int) -> int:
    """Return the exit code of a child of a namespace's first process, or minus a signal's number.

    The standard streams are given up: their other ends have to see when the child closes them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)
