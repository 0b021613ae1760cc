"""Which frames of a video are looked at, their pixels and times, and files that are no video."""

from __future__ import annotations

import ast
import io
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.models.glm5_next.image_processing_pil_glm5_next import (
    Glm5NextImageProcessorPil,
)

from glmflash.chat import video
from glmflash.chat.image import cut_image
from glmflash.chat.processor import ProcessorConfig
from glmflash.chat.video import cut_frames, cut_video, sample_frames
from glmflash.errors import MediaError

RULES = ProcessorConfig()
Frames = NDArray[np.uint8]


def reference_method(name: str) -> Any:
    """A method of transformers' video processor. Its module wants torchvision, these do not."""
    folder = Path(transformers.__file__).parent / "models" / "glm5_next"
    tree = ast.parse((folder / "video_processing_glm5_next.py").read_text())
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1
    for argument in [*found[0].args.args, *found[0].args.kwonlyargs]:
        argument.annotation = None
    found[0].returns = None
    space: dict[str, Any] = {"np": np, "torch": torch}
    exec(compile(ast.Module([found[0]], []), name, "exec"), space)
    return space[name]


REFERENCE_SAMPLE = reference_method("sample_frames")
REFERENCE_PATCHIFY = reference_method("patchify")


def reference_sample(
    total: int, fps: float, duration: float | None, target: float = 2, most: int = 2048
) -> list[int]:
    settings = SimpleNamespace(max_duration=0, fps=target, max_frames=most)
    metadata = SimpleNamespace(fps=fps, total_num_frames=total, duration=duration)
    return [int(i) for i in REFERENCE_SAMPLE(settings, metadata)]


def sample(total: int, fps: float, duration: float | None = None) -> list[int]:
    return sample_frames(total, fps, duration, 2.0, 2048)


def test_published_samples() -> None:
    assert sample(300, 30, 10.0) == list(range(0, 300, 15))
    assert sample(20, 24) == [0, 4, 8, 12]
    assert sample(7, 1) == [0, 1, 2, 3, 4, 5, 6, 6]
    assert len(sample(100_000, 24)) == 2048


RATES = st.sampled_from([0.4, 1, 2, 3, 10, 12.5, 15, 24000 / 1001, 24, 25, 30000 / 1001, 30, 59.94])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    total=st.one_of(st.integers(1, 60), st.integers(1, 3000)),
    fps=st.one_of(RATES, st.floats(0.1, 240)),
    known=st.booleans(),
    target=st.sampled_from([2.0, 1.0, 0.5, 3.0]),
    most=st.sampled_from([2048, 7, 40]),
)
def test_samples_equal_the_reference(
    total: int, fps: float, known: bool, target: float, most: int
) -> None:
    duration = total / fps if known else None
    expected = reference_sample(total, fps, duration, target, most)
    found = sample_frames(total, fps, duration, target, most)
    assert found == (expected or [0, 0])  # the reference takes nothing of the shortest clips
    assert len(found) % 2 == 0


def moving(count: int, height: int, width: int, seed: int = 0) -> Frames:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def normalised(clip: Frames) -> torch.Tensor:
    mean, std = (torch.tensor(x) * 255 for x in (RULES.video.image_mean, RULES.video.image_std))
    return ((torch.from_numpy(clip).float() - mean) / std).permute(0, 3, 1, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_patches_of_frames_equal_the_reference(count: int) -> None:
    """Frames that fill their canvas; an odd last one is repeated."""
    clip = moving(count, 112, 140)
    cut, times = cut_frames(clip, None, RULES)
    expected, *grid = REFERENCE_PATCHIFY(None, normalised(clip)[None], 14, 2, 2)
    assert list(cut.grid) == grid == [(count + 1) // 2, 8, 10]
    np.testing.assert_allclose(cut.pixel_values, expected[0].numpy(), rtol=0, atol=5e-7)
    assert times == tuple(i / 24 for i in range(0, count, 2))


def test_frames_are_resized_and_padded_as_pictures_are() -> None:
    """A clip of two equal frames is a picture."""
    picture = moving(1, 50, 77)
    cut, _ = cut_frames(np.concatenate([picture, picture]), None, RULES)
    expected = Glm5NextImageProcessorPil()(
        images=[PIL.Image.fromarray(picture[0])], return_tensors="np"
    )
    np.testing.assert_allclose(cut.pixel_values, expected["pixel_values"], rtol=0, atol=5e-7)
    assert np.array_equal(
        cut.pixel_values, cut_image(PIL.Image.fromarray(picture[0]), RULES.image).pixel_values
    )


def test_frames_with_a_rate_are_sampled() -> None:
    clip = moving(20, 112, 112)
    cut, times = cut_frames(clip, 24, RULES)
    assert np.array_equal(
        cut.pixel_values, cut_frames(clip[[0, 4, 8, 12]], None, RULES)[0].pixel_values
    )
    assert times == (0.0, 8 / 24)


def test_pillow_frames_and_arrays_are_one(tmp_path: Path) -> None:
    clip = moving(2, 112, 112)
    pictures = [PIL.Image.fromarray(frame) for frame in clip]
    expected = cut_frames(clip, 2, RULES)[0].pixel_values
    assert np.array_equal(cut_frames(pictures, 2, RULES)[0].pixel_values, expected)
    assert np.array_equal(
        cut_frames(list(clip[:, ::-1][:, ::-1]), 2, RULES)[0].pixel_values, expected
    )


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([], "no frames"),
        (moving(2, 0, 9), "frame 0 of the video is 9 x 0 pixels"),
        ([moving(1, 9, 9)[0], moving(1, 9, 8)[0]], "a frame is 8 x 9 pixels, the first one 9 x 9"),
        (moving(2, 9, 9).astype(np.float32), r"\[9, 9, 3\] of float32; expected uint8"),
        (moving(2, 9, 9)[..., 0], r"an array \[9, 9\] of uint8"),
        (["a.png"], "is a str"),
    ],
    ids=range(6),
)
def test_frames_that_are_none(frames: Any, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        cut_frames(frames, None, RULES)


CODECS = {
    "clip.mp4": ("mpeg4", "yuv420p"),
    "h264.mp4": ("libx264", "yuv420p"),
    "clip.mkv": ("ffv1", "bgr0"),
    "clip.webm": ("libvpx-vp9", "yuv420p"),
    "old.webm": ("libvpx", "yuv420p"),
    "clip.gif": ("gif", "rgb8"),
    "clip.avi": ("mpeg4", "yuv420p"),
    "clip.ts": ("libx264", "yuv420p"),
}


def write(
    path: Path,
    frames: Frames,
    rate: int | Fraction = 24,
    options: dict[str, str] | None = None,
    key_frames: int = 12,
) -> Path:
    codec, pixels = CODECS[path.name]
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = pixels, key_frames
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def greys(count: int, height: int = 48, width: int = 64) -> Frames:
    """Frame i is grey of level 2 i."""
    levels = (2 * np.arange(count) % 256).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3))


