"""Token cache on disk: a corpus is tokenized once, in one pass, and memory-mapped from then on."""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flaxen import strict_json
from flaxen.atomic import sync
from flaxen.data.corpus import Corpus, DataSource
from flaxen.data.files import ignore_progress
from flaxen.data.tokenizers import Arrays, Tokenizer
from flaxen.errors import InputError
from flaxen.inputs import open_input, read_bytes

FORMAT = 2
CHUNK = 1 << 21  # bytes per digest
BATCH = 1 << 18  # characters tokenized together
RESIDENT = 1 << 27  # bytes of the memory mapping that may stay resident
FAULT = 1 << 21  # Linux may map a huge page of this size for a single byte that is read
# A full disk, an exceeded quota, and a limit on the size of a file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DAY = 24 * 3600.0
PARTIAL = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}\.(?P<pid>\d+)\.(?P<host>.*)\.partial")


class Damaged(InputError):
    """A token store that is incomplete, or differs from what was written."""


class TokenStore:
    """All tokens of a source in one sequence, each document ending in eos.

    A directory with tokens.bin (uint16 or uint32), offsets.bin (uint64, where documents start), meta.json and
    digests.bin: CRC-32 (uint32) of each CHUNK bytes of tokens.bin, then of offsets.bin. Sizes, meta.json and offsets
    are verified on opening, each chunk of tokens when it is first read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            meta = _read_meta(directory)
            self.n_tokens: int = meta["n_tokens"]
            self.n_documents: int = meta["n_documents"]
            self.digest: str = meta["digest"]
            self._map, self._tokens = _map_file(directory / "tokens.bin", meta["dtype"], self.n_tokens)
            offsets_map, self._offsets = _map_file(directory / "offsets.bin", "uint64", self.n_documents + 1)
            # None: a store of format 1, which has only the digest of all tokens.
            self._digests: np.ndarray | None = None
            if meta["format"] > 1:
                sizes = [_chunks(len(self._map)), _chunks(len(offsets_map))]
                data = read_bytes(directory / "digests.bin")
                if len(data) != 4 * sum(sizes) or zlib.crc32(data) != meta["digests"]:
                    raise ValueError("digests.bin does not match its digest in meta.json")
                self._digests, of_offsets = np.split(np.frombuffer(data, "<u4"), [sizes[0]])
                for chunk in range(sizes[1]):
                    self._verify_chunk("offsets.bin", offsets_map, chunk, of_offsets)
            if self._offsets[0] != 0 or self._offsets[-1] != self.n_tokens:
                raise ValueError(f"offsets.bin must start with 0 and end with {self.n_tokens}")
            # Format 2 has digests of the offsets instead, which are faster to check.
            if self._digests is None and (self._offsets[1:] < self._offsets[:-1]).any():
                raise ValueError("offsets.bin must be in ascending order")
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(f"{directory} is an incomplete token store: {error}; delete it to rebuild it") from None
        self._touched = 0
        # Chunks of tokens that were verified. Two threads may verify the same chunk, which does no harm.
        self._verified = np.zeros(_chunks(len(self._map)), bool)
        self._all_verified = self._digests is None

    def verify(self, on_progress: Callable[[int], None] = ignore_progress) -> None:
        """Read all tokens and raise Damaged if they do not match their digests."""
        digest = hashlib.blake2b(digest_size=16)
        for chunk in range(_chunks(len(self._map))):
            first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, len(self._map))
            if self._digests is None:
                digest.update(memoryview(self._map)[first:last])
            else:
                self._verify_chunk("tokens.bin", self._map, chunk, self._digests)
            on_progress(last)
            if chunk % (RESIDENT // CHUNK) == 0:
                self._release()
        if self._digests is None and digest.hexdigest() != self.digest:
            raise Damaged(
                f"{self.directory / 'tokens.bin'} is damaged: it does not match its digest in meta.json; "
                f"delete {self.directory} to rebuild it"
            )

    def _verify_chunk(self, name: str, data: mmap.mmap, chunk: int, digests: np.ndarray) -> None:
        first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, len(data))
        if zlib.crc32(memoryview(data)[first:last]) != digests[chunk]:
            raise Damaged(
                f"{self.directory / name} is damaged: bytes {first:,} to {last - 1:,} do not match their digest; "
                f"delete {self.directory} to rebuild it"
            )

    def _verify_rows(self, starts: np.ndarray, length: int) -> None:
        """Verify the chunks that contain these rows, unless they were verified before."""
        if self._all_verified or not len(starts) or not length:
            return
        assert self._digests is not None
        size = self._tokens.itemsize
        first, last = starts * size // CHUNK, ((starts + length) * size - 1) // CHUNK
        for offset in range(int((last - first).max()) + 1):
            chunks = np.minimum(first + offset, last)
            for chunk in np.unique(chunks[~self._verified[chunks]]).tolist():
                self._verify_chunk("tokens.bin", self._map, chunk, self._digests)
                self._verified[chunk] = True
                self._touched += CHUNK // FAULT
        self._all_verified = bool(self._verified.all())

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens starting at each of `starts`, as int32 [len(starts), length]."""
        starts = np.asarray(starts, np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > self.n_tokens):
            raise IndexError(
                f"rows of {length} tokens at positions {starts.min()} to {starts.max()} "
                f"extend past the end of the data ({self.n_tokens} tokens)"
            )
        self._verify_rows(starts, length)
        result = np.empty((len(starts), length), np.int32)
        size = self._tokens.itemsize
        # Reading a row may map a whole huge page in addition to the row's own bytes.
        chunk = RESIDENT // (FAULT + length * size) + 1
        for first in range(0, len(starts), chunk):
            part = starts[first : first + chunk]
            # A view of all possible rows, which overlap (stride of one token); indexing it copies whole rows at once.
            shape = (self.n_tokens - length + 1, length)
            result[first : first + chunk] = np.ndarray(shape, self._tokens.dtype, self._map, strides=(size, size))[part]
            self._touched += len(part)
            if self._touched >= chunk:
                self._release()
        return result

    def document_start(self, i: int) -> int:
        """Return where document i begins; for i = n_documents, where the last one ends."""
        return int(self._offsets[i])

    def document(self, i: int) -> np.ndarray:
        """Return the tokens of document i, eos included, as int32."""
        first, last = self.document_start(i), self.document_start(i + 1)
        self._verify_rows(np.array([first]), last - first)
        tokens = self._tokens[first:last].astype(np.int32)
        self._touched += 1
        if self._touched >= RESIDENT // (FAULT + tokens.nbytes):
            self._release()
        return tokens

    def document_lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, as int64."""
        return np.diff(self._offsets.astype(np.int64))

    def _release(self) -> None:
        """Release the mapped pages, which count towards the memory of this process."""
        # Released pages must be mapped again when they are read again, so callers do this rarely, not on every read.
        self._touched = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_meta(directory: Path) -> dict[str, Any]:
    """Read meta.json, and verify the digest of its other values."""
    meta = strict_json.read(directory / "meta.json")
    if not isinstance(meta, dict) or meta.get("format") not in (1, FORMAT):
        raise ValueError(f"meta.json must have format 1 or {FORMAT}")
    digest = meta.pop("meta_digest", None)
    if (meta["format"] > 1 or "digests" in meta or digest is not None) and digest != _meta_digest(meta):
        raise ValueError("meta.json does not match its digest")
    for name in ("n_tokens", "n_documents"):
        if not isinstance(meta[name], int) or not 0 < meta[name] < 1 << 48:
            raise ValueError(f"{name} of meta.json must be a positive number, got {meta[name]!r}")
    if meta["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"dtype of meta.json must be uint16 or uint32, got {meta['dtype']!r}")
    return meta


def _meta_digest(meta: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16).hexdigest()


def _chunks(size: int) -> int:
    """Return the number of chunks of a file of `size` bytes."""
    return -(-size // CHUNK)


def _chunk_digests(path: Path) -> bytes:
    """Compute the digests of all chunks of a file, as little-endian uint32."""
    with path.open("rb") as file:
        return b"".join(zlib.crc32(data).to_bytes(4, "little") for data in iter(lambda: file.read(CHUNK), b""))


def _map_file(path: Path, dtype: str, count: int) -> tuple[mmap.mmap, np.ndarray]:
    """Memory-map a file of `count` numbers, after checking its size."""
    expected, size = count * np.dtype(dtype).itemsize, path.stat().st_size
    if size != expected:
        raise ValueError(f"{path.name} must have {expected:,} bytes, got {size:,}")
    with open_input(path) as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapping, np.frombuffer(mapping, dtype)


@dataclass(frozen=True)
class Tokens:
    """A contiguous part of a token store: tokens first … last - 1."""

    store: TokenStore
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens starting at each of `starts`, as int32; positions count from the start of the part."""
        starts = np.asarray(starts, np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(
                f"rows of {length} tokens at positions {starts.min()} to {starts.max()} "
                f"extend past the end of the data ({len(self)} tokens)"
            )
        return self.store.rows(starts + self.first, length)


def open_corpus(corpus: Corpus, tokenizer: Tokenizer, progress: bool = True) -> tuple[Tokens, Tokens]:
    """Open the training and the validation tokens; without separate validation data, hold out the first documents."""
    train, validation = corpus.train_source(), corpus.validation_source()
    store = open_store(train, tokenizer, corpus.cache, progress)
    if validation:
        validation_store = open_store(validation, tokenizer, corpus.cache, progress)
        return Tokens(store, 0, store.n_tokens), Tokens(validation_store, 0, validation_store.n_tokens)
    # Hold out whole documents; if there is only one, hold out its first tokens.
    by_document = store.n_documents > 1
    count, percent = store.n_documents if by_document else store.n_tokens, corpus.validation_percent
    # At least one document (or token), but never all of them.
    held = min(max(round(count * percent / 100), 1), count - 1) if percent else 0
    cut = store.document_start(held) if by_document else held
    return Tokens(store, cut, store.n_tokens), Tokens(store, 0, cut)


def open_store(source: DataSource, tokenizer: Tokenizer, cache: Path | None, progress: bool = True) -> TokenStore:
    """Open the token store of a source from the cache, tokenizing the source first if it is not cached."""
    root = cache_directory(cache)
    identity = source.identity()
    target = root / _key(identity, tokenizer)
    if not target.exists():
        _build(target, source, identity, tokenizer, progress)
    return TokenStore(target)


def cache_directory(cache: Path | None) -> Path:
    """Return the directory of all token stores, given or default."""
    return (cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "flaxen", "tokens")).expanduser()


