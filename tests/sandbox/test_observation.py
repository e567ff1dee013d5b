from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.sandbox import readable


def test_terminal_escapes_and_control_characters_are_gone() -> None:
    assert readable(b"\x1b[31mred\x1b[0m\r\n\x1b]0;title\x07a\tb\x00\x08c\x7f\n") == "red\na\tbc\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert readable(b"\xff\xfe6") == "\ufffd\ufffd6"


def test_middle_is_left_out_and_counted() -> None:
    assert readable(b"a" * 10 + b"b" * 10, 8) == "aaaa\n... 12 bytes left out ...\nbbbb"
    assert readable(b"12345678", 8) == "12345678"


@given(lines=st.integers(1, 400), width=st.integers(0, 80), max_bytes=st.integers(64, 3000))
def test_first_and_last_line_are_shown_however_much_is_between(lines: int, width: int, max_bytes: int) -> None:
    output = "\n".join(["It begins.", *["x" * width] * lines, "The answer is 42."])
    shown = readable(output.encode(), max_bytes)
    assert shown.startswith("It begins.\n")
    assert shown.endswith("\nThe answer is 42.")
    assert len(shown) <= max_bytes + 50
