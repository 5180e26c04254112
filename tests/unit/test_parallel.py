"""Arithmetic that all ranks share."""

import pytest
import torch

from agentrl_runtime.training.parallel import sum_of_squares


@pytest.mark.parametrize("shape", [(0,), (), (1,), (65536,), (65537,), (300, 1001), (20_000_000,)])
def test_a_sum_of_squares_is_right_at_any_size(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    expected = tensor.double().square().sum()
    assert sum_of_squares(tensor).dtype == torch.float64
    assert float(sum_of_squares(tensor)) == pytest.approx(float(expected), rel=1e-6)


def test_a_sum_of_squares_keeps_what_is_not_finite() -> None:
    tensor = torch.ones(70_000)
    tensor[66_000] = float("nan")
    assert not torch.isfinite(sum_of_squares(tensor))


def test_a_tensor_laid_out_otherwise_is_read_whole() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert float(sum_of_squares(tensor)) == sum(float(i) ** 2 for i in range(12))
