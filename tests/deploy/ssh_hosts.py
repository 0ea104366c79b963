"""Hosts with an sshd each, in network namespaces of one machine, and a machine that reaches them.

Needs root, Debian's openssh-server and openssh-client, and iproute2. Each host has its own name,
address, /tmp and sshd, and all share the other folders, as hosts share a disk. The machine's own
ssh is neither used nor changed: keys and settings are new.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from deploy.campaign import NotPossible, awaited, command_lines, kill_all, require_programs
from support.network.namespaces import Host, RoutedHosts

PROGRAMS = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "ip", "nsenter", "unshare")
HEAD = "head"
"""The user's machine."""
SSHD_CONFIG = """\
ListenAddress {address}
HostKey {root}/host_key
AuthorizedKeysFile {root}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""
SSH_CONFIG = """\
Host *
    IdentityFile {root}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {root}/known_hosts
"""


class SshHosts:
    """Hosts of these names, each with an sshd, and a further machine, `head`, for `running`.
    `silent`: name of a host that has no sshd."""

    def __init__(self, names: Sequence[str], silent: str) -> None:
        needed = "openssh-server openssh-client iproute2"
        require_programs(PROGRAMS, "network namespaces and sshd", needed)
        self.names = tuple(names)
        self._silent = silent
        # /tmp would not do: each host has a folder of its own in its place.
        self.root = Path(tempfile.mkdtemp(prefix="shoal-ssh-", dir="/var/tmp"))
        self._ends = ExitStack()
        self._hosts: dict[str, Host] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        try:
            routed = self._ends.enter_context(RoutedHosts())
        except OSError as error:
            raise NotPossible(str(error)) from error
        for name in (*self.names, self._silent, HEAD):
            self._hosts[name] = routed.add(name)
            (self.root / name / "tmp").mkdir(parents=True)
            (self.root / name / "tmp").chmod(0o1777)
        self._write_files()
        for name in self.names:
            self._start_sshd(name)

    def close(self) -> None:
        """End all processes of the hosts, and remove their files."""
        for name in self._hosts:
            self._kill_all(name)
        for process in self._started:
            process.wait()
        self._ends.close()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def version(self) -> str:
        """The version of ssh, for example OpenSSH_9.2p1."""
        completed = subprocess.run(["ssh", "-V"], check=True, capture_output=True, text=True)
        return completed.stderr.partition(",")[0].strip()

    def popen(
        self, name: str, command: Sequence[str], cwd: Path, output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; the process returned is the command's own."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                self._inside(name, command),
                cwd=cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
            )
        self._started.append(process)
        return process

    def run(
        self, name: str, *command: str, within_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        return subprocess.run(
            self._inside(name, command),
            env=self._environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=within_s,
        )

    def temporary_files(self, name: str) -> list[str]:
        """Names of the files in a host's /tmp."""
        return sorted(path.name for path in (self.root / name / "tmp").iterdir())

    def lose(self, name: str) -> None:
        """Cut a host's network, and kill all its processes, as a loss of power does: no connection
        is closed."""
        path = self._hosts[name].path
        subprocess.run(
            ["nsenter", f"--net={path}", "ip", "link", "set", "eth0", "down"], check=True
        )
        self._kill_all(name)

    def kill(self, name: str) -> None:
        """Kill all processes of a host but its sshd."""
        kill_all(partial(self.processes, name), f"on {name}")

    def processes(self, name: str) -> dict[int, str]:
        """The command lines of the processes on a host, without its sshd."""
        return {pid: line for pid, line in self._all(name).items() if "sshd" not in line}

    def _all(self, name: str) -> dict[int, str]:
        """The processes on a host, without the one that holds its namespace."""
        inode, pids = Path(self._hosts[name].path).stat().st_ino, []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "ns" / "net").stat().st_ino == inode:
                    pids.append(int(entry.name))
        return {p: line for p, line in command_lines(pids).items() if "sleep infinity" not in line}

    def await_quiet(self, names: Sequence[str], within_s: float) -> None:
        """Wait until the hosts run only their sshd."""
        awaited(
            lambda: not any(self.processes(name) for name in names),
            within_s,
            f"the end of all processes on {', '.join(names)}",
        )

    # --- start ---

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.root),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }

    def _write_files(self) -> None:
        self.root.chmod(0o755)
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / name)],
                check=True,
            )
        hosts = "".join(f"{host.address} {name}\n" for name, host in self._hosts.items())
        (self.root / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (self.root / "ssh_config").write_text(SSH_CONFIG.format(root=self.root))
        key = (self.root / "host_key.pub").read_text()
        known = (*self.names, self._silent)
        (self.root / "known_hosts").write_text("".join(f"{name} {key}" for name in known))
        for name, host in self._hosts.items():
            config = SSHD_CONFIG.format(root=self.root, address=host.address)
            (self.root / name / "sshd_config").write_text(config)

    def _start_sshd(self, name: str) -> None:
        command = ("/usr/sbin/sshd", "-D", "-e", "-f", str(self.root / name / "sshd_config"))
        log = self.root / name / "sshd.log"
        process = self.popen(name, command, self.root, log)

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            return "Server listening" in log.read_text()

        awaited(serves, 30, f"the sshd of {name}")

    def _inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command on a host, with the host's name, address, hosts file and /tmp."""
        root = shlex.quote(str(self.root))
        script = (
            f"hostname {name} && mount --bind {root}/hosts /etc/hosts"
            f" && mount --bind {root}/ssh_config /etc/ssh/ssh_config"
            f" && mount --bind {root}/{name}/tmp /tmp"
            " && mount -t tmpfs none /run && mkdir -m 755 /run/sshd"
            ' && exec "$@"'
        )
        enter = ("nsenter", f"--net={self._hosts[name].path}", "unshare", "--uts", "--mount")
        return [*enter, "sh", "-c", script, "sh", *command]

    def _kill_all(self, name: str) -> None:
        kill_all(partial(self._all, name), f"on {name}")
