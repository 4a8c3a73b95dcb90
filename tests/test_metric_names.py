import math

from doubly.metric_names import METRICS, attack_metric, tail_metric, worst_class_metric


def test_attacks_have_the_keys_of_evaluation_json_and_the_labels_of_the_paper():
    for attack, key, label, tail, worst in [
        ("clean", "sa", "SA", "sa_tail_30", "worst_class_sa"),
        ("pgd", "ra_pgd", "RA-PGD", "ra_tail_30", "worst_class"),
        ("margin", "ra_margin", "RA-margin", "ra_margin_tail_30", "worst_class_ra_margin"),
        ("autoattack", "ra_aa", "RA-AA", "ra_aa_tail_30", "worst_class_ra_aa"),
        ("apgd", "ra_apgd", "RA-APGD", "ra_apgd_tail_30", "worst_class_ra_apgd"),
        ("quick", "ra_apgd", "RA-APGD", "ra_apgd_tail_30", "worst_class_ra_apgd"),
        ("square", "ra_square", "RA-square", "ra_square_tail_30", "worst_class_ra_square"),
    ]:
        metric = attack_metric(attack)
        assert (metric.key, metric.label, tail_metric(metric).key) == (key, label, tail)
        assert (worst_class_metric(metric).key, worst_class_metric(metric).field) == (worst, key)
    assert tail_metric(attack_metric("pgd")).label == "RA-Tail-30"


def test_a_metric_finds_prints_and_ranks_its_values():
    worst, loss, lr = METRICS["worst_class"], METRICS["loss"], METRICS["lr"]
    assert worst.value({"worst_class": {"name": "cat", "ra_pgd": 0.25}}) == 0.25
    assert loss.value({"loss": 2}) == 2.0
    for record in ({}, {"loss": None}, {"loss": "2"}, {"loss": math.nan}, {"loss": math.inf}, {"loss": 10**400}):
        assert loss.value(record) is None
    assert worst.value({"worst_class": 0.25}) is None and worst.value({"worst_class": {}}) is None
    assert (worst.text(0.25), loss.text(2.3456)) == ("25.0%", "2.35")
    assert (worst.best([0.1, 0.3]), loss.best([0.1, 0.3]), lr.best([0.1, 0.3])) == (0.3, 0.1, None)


def test_labels_are_distinct_and_every_metric_is_explained():
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
    assert all(metric.explanation for metric in METRICS.values())
