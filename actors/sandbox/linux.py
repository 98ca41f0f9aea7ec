"""Calls of Linux that Python lacks, and what sandboxes are made of: namespaces, roots, rights.

Imports nothing of ours: launchers of sandboxes import it by its folder.
"""

import ctypes
import os
import signal
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
SYS_PIVOT_ROOT, SYS_CAPSET, SYS_MOUNT_SETATTR = 155, 126, 442
AT_RECURSIVE, AT_FDCWD = 0x8000, -100
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
SAFE = MS_NOSUID | MS_NODEV
"""Flags of every mount: no programs that give rights, no devices."""
READ_ONLY = MS_RDONLY | SAFE
DEVICES = ("null", "zero", "full", "urandom")
FIRST_USER = 0x60000000
"""First user id of sandboxes that root starts; each running sandbox has an id of its own."""
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


def remount_read_only(target: str, flags: int = SAFE) -> None:
    """Make one mount read-only, but not the mounts in it."""
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def bind(source: str, target: str, flags: int = READ_ONLY) -> None:
    """Mount a folder, with the mounts in it, or a file of the machine."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    mount(source, target, None, MS_BIND | MS_REC)
    wanted = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    check(
        f"change {target}",
        libc.syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            target.encode(),
            AT_RECURSIVE,
            ctypes.byref(wanted),
            ctypes.sizeof(wanted),
        ),
    )


def new_root() -> str:
    """Return an empty folder in memory, with a few devices, that `enter_root` takes.

    It hides the files of /tmp: what is to be mounted from there has to be open before.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = "/tmp"
    mount("sandbox", root, "tmpfs", SAFE, "size=1m,nr_inodes=512,mode=755")
    os.mkdir(f"{root}/dev")
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "w", encoding="ascii"):
            pass
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    return root


def enter_root(root: str) -> None:
    """Make a folder the read-only root of this process, which has no other files from now on."""
    os.chdir(root)
    os.mkdir("old")
    check("pivot_root", libc.syscall(SYS_PIVOT_ROOT, b".", b"old"))
    os.chdir("/")
    check("leave the old root", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")
    remount_read_only("/")


def own_user() -> int | None:
    """Return the id of a user whom no other process is; None where only root could become it."""
    return FIRST_USER + os.getpid() if os.geteuid() == 0 else None


def drop_rights(user: int | None) -> None:
    """Become a user without any privilege, irrevocably."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check("capset", libc.syscall(SYS_CAPSET, ctypes.byref(header), (ctypes.c_uint32 * 6)()))
    prctl("not dumpable", PR_SET_DUMPABLE, 0)
    end_with_parent()


def unshare(flags: int = NAMESPACES) -> None:
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
    if flags & CLONE_NEWUTS:
        check("name the machine", libc.sethostname(b"sandbox", 7))


def wait_as_init(child: int) -> int:
    """Wait for a child, and for others meanwhile; return its exit code, or minus a signal's number.

    The standard streams are given up: their other ends have to see when the child closes them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)
