"""All kinds of sources give the same images and captions; errors name the row."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from flaxen.data.captions import Captions, CaptionSet, open_captions, pixels
from flaxen.data.images import ImageProcessor, UnreadableImage
from flaxen.errors import InputError

Rows = list[dict[str, Any]]
ROWS: Rows = [{"image": f"{name}.png", "caption": f"the {name}"} for name in ("cat", "dog", "owl")]


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def draw(path: Path, seed: int, size: int = 6) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size, size + 1, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images."""
    for seed, row in enumerate(ROWS):
        draw(tmp_path / "images" / row["image"], seed)
    return tmp_path / "images"


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(*train: str | Path, **options: Any) -> CaptionSet:
    """Read everything as training data."""
    paths = tuple(map(str, train))
    return open_captions(Captions(train=paths, validation_percent=0.0, **options))[0]


def contents(captions: CaptionSet) -> list[tuple[list[str], bytes]]:
    return [(captions.captions(number), captions.image(number).tobytes()) for number in range(len(captions))]


def expected(folder: Path) -> list[tuple[list[str], bytes]]:
    return [([row["caption"]], Image.open(folder / row["image"]).tobytes()) for row in ROWS]


def with_bytes(folder: Path, rows: Rows = ROWS) -> Rows:
    return [{**row, "image": {"bytes": (folder / row["image"]).read_bytes(), "path": row["image"]}} for row in rows]


def test_all_table_formats_give_the_same_captions(folder: Path) -> None:
    write(folder / "a.jsonl", ROWS)
    (folder / "a.json").write_text(json.dumps(ROWS))
    write(folder / "lines.json", ROWS)
    lines = ["image,caption", *(",".join(row.values()) for row in ROWS)]
    (folder / "a.csv").write_text("\n".join(lines))
    (folder / "a.tsv").write_text("\n".join(lines).replace(",", "\t"))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet")
    for name in ("a.jsonl", "a.json", "lines.json", "a.csv", "a.tsv", "a.parquet"):
        captions = read(folder / name, cache=folder / "cache")
        assert contents(captions) == expected(folder), name
        assert [captions.name(number) for number in range(3)] == ["cat.png", "dog.png", "owl.png"]
        assert captions.problems == []
        assert captions.repeated == 0


@pytest.mark.parametrize("indent", [None, 2])
def test_coco_annotations_are_joined_with_their_images(folder: Path, indent: int | None) -> None:
    images = [{"id": 7 + number, "file_name": row["image"]} for number, row in enumerate(ROWS)]
    annotations = [{"id": 1, "image_id": 7 + number, "caption": row["caption"]} for number, row in enumerate(ROWS)]
    more = [{"id": 2, "image_id": 8, "caption": "a hound"}, {"id": 3, "image_id": 99, "caption": "lost"}]
    coco = {
        "info": {},
        "images": [*images, {"id": 10, "file_name": "cat.png"}],
        "annotations": [*annotations[::-1], *more],
    }
    (folder.parent / "coco.json").write_text(json.dumps(coco, indent=indent))
    captions = read(folder.parent / "coco.json", images=folder)
    assert [captions.captions(number) for number in range(3)] == [["the cat"], ["the dog", "a hound"], ["the owl"]]
    assert [line.partition("json, ")[2] for line in captions.problems] == [
        "image 10: the caption of 'cat.png' is empty",
        "annotations of image 99: cannot read the image '': the image is missing",
    ]
    (folder / "boxes.json").write_text(json.dumps({"images": images, "annotations": [{"image_id": 7, "bbox": []}]}))
    with pytest.raises(InputError, match="unknown column 'caption'; available: image_id, bbox"):
        read(folder / "boxes.json")


