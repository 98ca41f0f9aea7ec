"""Starts a program in the sandbox, through three nested processes.

    launcher ─new namespaces─▶ init (pid 1: mounts, a root of its own, no rights) ─▶ the program

It runs as `python -I -S launcher.py CONFIG_FD STATUS_FD`, and imports nothing of Headway but the
file beside it. CONFIG is JSON (`sandbox.Sandbox` writes it). STATUS receives lines of JSON, each
with the time in `at`: `{"started": true}` just before the program begins, then `{"exit": code}` or
`{"signal": number}`; or `{"error": text}`, with `"started": null` if the program did not begin
after all. Every step must succeed before the next: no program runs with an incomplete barrier.

Barriers: user (unless started by root, who becomes nobody), mount, pid, network, IPC and UTS
namespaces; a read-only root of the standard library and what a recipe names; one small writable
folder; limits of memory, time, file size, files and threads; no capabilities; a list of allowed
system calls. On SIGTERM the launcher ends init, and with it all the rest, and leaves no zombie of
it to process 1; when the launcher is killed, the kernel ends init.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
SYS_PIVOT_ROOT, SYS_CAPSET, SYS_MOUNT_SETATTR = 155, 126, 442
AT_RECURSIVE, AT_FDCWD = 0x8000, -100
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
    """Change one setting of this process."""
    check(what, libc.prctl(option, *values, *[0] * (4 - len(values))))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system or folder."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(
        f"mount {target}",
        libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]),
    )


def unshare(*, root: bool) -> None:
    """Enter new namespaces of every kind; without root, in a new user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.getuid(), os.getgid()
    check("unshare", libc.unshare(flags | (0 if root else CLONE_NEWUSER)))
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def bind_read_only(source: str, target: str) -> None:
    """Mount a folder, with the mounts in it, or a file of the machine read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    mount(source, target, None, MS_BIND | MS_REC)
    wanted = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    check(
        f"make {target} read-only",
        libc.syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            target.encode(),
            AT_RECURSIVE,
            ctypes.byref(wanted),
            ctypes.sizeof(wanted),
        ),
    )


def hide_packages(folder: str, paths: list[str]) -> None:
    """Cover a folder of packages by one that only adds some paths to those of Python."""
    mount("packages", folder, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,mode=755")
    with open(f"{folder}/recipe.pth", "w", encoding="utf-8") as file:
        file.write("\n".join(paths))
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("none", folder, None, flags)


def build_root(config: dict[str, Any]) -> None:
    """Change to a new root that holds the paths of the config, a few devices and /work."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in config["paths"]}
    root = "/tmp"  # which hides what is in it: the sources are open
    mount("sandbox", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=512,mode=755")
    os.mkdir(f"{root}/work")
    size = f"size={config['disk_bytes']},nr_inodes={config['files']},mode=1777"
    mount("work", f"{root}/work", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    for path in config["paths"]:
        bind_read_only(f"/proc/self/fd/{sources[path]}", root + path)
    for path in config["packages"]:
        hide_packages(root + path, config["more_paths"])
    os.mkdir(f"{root}/dev")
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "w", encoding="ascii"):
            pass
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    if not os.path.exists(f"{root}/tmp"):  # else it has a folder of the config
        os.symlink("work", f"{root}/tmp")
    with open(f"{root}/work/program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(config["program"])
    os.chmod(f"{root}/work/program.py", 0o644)
    os.chdir(root)
    os.mkdir("old")
    check("pivot_root", libc.syscall(SYS_PIVOT_ROOT, b".", b"old"))
    os.chdir("/")
    check("leave the old root", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/work")


def drop_rights(user: int | None) -> None:
    """Become a user without any privilege, irrevocably."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check("capset", libc.syscall(SYS_CAPSET, ctypes.byref(header), (ctypes.c_uint32 * 6)()))
    prctl("not dumpable", PR_SET_DUMPABLE, 0)
    prctl("die with the launcher", PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(config: dict[str, Any]) -> None:
    """Set the resource limits of the program."""
    for name, most in config["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))


def report(status: int, what: dict[str, Any]) -> None:
    """Write a status line; the clock is the same in all processes."""
    line = json.dumps({**what, "at": time.monotonic()})
    os.write(status, line.encode() + b"\n")


def run_program(config: dict[str, Any], install: Callable[[], None], status: int) -> NoReturn:
    """Replace this process by the program."""
    try:
        os.setsid()
        limit(config)
        os.closerange(3, status)
        os.closerange(status + 1, 1 << 16)  # status itself is closed by exec
        install()
        report(status, {"started": True})
        os.execve(config["command"][0], config["command"], config["environment"])
    except BaseException as error:  # noqa: BLE001  (reported as status)
        report(status, {"error": f"the program was not started: {error}", "started": None})
    os._exit(1)


def run_init(config: dict[str, Any], install: Callable[[], None], status: int) -> NoReturn:
    """Run pid 1 of the sandbox: build it, start the program, and end everything with it.

    It handles no signal: the kernel keeps those that the program sends from it.
    """
    try:
        prctl("die with the launcher", PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler
        check("name the machine", libc.sethostname(b"sandbox", 7))
        build_root(config)
        drop_rights(config["user"])
        child = os.fork()
        if child == 0:
            run_program(config, install, status)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        while True:
            ended, how = os.wait()
            if ended == child:
                break
        code = os.waitstatus_to_exitcode(how)
        report(status, {"exit": code} if code >= 0 else {"signal": -code})
    except BaseException as error:  # noqa: BLE001  (reported as status)
        report(status, {"error": str(error)})
    os._exit(0)


def load_filter() -> Callable[[], None]:
    """Return a function that installs the filter of the file beside this one.

    Call this before the root changes.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "system_calls.py")
    spec = importlib.util.spec_from_file_location("system_calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = module.program_filter()
    return lambda: module.install(program)


def main() -> None:
    """Read the config, enter the namespaces, and wait for init."""
    status = int(sys.argv[2])
    try:
        with open(int(sys.argv[1]), encoding="utf-8", errors="surrogatepass") as file:
            config = json.load(file)
        os.set_inheritable(status, False)
        prctl("end with the caller", PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != config["parent"]:
            return
        root = os.geteuid() == 0
        config["user"] = FIRST_USER + os.getpid() if root else None
        install = load_filter()
        unshare(root=root)
        child = os.fork()
        if child == 0:
            run_init(config, install, status)

        def end(*_: object) -> None:
            os.kill(child, signal.SIGKILL)  # init, whose end `waitpid` takes note of

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, config["seconds"] + 5)
        os.waitpid(child, 0)
    except BaseException as error:  # noqa: BLE001  (reported as status)
        report(status, {"error": str(error)})


if __name__ == "__main__":
    main()
