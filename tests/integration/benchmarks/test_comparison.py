"""The comparison page's rules behave as it describes, on the family where each of them is wrong."""

import comparison
import doc_tables
import pytest


def test_every_rule_is_in_the_page():
    for table in doc_tables.tables("comparison").values():
        assert [row[0] for row in table["rows"]] == list(comparison.RULES)
        assert [column["name"] for column in table["columns"][1:]] == list(comparison.MODELS)


@pytest.fixture(scope="module")
def results():
    return {name: comparison.compare(name, samples=24, length=24) for name in ("GLM-4.5", "OLMoE")}


@pytest.mark.full
def test_a_sigmoid_model_with_a_dense_first_layer(results):
    found = results["GLM-4.5"]
    ours, off = found["onepolicy"], found["no replay"]
    assert ours.wrong == 0 < off.wrong
    assert ours.k3 < off.k3 / 3
    # right experts, wrong weights
    for rule in ("softmax of all logits", "softmax of the selected (eq. 8)"):
        assert found[rule].wrong == 0
        assert found[rule].k3 > 10 * off.k3
    assert found["layers by order, not by index"].wrong > 0.9
    assert found["5% missing: onepolicy (own choice)"].k3 < off.k3
    assert off.k3 < found["5% missing: experts 0..K-1"].k3
    assert found["5% missing: expert 0 K times"].k3 > 10 * off.k3


@pytest.mark.full
def test_rules_are_right_where_they_apply(results):
    found = results["OLMoE"]
    for rule in ("layers by order, not by index", "softmax of all logits"):
        assert found[rule].k3 == pytest.approx(found["onepolicy"].k3, rel=1e-3)
    assert found["softmax of the selected (eq. 8)"].k3 > 10 * found["no replay"].k3
