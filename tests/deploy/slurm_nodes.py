"""A Slurm cluster of several nodes on one machine, in network namespaces.

Needs root, Debian's slurm-wlm and munge, and iproute2. Each node has its own host name, address,
/tmp and slurmd. All of them share one folder, as nodes share a disk. The namespaces are connected
to each other by a bridge in a namespace of its own, and to nothing else: the host's interfaces,
/etc/hosts, Slurm and munge are not touched.

All processes run in these namespaces. `close` kills them, by their ids, and removes namespaces and
files. The next run removes the leftovers of a killed run.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from deploy.campaign import NotPossible, awaited, command_lines, kill_all, require_programs

from shoal_client.local.etcd import find_etcd

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "munged", "ip", "unshare")
PREFIX = "shoal-slurm-"
FOLDERS = Path("/var/tmp")
"""The parent of the shared folder. /tmp would not do: each node has a folder of its own in its
place."""
HUB = "hub"
SLURMD_TIMEOUT_S = 15
CONFIG = """\
ClusterName=shoal
SlurmctldHost=hub
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
SlurmUser=root
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
SlurmdTimeout={timeout_s}
ReturnToService=2
NodeName=node[1-{num_nodes}] CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes:
    """The cluster, for `running`. Nodes are node1, node2, ..."""

    def __init__(self, num_nodes: int) -> None:
        needed = "slurm-wlm munge iproute2"
        require_programs(PROGRAMS, "network namespaces and slurmd", needed)
        self._tag = f"{PREFIX}{os.getpid()}-"
        self.names = [f"node{number}" for number in range(1, num_nodes + 1)]
        self.root = Path(tempfile.mkdtemp(prefix=self._tag, dir=FOLDERS))
        self.shared = self.root / "shared"
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        _remove_leftovers()
        self._make_network()
        self._write_files()
        self._start_daemons()

    def close(self) -> None:
        """End all processes of the cluster, and remove its namespaces and files."""
        for place in (*self.names, HUB):
            self._kill_all(place)
            subprocess.run(
                ["ip", "netns", "del", self._tag + place], check=False, capture_output=True
            )
        for process in self._started.values():
            process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def version(self) -> str:
        """Slurm's version as it prints it, for example slurm-wlm 22.05.8."""
        return subprocess.run(
            ["slurmd", "-V"], check=True, capture_output=True, text=True
        ).stdout.strip()

    # --- commands of a user ---

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run one of Slurm's commands in the controller's namespace, and return its output."""
        done = subprocess.run(
            self._inside(HUB, command),
            env={**self._environment, **variables},
            cwd=cwd or self.shared,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """Submit a batch script from the folder, with these variables; return the job's id."""
        printed = self.run("sbatch", "--parsable", "--export=ALL", *arguments, cwd=cwd, **variables)
        return printed.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        printed = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(word.split("=", 1) for word in printed.split() if "=" in word)

    def await_end(self, job_id: str, within_s: float) -> dict[str, str]:
        """Return the fields of the job once it has ended for good."""

        def ended() -> dict[str, str] | None:
            fields = self.job(job_id)
            over = fields["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
            return fields if over else None

        return awaited(ended, within_s, f"the end of Slurm's job {job_id}")

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait until no node has one."""
        self.run("scancel", "--user=root")
        self._await_idle()

    # --- faults ---

    def lose(self, name: str) -> None:
        """Cut a node's network, and kill its slurmd and everything else on it, as a loss of power
        does: no connection is closed."""
        _ip("-n", self._tag + HUB, "link", "set", name, "down")
        self._kill_all(name)
        self._started.pop(name).wait()

    def kill(self, name: str, pids: Sequence[int]) -> None:
        """Kill some of a node's processes."""
        for pid in set(pids) & set(self._pids(name)):
            os.kill(pid, signal.SIGKILL)

    def revive(self, name: str) -> None:
        """Start a lost node's slurmd again, and wait until Slurm can use the node."""
        shutil.rmtree(self.root / name)
        _ip("-n", self._tag + HUB, "link", "set", name, "up")
        self._start_slurmd(name)
        self._await_idle()

    def processes(self, name: str) -> dict[int, str]:
        """The command lines of the processes on a node, without slurmd."""
        found = command_lines(self._pids(name)).items()
        return {pid: line for pid, line in found if "slurmd -D" not in line}

    # --- start ---

    @property
    def _environment(self) -> dict[str, str]:
        paths = [str(self.root / "bin"), str(Path(sys.executable).parent)]
        return {
            "PATH": ":".join(
                [*paths, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
            ),
            "HOME": str(self.shared),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.root / "etc" / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def _make_network(self) -> None:
        hub = self._tag + HUB
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "addr", "add", "10.77.0.100/24", "dev", "bridge")
        for device in ("bridge", "lo"):
            _ip("-n", hub, "link", "set", device, "up")
        for number, name in enumerate(self.names, 1):
            space = self._tag + name
            _ip("netns", "add", space)
            # Create both ends inside the namespaces.
            _ip(
                "-n",
                hub,
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            _ip("-n", hub, "link", "set", name, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")

    def _write_files(self) -> None:
        # Slurm and munge refuse files that others may write.
        self.root.chmod(0o755)
        for name in ("etc", "state", "bin", "shared"):
            (self.root / name).mkdir()
        hosts = ["127.0.0.1 localhost", f"10.77.0.100 {HUB}"]
        hosts += [f"10.77.0.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.root / "etc" / "hosts").write_text("\n".join(hosts) + "\n")
        config = CONFIG.format(
            root=self.root, num_nodes=len(self.names), timeout_s=SLURMD_TIMEOUT_S
        )
        (self.root / "etc" / "slurm.conf").write_text(config)
        (self.root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.root / "bin" / "etcd").symlink_to(find_etcd())

    def _start_daemons(self) -> None:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.root}/munge.{ending}" for option, ending in files.items()]
        munged = (
            *("munged", "--foreground", "--force"),
            *options,
            f"--log-file={self.root}/munge.log",
        )
        self._start("munged", HUB, munged)
        awaited((self.root / "munge.socket").exists, 20, "munged's socket")
        self._start("slurmctld", HUB, ("slurmctld", "-D", "-c"))
        for name in self.names:
            self._start_slurmd(name)
        self._await_idle()

    def _start_slurmd(self, name: str) -> None:
        (self.root / name / "tmp").mkdir(parents=True)
        (self.root / name / "tmp").chmod(0o1777)
        self._start(name, name, ("slurmd", "-D"))

    def _start(self, daemon: str, place: str, command: Sequence[str]) -> None:
        with (self.root / f"{daemon}.out").open("ab") as log:
            self._started[daemon] = subprocess.Popen(
                self._inside(place, command),
                env=self._environment,
                cwd=self.shared,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _inside(self, place: str, command: Sequence[str]) -> list[str]:
        """The command on a node, with the node's host name, hosts file, address and /tmp."""
        own_tmp = "" if place == HUB else f"mount --bind '{self.root}/{place}/tmp' /tmp && "
        script = (
            f"hostname {place} && mount --bind '{self.root}/etc/hosts' /etc/hosts && {own_tmp}"
            'exec "$@"'
        )
        enter = ["ip", "netns", "exec", self._tag + place, "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", script, "sh", *command]

    def _await_idle(self) -> None:
        def idle() -> bool:
            ended = [name for name, each in self._started.items() if each.poll() is not None]
            assert not ended, f"{ended}: {self._logs(ended)}"
            with suppress(AssertionError):  # slurmctld does not answer yet
                states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
                return len(states) == len(self.names) and set(states) == {"idle"}
            return False

        awaited(idle, 60, "idle nodes")

    def _logs(self, names: Sequence[str]) -> str:
        paths = [self.root / f"{name}.{ending}" for name in names for ending in ("out", "log")]
        return "\n".join(
            path.read_text(errors="replace")[-2000:] for path in paths if path.exists()
        )

    # --- end ---

    def _pids(self, place: str) -> list[int]:
        return _pids_in(self._tag + place)

    def _kill_all(self, place: str) -> None:
        _kill_all(self._tag + place)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotPossible(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _pids_in(space: str) -> list[int]:
    """The ids of the processes in a network namespace; empty if there is no such namespace."""
    listed = subprocess.run(
        ["ip", "netns", "pids", space], check=False, capture_output=True, text=True
    )
    return [int(word) for word in listed.stdout.split()]


def _kill_all(space: str) -> None:
    """Kill the processes in a namespace."""
    kill_all(partial(_pids_in, space), f"in {space}")


def _leftovers(names: Sequence[str]) -> Iterator[str]:
    """Yield the names made by a test run whose process has ended."""
    for name in names:
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
            yield name


def _remove_leftovers() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True)
    for space in _leftovers([line.split()[0] for line in listed.stdout.splitlines() if line]):
        _kill_all(space)
        _ip("netns", "del", space)
    for name in _leftovers([path.name for path in FOLDERS.iterdir()]):
        shutil.rmtree(FOLDERS / name, ignore_errors=True)
