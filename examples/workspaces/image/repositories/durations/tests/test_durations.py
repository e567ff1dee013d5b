from durations import parse, show


def test_parse():
    assert parse("2h") == 7200
    assert parse("1d1s") == 86401


def test_show():
    assert [show(seconds) for seconds in (0, 61, 90000)] == ["0s", "1m1s", "1d1h"]
