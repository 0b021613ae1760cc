"""A growing table of rows: what the attention layers keep per token or per pool."""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """Rows `[n, width]` of one type, appended at the end and cut back to any length.

    Rows below the length never change, so a view stays right until the table is cut below it.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._data = torch.empty(0, width, dtype=dtype)
        self.length = 0

    @property
    def view(self) -> Tensor:
        """All rows `[length, width]`, without a copy."""
        return self._data[: self.length]

    def append(self, rows: Tensor) -> None:
        """Add `[m, width]` rows; room grows by an eighth at a time, so copies stay rare."""
        end = self.length + rows.shape[0]
        if end > self._data.shape[0]:
            room = max(end, self._data.shape[0] * 9 // 8, 256)
            grown = self._data.new_empty(room, self._data.shape[1])
            grown[: self.length] = self.view
            self._data = grown
        self._data[self.length : end] = rows
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.length = length

    def copy(self) -> Rows:
        """An independent table with the same rows."""
        other = Rows(self._data.shape[1], self._data.dtype)
        other.append(self.view)
        return other
