from controller.dispatch.disaggregation.paired_prefills import PairedPrefills


def test_seconds_with_at_least_one_pair():
    found = PairedPrefills()
    assert found.seconds("p", 5.0) == 0.0
    found.begins("p", 1.0)
    found.begins("p", 2.0)
    found.ends("p", 3.0)
    assert (found.seconds("p", 4.0), found.seconds("q", 4.0)) == (3.0, 0.0)
    found.ends("p", 5.0)
    assert found.seconds("p", 9.0) == 4.0
    found.begins("p", 10.0)
    assert found.seconds("p", 10.5) == 4.5


def test_an_instance_that_comes_again_begins_with_nothing():
    found = PairedPrefills()
    found.begins("p", 0.0)
    found.ends("p", 2.0)
    found.forget("p")
    assert found.seconds("p", 3.0) == 0.0
