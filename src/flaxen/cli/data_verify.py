"""flaxen data verify [STORE …]: check that token stores are undamaged."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from flaxen.errors import InputError


@dataclass(frozen=True)
class DataVerify:
    """Read token stores completely and compare them with their digests.

    Example: flaxen data verify --cache tokens
    """

    stores: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Directories of token stores. Default: all in the cache."""
    cache: Path | None = None
    """Directory of all token stores, as --data.cache of training. Default: ~/.cache/flaxen/tokens."""

    def run(self, given_flags: set[str]) -> None:
        from rich.console import Console
        from rich.progress import Progress

        from flaxen.data.store import Damaged, TokenStore, cache_directory

        if self.stores and self.cache:
            raise InputError("--cache has no effect with given token stores; remove one of them")
        root = cache_directory(self.cache)
        if self.cache and not root.is_dir():
            raise InputError(f"{root} is not a directory; --cache expects the directory of token stores")
        found = sorted(path for path in root.iterdir() if _is_store(path)) if root.is_dir() else []
        damaged = 0
        stores = self.stores or found
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            for path in stores:
                task = bar.add_task(path.name, total=None)
                try:
                    store = TokenStore(path)
                    size = (path / "tokens.bin").stat().st_size
                    store.verify(lambda done: bar.update(task, completed=done, total=size))  # noqa: B023
                except Damaged as error:
                    bar.console.print(f"flaxen: {error}", markup=False, highlight=False, soft_wrap=True)
                    damaged += 1
                bar.remove_task(task)
        print(f"{len(stores)} token stores verified, {damaged} damaged" if stores else f"no token stores in {root}")
        if damaged:
            sys.exit(1)


def _is_store(path: Path) -> bool:
    """Return whether the name is that of a token store; builds in progress have a longer one."""
    return len(path.name) == 32 and set(path.name) <= set("0123456789abcdef")
