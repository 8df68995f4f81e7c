"""The actor of a change: a person, a service account, a job, a gateway or the system."""

from __future__ import annotations

from typing import NamedTuple

from controller.models import Decision


class Actor(NamedTuple):
    """`name`: a user name, a service account's or a job's name, or a gateway's id."""

    name: str
    type: str = Decision.ActorType.PERSON

    @classmethod
    def person(cls, name: str) -> Actor:
        return cls(name, Decision.ActorType.PERSON)

    @classmethod
    def job(cls, name: str) -> Actor:
        return cls(name, Decision.ActorType.JOB)

    @classmethod
    def gateway(cls, name: str) -> Actor:
        return cls(name, Decision.ActorType.GATEWAY)

    @classmethod
    def service(cls, name: str) -> Actor:
        """A service account, by its name."""
        return cls(name, Decision.ActorType.SERVICE)


SCALER, RECONCILER = Actor.job("scaler"), Actor.job("reconciler")
SYSTEM = Actor("slackline", Decision.ActorType.SYSTEM)
