"""The batch script for Slurm, run with an `srun` that starts its tasks on this machine."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_client.local.etcd import find_etcd
from shoal_proto.errors import UnknownJob
from shoal_server.coordinator.snapshots.taking import no_shards_error

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "shoal.sbatch"
SRUN = """#!/usr/bin/env bash
# Two nodes, a task on each, as the options of the script say; the worst exit code is its own.
command=()
for word in "$@"; do
    if [[ ${#command[@]} -gt 0 || $word != --* ]]; then command+=("$word"); fi
done
echo "srun: $*" >> "$SRUN_LOG"
pids=()
for node in 0 1; do
    SLURM_NODEID=$node SHOAL_LOG_DIR="$SRUN_LOG.$node" "${command[@]}" --epochs=2 &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


STAND_INS = {
    "srun": """if [[ $* == *getent* ]]; then echo "$SECOND_NODE_FINDS" && exit; fi
    > $TMPDIR/away; exit $LAUNCHERS""",
    "hostname": "echo node1",
    "getent": 'echo "127.0.1.1       STREAM node1"',
    "etcd": "exec /bin/sleep 60",
    "sleep": "exec /bin/sleep 0.01",
    # Slurm ends the script.
    "scontrol": """echo "$@" > "$TMPDIR/requeued"; kill -KILL $PPID""",
    "shoal": """case "$1 $2" in
    coordinator*) exec /bin/sleep 60 ;;
    # A renewal fails at first.
    "certs renew")
        if mkdir "$TMPDIR/failed-${4##*/}" 2> /dev/null; then exit 1; fi
        touch "$TMPDIR/renews-${4##*/}"
        exec /bin/sleep 60 ;;
    # A parameter server has SIGTERM blocked, and ends at SIGINT.
    ps*) exec python3 -c 'import signal; signal.signal(2, exit); signal.pause()' ;;
    wait*) [[ ! -e $TMPDIR/away ]] && echo "$WAIT_SAYS" && exit $TRAINING ;;
    restore*) echo "$@" > "$TMPDIR/restored" ;;
    snapshot*) echo "$@" >> "$TMPDIR/snapshots"
        if (($(wc -l < "$TMPDIR/snapshots") <= FAILURES)); then echo "$SAYS" && exit 1; fi ;;
    # After the training the coordinator is away until it is asked for the third time.
    status*) if [[ -e $TMPDIR/away ]]; then
            echo >> "$TMPDIR/away"
            if (($(wc -l < "$TMPDIR/away") < 3)); then exit 1; fi
            rm "$TMPDIR/away"
        fi
        # The cluster is up once the script has noted the processes that it keeps, and has started
        # those again that have ended.
        cd "$TMPDIR"
        until ls shoal-7.*/{etcd,coordinator}.pid renews-{certs,etcd-certs}; do
            /bin/sleep 0.05
        done ;;
esac""",
}
"""Programs that only wait, or end with the exit codes of a test."""
NOT_OVER = 75


def test_shellcheck_accepts_the_script() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck on PATH")
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def environment(folder: Path) -> dict[str, str]:
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (srun.parent / "etcd").symlink_to(find_etcd())
    path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    return {
        "PATH": path,
        "HOME": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SHOAL_PORT": str(number - number % 20),
        "SHOAL_HEAD": "localhost",
        "SHOAL_DIR": str(folder / "shoal"),
        "SHOAL_JOB": "batch",
        "PARAMETER_SERVERS": "1",
        "SRUN_LOG": str(folder / "srun"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.long
def test_the_script_trains_over_tls_and_leaves_only_logs(tmp_path: Path) -> None:
    given = environment(tmp_path)
    done = subprocess.run(
        ["bash", SCRIPT, "-m", "shoal.demo.digits", "--strategy=ddp"],
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    own = tmp_path / "shoal" / "shoal-7"
    logs = "".join(path.read_text() for path in (own / "logs").iterdir())
    assert [path.name for path in own.iterdir()] == ["logs"], "nothing but logs"
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert (done.stdout + done.stderr).count("test accuracy") == 2, "both nodes trained to the end"
    # No part served without TLS.
    assert "ports_open_to_others" not in logs
    # Processes that the script started have ended.
    for name in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path / "shoal") not in name.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile


@pytest.mark.parametrize(
    ("launchers", "training", "expected"),
    [(0, 0, 0), (143, 0, 0), (3, 0, 3), (143, 1, 143), (0, 1, 1), (1, 1, 1)],
    ids=["finished", "finished_by_others", "failed_after_it", "stopped", "lost", "failed"],
)
def test_the_exit_code_is_the_outcome_of_the_training(
    tmp_path: Path, launchers: int, training: int, expected: int
) -> None:
    """`launchers` and `training`: the exit codes of `srun` and of `shoal wait`. The page of
    deployments lists the outcomes."""
    done = run_with_stand_ins(tmp_path, launchers, training)
    assert done.returncode == expected, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("failures", "error", "num_tries", "requeued"),
    [
        (0, "", 1, True),
        (2, "no space left on device", 3, True),
        (99, "no space left on device", 60, False),
        (99, str(no_shards_error("slurm-7")), 1, True),
    ],
    ids=["saved", "saved_later", "not_saved", "synchronous"],
)
def test_a_drained_job_is_requeued_once_its_parameters_are_saved(
    tmp_path: Path, failures: int, error: str, num_tries: int, requeued: bool
) -> None:
    """`failures`: how many calls of `shoal snapshot` fail, with `error`."""
    done = run_with_stand_ins(tmp_path, 143, NOT_OVER, failures, error)
    assert (tmp_path / "requeued").exists() == requeued, done.stdout + done.stderr
    assert (tmp_path / "snapshots").read_text() == "snapshot slurm-7\n" * num_tries
    if not requeued:
        assert done.returncode == 1 and "is not saved" in done.stderr


def test_a_notice_before_any_member_has_joined_requeues_the_job(tmp_path: Path) -> None:
    error = str(UnknownJob("there is no job 'slurm-7'"))
    says = f"{error} [UnknownJob]"
    done = run_with_stand_ins(tmp_path, 143, 1, failures=99, error=says, wait_says=says)
    assert (tmp_path / "requeued").exists(), done.stdout + done.stderr


def test_the_script_removes_nothing_that_its_own_job_has_not_made(tmp_path: Path) -> None:
    """`SHOAL_DIR` may be one folder for all jobs of a user, and have the user's own files."""
    others = [tmp_path / "shared" / name for name in ("snapshots/slurm-8/x", "certs/ca.crt")]
    for path in others:
        path.parent.mkdir(parents=True)
        path.touch()
    done = run_with_stand_ins(tmp_path, 0, 0, SHOAL_DIR=str(tmp_path / "shared"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(path.exists() for path in others)
    own = tmp_path / "shared" / "shoal-7"
    assert [path.name for path in own.iterdir()] == ["logs"]


def test_a_first_node_that_knows_itself_as_loopback_has_the_address_that_others_find(
    tmp_path: Path,
) -> None:
    """Debian's installer writes the node's name to /etc/hosts, as 127.0.1.1."""
    given = {"SHOAL_HEAD": "", "SLURM_JOB_NUM_NODES": "2"}
    for finds, code, says in (
        ("10.0.0.1        STREAM node1", 0, "cluster 10.0.0.1:"),
        ("127.0.1.1       STREAM node1", 2, "bad SHOAL_HEAD; saw 'node1'; expected "),
        ("", 2, "bad SHOAL_HEAD; saw 'node1'; expected "),
    ):
        done = run_with_stand_ins(tmp_path, 0, 0, SECOND_NODE_FINDS=finds, **given)
        assert done.returncode == code and says in done.stdout + done.stderr


def test_a_job_that_is_submitted_again_continues_from_the_named_snapshots(tmp_path: Path) -> None:
    """A new Slurm job has a folder of its own; one that is requeued has its own snapshot."""
    earlier = tmp_path / "shoal-6" / "snapshots"
    for snapshots in (earlier, tmp_path / "shoal-7" / "snapshots"):
        done = run_with_stand_ins(tmp_path, 0, 0, SHOAL_JOB="j", SHOAL_RESTORE=str(earlier))
        assert done.returncode == 0, done.stderr
        restored = (tmp_path / "restored").read_text()
        assert restored == f"restore j --from {snapshots}\n"
        (tmp_path / "shoal-7" / "snapshots" / "j").mkdir(parents=True)


def run_with_stand_ins(
    tmp_path: Path,
    launchers: int,
    training: int,
    failures: int = 0,
    error: str = "",
    *,
    wait_says: str = "",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    programs = tmp_path / "my programs"
    programs.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SHOAL_HEAD": "localhost",
        "LAUNCHERS": str(launchers),
        "TRAINING": str(training),
        "FAILURES": str(failures),
        "SAYS": error,
        "WAIT_SAYS": wait_says,
        **environment,
    }
    return subprocess.run(
        ["bash", SCRIPT, "train.py"],
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def line_of(variable: str) -> str:
    """The line of the script that sets the variable."""
    [line] = [each for each in SCRIPT.read_text().splitlines() if each.startswith(f"{variable}=")]
    return line


def test_ports_are_none_that_outgoing_connections_may_have() -> None:
    lines = "".join(
        f"SLURM_JOB_ID={job_id}; {line_of('PORT')}; echo $PORT; "
        for job_id in (1, 599, 600, 639, 999, 12_345_678)
    )
    done = subprocess.run(["bash", "-euc", lines], capture_output=True, text=True, check=True)
    ports = [int(word) for word in done.stdout.split()]
    assert all(1024 <= port <= 32_768 - 20 for port in ports), ports


def test_a_node_without_a_full_name_is_called_by_its_short_one(tmp_path: Path) -> None:
    """`hostname -f` fails if no resolver knows the node."""
    program = tmp_path / "hostname"
    program.write_text("#!/bin/sh\n[ $# = 0 ] && echo node1\n")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = f"{line_of('HEAD')}\necho $HEAD"
    done = subprocess.run(["bash", "-euc", script], env=path, capture_output=True, check=True)
    assert done.stdout == b"node1\n"


def test_the_batch_script_reports_a_missing_script_or_slurm(tmp_path: Path) -> None:
    for arguments, given, message in (
        ([], {"SLURM_JOB_ID": "7"}, "usage: sbatch"),
        (["train.py"], {}, "run it by sbatch"),
    ):
        done = subprocess.run(
            ["bash", SCRIPT, *arguments],
            env={"PATH": os.environ["PATH"], **given},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0 and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORKERS_PER_NODE", each) for each in ("0", "2(x0)", "4,,2", "2(x99999999)", "-1", "a")),
        *(("MIN_NODES", each) for each in ("abc", "0", "3", "1.5", "08")),
        *(("MAX_REQUEUES", each) for each in ("-1", "many")),
        *(("PARAMETER_SERVERS", each) for each in ("-1", "9", "x")),
        *(("SHOAL_PORT", each) for each in ("80", "70000")),
        *(("SHOAL_JOB", each) for each in ("-j", "a b", "lr=0.1", "j" * 129)),
    ],
)
def test_a_bad_value_is_refused_by_name_before_anything_starts(
    tmp_path: Path, name: str, value: str
) -> None:
    """The job has two nodes. Nine parameter servers would use the next job's ports."""
    done = subprocess.run(
        ["bash", SCRIPT, "train.py"],
        env={
            "PATH": os.environ["PATH"],
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "TMPDIR": str(tmp_path),
            name: value,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"bad {name}; saw '{value}'; expected "), done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
