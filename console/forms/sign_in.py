"""The sign-in form. Attempts are limited by account and by address, over all console processes, before a password is
checked: that costs processor time, which an anonymous visitor must not be able to spend at will."""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.core.exceptions import ValidationError

from console.metrics import REFUSED
from controller.services.records.refusals import NOBODY, access_refused
from workers import sign_in_counts
from workers.live import LiveUnavailable

log = logging.getLogger(__name__)

REASON = "too_many_sign_ins"
AWAY = (
    "Signing in is not possible right now: Redis is unavailable, so failed attempts cannot be counted. "
    "People who are signed in can continue. Try again shortly."
)
AWAY_RETRY_S = 5


class SignInForm(AuthenticationForm):
    """`status`: of the answer to a form with errors. `retry_after_s`: seconds until another attempt is possible."""

    status = 200
    retry_after_s = 0

    def clean(self) -> dict[str, Any]:
        account, address = self.cleaned_data.get("username"), self.address
        if not account or not self.cleaned_data.get("password"):
            return super().clean()
        self._count(account, address)
        cleaned = super().clean()
        try:
            sign_in_counts.forgive(account, address)
        except LiveUnavailable as error:  # the attempt stays counted, which ends by itself
            log.info("signed in while Redis was unavailable: %s", error, extra={"action": "sign_in_not_forgiven"})
        return cleaned

    @property
    def address(self) -> str:
        """Of the client: `console.proxies` has put it there if a trusted proxy forwarded the request."""
        return self.request.META.get("REMOTE_ADDR", "") if self.request is not None else ""

    def _count(self, account: str, address: str) -> None:
        """Raises ValidationError if no attempt may be made now."""
        limits = {"per_account": settings.SIGN_INS_PER_ACCOUNT, "per_address": settings.SIGN_INS_PER_ADDRESS}
        try:
            refused = sign_in_counts.take(account, address, **limits)
        except LiveUnavailable as error:
            log.warning("sign-in refused, Redis is unavailable: %s", error, extra={"action": "sign_in_uncounted"})
            self.status, self.retry_after_s = 503, AWAY_RETRY_S
            raise ValidationError(AWAY, code="unavailable") from None
        if refused is None:
            return
        self.status, self.retry_after_s = 429, refused.retry_after_s
        REFUSED.labels(REASON).inc()
        access_refused(
            actor=NOBODY,
            bucket="sign-in",
            subject_type="page",
            subject=settings.LOGIN_URL,
            reason=REASON,
            inputs={"by": refused.by, "address": address},
        )
        minutes = max(1, -(-refused.retry_after_s // 60))
        what = "this account" if refused.by == "account" else "your address"
        wait = f"{minutes} minute{'' if minutes == 1 else 's'}"
        raise ValidationError(f"Too many failed attempts for {what}. Try again in {wait}.", code="throttled")
