from gspo_agent.sandbox import readable


def test_terminal_escapes_and_control_characters_are_gone() -> None:
    assert readable(b"\x1b[31mred\x1b[0m\r\n\x1b]0;title\x07a\tb\x00\x08c\x7f\n") == "red\na\tbc\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert readable(b"\xff\xfe6") == "\ufffd\ufffd6"


def test_middle_is_left_out_and_counted() -> None:
    assert readable(b"a" * 10 + b"b" * 10, 8) == "aaaa\n... 12 bytes left out ...\nbbbb"
    assert readable(b"12345678", 8) == "12345678"
