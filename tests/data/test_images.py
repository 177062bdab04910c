"""Pixels equal those of transformers' Pillow backend; images of all modes open, and errors say what is wrong."""

import contextlib
import io
import json
import os
import struct
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from flaxen.cli import process
from flaxen.data.images import ImageProcessor, UnreadableImage, open_image
from flaxen.errors import InputError

VIT = {"image_processor_type": "ViTImageProcessor"}
SIZES = [(1, 1), (7, 300), (224, 224), (225, 31), (64, 48), (333, 517)]  # height, width


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def random_image(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(height, width, seed=seed))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def theirs(directory: Path, fields: dict[str, Any]) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")


def assert_same_pixels(directory: Path, fields: dict[str, Any], sizes: list[tuple[int, int]] = SIZES) -> None:
    """Our pixels equal those of transformers, also after transformers has read the file that we write."""
    reference = theirs(directory / "theirs", fields)
    ours = ImageProcessor.read(directory / "theirs")
    assert ours is not None
    written = theirs(directory / "ours", ours.to_json())
    assert ImageProcessor.read(directory / "ours") == ours
    for seed, (height, width) in enumerate(sizes):
        image = random_image(height, width, seed)
        expected = reference(image, return_tensors="np")["pixel_values"][0]
        pixels = ours(image)
        assert pixels.dtype == np.float32
        assert ours.shape in (None, pixels.shape[1:])
        np.testing.assert_array_equal(pixels, expected)
        np.testing.assert_array_equal(written(image, return_tensors="np")["pixel_values"][0], expected)


@pytest.mark.parametrize("resample", range(6))
def test_all_resampling_filters_equal_transformers(tmp_path: Path, resample: int) -> None:
    assert_same_pixels(tmp_path, {**VIT, "resample": resample, "size": {"height": 40, "width": 56}})


@pytest.mark.parametrize(
    "fields",
    [
        VIT,
        {"feature_extractor_type": "ViTFeatureExtractor", "do_resize": True, "size": 224, "resample": 2,
         "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        {**VIT, "size": 32},
        {**VIT, "size": [24, 36]},
        {**VIT, "size": 30, "default_to_square": False},
        {**VIT, "do_resize": False},
        {**VIT, "do_rescale": False, "size": 32},
        {**VIT, "do_normalize": False, "size": 32},
        {**VIT, "do_normalize": False, "do_rescale": False, "size": 32},
        {**VIT, "rescale_factor": 0.01, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 0.7], "size": 32},
        {**VIT, "image_mean": 0.4, "image_std": 0.3, "size": 32},
        {"image_processor_type": "DeiTImageProcessor", "do_center_crop": None, "crop_size": None, "do_pad": None},
        {**VIT, "do_resize": False, "do_center_crop": True, "crop_size": {"height": 50, "width": 61}},
        {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 32, "width": 32}, "data_format": "x",
         "do_pad": False, "device": None},
        {"image_processor_type": "DeiTImageProcessor"},
        {"feature_extractor_type": "DeiTFeatureExtractor", "size": 50, "crop_size": 41, "resample": 3},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 37}, "crop_size": 32},
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 31, "crop_size": 45},
        {"image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": 33, "width": 33},
         "resample": 3, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ],
    ids=lambda fields: "-".join(str(value)[:24] for value in fields.values()),
)  # fmt: skip
def test_all_forms_of_the_fields_equal_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_same_pixels(tmp_path, fields)


