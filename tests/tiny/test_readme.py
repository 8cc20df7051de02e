"""The README's library example runs as it is printed."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_library_example(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    k3_without, k3_with = map(float, re.findall(r"k3 [\w ]+: ([\d.e-]+)", capsys.readouterr().out))
    assert 0 < k3_with < k3_without
