"""The registry: names, references into the specification, constants."""

from __future__ import annotations

import ast
import importlib
from fractions import Fraction

import pytest

from dosa_ref import spec
from dosa_ref.spec import InvalidProblem
from proofs import ledger, registry
from proofs.registry import all_lemmas, get_lemma

LEMMAS = all_lemmas()


def source_names(dotted: str) -> set[str]:
    """Names that a module of the kernels defines at its top level, read without importing it.

    Importing a kernel binds it to Triton's compiler or to its interpreter for the rest of the process.
    """
    path = ledger.PACKAGE.parent / f"{dotted.replace('.', '/')}.py"
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def resolve(dotted: str) -> object:
    """The module, function or constant of this name."""
    if dotted.startswith("dosa_gpu."):
        module, _, name = dotted.rpartition(".")
        if name not in source_names(module):
            raise AttributeError(dotted)
        return name
    module, rest = dotted, []
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
    for name in rest:
        found = getattr(found, name)
    return found


def test_ids_are_unique():
    assert len({lemma.id for lemma in LEMMAS}) == len(LEMMAS)


@pytest.mark.parametrize("lemma", LEMMAS, ids=lambda lemma: lemma.id)
def test_lemma_is_well_formed(lemma):
    assert lemma.mutants
    assert len({mutant.id for mutant in lemma.mutants}) == len(lemma.mutants)
    assert "\n" not in lemma.statement
    assert lemma.speaks_of
    for name in lemma.speaks_of:
        assert name.startswith(("dosa_ref.", "dosa_gpu."))
        assert resolve(name) is not None
    theme = {module.THEME: module for module in registry.THEMES}[lemma.theme]
    assert lemma in theme.LEMMAS
    assert theme.__file__ == str(ledger.PACKAGE / ledger.source_path(lemma))


def test_resolve_rejects_unknown_names():
    with pytest.raises(AttributeError):
        resolve("dosa_ref.spec.NO_SUCH_CONSTANT")
    with pytest.raises(AttributeError):
        resolve("dosa_gpu.prepare.no_such_function")
    with pytest.raises(FileNotFoundError):
        resolve("dosa_gpu.kernels.no_such_kernel.launch")


def test_the_gate_demands_what_the_pruned_path_rests_on():
    # Every lemma but those about inputs, decode, shards, several aggregates and the power-of-two scale.
    path = ledger.PACKAGE.parent / "dosa_gpu" / "kernels" / "bound.py"
    (demanded,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LEMMAS"
    ]
    elsewhere = {
        "several_aggregates",
        "e4m3_round_trip",
        "e4m3_nearest",
        "ue8m0_ceil",
        "scale_power_of_two",
        "decode_threshold",
        "shard_indices",
        "distinct_seeds",
    }
    assert demanded == tuple(lemma.id for lemma in LEMMAS if lemma.id not in elsewhere)


def test_every_guard_constant_stands_in_a_lemma():
    assert {name for lemma in LEMMAS for name in lemma.constants} == set(spec.GUARD_CONSTANTS)


def test_a_builder_sees_only_the_constants_that_are_recorded():
    for lemma in LEMMAS:
        values = {name: Fraction(text) for name, text in lemma.constant_texts().items()}
        for missing in lemma.constants:
            with pytest.raises(KeyError, match=missing):
                lemma.build({name: value for name, value in values.items() if name != missing})


def test_get_lemma_names_close_matches():
    assert get_lemma("aggregation").id == "aggregation"
    with pytest.raises(InvalidProblem, match="relu_subadditive"):
        get_lemma("relu_subaditive")
    with pytest.raises(InvalidProblem, match=r"aggregation.*threshold"):
        get_lemma("???")
