"""Engines of others join the fleet by one command, which may be repeated."""

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from controller.models import Decision, Instance, ServedModel
from tests.factories import served_model

pytestmark = pytest.mark.django_db
ENGINES = ("engine-1=http://engine-1:8100", "engine-2=http://engine-2:8100/")


def register(*items, **options):
    call_command("register_instances", *items, **options)


def test_they_are_registered_once_and_audited():
    served_model(name="demo")
    register(*ENGINES, model="demo", backend="reference", max_num_seqs=16)
    register(*ENGINES, model="demo", backend="reference", max_num_seqs=16)
    rows = {row.pk: row for row in Instance.objects.all()}
    assert {row.url for row in rows.values()} == {"http://engine-1:8100", "http://engine-2:8100"}
    assert rows["engine-1"].provisioner == "static"
    assert rows["engine-1"].max_num_seqs == 16
    assert Decision.objects.filter(kind="instance_created").count() == 2


@pytest.mark.parametrize(("given", "said"), [({}, None), ({"max_num_seqs": 32}, 32)])
def test_a_number_is_somebodys_only_where_it_was_given(given, said):
    served_model(name="demo")
    register(ENGINES[0], model="demo", **given)
    assert Instance.objects.get().configured_seqs == said


def test_sglang_servers_are_registered_with_their_role():
    served_model(name="demo")
    register("sg-1=http://sg-1:30000", model="demo", backend="sglang", role="prefill")
    row = Instance.objects.get(pk="sg-1")
    assert (row.backend, row.role) == ("sglang", "prefill")


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(CommandError, match="model 'demo' does not exist; create it with --context-tokens N"):
        register(*ENGINES, model="demo")


def test_a_model_is_made_once_with_the_first_of_its_servers():
    register(ENGINES[0], model="demo", context_tokens=16_384)
    register(ENGINES[1], model="demo", context_tokens=1)
    assert list(ServedModel.objects.values_list("name", "context_tokens")) == [("demo", 16_384)]
    assert Instance.objects.filter(model__name="demo").count() == 2
    with pytest.raises(CommandError, match="model 'other': "):
        register("o-1=http://o-1:8000", model="other", context_tokens=0)
    assert not Instance.objects.filter(pk="o-1").exists()


@pytest.mark.parametrize("item", ["engine-1", "engine-1="])
def test_without_an_address_it_says_how(item):
    served_model(name="demo")
    with pytest.raises(CommandError, match="NAME=URL"):
        register(item, model="demo")


def test_a_vllm_server_is_registered_with_the_sides_it_was_started_for():
    served_model(name="demo")
    register("v-1=http://v-1:8000", model="demo", role="prefill", kv_role="kv_both")
    assert Instance.objects.get(pk="v-1").kv_role == "kv_both"
    with pytest.raises(CommandError, match="v-2: --role: v-2 was started with kv_role kv_producer and cannot decode"):
        register("v-2=http://v-2:8000", model="demo", role="decode", kv_role="kv_producer")


@pytest.mark.parametrize(("option", "name"), [("max_num_seqs", "--max-num-seqs"), ("device_kind", "--device-kind")])
def test_what_is_wrong_names_its_option_and_says_one_thing(option, name):
    served_model(name="demo")
    with pytest.raises(CommandError) as caught:
        register("v-1=http://v-1:8000", model="demo", **{option: -1 if option == "max_num_seqs" else "x" * 65})
    said = str(caught.value)
    assert said.startswith(f"v-1: {name}: ")
    assert said.count(".") == 1
