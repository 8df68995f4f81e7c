"""Priority mapping: targets and ranges of each priority, and the measurement window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods

from console.access import actor_of, allows
from console.forms.base import LevelFormSet, MappingForm
from console.forms.numbers import number_of
from console.forms.unsaved_forms import data_of
from console.removed import says_if_removed
from console.views.configuration.changes import before_of
from console.views.editing import (
    STALE,
    UNTOUCHED,
    Difference,
    differences,
    restore_link,
    saved,
    say_updated,
    show_errors,
    values_seen,
)
from controller.models import Decision, PriorityMapping
from controller.selectors import catalogue
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole
from controller.services.change import VersionConflict
from controller.services.slo.priority_mappings import priority_mapping_update


@require_GET
@allows(UserRole.VIEWER)
def mapping_list(request: HttpRequest) -> HttpResponse:
    rows = catalogue.priority_mappings().order_by("tenant__name")
    return render(request, "console/configuration/mappings.html", {"mappings": rows})


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
@says_if_removed("priority_mapping")
def mapping_edit(request: HttpRequest, mapping_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.priority_mappings(), pk=mapping_id)
    form = MappingForm(data_of(request), existing=row)
    before = restored(request) if request.method == "GET" else {}
    form.initial.update({name: before[name] for name in MappingForm.CHANGEABLE if name in before})
    levels = level_forms(request, before.get("levels", row.levels))
    conflict: list[Difference] = []
    if request.method == "POST" and all([form.is_valid(), levels.is_valid()]):
        try:
            stored = save(request, row, form, levels)
        except ValidationError as error:
            show_level_errors(form, levels, error)
        except VersionConflict:
            row.refresh_from_db()
            conflict, levels = both(form, row, levels)
        else:
            say_updated(
                request,
                form,
                stored,
                "Priority mapping updated. Gateways use it within a second.",
                lambda: restore_link("Revert", request.path, newest_decision(stored)),
            )
            return saved("mappings")
    context = {"form": form, "levels": levels, "row": row, "conflict": conflict, "restoring": bool(before)}
    bad = form.errors or any(levels.errors) or levels.non_form_errors()
    return render(
        request, "console/configuration/mapping_form.html", context, status=STALE if conflict else 422 if bad else 200
    )


def newest_decision(row: PriorityMapping) -> Decision | None:
    return decisions.search(kind="priority_mapping_updated", subject=str(row)).first()


def restored(request: HttpRequest) -> dict[str, Any]:
    """Values before a recorded change, to revert it: shown, not saved."""
    before = before_of(request, "priority_mapping")
    return {name: before[name] for name in (*MappingForm.CHANGEABLE, "levels") if name in before}


def level_forms(request: HttpRequest, stored: Sequence[dict[str, float]]) -> Any:
    return new_level_forms(data_of(request), stored)


def new_level_forms(data: Any, stored: Sequence[dict[str, float]]) -> Any:
    initial = None if data is not None else stored
    # An empty level is an error, not "no level": the user chose how many there are.
    return LevelFormSet(data, initial=initial, prefix="levels", form_kwargs={"empty_permitted": False})


def as_levels(levels: Any) -> list[dict[str, float]]:
    return [level.level() for level in levels.forms]


def save(request: HttpRequest, row: PriorityMapping, form: MappingForm, levels: Any) -> PriorityMapping:
    changes = form.values() | {"levels": as_levels(levels)}
    actor = actor_of(request)
    return priority_mapping_update(
        actor=actor, mapping_id=row.pk, version=form.cleaned_data["version"], changes=changes
    )


def both(form: MappingForm, row: PriorityMapping, levels: Any) -> tuple[list[Difference], Any]:
    """Settings and levels with different values, and the levels to show: the stored ones if only the other person
    changed them."""
    mine = as_levels(levels)
    untouched = values_seen(form, row).get("levels") == mine
    found = differences(form, row, MappingForm.CHANGEABLE)
    if row.levels == mine:
        return found, levels
    found = [each for each in found if each.label != "Version"] + level_differences(row, mine, untouched)
    return found, new_level_forms(None, row.levels) if untouched else levels


def level_differences(row: PriorityMapping, mine: Sequence[dict[str, float]], untouched: bool) -> list[Difference]:
    found = []
    for index in range(max(len(mine), len(row.levels))):
        stored = row.levels[index] if index < len(row.levels) else None
        yours = mine[index] if index < len(mine) else None
        if stored != yours:
            found.append(Difference(f"Priority {index}", _bounds(stored), UNTOUCHED if untouched else _bounds(yours)))
    return found


def _bounds(level: dict[str, float] | None) -> str:
    if level is None:
        return "none"
    parts = (
        f"{kind.upper()} {level[f'{kind}_min_s']:g} to {level[f'{kind}_max_s']:g} s, initially {level[f'{kind}_s']:g} s"
        for kind in ("ttft", "tpot")
    )
    return "; ".join(parts)


def show_level_errors(form: MappingForm, levels: Any, error: ValidationError) -> None:
    """`levels.2.ttft_s` is an error of the third level's field; all others belong to the form."""
    named = error.message_dict if hasattr(error, "error_dict") else {"__all__": error.messages}
    rest: dict[str, list[str]] = {}
    for name, texts in named.items():
        parts = name.split(".")
        level = number_of(parts[1]) if len(parts) == 3 else None
        if level is not None and level < len(levels.forms):
            levels.forms[level].add_error(parts[2], texts)
        else:
            rest[name] = texts
    if rest:
        show_errors(form, ValidationError(rest))
