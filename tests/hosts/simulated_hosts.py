"""Several hosts on one machine: each has a network, processes, a host name, /tmp and /dev/shm of its own.

A host is a process in namespaces of its own, and a bridge in one more namespace is the network between them. Nothing of
it is in the machine's own network namespace, so no name or address can clash. All of it disappears with those
processes, which exit when a pipe from this process closes, however this one exits. The rest of the file system is
common to all hosts, as over NFS. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from programs import Program, wait_until

NAMESPACES = ("--net", "--mount", "--ipc", "--uts", "--pid")
BRIDGE = "switch"

SUBNET = "10.83.46"
SWITCH_ADDRESS = f"{SUBNET}.254"
FIRST_ADDRESS = 10
TCP_STATES = {"01": "established", "0A": "listening"}
SECONDS = 20.0
"""Deadline for steps that take milliseconds."""

REPOSITORY = Path(__file__).parents[2]

# The first process ignores SIGCHLD, so that orphans are reaped, and exits when the pipe to this program closes.
STAY = "echo ready; exec env --ignore-signal=CHLD cat > /dev/null"

# A directory below /tmp that all hosts share is mounted into the private /tmp before that is put in its place.
BOOT = f"""
set -e
hostname "$NAME"
mount --bind "$HOSTS_FILE" /etc/hosts
mount --bind "$RESOLVER_FILE" /etc/resolv.conf
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs "$STAGE"
for path; do mkdir -p "$STAGE/$path"; mount --bind "/tmp/$path" "$STAGE/$path"; done
mount --rbind "$STAGE" /tmp
{STAY}
"""


def why_impossible() -> str | None:
    """Return the reason why this machine cannot simulate hosts; None if it can."""
    if sys.platform != "linux":
        return "namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}, of iproute2 and util-linux"
    make = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "name", BRIDGE, "type", "bridge"]
    tried = subprocess.run(make, capture_output=True, text=True)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Socket(NamedTuple):
    state: str
    local: tuple[str, int]
    remote: tuple[str, int]


class Host:
    """A host that `HostNetwork.add` has created. It is killed when the network is closed, if not before."""

    def __init__(self, *, name: str, ip: str, boot: Program, directory: Path) -> None:
        self.name = name
        self.ip = ip
        (self.pid,) = boot.children()
        """Process id of its first process in this machine's namespace. The host exists while that runs."""
        self._boot = boot
        self._directory = directory
        self._programs: list[Program] = []
        self._pid_namespace = os.readlink(f"/proc/{self.pid}/ns/pid")

    @property
    def enter(self) -> list[str]:
        """Prefix of a command that runs it on this host, as the only child."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--"]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Program:
        """Start `command` on this host, with this program's PATH and the private /tmp as its home."""
        base = {"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        log = self._directory / f"{self.name}-{len(self._programs)}.log"
        program = Program([*self.enter, *command], env={**base, **(env or {})}, log=log)
        self._programs.append(program)
        return program

    def run(self, command: Sequence[str], *, timeout: float = SECONDS) -> str:
        """Return the stdout of `command`. Raises `RuntimeError` if it fails, `TimeoutError` if it takes too long."""
        return self.start(command).output(timeout)

    def path(self, path: str) -> Path:
        """Return the path at which this program reaches the host's own /tmp/x or /dev/shm/x."""
        return Path(f"/proc/{self.pid}/root{path}")

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes, by process id in this machine's namespace."""
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has exited, or belongs to another user
                if os.readlink(entry / "ns" / "pid") == self._pid_namespace and int(entry.name) != self.pid:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line:  # without one: a zombie
                        found[int(entry.name)] = line
        return found

    def sockets(self, pid: int) -> list[Socket]:
        """Return the TCP sockets of a process; `pid` is that in this machine's namespace."""
        own: set[str] = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                own.add(os.readlink(descriptor))
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        ]
        return [
            Socket(TCP_STATES.get(line[3], "other"), _address(line[1]), _address(line[2]))
            for line in lines
            if f"socket:[{line[9]}]" in own
        ]

    def kill(self) -> None:
        """Kill every process at once. The kernel still closes their connections: `cut` it first for a power failure.

        Harmless when repeated.
        """
        self._boot.close()
        wait_until(lambda: not self.processes(), f"the end of {self.name}", SECONDS)
        for program in self._programs:
            program.close()


