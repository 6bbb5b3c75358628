"""One view of a download, whether it is a folder, a zip file or a folder of zip files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fewshot_dpkl.schema import BROKEN, DEFLATE


class Store:
    """Read-only files by name (`images/a.jpg`), read in place: nothing is ever unpacked.

    `source` is a folder or a zip file. Zip files directly inside a folder are looked into as if they
    had been unpacked there.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source = Path(source)
        if not self.source.exists():
            raise FileNotFoundError(f"{self.source} does not exist; expected a folder or a zip file")
        self._archives: dict[str, zipfile.ZipFile] = {}  # name inside: archive that holds it
        self._sizes: dict[str, int] = {}
        self.empty: list[str] = []  # folders that hold nothing
        if self.source.is_dir():
            self._add_folder()
        else:
            self._add_archive(self.source)

    def _add_folder(self) -> None:
        for folder, folders, files in os.walk(self.source):
            inside = Path(folder).relative_to(self.source)
            if not folders and not files:
                self.empty.append(inside.as_posix())
            for file in files:
                name = (inside / file).as_posix()
                self._sizes[name] = os.stat(os.path.join(folder, file)).st_size
        for archive in sorted(self.source.glob("*.zip")):
            self._add_archive(archive)

    def _add_archive(self, path: Path) -> None:
        try:
            archive = zipfile.ZipFile(path)
        except (*BROKEN, OSError) as error:
            raise ValueError(f"{path} is not a readable zip file ({error}); download it again") from error
        for entry in archive.infolist():
            if entry.file_size > DEFLATE * (entry.compress_size + 1):
                raise ValueError(f"{path} claims to unfold to more than it can; download it again")
            if not entry.is_dir() and entry.filename not in self._sizes:
                self._sizes[entry.filename] = entry.file_size
                self._archives[entry.filename] = archive

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        if name not in self._sizes:
            raise FileNotFoundError(f"{self.source} has no {name}")
        archive = self._archives.get(name)
        try:
            return archive.read(name) if archive else (self.source / name).read_bytes()
        except BROKEN as error:
            raise ValueError(
                f"{name} in {archive.filename if archive else ''} is damaged ({error})"
            ) from error

    def lines(self, name: str) -> list[str]:
        """The lines of a text file that are not empty."""
        try:
            found = [line for line in self.read(name).decode("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"{name} in {self.source} is not a text; download it again") from None
        if not found:
            raise ValueError(f"{name} in {self.source} is empty; download it again")
        return found

    def folder_of(self, file: str) -> str | None:
        """The folder (`""` or ending in `/`) that holds `file`; the outermost one, None if there is none."""
        found = [name for name in self._sizes if name == file or name.endswith("/" + file)]
        return min(found, key=len)[: -len(file)] if found else None
