"""The growing table: appended rows stay, views stay right, copies are independent."""

import torch

from glmflash.state.rows import Rows


def test_growth_keeps_rows() -> None:
    rows, all_rows = Rows(3, torch.float32), torch.randn(3000, 3)
    first = None
    for start in range(0, 3000, 7):
        rows.append(all_rows[start : start + 7])
        first = rows.view[:7] if first is None else first
    assert torch.equal(rows.view, all_rows)
    assert torch.equal(first, all_rows[:7])


def test_truncate_then_append() -> None:
    rows = Rows(1, torch.float32)
    rows.append(torch.arange(5.0).view(5, 1))
    rows.truncate(2)
    rows.append(torch.tensor([[9.0]]))
    assert rows.view.flatten().tolist() == [0.0, 1.0, 9.0]


def test_copy_is_independent() -> None:
    rows = Rows(1, torch.float32)
    rows.append(torch.zeros(2, 1))
    other = rows.copy()
    rows.append(torch.ones(1, 1))
    other.append(torch.full((1, 1), 5.0))
    assert rows.view.flatten().tolist() == [0, 0, 1]
    assert other.view.flatten().tolist() == [0, 0, 5]
