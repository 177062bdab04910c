"""Generate the images of the image benchmark: smooth random JPEG files, and tables of (hard links to) them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", type=int)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=[],
        help="also write tables with these numbers of rows, which are hard links to the files",
    )
    flags = parser.parse_args()
    import numpy as np

    rng = np.random.default_rng(0)
    files = [flags.directory / "files" / f"{number:06}.jpg" for number in range(flags.files)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        picture(rng).save(file, quality=90)
    write_table(files)
    for count in flags.rows:
        folder = flags.directory / f"{count}-rows"
        folder.mkdir()
        names = [folder / f"{number:06}.jpg" for number in range(count)]
        for number, name in enumerate(names):
            name.hardlink_to(files[number % len(files)])
        write_table(names)


def picture(rng: np.random.Generator) -> Image:
    """Draw an image of about 500 x 375: large soft shapes with some noise, so that files are as large as photos."""
    import numpy as np
    from PIL import Image

    width, height = int(rng.integers(440, 561)), int(rng.integers(330, 421))
    if rng.random() < 0.25:
        width, height = height, width
    shapes = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = rng.normal(0.0, 6.0, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8))


def write_table(files: list[Path]) -> None:
    """Write table.jsonl with a caption for each file, in the folder of the files."""
    with (files[0].parent / "table.jsonl").open("w") as table:
        for number, file in enumerate(files):
            row = {"image": file.name, "caption": f"soft shapes and a little grain, picture number {number:,}"}
            table.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
