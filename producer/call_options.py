"""How one call waits: until when, how urgent it is, whether it shows a bar, what errors end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lmpool.checks import quoted
from lmpool.errors import SettingsError
from lmpool.keys import PRIORITIES, Priority
from lmpool.producer.deadline import Deadline
from lmpool.settings import ClientOptions

Errors: TypeAlias = Literal["raise", "return"]
"""What becomes of an error: it ends the call, or stands where the answer would."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The `deadline` began with the call, whatever it waits for first."""

    deadline: Deadline
    priority: Priority
    progress: bool
    keeps_errors: bool = False

    @classmethod
    def checked(
        cls,
        defaults: ClientOptions,
        timeout: float | None,
        priority: Priority | None,
        progress: bool = False,
        errors: Errors = "raise",
    ) -> CallOptions:
        """What a caller gave, from now on; what was left out is as the client's `defaults` say.

        Raises `SettingsError` for what cannot be used.
        """
        if priority is None:
            priority = defaults.priority
        elif not isinstance(priority, str) or priority not in PRIORITIES:
            raise SettingsError(f"priority={quoted(priority)}: write 'interactive' or 'batch'")
        if type(progress) is not bool:
            raise SettingsError(f"progress={quoted(progress)}: write True or False")
        if not isinstance(errors, str) or errors not in ("raise", "return"):
            raise SettingsError(f"errors={quoted(errors)}: write 'raise' or 'return'")
        deadline = Deadline.checked(timeout, defaults.request_timeout)
        return cls(deadline, priority, progress, errors == "return")
