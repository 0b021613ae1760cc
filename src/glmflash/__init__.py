"""glmflash: GLM-5.3-Flash on whatever you own.

The public face; everything heavy is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glmflash import errors
from glmflash._version import __version__

if TYPE_CHECKING:
    from glmflash.chat.media import Image, Video
    from glmflash.chat.messages import Message
    from glmflash.config import ModelConfig
    from glmflash.engine.api import Engine
    from glmflash.engine.api import open_engine as open
    from glmflash.engine.session import Session
    from glmflash.engine.types import Delta, Generation, SamplingParams
    from glmflash.settings import Settings

_HOMES = {
    "Image": "glmflash.chat.media:Image",
    "Video": "glmflash.chat.media:Video",
    "Message": "glmflash.chat.messages:Message",
    "ModelConfig": "glmflash.config:ModelConfig",
    "Engine": "glmflash.engine.api:Engine",
    "open": "glmflash.engine.api:open_engine",
    "Session": "glmflash.engine.session:Session",
    "Delta": "glmflash.engine.types:Delta",
    "Generation": "glmflash.engine.types:Generation",
    "SamplingParams": "glmflash.engine.types:SamplingParams",
    "Settings": "glmflash.settings:Settings",
}

__all__ = [
    "Delta",
    "Engine",
    "Generation",
    "Image",
    "Message",
    "ModelConfig",
    "SamplingParams",
    "Session",
    "Settings",
    "Video",
    "__version__",
    "errors",
    "open",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glmflash' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
