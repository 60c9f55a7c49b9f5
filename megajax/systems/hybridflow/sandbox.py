"""Runs Python source that nobody has read, such as the programs that a model writes, confined.

`run` starts one Python process for each program. The process shows this file to the interpreter,
confines itself, and only then executes the program:

    user, network, process, IPC and mount namespaces   no interface of the network, no other process
    a tmpfs over the working folder                    its files vanish with the process; bounded
    Landlock                                           no file but that folder, Python's library,
                                                       the system's shared libraries and /dev/null
    seccomp                                            no socket, no new process, no other program,
                                                       no change of a file's owner, mode or times,
                                                       no memory that the limits do not count, none
                                                       of the kernel's rarely used interfaces
    resource limits                                    memory, size of a file, descriptors, core

The environment is empty and descriptors above 2 are closed. A program that asks for what is refused
gets PermissionError (or OSError) from Python. The first of these that the kernel lacks raises
SandboxError: there is no weaker mode. Existence and size of files outside remain visible to `stat`.

Floor: systems. No jax. Source: HybridFlow (arXiv 2409.19256) leaves rewards to the user; programs
as rewards need this. Linux 5.13 or later, x86-64 or aarch64.
"""

import contextlib
import ctypes
import errno
import os
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import NamedTuple, NoReturn

OUTPUT = 2**20  # (chosen) bytes of standard output and error together
SOURCE = 2**22  # (chosen) bytes of a program, and of its standard input
FOLDER = 2**25  # (chosen) bytes of the files that a program may leave in its folder
FILES = 1024  # (chosen) files of that folder
START = 30.0  # (chosen) seconds in which the process must have confined itself, on a busy machine
MEMORY_EXIT = 77  # exit code of a program that ended with MemoryError
LEAST_MEGABYTES = 64  # (measured with CPython 3.12: 40 are in use before a program begins)
MOST_MEGABYTES = 2**20  # (chosen) a tebibyte

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID = 0x10000000, 0x40000000, 0x20000000
CLONE_NEWIPC, CLONE_NEWNS, CLONE_NEWUTS = 0x08000000, 0x00020000, 0x04000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS | CLONE_NEWUTS
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 38, 4, 22
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18

# landlock(7): rights of the file system by the version of the interface that knows them
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
LANDLOCK_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
DEVICES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # make a character device, socket, pipe, block device

# System calls that a program is refused, x86-64 and aarch64. A number of None: the call does not
# exist there.
REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
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
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "personality": (135, 92),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # Memory that no limit of this process counts: segments and queues outlive its mappings.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "seccomp": (317, 277),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of REFUSED, AUDIT_ARCH
CLONE, CLONE3 = (56, 220), (435, 435)


class SandboxError(RuntimeError):
    """The kernel lacks a means of confinement, or the process could not be started."""


class Result(NamedTuple):
    """How a program ended.

    status: 'ok' (exit code 0), 'error' (another code, an exception or a signal), 'timeout',
    'memory' (a MemoryError that the program did not catch) or 'output' (more than a mebibyte).
    stdout, stderr: what it wrote, decoded as UTF-8, bytes that are none replaced.
    """

    status: str
    stdout: str
    stderr: str


