"""Terms print as every solver reads them, and refuse what has no meaning."""

from __future__ import annotations

from fractions import Fraction

import pytest

from proofs import terms
from proofs.lemma import Statement
from proofs.terms import bits, boolean, integer, number, real


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (number(Fraction(-1, 3), "Real"), "(- (/ 1.0 3.0))"),
        (number(-2, "Int"), "(- 2)"),
        (number(-1, "(_ BitVec 4)"), "#b1111"),
        (2 - real("x"), "(- 2.0 x)"),
        (2 + real("x"), "(+ 2.0 x)"),
        (-real("x"), "(- x)"),
        (real("x") * Fraction(1, 2), "(* x (/ 1.0 2.0))"),
        (3 * bits("b", 4), "(bvmul #b0011 b)"),
        (-bits("b", 4), "(bvneg b)"),
        (~bits("b", 4), "(bvnot b)"),
        (bits("b", 4) | 1, "(bvor b #b0001)"),
        (bits("b", 4) > 1, "(bvugt b #b0001)"),
        (terms.every(), "true"),
        (terms.some(), "false"),
        (terms.every(boolean("p")), "p"),
        (terms.total([real("x")]), "x"),
        (terms.total([real("x"), real("y")]), "(+ x y)"),
        (terms.extract(bits("b", 8), 6, 3), "((_ extract 6 3) b)"),
        (terms.widen(bits("b", 8), 16), "((_ zero_extend 8) b)"),
    ],
)
def test_text(term, text):
    assert term.text == text


def test_widths_follow_the_operations():
    a = bits("a", 8)
    assert terms.concat(a, terms.extract(a, 6, 3)).width == 12
    assert terms.widen(a, 10).width == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: real("x") + integer("i"),
        lambda: boolean("p") + 1,
        lambda: terms.equal(boolean("p"), 1),
        lambda: boolean("p") + boolean("q"),
        lambda: boolean("p") < boolean("q"),
        lambda: integer("i") + Fraction(1, 2),
        lambda: real("x") & 1,
        lambda: bits("a", 8) + bits("b", 9),
        lambda: terms.every(boolean("p"), real("x")),
        lambda: terms.float32_from_bits(bits("a", 16)),
        lambda: terms.choose(real("x"), real("y"), 0),
        lambda: real("x").width,
    ],
)
def test_sorts_are_checked(make):
    with pytest.raises(TypeError):
        make()


def test_statement_demands_truth_values():
    with pytest.raises(TypeError, match="not a truth value"):
        Statement(logic="QF_LRA", premises=(), claim=real("x"))


def test_script_declares_every_variable_once():
    x, y = real("x"), real("y")
    script = Statement(logic="QF_LRA", premises=(x < y,), claim=x <= y + x).refutation()
    assert script == (
        "(set-logic QF_LRA)\n(declare-const x Real)\n(declare-const y Real)\n"
        "(assert (< x y))\n(assert (not (<= x (+ y x))))\n(check-sat)\n"
    )
