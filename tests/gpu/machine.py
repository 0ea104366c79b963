"""The device, the sizes and the environment that all cases of a run share."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_RANKS = 4
"""The most ranks of any case."""
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run."""

    device: str
    """"cuda" or "cpu"."""
    backend: str
    """"nccl" or "gloo"."""
    num_gpus: int
    """Number of GPUs. Ranks take them in turn: several ranks share one if there are fewer GPUs than
    ranks."""
    full: bool
    """True for models as large as users'; otherwise they are small, for a trial of the cases."""

    @property
    def shares_gpus(self) -> bool:
        """True if a case has more ranks than there are GPUs."""
        return self.device == "cuda" and self.num_gpus < MOST_RANKS

    def visible_gpu(self, rank: int, visible: str) -> str:
        """The value of CUDA_VISIBLE_DEVICES for a rank, derived from that of the whole run."""
        every = visible.split(",") if visible else [str(gpu) for gpu in range(self.num_gpus)]
        # CUDA ignores the entries from the first invalid one on, such as -1.
        every = [each.strip() for each in every[: self.num_gpus]]
        return every[rank % len(every)]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The environment of each case's processes, without the caller's variables of Shoal."""
        own = {name: value for name, value in given.items() if not name.startswith("SHOAL_")}
        own |= {
            "SHOAL_BACKEND": self.backend,
            "OMP_NUM_THREADS": "2" if self.device == "cuda" else "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if self.shares_gpus:
            own |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
            own |= {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": own.get("NCCL_DEBUG", "WARN")}
            # Several ranks on one GPU abort if this is set.
            own.pop("NCCL_NVLS_ENABLE", None)
        return own


@contextmanager
def shared_by_time(machine: Machine, folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield the variables by which processes share a GPU through MPS; empty if there is no MPS, or
    no GPU to share.

    Without MPS the processes of one GPU take turns of about 2 ms, and a kernel that waits for a
    peer uses up its turn: collectives work, but their times mean nothing.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not machine.shares_gpus:
        yield {}
        return
    pipes = folder / "mps"
    pipes.mkdir(parents=True, exist_ok=True)
    variables = {PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    environment = {**os.environ, **variables}
    started = subprocess.run(
        [control, "-d"], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    if started.returncode:
        print(f"no MPS: {started.stderr.strip() or started.stdout.strip()}", flush=True)
        yield {}
        return
    try:
        yield variables
    finally:
        subprocess.run(
            [control], input="quit\n", env=environment, text=True, timeout=20, check=False
        )


def versions() -> dict[str, str]:
    """Versions of Python, torch, NCCL and the driver, and the GPUs. Uses no GPU."""
    import platform  # noqa: PLC0415
    from importlib.metadata import version  # noqa: PLC0415

    import torch  # noqa: PLC0415

    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "shoal": version("shoal"),
    }
    if torch.cuda.is_available():
        found["nccl of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
        if preloaded := os.environ.get("LD_PRELOAD", ""):
            found["preloaded"] = preloaded
    program = shutil.which("nvidia-smi")
    if program is not None:
        asked = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        try:
            completed = subprocess.run(
                asked, capture_output=True, text=True, timeout=20, check=False
            )
            found["gpus"] = "; ".join(completed.stdout.strip().splitlines())
        except subprocess.TimeoutExpired:
            found["gpus"] = "nvidia-smi does not answer"
    return found
