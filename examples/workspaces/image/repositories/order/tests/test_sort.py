from order import sort


def test_chain():
    assert sort({"c": ["b"], "b": ["a"], "a": []}) == ["a", "b", "c"]


def test_nothing():
    assert sort({}) == []
