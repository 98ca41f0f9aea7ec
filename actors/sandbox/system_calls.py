"""The system calls that untrusted code may make, as seccomp filters.

`program_filter` is for whole programs in the sandbox, on x86-64. It refuses sockets, new processes
and namespaces, mounts, tracing, memory that is a file (`memfd_create` and System V shared memory
escape the limit of memory), locks of files, keys, io_uring, performance counters, modules. Threads
may be made.
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
from collections.abc import Iterable

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
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
_NEW_NAMESPACES = 0x7E020080
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Commands of `fcntl`: duplicates and flags of descriptors, sizes of pipes; no locks or leases."""
_X32 = 0x40000000
_EPERM, _ENOSYS = 1, 38
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]


def program_filter() -> bytes:
    """Return the filter of a program in the kernel's format."""
    return _packed(
        [
            *_begin(MACHINE),
            (_EQUAL, 0, 1, _CLONE3),  # a filter cannot read its flags; libc falls back to clone
            (_RETURN, 0, 0, _ERROR | _ENOSYS),
            *_allow(ALLOWED.values()),
            (_EQUAL, 0, 2 * len(_FCNTL) + 2, 72),
            (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
            *_allow(_FCNTL),
            (_RETURN, 0, 0, _ERROR | _EPERM),
            (_EQUAL, 1, 0, _CLONE),
            (_RETURN, 0, 0, _ERROR | _EPERM),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
            (_RETURN, 0, 0, _ERROR | _EPERM),
            (_ANY_BIT, 1, 0, _CLONE_THREAD),
            (_RETURN, 0, 0, _ERROR | _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )


def compute_filter() -> bytes:
    """Return the filter of a process that only computes; raise OSError on other machines."""
    machine = platform.machine()
    if machine not in _COMPUTE:
        raise OSError(f"this machine is {machine}, must be {' or '.join(_COMPUTE)}")
    numbers = [int(number) for number in re.findall(r"\w+ (\d+)", _COMPUTE[machine])]
    refuse = (_RETURN, 0, 0, _ERROR | _EPERM)
    return _packed([*_begin(machine), *_allow(numbers), refuse])


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
    return [
        step for number in numbers for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW))
    ]


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
