"""flaxen verify DIR: check a saved model for damage."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from flaxen import manifest
from flaxen.errors import InputError


@dataclass(frozen=True)
class Verify:
    """Check a model, adapter or vocabulary on disk: file digests, valid files, and weights that are NaN or infinite.

    Example: flaxen verify run/model
    """

    directory: tyro.conf.Positional[Path]
    """Directory written by Flaxen, or any Hugging Face checkpoint directory."""

    def run(self, given_flags: set[str]) -> None:
        directory = self.directory.expanduser()
        if not directory.is_dir():
            raise InputError(f"{self.directory} is not a directory; expected a saved model, adapter or vocabulary")
        problems, weights = self._digests(directory), sorted(directory.rglob("*.safetensors"))
        tensors = 0
        for path in weights:
            n, found = _check_weights(path)
            tensors += n
            problems += [f"{path.relative_to(directory)}: {problem}" for problem in found]
        if problems:
            raise InputError(f"{self.directory} is damaged; save or download it again:\n  " + "\n  ".join(problems))
        entries = manifest.read(directory)
        digests = "no manifest, so digests were not checked" if entries is None else f"{len(entries)} digests match"
        print(f"{self.directory} is intact: {digests}, {tensors:,} tensors have only finite values")
        if extra := manifest.foreign(directory) if entries is not None else []:
            print(f"not written by Flaxen: {', '.join(extra)}", file=sys.stderr)

    def _digests(self, directory: Path) -> list[str]:
        """Compare all files with the manifest, showing progress on a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        entries = manifest.read(directory) or {}
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(
            *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
        ) as progress:
            bar = progress.add_task("verifying", total=sum(entry["bytes"] for entry in entries.values()))
            return list(manifest.damage(directory, lambda size: progress.advance(bar, size)))


def _check_weights(path: Path) -> tuple[int, list[str]]:
    """Return the number of tensors in a safetensors file, and a problem for each one that is not finite."""
    import numpy as np

    from flaxen.hf.safetensors_files import Safetensors

    try:
        tensors = Safetensors(path.parent, path.name)
    except InputError as error:
        return 0, [str(error)]
    names = list(tensors)
    bad = [name for name in names if tensors.dtype(name).endswith(("F16", "F32", "F64"))]
    bad = [name for name in bad if not np.isfinite(np.asarray(tensors[name], np.float32)).all()]
    return len(names), [f"tensor {name!r} contains NaN or infinite values" for name in bad]
