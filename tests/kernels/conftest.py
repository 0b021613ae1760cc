"""Every compiled kernel set that runs here, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glmflash import kernels


@pytest.fixture(params=[name for name in kernels.available() if name != kernels.REFERENCE])
def kernel_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(0)
