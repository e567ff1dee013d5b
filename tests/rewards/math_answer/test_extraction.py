"""Where the answer of a message is, and where there is none."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.math_answer import extract, verify
from rewards.math_answer.outcomes import NoAnswer


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("The final answer is: $\\boxed{7}$", "7"),
        ("Therefore, the answer is $7$.", "7"),
        ("**Answer**: 7", "7"),
        ("Answer: $x=7$", "7"),
        ("Final answer: 7 apples", "7"),
        ("<answer>7</answer>", "7"),
        ("<answer>\n7\n</answer>", "7"),
        ("#### 1,234", "1234"),
        ("La respuesta es 7.", "7"),
        ("La réponse est 7.", "7"),
        ("Die Antwort ist 7.", "7"),
        ("Ответ: 7", "7"),
        ("Ответ: 7.", "7"),
        ("答案是7", "7"),
        ("答案为 7。", "7"),
        ("最终答案：7", "7"),
        ("答えは 7 です。", "7"),
        ("정답은 7입니다.", "7"),
        ("정답: 7", "7"),
        ("La risposta è 7.", "7"),
        ("A resposta é 7.", "7"),
        ("Đáp án: 7", "7"),
        ("Cevap: 7", "7"),
        ("उत्तर: 7", "7"),
        ("الجواب: 7", "7"),
        ("The answer is 7, because 3+4=7.", "7"),
        ("The answer is 7 because of that.", "7"),
        ("The answer is \\(\\frac{1}{2}\\).", "0.5"),
        ("The answer is (7).", "7"),
        ("7", "7"),
        ("$7$", "7"),
        ("x = 7", "7"),
        ("Answer:\n7", "7"),
        ("### Final Answer\n7", "7"),
        ("The answer is \\$7.", "7"),
        ("So the answer is 7!", "7"),
        ("The answer is 7%", "7\\%"),
        ("The correct answer is (B).", "B"),
        ("The answer is 7.\n\nLet me know if you have questions.", "7"),
        ("The answer is **7**.", "7"),
        ("Answer: \\[7\\]", "7"),
        ("answer = 7", "7"),
        ("My answer: 7", "7"),
        ("The answer is:\n$$7$$", "7"),
    ],
)
def test_a_final_statement_gives_the_answer_in_many_languages(text: str, gold: str) -> None:
    verdict = verify(text, gold)
    assert verdict.correct, verdict


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("The answer is not 7", "7"),
        ("The answer is 7 or 8", "7"),
        ("The answer isn't 7", "7"),
        ("The answer is about 7", "7"),
        ("The answer is less than 7", "7"),
        ("The answer is 8, not 7", "7"),
        ("The answer is 7? Maybe 8.", "7"),
        ("The answer is probably 7", "7"),
        ("Is the answer 7?", "7"),
        ("The answer cannot be 7", "7"),
        ("The answer would be 7 if x=3 but it is 8", "7"),
        ("The answer is between 6 and 8: 7", "7"),
        ("The answer is 7 and 8", "7"),
        ("7 8", "7"),
        ("7, 8", "7"),
        ("7 is the answer to another question", "7"),
        ("the answer", "7"),
        ("answer: ", "7"),
        ("The answer is unknown; 7", "7"),
        ("The answer is wrong: 7", "7"),
        ("The answer is greater than 7", "7"),
        ("The answer is at most 7", "7"),
        ("The answer is one of 7", "7"),
        ("Answer: 7/8/9", "7"),
        ("Answer: 7 8 9", "7"),
        ("Answer: A) 7 B) 8", "7"),
        ("The answer is anything such as 7", "7"),
        ("The answer is 7.5", "7"),
        ("The answer is 7-8", "7"),
        ("The answer is 7x", "7"),
        ("The final answer is 7\nThe final answer is 8", "7"),
        ("<answer>7</answer><answer>8</answer>", "7"),
        ("<answer>7</answer> The answer is 8", "7"),
        ("The answer is 7\\boxed{8}", "7"),
        ("#### 7\n#### 8", "7"),
        ("<think>The answer is 7", "7"),
        ("<think>\\boxed{7}</think> The answer is 8", "7"),
        ("The answer is in {7}", "7"),
        ("The answer is 7 mod 8", "7"),
        ("The answer is close to 7", "7"),
        ("the answer is the sum of 3 and 4", "7"),
        ("The answer to the ultimate question is 7", "8"),
        ("答案不是7", "7"),
        ("答案是7或8", "7"),
        ("答案是6到8之间，7", "7"),
        ("Ответ: не 7", "7"),
        ("Ответ: 7 или 8", "7"),
        ("La respuesta no es 7", "7"),
        ("La respuesta es 7 u 8", "7"),
        ("La respuesta es 7 o 8", "7"),
        ("La réponse n'est pas 7", "7"),
        ("La réponse est 7 ou 8", "7"),
        ("Die Antwort ist nicht 7", "7"),
        ("Die Antwort ist 7 oder 8", "7"),
        ("정답은 7이 아닙니다", "7"),
        ("정답은 7 또는 8", "7"),
        ("答えは7ではない", "7"),
        ("答えは7か8", "7"),
        ("A resposta não é 7", "7"),
        ("La risposta non è 7", "7"),
        ("The answer is 7 (mod 9) plus 1", "7"),
        ("The answer is 7 times 2", "7"),
        ("The answer is 7 less than 20", "7"),
        ("The answer is 7 more", "7"),
        ("\\boxed{7} is wrong", "8"),
        ("\\boxed{7", "7"),
        ("\\boxed 7", "7"),
        ("\\boxed{7}}{8}", "8"),
        ("\\boxed{\\text{see } \\boxed{7}}", "7"),
        ("\\boxed{7}\\boxed{8}", "7"),
        ("\\boxed{7}, or \\boxed{8}", "7"),
        ("\\boxed{7} \\text{ or } \\boxed{8}", "7"),
        ("\\boxed{7}\n\n\\boxed{8}", "7"),
        ("\\boxed{7} oder \\boxed{8}", "7"),
        ("\\boxed{7}/\\boxed{8}", "7"),
        ("\\boxed{6}-\\boxed{8}", "8"),
        ("\\boxed{6} to \\boxed{8}", "8"),
        ("\\boxed{6} \\cdot \\boxed{8}", "8"),
    ],
)
def test_a_hedge_a_negation_or_another_box_gives_nothing_away(text: str, gold: str) -> None:
    verdict = verify(text, gold)
    assert not verdict.correct, verdict


def test_only_what_follows_the_thinking_counts() -> None:
    assert extract(r"<think>\boxed{1}</think>\boxed{2}") == "2"
    assert extract(r"<thinking>a</thinking> b <think>c</think> \boxed{2}") == "2"
    for text in (r"<think>\boxed{1}", r"</think><think>\boxed{1}", r"\boxed{1}<reasoning>more"):
        with pytest.raises(NoAnswer, match="open_thinking"):
            extract(text)


LONG = {
    "boxes that are not closed": "\\boxed{" * 2857,
    "a space behind an anchor": "The answer is 7" + " " * 19_000 + "x",
    "anchors far apart": ("answer" + " " * 50) * 350,
    "answers that are not closed": "<answer>" * 2400,
    "a row of boxes": "\\boxed{7}," * 1800,
    "thinking": "<think " * 20_000,
    "hashes": "####" * 4000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_the_time_follows_the_length_of_the_text(text: str) -> None:
    started = time.process_time()
    assert not verify(text, "8").correct
    assert time.process_time() - started < 0.5


@given(st.text(max_size=200), st.integers(0, 999))
def test_the_last_box_is_the_answer_whatever_stands_before_it(before: str, answer: int) -> None:
    if "<" not in before and "box" not in before:
        assert extract(f"{before} so it is \\boxed{{{answer}}}.") == str(answer)
