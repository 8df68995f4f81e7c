"""What the fault tests look through must not read a misspelt name as zero."""

from __future__ import annotations

import pytest

from api.openai.ledger import Instruments
from tests.faults.system import total_of


def test_a_metric_is_summed_over_its_labels_and_an_unknown_name_is_an_error() -> None:
    instruments = Instruments()
    instruments.watch(lambda: [("open_requests", "Requests queued or in flight.", {}, 3.0)])
    assert total_of(instruments.page().decode(), "slackline_api_errors_total") == 0.0, "no label was seen yet"
    instruments.refused("invalid_json")
    instruments.refused("invalid_slo")
    page = instruments.page().decode()
    assert total_of(page, "slackline_api_errors_total") == 2.0
    assert total_of(page, "slackline_open_requests") == 3.0
    with pytest.raises(KeyError, match="slackline_queue_requests"):
        total_of(page, "slackline_queue_requests")
