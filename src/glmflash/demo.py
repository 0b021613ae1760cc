"""The demonstration: a small random checkpoint, answered from text and a picture.

The weights are random, so the words mean nothing; what it shows is the whole way from a prompt
with a picture to streamed tokens, on files in the layout of the release.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run the commands a person would type, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="glmflash-demo-") as folder:
        checkpoint, picture = Path(folder) / "tiny", Path(folder) / "red-square.png"
        _paint(picture)
        for arguments in (
            ["checkpoint", "random", str(checkpoint), "--like", "tiny"],
            ["inspect", str(checkpoint)],
            ["generate", str(checkpoint), "What do you see?", "--image", str(picture),
             "--max-tokens", "48", "--seed", "1"],
        ):  # fmt: skip
            print("$ glmflash", *arguments, flush=True)  # noqa: T201
            done = subprocess.run([sys.executable, "-m", "glmflash.cli.main", *arguments])
            if done.returncode:
                return done.returncode
    print(  # noqa: T201
        "\nThe weights were random, so the answer is noise. With a checkpoint of GLM-5.3-Flash:\n"
        '  glmflash generate DIRECTORY "your question" --image photo.jpg'
    )
    return 0


def _paint(path: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (224, 168), "white")
    picture.paste("red", (60, 40, 160, 130))
    picture.save(path)


if __name__ == "__main__":
    sys.exit(main())