def run(source: str, *, stdin: str = "", seconds: float = 2.0, megabytes: int = 256) -> Result:
    """Runs a Python program confined and returns how it ended. Nothing of it remains afterwards.

    Args: source: of the program, at most 4 MiB; it runs as __main__, with the standard library and
        no package. stdin: its standard input. seconds: wall time from its first line on.
        megabytes: of address space, the interpreter's 40 included; at least 64.

    Raises: ValueError for arguments out of range; SandboxError if this machine cannot confine.
    """
    if not (isinstance(seconds, int | float) and 0 < seconds <= 86400):
        raise ValueError(f"seconds={seconds!r} must be a number above 0, at most 86400 (a day)")
    if not isinstance(megabytes, int) or not LEAST_MEGABYTES <= megabytes <= MOST_MEGABYTES:
        raise ValueError(
            f"megabytes={megabytes!r} must be an integer from {LEAST_MEGABYTES} to {MOST_MEGABYTES}"
        )
    for name, text in (("source", source), ("stdin", stdin)):
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a str, not {type(text).__name__}")
    program, data = (text.encode("utf-8", "surrogatepass") for text in (source, stdin))
    for name, size in (("source", len(program)), ("stdin", len(data))):
        if size > SOURCE:
            raise ValueError(f"{name} has {size} bytes; a program may have at most {SOURCE}")
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        raise SandboxError(
            f"programs are confined on Linux, x86_64 or aarch64; this is {sys.platform} "
            f"{os.uname().machine}"
        )
    folder = tempfile.mkdtemp(prefix="megajax-sandbox-")
    try:
        return _run(folder, program, data, float(seconds), megabytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: str, program: bytes, data: bytes, seconds: float, megabytes: int) -> Result:
    """Starts the process, reads what it writes and ends it."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as stdin:
        for file, content in ((source, program), (stdin, data)):
            file.write(content)
            file.seek(0)
        told, tell = os.pipe()
        command = (sys.executable, "-I", "-S", "-B", os.path.abspath(__file__))
        command += (folder, str(megabytes), str(source.fileno()), str(tell))
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=(source.fileno(), tell),
                start_new_session=True,
            )
        except OSError as error:
            os.close(told)
            raise SandboxError(f"cannot start {sys.executable}: {error}") from error
        finally:
            os.close(tell)
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    status, word = "", bytearray()
    end = time.monotonic() + START
    try:
        with selectors.DefaultSelector() as selector:
            for number in (told, *streams):
                selector.register(number, selectors.EVENT_READ)
            while not status and selector.get_map():
                seconds_left = end - time.monotonic()
                if seconds_left <= 0:
                    status = "timeout"
                    break
                for key, _ in selector.select(seconds_left):
                    piece = os.read(key.fd, 2**16)
                    if not piece:
                        selector.unregister(key.fd)
                    elif key.fd != told:
                        streams[key.fd] += piece
                        if sum(map(len, streams.values())) > OUTPUT:
                            status = "output"
                    else:
                        word += piece
                        if word == b"ready":  # the program's time begins
                            end = time.monotonic() + seconds
        if not status:  # the streams are closed, but the program may go on
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "timeout"
    finally:
        # The process is the leader of its group and the parent of the first process of the
        # namespace, which dies with it; the namespace's other processes die with that one.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = process.wait()
        process.stdout.close()
        process.stderr.close()
        os.close(told)
    output, errors = (bytes(text[:OUTPUT]).decode(errors="replace") for text in streams.values())
    if word != b"ready":
        reason = word.decode(errors="replace") or errors.strip()[-500:] or f"exit code {code}"
        if status == "timeout":
            reason = f"it had not confined itself after {START:g} seconds"
        raise SandboxError(f"cannot confine a program on this machine: {reason}")
    if not status:
        status = "ok" if code == 0 else "memory" if code == MEMORY_EXIT else "error"
    return Result(status, output, errors)


# ---- what the started process does, without megajax


class _Landlock(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _restrict_files(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: the program's folder to read and write, Python and shared libraries to read."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    _check(version, "Landlock (Linux 5.13 or later, enabled by lsm=landlock)")
    rights = LANDLOCK_RIGHTS[max(n for n in LANDLOCK_RIGHTS if n <= version)]
    rules = _Landlock(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    _check(ruleset, "landlock_create_ruleset")
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    shared = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")}
    allowed = [(path, EXECUTE | READ_FILE | READ_DIR) for path in sorted(library | shared)]
    allowed += [("/dev/null", READ_FILE | WRITE_FILE), (folder, rights & ~(EXECUTE | DEVICES))]
    for path, mask in allowed:
        try:
            number = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rule = _Beneath(mask & rights, number)
        _check(libc.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0), f"Landlock {path}")
        os.close(number)
    _check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _refuse_calls(libc: ctypes.CDLL) -> None:
    """seccomp: REFUSED fail with EPERM, clone makes threads only, another ABI ends the process."""
    column, arch = MACHINES[os.uname().machine]
    numbers = sorted(n for pair in REFUSED.values() if (n := pair[column]) is not None)
    load, equal, least, test, leave = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    # Jumps are counted from the next instruction.
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (leave, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:  # the x32 ABI has numbers of its own
        code += [(least, 0, 1, 0x40000000), (leave, 0, 0, kill)]
    for number in numbers:
        code += [(equal, 0, 1, number), (leave, 0, 0, refuse | errno.EPERM)]
    # glibc falls back to clone, whose flags can be read, if clone3 does not exist
    code += [(equal, 0, 1, CLONE3[column]), (leave, 0, 0, refuse | errno.ENOSYS)]
    code += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (test, 1, 0, CLONE_THREAD)]
    code += [(leave, 0, 0, refuse | errno.EPERM), (leave, 0, 0, allow)]
    filters = b"".join(struct.pack("HBBI", *row) for row in code)
    buffer = ctypes.create_string_buffer(filters, len(filters))
    program = _Program(len(code), ctypes.addressof(buffer))
    _check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _confine(folder: str, megabytes: int) -> None:
    """Confines this process, which becomes the first of a new process namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES) < 0:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"no namespaces for users ({os.strerror(number)}); see sysctl "
            "kernel.unprivileged_userns_clone, user.max_user_namespaces and "
            "kernel.apparmor_restrict_unprivileged_userns",
        )
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"65534 {user} 1"),
        ("gid_map", f"65534 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:  # waits for the first process of the namespace and passes its exit code on
        for number in range(3):
            os.close(number)
        _, code = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(code)
        os._exit(code if code >= 0 else 128 - code)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount namespace")
    options = f"size={FOLDER},nr_inodes={FILES},mode=700".encode()
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), "mount of a tmpfs")
    os.chdir(folder)
    for limit, most in (
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, FOLDER),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(libc, folder)
    # no capability in the new namespace: version 3, two empty sets
    header, sets = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, sets), "capset")
    _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    _refuse_calls(libc)


def _main(folder: str, megabytes: str, source: str, tell: str) -> NoReturn:
    """Confines the process and runs the program; its exit code says how the program ended."""
    with open(int(source), "rb") as file:
        program = file.read()
    try:
        _confine(folder, int(megabytes))
    except OSError as error:
        os.write(int(tell), (error.strerror or str(error)).encode()[:1000])
        os._exit(1)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["program"]
    os.write(int(tell), b"ready")
    os.close(int(tell))
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except SystemExit as end:  # the program's own 77 does not mean a lack of memory
        sys.exit(1 if end.code == MEMORY_EXIT else end.code)
    except MemoryError:
        with contextlib.suppress(BaseException):  # perhaps there is none for this, either
            sys.stdout.flush()
            sys.stderr.write("MemoryError\n")
            sys.stderr.flush()
        os._exit(MEMORY_EXIT)
    except BaseException as error:  # as the interpreter prints it, without this file's frame
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
