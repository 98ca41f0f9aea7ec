"""The system calls that untrusted code may make, as seccomp filters.

`program_filter` is for whole programs in the sandbox, on x86-64. It refuses sockets, new processes
and namespaces, mounts, tracing, memory that is a file (`memfd_create` and System V shared memory
escape the limit of memory), locks of files, keys, io_uring, performance counters, modules. Threads
may be made.
`agent_filter` is for agents and their children, in namespaces of their own: it allows processes,
sockets of TCP, UDP and Unix, and locks besides, but nothing else that the former refuses.
`compute_filter` is for a process that has loaded all it needs: it may compute, allocate memory,
write to what is open, and end. Every other call fails with EPERM. Imports nothing of ours: the
launcher loads it by its path.
"""

import ctypes
import os
import platform
import re
import struct
import sys
from collections.abc import Iterable, Sequence

TABLE = """
read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11
brk 12 rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 ioctl 16 pread64 17 pwrite64 18 readv 19
writev 20 access 21 pipe 22 select 23 sched_yield 24 mremap 25 msync 26 mincore 27 madvise 28
dup 32 dup2 33 pause 34 nanosleep 35 getitimer 36 alarm 37 setitimer 38 getpid 39 socketpair 53
execve 59 exit 60 wait4 61 kill 62 uname 63 fsync 74 fdatasync 75 truncate 76
ftruncate 77 getdents 78 getcwd 79 chdir 80 fchdir 81 rename 82 mkdir 83 rmdir 84 creat 85 link 86
unlink 87 symlink 88 readlink 89 chmod 90 fchmod 91 umask 95 gettimeofday 96 getrlimit 97
getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108 getppid 110
getpgrp 111 getgroups 115 getresuid 118 getresgid 120 getpgid 121 getsid 124 rt_sigpending 127
rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 utime 132 statfs 137 fstatfs 138
arch_prctl 158 gettid 186 time 201 futex 202 sched_getaffinity 204 getdents64 217
set_tid_address 218 restart_syscall 219 fadvise64 221 clock_gettime 228 clock_getres 229
clock_nanosleep 230 exit_group 231 epoll_wait 232 epoll_ctl 233 tgkill 234 utimes 235 waitid 247
openat 257 mkdirat 258 newfstatat 262 unlinkat 263 renameat 264 linkat 265 symlinkat 266
readlinkat 267 fchmodat 268 faccessat 269 pselect6 270 ppoll 271 set_robust_list 273 utimensat 280
epoll_pwait 281 fallocate 285 eventfd2 290 epoll_create1 291 dup3 292 pipe2 293 prlimit64 302
getcpu 309 renameat2 316 getrandom 318 membarrier 324 copy_file_range 326 statx 332 rseq 334
close_range 436 faccessat2 439 epoll_pwait2 441
"""
AGENT_TABLE = """
sendfile 40 connect 42 accept 43 sendto 44 recvfrom 45 sendmsg 46 recvmsg 47 shutdown 48 bind 49
listen 50 getsockname 51 getpeername 52 setsockopt 54 getsockopt 55 fork 57 vfork 58 flock 73
chown 92 fchown 93 lchown 94 setpgid 109 setsid 112 capget 125 mknod 133 getpriority 140
setpriority 141 sched_setparam 142 sched_getparam 143 sched_setscheduler 144 sched_getscheduler 145
sched_get_priority_max 146 sched_get_priority_min 147 sched_rr_get_interval 148 mlock 149
munlock 150 prctl 157 setrlimit 160 sync 162 readahead 187 getxattr 191 lgetxattr 192 fgetxattr 193
listxattr 194 llistxattr 195 flistxattr 196 tkill 200 sched_setaffinity 203 epoll_create 213
timer_create 222 timer_settime 223 timer_gettime 224 timer_getoverrun 225 timer_delete 226
inotify_init 253 inotify_add_watch 254 inotify_rm_watch 255 mknodat 259 fchownat 260 futimesat 261
get_robust_list 274 splice 275 tee 276 sync_file_range 277 signalfd 282 timerfd_create 283
eventfd 284 timerfd_settime 286 timerfd_gettime 287 accept4 288 signalfd4 289 inotify_init1 294
preadv 295 pwritev 296 recvmmsg 299 syncfs 306 sendmmsg 307 sched_setattr 314 sched_getattr 315
execveat 322 mlock2 325 preadv2 327 pwritev2 328 pidfd_send_signal 424 pidfd_open 434
openat2 437 fchmodat2 452
"""
"""Calls of an agent besides."""
ALLOWED = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", TABLE)}

