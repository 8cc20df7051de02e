"""The sandbox's driver: as root every test runs twice, here and in a Python of an ordinary user."""

import pytest

from support.needs import need
from support.sandbox_driver import ROOT, Driver

BOTH = ["root", pytest.param("user", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=BOTH if ROOT else ["user"])
def driver(request, tmp_path_factory):
    need("bwrap")
    if ROOT and request.param == "user":
        need("setpriv", "unshare")
    driver = Driver(request.param, tmp_path_factory.mktemp("spare"))
    yield driver
    driver.end()
