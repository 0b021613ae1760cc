"""The exception tree.

Every message says what was asked, what there is, and what to do. The command line prints the
message alone (no traceback) and exits with `exit_code`; the Python face raises the object.
"""

from __future__ import annotations


class GlmflashError(Exception):
    """Base of every error that a user can cause or mend."""

    exit_code = 2


class ConfigError(GlmflashError):
    """config.json is missing, of another model, or inconsistent. Names key, found, expected."""


class CheckpointError(GlmflashError):
    """Files of a checkpoint are missing, damaged, or do not fit the config."""


class TokenizerError(GlmflashError):
    """No tokenizer where one is needed, or one that does not fit the config."""


class RequestError(GlmflashError):
    """A request that cannot be served: empty prompt, id out of range, prompt too long."""


class MediaError(RequestError):
    """An image or video that cannot be read, or does not match the prompt."""


class RemoteError(GlmflashError):
    """A hub or URL that cannot be read."""


class ResourceError(GlmflashError):
    """Not enough disk or memory for what was asked."""


class MissingExtraError(GlmflashError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional part: pip install 'glmflash[{extra}]'")