@pytest.mark.parametrize("caption", ["caption", "text"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_folder_with_metadata_file(folder: Path, kind: str, caption: str) -> None:
    rows = [{"file_name": row["image"], caption: row["caption"]} for row in ROWS]
    if kind == "jsonl":
        write(folder / "metadata.jsonl", rows)
    elif kind == "csv":
        (folder / "metadata.csv").write_text("\n".join([",".join(rows[0]), *(",".join(r.values()) for r in rows)]))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    assert contents(read(folder, cache=folder / "cache")) == expected(folder)
    with pytest.raises(InputError, match=r"unknown column 'capton'.*; available: file_name.*--data.caption"):
        read(folder, caption="capton", cache=folder / "cache")


def test_folder_without_metadata_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"images contains no metadata.jsonl or metadata.csv"):
        read(folder)
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    with pytest.raises(InputError, match=r"read it with --data.dataset .*saved"):
        read(folder / "saved")


def features(image: Any) -> datasets.Features:
    return datasets.Features({"image": image, "caption": datasets.Value("string")})


def test_datasets_with_bytes_structs_and_paths(folder: Path) -> None:
    split = {
        "bytes": datasets.Dataset.from_list(with_bytes(folder), features(datasets.Image())),
        "raw": datasets.Dataset.from_list([{**row, "image": row["image"]["bytes"]} for row in with_bytes(folder)]),
        "struct": datasets.Dataset.from_list(with_bytes(folder)),
        "names": datasets.Dataset.from_list(ROWS),
    }
    datasets.DatasetDict(split).save_to_disk(folder / "saved")
    for name in split:
        images = {"images": folder} if name == "names" else {}
        data = Captions(dataset=str(folder / "saved"), split=name, validation_split=name, **images)
        for captions in open_captions(data):
            assert contents(captions) == expected(folder), name
            labels = ["row 1", "row 2", "row 3"] if name == "raw" else [row["image"] for row in ROWS]
            assert [captions.name(number) for number in range(3)] == labels
    with pytest.raises(InputError, match=r"unknown split 'train'"):
        open_captions(Captions(dataset=str(folder / "saved")))
    with pytest.raises(InputError, match=r"--data.streaming cannot be combined with images"):
        Captions(dataset="x", streaming=True)


def test_dataset_of_image_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_dataset reads a folder with metadata as images at absolute paths."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder.parent / "cache")
    write(folder / "metadata.jsonl", [{"file_name": row["image"], "caption": row["caption"]} for row in ROWS])
    captions = open_captions(Captions(dataset=str(folder), validation_percent=0.0))[0]
    assert contents(captions) == expected(folder)
    assert captions.name(0) == str(folder / "cat.png")


def test_parquet_with_images_is_read_again_after_a_change(folder: Path) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.Table.from_pylist(with_bytes(folder)), path)
    captions = read(path, cache=folder / "cache")
    assert contents(captions) == expected(folder)
    assert captions.name(1) == "dog.png"
    before = captions.identity()
    pq.write_table(pa.Table.from_pylist(with_bytes(folder, [ROWS[2]])), path)  # differs from the cached copy
    captions = read(path, cache=folder / "cache")
    assert contents(captions) == expected(folder)[2:]
    assert captions.identity() != before
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet: .*download it again"):
        read(path, cache=folder / "cache")


def test_rows_with_the_same_path_are_one_image(folder: Path) -> None:
    rows = [
        ROWS[0],
        {"image": "./dog.png", "caption": ["a dog", "a hound", "a dog"]},
        {"image": "../images/cat.png", "caption": "a cat"},
        ROWS[0],
        {"image": str(folder / "dog.png"), "caption": "sits"},
    ]
    captions = read(write(folder / "a.jsonl", rows))
    assert len(captions) == 2
    assert [captions.captions(0), captions.captions(1)] == [["the cat", "a cat"], ["a dog", "a hound", "sits"]]
    assert captions.name(1) == "./dog.png"
    assert captions.repeated == 2


def test_rows_with_the_same_bytes_are_one_image(folder: Path) -> None:
    rows = with_bytes(folder)
    rows += [{"image": {**rows[0]["image"], "path": None}, "caption": "again"}, rows[1]]
    rows.append({"image": {"bytes": rows[2]["image"]["bytes"][:-1] + b"x", "path": "owl.png"}, "caption": "the owl"})
    datasets.Dataset.from_list(rows, features(datasets.Image())).save_to_disk(folder / "saved")
    captions = open_captions(Captions(dataset=str(folder / "saved"), validation_percent=0.0))[0]
    assert [captions.captions(number) for number in range(4)] == [["the cat", "again"], ["the dog"], *[["the owl"]] * 2]
    assert captions.repeated == 1


