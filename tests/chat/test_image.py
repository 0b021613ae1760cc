"""Sizes, pixels and patch order of pictures, and files that are none."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_utils import load_image
from transformers.models.glm5_next.image_processing_pil_glm5_next import (
    Glm5NextImageProcessorPil,
    smart_resize,
)

from glmflash.chat.image import MOST_PIXELS, Canvas, cut_image, plan_canvas, read_image
from glmflash.chat.processor import PixelRules, ProcessorConfig
from glmflash.errors import MediaError

RULES = ProcessorConfig().image
VIDEO_RULES = ProcessorConfig().video
# fp32 rounding of (p - 255 mean) / (255 std) against (p / 255 - mean) / std
ROUNDING = 5e-7


def random_picture(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    random = np.random.default_rng(seed)
    return PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def with_limits(least: int, most: int) -> PixelRules:
    return ProcessorConfig.from_dict(
        {"image_processor": {"min_image_tokens": least, "max_image_tokens": most}}
    ).image


# Height, width; canvas; content; tokens. Published values of the released processor.
PICTURES = [
    ((14, 14), (112, 112), (112, 112), 16),
    ((28, 28), (112, 112), (112, 112), 16),
    ((64, 128), (84, 168), (84, 168), 18),
    ((224, 224), (224, 224), (224, 224), 64),
    ((336, 500), (336, 504), (336, 500), 216),
    ((448, 448), (448, 448), (448, 448), 256),
    ((720, 1280), (728, 1288), (720, 1280), 1196),
    ((1080, 1920), (1092, 1932), (1080, 1920), 2691),
    ((2160, 3840), (1876, 3332), (1874, 3332), 7973),
    ((3000, 4000), (2156, 2884), (2156, 2874), 7931),
    ((4000, 3000), (2884, 2156), (2874, 2156), 7931),
    ((10000, 10000), (2492, 2492), (2492, 2492), 7921),
]


@pytest.mark.parametrize(("size", "canvas", "content", "tokens"), PICTURES)
def test_published_picture_sizes(
    size: tuple[int, int], canvas: tuple[int, int], content: tuple[int, int], tokens: int
) -> None:
    assert plan_canvas(2, *size, RULES) == Canvas(*canvas, *content)
    assert canvas[0] * canvas[1] // 28**2 == tokens


# Frames, height, width; canvas; slices; tokens of a slice.
VIDEOS = [
    ((2, 28, 28), (112, 112), 1, 16),
    ((20, 360, 640), (364, 644), 10, 299),
    ((120, 720, 1280), (728, 1288), 60, 1196),
    ((600, 1080, 1920), (588, 1064), 300, 798),
    ((2048, 720, 1280), (308, 560), 1024, 220),
]


@pytest.mark.parametrize(("clip", "canvas", "slices", "tokens"), VIDEOS)
def test_published_video_sizes(
    clip: tuple[int, int, int], canvas: tuple[int, int], slices: int, tokens: int
) -> None:
    found = plan_canvas(*clip, VIDEO_RULES)
    assert (found.height, found.width) == canvas
    assert clip[0] // 2 == slices
    assert found.height * found.width // 28**2 == tokens


SIDES = st.one_of(st.integers(1, 120), st.integers(1, 12_000), st.sampled_from([1, 2, 100_000]))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(frames=st.integers(1, 3000), height=SIDES, width=SIDES, limits=st.sampled_from([0, 1, 2]))
def test_canvas_of_any_size(frames: int, height: int, width: int, limits: int) -> None:
    least, most = [(16, 8000), (16, 240_000), (1, 3)][limits]
    try:
        expected = smart_resize(frames, height, width, min_pixels=least, max_pixels=most)
    except ValueError:
        with pytest.raises(MediaError, match="fewer frames"):
            plan_canvas(frames, height, width, with_limits(least, most))
        return
    canvas = plan_canvas(frames, height, width, with_limits(least, most))
    assert (canvas.height, canvas.width) == expected
    assert 1 <= canvas.content_height <= canvas.height
    assert 1 <= canvas.content_width <= canvas.width


@pytest.mark.parametrize(
    "size",
    [(14, 14), (1, 1), (64, 128), (100, 180), (112, 112), (333, 77), (30, 700), (1, 90)],
)
def test_pixels_equal_the_reference(size: tuple[int, int]) -> None:
    picture = random_picture(*size)
    expected = Glm5NextImageProcessorPil()(images=[picture], return_tensors="np")
    cut = cut_image(picture, RULES)
    assert list(cut.grid) == expected["image_grid_thw"][0].tolist()
    assert cut.pixel_values.dtype == np.float32
    np.testing.assert_allclose(cut.pixel_values, expected["pixel_values"], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("size", [(300, 400), (401, 299), (57, 1200), (2000, 31)])
def test_pixels_of_shrunk_pictures(size: tuple[int, int]) -> None:
    picture = random_picture(*size)
    reference = Glm5NextImageProcessorPil(min_image_tokens=2, max_image_tokens=40)
    expected = reference(images=[picture], return_tensors="np")
    cut = cut_image(picture, with_limits(2, 40))
    assert cut.canvas.content_height < size[0]
    assert list(cut.grid) == expected["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(cut.pixel_values, expected["pixel_values"], rtol=0, atol=ROUNDING)


def test_padding_is_black_before_normalisation() -> None:
    white = PIL.Image.new("RGB", (113, 112), "white")
    cut = cut_image(white, RULES)
    assert cut.grid == (1, 8, 10)  # 112 x 140
    rows = cut.pixel_values.reshape(80, 3, 2, 14, 14)
    # The last block of the first row of blocks lies right of the picture: all padding.
    np.testing.assert_allclose(rows[19, 0], -0.48145466 / 0.26862954, rtol=1e-6)
    np.testing.assert_allclose(rows[0, 0], (1 - 0.48145466) / 0.26862954, rtol=1e-6)


def test_order_of_patches_and_values() -> None:
    """Red holds the row, green the column of each pixel: every value says where it came from."""
    height, width = 112, 168
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = np.arange(height)[:, None]
    pixels[:, :, 1] = np.arange(width)[None]
    cut = cut_image(PIL.Image.fromarray(pixels), RULES)
    rules = ProcessorConfig().image
    mean, std = np.array(rules.image_mean), np.array(rules.image_std)
    rows = cut.pixel_values.reshape(-1, 3, 2, 14, 14).astype(np.float64)
    raw = np.rint((rows * std[:, None, None, None] + mean[:, None, None, None]) * 255)
    corners = [(int(r[0, 0, 0, 0]), int(r[1, 0, 0, 0])) for r in raw]
    assert corners[:6] == [(0, 0), (0, 14), (14, 0), (14, 14), (0, 28), (0, 42)]
    assert corners[24:26] == [(28, 0), (28, 14)]  # 6 blocks of 4 patches make a row of blocks
    assert corners[-1] == (98, 154)
    for frame in (0, 1):  # the picture fills both frames of its slice
        assert (raw[0, 0, frame] == np.arange(14)[:, None]).all()
        assert (raw[0, 1, frame] == np.arange(14)[None]).all()


def saved(picture: PIL.Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def files_of_all_modes() -> dict[str, bytes]:
    colours = random_picture(20, 30)
    alpha = PIL.Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30).astype(np.uint8))
    clear = colours.copy()
    clear.putalpha(alpha)
    deep = PIL.Image.fromarray(np.arange(0, 60_000, 100, dtype=np.uint16).reshape(20, 30))
    others = [random_picture(20, 30, seed) for seed in (1, 2)]
    palette = colours.quantize(17)
    return {
        "rgb.png": saved(colours, "PNG"),
        "rgba.png": saved(clear, "PNG"),
        "rgba.webp": saved(clear, "WEBP", lossless=True),
        "grey.png": saved(colours.convert("L"), "PNG"),
        "grey alpha.png": saved(clear.convert("LA"), "PNG"),
        "bits.png": saved(colours.convert("1"), "PNG"),
        "palette.png": saved(palette, "PNG"),
        "clear palette.png": saved(palette, "PNG", transparency=3),
        "clear palette bytes.png": saved(palette, "PNG", transparency=bytes(range(17))),
        "16 bit.png": saved(deep, "PNG"),
        "16 bit.tiff": saved(deep, "TIFF"),
        "cmyk.jpg": saved(colours.convert("CMYK"), "JPEG"),
        "colour.jpg": saved(colours, "JPEG"),
        "animated.gif": saved(palette, "GIF", save_all=True, append_images=others),
        "animated.webp": saved(colours, "WEBP", save_all=True, append_images=others),
        "plain.bmp": saved(colours, "BMP"),
        "plain.ppm": saved(colours, "PPM"),
        "wavelet.jp2": saved(colours, "JPEG2000"),
        "several.mpo": saved(colours, "MPO", save_all=True, append_images=others),
    }


@pytest.mark.parametrize("name", files_of_all_modes())
def test_modes_become_rgb_as_in_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(files_of_all_modes()[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of some palettes; ours must not come through
        expected = load_image(str(path))
    found = [read_image(source) for source in (path, str(path), path.read_bytes())]
    for picture in found:
        assert picture.mode == "RGB"
        assert np.array_equal(np.asarray(picture), np.asarray(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(tmp_path: Path, orientation: int) -> None:
    picture = random_picture(20, 32)
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.png"
    path.write_bytes(saved(picture, "PNG", exif=exif))
    found = read_image(path)
    assert found.size == ((32, 20) if orientation < 5 else (20, 32))
    assert np.array_equal(np.asarray(found), np.asarray(load_image(str(path))))
    if orientation == 6:  # turn clockwise by 90 degrees to see it upright
        assert np.array_equal(np.asarray(found), np.rot90(np.asarray(picture), -1))
    with PIL.Image.open(path) as opened:
        assert np.array_equal(np.asarray(read_image(opened)), np.asarray(found))


def png_header(width: int, height: int) -> bytes:
    """A PNG that says its size and holds no pixel."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_too_large_by_header_is_refused_before_decoding() -> None:
    for width, height in ((100_000, 100_000), (MOST_PIXELS // 2 + 1, 2), (2**31 - 1, 1)):
        with pytest.raises(MediaError, match=f"is {width} x {height} pixels; at most 268,435,456"):
            read_image(png_header(width, height))


def test_the_limit_of_pillow_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 99)
    assert read_image(saved(random_picture(20, 30), "PNG")).size == (30, 20)
    assert PIL.Image.MAX_IMAGE_PIXELS == 99


def test_above_the_warning_of_pillow_and_below_our_limit() -> None:
    large = PIL.Image.new("1", (9_500, 9_500))
    assert large.width * large.height > (PIL.Image.MAX_IMAGE_PIXELS or 0)
    assert read_image(saved(large, "PNG")).size == (9_500, 9_500)


def truncated(kind: str) -> bytes:
    whole = saved(random_picture(300, 400), kind)
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a picture"),
        (b"this is a text, and no picture" * 9, "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not a picture"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 40, "not a picture|damaged header"),
        (png_header(0, 0), "0 x 0|not a picture|damaged header"),
        (png_header(40, 30), "cannot be decoded"),
        (truncated("PNG"), "cannot be decoded"),
        (truncated("JPEG"), "cannot be decoded"),
        (truncated("GIF"), "cannot be decoded"),
        (truncated("TIFF"), "cannot be decoded|not a picture|damaged"),
        (truncated("WEBP"), "cannot be decoded|not a picture|damaged"),
        (truncated("BMP"), "cannot be decoded"),
    ],
    ids=range(12),
)
def test_data_that_is_no_picture(
    data: bytes, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    for source, name in ((data, "the given data"), (path, str(path))):
        with pytest.raises(MediaError, match=says) as raised:
            read_image(source)
        message = str(raised.value)
        assert message.startswith(name)
        assert "\n" not in message
    assert capfd.readouterr() == ("", "")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"]),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_pictures_raise_nothing_else(kind: str, damage: list[tuple[float, int]]) -> None:
    data = bytearray(saved(random_picture(12, 17), kind))
    for place, value in damage:
        data[int(place * (len(data) - 1))] = value
    with contextlib.suppress(MediaError):
        assert read_image(bytes(data)).mode == "RGB"


def test_empty_pictures() -> None:
    with pytest.raises(MediaError, match=r"the given Pillow image is 0 x 0 pixels"):
        read_image(PIL.Image.new("RGB", (0, 0)))
    with pytest.raises(MediaError, match=r"is 5 x 0 pixels"):
        read_image(PIL.Image.new("L", (5, 0)))


def test_names_of_files(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.png does not exist"):
        read_image(tmp_path / "gone.png")
    with pytest.raises(MediaError, match="cannot be read: Is a directory"):
        read_image(tmp_path)
    with pytest.raises(MediaError, match=r"'a\\x00b' cannot be read"):
        read_image("a\x00b")
    with pytest.raises(MediaError, match=r"'two\\nlines' does not exist"):
        read_image("two\nlines")
