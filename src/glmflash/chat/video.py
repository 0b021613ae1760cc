"""Videos: which frames are looked at, when each was, and reading them from a file.

Knows the sampling rule and PyAV; leaves sizing and cutting to `image`. Frames pass through one at a
time, so a long video needs memory only for the patches of the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glmflash.chat.image import (
    PatchCutter,
    check_size,
    describe,
    one_line,
    open_source,
    require_pillow,
    upright_rgb,
)
from glmflash.chat.processor import ProcessorConfig
from glmflash.errors import MediaError, MissingExtraError

if TYPE_CHECKING:
    import av.container
    import av.video.frame
    import av.video.stream
    from PIL.Image import Image as PillowImage

# Containers that hold their own data. Playlists can name other files, which a video must not open.
CONTAINERS = "mov,matroska,avi,gif,mpegts,mpeg,flv,ogg,asf,apng,h264,hevc,ivf"
UNKNOWN_FPS = 24.0


def sample_frames(
    total: int, fps: float, duration: float | None, target: float, most: int
) -> list[int]:
    """Indices of the frames to look at: about `target` a second, an even number, at most `most`.

    total: frames of the video. duration: seconds, if known from its file. The arithmetic is that of
    transformers' Glm5NextVideoProcessor, rounding included, except that a video too short for one
    frame keeps its first (there it fails).
    """
    seconds = duration or round((total - 1) / fps) + 1
    wanted = max(1, min(int(seconds * target), most))
    if total < wanted:
        chosen = _spread(0, total - 1, wanted)
    else:
        chosen = _walk(total, fps, int(seconds), target)
    if len(chosen) < wanted:
        chosen = _spread(chosen[0], chosen[-1], wanted)
    elif len(chosen) > wanted:
        chosen = _spread(0, total - 1, wanted)
    chosen = list(dict.fromkeys(chosen))
    return chosen + chosen[-1:] if len(chosen) % 2 else chosen


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(i) for i in np.linspace(first, last, count, dtype=int)]


def _walk(total: int, fps: float, seconds: int, target: float) -> list[int]:
    """Every frame that is the first at or after the next multiple of 1/target seconds."""
    chosen: list[int] = []
    due, frame_time = 0.0, 1 / fps
    for index in range(total):
        if index * frame_time >= due:
            due += 1 / target
            chosen.append(index)
            if due >= seconds:
                break
    return chosen


def slice_times(indices: Sequence[int], fps: float, step: int) -> tuple[float, ...]:
    """Seconds of the first frame of every slice of `step` frames."""
    return tuple(index / fps for index in indices[::step])


def cut_frames(
    frames: Sequence[NDArray[np.uint8] | PillowImage] | NDArray[np.uint8],
    fps: float | None,
    processor: ProcessorConfig,
) -> tuple[PatchCutter, tuple[float, ...]]:
    """Cut frames into patches; also the times of the slices. fps None: all frames are taken.

    Raises MediaError, MissingExtraError.
    """
    require_pillow()
    if len(frames) == 0:
        raise MediaError("the video has no frames")
    if fps is None:
        indices = list(range(len(frames)))
    else:
        indices = sample_frames(len(frames), fps, None, processor.fps, processor.max_frames)
    cutter: PatchCutter | None = None
    for index, positions in _positions(indices, processor).items():
        picture = _as_picture(frames[index], f"frame {index} of the video")
        if cutter is None:
            cutter = PatchCutter(len(indices), picture.height, picture.width, processor.video)
        cutter.put(picture, positions)
    if cutter is None:
        raise RuntimeError("no frame was chosen")
    step = processor.video.temporal_patch_size
    return cutter, slice_times(indices, fps or UNKNOWN_FPS, step)


def cut_video(
    source: str | Path | bytes, processor: ProcessorConfig
) -> tuple[PatchCutter, tuple[float, ...]]:
    """Read a file of video and cut the sampled frames; also the times of the slices.

    Raises MediaError, MissingExtraError.
    """
    require_pillow()
    name = describe(source)
    total, rate = _count_packets(source, name)
    while True:
        fps, duration = float(rate), float(total / rate)
        indices = sample_frames(total, fps, duration, processor.fps, processor.max_frames)
        cutter, decoded = _cut_decoded(source, name, indices, processor)
        if cutter is None:
            raise MediaError(f"{name} has no frame that can be decoded")
        if decoded == total:
            step = processor.video.temporal_patch_size
            return cutter, slice_times(indices, fps, step)
        total = decoded  # some packets hold no picture of their own; choose again by what there is


def _cut_decoded(
    source: str | Path | bytes, name: str, indices: list[int], processor: ProcessorConfig
) -> tuple[PatchCutter | None, int]:
    """Cut the frames `indices`; also how many frames there are in all."""
    positions = _positions(indices, processor)
    cutter: PatchCutter | None = None
    count = 0
    with _opened(source, name) as (container, stream):
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            if count in positions:
                picture = _frame_picture(frame, cutter)
                if cutter is None:
                    cutter = PatchCutter(
                        len(indices), picture.height, picture.width, processor.video
                    )
                cutter.put(picture, positions[count])
            count += 1
    return cutter, count


def _positions(indices: list[int], processor: ProcessorConfig) -> dict[int, list[int]]:
    """Where each chosen frame goes in the clip; the last one also fills an incomplete slice."""
    missing = -len(indices) % processor.video.temporal_patch_size
    found: dict[int, list[int]] = {}
    for position, index in enumerate(indices + indices[-1:] * missing):
        found.setdefault(index, []).append(position)
    return found


def _as_picture(frame: NDArray[np.uint8] | PillowImage, name: str) -> PillowImage:
    import PIL.Image

    if isinstance(frame, PIL.Image.Image):
        return upright_rgb(frame, name)
    if not isinstance(frame, np.ndarray):
        raise MediaError(f"{name} is a {type(frame).__name__}, not an array or a Pillow image")
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise MediaError(
            f"{name} is an array {list(frame.shape)} of {frame.dtype}; expected uint8 [H, W, 3]"
        )
    check_size(frame.shape[1], frame.shape[0], name)
    return PIL.Image.fromarray(np.ascontiguousarray(frame))


def _frame_picture(frame: av.video.frame.VideoFrame, cutter: PatchCutter | None) -> PillowImage:
    """A decoded frame as RGB, upright, at the size of the first one if the stream changes size."""
    import PIL.Image

    turns = round(frame.rotation / 90)  # counter-clockwise
    size: dict[str, Any] = {}
    if cutter is not None:
        height, width = cutter.size[::-1] if turns % 2 else cutter.size
        size = {"width": width, "height": height}
    rgb = frame.to_ndarray(format="rgb24", **size)
    return PIL.Image.fromarray(np.ascontiguousarray(np.rot90(rgb, turns)))


def _count_packets(source: str | Path | bytes, name: str) -> tuple[int, Fraction]:
    """Frames by the count of packets (headers may say nothing, or lie), and frames a second."""
    with _opened(source, name) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        if not rate or rate <= 0:
            raise MediaError(f"{name} has no frame rate, so its frames have no time")
        count, cut_short = 0, False
        for packet in container.demux(stream):
            if packet.size:  # an empty one ends the stream
                count, cut_short = count + 1, packet.is_corrupt
        if cut_short:
            raise MediaError(f"{name} is cut short after {count} frames; give the whole file")
    if not count:
        raise MediaError(f"{name} is a video without frames")
    return count, Fraction(rate.numerator, rate.denominator)


@contextmanager
def _opened(
    source: str | Path | bytes, name: str
) -> Iterator[tuple[av.container.InputContainer, av.video.stream.VideoStream]]:
    """The container and its video stream. Raises MediaError, also for what fails inside."""
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("reading videos", "media") from error

    arguments: dict[str, Any] = {
        "options": {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    }
    if int(av.__version__.split(".")[0]) < 19:  # later ones accept any bytes in titles and names
        arguments["metadata_errors"] = "replace"
    with open_source(source) as stream:
        try:
            with av.open(stream, mode="r", **arguments) as container:
                yield container, _video_stream(container, name)
        except av.error.EOFError as error:
            raise MediaError(f"{name} ends before its first frame") from error
        except av.FFmpegError as error:
            what = f"{name} cannot be read as a video (mp4, webm, mkv, avi, gif, ...)"
            raise MediaError(f"{what}: {one_line(error)}") from error


def _video_stream(container: av.container.InputContainer, name: str) -> av.video.stream.VideoStream:
    from av.stream import Disposition

    covers = Disposition.attached_pic  # a record's cover is no video
    streams = [s for s in container.streams.video if not s.disposition & covers]
    if not streams:
        kinds: list[str] = sorted({s.type for s in container.streams})
        raise MediaError(
            f"{name} holds no video (streams: {', '.join(kinds) or 'none'}); "
            "give a complete file with moving pictures"
        )
    check_size(streams[0].width, streams[0].height, name)
    return streams[0]
