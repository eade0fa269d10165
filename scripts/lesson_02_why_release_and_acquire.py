"""Lesson 2: why the signal must be a *release* and the wait an *acquire*. We take each away and see what breaks.

    python3 scripts/lesson_02_why_release_and_acquire.py [--backend sim|nccl]

Two ranks send each other a row (lesson 1): store the row into the peer's window, store a signal after it, wait for the peer's signal, read.
On a GPU "after" in the program does not mean "after" for somebody else: stores may be seen in another order, and a load may be
done before a wait that stands in front of it. The order has to be asked for, on both sides:

    writer:  st row;  fence (RELEASE) ;  st signal          the fence: whoever sees the signal may see the row
    reader:  ld signal (ACQUIRE), again until it is there;  ld row     acquire: what is read below is read after the signal

`.sys` in the names is the *scope*: both hold between GPUs (`system`), not only inside of one (`gpu`).

A wrong kernel may run well for weeks on a GPU. The simulator does not wait for bad luck: it knows for every byte who wrote it and whether
anything orders a reader after that writer, and reports a race at the first read without such an order. Here only the *effects* of
an operation are changed, what its accesses are in the words of PTX (`ncclep_py/kernels/ops.py`); the kernel stays the same.

Look at: each report names the read and the write it clashes with, with their lines in the kernel, and the order that is missing. The
versions break in different places, the report is the same: without its partner, release or acquire is worth nothing.

Try: write `fence.acq_rel.sys` in the last version, too. No race is left there in 10 schedules, and the assert at the end of `main` fails.
"""

from __future__ import annotations

import argparse
import textwrap

import in_environment  # noqa: F401
import lesson_01_peer_store_and_signal as lesson_01

from ncclep_py import LocalWorld
from ncclep_py.kernels.ops import OPS
from ncclep_py.own_kernels import register_kernel
from ncclep_py.simulator import RaceError
from ncclep_py.simulator.ops import vocabulary

RIGHT = {name: OPS[name].effects for name in ("publish_arrived", "wait_arrived")}
VERSIONS = {
    "as it is": {},
    "no release: the signal may overtake the row": {"publish_arrived": ("st.relaxed.sys arrived",)},
    "release too late: the fence stands after the signal": {"publish_arrived": ("st.relaxed.sys arrived", "fence.acq_rel.sys")},
    "no acquire: the row may be read before the signal": {"wait_arrived": ("ld.relaxed.sys arrived", "bar.sync")},
    "scope too small: the fence holds in one GPU only": {"publish_arrived": ("fence.acq_rel.gpu", "st.relaxed.sys arrived")},
}


def first_race(effects: dict[str, tuple[str, ...]], seeds: int = 10) -> RaceError | None:
    """Run the two ranks under several orders of steps; the first race, None if there is none."""
    for seed in range(seeds):
        with LocalWorld(2, "sim", blocks=1, seed=seed, mode="adversarial") as world:
            world.simulator.vocabulary = vocabulary(world.simulator, effects)
            try:
                results = world.run(lesson_01.program)
            except RaceError as race:
                return race
        assert [row.tolist()[0] for row, _ in results] == [200.0, 100.0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "nccl"), default="sim")
    backend = parser.parse_args().backend
    register_kernel("message", lesson_01.make_message, lesson_01.PARAMETERS)
    for name, effects in RIGHT.items():
        print(f"{name}: {'; '.join(effects)}")
    races = {}
    for version, effects in VERSIONS.items():
        races[version] = first_race(effects)
        print(f"\n== {version}")
        for name, changed in effects.items():
            print(f"   {name}: {'; '.join(changed)}")
        print(textwrap.indent(str(races[version] or "no race in 10 schedules"), "   "))
    right, *broken = races.values()
    assert right is None and all(isinstance(race, RaceError) for race in broken)
    assert "no release of system scope" in str(broken[0])
    if backend == "nccl":      # a GPU runs the right version; a broken one would show nothing but luck
        with LocalWorld(2, backend, blocks=1) as world:
            assert [row.tolist()[0] for row, _ in world.run(lesson_01.program)] == [200.0, 100.0]
        print("\nAnd on the GPU the right version delivers both rows.")
    print("\nRelease and acquire are a pair: take away either, or its scope, and the row is unprotected.")


if __name__ == "__main__":
    main()