class HostNetwork:
    """Hosts and a switch between them. Created by `host_network`."""

    def __init__(self, directory: Path, switch: Program, stack: ExitStack) -> None:
        self.hosts: list[Host] = []
        self.directory = directory
        self._switch = switch
        self._stack = stack

    def add(self) -> Host:
        """Start one more host and connect it."""
        index = len(self.hosts)
        name, ip = f"host{index}", f"{SUBNET}.{FIRST_ADDRESS + index}"
        host = Host(name=name, ip=ip, boot=self._boot(name), directory=self.directory)
        self.hosts.append(host)
        self._stack.callback(host.kill)
        port = _port(host)
        self._on_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._on_switch("link", "set", port, "master", BRIDGE, "up")
        _ip(host.pid, "link", "set", "lo", "up")
        _ip(host.pid, "address", "add", f"{ip}/24", "dev", "eth0")
        _ip(host.pid, "link", "set", "eth0", "up")
        _ip(host.pid, "route", "add", "default", "via", SWITCH_ADDRESS)
        return host

    def cut(self, host: Host) -> None:
        """Drop all packets to and from `host`, without a link going down on any network card."""
        self._on_switch("link", "set", _port(host), "nomaster")

    def heal(self, host: Host) -> None:
        """Undo `cut`."""
        self._on_switch("link", "set", _port(host), "master", BRIDGE)

    def _boot(self, name: str) -> Program:
        names = self.directory / f"{name}.hosts"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")  # as Debian does: a name is not an address
        resolver = self.directory / f"{name}.resolver"
        resolver.write_text("nameserver 127.0.0.1\n")  # no server listens there, so a lookup fails at once
        stage = self.directory / f"{name}.stage"
        stage.mkdir()
        boot = Program(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", BOOT, "sh", *self._shared()],
            env={
                "PATH": os.environ["PATH"],
                "NAME": name,
                "HOSTS_FILE": str(names),
                "RESOLVER_FILE": str(resolver),
                "STAGE": str(stage),
            },
            log=self.directory / f"{name}-boot.log",
        )
        with ExitStack() as undo:
            undo.callback(boot.close)
            boot.line_with("ready", SECONDS)
            undo.pop_all()
        return boot

    def _shared(self) -> list[str]:
        """Return the paths below this machine's /tmp that tests need, relative to it."""
        needed = {self.directory, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
        return sorted(str(path.relative_to("/tmp")) for path in needed if path.is_relative_to("/tmp"))

    def _on_switch(self, *arguments: str) -> None:
        _ip(self._switch.pid, *arguments)


@contextmanager
def host_network(directory: Path) -> Iterator[HostNetwork]:
    """Open a network without hosts, and remove everything of it afterwards. All hosts share `directory`, for logs."""
    with ExitStack() as stack:
        switch = Program(["unshare", "--net", "sh", "-c", STAY], env=os.environ, log=directory / "switch.log")
        stack.callback(switch.close)
        switch.line_with("ready", SECONDS)
        _ip(switch.pid, "link", "add", "name", BRIDGE, "type", "bridge")
        _ip(switch.pid, "address", "add", f"{SWITCH_ADDRESS}/24", "dev", BRIDGE)
        _ip(switch.pid, "link", "set", BRIDGE, "up")
        yield HostNetwork(directory, switch, stack)


def _address(text: str) -> tuple[str, int]:
    """Parse an address and port of /proc/net/tcp or tcp6: 32-bit words in this machine's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)


def _port(host: Host) -> str:
    """Return the name of the switch's end of the host's link."""
    return f"to-{host.name}"


def _ip(pid: int, *arguments: str) -> None:
    """Run `ip` in the network of the process `pid`."""
    command = ["nsenter", f"--target={pid}", "--net", "ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
