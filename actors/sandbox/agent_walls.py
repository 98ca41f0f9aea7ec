"""The sandbox of an agent: all that its program and the children of it see and reach.

    guard ─fork─▶ keeper ─new namespaces, fork─▶ init (pid 1: a root of its own, no rights)
      ▲ ▲           │ listens at the gateway's address        │ fork
      │ └───────────┘ in a network of its own                 ▼
      └ joins what connects there with the real gateway    program ─▶ its children

A socket stays in the network in which it was made: the guard, outside, accepts from the keeper's.
Any interpreter may load this file; it imports the standard library and two files beside it.
"""

import fcntl
import os
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from actors.sandbox import linux, system_calls
else:  # loaded by its folder
    import linux
    import system_calls

SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8914, 0x8916, 1
MOST_CONNECTIONS = 256
"""Connections of one program to the gateway at once; further ones wait."""
RETRY_SECONDS = 0.1
HOSTS = "127.0.0.1 localhost sandbox\n"
USERS = "agent:x:{0}:{0}::/tmp:/bin/sh\n"


def enter(config: dict[str, Any], status: int) -> None:
    """Make a sandbox from a fork of the guard; return in the program's process, which is in it.

    `config` has `folder`, which is writable, `paths`, which are visible, `covers`, folders in them
    that are not, `user`, and `gateway`: host and port. `status` is a socket to the guard.
    """
    try:
        linux.end_with_parent()
        os.umask(0o022)
        host, port = config["gateway"]
        address = socket.gethostbyname(host)
        linux.unshare()
        with listen(address, port) as server, socket.socket(fileno=os.dup(status)) as guard:
            socket.send_fds(guard, [b"\n"], [server.fileno()])
        if init := os.fork():
            linux.wait_as_init(init)
            os._exit(0)
        linux.end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler
        build_root(config, f"{HOSTS}{address} {host}\n")
        linux.drop_rights(config["user"])
        if program := os.fork():
            os.write(status, b"%d\n" % linux.wait_as_init(program))
            os._exit(0)
        linux.prctl("dumpable", linux.PR_SET_DUMPABLE, 1)  # it may look at itself in /proc
        os.setsid()
    except BaseException as error:  # noqa: BLE001  (the end of standard error is reported)
        os.write(2, f"the sandbox was not made: {error}\n".encode())
        os._exit(1)


def close_doors() -> None:
    """Limit the system calls of this process, the program, for good."""
    system_calls.install(system_calls.agent_filter())


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an IPv4 address in the network of this process."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as network:
        if not address.startswith("127."):
            fields = socket.AF_INET, 0, socket.inet_aton(address)
            fcntl.ioctl(network, SIOCSIFADDR, struct.pack("16sHH4s16x", b"lo:1", *fields))
        fcntl.ioctl(network, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    return socket.create_server((address, port))


def build_root(config: dict[str, Any], hosts: str) -> None:
    """Change to a new root of the visible paths, /proc, a private /tmp and the writable folder."""
    folder = config["folder"]
    writable = {"/tmp": f"{folder}/tmp", folder: folder}
    covers = {*config["covers"], os.path.dirname(folder)} - {*writable}
    visible = [path for path in config["paths"] if os.path.exists(path) and path not in writable]
    links = {path: os.readlink(path) for path in visible if os.path.islink(path)}
    sources = {path: path for path in visible if path not in links} | writable
    opened = {path: os.open(source, os.O_PATH) for path, source in sources.items()}
    root = linux.new_root()
    linux.mount("proc", new_folder(f"{root}/proc"), "proc", linux.SAFE | linux.MS_NOEXEC)
    shared = new_folder(f"{root}/dev/shm")
    linux.mount("shm", shared, "tmpfs", linux.SAFE | linux.MS_NOEXEC, "size=64m,mode=1777")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.mkdir(f"{root}/etc")
    for name, text in {
        "hosts": hosts,
        "passwd": USERS.format(config["user"] or os.getuid()),
    }.items():
        with open(f"{root}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    for path in sorted({*opened, *links, *covers}):  # a folder before what is in it
        target = root + path
        if path in covers:
            linux.mount("cover", new_folder(target), "tmpfs", linux.SAFE, "size=64k,mode=755")
        elif path in writable:
            linux.bind(f"/proc/self/fd/{opened[path]}", target, linux.SAFE)
        elif not os.path.lexists(target):  # else it is in a folder that is visible
            if path in links:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.symlink(links[path], target)
            else:
                linux.bind(f"/proc/self/fd/{opened[path]}", target)
    for path in covers:
        linux.remount_read_only(root + path)
    linux.enter_root(root)


def new_folder(path: str) -> str:
    """Return the path of a folder, which is made where there is none."""
    os.makedirs(path, exist_ok=True)
    return path


def serve(status: socket.socket, gateway: tuple[str, int]) -> None:
    """Let a sandbox reach the gateway, as soon as its keeper listens and as long as this lives."""
    _, servers, *_ = socket.recv_fds(status, 1, 1)
    if servers:  # else the keeper has failed
        server = socket.socket(fileno=servers[0])
        threading.Thread(target=_forward, args=(server, gateway), daemon=True).start()


def reported(status: socket.socket) -> int:
    """Return how the program of a sandbox that has ended did, or -SIGKILL if that ended it."""
    return int(status.recv(99) or -signal.SIGKILL)


def _forward(server: socket.socket, gateway: tuple[str, int]) -> None:
    free = threading.BoundedSemaphore(MOST_CONNECTIONS)
    while True:
        free.acquire()
        try:
            client, _ = server.accept()
            threading.Thread(target=_join, args=(client, gateway, free), daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor or thread is left; the client asks again
            free.release()
            time.sleep(RETRY_SECONDS)


def _join(client: socket.socket, gateway: tuple[str, int], free: threading.Semaphore) -> None:
    """Join a connection with one to the gateway until both directions have ended."""
    try:
        with suppress(OSError), client, socket.create_connection(gateway) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
            answers.start()
            _pass_on(client, server)
            answers.join()
    finally:
        free.release()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass on all bytes of one direction, and its end."""
    try:
        while block := source.recv(1 << 16):
            target.sendall(block)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone, and so is the connection
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
