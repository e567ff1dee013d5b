from pages import Pages


def test_parts():
    pages = Pages(list("abcdefg"), 3)
    assert len(pages) == 3
    assert pages[0] == ["a", "b", "c"]
    assert pages[2] == ["g"]


def test_empty():
    assert Pages([], 5)[0] == []
