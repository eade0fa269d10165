"""The loopback RMA plugin without NCCL and without a GPU: its function table driven from Python over host memory, in one process and in two."""

import ctypes
import multiprocessing
import os
import pathlib
import random
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from loopback_rma import build  # noqa: E402

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not() or "-")
TABLE = ("name", "init", "devices", "properties", "listen", "connect", "create_context", "register", "register_dmabuf", "deregister",
         "destroy_context", "close_endpoint", "close_listener", "put", "put_signal", "get", "flush", "test", "progress", "last_error", "finalize")
VOID, U64 = ctypes.c_void_p, ctypes.c_uint64
ARGUMENTS = {
    "init": (VOID, U64, VOID), "devices": (VOID,), "listen": (VOID, ctypes.c_int, VOID, VOID), "close_endpoint": (VOID,), "deregister": (VOID, VOID),
    "connect": (VOID, VOID, ctypes.c_int, ctypes.c_int, VOID, VOID), "register": (VOID, VOID, ctypes.c_size_t, ctypes.c_int, U64, VOID),
    "put": (VOID, ctypes.c_int, U64, VOID, ctypes.c_size_t, U64, VOID, ctypes.c_uint32, VOID),
    "put_signal": (VOID, ctypes.c_int, U64, VOID, ctypes.c_size_t, U64, VOID, ctypes.c_uint32, U64, VOID, U64, ctypes.c_uint32, ctypes.c_bool, VOID),
    "get": (VOID, ctypes.c_int, U64, VOID, ctypes.c_size_t, U64, VOID, ctypes.c_uint32, VOID), "test": (VOID, VOID, VOID), "progress": (VOID,)}
HOST, CUDA, ADD, INCREMENT, HANDLE = 1, 2, 2, 1, 128
PUTS, SIGNALS, LANDED, LOST, PASSED, RINGS = range(6)


