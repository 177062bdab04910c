"""Image preprocessing: decode to RGB, then resize, crop, rescale and normalise as transformers does."""

import io
import json
import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxen.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import numpy
    import PIL.Image

MAX_PIXELS = 1 << 26
# Formats that Pillow decodes itself. For some others it starts external programs, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
ORIENTATION = 0x0112  # EXIF tag


class UnreadableImage(Exception):
    """An image cannot be read; the message says why."""


def open_image(source: bytes | Path, max_pixels: int = MAX_PIXELS) -> "PIL.Image.Image":
    """Open an image as RGB: first frame only, rotated according to EXIF, alpha dropped."""
    from PIL import Image, UnidentifiedImageError

    # Pillow raises on its own for more than twice MAX_IMAGE_PIXELS.
    if Image.MAX_IMAGE_PIXELS and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels
    # Pillow registers its less common formats only when asked to; before that, they are missing from Image.OPEN.
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with _open_stream(source) as stream, Image.open(stream, formats=formats) as image:
            if image.width * image.height > max_pixels:
                raise UnreadableImage(f"it has {image.width:,} × {image.height:,} pixels, more than {max_pixels:,}")
            image.load()
            op = Image.Transpose
            transpose = {
                2: op.FLIP_LEFT_RIGHT, 3: op.ROTATE_180, 4: op.FLIP_TOP_BOTTOM, 5: op.TRANSPOSE,
                6: op.ROTATE_270, 7: op.TRANSVERSE, 8: op.ROTATE_90,
            }.get(image.getexif().get(ORIENTATION, 1))  # fmt: skip
            return _to_rgb(image if transpose is None else image.transpose(transpose))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(f"not a valid image file; expected one of {', '.join(formats)}") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(f"it has more than {max_pixels:,} pixels") from None
    except Exception as error:  # on corrupt data Pillow raises nearly anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreadableImage(reason.splitlines()[0]) from None


def _open_stream(source: bytes | Path) -> io.BytesIO | io.BufferedReader:
    if isinstance(source, bytes):
        if not source:
            raise UnreadableImage("the image is empty")
        return io.BytesIO(source)
    status = source.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block forever
        raise UnreadableImage("not a regular file")
    if not status.st_size:
        raise UnreadableImage("the file is empty")
    return source.open("rb")


