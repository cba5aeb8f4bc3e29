"""Channel means: of all that was seen, in any order of shards, along any axis, and not of what is not finite."""

from __future__ import annotations

import pytest
import torch
from quant.observers import ChannelMean


@pytest.mark.parametrize(("axis", "shape"), [(-1, (5, 7, 3)), (-3, (4, 3, 6, 5)), (-2, (4, 3, 9)), (-1, (3,))])
def test_is_the_mean_of_each_channel(axis: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(shape) + 3 for _ in range(4)]
    observer = ChannelMean(axis)
    for batch in batches:
        assert observer(batch) is batch
    expected = torch.stack([batch.movedim(axis, 0).reshape(3, -1) for batch in batches], 1).flatten(1).double().mean(1)
    found = observer.mean()
    assert found is not None
    torch.testing.assert_close(found, expected.float())


def test_merged_shards_equal_one_pass() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) * 10**i for i in range(4)]
    whole, one, other = ChannelMean(-3), ChannelMean(-3), ChannelMean(-3)
    for i, batch in enumerate(batches):
        whole(batch)
        (one if i % 2 else other)(batch)
    one.merge(other)
    for name, buffer in whole.state_dict().items():
        assert torch.equal(buffer, one.state_dict()[name]), name


def test_saw_nothing() -> None:
    observer = ChannelMean(-1)
    assert observer.mean() is None
    observer(torch.empty(0, 3))
    assert observer.mean() is None
    observer(torch.ones(2, 3))
    observer.reset()
    assert observer.mean() is None


def test_counts_what_is_not_finite_as_zero() -> None:
    observer = ChannelMean(-1)
    observer(torch.tensor([[float("nan"), 1.0], [2.0, float("inf")]]))
    found = observer.mean()
    assert found is not None
    assert found.tolist() == [1.0, 0.5]


def test_state_survives_and_names_a_changed_number_of_channels() -> None:
    first, second = ChannelMean(-1), ChannelMean(-1)
    first.name = "fc"
    first(torch.tensor([[1.0, 2.0, 3.0]]))
    second.load_state_dict(first.state_dict())
    found = second.mean()
    assert found is not None
    assert found.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="'fc': 2 channels, expected 3"):
        first(torch.ones(1, 2))
