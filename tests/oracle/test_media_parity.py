"""Logits of prompts with images, videos and both, against transformers in fp32."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from transformers.models.glm5_next.image_processing_pil_glm5_next import (
    Glm5NextImageProcessorPil,
)

import glmflash
from glmflash.chat.media import Image, PreparedMedia, Video, prepare

from .runs import assert_parity, random_tokens, trusted_logits
from .tiny import (
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    VIDEO_END,
    VIDEO_START,
    Tiny,
    make_tiny,
)


def random_media(kind: str, grid: tuple[int, int, int], seed: int) -> PreparedMedia:
    """Patches of noise, as normalised pixels are: mean 0, about 1 wide."""
    random = np.random.default_rng(seed)
    pixels = random.standard_normal((grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14))
    pixels = pixels.astype(np.float32)
    times = tuple(float(i) for i in range(grid[0])) if kind == "video" else ()
    digest = hashlib.sha256(f"{kind}{grid}".encode() + pixels.tobytes()).hexdigest()
    return PreparedMedia(kind=kind, pixel_values=pixels, grid=grid, timestamps=times, digest=digest)


def media_ids(media: PreparedMedia) -> list[int]:
    """The expanded placeholders of one medium. A video's slices are images followed by a time."""
    slices, height, width = media.grid
    image = [IMAGE_START, *[IMAGE] * (height * width // 4), IMAGE_END]
    if media.kind == "image":
        return image
    timed = [token for i in range(slices) for token in [*image, 10 + i, 11]]
    return [VIDEO_START, *timed, VIDEO_END]


def prompt_of(media: list[PreparedMedia], seed: int = 0) -> list[int]:
    """Text, and media with text between and after them."""
    text = random_tokens(9 * (len(media) + 1), seed)
    ids = text[:9]
    for i, item in enumerate(media):
        ids += media_ids(item) + text[9 * (i + 1) : 9 * (i + 2)]
    return ids


def oracle_arguments(media: list[PreparedMedia]) -> dict[str, torch.Tensor]:
    """The media as transformers takes them: all images, and all videos, each in one tensor."""
    arguments = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in media if item.kind == kind]
        if items:
            arguments[pixels] = torch.cat([torch.from_numpy(i.pixel_values) for i in items])
            arguments[grid] = torch.tensor([i.grid for i in items])
    return arguments


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("media") / "model", seed=0)


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[glmflash.Engine]:
    with glmflash.open(tiny.path, dtype="float32") as opened:
        yield opened


IMAGE_SMALL = random_media("image", (1, 4, 6), 1)
IMAGE_TALL = random_media("image", (1, 10, 2), 2)
VIDEO_THREE = random_media("video", (3, 4, 4), 3)
VIDEO_ONE = random_media("video", (1, 2, 6), 4)
MIXES = {
    "image": [IMAGE_SMALL],
    "two images": [IMAGE_SMALL, IMAGE_TALL],
    "video": [VIDEO_THREE],
    "two videos": [VIDEO_ONE, VIDEO_THREE],
    "image, video, image": [IMAGE_TALL, VIDEO_THREE, IMAGE_SMALL],
    "video, image, video": [VIDEO_ONE, IMAGE_SMALL, VIDEO_THREE],
}


@pytest.mark.parametrize("mix", MIXES)
def test_logits(tiny: Tiny, engine: glmflash.Engine, mix: str) -> None:
    media = MIXES[mix]
    ids = prompt_of(media)
    expected = trusted_logits(tiny.oracle, ids, **oracle_arguments(media))
    assert_parity(engine.logits(ids, media=media), expected)


@pytest.mark.parametrize("prefill_chunk", [1, 5, 16])
def test_chunks_that_cut_through_media(tiny: Tiny, prefill_chunk: int) -> None:
    media = MIXES["image, video, image"]
    ids = prompt_of(media)
    expected = trusted_logits(tiny.oracle, ids, **oracle_arguments(media))
    with glmflash.open(tiny.path, dtype="float32", prefill_chunk=prefill_chunk) as opened:
        assert_parity(opened.logits(ids, media=media), expected)


def test_media_arrive_one_after_another(tiny: Tiny, engine: glmflash.Engine) -> None:
    """A conversation that grows: text, then an image, then a video, then single tokens."""
    media = [IMAGE_SMALL, VIDEO_THREE]
    ids = prompt_of(media)
    expected = trusted_logits(tiny.oracle, ids, **oracle_arguments(media))
    session = engine.session()
    after_image = 9 + len(media_ids(IMAGE_SMALL)) + 3
    last = len(ids) - 4
    assert session.sync(ids[:7]) == 0
    assert session.sync(ids[:after_image], media=media[:1]) == 7
    assert_parity(session.logits[None], expected[after_image - 1 : after_image])
    assert session.sync(ids[:last], media=media) == after_image
    assert_parity(session.logits[None], expected[last - 1 : last])
    rows = np.stack([session.step(token) for token in ids[last:]])
    assert_parity(rows, expected[last:])


def test_another_picture_at_the_same_place_is_not_reused(
    tiny: Tiny, engine: glmflash.Engine
) -> None:
    other = random_media("image", IMAGE_SMALL.grid, 77)
    ids = prompt_of([IMAGE_SMALL])
    expected = trusted_logits(tiny.oracle, ids, **oracle_arguments([other]))
    session = engine.session()
    session.sync(ids, media=[IMAGE_SMALL])
    assert session.sync(ids, media=[other]) < 9 + 1
    assert_parity(session.logits[None], expected[-1:])


def test_pictures_through_both_processors(tiny: Tiny, engine: glmflash.Engine) -> None:
    """Real pixels: our preparation and model against transformers' processor and model. The
    sizes need padding but no resizing, where resampling of two libraries would differ."""
    random = np.random.default_rng(5)
    pictures = [
        PillowImage.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in ((112, 112), (100, 180))
    ]
    inputs = Glm5NextImageProcessorPil()(images=pictures, return_tensors="pt")
    prepared = [prepare(Image(p), engine.processor) for p in pictures]
    ids = prompt_of(prepared)
    assert [list(p.grid) for p in prepared] == inputs["image_grid_thw"].tolist()
    arguments = {k: inputs[k] for k in ("pixel_values", "image_grid_thw")}
    expected = trusted_logits(tiny.oracle, ids, **arguments)
    assert_parity(engine.logits(ids, media=[Image(p) for p in pictures]), expected)


def test_frames_become_a_video(tiny: Tiny, engine: glmflash.Engine) -> None:
    random = np.random.default_rng(6)
    frames = [
        PillowImage.fromarray(random.integers(0, 256, (84, 90, 3), dtype=np.uint8))
        for _ in range(4)
    ]
    video = Video(frames=frames, fps=2.0)
    prepared = prepare(video, engine.processor)
    assert prepared.grid == (2, 6, 8)  # 84 x 112, two slices of two frames
    ids = prompt_of([prepared])
    expected = trusted_logits(tiny.oracle, ids, **oracle_arguments([prepared]))
    assert_parity(engine.logits(ids, media=[video]), expected)
