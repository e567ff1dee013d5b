from fields import split


def test_plain():
    assert split("a,b,,c") == ["a", "b", "", "c"]


def test_quotes_are_taken_off():
    assert split('"a",b') == ["a", "b"]