def _key(identity: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Hash everything that the tokens depend on, to name the store's directory."""
    # The lengths of the files come first, so that bytes moved from the end of one to the start of the next change the
    # hash.
    # The number 1 stays the same in all formats, so that stores of format 1 are found.
    parts = [1, identity, type(tokenizer).__name__, {name: len(tokenizer.files[name]) for name in tokenizer.files}]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tokenizer.files):
        digest.update(tokenizer.files[name])
    return digest.hexdigest()


def _build(target: Path, source: DataSource, identity: dict[str, Any], tokenizer: Tokenizer, progress: bool) -> None:
    """Build a store in a temporary directory and move it to `target` when it is complete."""
    root = target.parent
    # The name holds host and process id, so that other processes can tell an abandoned build from a running one.
    fresh = root / f"{target.name}.{uuid.uuid4().hex[:8]}.{os.getpid()}.{socket.gethostname()}.partial"
    try:
        # The temporary directory is next to the target, because a rename is atomic only within one file system.
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        fresh.mkdir()
    except OSError as error:
        raise InputError(
            f"cannot write {root}: {error.strerror}; choose another directory with --data.cache"
        ) from error
    position = 0
    try:
        with _Bar(source, progress) as bar:

            def on_progress(at: int) -> None:
                nonlocal position
                position = at
                bar.read(at)

            meta = _write(fresh, source.texts(on_progress), tokenizer, bar.documents)
        if not meta["n_documents"]:
            raise InputError(f"{source.name} contains no documents: expected text, got only blank lines")
        # The store is named after the source's identity before reading, so the source must not have changed since.
        if source.identity() != identity:
            raise InputError(
                f"{source.name} changed while it was being read; rerun the command when nothing is writing to it"
            )
        digests = _chunk_digests(fresh / "tokens.bin") + _chunk_digests(fresh / "offsets.bin")
        (fresh / "digests.bin").write_bytes(digests)
        meta |= {"digests": zlib.crc32(digests), "identity": identity}
        # Through JSON, as it is read: tuples become lists.
        meta = json.loads(strict_json.dumps(meta))
        text = strict_json.dumps({**meta, "meta_digest": _meta_digest(meta)}, indent=2) + "\n"
        (fresh / "meta.json").write_text(text, encoding="utf-8")
        # Contents reach the disk before the rename, and the rename before the store is used: after a power failure the
        # store is complete or absent.
        for path in [*fresh.iterdir(), fresh]:
            sync(path)
        # Another process may have built the same store in the meantime; then that one is used.
        with contextlib.suppress(FileExistsError):
            _rename(fresh, target)
        sync(root)
    except OSError as error:
        if error.errno not in FULL:
            raise InputError(f"cannot write {root}: {error}; choose another directory with --data.cache") from error
        done, free = _size(fresh), shutil.disk_usage(root).free
        # Extrapolated from the fraction of the source that was read.
        need = (
            f"about {done * source.size // position / 1e6:,.0f}"
            if source.size and position
            else f"more than {done / 1e6:,.0f}"
        )
        raise InputError(
            f"not enough space in {root} for the tokens of {source.name}: {error.strerror}; {need} MB is needed, "
            f"but only {(free + done) / 1e6:,.0f} MB is free. "
            "Free some space, or choose another directory with --data.cache"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(directory: Path, texts: Iterator[str], tokenizer: Tokenizer, count: Callable[[int], None]) -> dict[str, Any]:
    """Write tokens.bin and offsets.bin; return the contents of meta.json."""
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    n_tokens = n_documents = 0
    with (directory / "tokens.bin").open("wb") as tokens_file, (directory / "offsets.bin").open("wb") as offsets_file:
        offsets_file.write(np.zeros(1, np.uint64).data)
        for tokens, lengths in _encode(texts, tokenizer, dtype):
            tokens_file.write(tokens.data)
            digest.update(tokens.data)
            offsets_file.write((n_tokens + np.cumsum(lengths, dtype=np.uint64)).data)
            n_tokens, n_documents = n_tokens + len(tokens), n_documents + len(lengths)
            count(n_documents)
    counts = {"n_tokens": n_tokens, "n_documents": n_documents}
    return {"format": FORMAT, "dtype": dtype.name, **counts, "digest": digest.hexdigest()}


def _encode(texts: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[Arrays]:
    """Tokenize texts batch by batch, in order."""
    # No threads here: both tokenizer libraries use all cores within a batch, and the remaining work holds the GIL.
    for batch in _batches(texts):
        yield tokenizer.encode_arrays(batch, dtype)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into lists of at most BATCH characters; a longer document gets a list of its own."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _rename(fresh: Path, target: Path) -> None:
    """Move a directory; raise FileExistsError if the target exists, whichever error the operating system reports."""
    try:
        fresh.rename(target)
    except OSError:
        if not target.exists():
            raise
        raise FileExistsError(target) from None


def _sweep(root: Path) -> None:
    """Delete abandoned builds: those whose process has ended, or that have not been written to for a day."""
    for path in root.glob("*.partial"):
        written_by = PARTIAL.fullmatch(path.name)
        if not written_by:  # not ours: the user's cache directory may hold other files
            continue
        pid, same_host = int(written_by["pid"]), written_by["host"] == socket.gethostname()
        with contextlib.suppress(OSError):  # another process may delete it too, or finish its build
            newest = max(p.stat().st_mtime for p in [path, *path.iterdir()])
            if (same_host and not _alive(pid)) or time.time() - newest > DAY:
                shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    """Return whether a process with this id is running on this machine."""
    if os.name != "posix":  # on Windows, os.kill(pid, 0) would terminate the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


class _Bar:
    """Progress bar on standard error, if it is a terminal: in bytes if the source knows its size, else in documents."""

    def __init__(self, source: DataSource, enabled: bool) -> None:
        self._total = source.size
        self._progress: Any = None
        if enabled and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            with_total = [progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()]
            with_total.append(progress.TimeRemainingColumn())
            without_total = [progress.TextColumn("{task.completed:,} documents"), progress.TimeElapsedColumn()]
            columns = [progress.TextColumn("tokenizing"), *(without_total if self._total is None else with_total)]
            self._progress = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("", total=self._total)

    def __enter__(self) -> "_Bar":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress:
            self._progress.stop()

    def read(self, position: int) -> None:
        if self._progress and self._total is not None:
            self._progress.update(self._task, completed=position)

    def documents(self, count: int) -> None:
        if self._progress and self._total is None:
            self._progress.update(self._task, completed=count)
