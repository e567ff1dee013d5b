from settings import VERSION, merge


def test_tables():
    assert merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}}


def test_none_takes_away():
    assert merge({"a": 1, "b": 2}, {"a": None}) == {"b": 2}


def test_version():
    assert VERSION == "2.1"
