"""Rows of tables: csv, tsv, parquet and arrow files, and data sets on the hub."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO, Any

from trainer.data.sources.nulls import without_nulls
from trainer.data.sources.row import Row
from trainer.errors import DataError

BATCH_ROWS = 1000


def csv_rows(name: str, stream: IO[bytes], delimiter: str) -> Iterator[Row]:
    """Rows of a file whose first line names the columns."""
    csv.field_size_limit(1 << 30)
    # Bytes that are no UTF-8 become lone surrogates, so that the row they stand in is known.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if len(set(header)) < len(header) or not all(header):
            raise DataError(f"{name}:1: the first line must name the columns, each once; it reads {header}.")
        line = reader.line_num + 1
        for values in reader:
            where, line = f"{name}:{line}", reader.line_num + 1
            if not values:
                continue
            if any(_broken(value) for value in values):
                yield Row(where, None, "not UTF-8")
            elif len(values) != len(header):
                yield Row(where, None, f"{len(values)} values for {len(header)} columns ({', '.join(header)})")
            else:
                yield Row(where, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise DataError(f"{name}:{reader.line_num}: not csv: {error}.") from None


def _broken(value: str) -> bool:
    return not value.isascii() and any("\udc80" <= character <= "\udcff" for character in value)


def parquet_rows(name: str, stream: IO[bytes]) -> Iterator[Row]:
    """Rows of a parquet file, a batch at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS)
        yield from _batch_rows(name, batches)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not parquet: {_first_line(error)}.") from None


def arrow_rows(name: str, stream: IO[bytes]) -> Iterator[Row]:
    """Rows of an arrow file: the file layout, or the stream layout that `datasets` writes."""
    import pyarrow

    source = pyarrow.PythonFile(stream, mode="r")
    try:
        try:
            reader: Any = pyarrow.ipc.open_file(source)
            batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            stream.seek(0)
            batches = pyarrow.ipc.open_stream(source)
        yield from _batch_rows(name, batches)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not arrow: {_first_line(error)}.") from None


def hub_rows(path: str, key: str, split: str | None) -> tuple[Iterator[Row], str, int]:
    """Rows of a data set on the hub through `datasets`, the library's hash of them, and their bytes.

    Raises DataError.
    """
    import datasets

    chosen = split if split is not None else "train"
    try:
        rows = datasets.load_dataset(path, split=chosen)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{key}={path}: is no file here, and the hub does not give it: {_first_line(error)}. "
            "A local file is written with its ending, such as rows.jsonl."
        ) from None
    batches = rows.data.to_batches(max_chunksize=BATCH_ROWS)
    return _batch_rows(path, batches), f"{path} {chosen} {rows._fingerprint}", rows.data.nbytes


def hub_stream(path: str, key: str, split: str | None) -> Iterator[Row]:
    """Rows of a data set on the hub, downloaded as they are read. Raises DataError."""
    import datasets

    try:
        rows = datasets.load_dataset(path, split=split if split is not None else "train", streaming=True)
        for number, fields in enumerate(rows, start=1):
            yield Row(f"{path}:row {number}", without_nulls(fields))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{key}={path}: is no file here, and the hub does not give it: {_first_line(error)}.") from None


def _batch_rows(name: str, batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for fields in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield Row(f"{name}:row {number}", without_nulls(fields))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