class Plugin:
    """The plugin's table, and the calls it has for tests."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        words = (VOID * len(TABLE)).in_dll(self.library, "ncclRmaPlugin_v14")
        self.table = {name: ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS[name])(words[i]) for i, name in enumerate(TABLE) if name in ARGUMENTS}
        self.library.loopback_configure.argtypes = (U64, ctypes.c_int, U64, ctypes.c_int, U64, ctypes.c_int)
        self.library.loopback_advance.argtypes = (U64,)
        self.library.loopback_pending.restype = U64

    def configure(self, delay=0, reorder=False, seed=0, lose=-1, after=0, never=False):
        self.library.loopback_configure(delay, reorder, seed, lose, after, never)

    def call(self, name, *arguments):
        status = self.table[name](*arguments)
        assert status == 0, f"{name} gave ncclResult {status}"

    def advance(self, us):
        assert self.library.loopback_advance(us) == 0

    def counts(self):
        words = (U64 * 6)()
        self.library.loopback_counts(words)
        return list(words)

    def listen(self):
        handle, listener = ctypes.create_string_buffer(HANDLE), VOID()
        self.call("listen", None, 0, handle, ctypes.byref(listener))
        return handle, listener


class Rank:
    """One rank of a connection with one window of host memory and one block of signals, registered in this order."""

    def __init__(self, plugin, handles, rank, listener, size=4096, kind=HOST):
        self.plugin, self.rank = plugin, rank
        endpoint = VOID()
        pointers = (VOID * len(handles))(*(ctypes.cast(h, VOID) for h in handles))
        plugin.call("connect", None, pointers, len(handles), rank, listener, ctypes.byref(endpoint))
        self.endpoint = endpoint
        plugin.call("progress", endpoint)   # what names memory that is not registered yet must be kept
        self.window, self.signals = ctypes.create_string_buffer(size), (U64 * 8)()
        self.regions = []
        for memory in (self.window, self.signals):
            region = VOID()
            plugin.call("register", endpoint, ctypes.cast(memory, VOID), ctypes.sizeof(memory), kind, 0, ctypes.byref(region))
            self.regions.append(region)

    def put(self, peer, source, target, size, context=0, signal=None, value=1, op=ADD):
        request = VOID()
        if signal is None:
            self.plugin.call("put", self.endpoint, context, source, self.regions[0], size, target, self.regions[0], peer, ctypes.byref(request))
        else:
            self.plugin.call("put_signal", self.endpoint, context, source, self.regions[0], size, target, self.regions[0], peer, 8 * signal,
                             self.regions[1], value, op, True, ctypes.byref(request))
        return request

    def done(self, request):
        done = ctypes.c_int()
        self.plugin.call("test", self.endpoint, request, ctypes.byref(done))
        return bool(done.value)

    def close(self):
        self.plugin.call("close_endpoint", self.endpoint)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build.built(tmp_path_factory.getbasetemp())


@pytest.fixture
def plugin(library):
    return Plugin(library)


@pytest.fixture
def world(plugin):
    """Four ranks in this process."""
    plugin.configure()
    context = VOID()
    plugin.call("init", ctypes.byref(context), 0, None)
    heard = [plugin.listen() for _ in range(4)]
    ranks = [Rank(plugin, [h for h, _ in heard], r, listener) for r, (_, listener) in enumerate(heard)]
    yield ranks
    for rank in ranks:
        rank.close()


def fill(rank, at, text):
    ctypes.memmove(ctypes.addressof(rank.window) + at, text, len(text))


def test_put_and_signal(plugin, world):
    fill(world[0], 16, b"from rank 0 to rank 2")
    request = world[0].put(2, 16, 100, 21, signal=3, value=5)
    plugin.advance(0)
    assert world[2].window.raw[100:121] == b"from rank 0 to rank 2" and list(world[2].signals) == [0, 0, 0, 5, 0, 0, 0, 0]
    assert world[0].done(request) and plugin.counts()[:3] == [1, 1, 2]
    assert world[0].done(world[0].put(2, 0, 0, 0, signal=3, op=INCREMENT, value=77)) and world[2].signals[3] == 6
    assert not any(any(r.signals) for i, r in enumerate(world) if i != 2)


def test_test_alone_lets_the_network_go_on(plugin, world):
    """NCCL may only ever test: no other call is needed."""
    fill(world[1], 0, b"abcdefgh")
    assert world[1].done(world[1].put(3, 0, 8, 8)) and world[3].window.raw[8:16] == b"abcdefgh"


def test_get(plugin, world):
    fill(world[3], 40, b"of rank 3")
    request = VOID()
    plugin.call("get", world[0].endpoint, 0, 40, world[0].regions[0], 9, 8, world[0].regions[0], 3, ctypes.byref(request))
    assert world[0].done(request) and world[0].window.raw[8:17] == b"of rank 3"


def test_delays_keep_the_order_without_reordering(plugin, world):
    plugin.configure(delay=100, seed=1)
    for n in range(20):
        fill(world[0], 0, n.to_bytes(8, "little"))
        request = world[0].put(1, 0, 8, 8, signal=0)
        while not world[0].done(request):   # the source may be overwritten only now
            plugin.advance(1)
        assert int.from_bytes(world[1].window.raw[8:16], "little") <= n
    while plugin.library.loopback_pending():
        plugin.advance(1)
    assert world[1].window.raw[8:16] == (19).to_bytes(8, "little") and world[1].signals[0] == 20 and plugin.counts()[PASSED] == 0


def test_source_is_read_between_issue_and_completion(plugin, world):
    """What overwrites the source too early is sent: that is how a missing flush shows."""
    plugin.configure(delay=1000, seed=3)
    fill(world[0], 0, b"old" + bytes(5))
    request = world[0].put(1, 0, 0, 8)
    fill(world[0], 0, b"new" + bytes(5))
    while not world[0].done(request):
        plugin.advance(50)
    fill(world[0], 0, b"end" + bytes(5))   # after completion: must not be sent
    plugin.advance(2000)
    plugin.advance(2000)
    assert world[1].window.raw[:3] == b"new"


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_waits_for_all_earlier_puts_of_its_context_and_target(plugin, world, seed):
    """Puts pass each other and come in pieces; whenever a signal is there, so are all bytes put before it."""
    plugin.configure(delay=200, reorder=True, seed=seed)
    choose = random.Random(seed)
    issued = {}   # (context, target): [(source, signals before it are at least, offset, bytes)]
    requests, sent = [], {}
    for n in range(60):
        context, peer = choose.randrange(2), choose.choice((1, 2))
        text = bytes(choose.randrange(1, 256) for _ in range(choose.choice((8, 24, 40))))
        fill(world[0], 64 * n % 4096, text)
        place = (context, peer)
        signal = choose.random() < 0.4
        issued.setdefault(place, []).append((64 * n % 4096, text))
        requests.append(world[0].put(peer, 64 * n % 4096, 64 * n % 4096, len(text), context, signal=context if signal else None))
        if signal:
            sent.setdefault(place, []).append(len(issued[place]))
    while plugin.library.loopback_pending():
        plugin.advance(5)
        for (context, peer), marks in sent.items():
            arrived = world[peer].signals[context]
            for at, text in issued[context, peer][: marks[arrived - 1] if arrived else 0]:
                assert world[peer].window.raw[at: at + len(text)] == text, f"signal {arrived} of context {context} at rank {peer} came early"
    assert all(world[0].done(r) for r in requests)
    assert all(world[peer].signals[context] == len(marks) for (context, peer), marks in sent.items())
    assert plugin.counts()[PASSED] > 0   # else nothing was tested


def test_signals_of_other_contexts_do_not_wait(plugin, world):
    """At some seed a later signal of another context lands before an earlier put: programs must not rely on it."""
    passed = 0
    for seed in range(20):
        plugin.configure(delay=100, reorder=True, seed=seed)
        fill(world[0], 0, bytes([seed + 1]) * 8)
        world[0].put(1, 0, 2048 + 8 * seed, 8, context=0)
        before = world[1].signals[5]
        world[0].put(1, 0, 0, 0, context=1, signal=5)
        while world[1].signals[5] == before:
            plugin.advance(1)
        passed += world[1].window.raw[2048 + 8 * seed] == 0
        while plugin.library.loopback_pending():
            plugin.advance(10)
    assert 0 < passed < 20


def test_reordering_needs_no_delay(plugin, world):
    plugin.configure(reorder=True, seed=1)
    for n in range(16):
        world[0].put(1, 0, 8 * n, 8)
    plugin.advance(0)
    assert plugin.library.loopback_pending() == 0 and plugin.counts()[PASSED] > 4


@pytest.mark.parametrize("never", [False, True])
def test_a_lost_rank(plugin, world, never):
    plugin.configure(lose=2, after=1, never=never)
    fill(world[0], 0, b"12345678")
    first = world[0].put(2, 0, 0, 8)                 # the one that still gets through
    lost = [world[0].put(2, 0, 8, 8, signal=0), world[2].put(1, 0, 16, 8, signal=1)]
    kept = world[0].put(1, 0, 24, 8, signal=2)
    plugin.advance(10)
    assert world[0].done(first) and world[0].done(kept)
    assert [rank.done(r) for rank, r in zip((world[0], world[2]), lost, strict=True)] == [not never] * 2
    assert world[2].window.raw[:16] == b"12345678" + bytes(8) and world[2].signals[0] == 0
    assert world[1].window.raw[16:32] == bytes(8) + b"12345678" and list(world[1].signals[1:3]) == [0, 1]
    assert plugin.counts()[LOST] == 2


def test_what_is_wrong_is_refused(plugin, world):
    request = VOID()
    put = plugin.table["put"]
    assert put(world[0].endpoint, 0, 0, world[0].regions[0], 8, 0, world[0].regions[0], 4, ctypes.byref(request)) != 0      # no such rank
    assert put(world[0].endpoint, 0, 4090, world[0].regions[0], 8, 0, world[0].regions[0], 1, ctypes.byref(request)) != 0   # beyond the source
    request = world[0].put(1, 0, 4090, 8)
    assert plugin.library.loopback_advance(0) != 0   # beyond the target
    assert request


# ---- two processes ---------------------------------------------------------------------------------------------------------
def other_process(path, pipe):
    """Rank 1 in a process of its own: waits for 50 signals, checks what was put, answers with puts of its own."""
    plugin = Plugin(path)
    plugin.configure()
    handle, listener = plugin.listen()
    pipe.send(handle.raw)
    handles = [ctypes.create_string_buffer(raw, HANDLE) for raw in pipe.recv()]
    time.sleep(0.3)   # puts arrive before I registered what they name
    me = Rank(plugin, handles, 1, listener, 1 << 20)
    end = time.monotonic() + 20
    while me.signals[0] < 50 and time.monotonic() < end:
        plugin.call("progress", me.endpoint)
    good = all(me.window.raw[8 * n: 8 * n + 8] == n.to_bytes(8, "little") for n in range(50))
    big = me.window.raw[4096: 4096 + 600_000] == bytes(range(250)) * 2400
    fill(me, 0, b"answered")
    requests = [me.put(0, 0, 700_000, 8, signal=1)]
    while not all(me.done(r) for r in requests) and time.monotonic() < end:
        pass
    pipe.send((me.signals[0], good, big, plugin.counts()[RINGS]))
    pipe.recv()
    me.close()


def test_two_processes(plugin, library):
    """Puts and signals between processes, larger than a piece of the ring, more of them than it holds."""
    plugin.configure()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=other_process, args=(str(library), theirs))
    other.start()
    try:
        handle, listener = plugin.listen()
        assert ours.poll(60)
        handles = [handle, ctypes.create_string_buffer(ours.recv(), HANDLE)]
        ours.send([h.raw for h in handles])
        me = Rank(plugin, handles, 0, listener, 1 << 20)
        fill(me, 4096, bytes(range(250)) * 2400)
        requests = [me.put(1, 4096, 4096, 600_000)]
        for n in range(50):
            fill(me, 8 * n, n.to_bytes(8, "little"))
            requests += [me.put(1, 8 * n, 8 * n, 8, signal=0)]
            requests += [me.put(1, 4096, 4096, 200_000)] if n < 25 else []   # 5 MB more than the ring has room for
        end = time.monotonic() + 20
        while (requests or me.signals[1] < 1) and time.monotonic() < end:
            requests = [r for r in requests if not me.done(r)]
            plugin.call("progress", me.endpoint)
        assert not requests and me.signals[1] == 1 and me.window.raw[700_000:700_008] == b"answered"
        assert ours.poll(20) and ours.recv() == (50, True, True, 2)
        ours.send("end")
        me.close()
        other.join(20)
        assert other.exitcode == 0
    finally:
        other.kill()


def test_it_leaves_no_shared_memory(plugin, world):
    assert list(pathlib.Path("/dev/shm").glob(f"loopback-rma-{os.getpid()}-*"))
    for rank in world:
        rank.close()
    left = {p.name for p in pathlib.Path("/dev/shm").glob(f"loopback-rma-{os.getpid()}-*")}
    world.clear()
    assert not left


# ---- device memory, over a driver that works late --------------------------------------------------------------------------
def on_a_late_gpu(path, fake, delay, reorder):
    """In a process of its own, whose libcuda is the stand-in: puts and signals between device memory, in order, and nothing left over."""
    driver = ctypes.CDLL(fake, mode=ctypes.RTLD_GLOBAL)
    driver.fake_events.restype, driver.fake_current.restype = U64, VOID
    plugin = Plugin(path)
    plugin.configure(delay=delay, reorder=reorder, seed=5)
    heard = [plugin.listen() for _ in range(3)]
    ranks = [Rank(plugin, [h for h, _ in heard], r, listener, kind=CUDA) for r, (_, listener) in enumerate(heard)]
    choose, put, requests = random.Random(1), [], []
    for n in range(80):
        text = bytes(choose.randrange(1, 256) for _ in range(choose.choice((8, 40))))
        fill(ranks[0], 40 * n, text)
        put.append((40 * n, text))
        requests.append(ranks[0].put(1, 40 * n, 40 * n, len(text), signal=2))
        requests.append(ranks[2].put(1, 0, 0, 0, context=1, signal=3))
        for at, done in put[: ranks[1].signals[2]]:
            assert ranks[1].window.raw[at: at + len(done)] == done, "a signal came before what was put"
        plugin.advance(choose.randrange(30))
    for _ in range(100_000):
        requests = [r for r in requests if not ranks[0].done(r)]
        for at, done in put[: ranks[1].signals[2]]:
            assert ranks[1].window.raw[at: at + len(done)] == done, "a signal came before what was put"
        if not requests and not plugin.library.loopback_pending():
            break
        plugin.advance(20)
    assert not requests and list(ranks[1].signals[2:4]) == [80, 80]
    assert all(ranks[1].window.raw[at: at + len(text)] == text for at, text in put)
    assert driver.fake_events() == 0          # all given back
    assert driver.fake_current() is None      # the caller's context kept
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(("delay", "reorder"), [(0, False), (100, False), (100, True)])
def test_device_memory(library, tmp_path, delay, reorder):
    fake = build.build(tmp_path / "libcuda.so.1", build.HERE / "fake_cuda.cc")
    environment = os.environ.get("LD_LIBRARY_PATH")
    try:
        os.environ["LD_LIBRARY_PATH"] = f"{tmp_path}:{environment or ''}"
        other = multiprocessing.get_context("spawn").Process(target=on_a_late_gpu, args=(str(library), str(fake), delay, reorder))
        other.start()
    finally:
        os.environ.pop("LD_LIBRARY_PATH") if environment is None else os.environ.__setitem__("LD_LIBRARY_PATH", environment)
    other.join(60)
    other.kill()
    assert other.exitcode == 0
