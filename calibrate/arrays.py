"""Arrays from files of numbers: .npy, .npz and .csv. A file that holds anything else is a DataError that says so."""

from __future__ import annotations

import array
import csv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quant.calibrate.errors import DataError, listed


def load_npy(path: Path) -> Any:
    """The array of a .npy file, as a read-only map of the file."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: {_numpy_says(error)}") from error


def load_npz(path: Path, fields: Sequence[str] | None) -> dict[str, Any]:
    """The arrays of a .npz file by their names, or those that `fields` names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in fields or () if name not in file.files]
            if missing:
                raise DataError(f"{path}: there is no array {listed(missing)}; it has {listed(file.files)}")
            if not file.files:
                raise DataError(f"{path}: it holds no arrays")
            return {name: file[name] for name in fields or file.files}
    except DataError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {_numpy_says(error)}") from error


def _numpy_says(error: Exception) -> str:
    if "pickle" in str(error) or "Python objects" in str(error):
        return "holds objects, or is not numpy's at all, and is not read, as objects could run code; save plain numbers"
    return f"numpy cannot read it: {error}"


def load_csv(path: Path, fields: Sequence[str] | None) -> Any:
    """float64 (rows, columns). The first row is a header where one of its cells is not a number."""
    values = array.array("d")
    header: list[str] | None = None
    columns: list[int] | None = None
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                if not cells:
                    continue
                if columns is None:
                    header = None if all(map(_is_number, cells)) else [cell.strip() for cell in cells]
                    columns, width = _columns(path, header, len(cells), fields), len(cells)
                    if header is not None:
                        continue
                if len(cells) != width:
                    raise DataError(f"{path}, line {reader.line_num}: {len(cells)} columns, expected {width} as above")
                for column in columns:
                    if not _is_number(cells[column]):
                        called = f" ({header[column]})" if header else ""
                        raise DataError(
                            f"{path}, line {reader.line_num}, column {column + 1}{called}: {cells[column]!r} is not a "
                            "number; choose columns with fields (--fields)"
                        )
                values.extend(float(cells[column]) for column in columns)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: it is not a CSV file of text: {error}") from error
    if not values or columns is None:
        raise DataError(f"{path}: it has no rows of numbers")
    return np.frombuffer(values).reshape(-1, len(columns))


def _columns(path: Path, header: list[str] | None, width: int, fields: Sequence[str] | None) -> list[int]:
    if fields is None:
        return list(range(width))
    if header is None:
        raise DataError(f"{path}: fields need a header line with the names of the columns")
    missing = [name for name in fields if name not in header]
    if missing:
        raise DataError(f"{path}: there is no column {listed(missing)}; it has {listed(header)}")
    return [header.index(name) for name in fields]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
