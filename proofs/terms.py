"""A small typed writer of SMT-LIB terms.

Lemmas are written with these terms instead of one solver's objects. The text that is printed here is therefore the
text that every solver reads, that the export stores and that the ledger hashes; nothing depends on how some version
of a solver prints. Products are printed as ``(* x x)``, never as powers, and there are no sums of one term, because
other solvers reject both.

Operators follow the sort of their operands: on reals and integers they are the usual ones; on bit-vectors ``+ - *``
wrap, and ``< <= > >= >>`` are unsigned. Use `equal` for equality: ``==`` compares the Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias

BOOL: Final = "Bool"
INT: Final = "Int"
REAL: Final = "Real"
ROUNDING: Final = "RoundingMode"
FLOAT32: Final = "(_ FloatingPoint 8 24)"
FLOAT64: Final = "(_ FloatingPoint 11 53)"

Operand: TypeAlias = "Term | int | Fraction"


def bitvec_sort(width: int) -> str:
    """Name of the sort of bit-vectors of ``width`` bits."""
    return f"(_ BitVec {width})"


@dataclass(frozen=True, slots=True)
class Term:
    """One SMT-LIB term with its sort and the variables in it.

    Args:
        sort: SMT-LIB name of the sort.
        text: SMT-LIB text.
        variables: Pairs (name, sort) of the free variables.
    """

    sort: str
    text: str
    variables: frozenset[tuple[str, str]] = frozenset()

    @property
    def width(self) -> int:
        """Number of bits of a bit-vector term."""
        if not self.sort.startswith("(_ BitVec "):
            raise TypeError(f"{self.text} is a {self.sort}, not a bit-vector")
        return int(self.sort.removeprefix("(_ BitVec ").removesuffix(")"))

    def __add__(self, other: Operand) -> Term:
        return _arith(self, other, "+", "bvadd")

    def __radd__(self, other: Operand) -> Term:
        return _arith(_like(self, other), self, "+", "bvadd")

    def __sub__(self, other: Operand) -> Term:
        return _arith(self, other, "-", "bvsub")

    def __rsub__(self, other: Operand) -> Term:
        return _arith(_like(self, other), self, "-", "bvsub")

    def __mul__(self, other: Operand) -> Term:
        return _arith(self, other, "*", "bvmul")

    def __rmul__(self, other: Operand) -> Term:
        return _arith(_like(self, other), self, "*", "bvmul")

    def __neg__(self) -> Term:
        return _apply(self.sort, "bvneg" if _is_bits(self) else "-", self)

    def __lt__(self, other: Operand) -> Term:
        return _compare(self, other, "<", "bvult")

    def __le__(self, other: Operand) -> Term:
        return _compare(self, other, "<=", "bvule")

    def __gt__(self, other: Operand) -> Term:
        return _compare(self, other, ">", "bvugt")

    def __ge__(self, other: Operand) -> Term:
        return _compare(self, other, ">=", "bvuge")

    def __lshift__(self, other: Operand) -> Term:
        return _bits(self, other, "bvshl")

    def __rshift__(self, other: Operand) -> Term:
        return _bits(self, other, "bvlshr")

    def __and__(self, other: Operand) -> Term:
        return _bits(self, other, "bvand")

    def __or__(self, other: Operand) -> Term:
        return _bits(self, other, "bvor")

    def __invert__(self) -> Term:
        return _apply(bitvec_sort(self.width), "bvnot", self)


def variable(name: str, sort: str) -> Term:
    """A free variable."""
    return Term(sort, name, frozenset({(name, sort)}))


def real(name: str) -> Term:
    """A real variable."""
    return variable(name, REAL)


def reals(names: str) -> list[Term]:
    """Real variables, one per word of ``names``."""
    return [real(name) for name in names.split()]


def integer(name: str) -> Term:
    """An integer variable."""
    return variable(name, INT)


def boolean(name: str) -> Term:
    """A truth-valued variable."""
    return variable(name, BOOL)


def bits(name: str, width: int) -> Term:
    """A bit-vector variable of ``width`` bits."""
    return variable(name, bitvec_sort(width))


def number(value: int | Fraction, sort: str) -> Term:
    """The literal ``value`` in a numeric or bit-vector sort.

    Raises:
        TypeError: if the sort has no such literal (a fraction among integers, any number among truth values).
    """
    value = Fraction(value)
    if sort == REAL:
        text = f"{abs(value.numerator)}.0"
        if value.denominator != 1:
            text = f"(/ {text} {value.denominator}.0)"
    elif value.denominator != 1:
        raise TypeError(f"{value} is no {sort}")
    elif sort == INT:
        text = str(abs(value.numerator))
    elif sort.startswith("(_ BitVec "):
        width = Term(sort, "").width
        return Term(sort, f"#b{value.numerator % 2**width:0{width}b}")
    else:
        raise TypeError(f"{sort} has no literal {value}")
    return Term(sort, f"(- {text})" if value < 0 else text)


def truth(value: bool) -> Term:
    """The literal ``true`` or ``false``."""
    return Term(BOOL, "true" if value else "false")


def equal(a: Term, b: Operand) -> Term:
    """``a = b``: the same value (for floats: the same datum, so NaN equals NaN and -0 differs from +0)."""
    return _apply(BOOL, "=", a, _like(a, b))


def negate(a: Term) -> Term:
    """Logical ``not a``."""
    return _apply(BOOL, "not", _expect(a, BOOL))


def every(*terms: Term) -> Term:
    """Logical conjunction; true of no terms."""
    return _junction("and", terms, empty=True)


def some(*terms: Term) -> Term:
    """Logical disjunction; false of no terms."""
    return _junction("or", terms, empty=False)


def implies(a: Term, b: Term) -> Term:
    """Logical implication."""
    return _apply(BOOL, "=>", _expect(a, BOOL), _expect(b, BOOL))


def iff(a: Term, b: Term) -> Term:
    """Logical equivalence."""
    return _apply(BOOL, "=", _expect(a, BOOL), _expect(b, BOOL))


def choose(condition: Term, then: Term, otherwise: Operand) -> Term:
    """``then`` where ``condition`` holds, else ``otherwise``."""
    return _apply(then.sort, "ite", _expect(condition, BOOL), then, _like(then, otherwise))


def total(terms: list[Term]) -> Term:
    """The sum of at least one term."""
    return terms[0] if len(terms) == 1 else _apply(terms[0].sort, "+", *terms)


def concat(high: Term, low: Term) -> Term:
    """Bits of ``high`` above the bits of ``low``."""
    return _apply(bitvec_sort(high.width + low.width), "concat", high, low)


def extract(a: Term, high: int, low: int) -> Term:
    """Bits ``high`` down to ``low`` of ``a``, both included."""
    return Term(bitvec_sort(high - low + 1), f"((_ extract {high} {low}) {a.text})", a.variables)


def widen(a: Term, width: int) -> Term:
    """``a`` with zeros in front, ``width`` bits in all."""
    return Term(bitvec_sort(width), f"((_ zero_extend {width - a.width}) {a.text})", a.variables)


def float32_from_bits(a: Term) -> Term:
    """The float32 value that 32 bits encode."""
    return Term(FLOAT32, f"((_ to_fp 8 24) {a.text})", _with_width(a, 32).variables)


def float64_from_bits(a: Term) -> Term:
    """The float64 value that 64 bits encode."""
    return Term(FLOAT64, f"((_ to_fp 11 53) {a.text})", _with_width(a, 64).variables)


def float_round(a: Term, sort: str, mode: str) -> Term:
    """``a`` rounded to another float sort; ``mode`` is RNE, RTP, RTN or RTZ."""
    _, _, exponent, significand = sort.strip("()").split()
    return Term(sort, f"((_ to_fp {exponent} {significand}) {mode} {a.text})", a.variables)


def float_multiply(a: Term, b: Term, mode: str) -> Term:
    """``a * b`` rounded once."""
    return Term(a.sort, f"(fp.mul {mode} {a.text} {b.text})", a.variables | b.variables)


def float_add(a: Term, b: Term, mode: str) -> Term:
    """``a + b`` rounded once."""
    return Term(a.sort, f"(fp.add {mode} {a.text} {b.text})", a.variables | b.variables)


def float_fma(a: Term, b: Term, c: Term, mode: str) -> Term:
    """``a * b + c`` rounded once."""
    return Term(a.sort, f"(fp.fma {mode} {a.text} {b.text} {c.text})", a.variables | b.variables | c.variables)


def float_less_equal(a: Term, b: Term) -> Term:
    """IEEE ``a <= b``: false if either is NaN; -0 and +0 compare equal."""
    return _apply(BOOL, "fp.leq", a, b)


def float_less(a: Term, b: Term) -> Term:
    """IEEE ``a < b``: false if either is NaN."""
    return _apply(BOOL, "fp.lt", a, b)


def float_equal(a: Term, b: Term) -> Term:
    """IEEE ``a == b``: false if either is NaN; -0 equals +0."""
    return _apply(BOOL, "fp.eq", a, b)


def float_is_nan(a: Term) -> Term:
    """True of NaN only."""
    return _apply(BOOL, "fp.isNaN", a)


def float_is_infinite(a: Term) -> Term:
    """True of both infinities only."""
    return _apply(BOOL, "fp.isInfinite", a)


def _is_bits(a: Term) -> bool:
    return a.sort.startswith("(_ BitVec ")


def _expect(a: Term, sort: str) -> Term:
    if a.sort != sort:
        raise TypeError(f"{a.text} is a {a.sort}, not a {sort}")
    return a


def _with_width(a: Term, width: int) -> Term:
    return _expect(a, bitvec_sort(width))


def _like(a: Term, b: Operand) -> Term:
    return _expect(b, a.sort) if isinstance(b, Term) else number(b, a.sort)


def _apply(sort: str, operator: str, *terms: Term) -> Term:
    text = " ".join([operator, *(t.text for t in terms)])
    return Term(sort, f"({text})", frozenset().union(*(t.variables for t in terms)))


def _numeric(a: Term) -> Term:
    if a.sort not in (INT, REAL):
        raise TypeError(f"{a.text} is a {a.sort}, which has no arithmetic here")
    return a


def _arith(a: Term, b: Operand, operator: str, bit_operator: str) -> Term:
    name = bit_operator if _is_bits(a) else operator
    return _apply(a.sort, name, a if _is_bits(a) else _numeric(a), _like(a, b))


def _compare(a: Term, b: Operand, operator: str, bit_operator: str) -> Term:
    name = bit_operator if _is_bits(a) else operator
    return _apply(BOOL, name, a if _is_bits(a) else _numeric(a), _like(a, b))


def _bits(a: Term, b: Operand, operator: str) -> Term:
    return _apply(bitvec_sort(a.width), operator, a, _like(a, b))


def _junction(operator: str, terms: tuple[Term, ...], *, empty: bool) -> Term:
    if not terms:
        return truth(empty)
    for term in terms:
        _expect(term, BOOL)
    return terms[0] if len(terms) == 1 else _apply(BOOL, operator, *terms)
