"""Two spellings of one value are equal, and nothing else is: both tables are `answer | gold`."""

from __future__ import annotations

import pytest

from rewards.math_answer import verify

EQUAL = r"""
\text{The answer is } 5 | 5
\text{Answer: } 5 | 5
\{1\pm\sqrt{5},-2\} | \{-2,1+\sqrt5,1-\sqrt5\}
\$32,\!348 | 32348
10,\!080 | 10080
\frac{1}{4}\text{ units}^2 | \frac14
8\sqrt5\text{ ft} | 8\sqrt{5}
0.\overline{09} | \frac{1}{11}
12_3 | 12_{3}
(3,\frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right)
(-\infty, -5] \cup [5,\infty) | [5,\infty)\cup(-\infty,-5]
\text{June 20} | \text{June 20}
x=4, y=7 | y=7, x=4
\frac{\sqrt[3]{4}}{2} | 2^{-1/3}
1.45\times10^{-7} | 0.000000145
\sqrt{x}-\sqrt{y} | -\sqrt{y}+\sqrt{x}
3\sqrt{3}\pi | 3\pi\sqrt{3}
-\frac{\sqrt{2}}{2} | -\frac{1}{\sqrt{2}}
\frac{-1+\sqrt{5}}{2} | \frac{\sqrt5-1}{2}
\frac{9\sqrt{3}}{4} | \frac{9}{4}\sqrt{3}
5\sqrt{2} \text{ cm} | 5\sqrt2
\text{Maria} | Maria
\mathrm{Yes} | \text{yes}
i\sqrt{3} | \sqrt{3}i
\frac{3}{2}, -\frac{1}{2} | -0.5, 1.5
2, -1 | -1, 2
f(x)=2x+1 | f(x)=1+2x
\cos^{-1}(0) | \frac{\pi}{2}
120^\circ | 120
x\ge 7 | [7,\infty)
7\le x<9 | [7,9)
x>3 \text{ or } x<-1 | (-\infty,-1)\cup(3,\infty)
100! | 100!
\binom{10}{3} | 120
\frac{n(n+1)(2n+1)}{6} | \frac{2n^3+3n^2+n}{6}
2^{n}-1 | -1+2^n
3^{2n+1} | 3\cdot 9^n
(a+b)(a-b) | a^2-b^2
\frac{x+1}{x-1} | 1+\frac{2}{x-1}
\frac{1}{2}\ln 3 | \ln\sqrt{3}
\arctan\frac12+\arctan\frac13 | \frac{\pi}{4}
\sqrt{3+2\sqrt{2}} | 1+\sqrt{2}
\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5} | 1
\tan\frac{\pi}{8} | \sqrt{2}-1
e^{\ln 5} | 5
4:3 | 4 : 3
\text{A, C} | A, C
1 \text{ hour} | 1 \text{ hr}
\frac{3}{4}\text{ hour} | 0.75 \text{ hours}
-2x > 14 | x<-7
x^2-4>0 | x^2>4
\sqrt{2}x+\sqrt{2}y=2 | x+y=\sqrt{2}
\sin(2x) | 2\sin x\cos x
\frac{1}{2}x | \frac{x}{2}
0.5x | x/2
\ln(x^2) | 2\ln|x|
(-1)^n | \cos(n\pi)
\frac{(-1)^n}{n} | \frac{(-1)^{n}}{n}
n! | n\cdot(n-1)!
\binom{n}{2} | \frac{n(n-1)}{2}
\sqrt{2}/2 | \frac{1}{\sqrt{2}}
2\sqrt{3} | \sqrt{12}
\sqrt{12} | 2√3
\frac{3\pi}{4} | \frac{3}{4}\pi
1.5 million | 1500000
1{,}234{,}567 | 1234567
$1,234.50 | 1234.5
\text{36 cm}^2 | 36
36\ \mathrm{cm}^2 | 36
36 cm | 36
x=2 \text{ or } x=3 | 2, 3
x=2,3 | \{2,3\}
x \in (3,\infty) | x>3
x<1 \text{ or } x>6 | (-\infty,1)\cup(6,\infty)
(-\infty,1)\cup(6,+\infty) | (-\infty,1)\cup(6,\infty)
x\neq 3 | (-\infty,3)\cup(3,\infty)
x\neq 3 | \mathbb{R}\setminus\{3\}
-\frac{1}{2} | \frac{-1}{2}
\frac{1}{2}+\frac{1}{3} | 5/6
e^{i\pi/3} | \frac{1+i\sqrt{3}}{2}
3-2i | -2i+3
\pm 3 | 3, -3
\pm 3 | \{-3, 3\}
2^{10} | 1024
\frac{10!}{7!} | 720
|x-3| | |3-x|
\lfloor 3.7 \rfloor | 3
\log_{10} 100 | 2
\log_2 8 + 1 | 4
\tan 45^\circ | 1
45^\circ | 45
45 degrees | 45^\circ
\arcsin(1/2) | \frac{\pi}{6}
\cos^2 x + \sin^2 x | 1
y = -\frac{2}{3}x + 4 | 2x+3y=12
x^2 + y^2 - 4x = 0 | (x-2)^2+y^2=4
f(x) = x^2 | x^2
a_n = 2n+1 | 2n+1
S_{ABC} = 12 | 12
\angle A = 30^\circ | 30
m\angle ABC = 30^\circ | 30^\circ
AB = 5\text{ cm} | 5
\frac{dy}{dx} = 2x | 2x
\text{Answer: } 7 | 7
The answer is 7 | 7
\begin{bmatrix}1&2\\3&4\end{bmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}x+1\\2\end{pmatrix} | \begin{pmatrix}1+x\\2\end{pmatrix}
-\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}-1\\-2\end{pmatrix}
\langle 1, 2, 3\rangle | \langle 1,2,3 \rangle
\emptyset | \varnothing
∅ | \emptyset
\{\} | \emptyset
\text{no solution} | No solution.
\text{Monday} | monday
12:30 | 12:30
1:2:3 | 1:2:3
0.\overline{3} | \frac13
0.\overline{142857} | 1/7
0.1\overline{6} | 1/6
1\frac{1}{2} | 3/2
1 1/2 | 1.5
-1\frac{1}{2} | -1.5
2½ | 2.5
x² + 1 | x^2+1
√2 | \sqrt{2}
3×10⁸ | 3\times 10^{8}
5! | 120
6.022\times10^{23} | 6.022e23
12\% | 0.12
12\% | \frac{3}{25}
\theta = \frac{\pi}{3} | \frac{\pi}{3}
\frac{\sqrt{5}-1}{2} | \frac{2}{1+\sqrt{5}}
\frac{a^2-b^2}{a-b} | a+b
(a+b)^2 | a^2+2ab+b^2
\sqrt[3]{-8} | -2
\sqrt{-4} | 2i
2xy | 2yx
xyz | zyx
\frac{x}{y} | xy^{-1}
e^{-x} | \frac{1}{e^x}
\ln 8 | 3\ln 2
\frac{\ln 8}{\ln 2} | 3
10^{-3} | 0.001
5\text{ apples} | 5 \text{ apples}
5\text{ km/h} | 5 \text{ kilometers per hour}
\$5 | 5 \text{ dollars}
5\text{ dollars} | \$5.00
1101_2 | 1101_{\text{two}}
(1101)_2 | 1101_2
3A_{16} | 3a_{16}
\boxed{12} | 12
\mathbf{12} | 12
\textcolor{red}{12} | 12
12\,\text{cm} | 12\text{ cm}
\text{(A)} | A
(A) | A
A | \text{A}
\left\{1,2,3\right\} | \{3,2,1\}
(0,1)\cup(1,2) | (0,2)\setminus\{1\}
\frac{\pi}{6} \text{ radians} | \frac{\pi}{6}
4\pi r^2 | 4r^2\pi
-\infty | -\infty
\{(1,2),(3,4)\} | \{(3,4),(1,2)\}
(\frac12, 3) | (0.5,3)
\left(-\frac{1}{2}, \frac{\sqrt{3}}{2}\right) | (-0.5, \sqrt{3}/2)
k \in \mathbb{Z} | k \in \mathbb{Z}
\frac{\pi}{4}+k\pi | \frac{\pi}{4}+\pi k
5 \cdot 10^{-2} | 1/20
\cot x | \frac{\cos x}{\sin x}
\sinh x+\cosh x | e^x
\log_a b | \frac{\ln b}{\ln a}
x^{1/2} | \sqrt{x}
2^{n}\cdot 3 | 3 \cdot 2^n
\max(3,5) | 5
100\text{ percent} | 100\%
\gcd(12,18) | 6
\text{yes} | Yes
\dfrac{1}{\sqrt{3}} | \frac{\sqrt3}{3}
p \wedge q | p \wedge q
1, 2, 3, and 4 | 1,2,3,4
3x^2+2x | x(3x+2)
7 : 5 | 7:5
50\text{%} | 50\%
\text{East} | east
15 \text{ and } 20 | 20, 15
\overline{AB} = 5 | 5
|AB| = 5 | 5
\sqrt 2 | \sqrt{2}
\frac 12 | 0.5
\frac12 | .5
\tfrac{1}{2} | 0.5
-x+1 | 1-x
y=2(x-1) | y=2x-2
y-1 = 2(x-1) | y=2x-1
2x-y-1=0 | y=2x-1
x=y | y=x
10^{2} \text{ m} | 100
9.8\text{ m/s}^2 | 9.8
\frac{3}{4} \text{ cup} | 3/4
7\% | 7
\lfloor \pi \rfloor | 3
"""

