from controller.predict.output_length import DEFAULT_TOKENS, OutputLengthModel


def test_before_anything_finished_the_default_is_capped():
    model = OutputLengthModel()
    assert model.predict("t", "c", "m", None) == DEFAULT_TOKENS
    assert model.predict("t", "c", "m", 10) == 10
    assert model.predict("t", "c", "m", 0) == DEFAULT_TOKENS


def test_it_learns_by_kind_and_falls_back_to_wider_kinds():
    model = OutputLengthModel()
    for _ in range(20):
        model.observe("acme", "headline", "m", 14)
    assert model.predict("acme", "headline", "m", 1000) == 14
    assert model.predict("other", "headline", "m", 1000) == 14
    assert model.predict("other", "other", "m", 1000) == 14
    assert model.predict("other", "other", "n", 1000) == DEFAULT_TOKENS


def test_it_follows_a_change():
    model = OutputLengthModel()
    for _ in range(50):
        model.observe("t", "c", "m", 100)
    for _ in range(100):
        model.observe("t", "c", "m", 10)
    assert model.predict("t", "c", "m", None) <= 12
