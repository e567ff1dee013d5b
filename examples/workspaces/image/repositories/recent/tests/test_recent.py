import pytest

from recent import Recent


@pytest.fixture
def full():
    cache = Recent(2)
    cache.put("a", 1)
    cache.put("b", 2)
    return cache


def test_oldest_is_forgotten(full):
    full.put("c", 3)
    assert full.keys() == ["b", "c"]
    assert full.get("a", 0) == 0


def test_size():
    with pytest.raises(ValueError, match="not above 0"):
        Recent(0)
