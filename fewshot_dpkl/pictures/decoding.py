"""Picture files, PIL images, arrays and tensors to square RGB pixels; all pictures are decoded here.

A picture that cannot be decoded, or should not be, is refused with a `PictureError` that says why.
"""

from __future__ import annotations

import importlib.util
import io
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

MAX_BYTES = 256 * 2**20  # of a file
MAX_PIXELS = 120_000_000  # decoded: a few kilobytes can unfold to many gigabytes
MAX_RATIO = 16  # of the longer side to the shorter one: what is cut off later need not be enlarged first

Picture = str | os.PathLike[str] | bytes | Image.Image | np.ndarray | Tensor
"""A path, the bytes of a file, a PIL image, an array `[H, W, 3]` or `[H, W]`, or a tensor `[3, H, W]` or
`[1, H, W]`; arrays and tensors hold uint8, uint16 or floats from 0 to 1."""

# Formats that Pillow decodes itself (EPS, for one, would start another program).
Image.init()
FORMATS: list[str] = [
    name for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "PPM") if name in Image.OPEN
]
HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}  # brands, of HEIF with HEVC
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by the EXIF orientation
_filters = threading.Lock()  # warning filters belong to the process


class PictureError(ValueError):
    """Why a picture is refused."""


def decode(content: bytes, size: int) -> np.ndarray:
    """A picture file to uint8 `[size, size, 3]`: shorter side resized to `size`, centre square cut out.

    Turned upright by its EXIF orientation, the first frame of an animation, transparency over white,
    16 bits per channel reduced to 8.
    """
    formats = _formats(content[:64])
    with _refusing_damage():
        with _quiet():  # the number of pixels is judged by `square`
            picture = Image.open(io.BytesIO(content), formats=formats)
        with picture:
            return square(picture, size)


def _formats(start: bytes) -> list[str]:
    """The formats to try on a file that begins with `start`; refuses those that cannot be read here."""
    if not start:
        raise PictureError("the file is empty (0 bytes)")
    brands = {start[place : place + 4] for place in (8, *range(16, len(start), 4))}
    if start[4:8] == b"ftyp" and brands & HEIC:
        if importlib.util.find_spec("pillow_heif") is None:
            raise PictureError("a HEIC picture; `pip install pillow-heif` to read it, or save it as JPEG")
        import pillow_heif

        pillow_heif.register_heif_opener()
        return ["HEIF"]
    accept = [Image.OPEN[name][1] for name in FORMATS]
    if not any(known is None or known(start) for known in accept):
        raise PictureError(f"no picture in a known format ({', '.join(FORMATS)})")
    return FORMATS


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow warns of what is handled or refused here anyway."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _refusing_damage() -> Iterator[None]:
    """Whatever a decoder makes of damaged files becomes a PictureError."""
    try:
        yield
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"too many pixels, at most {MAX_PIXELS:,} are decoded") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"no picture in a known format ({', '.join(FORMATS)})") from error
    except Exception as error:  # decoders raise all kinds of them
        raise PictureError(f"damaged: {error}") from error


def square(picture: Image.Image, size: int) -> np.ndarray:
    """A PIL image to uint8 `[size, size, 3]`, see `decode`."""
    if picture.width * picture.height > MAX_PIXELS:
        raise PictureError(
            f"{picture.width} × {picture.height} pixels are too many, at most {MAX_PIXELS:,} are decoded"
        )
    if not min(picture.size):
        raise PictureError("no pixels")
    turn = UPRIGHT.get(_orientation(picture))
    picture = _to_rgb(picture)
    picture = picture.transpose(turn) if turn is not None else picture
    shorter = min(picture.size)
    picture = _middle(
        picture, min(picture.width, MAX_RATIO * shorter), min(picture.height, MAX_RATIO * shorter)
    )
    if shorter != size:
        width, height = (max(size, round(side * size / shorter)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(_middle(picture, size, size))


def prepare(picture: Picture, size: int) -> np.ndarray:
    """Any `Picture` to uint8 `[size, size, 3]`, see `decode`."""
    if isinstance(picture, (str, os.PathLike)):
        return decode(read(picture), size)
    if isinstance(picture, bytes):
        return decode(picture, size)
    if isinstance(picture, Image.Image):
        with _refusing_damage():  # one opened from a file is decoded only now
            return square(picture, size)
    if isinstance(picture, Tensor):
        if picture.ndim != 3 or picture.shape[0] not in (1, 3):
            raise PictureError(f"a tensor of shape {list(picture.shape)}, expected [3, H, W] or [1, H, W]")
        return square(_from_array(picture.detach().cpu().permute(1, 2, 0).numpy()), size)
    if isinstance(picture, np.ndarray):
        return square(_from_array(picture), size)
    raise PictureError(
        f"{type(picture).__name__} is no kind of picture, give a path, a PIL image, an array or a tensor"
    )


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that may be a picture by its size."""
    try:
        about = Path(path).stat()
        if not stat.S_ISREG(about.st_mode):
            raise PictureError("not a file")
        if about.st_size > MAX_BYTES:
            raise PictureError(f"{about.st_size >> 20} MB are too many, at most {MAX_BYTES >> 20} are read")
        with open(path, "rb") as file:
            start = file.read(64)
            _formats(start)  # a film is not read to its end
            return start + file.read()
    except FileNotFoundError as error:
        raise PictureError("there is no such file") from error
    except OSError as error:
        raise PictureError(f"cannot be read: {error.strerror}") from error


def _orientation(picture: Image.Image) -> int:
    try:
        with _quiet():
            return int(picture.getexif().get(0x0112, 1))
    except Exception:  # cameras write all kinds of broken EXIF data; the picture is then taken as it is
        return 1


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise PictureError("32-bit values of unknown range, save it with 8 or 16 bits per channel")
        picture = Image.fromarray((values >> 8).astype(np.uint8))
    if picture.mode == "F":
        raise PictureError("float values of unknown range, save it with 8 or 16 bits per channel")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _from_array(values: np.ndarray) -> Image.Image:
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or values.shape[2] not in (1, 3) or not values.size:
        raise PictureError(f"an array of shape {list(values.shape)}, expected [H, W, 3] or [H, W]")
    if np.issubdtype(values.dtype, np.floating):
        if not (values.min() >= 0 and values.max() <= 1):  # also refuses NaN
            raise PictureError(
                f"values from {values.min():.3g} to {values.max():.3g}, floats should go from 0 to 1 "
                "(give the picture before it is normalised)"
            )
        values = (values * 255).round().astype(np.uint8)
    elif values.dtype == np.uint16:
        values = (values >> 8).astype(np.uint8)
    if values.dtype != np.uint8:
        raise PictureError(f"values of type {values.dtype}, expected uint8, uint16 or floats from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(values, (*values.shape[:2], 3))))


def _middle(picture: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))
