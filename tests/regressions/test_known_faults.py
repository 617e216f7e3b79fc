"""The ledger of known faults: each library that is here must still fail on its input, in one of the listed ways."""

import dataclasses
import re

import pytest

from dosa_ref.select import exact_topk
from dosa_ref.spec import BackendUnavailable
from dosa_verify.fuzz.known_faults import KNOWN_FAULTS, reproduce
from dosa_verify.fuzz.logits_runner import check_logits
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import Device
from dosa_verify.targets.logits import FunctionTarget
from tests.regressions.conftest import DEVICE


class StillThere(Exception):
    """The fault shows, as the ledger says."""


@pytest.mark.parametrize("known", KNOWN_FAULTS, ids=lambda known: f"{known.target}-{known.name}")
@pytest.mark.xfail(raises=StillThere, strict=True, reason="a known fault of another library")
def test_the_fault_is_still_there(known):
    device = Device.CPU if known.target == "numpy.argpartition" else DEVICE
    try:
        found = reproduce(known, device)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    # No fault: this test passes, which `strict` turns into a failure: take the entry out of the ledger.
    if found is not None:
        assert found.fault in known.faults, found
        raise StillThere(f"{known.issue}: {found.fault.value}")


def test_our_kernels_pass_on_every_entry():
    target = targets.make("topk", DEVICE)
    for known in KNOWN_FAULTS:
        problem = known.build()
        if problem.logits.shape[1] <= 10_000:
            assert check_logits(target, problem) is None, known.name


def test_a_mended_library_is_noticed(monkeypatch):
    known = next(known for known in KNOWN_FAULTS if known.target == "numpy.argpartition")
    honest = FunctionTarget(name=known.target, function=exact_topk, promise=targets.Promise(ties=targets.Ties.ANY))
    assert reproduce(known, Device.CPU) is not None
    monkeypatch.setattr(targets, "make", lambda *_: honest)
    assert reproduce(known, Device.CPU) is None


def test_each_entry_has_an_address():
    for known in KNOWN_FAULTS:
        assert re.fullmatch(r"https://github\.com/\S+/(issues|pull)/\d+", known.issue)
        assert known.faults
        assert {*known.demand} <= {field.name for field in dataclasses.fields(targets.Promise)}
    assert len({(known.target, known.name) for known in KNOWN_FAULTS}) == len(KNOWN_FAULTS)
