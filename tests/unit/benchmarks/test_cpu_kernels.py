"""benchmarks/cpu_kernels.py leaves out the kernel that it names, and goes on where it stopped."""

import argparse
import json

import cpu_kernels
from cpu_kernels import KERNELS, measure, median_interval, read, without

from onepolicy.models import experts, linear


def test_every_kernel_is_left_out_and_comes_back():
    own = linear.prefers_onednn, experts.NAME
    for name in KERNELS:
        with without(name):
            left_out = linear.prefers_onednn is not own[0], own[1] != experts.NAME
        assert left_out == (name == "linear", name == "experts")
    with without("linear+experts"):
        assert not linear.prefers_onednn()
        assert experts.NAME == "grouped_mm"
    assert (linear.prefers_onednn, experts.NAME) == own


def test_the_interval_of_a_median():
    """2 P(B <= 5) = 0.041 for 20 tosses of a coin and 2 P(B <= 6) = 0.115; 2 P(B = 0) = 0.031 for
    6."""
    assert median_interval([float(i) for i in range(20)]) == (5, 14)
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1, 6)


def test_pairs_take_turns_and_a_measurement_goes_on(tmp_path, monkeypatch):
    calls = []

    def build(workload, args, folder):
        return lambda: calls.append(experts.NAME)

    monkeypatch.setattr(cpu_kernels, "build", build)
    monkeypatch.setattr(cpu_kernels.gc, "collect", lambda: None)  # of all that a test session holds
    out = tmp_path / "pairs.jsonl"
    args = argparse.Namespace(
        workloads=["step", "vocabulary"], kernels=["experts"], dtype="float32", pairs=2, out=out
    )
    measure(args)
    given, left_out = experts.NAME, "grouped_mm"
    warmed_up, pairs = [given, left_out], [given, left_out, left_out, given]
    assert calls == [*warmed_up, *pairs]
    assert [row["workload"] for row in read(out)] == ["step", "step"]
    out.write_text(out.read_text() + json.dumps(read(out)[0])[:-9])  # as if it was stopped
    calls.clear()
    measure(argparse.Namespace(**vars(args) | {"pairs": 3}))
    assert len(read(out)) == 3
    assert calls[2:] == [given, left_out]
    measure(argparse.Namespace(**vars(args) | {"pairs": 3}))
    assert len(read(out)) == 3