def _to_rgb(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Convert an image of any mode to RGB. 16-bit and floating-point pixels are scaled to 8 bits."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits; Pillow's convert would clip at 255
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 1 << 16:
            raise UnreadableImage("its pixels are integers of more than 16 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 1):  # written so that NaN fails too
            raise UnreadableImage("its floating-point pixels are not between 0 and 1")
        image = Image.fromarray(np.round(values * 255).astype(np.uint8))
    image = image.convert("RGB")
    # The alpha channel was dropped; what is left of it would make `_on_white` look for transparent pixels.
    image.info.pop("transparency", None)
    return image


HALF = (0.5, 0.5, 0.5)
VIT = {
    "do_resize": True, "size": 224, "default_to_square": True, "resample": 2,
    "do_center_crop": False, "crop_size": 224, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": HALF, "image_std": HALF, "do_convert_rgb": False,
}  # fmt: skip
# Defaults of transformers for fields that a preprocessor_config.json does not have, by processor family.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": VIT,
    "DeiT": {**VIT, "size": 256, "resample": 3, "do_center_crop": True},
    "CLIP": {
        **VIT, "default_to_square": False, "resample": 3, "do_center_crop": True, "do_convert_rgb": True,
        "image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711),
    },
}  # fmt: skip
# Fields that do not change the pixels.
IDLE = {
    "image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "model_input_names",
    "data_format", "input_data_format", "device", "return_tensors", "disable_grouping", "image_seq_length", "pad_size",
}  # fmt: skip


@dataclass(frozen=True)
class ImageProcessor:
    """Image preprocessing defined by a preprocessor_config.json, with the same results as transformers' Pillow backend.

    The defaults are those of ViT.
    """

    size: tuple[int, int] | None = (224, 224)
    """Height and width to resize to."""
    shortest_edge: int | None = None
    """Alternative to size: length of the shorter side; the aspect ratio is preserved."""
    resample: int = 2
    """Pillow's resampling filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    crop: tuple[int, int] | None = None
    """Height and width of the centre crop, after resizing; smaller images are padded with black."""
    scale: float | None = 1 / 255
    """Factor that pixel values 0 … 255 are multiplied by."""
    mean: tuple[float, float, float] | None = HALF
    """Mean per colour, subtracted after scaling."""
    std: tuple[float, float, float] | None = HALF
    """Standard deviation per colour, divided by after subtracting the mean."""
    convert_rgb: bool = False
    """Convert images of other modes to RGB on a white background; has no effect on images from `open_image`."""

    def __post_init__(self) -> None:
        if self.size and self.shortest_edge:
            raise InputError(f"size cannot be combined with shortest_edge, got {self.size} and {self.shortest_edge}")
        for name in ("size", "shortest_edge", "crop"):
            value = getattr(self, name)
            if value is not None and min(value if isinstance(value, tuple) else (value,)) < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.resample not in range(6):
            raise InputError(f"resample must be between 0 and 5 (Pillow's filters), got {self.resample}")
        if (self.mean is None) != (self.std is None) or 0 in (self.std or ()):
            raise InputError(
                f"mean and std must be set together, and std must not contain 0, got {self.mean} and {self.std}"
            )

    @classmethod
    def default(cls, image_size: int | tuple[int, int]) -> "ImageProcessor":
        """Return ViT's preprocessing for an image size: one side, or height and width."""
        return cls(image_size if isinstance(image_size, tuple) else (image_size, image_size))

    @classmethod
    def read(cls, directory: Path) -> "ImageProcessor | None":
        """Read the processor in a model's directory; None if it has none."""
        # transformers 5 stores the fields of multimodal models in processor_config.json, which takes precedence.
        for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
            path = directory / name
            if not path.exists():
                continue
            try:
                fields = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise InputError(f"cannot read {path}: {error}; download it again") from None
            if not isinstance(fields, dict):
                raise InputError(f"{path} must contain a JSON object, got {fields!r:.60}")
            if key is None or key in fields:
                return cls.from_json(fields if key is None else fields[key], str(path))
        return None

    @classmethod
    def from_json(cls, fields: dict[str, Any], where: str = "preprocessor_config.json") -> "ImageProcessor":
        """Build a processor from the fields of a preprocessor_config.json written by any version of transformers."""
        kind = str(fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViT")
        family = re.sub("(FeatureExtractor|ImageProcessor)(Fast|Pil)?$", "", kind)
        # All other processors scale by 1/255 by default, and do not crop unless they have a crop_size.
        fallback = {"rescale_factor": 1 / 255, "do_convert_rgb": False}
        fallback |= {} if fields.get("crop_size") else {"do_center_crop": False}
        defaults = DEFAULTS.get(family, fallback)
        for name, value in fields.items():  # a field that is null or false has no effect
            if name not in IDLE | VIT.keys() and not name.startswith("_") and value not in (None, False):
                raise InputError(
                    f"{where}: {name}={value!r:.60} of {kind} is not supported{did_you_mean(name, VIT)}; "
                    "remove the field if the model does not need it"
                )

        def get(name: str, valid: Callable[[Any], bool], expected: str) -> Any:
            if name not in fields and name not in defaults:
                raise InputError(f"{where}: {name!r} is missing, and the default of {kind!r} is unknown; add the field")
            value = fields.get(name, defaults.get(name))
            if not valid(value):
                raise InputError(f"{where}: expected {expected} for {name}, got {value!r:.60}")
            return value

        def flag(name: str) -> bool:
            return bool(get(name, lambda value: value is None or isinstance(value, bool), "true or false"))

        def sides(name: str) -> dict[str, int]:
            keys = [{"height", "width"}] + [{"shortest_edge"}] * (name == "size")
            expected = " or ".join(map(str, map(sorted, keys)))
            value = get(name, lambda value: isinstance(value, int | list | tuple | dict), expected)
            if isinstance(value, int):
                square = name == "crop_size" or flag("default_to_square")
                value = {"height": value, "width": value} if square else {"shortest_edge": value}
            elif not isinstance(value, dict):
                value = dict(zip(("height", "width"), value)) if len(value) == 2 else {}
            if set(value) not in keys or any(type(side) is not int for side in value.values()):
                raise InputError(f"{where}: expected {expected} for {name}, got {fields[name]!r:.60}")
            return value

        def colours(name: str) -> tuple[float, float, float]:
            value = get(name, _is_colour, "3 numbers")
            red, green, blue = [value] * 3 if _is_number(value) else value
            return float(red), float(green), float(blue)

        resized = sides("size") if flag("do_resize") else {}
        crop = sides("crop_size") if flag("do_center_crop") else None
        normalized = flag("do_normalize")
        settings: dict[str, Any] = {
            "size": (resized["height"], resized["width"]) if "height" in resized else None,
            "shortest_edge": resized.get("shortest_edge"),
            "resample": get("resample", _is_filter, "0 to 5 (Pillow's filters)") if resized else 2,
            "crop": (crop["height"], crop["width"]) if crop else None,
            "scale": float(get("rescale_factor", _is_number, "a number")) if flag("do_rescale") else None,
            "mean": colours("image_mean") if normalized else None,
            "std": colours("image_std") if normalized else None,
            "convert_rgb": flag("do_convert_rgb"),
        }
        try:
            return cls(**settings)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a preprocessor_config.json for transformers."""
        # Before transformers 5.0, ViT's processor cannot crop; DeiT's can. Only CLIP's preserves the aspect ratio.
        family = "CLIP" if self.shortest_edge else "DeiT" if self.crop else "ViT"
        fields: dict[str, Any] = {
            "image_processor_type": f"{family}ImageProcessor",
            "do_convert_rgb": self.convert_rgb,
            "do_resize": bool(self.size or self.shortest_edge),
            "resample": self.resample,
            "do_center_crop": self.crop is not None,
            "do_rescale": self.scale is not None,
            "do_normalize": self.mean is not None,
        }
        if self.size or self.shortest_edge:
            fields["size"] = _sides(self.size) if self.size else {"shortest_edge": self.shortest_edge}
        if self.crop:
            fields["crop_size"] = _sides(self.crop)
        if self.scale is not None:
            fields["rescale_factor"] = self.scale
        if self.mean and self.std:
            fields |= {"image_mean": list(self.mean), "image_std": list(self.std)}
        return fields

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width of all results; None if they depend on the image."""
        return self.crop or self.size

    def __call__(self, image: "PIL.Image.Image") -> "numpy.ndarray":
        """Return the preprocessed image as float32 [3, H, W]."""
        import numpy as np
        from PIL import Image

        if self.convert_rgb:
            image = _on_white(image)
        if image.mode != "RGB":
            raise InputError(f"expected an RGB image, got mode {image.mode}; read it with open_image")
        height, width = self._target_size(image.height, image.width)
        if self.size or self.shortest_edge:
            image = image.resize((width, height), Image.Resampling(self.resample))
        pixels = np.asarray(image)
        if self.crop:
            pixels = _centre_crop(pixels, self.crop)
        # A lookup table replaces the arithmetic: there are only 256 values per colour channel.
        return np.stack([self._lookup[colour][pixels[:, :, colour]] for colour in range(3)])

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after resizing, rounded as transformers does."""
        if not self.shortest_edge:
            return self.size or (height, width)
        # transformers truncates the longer side instead of rounding it.
        short, long = sorted((height, width))
        longer = int(self.shortest_edge * long / short)
        if longer * self.shortest_edge > MAX_PIXELS:
            raise UnreadableImage(
                f"the image has {width:,} × {height:,} pixels: too narrow to resize its shortest edge to "
                f"{self.shortest_edge}"
            )
        return (longer, self.shortest_edge) if width <= height else (self.shortest_edge, longer)

    @cached_property
    def _lookup(self) -> "numpy.ndarray":
        """Return the normalised value of each byte in each channel, [3, 256], rounded where transformers rounds."""
        import numpy as np

        values = np.arange(256, dtype=np.float64) * (1.0 if self.scale is None else self.scale)
        mean, std = (np.array(x, np.float32)[:, None] for x in (self.mean or (0, 0, 0), self.std or (1, 1, 1)))
        return (values.astype(np.float32) - mean) / std


def _on_white(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Convert an image to RGB, with white behind transparent pixels."""
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _centre_crop(pixels: "numpy.ndarray", size: tuple[int, int]) -> "numpy.ndarray":
    """Crop the centre; pad with zeros where the image is smaller."""
    import numpy as np

    excess = [side - target for side, target in zip(pixels.shape, size)]
    # For odd differences, transformers pads one row or column more before the image than after it.
    padding = [(-(e // 2), e // 2 - e) if e < 0 else (0, 0) for e in excess]
    top, left = (max(e, 0) // 2 for e in excess)
    return np.pad(pixels, [*padding, (0, 0)])[top : top + size[0], left : left + size[1]]


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def _is_filter(value: Any) -> bool:
    return type(value) is int and value in range(6)


def _is_colour(value: Any) -> bool:
    """Return whether a value is a number, or one number for each of red, green and blue."""
    return _is_number(value) or (isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
