"""docs/map.md names every source file, and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_map_equals_tree() -> None:
    text = (ROOT / "docs" / "map.md").read_text()
    named = set(re.findall(r"^\| `((?:src|benchmarks)/[^`]+)` \|", text, flags=re.MULTILINE))
    files = {
        str(path.relative_to(ROOT))
        for folder in ("src", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.stat().st_size  # an empty __init__.py needs no line
    }
    assert named - files == set(), "the map names files that do not exist"
    assert files - named == set(), "the map lacks these files"
