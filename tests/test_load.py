"""The load benchmark in small: nothing that a stream takes grows with it, and nothing stays behind."""

from __future__ import annotations

from benchmarks import load

QUICK = {"records": 30_000, "small": 8_000, "times": 20, "count": 3}


def test_a_longer_stream_takes_no_more_memory_and_leaves_nothing() -> None:
    figures = load.measure(**QUICK)
    assert figures["peak_ratio"] <= 1.2
    restore = figures["restore"]
    assert restore["reads_before_next"] == 0
    assert 0 < restore["records_read_again"] <= restore["at_most"] < restore["at_record"]
    for part in ("cycles", "several"):
        before, after = figures[part]["before"], figures[part]["after"]
        assert (after["handles"], after["threads"]) == (before["handles"], before["threads"])
        assert after["resident_mib"] <= 1.05 * before["resident_mib"]
        assert after["objects"] <= 1.01 * before["objects"]
