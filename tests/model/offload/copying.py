"""Copies at their earliest and at their latest: whatever a real queue does lies between the two."""

from __future__ import annotations

from collections import deque

from trainer.model.offload.copies import Copies


class Earliest(Copies):
    """Each copy is done when it is asked for: it overwrites its target while everything before may still use it."""

    def computed(self):
        return None

    def enqueue(self, work, after=None):
        work()

    def wait(self, handle):
        pass


class Latest(Copies):
    """No copy is begun before somebody waits for it, or for a later one: it reads its source as late as it can."""

    def __init__(self):
        super().__init__()
        self.queue = deque()

    def computed(self):
        return None

    def enqueue(self, work, after=None):
        self.queue.append(work)
        return work

    def wait(self, handle):
        while handle in self.queue:
            self.queue.popleft()()