def test_captions_by_path_and_template(folder: Path) -> None:
    rows = [{"image": row["image"], "texts": {"raw": ["a", "b"]}, "title": "T", "n": 1} for row in ROWS]
    path = write(folder / "a.jsonl", rows)
    assert read(path, caption="texts.raw").captions(0) == ["a", "b"]
    assert read(path, caption="{title}: x").captions(0) == ["T: x"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"image": "imag"}, r"unknown column 'imag' \(did you mean 'image'.*: image, caption; .*--data.image"),
        ({}, {"caption": "captions"}, r"unknown column 'captions' \(did you mean 'caption'.*--data.caption"),
        ({"image": 5}, {}, r"line 2: expected text in column 'image', got int 5; .*--data.image"),
        ({"caption": 5}, {}, r"line 2: expected text in column 'caption', got int 5; .*--data.caption"),
        ({"caption": ["a", 5]}, {}, r"line 2: expected text in column 'caption', got int 5"),
        ({"caption": " "}, {"empty": "error"}, r"line 2: the caption of 'dog.png' is empty; .*--data.empty skip"),
        ({"caption": []}, {"empty": "error"}, r"line 2: the caption of 'dog.png' is empty"),
        ({"image": "no.png"}, {"unreadable": "error"}, r"line 2: cannot read the image 'no.png': No such file.*skip"),
        ({"image": None}, {"unreadable": "error"}, r"line 2: cannot read the image '': the image is missing"),
        ({"image": "../x.png"}, {}, r"line 2: '../x.png' resolves to .*outside the image folder .*images; set"),
        ({"image": "/etc/passwd"}, {}, r"line 2: '/etc/passwd' resolves to .*outside the image folder"),
        ({"image": "link.png"}, {}, r"line 2: 'link.png' resolves to .*x.png, outside the image folder"),
        ({"image": "http://x.y/z.png"}, {}, r"line 2: expected the path of an image, got the URL"),
        ({}, {"images": Path("nowhere")}, r"nowhere does not exist or is not a folder; set --data.images"),
        ({}, {"caption": "a.*.b"}, r"without \*"),
        ({}, {"max_pixels": 0}, r"max_pixels must be at least 1"),
    ],
)  # fmt: skip
def test_errors_name_the_row_and_the_option(folder: Path, change: dict, options: dict, message: str) -> None:
    draw(folder.parent / "x.png", 9)
    (folder / "link.png").symlink_to(folder.parent / "x.png")
    path = write(folder / "a.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(InputError, match=message):
        read(path, **options)


def test_skipped_rows_are_reported(folder: Path) -> None:
    (folder / "empty.png").touch()
    (folder / "a-directory").mkdir()
    names = ["no.png", "no.png", "empty.png", "a-directory", "nul\0.png", None]
    rows = [ROWS[0], *({"image": name, "caption": "x"} for name in names), {**ROWS[1], "caption": ["", "a dog", None]}]
    captions = read(write(folder / "a.jsonl", rows))
    assert [captions.captions(number) for number in range(len(captions))] == [["the cat"], ["a dog"]]
    assert [line.partition("jsonl, ")[2] for line in captions.problems] == [
        "line 2: cannot read the image 'no.png': No such file or directory",
        "line 4: cannot read the image 'empty.png': the file is empty",
        "line 5: cannot read the image 'a-directory': not a regular file",
        "line 6: cannot read the image 'nul\\x00.png': embedded null byte",
        "line 7: cannot read the image '': the image is missing",
        "line 8: the caption of 'dog.png' is empty",
        "line 8: the caption of 'dog.png' is empty",
    ]
    with pytest.raises(
        InputError, match=r"expected images with captions, got none; skipped 1 rows \(first: .*no\.png.*--data.images"
    ):
        read(write(folder / "b.jsonl", [{"image": "no.png", "caption": "x"}]))
    with pytest.raises(InputError, match=r"captions require a table"):
        (folder / "a.txt").write_text("x")
        read(folder / "a.txt")
    with pytest.raises(InputError, match=r"column 'caption', got int64|expected images.*got int64"):
        datasets.Dataset.from_list([{"image": 1, "caption": "x"}]).save_to_disk(folder / "saved")
        open_captions(Captions(dataset=str(folder / "saved")))


def test_links_inside_the_folder_are_followed(folder: Path) -> None:
    (folder.parent / "other").symlink_to(folder)
    (folder / "link.png").symlink_to("cat.png")
    rows = [ROWS[0], {"image": "link.png", "caption": "a cat"}]
    write(folder / "a.jsonl", rows)
    assert read(folder.parent / "other" / "a.jsonl").captions(0) == ["the cat", "a cat"]


def test_validation_is_split_by_image(folder: Path) -> None:
    rows = []
    for number in range(20):
        draw(folder / f"{number}.png", number)
        rows += [{"image": f"{number}.png", "caption": f"{number} {which}"} for which in "ab"]
    path = write(folder / "a.jsonl", [*rows[::2], *rows[1::2], {"image": "no.png", "caption": "x"}])
    train, validation = open_captions(Captions(train=(path,), validation_percent=10.0))
    assert (len(train), len(validation)) == (18, 2)
    assert [validation.captions(number) for number in range(2)] == [["0 a", "0 b"], ["1 a", "1 b"]]
    assert train.captions(0) == ["2 a", "2 b"]
    assert train.image(0).tobytes() == Image.open(folder / "2.png").tobytes()
    assert (len(train.problems), len(validation.problems)) == (1, 0)
    assert train.identity() != validation.identity()
    write(folder / "b.jsonl", ROWS)
    train, validation = open_captions(Captions(train=(path,), validation=(str(folder / "b.jsonl"),)))
    assert (len(train), len(validation)) == (20, 3)


def test_identity_changes_with_settings_and_files(folder: Path) -> None:
    path = write(folder / "a.jsonl", ROWS)

    def identity(**options: Any) -> Any:
        return json.dumps(read(path, **options).identity())

    before = identity()
    assert before == identity()
    assert len({before, identity(empty="error"), identity(caption="{caption}!"), identity(images=folder)}) == 4
    draw(folder / "dog.png", 77)
    assert identity() != before


def test_texts_are_the_captions(folder: Path) -> None:
    path = write(folder / "a.jsonl", [*ROWS, {"image": "no.png", "caption": [" ", "one more"]}])
    source = Captions(train=(path,)).train_source()
    assert list(source.texts()) == ["the cat", "the dog", "the owl", "one more"]
    assert source.size == Path(path).stat().st_size


@pytest.mark.parametrize("workers", [1, 3])
def test_pixels_equal_the_processed_images_and_failures_are_zeros(folder: Path, workers: int) -> None:
    (folder / "bad.png").write_text("not an image")
    path = write(folder / "a.jsonl", [*ROWS, {"image": "bad.png", "caption": "bad"}])
    captions, processor = read(path), ImageProcessor.default((4, 5))
    with pytest.raises(UnreadableImage):
        captions.image(3)
    batch, failed = pixels(captions, np.array([2, 3, 0, 2]), processor, workers)
    assert batch.shape == (4, 3, 4, 5)
    for row, number in ((0, 2), (2, 0), (3, 2)):
        np.testing.assert_array_equal(batch[row], processor(captions.image(number)))
    assert not batch[1].any()
    assert [row for row, _ in failed] == [1]
    assert failed[0][1].startswith("not a valid image file")
    with pytest.raises(InputError, match=r"cannot read the image 'bad.png': not a valid image.*--data.unreadable skip"):
        pixels(read(path, unreadable="error"), [0, 3], processor, workers)
    with pytest.raises(InputError, match="different shapes"):
        pixels(captions, [0], ImageProcessor(size=None), workers)
    assert pixels(read(path, max_pixels=5), [0], processor)[1] == [(0, "it has 7 × 6 pixels, more than 5")]


@pytest.mark.parametrize("kind", ["files", "parquet"])
def test_memory_does_not_grow_with_the_images(tmp_path: Path, kind: str) -> None:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize((128, 128)).save(file, "PNG")
    plain, processor = file.getvalue(), ImageProcessor.default(16)  # 1 kB in the file, 50 kB decoded

    def used(count: int) -> tuple[int, int]:
        """Return the Python memory of an open set, and the memory of the process after loading all images."""
        folder = tmp_path / str(count)
        folder.mkdir()
        rows = [{"image": f"{number}.png", "caption": f"caption {number}"} for number in range(count)]
        images = [plain + number.to_bytes(4) for number in range(count)]
        if kind == "files":
            for row, data in zip(rows, images):
                (folder / row["image"]).write_bytes(data)
            path = write(folder / "a.jsonl", rows)
        else:
            path = str(folder / "a.parquet")
            cells = [{**row, "image": {"bytes": data, "path": None}} for row, data in zip(rows, images)]
            pq.write_table(pa.Table.from_pylist(cells), path, row_group_size=100)
            del cells
        del rows, images
        tracemalloc.start()
        captions = read(path, cache=folder / "cache")
        retained = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        for first in range(0, count, 50):
            assert not pixels(captions, range(first, first + 50), processor, 2)[1]
        assert len(captions) == count
        return retained, psutil.Process().memory_info().rss

    used(50)  # warm-up: imports and caches
    few, many = used(200), used(2000)
    assert (many[0] - few[0]) / 1800 < 400  # names, captions and row numbers
    assert many[1] < few[1] + (1 << 25)  # decoded, 2,000 images are 100 MB
