"""Names end where they seem to end: what follows a line break would be in addresses, logs and files."""

import pytest
from django.core.exceptions import ValidationError

from controller.models.base import INSTANCE_ID, NAME


@pytest.mark.parametrize("validator", [NAME, INSTANCE_ID])
@pytest.mark.parametrize("name", ["acme\n", "\nacme", "acme\nother", "acme ", ""])
def test_a_line_break_is_in_no_name(validator, name):
    with pytest.raises(ValidationError):
        validator(name)


@pytest.mark.parametrize("validator", [NAME, INSTANCE_ID])
def test_usual_names_are_taken(validator):
    assert validator.regex.search("llama-3.1_8b")
    validator("llama-3.1_8b")