def test_transparent_images_get_a_white_background_where_transformers_does_so(tmp_path: Path) -> None:
    fields = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 20}
    image = Image.fromarray(noise(30, 40, 4))
    expected = theirs(tmp_path, fields)(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(ImageProcessor.from_json(fields)(image), expected)
    with pytest.raises(InputError, match="expected an RGB image, got mode RGBA; read it with open_image"):
        ImageProcessor()(image)


def test_defaults_are_those_of_vit(tmp_path: Path) -> None:
    assert ImageProcessor.default(224) == ImageProcessor.from_json(VIT) == ImageProcessor()
    assert ImageProcessor.default((32, 48)).shape == (32, 48)
    assert ImageProcessor.read(tmp_path) is None


def test_image_processor_inside_processor_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**VIT, "size": 16}}))
    assert ImageProcessor.read(tmp_path) == ImageProcessor.default(16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**VIT, "do_pad": True}, r"do_pad=True of ViTImageProcessor is not supported"),
        ({**VIT, "crop_pct": 0.9}, r"crop_pct=0.9 of ViTImageProcessor is not supported"),
        ({**VIT, "size": {"longest_edge": 9}}, r"expected \['height', 'width'\] or \['shortest_edge'\] for size, got"),
        ({**VIT, "size": [1, 2, 3]}, r"for size, got \[1, 2, 3\]"),
        ({**VIT, "size": {"height": 1.5, "width": 2}}, r"for size, got"),
        ({**VIT, "size": 0}, r"size must be at least 1"),
        ({**VIT, "do_center_crop": True, "crop_size": {"shortest_edge": 9}}, r"\['height', 'width'\] for crop_size"),
        ({**VIT, "resample": "bilinear"}, r"expected 0 to 5 \(Pillow's filters\) for resample, got 'bilinear'"),
        ({**VIT, "resample": None}, r"for resample, got None"),
        ({**VIT, "resample": 6}, r"for resample, got 6"),
        ({**VIT, "image_mean": [0.5]}, r"expected 3 numbers for image_mean, got \[0.5\]"),
        ({**VIT, "image_std": [0.5, 0, 0.5]}, r"std must not contain 0"),
        ({**VIT, "rescale_factor": "1/255"}, r"expected a number for rescale_factor"),
        ({**VIT, "do_resize": "yes"}, r"expected true or false for do_resize, got 'yes'"),
        (
            {"image_processor_type": "OddImageProcessor"},
            r"'do_center_crop' is missing|'do_resize' is missing, and the default of 'Odd",
        ),
        (
            {"image_processor_type": "BitImageProcessor", "do_resize": False, "crop_size": 9},
            r"'do_center_crop' is missing",
        ),
    ],
)
def test_unsupported_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        ImageProcessor.from_json(fields, "x.json")
    assert str(caught.value).startswith("x.json: ")


def test_broken_file_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "preprocessor_config.json").write_text(text)
        with pytest.raises(InputError, match=r"preprocessor_config\.json"):
            ImageProcessor.read(tmp_path)


def test_very_narrow_image_is_refused_before_resizing() -> None:
    clip = ImageProcessor.from_json({"image_processor_type": "CLIPImageProcessor"})
    with pytest.raises(UnreadableImage, match="1 × 30,000 pixels: too narrow"):
        clip(Image.new("RGB", (1, 30_000)))


def palette(transparency: int | bytes | None) -> tuple[bytes, np.ndarray]:
    image = random_image(9, 11).quantize(16)
    options = {} if transparency is None else {"transparency": transparency}
    return encoded(image, "PNG", **options), np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_all_modes_open_as_rgb(tmp_path: Path, kind: str) -> None:
    grey, colours, alpha = noise(9, 11, 1)[:, :, 0], noise(9, 11), noise(9, 11, 4)
    wide = np.random.default_rng(1).integers(0, 1 << 16, (9, 11)).astype(np.uint16)

    def three(values: Any) -> Any:
        return np.repeat(values[:, :, None], 3, 2)

    cmyk = Image.fromarray(alpha, "CMYK")
    ycc = Image.fromarray(colours).convert("YCbCr")
    grey_alpha = np.stack([grey, 255 - grey], 2)
    cases = {
        "1x1": (encoded(random_image(1, 1), "PNG"), noise(1, 1)),
        "rgb": (encoded(Image.fromarray(colours), "PNG"), colours),
        "grey": (encoded(Image.fromarray(grey), "PNG"), three(grey)),
        "bits": (encoded(Image.fromarray(grey > 127), "PNG"), three((grey > 127) * np.uint8(255))),
        "grey-alpha": (encoded(Image.fromarray(grey_alpha, "LA"), "PNG"), three(grey)),
        "alpha": (encoded(Image.fromarray(alpha), "PNG"), alpha[:, :, :3]),
        "palette": palette(None),
        "palette-key": palette(3),
        "palette-alpha": palette(bytes(range(16))),
        "cmyk": (encoded(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))),
        "ycbcr": (encoded(ycc, "TIFF"), np.asarray(ycc.convert("RGB"))),
        "16 bit": (encoded(Image.fromarray(wide), "PNG"), three((wide >> 8).astype(np.uint8))),
        "32 bit": (encoded(Image.fromarray(wide.astype(np.int32)), "TIFF"), three((wide >> 8).astype(np.uint8))),
        "float": (encoded(Image.fromarray((grey / 255).astype(np.float32)), "TIFF"), three(grey)),
        "animation": (encoded(random_image(9, 11), "WEBP", save_all=True, append_images=[random_image(9, 11, 1)],
                              lossless=True), colours),
    }  # fmt: skip
    for name, (data, expected) in cases.items():
        (tmp_path / "image").write_bytes(data)
        image = open_image(data if kind == "bytes" else tmp_path / "image")
        assert image.mode == "RGB", name
        np.testing.assert_array_equal(np.asarray(image), expected, err_msg=name)
        assert ImageProcessor.default(8)(image).shape == (3, 8, 8)


