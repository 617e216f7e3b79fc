"""Every entry has a test here, or waits for a kernel that does not exist yet."""

import re
from pathlib import Path

ENTRIES = (
    "1 2 5 6 7 10 11 12 15 16 17 20 21 22 25 26 27 30 31 32 35 36 37 40 41 42 45 46 47 50 51 52 55 56 57 60 61 62 65 "
    "66 67 70 71 72 75 76 77 80 81 82 85 86 87 90 91 92 95 96 97 100 101 102 105 106 107"
)

WAITING = {
    40: "Hadamard rotation: happens before the indexer's inputs; there is no rotation here to drop",
    42: "page_id * page_stride in 32 bits: waits for the paged cache",
    60: "a context that is no multiple of the page: waits for the paged cache",
    70: "page tables narrower than the drafts: waits for paging, MTP and CUDA graphs",
    72: "local ids beyond the request: waits for the paged cache",
    77: "slots of pages with several tokens: waits for the paged cache",
    91: "two streams sharing scratch: waits for calls on several streams; a call owns its workspace",
    92: "a grid barrier that hangs: waits for a kernel with one; no kernel here waits for another block",
}
"""Entry to reason."""


def test_every_entry_is_tested_or_waits():
    tested = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            tested |= {int(number) for number in re.findall(r"_b(\d{2,3})(?=_)", name)}
    entries = {int(number) for number in ENTRIES.split()}
    assert tested | set(WAITING) == entries
    assert tested & set(WAITING) == set()
