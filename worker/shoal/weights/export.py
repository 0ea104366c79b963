"""Export of a version to a directory that engines load: safetensors files in Hugging Face's format.

With format "sglang" each version has a directory of its own, `weight_v000057/`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shoal.checkpoint.directory import synchronise
from shoal.state.host_copies import as_bytes
from shoal.weights.script import subscribe
from shoal.weights.subscription import Weights
from shoal_proto.errors import InvalidSpec
from shoal_proto.incarnation import new_incarnation

Format = Literal["safetensors", "sglang"]
FILE_BYTES = 5_000_000_000
"""Limit of the bytes of tensors in one file; a larger tensor has its own file."""
INDEX = "model.safetensors.index.json"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(
    weights: Weights,
    directory: Path | str,
    *,
    format: Format = "safetensors",  # noqa: A002 - as the option of the command is called
    base: Path | str | None = None,
) -> Path:
    """Write a version's tensors to `directory` or, with "sglang", to a directory in it; return its
    path.

    `weights`: fetched without `into`. Rows of embedding tables are not written. A tied tensor is
    written under its first name only. `base`: a directory from which all files except weights are
    copied too, such as config.json; its folders are not copied.

    The directory appears as a whole or not at all; if this process is killed, a hidden folder,
    `.NAME.*.draft`, may be left. A version that is exported already is not written again. Raises
    InvalidSpec for an unknown format, for Weights without tensors, for a dtype or a name that
    cannot be written, and if the directory exists without this version; OSError if files cannot be
    written.
    """
    if format not in ("safetensors", "sglang"):
        raise InvalidSpec(
            "unknown export format", seen=repr(format), expected="safetensors, sglang"
        )
    number = weights.version.number
    if not weights:
        raise InvalidSpec(
            f"version {number} cannot be exported: these Weights hold no tensors",
            seen="no tensors, as after fetch(into=...) or at the end of a `with` block",
            expected="the tensors of the version",
            fix="Export the Weights of subscription.fetch(version), without `into`.",
        )
    target = Path(directory) / f"weight_v{number:06d}" if format == "sglang" else Path(directory)
    if target.exists():
        _check_same(target, weights)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Process ids would not do: processes in containers that share the directory may have the same.
    draft = target.parent / f".{target.name}.{new_incarnation()[-12:]}.draft"
    draft.mkdir()
    try:
        _write_files(weights, draft)
        if base is not None:
            _copy_others(Path(base), draft)
        synchronise(draft)
        _rename(draft, target, weights)
        synchronise(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def export_series(
    series: str,
    directory: Path | str,
    *,
    coordinator: str | None = None,
    version: int | None = None,
    format: Format = "safetensors",  # noqa: A002 - as `export`
    base: Path | str | None = None,
) -> Path:
    """Fetch a version, by default the newest one, and export it.

    Raises what `subscribe`, `Subscription.fetch` and `export` raise.
    """
    with subscribe(series, coordinator=coordinator) as subscription:
        weights = subscription.fetch("newest" if version is None else version)
        return export(weights, directory, format=format, base=base)


def _rename(draft: Path, target: Path, weights: Weights) -> None:
    try:
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise
        _check_same(target, weights)  # another process has exported meanwhile


def _check_same(target: Path, weights: Weights) -> None:
    index = target / INDEX
    metadata = json.loads(index.read_text()).get("metadata", {}) if index.exists() else {}
    if metadata.get("digest") != weights.version.digest:
        raise InvalidSpec(
            f"{target} exists already, and holds another version",
            seen=f"version {metadata.get('version', 'unknown')}",
            expected=f"version {weights.version.number}, or a directory that does not exist",
        )


def _write_files(weights: Weights, directory: Path) -> None:
    files = list(_files_of(weights))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    version = weights.version
    metadata = {
        **version.metadata,  # First: the keys below, on which readers rely, take precedence.
        "total_size": sum(tensor.nbytes for tensors in files for tensor in tensors.values()),
        "version": f"{version.number:06d}",
        "digest": version.digest,
        "step": version.step,
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
    _write(directory / INDEX, text.encode())


def _files_of(weights: Weights) -> Iterator[dict[str, Tensor]]:
    written: set[int] = set()
    file: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights.items():
        if id(tensor) in written:
            continue
        written.add(id(tensor))
        size = tensor.nbytes
        if file and num_bytes + size > FILE_BYTES:
            yield file
            file, num_bytes = {}, 0
        file[name] = tensor
        num_bytes += size
    yield file


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write and sync a safetensors file.

    Raises InvalidSpec for a dtype or a name that cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if name in header:
            raise InvalidSpec(
                "a tensor cannot be exported under a name that the file format reserves",
                seen=name,
                expected="another name",
            )
        if tensor.dtype not in _DTYPES:
            raise InvalidSpec(
                f"{name} cannot be exported",
                seen=str(tensor.dtype),
                expected=", ".join(map(str, _DTYPES)),
            )
        offsets = [at, at + tensor.nbytes]
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(as_bytes(tensor.contiguous()).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _copy_others(base: Path, directory: Path) -> None:
    for entry in sorted(base.iterdir()):
        if entry.is_file() and entry.suffix not in _SUFFIXES and entry.name != INDEX:
            _write(directory / entry.name, entry.read_bytes())


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
