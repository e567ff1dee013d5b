"""A parser of scalar expressions. Nothing is ever executed; what has two readings is unread."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from rewards.math_answer.extraction import MAX_DEPTH
from rewards.math_answer.nodes import BIG_OPERATORS, Node, differential
from rewards.math_answer.outcomes import Rejected, Unread
from rewards.math_answer.tokens import Token
from rewards.math_answer.units import words

_END = Token("end", "")
_MAX_SIGNS = 4
_STARTS = words("frac sqrt surd binom pi lfloor lceil")
_INVERSE = {name: "arc" + name for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_MANY = words("gcd lcm max min")


def parse(tokens: list[Token]) -> Node:
    """The whole of `tokens` as one scalar expression. Raises Unread or Rejected."""
    numbers = [token.text for token in tokens if token.kind == "num"]
    if len(numbers) > 1 and any(len(number) > 1 and number.isdigit() and number[0] == "0" for number in numbers):
        raise Unread  # 2024-01-15
    parser = _Parser(list(tokens))
    node = parser.quotient_or_sum()
    if parser.peek() is not _END:
        raise Unread
    return node


class _Parser:
    """sum := product (("+" | "-" | "±") product)*; product := power (("*" | "/" | nothing) power)*;
    power := postfix ["^" exponent]; postfix := atom ["!" | "°"]."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.position, self.depth = tokens, 0, 0
        self.in_bars = False
        """Whether the next "|" closes."""

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else _END

    def next(self) -> Token:
        token = self.peek()
        self.position += 1
        return token

    def sees(self, *texts: str) -> bool:
        token = self.peek()
        return token.kind in ("op", "cmd") and token.text in texts

    def take(self, text: str) -> None:
        if not self.sees(text):
            raise Unread
        self.position += 1

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Rejected("too_deep")
        terms = [self.signed()]
        while self.sees("+", "-", "pm", "mp"):
            sign = self.next().text
            term = self.signed()
            terms.append(term if sign == "+" else ("-", term) if sign == "-" else ("pm", sign, term))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("+", tuple(terms))

    def signed(self) -> Node:
        signs = []
        while self.sees("+", "-", "pm", "mp"):
            signs.append(self.next().text)
            if len(signs) > _MAX_SIGNS:
                raise Rejected("too_many_signs")
        node = self.product()
        for sign in reversed(signs):
            node = node if sign == "+" else ("-", node) if sign == "-" else ("pm", sign, node)
        return node

    def product(self) -> Node:
        factors, over = [self.power()], False
        while True:
            if self.sees("*"):
                self.position += 1
                factors.append(self.negated(self.power))
                over = False
            elif self.sees("/"):
                self.position += 1
                factors = [("/", _times(factors), self.negated(self.power))]
                over = True
            elif self.sees("bmod"):
                self.position += 1
                factors = [("mod", _times(factors), self.power())]
            elif self.starts_factor() or self.starts_bars(factors):
                if over:  # 1/2x: the half of x, or one over 2x
                    raise Unread
                self.refuse_application(factors[-1])
                factors.append(self.power())
            else:
                return _times(factors)

    def negated(self, inner: Callable[[], Node]) -> Node:
        if self.sees("-"):
            self.position += 1
            return ("-", inner())
        return inner()

    def starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "num":  # 3!4!
            return self.peek(1).text == "!" and self.peek(-1).text == "!"
        if token.kind in ("let", "fn"):
            return True
        return token.kind in ("op", "cmd") and (token.text in ("(", "{") or token.text in _STARTS)

    def starts_bars(self, factors: list[Node]) -> bool:
        """2|x| and |x||y|, but not |a|b|c|, where another pair of bars may be meant."""
        if self.in_bars or not self.sees("|"):
            return False
        if factors[-1][0] != "|" and any(factor[0] == "|" for factor in factors):
            raise Unread
        return True

    def refuse_application(self, factor: Node) -> None:
        """f(x) is no product; nor is 2{3}."""
        if factor[0] == "var" and factor[1] in ("f", "g", "h") and self.sees("("):
            raise Unread
        if factor[0] == "num" and self.sees("{"):
            raise Unread
        if factor[0] == "num" and factor[1].denominator > 1 and self.sees("(") and self.peek(1).kind == "num":
            raise Unread  # 0.3(3)

    def power(self) -> Node:
        base = self.postfix()
        if self.sees("^"):
            if self.peek(1).text == "circ" or (self.peek(1).text == "{" and self.peek(2).text == "circ"):
                self.degree()
                return ("deg", base)
            self.position += 1
            base = ("^", base, self.exponent())
        elif self.sees("**"):
            self.position += 1
            base = ("^", base, self.negated(self.postfix))
        if self.sees("^", "**"):
            raise Rejected("tower")
        return ("deg", base) if self.sees("circ") and self.next() else base

    def degree(self) -> None:
        braced = self.peek(1).text == "{"
        self.position += 4 if braced else 2
        if braced and self.peek(-1).text != "}":
            raise Unread

    def exponent(self) -> Node:
        if self.sees("{"):
            return self.braced()
        if self.sees("("):
            return self.enclosed("(", ")")
        if self.sees("-"):
            self.position += 1
            return ("-", self.exponent())
        token = self.peek()
        if token.kind == "num":
            if len(token.text) != 1:  # TeX raises one character only: 10^12 is 10^1 2
                raise Unread
            self.position += 1
            return ("num", token.value)
        if token.kind == "let" or self.sees("frac", "pi"):
            return self.atom()
        raise Unread

    def postfix(self) -> Node:
        node = self.atom()
        if self.sees("!"):
            self.position += 1
            if self.sees("!"):
                raise Unread  # a double factorial
            node = ("!", node)
        return node

    def atom(self) -> Node:
        token = self.next()
        if token.kind == "num":
            return self.number(token)
        if token.kind == "let":
            return self.letter(token)
        if token.kind == "fn":
            return self.function(token.text)
        if token.kind in ("op", "cmd"):
            self.position -= 1
            return self.bracketed(token.text)
        raise Unread

    def number(self, token: Token) -> Node:
        assert token.value is not None
        after = self.peek()
        if after.kind == "num":
            return self.plain_mixed(token)
        if self.sees("_") or (token.text == "repeating" and self.sees("{")):
            raise Unread
        if self.sees("frac") and token.text.isdigit():
            saved = self.position
            part = self.bracketed("frac")
            if part[1][0] == part[2][0] == "num":
                return _mixed(token, part[1][1], part[2][1])
            self.position = saved
        return ("num", token.value)

    def plain_mixed(self, whole: Token) -> Node:
        top, slash, bottom = self.peek(), self.peek(1), self.peek(2)
        digits = whole.text.isdigit() and top.text.isdigit() and bottom.text.isdigit()
        if not (digits and top.spaced and slash.text == "/" and bottom.kind == "num"):
            raise Unread
        self.position += 3
        if self.sees("/", "^", "!", "_"):
            raise Unread
        return _mixed(whole, Fraction(top.text), Fraction(bottom.text))

    def letter(self, token: Token) -> Node:
        name = token.text
        if self.sees("_"):
            name += "_" + self.subscript()
        elif name in ("e", "i"):
            return ("const", name)
        if self.sees("'"):
            raise Unread
        if name == "Gamma" and self.sees("("):
            return ("!", ("+", (self.atom(), ("num", Fraction(-1)))))
        return ("var", name)

    def subscript(self) -> str:
        """The text of a subscript, which is a part of a name."""
        self.take("_")
        if not self.sees("{"):
            token = self.next()
            if token.kind not in ("num", "let", "word") or (token.kind == "num" and len(token.text) > 1):
                raise Unread
            return token.text
        self.position += 1
        parts = []
        while not self.sees("}"):
            token = self.next()
            if token.kind not in ("num", "let", "word") and token.text not in ("+", "-", ","):
                raise Unread
            parts.append(token.text)
        self.position += 1
        return "".join(parts)

    def bracketed(self, text: str) -> Node:
        if text == "(":
            return self.enclosed("(", ")")
        if text == "{":
            return self.braced()
        if text == "|":
            return ("|", self.enclosed("|", "|"))
        if text in ("lfloor", "lceil"):
            return ("fn", text[1:], (self.enclosed(text, "r" + text[1:]),))
        self.position += 1
        if text in ("frac", "binom"):
            node = ("/" if text == "frac" else text, self.argument(), self.argument())
            if text == "frac" and differential(node[1]) and differential(node[2]):  # dy/dx
                raise Unread
            return node
        if text == "pi":
            return ("const", "pi")
        if text == "sqrt":
            return self.root()
        if text == "surd":
            return self.surd()
        if text in BIG_OPERATORS:
            return self.big_operator(text)
        raise Unread

    def enclosed(self, opening: str, closing: str) -> Node:
        self.take(opening)
        outer, self.in_bars = self.in_bars, opening == "|"
        node = self.sum()
        self.in_bars = outer
        self.take(closing)
        return node

    def braced(self) -> Node:
        """{...}, also {7 \\over 12}."""
        self.take("{")
        outer, self.in_bars = self.in_bars, False
        node = self.quotient_or_sum()
        self.in_bars = outer
        self.take("}")
        return node

    def quotient_or_sum(self) -> Node:
        """A sum, also 7 \\over 12 and 5 \\choose 2."""
        node = self.sum()
        if self.sees("over", "choose"):
            name = "/" if self.next().text == "over" else "binom"
            node = (name, node, self.sum())
        return node

    def root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self.sees("["):
            degree = self.enclosed("[", "]")
        return ("root", degree, self.enclosed("(", ")") if self.sees("(") else self.argument())

    def surd(self) -> Node:
        """A root sign without a bar: √2x has two readings."""
        degree: Node = self.enclosed("[", "]") if self.sees("[") else ("num", Fraction(2))
        bracketed = self.sees("(", "{")
        node = self.atom()
        if not bracketed and (
            self.sees("^", "pi", "frac") or (self.peek().kind in ("let", "fn") and self.peek().text != "i")
        ):
            raise Unread
        return ("root", degree, node)

    def argument(self) -> Node:
        """{...}, or one character: \\frac12 is one half."""
        if self.sees("{"):
            return self.braced()
        token = self.next()
        if token.kind == "num" and token.text.isdigit():
            if len(token.text) > 1:
                self.position -= 1
                self.tokens[self.position] = Token("num", token.text[1:], False, Fraction(token.text[1:]))
            return ("num", Fraction(token.text[0]))
        if token.kind == "let":
            return ("const", token.text) if token.text in ("e", "i") else ("var", token.text)
        if token.text == "pi" and token.kind == "cmd":
            return ("const", "pi")
        raise Unread

    def function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        if self.sees("_"):
            if name != "log":
                raise Unread
            self.position += 1
            if self.peek().kind == "num" and len(self.peek().text) > 1:  # \log_23
                raise Unread
            base = self.argument()
        if self.sees("^"):
            self.position += 1
            power = self.exponent()
            if power == ("-", ("num", Fraction(1))):
                name, power = _INVERSE.get(name, ""), None
            elif power[0] == "-" or not name:
                raise Unread
        args = self.many() if name in _MANY else (self.function_argument(),)
        if not name:
            raise Unread
        node = ("log", base, args[0]) if base is not None else ("fn", name, args)
        return node if power is None else ("^", node, power)

    def many(self) -> tuple[Node, ...]:
        closing = r"\}" if self.sees(r"\{") else ")"
        self.take(r"\{" if closing == r"\}" else "(")
        found = [self.sum()]
        while self.sees(","):
            self.position += 1
            found.append(self.sum())
        self.take(closing)
        return tuple(found)

    def function_argument(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Rejected("too_deep")
        if self.sees("("):
            node = self.enclosed("(", ")")
        elif self.sees("{"):
            node = self.braced()
        elif self.sees("|"):
            node = self.bracketed("|")
        else:
            node = self.juxtaposed()
        self.depth -= 1
        return node

    def juxtaposed(self) -> Node:
        """What belongs to a function without brackets: 2x of \\sin 2x \\cos x."""
        if self.peek().kind == "fn":
            return self.power()
        factors = [self.power()]
        while self.peek().kind == "let" or self.sees("pi", "frac", "sqrt", "surd"):
            factors.append(self.power())
        if self.sees("(", "{", "/"):
            raise Unread  # \sin x(1+x), \ln x/2
        return _times(factors)

    def big_operator(self, name: str) -> Node:
        """Read for those who can work it out."""
        variable = self.last_differential() if name == "int" else ""
        self.take("_")
        if name == "int":
            low = self.limit()
        else:
            self.take("{")
            variable = self.next().text
            if variable in ("i", "e"):
                raise Unread
            self.take("=")
            low = self.sum()
            self.take("}")
        self.take("^")
        high = self.limit()
        return (name, variable, low, high, self.sum() if name == "int" else self.product())

    def last_differential(self) -> str:
        """Takes the "dx" off the end: an integral has to be the last of an expression."""
        end = self.tokens[-2:]
        if len(self.tokens) < self.position + 6 or [token.kind for token in end] != ["let"] * 2 or end[0].text != "d":
            raise Unread
        del self.tokens[-2:]
        return end[1].text

    def limit(self) -> Node:
        braced = self.sees("{")
        if self.peek(braced).text != "infty" or (braced and self.peek(2).text != "}"):
            return self.exponent()
        self.position += 3 if braced else 1
        return ("inf", 1)


def _times(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else ("*", tuple(factors))


def _mixed(whole: Token, top: Fraction, bottom: Fraction) -> Node:
    """Two and three fifths; what cannot be a mixed number is not read, because it might be a product."""
    value = whole.value
    proper = value and value.denominator == 1 and top.denominator == bottom.denominator == 1 and 0 < top < bottom
    if not proper:
        raise Unread
    assert value is not None
    return ("num", value + top / bottom)
