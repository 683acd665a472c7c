"""How one call waits: until when, how urgent it is, and whether it shows a bar."""

from __future__ import annotations

from dataclasses import dataclass

from lmpool.checks import quoted
from lmpool.errors import SettingsError
from lmpool.keys import PRIORITIES, Priority
from lmpool.producer.deadline import Deadline
from lmpool.settings import ClientOptions


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The `deadline` began with the call, whatever it waits for first."""

    deadline: Deadline
    priority: Priority
    progress: bool

    @classmethod
    def checked(
        cls,
        defaults: ClientOptions,
        timeout: float | None,
        priority: Priority | None,
        progress: bool = False,
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
        deadline = Deadline.checked(timeout, defaults.request_timeout)
        return cls(deadline, priority, progress)
