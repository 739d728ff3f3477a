"""What bench/instructions.py reads."""

from __future__ import annotations

from bench.callgrind import read

WRITTEN = """\
version: 1
ob=(1) /usr/bin/python3.11
fl=(1) ceval.c
fn=(1) _PyEval_EvalFrameDefault
10 100
+2 20
cob=(2) /lib/libc.so.6
cfn=(2) malloc
calls=3 50
* 60
fn=(3) tupledealloc.lto_priv.0
5 7
ob=(2)
fn=(2)
50 60
ob=(1)
fn=(4) _PyEval_EvalFrameDefault'2
10 30
totals: 217
"""


def test_inclusive_cost_is_counted_where_it_is_spent() -> None:
    profile = read(WRITTEN.splitlines())
    assert dict(profile.own) == {"_PyEval_EvalFrameDefault": 150, "tupledealloc": 7, "malloc": 60}
    assert dict(profile.calls) == {"malloc": 3}
    assert profile.total == 217


def test_a_library_has_the_cost_of_its_functions() -> None:
    assert dict(read(WRITTEN.splitlines()).by_library) == {"python3.11": 157, "libc.so.6": 60}
