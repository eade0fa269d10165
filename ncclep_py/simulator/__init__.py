"""The protocol's judge and the laptop's GPU: runs real kernel functions of many ranks on the CPU under a seeded scheduler.

``Simulator`` (engine) holds memory (``memory``: regions and shadow; ``words``: control words; ``clock``: what happened before what), streams and
tasks (``task``), a ``scheduler`` with a ``policy``, and the vocabulary (``ops`` and ``routing_ops`` over ``call``, ``waits``, ``share``, ``rows``).
``explore`` runs all schedules of a small program; ``program`` is a toy group for tests and scripts.
"""

from __future__ import annotations

from ncclep_py.simulator.engine import Simulator
from ncclep_py.simulator.errors import DeadlockError, EndlessError, OutOfBoundsError, RaceError, SimulationError, UniformityError
from ncclep_py.simulator.faults import Faults

__all__ = ["DeadlockError", "EndlessError", "Faults", "OutOfBoundsError", "RaceError", "SimulationError", "Simulator", "UniformityError"]
