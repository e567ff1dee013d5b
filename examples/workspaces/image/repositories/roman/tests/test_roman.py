import pytest

import roman


def test_write():
    assert [roman.write(number) for number in (4, 1994, 3999)] == ["IV", "MCMXCIV", "MMMCMXCIX"]


def test_parse():
    assert roman.parse("XVI") == 16


def test_too_large():
    with pytest.raises(ValueError, match="not between"):
        roman.write(4000)