MACHINE = "x86_64"
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COMPUTE = {
    "x86_64": """
read 0 write 1 close 3 fstat 5 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigreturn 15
sched_yield 24 mremap 25 madvise 28 getpid 39 exit 60 gettimeofday 96 getrusage 98 times 100
gettid 186 time 201 futex 202 restart_syscall 219 clock_gettime 228 clock_getres 229 exit_group 231
getrandom 318 rseq 334
""",
    "aarch64": """
close 57 lseek 62 read 63 write 64 fstat 80 exit 93 exit_group 94 futex 98 clock_gettime 113
clock_getres 114 sched_yield 124 restart_syscall 128 rt_sigreturn 139 times 153 getrusage 165
gettimeofday 169 getpid 172 gettid 178 brk 214 munmap 215 mremap 216 mmap 222 mprotect 226
madvise 233 getrandom 278 rseq 293
""",
}
"""Calls of a process that only computes, by machine."""
_CLONE, _FCNTL, _CLONE3, _CLONE_THREAD = 56, 72, 435, 0x10000
_SOCKET, _FAMILIES, _KINDS, _PROTOCOLS = 41, (1, 2, 10), (1, 2), (0, 6, 17)
"""Sockets of agents: Unix, IPv4, IPv6; streams and datagrams; TCP and UDP."""
_KIND_BITS = 0xF
_NEW_NAMESPACES = 0x7E020080
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, (16, 24, 32)
_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
"""Commands of `fcntl`: duplicates and flags of descriptors, sizes of pipes; no locks or leases."""
_AGENT_COMMANDS = (*_COMMANDS, 5, 6, 7, 8, 9, 36, 37, 38, 1031)
"""Locks and owners of descriptors besides; no leases."""
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]
_REFUSE: Instruction = (_RETURN, 0, 0, _ERROR | _EPERM)
_PERMIT: Instruction = (_RETURN, 0, 0, _ALLOW)


def program_filter() -> bytes:
    """Return the filter of a program in the kernel's format."""
    of_thread = [(_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSE]
    return _filter(ALLOWED.values(), _COMMANDS, of_thread, [])


def agent_filter() -> bytes:
    """Return the filter of an agent in the kernel's format."""
    numbers = [int(number) for number in re.findall(r"\w+ (\d+)", AGENT_TABLE)]
    of_socket = [
        (_LOAD, 0, 0, _ARGUMENTS_AT[0]), *_demand(_FAMILIES),
        (_LOAD, 0, 0, _ARGUMENTS_AT[1]), (_AND, 0, 0, _KIND_BITS), *_demand(_KINDS),
        (_LOAD, 0, 0, _ARGUMENTS_AT[2]), *_demand(_PROTOCOLS), _PERMIT,
    ]  # fmt: skip
    more = _where(_SOCKET, of_socket)
    return _filter([*ALLOWED.values(), *numbers], _AGENT_COMMANDS, [], more)


def _filter(
    numbers: Iterable[int],
    commands: Iterable[int],
    of_clone: list[Instruction],
    more: list[Instruction],
) -> bytes:
    """Return a filter that allows calls, commands of `fcntl`, `clone` on conditions, and `more`."""
    namespaces = [(_LOAD, 0, 0, _ARGUMENTS_AT[0]), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _REFUSE]
    of_fcntl = [(_LOAD, 0, 0, _ARGUMENTS_AT[1]), *_allow(commands), _REFUSE]
    return _packed(
        [
            *_begin(MACHINE),
            (_EQUAL, 0, 1, _CLONE3),  # a filter cannot read its flags; libc falls back to clone
            (_RETURN, 0, 0, _ERROR | _ENOSYS),
            *_allow(numbers),
            *_where(_FCNTL, of_fcntl),
            *_where(_CLONE, [*namespaces, *of_clone, _PERMIT]),
            *more,
            _REFUSE,
        ]
    )


def compute_filter() -> bytes:
    """Return the filter of a process that only computes; raise OSError on other machines."""
    machine = platform.machine()
    if machine not in _COMPUTE:
        raise OSError(f"this machine is {machine}, must be {' or '.join(_COMPUTE)}")
    numbers = [int(number) for number in re.findall(r"\w+ (\d+)", _COMPUTE[machine])]
    return _packed([*_begin(machine), *_allow(numbers), _REFUSE])


def install(program: bytes) -> None:
    """Install a filter for this process and for good; raise OSError if the kernel refuses it."""
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    whole = Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, argument in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole)),
    ):
        if libc.prctl(option, value, argument, None, None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")


def _begin(machine: str) -> list[Instruction]:
    """Refuse calls of another machine's kind, and load the number of the call."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]


def _allow(numbers: Iterable[int]) -> list[Instruction]:
    return [step for number in numbers for step in ((_EQUAL, 0, 1, number), _PERMIT)]


def _where(number: int, steps: list[Instruction]) -> list[Instruction]:
    """Take steps, which end the filter, for one call."""
    return [(_EQUAL, 0, len(steps), number), *steps]


def _demand(values: Sequence[int]) -> list[Instruction]:
    """Refuse the call unless the argument that was loaded is one of some values."""
    jumps = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*jumps, _REFUSE]


def _packed(program: Iterable[Instruction]) -> bytes:
    """Return one `struct sock_filter` after the other."""
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def probe() -> str:
    """Install the filter of `compute_filter` and return what this process can do all the same."""
    install(compute_filter())
    attempts = {
        "open a file": lambda: os.open("/", os.O_RDONLY),
        "start a process": os.fork,
        "see other processes": lambda: os.kill(os.getpid(), 0),
        "make a pipe": os.pipe,
    }
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
            done.append(name)
        except PermissionError:
            pass
    return f"it could {', '.join(done)}" if done else "walls stand"


if __name__ == "__main__":
    sys.stdout.write(probe())
