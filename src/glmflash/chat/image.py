"""Pictures: reading, the canvas, and the cut into patches (which videos share).

Knows the sizing rules and the order of patches and of the values inside one; does not know which
frames of a video are chosen.
"""

from __future__ import annotations

import io
import math
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from glmflash.chat.processor import PixelRules
from glmflash.errors import MediaError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# Formats that Pillow decodes by itself. Others run programs (EPS) or have no magic number (TGA).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
MOST_PIXELS = 2**28  # above any camera; 0.8 GB as RGB
_PILLOW_GLOBALS = threading.Lock()


@dataclass(frozen=True)
class Canvas:
    """Sizes in pixels: of the whole, which patches fill, and of the picture at its top left."""

    height: int
    width: int
    content_height: int
    content_width: int


def plan_canvas(frames: int, height: int, width: int, rules: PixelRules) -> Canvas:
    """The canvas of a clip of `frames` frames (a picture counts as temporal_patch_size of them).

    Sides are multiples of a token's; frames times area keep within the token limits. The picture is
    not stretched to fill it: it is shrunk if it must be, and enlarged only from below the lower
    limit. Raises MediaError if one token a slice is already too much.
    """
    factor, step = rules.factor, rules.temporal_patch_size
    least = rules.min_image_tokens * rules.token_pixels
    most = rules.max_image_tokens * rules.token_pixels

    def align(side: int) -> int:
        return math.ceil(side / factor) * factor

    counted = max(step, round(frames / step) * step)  # half to even
    tall, wide = align(height), align(width)
    if counted * tall * wide < least:
        scale = math.sqrt(least / (frames * height * width))
        tall = align(max(1, math.ceil(height * scale)))
        wide = align(max(1, math.ceil(width * scale)))
    if counted * tall * wide > most:
        if counted * factor**2 > most:
            raise MediaError(
                f"{frames} frames do not fit {rules.max_image_tokens} tokens even at one token a "
                "slice; give fewer frames"
            )
        tall, wide = _largest_within(most // counted, height, width, factor)

    scale = min(tall / height, wide / width)
    if frames * height * width >= least:
        scale = min(1.0, scale)
    return Canvas(
        tall,
        wide,
        max(1, min(tall, math.floor(height * scale))),
        max(1, min(wide, math.floor(width * scale))),
    )


def _largest_within(area: int, height: int, width: int, factor: int) -> tuple[int, int]:
    """Sides of the largest canvas of at most `area` pixels: a search over content heights."""
    best = (factor, factor)
    low, high = 1, height
    while low <= high:
        middle = (low + high) // 2
        tall = math.ceil(middle / factor) * factor
        wide = math.ceil(max(1, math.floor(width * middle / height)) / factor) * factor
        if tall * wide <= area:
            best, low = (tall, wide), middle + 1
        else:
            high = middle - 1
    return best


class PatchCutter:
    """Takes frames of one size, one at a time, and lays them out as normalised patches.

    pixel_values: fp32 `[t*h*w, C*T*p*p]`. A row holds channel, frame, row, column; rows follow
    slices, then the blocks of merge x merge patches, then the patches of a block.
    """

    def __init__(self, frames: int, height: int, width: int, rules: PixelRules) -> None:
        """frames, height, width: of the clip, before padding. Raises MediaError."""
        self.rules = rules
        self.size = (height, width)
        self.canvas = plan_canvas(frames, height, width, rules)
        patch, step = rules.patch_size, rules.temporal_patch_size
        self.grid = (
            math.ceil(frames / step),
            self.canvas.height // patch,
            self.canvas.width // patch,
        )
        per_slice = self.grid[1] * self.grid[2]
        self._values = np.empty(
            (self.grid[0], per_slice, len(rules.image_mean), step, patch * patch), np.float32
        )
        grey = np.arange(256, dtype=np.float32)
        mean, std = (np.array(x, np.float32) * 255 for x in (rules.image_mean, rules.image_std))
        self._normalised = (grey - mean[:, None]) / std[:, None]

    @property
    def pixel_values(self) -> NDArray[np.float32]:
        """All patches; complete once every frame has been put."""
        return self._values.reshape(math.prod(self.grid), -1)

    def put(self, picture: PillowImage, positions: Iterable[int]) -> None:
        """Resize an RGB picture and write its patches as the frames `positions` of the clip.

        Padding is raw black: it is normalised with the rest. Raises MediaError if the picture is
        of another size than the clip.
        """
        import PIL.Image

        if (picture.height, picture.width) != self.size:
            raise MediaError(
                f"a frame is {picture.width} x {picture.height} pixels, the first one "
                f"{self.size[1]} x {self.size[0]}; all frames of a video must be of one size"
            )
        canvas = self.canvas
        content = (canvas.content_width, canvas.content_height)
        if picture.size != content:
            picture = picture.resize(content, PIL.Image.Resampling.BICUBIC)
        pixels = np.zeros((canvas.height, canvas.width, 3), np.uint8)
        pixels[: content[1], : content[0]] = np.asarray(picture)
        patches = self._block_major(pixels)
        for position in positions:
            at, frame = divmod(position, self.rules.temporal_patch_size)
            for channel, values in enumerate(self._normalised):
                self._values[at, :, channel, frame] = values[patches[:, channel]]

    def _block_major(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[H, W, 3]` to `[h*w, 3, p*p]`."""
        merge, patch = self.rules.merge_size, self.rules.patch_size
        rows, columns = self.grid[1] // merge, self.grid[2] // merge
        cells = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
        return cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch * patch)


def cut_image(source: str | Path | bytes | PillowImage, rules: PixelRules) -> PatchCutter:
    """Read a picture and cut it into patches. Raises MediaError, MissingExtraError."""
    picture = read_image(source)
    frames = rules.temporal_patch_size  # the picture stands for each frame of its only slice
    cutter = PatchCutter(frames, picture.height, picture.width, rules)
    cutter.put(picture, range(frames))
    return cutter


def read_image(source: str | Path | bytes | PillowImage) -> PillowImage:
    """The picture as RGB, upright by its EXIF orientation; the first frame of an animation.

    Transparency is dropped, as transformers' loader does. Raises MediaError, MissingExtraError.
    """
    require_pillow()
    if not isinstance(source, str | Path | bytes):
        return upright_rgb(source, "the given Pillow image")
    name = describe(source)
    with open_source(source) as stream, _identified(stream, name) as picture:
        return upright_rgb(picture, name)


def upright_rgb(picture: PillowImage, name: str) -> PillowImage:
    """Decode, turn upright, convert to RGB; too large pictures are refused before decoding."""
    import PIL.ImageOps

    check_size(picture.width, picture.height, name)
    try:
        with _quiet():
            return PIL.ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # a damaged file makes decoders raise whatever they trip over
        raise MediaError(f"{name} cannot be decoded: {one_line(error)}") from error


@contextmanager
def _identified(stream: BinaryIO, name: str) -> Iterator[PillowImage]:
    """The picture with its header read and nothing decoded."""
    import PIL.Image

    PIL.Image.init()
    formats = [name for name in FORMATS if name in PIL.Image.OPEN]  # AVIF is missing from old ones
    try:
        with _quiet():
            limit, PIL.Image.MAX_IMAGE_PIXELS = PIL.Image.MAX_IMAGE_PIXELS, None  # ours comes next
            try:
                picture = PIL.Image.open(stream, formats=formats)
            finally:
                PIL.Image.MAX_IMAGE_PIXELS = limit
    except PIL.UnidentifiedImageError as error:
        raise MediaError(
            f"{name} is not a picture that can be read ({', '.join(formats)})"
        ) from error
    except Exception as error:
        raise MediaError(f"{name} has a damaged header: {one_line(error)}") from error
    with picture:
        yield picture


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of Pillow; one thread at a time, because warning filters are global."""
    with _PILLOW_GLOBALS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def require_pillow() -> None:
    """Raises MissingExtraError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("reading pictures and videos", "media") from error


def check_size(width: int, height: int, name: str) -> None:
    """Raises MediaError on an empty picture, or one too large to decode."""
    if width < 1 or height < 1:
        raise MediaError(f"{name} is {width} x {height} pixels: there is nothing to see")
    if width * height > MOST_PIXELS:
        raise MediaError(
            f"{name} is {width} x {height} pixels; at most {MOST_PIXELS:,} pixels are read, "
            "make it smaller"
        )


def describe(source: str | Path | bytes) -> str:
    """How messages name a source."""
    if isinstance(source, bytes):
        return f"the given data ({len(source):,} bytes)"
    path = str(source)
    return path if path.isprintable() else repr(path)


@contextmanager
def open_source(source: str | Path | bytes) -> Iterator[BinaryIO]:
    """A file or bytes, opened for reading. Raises MediaError."""
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    try:
        stream = Path(source).open("rb")  # noqa: SIM115 (closed below; errors inside are others')
    except FileNotFoundError as error:
        raise MediaError(f"{describe(source)} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise MediaError(f"{describe(source)} cannot be read: {one_line(error)}") from error
    with stream:
        yield stream


def one_line(error: Exception) -> str:
    """The first line of what an error says, or its kind."""
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__
