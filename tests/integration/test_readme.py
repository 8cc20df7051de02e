"""The README's library example runs as it is printed."""

import re

from support.paths import ROOT

README = ROOT / "README.md"


def test_library_example(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 40
    names = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    k3_without, k3_with = map(float, re.findall(r"k3 [\w ]+: ([\d.e-]+)", capsys.readouterr().out))
    assert 0 < k3_with < k3_without
    gates = [
        p.grad for n, p in names["trainer"].named_parameters() if n.endswith("mlp.gate.weight")
    ]
    assert len(gates) == 4
    assert all(gate.abs().sum() > 0 for gate in gates)
