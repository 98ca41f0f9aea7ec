"""Starts a program in the sandbox, through three nested processes.

    launcher ─new namespaces─▶ init (pid 1: mounts, a root of its own, no rights) ─▶ the program

It runs as `python -I -S launcher.py CONFIG_FD STATUS_FD`, and imports nothing of Headway but two
files beside it. CONFIG is JSON (`sandbox.Sandbox` writes it). STATUS receives lines of JSON, each
with the time in `at`: `{"started": true}` just before the program begins, then `{"exit": code}` or
`{"signal": number}`; or `{"error": text}`, with `"started": null` if the program did not begin
after all. Every step must succeed before the next: no program runs with an incomplete barrier.

Barriers: user (unless started by root, who becomes nobody), mount, pid, network, IPC and UTS
namespaces; a read-only root of the standard library and what a recipe names; one small writable
folder; limits of memory, time, file size, files and threads; no capabilities; a list of allowed
system calls. On SIGTERM the launcher ends init, and with it all the rest, and leaves no zombie of
it to process 1; when the launcher is killed, the kernel ends init.
"""

import json
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from actors.sandbox import linux, system_calls
else:  # the isolated interpreter does not look for modules beside its program
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import linux
    import system_calls


def hide_packages(folder: str, paths: list[str]) -> None:
    """Cover a folder of packages by one that only adds some paths to those of Python."""
    linux.mount("packages", folder, "tmpfs", linux.SAFE | linux.MS_NOEXEC, "size=64k,mode=755")
    with open(f"{folder}/recipe.pth", "w", encoding="utf-8") as file:
        file.write("\n".join(paths))
    linux.remount_read_only(folder, linux.SAFE | linux.MS_NOEXEC)


def build_root(config: dict[str, Any]) -> None:
    """Change to a new root that holds the paths of the config, a few devices and /work."""
    sources = {path: os.open(path, os.O_PATH) for path in config["paths"]}
    root = linux.new_root()
    os.mkdir(f"{root}/work")
    size = f"size={config['disk_bytes']},nr_inodes={config['files']},mode=1777"
    linux.mount("work", f"{root}/work", "tmpfs", linux.SAFE | linux.MS_NOEXEC, size)
    for path in config["paths"]:
        linux.bind(f"/proc/self/fd/{sources[path]}", root + path)
    for path in config["packages"]:
        hide_packages(root + path, config["more_paths"])
    if not os.path.exists(f"{root}/tmp"):  # else it has a folder of the config
        os.symlink("work", f"{root}/tmp")
    with open(f"{root}/work/program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(config["program"])
    os.chmod(f"{root}/work/program.py", 0o644)
    linux.enter_root(root)
    os.chdir("/work")


def report(status: int, what: dict[str, Any]) -> None:
    """Write a status line; the clock is the same in all processes."""
    line = json.dumps({**what, "at": time.monotonic()})
    os.write(status, line.encode() + b"\n")


def run_program(config: dict[str, Any], program_filter: bytes, status: int) -> NoReturn:
    """Replace this process by the program."""
    try:
        os.setsid()
        for name, most in config["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        os.closerange(3, status)
        os.closerange(status + 1, 1 << 16)  # status itself is closed by exec
        system_calls.install(program_filter)
        report(status, {"started": True})
        os.execve(config["command"][0], config["command"], config["environment"])
    except BaseException as error:  # noqa: BLE001  (reported as status)
        report(status, {"error": f"the program was not started: {error}", "started": None})
    os._exit(1)


def run_init(config: dict[str, Any], program_filter: bytes, status: int) -> NoReturn:
    """Run pid 1 of the sandbox, which the program cannot signal: build it, start the program."""
    try:
        linux.end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler
        build_root(config)
        linux.drop_rights(config["user"])
        child = os.fork()
        if child == 0:
            run_program(config, program_filter, status)
        code = linux.wait_as_init(child)
        report(status, {"exit": code} if code >= 0 else {"signal": -code})
    except BaseException as error:  # noqa: BLE001  (reported as status)
        report(status, {"error": str(error)})
    os._exit(0)


def main() -> None:
    """Read the config, enter the namespaces, and wait for init."""
    status = int(sys.argv[2])
    try:
        with open(int(sys.argv[1]), encoding="utf-8", errors="surrogatepass") as file:
            config = json.load(file)
        os.set_inheritable(status, False)
        linux.end_with_parent(signal.SIGTERM)
        if os.getppid() != config["parent"]:
            return
        config["user"] = linux.own_user()
        program_filter = system_calls.program_filter()
        linux.unshare()
        child = os.fork()
        if child == 0:
            run_init(config, program_filter, status)

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