def test_cmyk_jpeg_opens_as_in_transformers(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded(Image.fromarray(noise(16, 24, 4), "CMYK"), "JPEG"))
    expected = np.asarray(transformers.image_utils.load_image(str(path)))
    np.testing.assert_array_equal(np.asarray(open_image(path)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_according_to_exif(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded(random_image(16, 24), "JPEG", exif=exif))
    image = open_image(path)
    assert image.size == ((24, 16) if orientation < 5 else (16, 24))
    np.testing.assert_array_equal(np.asarray(image), np.asarray(transformers.image_utils.load_image(str(path))))


def header(width: int, height: int) -> bytes:
    """Build a PNG with a header that declares its size, and almost no data."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0"))]
    parts = [
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in [*chunks, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_unreadable_images_say_why(tmp_path: Path) -> None:
    jpeg, png = encoded(random_image(200, 200), "JPEG"), encoded(random_image(60, 60), "PNG")
    wide = Image.fromarray(np.full((4, 4), 1 << 20, np.int32))
    nan = Image.fromarray(np.full((4, 4), np.nan, np.float32))
    cases = {
        "the image is empty": b"",
        "truncated": jpeg[: len(jpeg) // 2],
        "trunc|broken|incomplete": png[: len(png) // 2],
        "not a valid image file; expected one of JPEG, PNG": b"a text file, not an image\n" * 9,
        "30,000 × 30,000|more than 67,108,864 pixels": header(30_000, 30_000),
        "10,000 × 10,000 pixels, more than 67,108,864": header(10_000, 10_000),
        "integers of more than 16 bits": encoded(wide, "TIFF"),
        "floating-point pixels are not between 0 and 1": encoded(nan, "TIFF"),
        "not a valid image": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",  # Pillow would start Ghostscript
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        process.quiet_images()  # as the command does
        for message, data in cases.items():
            start = time.perf_counter()
            with pytest.raises(UnreadableImage, match=message):
                open_image(data)
            assert time.perf_counter() - start < 1  # the large ones are not decoded
    assert not [str(warning) for warning in caught]
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    files = {
        "missing": "No such file",
        "empty": "the file is empty",
        ".": "not a regular file",
        "pipe": "not a regular file",
    }
    for name, message in files.items():
        with pytest.raises(UnreadableImage, match=message):
            open_image(tmp_path / name)


def test_images_above_max_pixels_are_refused(tmp_path: Path) -> None:
    data = encoded(random_image(20, 30), "PNG")
    assert open_image(data, 600).size == (30, 20)
    with pytest.raises(UnreadableImage, match="30 × 20 pixels, more than 599"):
        open_image(data, 599)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_images_raise_only_unreadable_image(kind: str) -> None:
    intact, rng, seen = encoded(random_image(20, 20), kind), np.random.default_rng(0), set()
    assert open_image(intact).size == (20, 20)
    for _ in range(60):
        damaged = bytearray(intact)
        for place in rng.integers(0, len(intact), 6):
            damaged[place] = rng.integers(256)
        with contextlib.suppress(UnreadableImage):
            seen.add(open_image(bytes(damaged[: rng.integers(1, len(intact) + 1)]), 1 << 20).mode)
    assert seen <= {"RGB"}
