from intervals import merge, total


def test_overlap():
    assert merge([(1, 4), (2, 6)]) == [(1, 6)]


def test_gap():
    assert merge([(1, 2), (4, 6)]) == [(1, 2), (4, 6)]


def test_total():
    assert total([(0, 2), (1, 3)]) == 3
