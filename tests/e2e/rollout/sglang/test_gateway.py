"""`onepolicy gateway` in front of SGLang's server: a program's tokens, and what an audit reads."""

import pytest

from onepolicy.cli import main
from support.gateway_live import record_programs
from support.sglang_live import serving

pytestmark = [
    *(pytest.mark.slow, pytest.mark.sglang, pytest.mark.process),
    pytest.mark.timeout(1800),
]


def test_a_program_on_sglangs_server_is_recorded(folders, tmp_path, capsys):
    with serving(folders[0], tmp_path / "server.log") as url:
        dump = record_programs(f"sglang:{url}", folders[0], tmp_path)
    assert main(["audit", str(dump)]) == 0, capsys.readouterr().out
