"""Which placeholder of a prompt belongs to which picture or video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glmflash.chat.media import PreparedMedia
from glmflash.config import TokenIds
from glmflash.errors import MediaError


@dataclass(frozen=True)
class Placed:
    """A medium and the positions of its placeholders in the prompt."""

    media: PreparedMedia
    positions: tuple[int, ...]


def place(token_ids: Sequence[int], media: Sequence[PreparedMedia], ids: TokenIds) -> list[Placed]:
    """Give every placeholder its medium, in order of appearance.

    A placeholder belongs to a video while more video starts than ends have been seen. Raises
    MediaError where counts or kinds do not match.
    """
    slots = _slots(token_ids, ids)
    placed: list[Placed] = []
    start = 0
    for number, item in enumerate(media, 1):
        wanted = item.tokens * item.slices
        found = slots[start : start + wanted]
        kinds = {kind for _, kind in found}
        if len(found) < wanted or kinds != {item.kind}:
            have = " and ".join(sorted(kinds)) or "none"
            raise MediaError(
                f"medium {number} ({item.kind}) needs {wanted} placeholders, but the prompt holds "
                f"{len(found)} for it ({have}); "
                "encode the prompt together with its media"
            )
        placed.append(Placed(item, tuple(position for position, _ in found)))
        start += wanted
    if start < len(slots):
        raise MediaError(
            f"the prompt holds {len(slots)} media placeholders (id {ids.image}), but the "
            f"{len(media)} given media fill only {start}; pass every picture and video"
        )
    return placed


def _slots(token_ids: Sequence[int], ids: TokenIds) -> list[tuple[int, str]]:
    slots: list[tuple[int, str]] = []
    open_videos = 0
    for position, token in enumerate(token_ids):
        if token == ids.image:
            slots.append((position, "video" if open_videos > 0 else "image"))
        elif token == ids.video_start:
            open_videos += 1
        elif token == ids.video_end:
            open_videos -= 1
        elif token == ids.video:
            raise MediaError(
                f"the prompt holds a bare video token (id {token}) at position {position}: "
                "it must be expanded to the video's slices first"
            )
    return slots
