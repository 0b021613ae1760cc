"""processor_config.json: how pictures and videos become patches.

Knows the values that decide sizes, order and normalisation, and the released ones; knows nothing
of pixels.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glmflash.config import VisionConfig
from glmflash.config_values import Section
from glmflash.errors import ConfigError

FILE = "processor_config.json"
# What the implementation does, under the names that a file may use for it.
_FIXED: dict[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_sample_frames": True,
    "resample": 3,  # bicubic
    "rescale_factor": 1 / 255,
    "patch_expand_factor": 1,
    "max_duration": 0,  # seconds of a video to look at; 0 is all
}


@dataclass(frozen=True)
class PixelRules:
    """The rules of one kind of medium. Field names are the keys of the file.

    patch_size: pixels of a patch's side. temporal_patch_size: frames of a patch. merge_size:
    patches of a token's side. The mean and deviation are of values in 0..1, red, green, blue. The
    token limits are of a whole picture or video.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    min_image_tokens: int
    max_image_tokens: int

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    @property
    def token_pixels(self) -> int:
        """Pixels of a token, counted over all its frames."""
        return self.temporal_patch_size * self.factor**2


_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ProcessorConfig:
    """Rules for pictures and for videos; the defaults are the released values.

    fps: frames sampled from a second of video. max_frames: most frames sampled from a video.
    """

    image: PixelRules = PixelRules(14, 2, 2, _MEAN, _STD, 16, 8_000)
    video: PixelRules = PixelRules(14, 2, 2, _MEAN, _STD, 16, 240_000)
    fps: float = 2.0
    max_frames: int = 2048

    @classmethod
    def from_dir(cls, directory: str | os.PathLike[str]) -> ProcessorConfig:
        """Read the file of a checkpoint directory; the released values if there is none.

        A value that the file leaves out is the released one, which is also the library's. Raises
        ConfigError.
        """
        path = Path(directory) / FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{path} is not JSON ({reason}); fetch the file again") from error
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Any, where: str = FILE) -> ProcessorConfig:
        """Check the content of a processor_config.json. Raises ConfigError."""
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: found a JSON {type(values).__name__}; expected an object")
        released, top = cls(), Section(values, where)
        image = top.section("image_processor") if top.has("image_processor") else None
        video = top.section("video_processor") if top.has("video_processor") else None
        fps, most = released.fps, released.max_frames
        if video and video.has("fps"):
            fps = video.number("fps")
        if video and video.has("max_frames"):
            most = video.integer("max_frames")
        return cls(_rules(image, released.image), _rules(video, released.video), fps, most)

    def to_dict(self) -> dict[str, Any]:
        """The content of a processor_config.json, in the layout of the release."""

        def section(rules: PixelRules, kind: str) -> dict[str, Any]:
            fixed = {"do_rescale": True, "patch_expand_factor": 1}
            return {
                **fixed,
                **asdict(rules),
                f"{kind}_processor_type": f"Glm5Next{kind.title()}Processor",
            }

        fps = int(self.fps) if self.fps.is_integer() else self.fps  # as the release writes it
        return {
            "image_processor": section(self.image, "image"),
            "processor_class": "Glm5NextProcessor",
            "video_processor": {**section(self.video, "video"), "fps": fps},
        }

    def check(self, vision: VisionConfig) -> None:
        """Raises ConfigError where the patches would not fit the vision tower."""
        pairs = (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        )
        for kind, rules in (("image", self.image), ("video", self.video)):
            for ours, theirs in pairs:
                found, expected = getattr(rules, ours), getattr(vision, theirs)
                if found != expected:
                    raise ConfigError(
                        f"{FILE}: {kind}_processor.{ours} is {found}; expected {expected}, "
                        f"vision_config.{theirs} of config.json"
                    )
        if vision.in_channels != len(_MEAN):
            raise ConfigError(
                f"config: vision_config.in_channels is {vision.in_channels}; expected "
                f"{len(_MEAN)} (pictures are red, green, blue)"
            )


def _rules(section: Section | None, released: PixelRules) -> PixelRules:
    if section is None:
        return released
    for key, value in _FIXED.items():
        section.constant(key, value)

    def whole(key: str) -> int:
        return section.integer(key) if section.has(key) else int(getattr(released, key))

    rules = PixelRules(
        whole("patch_size"),
        whole("temporal_patch_size"),
        whole("merge_size"),
        _channels(section, "image_mean", released.image_mean),
        _channels(section, "image_std", released.image_std),
        whole("min_image_tokens"),
        whole("max_image_tokens"),
    )
    section.require(min(rules.image_std) > 0, "image_std", "numbers > 0")
    section.require(
        rules.max_image_tokens >= rules.min_image_tokens,
        "max_image_tokens",
        f"at least min_image_tokens ({rules.min_image_tokens})",
    )
    return rules


def _channels(section: Section, key: str, released: tuple[float, ...]) -> tuple[float, ...]:
    if not section.has(key):
        return released
    value = section.values[key]
    good = isinstance(value, list) and len(value) == len(released)
    good = good and all(type(x) in (int, float) and abs(x) < 1e6 for x in value)
    section.require(good, key, f"{len(released)} numbers")
    return tuple(float(x) for x in value)
