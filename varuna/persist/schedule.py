"""When to save. Pure: the time is passed in."""

from __future__ import annotations

from varuna.config_checkpoint import DEFAULT_EVERY_S, CheckpointConfig


class SaveSchedule:
    """Decides, on worker 0, after which steps there is a save.

    Args:
        config: how often.
        now_s: the time, of any clock that never goes back.
        step: steps done that are saved already.
    """

    def __init__(self, config: CheckpointConfig, now_s: float, step: int = 0) -> None:
        self._every_steps = config.every_steps
        self._every_s = config.every_s or DEFAULT_EVERY_S
        self._saved_s = now_s
        self._saved_step = step

    def is_due(self, step: int, now_s: float, *, is_last: bool) -> bool:
        """Whether to save when ``step`` steps are done.

        Args:
            step: that number.
            now_s: the time.
            is_last: the script's call of ``train`` ends with it.
        """
        if is_last:
            return step != self._saved_step
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return now_s - self._saved_s >= self._every_s

    def saved(self, step: int, now_s: float) -> None:
        """A save of ``step`` steps has begun."""
        self._saved_step, self._saved_s = step, now_s
