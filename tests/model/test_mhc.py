"""mHC: Sinkhorn's fixed point and the direction of the mixing."""

import torch

from glmflash.model.mhc import collapse_streams, expand_streams, sinkhorn


def test_result_is_doubly_stochastic_and_columns_are_exact() -> None:
    rows = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1) + 1e-6
    mix = sinkhorn(rows, iterations=20, eps=1e-6)
    torch.testing.assert_close(mix.sum(1), torch.ones(5, 4), atol=1e-5, rtol=0)  # last step
    torch.testing.assert_close(mix.sum(2), torch.ones(5, 4), atol=1e-2, rtol=0)


def test_one_iteration_is_one_column_step() -> None:
    rows = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]])
    expected = torch.tensor([[[0.9 / 1.4, 0.1 / 0.6], [0.5 / 1.4, 0.5 / 0.6]]])
    torch.testing.assert_close(sinkhorn(rows, iterations=1, eps=0.0), expected)


def test_collapse_is_the_mean() -> None:
    """A sum instead of the mean is invisible behind the final norm, so it is tested here."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(collapse_streams(expand_streams(x, 4)), x)
