"""An evaluator of SMT-LIB terms in plain Python: counterexamples and encodings are judged without any solver."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from proofs.lemma import Statement

FLOATS = {("5", "11"): np.float16, ("8", "24"): np.float32, ("11", "53"): np.float64}


@dataclass(frozen=True)
class Bits:
    """A bit-vector value."""

    value: int
    width: int

    def signed(self) -> int:
        return self.value - (1 << self.width) if self.value >> (self.width - 1) else self.value


Value = Any
Environment = Mapping[str, Value]


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """Nested lists of words; not to be changed, the same text gives the same lists."""
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", text):
        if word == "(":
            stack.append([])
        elif word == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(word)
    return stack[0][0]


def literal(word: str) -> Value:
    """A word that is no variable."""
    if word in ("true", "false"):
        return word == "true"
    if word.startswith("#b"):
        return Bits(int(word.replace("#", "0"), 0), len(word) - 2)
    if word.startswith("#x"):
        return Bits(int(word.replace("#", "0"), 0), 4 * (len(word) - 2))
    return Fraction(word)


def _bits(function: Callable[[int, int], int]) -> Callable[..., Bits]:
    def apply(*operands: Bits) -> Bits:
        result, width = operands[0].value, operands[0].width
        for operand in operands[1:]:
            assert operand.width == width
            result = function(result, operand.value) % (1 << width)
        return Bits(result, width)

    return apply


def _shift_left(a: int, b: int) -> int:
    return a << b if b < 512 else 0


def _shift_right(a: int, b: int) -> int:
    return a >> b if b < 512 else 0


def _subtract(first: Fraction, *others: Fraction) -> Fraction:
    return first - sum(others) if others else -first


def _product(*factors: Fraction) -> Fraction:
    result = Fraction(1)
    for factor in factors:
        result *= factor
    return result


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, np.floating):
        # Equality of data: all NaN are one, and the zeros differ.
        return bool((np.isnan(a) and np.isnan(b)) or (a == b and np.signbit(a) == np.signbit(b)))
    return bool(a == b)


PRECISION = {np.float16: (11, -24), np.float32: (24, -149), np.float64: (53, -1074)}
"""Significand bits, and exponent of the smallest subnormal."""


def directed(value: Fraction, dtype: Any, mode: str) -> Any:
    """A rational rounded once to a float type."""
    digits, smallest = PRECISION[dtype]
    magnitude = abs(value)
    leading = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    leading -= Fraction(2) ** leading > magnitude
    last = max(leading - digits + 1, smallest)
    units = magnitude / Fraction(2) ** last
    away = {"RTP": value > 0, "RTN": value < 0}
    if mode == "RNE":
        count = round(units)  # ties to even
    else:
        assert mode in ("RTZ", *away)
        count = math.ceil(units) if away.get(mode, False) else math.floor(units)
    largest = Fraction(float(np.finfo(dtype).max))
    if count * Fraction(2) ** last > largest:
        result = dtype(np.inf) if mode == "RNE" or away.get(mode, False) else np.finfo(dtype).max
    else:
        result = dtype(math.ldexp(count, last))
    return -result if value < 0 else result


def _convert(dtype: Any, *operands: Value) -> Any:
    if len(operands) == 1:
        raw = operands[0]
        unsigned = {16: np.uint16, 32: np.uint32, 64: np.uint64}[raw.width]
        return unsigned(raw.value).view(dtype)
    mode, value = operands
    if not np.isfinite(value) or value == 0:
        return dtype(value)
    return directed(Fraction(float(value)), dtype, mode)


def _multiply(mode: str, a: Any, b: Any) -> Any:
    if not (np.isfinite(a) and np.isfinite(b)) or a == 0 or b == 0:
        with np.errstate(invalid="ignore"):
            return a * b
    return directed(Fraction(float(a)) * Fraction(float(b)), type(a), mode)


def _add(mode: str, a: Any, b: Any) -> Any:
    return _fma(mode, type(a)(1), a, b)


def _fma(mode: str, a: Any, b: Any, c: Any) -> Any:
    dtype = type(a)
    if all(map(np.isfinite, (a, b, c))):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if exact or c:
            return directed(exact, dtype, mode)
        return dtype(math.copysign(0.0, a) * math.copysign(1.0, b) + float(c))  # the sum of two zeros
    with np.errstate(invalid="ignore"):
        return c if np.isfinite(a) and np.isfinite(b) else a * b + c


OPERATORS: dict[str, Callable[..., Value]] = {
    "+": lambda *a: sum(a),
    "-": _subtract,
    "*": _product,
    "/": lambda a, b: a / b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": _same,
    "not": lambda a: not a,
    "and": lambda *a: all(a),
    "or": lambda *a: any(a),
    "=>": lambda a, b: not a or b,
    "bvadd": _bits(lambda a, b: a + b),
    "bvsub": _bits(lambda a, b: a - b),
    "bvmul": _bits(lambda a, b: a * b),
    "bvand": _bits(lambda a, b: a & b),
    "bvor": _bits(lambda a, b: a | b),
    "bvshl": _bits(_shift_left),
    "bvlshr": _bits(_shift_right),
    "bvnot": lambda a: Bits(~a.value % (1 << a.width), a.width),
    "bvneg": lambda a: Bits(-a.value % (1 << a.width), a.width),
    "bvult": lambda a, b: a.value < b.value,
    "bvule": lambda a, b: a.value <= b.value,
    "bvugt": lambda a, b: a.value > b.value,
    "bvuge": lambda a, b: a.value >= b.value,
    "concat": lambda a, b: Bits(a.value << b.width | b.value, a.width + b.width),
    "fp.mul": _multiply,
    "fp.add": _add,
    "fp.fma": _fma,
    "fp.isInfinite": lambda a: bool(np.isinf(a)),
    "fp.leq": lambda a, b: bool(a <= b),
    "fp.lt": lambda a, b: bool(a < b),
    "fp.eq": lambda a, b: bool(a == b),
    "fp.isNaN": lambda a: bool(np.isnan(a)),
}


def evaluate_tree(tree: Any, environment: Environment) -> Value:
    if isinstance(tree, str):
        if tree in environment:
            return environment[tree]
        return tree if tree in ("RNE", "RTZ", "RTP", "RTN") else literal(tree)
    operator, *arguments = tree
    if operator == "ite":
        condition, then, otherwise = arguments
        return evaluate_tree(then if evaluate_tree(condition, environment) else otherwise, environment)
    values = [evaluate_tree(argument, environment) for argument in arguments]
    if isinstance(operator, list):
        _, name, *indices = operator
        if name == "to_fp":
            return _convert(FLOATS[tuple(indices)], *values)
        (operand,) = values
        if name == "extract":
            high, low = map(int, indices)
            return Bits(operand.value >> low & ((1 << (high - low + 1)) - 1), high - low + 1)
        assert name == "zero_extend"
        return Bits(operand.value, operand.width + int(indices[0]))
    return OPERATORS[operator](*values)


def evaluate(text: str, environment: Environment) -> Value:
    """Value of an SMT-LIB term under values of its variables."""
    return evaluate_tree(parse(text), environment)


def environment_of(statement: Statement, model: Mapping[str, str]) -> dict[str, Value]:
    """Values of a counterexample; a variable that may have any value gets zero."""
    variables = frozenset().union(statement.claim.variables, *(p.variables for p in statement.premises))
    values = {}
    for name, sort in variables:
        text = model[name]
        if text != "any":
            values[name] = evaluate(text, {})
        elif sort.startswith("(_ BitVec"):
            values[name] = Bits(0, int(sort.split()[-1].strip(")")))
        else:
            values[name] = False if sort == "Bool" else Fraction(0)
    return values


@pytest.fixture(scope="session", name="evaluate")
def evaluate_fixture() -> Callable[[str, Environment], Value]:
    return evaluate


@pytest.fixture(scope="session", name="environment_of")
def environment_fixture() -> Callable[[Statement, Mapping[str, str]], dict[str, Value]]:
    return environment_of


@pytest.fixture(scope="session", name="bits")
def bits_fixture() -> type[Bits]:
    return Bits
