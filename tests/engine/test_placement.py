"""Which placeholder belongs to which medium."""

from dataclasses import dataclass

import pytest

from glmflash.config import TokenIds
from glmflash.engine.placement import place
from glmflash.errors import MediaError

IDS = TokenIds(image=90, video=91, image_start=92, image_end=93, video_start=94, video_end=95)


@dataclass
class Medium:
    kind: str
    tokens: int
    slices: int = 1


def positions(token_ids, media):
    return [p.positions for p in place(token_ids, media, IDS)]


def test_images_in_order() -> None:
    ids = [1, 92, 90, 90, 93, 2, 92, 90, 93]
    assert positions(ids, [Medium("image", 2), Medium("image", 1)]) == [(2, 3), (7,)]


def test_video_slices_use_the_image_placeholder_inside_a_video() -> None:
    ids = [94, 92, 90, 90, 93, 7, 92, 90, 90, 93, 7, 95, 92, 90, 93]
    assert positions(ids, [Medium("video", 2, slices=2), Medium("image", 1)]) == [
        (2, 3, 7, 8),
        (13,),
    ]


@pytest.mark.parametrize(
    ("ids", "media", "says"),
    [
        ([92, 90, 93], [], "pass every picture"),
        ([1, 2], [Medium("image", 1)], r"holds 0 for it \(none"),
        ([92, 90, 93], [Medium("image", 2)], r"needs 2 .* holds 1 for it \(image"),
        ([92, 90, 90, 93], [Medium("image", 1)], "fill only 1"),
        ([92, 90, 93], [Medium("video", 1)], r"\(video\) needs 1 .* \(image\)"),
        ([94, 92, 90, 93, 95], [Medium("image", 1)], r"\(image\) needs 1 .* \(video\)"),
        ([94, 91, 95], [Medium("video", 1)], "bare video token"),
    ],
)
def test_mismatches_are_refused(ids, media, says) -> None:
    with pytest.raises(MediaError, match=says):
        place(ids, media, IDS)
