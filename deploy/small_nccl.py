"""Makes a small NCCL for a bundle: the library of a wheel, with code for one architecture only.

    pip download --no-deps --dest /tmp nvidia-nccl-cu13==2.32.3
    python3 deploy/small_nccl.py /tmp/nvidia_nccl_cu13-*.whl .gpu/libnccl.so.2.xz     # 16 MB

The device code of all other architectures is overwritten with zeros, so that no offset changes. So
are all inputs of device linking (`__nv_relfatbin`), which a driver reads only to link for an
architecture that the linked code lacks. Architecture 90 is H100 and H200. Binutils' `strip` removes
debug sections.
"""

import argparse
import lzma
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
LINKED, TO_BE_LINKED = ".nv_fatbin", "__nv_relfatbin"
FATBIN_MAGIC = 0xBA55ED50
ALIGNMENT = 8


class NotNccl(ValueError):
    """The file is not an NCCL that this script can read."""


def sections(library: bytes) -> Mapping[str, tuple[int, int]]:
    """Offset and size of each section of a 64-bit little-endian ELF file, by name."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise NotNccl("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", library, table + number * entry_bytes)
        for number in range(count)
    ]
    names_at = headers[names_index][4]
    found = {}
    for name_at, _, _, _, offset, size in headers:
        end = library.index(b"\0", names_at + name_at)
        found[library[names_at + name_at : end].decode()] = (offset, size)
    return found


def device_code(library: bytes, start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Architecture, offset and size of each piece of device code in a section of fat binaries."""
    position, end = start, start + size
    while position < end:
        (magic,) = struct.unpack_from("<I", library, position)
        if magic != FATBIN_MAGIC:
            position += ALIGNMENT
            continue
        header_bytes, content_bytes = struct.unpack_from("<HQ", library, position + 6)
        entry = position + header_bytes
        position = entry + content_bytes
        while entry < position:
            entry_header, piece_bytes = struct.unpack_from("<IQ", library, entry + 4)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield architecture, entry + entry_header, piece_bytes
            entry += entry_header + piece_bytes


def reduce(library: bytes, architecture: int) -> bytes:
    """The library with the linked code of one architecture only. Raises NotNccl if it has none."""
    data, places, kept = bytearray(library), sections(library), 0
    for name in (LINKED, TO_BE_LINKED):
        if name not in places:
            continue
        for other, offset, size in device_code(library, *places[name]):
            if name == LINKED and other == architecture:
                kept += 1
            else:
                data[offset : offset + size] = bytes(size)
    if not kept:
        raise NotNccl(f"no linked device code for the architecture {architecture}")
    return bytes(data)


def without_debug_sections(library: bytes) -> bytes:
    """The library as `strip` leaves it. Raises NotNccl."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        command = ["strip", "--strip-debug", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotNccl(done.stderr.strip())
        return Path(file.name).read_bytes()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path, help="a file ending with .xz")
    parser.add_argument("--architecture", type=int, default=90)
    options = parser.parse_args(arguments)
    try:
        with zipfile.ZipFile(options.wheel) as archive:
            library = archive.read(LIBRARY)
        reduced = without_debug_sections(reduce(library, options.architecture))
    except (OSError, zipfile.BadZipFile, KeyError, NotNccl) as error:
        print(f"{options.wheel} is not a wheel of nvidia-nccl: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(lzma.compress(reduced, preset=6))
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
