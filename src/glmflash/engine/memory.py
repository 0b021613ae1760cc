"""How much memory the machine can still give."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Memory that can be taken without swapping; on systems that do not say, all of it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
