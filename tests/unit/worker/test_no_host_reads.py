from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from no_host_reads import HostReadError, no_host_reads
from torch import Tensor


@pytest.mark.parametrize(
    "read",
    [
        lambda numbers: numbers[0].item(),
        lambda numbers: numbers.tolist(),
        lambda numbers: numbers.cpu(),
        lambda numbers: numbers.numpy(),
        lambda numbers: numbers.nonzero(),
        lambda numbers: torch.nonzero(numbers),
        lambda numbers: torch.where(numbers > 1),
        lambda numbers: bool((numbers > 0).all()),
        lambda numbers: int(numbers.max()),
        lambda numbers: float(numbers.max()),
        lambda numbers: range(numbers[1]),
        lambda numbers: numbers[numbers > 1],
        lambda numbers: numbers.__setitem__(numbers > 1, 0),
        lambda numbers: torch.tensor([1, 2], device=numbers.device),
    ],
)
def test_no_host_reads_read_raises(read: Callable[[Tensor], object]) -> None:
    numbers = torch.tensor([1, 2, 3])
    read(numbers)
    with no_host_reads(), pytest.raises(HostReadError):
        read(numbers)


def test_no_host_reads_work_of_the_device_passes() -> None:
    numbers = torch.tensor([3, 1, 2])
    with no_host_reads():
        numbers[0].zero_()
        numbers[torch.zeros(1, dtype=torch.int64)] += 1
        total = torch.where(numbers > 1, numbers, 0).sum()
    assert total.item() == 2