def levels(pixel_values: NDArray[np.float32], slices: int) -> NDArray[np.float64]:
    """The grey level of the top left patch of every frame."""
    rows = pixel_values.reshape(slices, -1, 3, 2, 14 * 14)[:, 0, 0].mean(-1, dtype=np.float64)
    return (rows.reshape(-1) * RULES.video.image_std[0] + RULES.video.image_mean[0]) * 255


@pytest.mark.parametrize("name", [name for name in CODECS if name != "clip.gif"])
def test_files(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """100 frames at 24 a second: 4.17 s, so 8 frames, the last of them at 3.5 s."""
    path = write(tmp_path / name, greys(100))
    chosen = reference_sample(100, 24, 100 / 24)
    assert chosen == [0, 12, 24, 36, 48, 60, 72, 84]
    cut, times = cut_video(path, RULES)
    assert cut.grid[0] == 4
    assert times == (0.0, 1.0, 2.0, 3.0)
    np.testing.assert_allclose(levels(cut.pixel_values, 4), 2 * np.array(chosen), atol=4)
    again, _ = cut_video(path.read_bytes(), RULES)
    assert np.array_equal(again.pixel_values, cut.pixel_values)
    assert capfd.readouterr() == ("", "")


def test_pixels_of_a_lossless_file(tmp_path: Path) -> None:
    clip = moving(30, 56, 84)
    path = write(tmp_path / "clip.mkv", clip, rate=10)
    chosen = reference_sample(30, 10, 3.0)
    cut, times = cut_video(path, RULES)
    assert np.array_equal(cut.pixel_values, cut_frames(clip[chosen], None, RULES)[0].pixel_values)
    assert times == tuple(i / 10 for i in chosen[::2])


def test_animated_gif(tmp_path: Path) -> None:
    path = write(tmp_path / "clip.gif", greys(60), rate=20)
    cut, times = cut_video(path, RULES)
    chosen = reference_sample(60, 20, 3.0)
    assert times == tuple(i / 20 for i in chosen[::2])
    assert np.abs(levels(cut.pixel_values, 3) - 2 * np.array(chosen)).max() < 32  # 8-bit colours


@pytest.mark.parametrize(("count", "rate"), [(1, 30), (5, 24), (20, 24), (31, 1)])
def test_short_and_slow_files(tmp_path: Path, count: int, rate: int) -> None:
    path = write(tmp_path / "clip.mkv", greys(count), rate=rate)
    expected = reference_sample(count, rate, count / rate) or [0, 0]
    cut, times = cut_video(path, RULES)
    assert cut.grid[0] == len(expected) // 2
    assert times == tuple(i / rate for i in expected[::2])


def test_rates_that_are_no_whole_number(tmp_path: Path) -> None:
    rate = Fraction(30000, 1001)
    path = write(tmp_path / "clip.mp4", greys(90), rate=rate)
    cut, times = cut_video(path, RULES)
    chosen = reference_sample(90, float(rate), float(90 / rate))
    assert times == tuple(i / float(rate) for i in chosen[::2])
    assert cut.grid[0] == 3


def test_a_stream_cut_out_of_a_recording(tmp_path: Path) -> None:
    """It starts between two key frames: 95 packets, but the first frames cannot be decoded."""
    whole = write(tmp_path / "h264.mp4", moving(100, 48, 64), key_frames=30)
    path = tmp_path / "cut.mkv"
    with av.open(str(whole)) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        packets = [p for p in source.demux(stream) if p.dts is not None]
        for packet in packets[5:]:
            packet.stream = copy
            target.mux(packet)
    with av.open(str(path)) as container:
        decoded = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    assert 40 < len(decoded) < 95
    chosen = reference_sample(len(decoded), 24, len(decoded) / 24)
    expected, _ = cut_frames(np.stack([decoded[i] for i in chosen]), None, RULES)
    cut, times = cut_video(path, RULES)
    assert np.array_equal(cut.pixel_values, expected.pixel_values)
    assert times == tuple(i / 24 for i in chosen[::2])


def test_rotated_recordings_are_turned_upright(tmp_path: Path) -> None:
    """The display matrix of a telephone held upright: columns become rows, clockwise."""
    clip = np.zeros((24, 112, 140, 3), np.uint8)
    clip[:, :28, :28] = 255  # top left
    path = write(tmp_path / "clip.mp4", clip)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 4 + 20 + 16  # version 0: times, track, duration; layer, volume
    assert struct.unpack(">9i", data[at : at + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    data[at : at + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 112 << 16, 0, 1 << 30)
    cut, _ = cut_video(bytes(data), RULES)
    assert cut.grid[1:] == (10, 8)
    rows = cut.pixel_values.reshape(80, 3, 2, 196)[:, 0, 0].mean(-1)
    assert [i for i, level in enumerate(rows) if level > 1] == [12, 13, 14, 15]  # top right


def test_all_frames_pass_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the frame being cut is held as a picture."""
    path = write(tmp_path / "clip.mp4", greys(100))
    made, held = 0, []
    original = video._frame_picture

    class Watched(PIL.Image.Image):
        def __del__(self) -> None:
            nonlocal made
            made -= 1

    def watched(*arguments: Any) -> PIL.Image.Image:
        nonlocal made
        picture = original(*arguments)
        picture.__class__ = Watched
        made += 1
        held.append(made)
        return picture

    monkeypatch.setattr(video, "_frame_picture", watched)
    cut_video(path, RULES)
    assert len(held) == 8
    assert max(held) <= 2  # the next one is made before the name of the last is taken


def sound_only() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def no_frames(path: Path) -> bytes:
    """A track of video in which no packet was written."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    return path.read_bytes()


def test_files_that_are_no_video(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start_first = {"movflags": "faststart"}
    clip = moving(60, 48, 64)
    whole = write(tmp_path / "h264.mp4", clip, options=start_first).read_bytes()
    index_last = write(tmp_path / "clip.mp4", clip).read_bytes()
    scrambled = bytearray(whole)
    scrambled[len(whole) // 3 :] = bytes(len(whole) - len(whole) // 3)
    picture = io.BytesIO()
    PIL.Image.new("RGB", (9, 9)).save(picture, "PNG")
    cases = [
        (b"", "cannot be read as a video"),
        (b"this is a text, and no video" * 99, "cannot be read as a video"),
        (picture.getvalue(), "cannot be read as a video"),
        (whole[: len(whole) // 2], "is cut short after"),
        (index_last[: len(index_last) // 2], "holds no video|cannot be read"),
        (bytes(scrambled), "cannot be read as a video"),
        (sound_only(), "holds no video .streams: audio."),
        (no_frames(tmp_path / "empty.avi"), "is a video without frames"),
        (no_frames(tmp_path / "empty.mkv"), "ends before its first frame"),
    ]
    for data, says in cases:
        path = tmp_path / "bad"
        path.write_bytes(data)
        for source, name in ((data, "the given data"), (path, str(path))):
            with pytest.raises(MediaError, match=says) as raised:
                cut_video(source, RULES)
            assert str(raised.value).startswith(name)
            assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    """Else a video sent by a stranger could read files of this machine."""
    secret = write(tmp_path / "clip.ts", greys(50))
    lists = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
        "ffconcat version 1.0\nfile clip.ts\n",
    ]
    for number, text in enumerate(lists):
        path = tmp_path / f"list{number}.mp4"
        path.write_text(text)
        with pytest.raises(MediaError, match="cannot be read as a video"):
            cut_video(path, RULES)


def test_titles_of_any_bytes(tmp_path: Path) -> None:
    data = write(tmp_path / "clip.mp4", greys(30)).read_bytes()
    assert cut_video(data.replace(b"Lavf", b"\xe9\xffvf", 1), RULES)[0].grid[0] == 1


def test_unknown_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No container that can be written here leaves the rate out, so the stream is made to."""
    path = write(tmp_path / "clip.mp4", greys(30))
    real = video._video_stream

    def without_rate(*arguments: Any) -> Any:
        stream = real(*arguments)
        return SimpleNamespace(average_rate=None, guessed_rate=Fraction(0), stream=stream)

    monkeypatch.setattr(video, "_video_stream", without_rate)
    with pytest.raises(MediaError, match="has no frame rate"):
        cut_video(path, RULES)
