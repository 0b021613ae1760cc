"""Pictures and videos on their way into a prompt: the public face.

Knows what a user may hand over and what the engine receives. Reading and cutting are in `image`
and `video`, the rules in `processor`; Pillow and PyAV are imported only when a medium is prepared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from glmflash.chat.processor import PixelRules, ProcessorConfig
from glmflash.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    Frame = NDArray[np.uint8] | PillowImage

__all__ = ["Image", "PixelRules", "PreparedMedia", "ProcessorConfig", "Video", "prepare"]


@dataclass(frozen=True)
class Image:
    """A picture: a file, its bytes, or an open Pillow image."""

    source: str | Path | bytes | PillowImage

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Image:
        """The picture in a file. Raises MediaError at once if there is no such file."""
        return cls(_existing(path))


@dataclass(frozen=True, eq=False)
class Video:
    """A video: a file, its bytes, or frames.

    frames: all of one size, Pillow images or uint8 arrays `[H, W, 3]` (or one `[N, H, W, 3]`).
    fps: their rate. With it they are sampled as a file is; without it they are taken as chosen
    already, and their times are counted at 24 frames a second. Raises MediaError.
    """

    source: str | Path | bytes | None = None
    frames: Sequence[Frame] | NDArray[np.uint8] | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (self.frames is None):
            raise MediaError("a Video is made of a source or of frames, one of them")
        if self.fps is not None and self.source is not None:
            raise MediaError("fps goes with frames; a video file brings its own rate")
        if self.fps is not None and not 1e-6 <= self.fps <= 1e6:
            raise MediaError(f"fps is {self.fps}; frames have a rate above 0 (1e-6 to 1e6)")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Video:
        """The video in a file. Raises MediaError at once if there is no such file."""
        return cls(_existing(path))


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """A medium cut into normalised patches.

    pixel_values: fp32 `[t*h*w, C*T*p*p]`, slice by slice, in order of 2x2 blocks inside a slice.
    grid: (t, h, w) in patches. timestamps: seconds, one for each slice of a video. digest: SHA-256
    of all that the model sees; equal digests mean equal features. merge_size: patches of a token's
    side.
    """

    kind: Literal["image", "video"]
    pixel_values: NDArray[np.float32]
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...]
    digest: str
    merge_size: int = 2

    @property
    def slices(self) -> int:
        """1 for a picture; pairs of frames for a video."""
        return self.grid[0]

    @property
    def tokens(self) -> int:
        """Placeholders of one slice."""
        return self.grid[1] * self.grid[2] // self.merge_size**2


def prepare(media: Image | Video, processor: ProcessorConfig) -> PreparedMedia:
    """Read, size and cut a medium.

    Raises MediaError if it cannot be read, MissingExtraError without Pillow (or PyAV, for a file
    of video).
    """
    if isinstance(media, Image):
        from glmflash.chat.image import cut_image

        cut = cut_image(media.source, processor.image)
        return _prepared("image", cut.pixel_values, cut.grid, (), processor.image)
    if isinstance(media, Video):
        from glmflash.chat.video import cut_frames, cut_video

        if media.source is not None:
            cut, times = cut_video(media.source, processor)
        else:
            frames = () if media.frames is None else media.frames  # "or" fails on an array
            cut, times = cut_frames(frames, media.fps, processor)
        return _prepared("video", cut.pixel_values, cut.grid, times, processor.video)
    raise MediaError(f"a medium is an Image or a Video, not {type(media).__name__}")


def _prepared(
    kind: Literal["image", "video"],
    pixel_values: NDArray[np.float32],
    grid: tuple[int, int, int],
    times: tuple[float, ...],
    rules: PixelRules,
) -> PreparedMedia:
    digest = hashlib.sha256(f"{kind} {grid} {times}\n".encode())
    digest.update(pixel_values.data)
    return PreparedMedia(kind, pixel_values, grid, times, digest.hexdigest(), rules.merge_size)


def _existing(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not found.is_file():
        kind = "is not a file" if found.exists() else "does not exist"
        raise MediaError(f"{found} {kind}")
    return found