DIFFERENT = r"""
\frac{dy}{dx} | \frac{y}{x}
7\text{ish} | 7
7 \text{ max} | 7
7\text{-ish} | 7
7{8} | 78
\text{7}8 | 78
5 \bmod 3 | 5
-2^2 | 4
0.\overline{75} | 0.75
\det\begin{pmatrix}1&2\\3&4\end{pmatrix} | -2
x=7\\y=8 | 7
1+2+\cdots+7 | 7
f''(x)=2 | f'(x)=2
\frac{2\pi}{3} | 120^\circ
3\pi | 9.42477796076938
\sqrt{a^2b^2} | ab
\sqrt{a^2}b | ab
|a|b | ab
a|b| | ab
|ab|c | abc
a|bc| | abc
|ac|b | abc
|abc| | abc
5,3 | a=3,b=5
3,5 | a=5,b=3
3x+7=22 | x=5
2x=10 | x=5
2x+1>15 | x>7
x+x>14 | x>7
\text{not} = 5 | 5
5\text{i} | 5
5\text{x} | 5
5\text{ tens} | 5
\sum_{i=1}^{3} i | 3i
x-5=0 | x=5
x^2=25 | x=5
\text{The answer is not } 5 | 5
\text{The answer is } 5 \text{ or } 6 | 5
(1\pm\sqrt2, 3) | (1+\sqrt2,3)
1:2 | 0.5
5 \text{ of } 6 | 5
5 \text{ out of } 6 | 5
5\frac{1}{2}\% | 5
5^\circ | 5\%
5\text{ pm} | 5 \text{ am}
5 \text{ a.m.} | 5 \text{ p.m.}
\text{June 20} | \text{June 21}
\text{June } 20 | 20
\text{Type 1} | 1
\text{Case 2: } 7 | 7
\sqrt{49}+1 | 7
7-0.0000000001 | 7
7 \pm 0 | 7
7 \pm 0.1 | 7
[7] | 7
\{7,7\} | 7
(7) (8) | 7
7(1) | 8
7:00 | 7
7;8 | 7
7|8 | 7
7,000 | 7
7.000.000 | 7
7.0.0 | 7
7e | 7
7E0 | 70
0x7 | 7
0b111 | 7
7_2 | 7
7^0 | 7
\log_7 7 | 7
\frac{d}{dx}7x | 7
7 \text{ (mod 8)} | 7
\operatorname{rank} = 8 | 7
\max = 8 | 7
y=7x | 7x^2
(x+1)(x-1) | x^2+1
a^2+b^2 | (a+b)^2
\sin^2 x | \sin x^2
\sin 2x | 2\sin x
\tan x | \frac{\cos x}{\sin x}
e^{x+y} | e^x+e^y
\ln(x+y) | \ln x+\ln y
\sqrt{a^2+b^2} | a+b
\frac{1}{a+b} | \frac{1}{a}+\frac{1}{b}
x_{12} | x_1x_2
xy | x+y
|x+y| | |x|+|y|
\lfloor x \rfloor | x
n^2+n+41 | n^2+n+40
2^{2^5}+1 | 2^{32}
10^{18}+1 | 10^{18}
\frac{10^{18}+1}{10^{18}} | 1
F_n | F_{n+1}
\alpha+\beta | \alpha-\beta
\theta | \phi
\frac{a}{b}c | \frac{a}{bc}
AB+BC | AC
\vec{a} | a
\overrightarrow{AB} | AB
\triangle ABC | \triangle DEF
ABCD | ABDC
P(A) | P(B)
p \to q | q \to p
p \land q | p \lor q
\forall x | \exists x
A \cup B | A \cap B
A\cup B | B
(A \cup B) | A
\{a,b\} | \{a,c\}
(a,b) | (b,a)
[a,b] | (a,b)
\{1,\ldots,10\} | \{1,\ldots,11\}
1,\ldots,10 | 10
\infty,7 | 7
(7,\infty) | [7,\infty)
(-\infty,7) | (7,\infty)
x \ge 7 \text{ and } x \le 9 | [7,9)
\text{none} | \text{all}
\text{two} | 2
\text{increasing} | \text{decreasing}
\text{Alice and Bob} | \text{Alice}
\text{Alice, Bob} | \text{Alice}
|x-10| | 10-x
\sqrt{(x-1000)^2} | 1000-x
\$5 | 5\%
\max(x,5) | 5
2x > 14 | x < 7
-2x > 14 | x>-7
x^2 > 4 | x>2
3.14159 | \pi
\frac{22}{7} | \pi
1.414 | \sqrt{2}
7 \text{ or } 8 | 7
7, 8 | 8
\{7\} | 8
(7,8) | 7,8
7 \text{ to } 8 | 7
7-8 | 7
7/8 | 7
\geq 7 | 7
> 7 | 7
\text{about } 7 | 7
7 \text{ approximately} | 7
\approx 7 | 7
7\text{ or more} | 7
\text{at least } 7 | 7
7+ | 7
7\ldots | 7
7.0001 | 7
7 \neq 8 | 7
7=7=8 | 7
x=7, y=8 | 7
x=7=8 | 7
7 \text{ million} | 7
7 \text{ dozen} | 7
7 \text{ cm and } 8\text{ mm} | 7
7^{\circ}30' | 7
-7 | 7
7i | 7
7x | 7
7! | 7
\frac{7}{0} | 7
7_{8} | 7
0.7 | 7\%
7\% | 0.7
7\% | 700
1\% | 1
0.5\% | 0.5
0.5 | 0.5\%
x^2 | x
-x | x
|x| | x
\sqrt{x^2} | x
x^{2n} | x^n
\ln x | \log_{10} x
\log 100 | \ln 100
\ln(x^2) | \ln x
e^x | e^{2x}
\sin x | x
\frac{x^2-1}{x-1} | x-1
x+C | x
2n+1 | 2n-1
(1,2] | (1,2)
[1,2] | (1,2)
(2,1) | (1,2)
\{1,2\} | (1,2)
x>3 | x<3
x>3 | x\ge 3
3>x | x>3
x>3 | (3,4)
x>3, x<5 | x>3
x=3 | x=-3
y=3x | x=3y
x^2=9 | x=3
x=\pm3 | 3
xy=0 | x=0
2x+3y=12 | 2x+3y=13
x=1 | x-1
x-1=0 | 0
0=0 | 1
3:4 | 3/4
4:3 | 3:4
3:4 | 3
12:30 | 12.5
1101_2 | 13
1101_3 | 1101_2
13 | 1101_2
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\3\end{pmatrix}
\begin{vmatrix}1&2\\3&4\end{vmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
36\text{ m} | 36\text{ cm}
36\text{ cm} | 36 \text{ cm}^2
5\text{ apples} | 5\text{ oranges}
\$5 | 5 \text{ cents}
€5 | \$5
5\text{ km} | 5 \text{ km/h}
\text{no} | on
\text{not odd} | odd
\text{odd or even} | odd
\text{east} | seat
AB | BA
B | A
\text{(B)} | (A)
\infty | -\infty
\infty | 10^{1000}
\text{undefined} | 0
\emptyset | 0
\{0\} | \emptyset
\{\emptyset\} | \emptyset
2.50001 | 2.5
1e-300 | 0
1/3^{60} | 1/3^{61}
\frac{1}{2024!} | \frac{1}{2025!}
\sqrt{10^{100}+1} | 10^{50}
\sqrt{2}+10^{-60} | \sqrt{2}
\sqrt{2}(1+10^{-60}) | \sqrt{2}
\cos(10^{-40}) | 1
\tanh(100) | 1
\tanh(1000) | 1
\arctan(10^{100}) | \frac{\pi}{2}
e^{-1000} | 0
\frac{1}{1+e^{-500}} | 1
(1-10^{-9})^{10} | 1
\left(1+\frac{1}{10^{50}}\right)^{10^{50}} | e
\sin(\pi+10^{-50}) | 0
\sqrt[1000]{2} | 1
\pi - 10^{-100} | \pi
2^{1000}+\sqrt{2} | 2^{1000}+\sqrt{2}+1
\ln(1+10^{-80}) | 0
10^{-80} | \ln(1+10^{-80})
(x-x) | x
x^0 | x
0x | x
x/x | x
x + 10^{-50} | x
x + 10^{-50}\sin x | x
\frac{1}{2}+\frac{1}{3} | \frac{2}{5}
1{,}234 | 1.234
1.234 | 1234
1,234 | 1, 234
1, 234 | 1234
12 34 | 1234
1 234 | 12 34
0.3 | 0.\overline{3}
0.33 | 0.\overline{3}
2\frac{1}{2} | 1
\frac{1}{2}3 | 1.5
2 3 | 6
2 3/5 | 6/5
1/2x | \frac{x}{2}
1/2\pi | \frac{1}{2\pi}
\sin x(1+x) | \sin(x(1+x))
\sin^{-1} x | \frac{1}{\sin x}
10^12 | 10^{12}
2^10 | 2^{10}
x_1 | x_2
a_1+a_2 | a_1+a_3
f(x) | fx
f(x+1) | f(x)+f
f(2) | 2f
\text{True} | 1
\text{one} | 1
j | i
I | 1
l | 1
O | 0
o | 0
5, 5 | 5
\{5,5\} | 5
5\cdot | 5
5+ | 5
5 5 | 5
(5,) | 5
(5 | 5
5) | 5
5; 6 | 5
5 / 6 / 7 | 5
5 \to 6 | 5
5 \equiv 6 | 5
5 \pmod{7} | 5
5 \mod 7 | 12
x \equiv 5 \pmod 7 | 5
\text{if } x=5 | 5
5 \text{ if } x>0 | 5
5 (6) | 5
5^{6} | 5
5 \wedge 6 | 5
\neg 5 | 5
\overline{5} | 5
\bar 5 | 5
5' | 5
5'' | 5
\vec{5} | 5
\hat{5} | 5
\sqrt{5} | 5
\text{five} | 5
\lim_{x\to 5} x | 5
\sum_{k=1}^5 1 | 6
\text{5 or 6} | 5
5\text{ (not 6)} | 6
\text{not } 5 | 5
\text{I think } 5 | 5
5?? | 5
5? | 5
\{5 | 5
\frac{5}{1 | 5
10\text{ to the power }2 | 10
10 squared | 10
3 \text{ pairs} | 3
three | 3
1st | 2
2 \text{ tenths} | 2
2\text{ m} | 2 \text{ min}
2\text{ S} | 2 \text{ s}
C or D | C
A, B | A
B and C | B
-(-5) | -5
--5 | -5
5 - -5 | 0
5\times10^3 | 5\times10^4
5\times 10^{3} | 5.001\times 10^{3}
1.0 | 1.01
x=1,y=2 | (2,1)
y=2,x=1 | (2,1)
y=1, x=2 | (1,2)
(1,2),(3,4) | (1,2,3,4)
(1,2) | (1,2),(3,4)
((1,2),3) | (1,(2,3))
\{1,\{2\}\} | \{1,2\}
1 < x < 2 | 1 < y < 2
1<x<2 | 1 < x
x<1 \text{ and } x>6 | (-\infty,1)\cup(6,\infty)
x<1, x>6 | (-\infty,1)\cup(6,\infty)
(-\infty,\infty) | \mathbb{Z}
\mathbb{Z} | \mathbb{R}
\mathbb{N} | \mathbb{Z}
\frac{\pi}{4}+2k\pi | \frac{\pi}{4}+k\pi
2k\pi | k\pi
(x+1)^{2024} | (x+1)^{2025}
(x+1)^{5000} | x
\sqrt{x}\sqrt{y} | \sqrt{x+y}
x^{y} | y^{x}
a/b | b/a
a-b | b-a
\cos(n\pi) | 1
(-1)^n | 1
(-1)^{2n} | (-1)^n
\sin(n\pi) | 1
n! | n
\binom{n}{2} | \binom{n}{3}
"""


