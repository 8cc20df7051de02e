"""`onepolicy gateway` in front of vLLM's server: a program's tokens, and what an audit reads."""

import pytest

from onepolicy.cli import main
from support.gateway_live import record_programs

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(900)]


def test_a_program_on_vllms_server_is_recorded(server, folders, tmp_path, capsys):
    dump = record_programs(f"vllm-server:{server.url}", folders[0], tmp_path)
    assert main(["audit", str(dump)]) == 0, capsys.readouterr().out
