"""Heads of tables: `{% columns "Model" "Provisioner (backend)" %}`; what stands in brackets becomes a second line."""

from __future__ import annotations

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

register = template.Library()


@register.simple_tag
def columns(*names: str) -> SafeString:
    return format_html_join("\n", '<th scope="col">{}</th>', ((_title(name),) for name in names))


@register.simple_tag
def number_columns(*names: str) -> SafeString:
    """Aligned to the right, as their cells are."""
    return format_html_join("\n", '<th scope="col" class="num">{}</th>', ((_title(name),) for name in names))


@register.simple_tag
def hidden_column(name: str) -> SafeString:
    """Read to screen readers alone: a column of buttons or links."""
    return format_html('<th scope="col"><span class="visually-hidden">{}</span></th>', name)


def _title(name: str) -> SafeString | str:
    title, bracket, below = name.removesuffix(")").partition(" (")
    return format_html("{} <small>{}</small>", title, below) if bracket else name