def pairs(table: str) -> list[tuple[str, str]]:
    cut = [line.rsplit(" | ", 1) for line in table.strip().splitlines()]
    return [(answer, gold) for answer, gold in cut]


@pytest.mark.parametrize(("answer", "gold"), pairs(EQUAL))
def test_two_spellings_of_one_value_are_equal(answer: str, gold: str) -> None:
    verdict = verify(rf"so \boxed{{{answer}}}", gold)
    assert verdict.correct, verdict


@pytest.mark.parametrize(("answer", "gold"), pairs(DIFFERENT))
def test_what_is_not_the_gold_answer_is_not_accepted(answer: str, gold: str) -> None:
    verdict = verify(rf"so \boxed{{{answer}}}", gold)
    assert not verdict.correct, verdict
    assert verdict.scored


@pytest.mark.parametrize(("answer", "gold"), pairs(EQUAL))
def test_every_value_is_equal_to_itself(answer: str, gold: str) -> None:
    assert verify(rf"\boxed{{{gold}}}", gold).correct
    assert verify(rf"\boxed{{{answer}}}", answer).correct


def test_a_tolerance_counts_only_where_the_task_asks_for_it() -> None:
    assert not verify(r"\boxed{0.333}", "1/3").correct
    assert verify(r"\boxed{0.333}", "1/3", rel_tol=0.002).correct
    assert not verify(r"\boxed{0.33}", "1/3", rel_tol=0.002).correct
    assert verify(r"\boxed{3.14159}", "3.14", decimals=True).correct
    assert verify(r"\boxed{\pi}", "3.14", decimals=True).correct
    assert not verify(r"\boxed{3.15}", "3.14", decimals=True).correct
    assert not verify(r"\boxed{\pi}", "3.14").correct


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("C", True), ("(C)", True), (r"\textbf{(C)}\ 42", True), ("c", True), (r"\text{Option C}", True),
        ("C. 42", True),
        ("D", False), ("C, D", False), (r"\text{C or D}", False), ("(C) or (D)", False), ("ABCDE", False),
        ("42", False),
        ("not C", False), ("CD", False), ("(C", False), ("(C) 42, (D) 43", False),
    ],
)  # fmt: skip
def test_a_choice_is_one_letter_and_no_hedge(answer: str, right: bool) -> None:
    assert verify(rf"\boxed{{{answer}}}", "C", answer_type="choice", choices="ABCDE").correct == right


def test_several_letters_are_a_set() -> None:
    for answer, right in (("A, C", True), ("CA", True), ("A", False), ("A, C, D", False), ("A, A, C", False)):
        verdict = verify(rf"\boxed{{{answer}}}", "C, A", answer_type="choice", choices="ABCDE", multi=True)
        assert verdict.correct == right, answer
