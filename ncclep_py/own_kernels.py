"""Kernels of your own: in the place of one of ours in a group (`OwnKernels.use_kernel`), or beside them (`OwnKernels.run_kernel`).

A kernel comes from a *factory*, ``make_mine(shape, ops)``: `shape` holds its constants (``kernels.shape.KernelShape``, HT
``kernels.ht_shape.HTShape``), `ops` the operations (``python -m ncclep_py vocabulary``), which it unpacks to local names before the kernel uses them.
The same factory runs in the simulator and, compiled, on a GPU. To change a kernel, define the factory anew (a notebook's cell, ``importlib.reload``)
and give it again; or name it as ``"file.py:make_mine"``, which is read anew each time. Nothing has to be restarted: code is compiled anew when the
factory, its file, or a global, default or closure variable that it uses has changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import linecache
import operator
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ncclep_py.compiled import KERNELS
from ncclep_py.config import Layout
from ncclep_py.device_library import uses_network
from ncclep_py.errors import EpError, EpRefusedError
from ncclep_py.kernels.ops import NET_OPS, OPS, Vocabulary

if TYPE_CHECKING:
    from ncclep_py.communicator import Kernel
    from ncclep_py.group import Group

__all__ = ["Factory", "OwnKernels", "check_factory", "digest_of_factory", "factory_of", "register_kernel"]

Factory = Callable[..., Callable[..., None]]


# ---- what a factory is ----------------------------------------------------------------------------------------------------
def digest_of_factory(factory: Factory) -> str:
    """SHA-256 over everything that decides what a factory makes: its code, its file, and the globals, defaults and closure variables it uses."""
    digest = hashlib.sha256()
    for part in _parts(factory, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _parts(value: Any, seen: set[int]) -> list[str]:
    """`value` in texts that are equal where it is the same, in any process."""
    if isinstance(value, types.FunctionType):
        if id(value) in seen or (value.__module__ or "").startswith("ncclep_py."):   # ours are in the key already
            return [f"{value.__module__}.{value.__qualname__}"]
        seen.add(id(value))
        code = value.__code__
        parts = _source(code)
        used = {name: value.__globals__[name] for name in sorted(_names(code)) if name in value.__globals__}
        cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True)}
        for name, held in [*used.items(), *cells.items(), ("defaults", value.__defaults__), ("keywords", value.__kwdefaults__)]:
            parts += [name, *_parts(held, seen)]
        return parts
    if isinstance(value, functools.partial):
        return [part for held in (value.func, value.args, value.keywords) for part in _parts(held, seen)]
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(part for held in value for part in _parts(held, seen)), "end"]
    if isinstance(value, dict):
        return ["dict", *(part for item in value.items() for part in _parts(item, seen)), "end"]
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
        return [getattr(value, "__name__", ""), str(getattr(value, "__version__", ""))]
    return [repr(value)]   # of an object without a repr of its own, its address: compiled anew, never mistaken


def _source(code: types.CodeType) -> list[str]:
    """What says all of a code object: the file it came from, the same for every Python; if that has changed since or is none, also the bytecode."""
    file = pathlib.Path(code.co_filename)
    if not file.is_file():
        return ["no file", *_code(code)]
    text = file.read_bytes()
    place = [hashlib.sha256(text).hexdigest(), code.co_name, str(code.co_firstlineno)]
    try:
        alike = [c for c in _all(compile(text, str(file), "exec", dont_inherit=True)) if _begins(c) == _begins(code)]
    except (SyntaxError, ValueError):
        alike = []
    return [*place, str(alike.index(code))] if code in alike else [*place, *_code(code)]


def _all(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those within it, in the order of the text."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all(constant)


def _begins(code: types.CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _code(code: types.CodeType) -> list[str]:
    """A code object in texts; `marshal` would not give the same bytes each time."""
    parts = [code.co_code.hex(), *map(repr, (code.co_names, code.co_varnames, code.co_freevars))]
    for constant in code.co_consts:
        parts += _code(constant) if isinstance(constant, types.CodeType) else [repr(constant)]
    return parts


def _names(code: types.CodeType) -> set[str]:
    """Names a code object and those in it look up."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def factory_of(given: Factory | str) -> Factory:
    """`given`, or for ``"file.py:name"`` that function of the file as it is now.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(given, str):
        file, colon, name = given.rpartition(":")
        path = pathlib.Path(file).resolve()
        if not colon or not path.is_file():
            raise ValueError(f"factory must be a function or 'file.py:function' with a file that exists, got {given!r}")
        linecache.checkcache(str(path))   # reports quote lines
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        if not callable(getattr(module, name, None)):
            found = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == path.stem)
            raise ValueError(f"factory must name a function of {path.name}, got {name!r}; there are: {found or 'none'}")
        return getattr(module, name)
    if not callable(given):
        raise TypeError(f"factory must be a function of (shape, ops) or 'file.py:function', got {type(given).__name__}")
    return given


def name_of(factory: Factory) -> str:
    """What to call a factory in messages."""
    return getattr(factory, "__name__", None) or getattr(getattr(factory, "func", None), "__name__", None) or type(factory).__name__


def check_factory(factory: Factory, shape: Any, parameters: tuple[str, ...] | None = None, of: str = "") -> tuple[str, ...]:
    """Names of the parameters of the kernel that `factory` makes for `shape`.

    Raises:
        TypeError, ValueError: it makes no kernel, or one that does not take `parameters`, those of kernel `of`.
        AttributeError: it uses an operation that does not exist.
    """
    _check_takes(factory)
    kernel = _checked_kernel(factory, factory(shape, _names_only(of)))
    takes = tuple(inspect.signature(kernel).parameters)
    if parameters is not None and takes != parameters:
        raise ValueError(f"the kernel of {name_of(factory)} must take the parameters of {of}, in their order: {', '.join(parameters)}"
                         f" ({_difference(parameters, takes)})")
    return takes


def _check_takes(factory: Factory) -> None:
    try:
        inspect.signature(factory).bind(None, None)
    except TypeError:
        raise TypeError(f"{name_of(factory)} must take (shape, ops), it takes {inspect.signature(factory)}") from None


def _checked_kernel(factory: Factory, kernel: Any) -> Callable[..., None]:
    """`kernel`, if it is a function that could be compiled."""
    called = name_of(factory)
    if not isinstance(kernel, types.FunctionType):
        raise TypeError(f"{called} must return the kernel, a function, it returns {type(kernel).__name__}")
    for name, cell in zip(kernel.__code__.co_freevars, kernel.__closure__ or (), strict=True):
        if isinstance(cell.cell_contents, Vocabulary):
            used = sorted(_names(kernel.__code__) & (OPS | NET_OPS).keys())
            raise ValueError(f"the kernel of {called} uses {name}.{used[0] if used else 'operation'}; a compiled kernel knows local names only: "
                             f"write `{used[0] if used else 'operation'} = {name}.{used[0] if used else 'operation'}` in {called} before it")
    return kernel


def _difference(expected: tuple[str, ...], given: tuple[str, ...]) -> str:
    """What is wrong with names `given`."""
    missing, unknown = [p for p in expected if p not in given], [p for p in given if p not in expected]
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names) or "the order differs"


def _names_only(kernel: str) -> Vocabulary:
    """The operations that `kernel` is linked with, which cannot be called."""
    return Vocabulary({name: _never(name) for name in (OPS | NET_OPS if uses_network(kernel) else OPS)})


def _never(name: str) -> Callable[..., int]:
    def operation(*args: int) -> int:
        raise ValueError(f"{name} was called while the kernel was made; operations are for inside of the kernel")

    return operation


def nearest(name: str, names: list[str]) -> str:
    """"; did you mean .." if a name is like one there is."""
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else ""


def register_kernel(name: str, factory: Factory | str, parameters: tuple[str, ...] | None = None) -> None:
    """Make `factory` known to this process as kernel `name`, for every group and `Communicator.kernel` afterwards; again to change it.

    Args:
        name: a new name, or that of one of our kernels, which it replaces.
        factory: ``make(shape, ops)``, or ``"file.py:make"``.
        parameters: of a kernel with a new name: what it takes, in order. One of ours keeps its own.

    Raises:
        TypeError, ValueError: the factory is none, or its kernel takes others than `parameters`; of a factory that makes no kernel for a small group
            this is said when it makes one.

    Example:
        >>> import ncclep_py as ep
        >>> ep.register_kernel("ll_combinee", lambda shape, ops: None)
        Traceback (most recent call last):
        ValueError: parameters must be given for 'll_combinee', since no kernel of that name is known; did you mean ll_combine?
    """
    made = factory_of(factory)
    if parameters is None and name not in KERNELS:
        raise ValueError(f"parameters must be given for {name!r}, since no kernel of that name is known{nearest(name, list(KERNELS))}")
    if not name.isidentifier():
        raise ValueError(f"name must be an identifier, got {name!r}")
    takes = tuple(parameters) if parameters is not None else KERNELS[name][1]
    KERNELS[name] = (_checked_factory(name, made, takes), takes)


def _checked_factory(name: str, factory: Factory, parameters: tuple[str, ...]) -> Factory:
    """`factory`, checked against `parameters` now if it makes a kernel for some small group, else whenever it makes one: a kernel is launched by
    position, so names in another order would give it the wrong values."""
    _check_takes(factory)
    for shape in _small_shapes():
        try:
            kernel = factory(shape, _names_only(name))
        except Exception:   # noqa: BLE001, S112  (made for another group)
            continue
        _check_parameters(factory, _checked_kernel(factory, kernel), parameters)
        return factory
    return functools.partial(_make_checked, factory, parameters)


def _make_checked(factory: Factory, parameters: tuple[str, ...], shape: Any, ops: Vocabulary) -> Callable[..., None]:
    kernel = factory(shape, ops)
    _check_parameters(factory, kernel, parameters)
    return kernel


def _check_parameters(factory: Factory, kernel: Callable[..., None], parameters: tuple[str, ...]) -> None:
    takes = tuple(inspect.signature(kernel).parameters)
    if takes != parameters:
        raise ValueError(f"parameters must be those of the kernel of {name_of(factory)}, in their order: expected {', '.join(takes)}, "
                         f"got {', '.join(parameters) or 'none'} ({_difference(takes, parameters)})")


def _small_shapes() -> Iterator[Any]:
    """Constants of the kernels of small groups, LL and HT."""
    import torch

    from ncclep_py.config import Algorithm, GroupConfig
    from ncclep_py.kernels.ht_shape import HTShape
    from ncclep_py.kernels.shape import KernelShape

    low = GroupConfig(num_experts=4, max_dispatch_tokens_per_rank=2, hidden=8, num_topk=2, dtype=torch.float32)
    yield KernelShape.build(low, 2, 2, 8)
    high = dataclasses.replace(low, algorithm=Algorithm.HIGH_THROUGHPUT)
    yield HTShape.build(high, 2, 2, 8, Layout.FLAT, 1, 1)


# ---- in a group -----------------------------------------------------------------------------------------------------------
class OwnKernels:
    """The part of `group.Group` that takes kernels of the caller's."""

    def use_kernel(self, name: str, factory: Factory | str | None) -> None:
        """From now on operations of this group run `factory`'s kernel in the place of `name`. Collective and blocking; not during graph capture.

        Kernels of that name that the group has loaded are replaced at once, so what does not compile is said here; graphs captured before keep the
        kernels they were captured with. ``close()`` goes on using ours; a refused call runs the kernel of that call, with the refusal in `status`.

        Args:
            name: a kernel the group runs: ``ll_dispatch``, ``ll_combine``, ``ht_dispatch``, .. (``compiled.KERNELS``).
            factory: ``make(shape, ops)``, the same on all ranks; ``"file.py:make"`` reads the file as it is now; None: ours again.

        Raises:
            TypeError, ValueError, AttributeError: the factory is none, its kernel takes other parameters than `name`'s, or uses an unknown operation;
                or ranks gave different factories.
            RuntimeError: it does not compile. The group goes on with what it had.
            EpRefusedError: another rank raised one of these.

        Example:
            >>> import ncclep_py as ep
            >>> from ncclep_py.kernels.ll_combine import make_ll_combine
            >>> def make_mine(shape, ops):
            ...     return make_ll_combine(shape, ops)   # a change of this one, say
            >>> def program(comm):
            ...     config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)
            ...     with ep.Group.create(comm, config) as group, group.create_handle(ep.Layout.EXPERT_MAJOR, num_topk=1):
            ...         group.use_kernel("ll_combine", make_mine)
            ...         group.use_kernel("ll_combine", None)   # ours again
            ...         group.use_kernel("ll_combin", make_mine)
            >>> with ep.LocalWorld(1, "sim") as world:
            ...     world.run(program)
            Traceback (most recent call last):
            ValueError: name must be a kernel of this group, ll_combine, ll_copy, ll_dispatch, got 'll_combin'; did you mean ll_combine?
        """
        group: Group = self   # type: ignore[assignment]
        group._check_open("use_kernel")
        if group.comm.capturing():
            raise EpError("a kernel cannot be compiled or loaded during graph capture: call use_kernel before capturing")
        before, loaded = dict(group.own), {}
        try:
            keys = [key for key in group._kernels if group.runs(key) == name]
            group.own[name] = self._registered(name, factory)
            try:
                loaded = {key: group.loaded(key) for key in keys}
            except EpError:
                raise
            except Exception as e:
                raise RuntimeError(f"{name_of(factory)} does not compile: {_short(e)}") from e   # type: ignore[arg-type]
            mine: BaseException | None = None
        except Exception as e:   # noqa: BLE001  (raised below, when the others know)
            mine = e
        told = group.comm.exchange([group.own.get(name, "").rpartition("_")[2] if mine is None else "", "" if mine is None else str(mine)[:400]])
        error = mine or _differing(name, told, group.rank)
        if error is not None:
            group.own = before
            raise error
        if not group.own[name]:
            del group.own[name]
        group._kernels.update(loaded)
        group.kernel_changes += 1

    def _registered(self, name: str, factory: Factory | str | None) -> str:
        """Name of `KERNELS` under which the factory is compiled; "" for None."""
        group: Group = self   # type: ignore[assignment]
        theirs = sorted({group.runs(key) for key in group._kernels})
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, a kernel of this group ({', '.join(theirs)}), got {type(name).__name__}: {name!r}")
        if name not in theirs:
            known = "; this group has not loaded it: create a handle first" if name in KERNELS else nearest(name, theirs)
            raise ValueError(f"name must be a kernel of this group, {', '.join(theirs)}, got {name!r}{known}")
        if factory is None:
            return ""
        made = factory_of(factory)
        shapes = [group.shape_of(key) for key in group._kernels if group.runs(key) == name]
        for shape in shapes:
            check_factory(made, shape, KERNELS[name][1], name)
        registered = f"{name}_own_{digest_of_factory(made)[:16]}"
        KERNELS[registered] = (made, KERNELS[name][1])
        return registered

    def run_kernel(self, factory: Factory | str, *, layout: Layout = Layout.UNSET, blocks: int = 0, **values: Any) -> None:
        """Run a kernel of your own once on all ranks, in stream order. Collective; not during graph capture, unless it ran before.

        It is no operation of the group: whatever epochs, words and slots it uses are its own business, so mix it with operations only if you
        know what they leave behind (``memory_map``).

        Args:
            factory: ``make(shape, ops)``, or ``"file.py:make"``. `shape` is that of the group's ``num_topk`` and 8-byte ids.
            layout: that of `shape`; without it the group's default.
            blocks: its grid; without it the group's ``num_blocks``.
            values: what the kernel takes, by name: tensors (their addresses) and ints. Known without: window, rank, local, record, timeout; with
                several teams also comm, which operations on the network take, and signals, the first signal that is free for kernels like this
                one: as many as there are ranks, and 16, of each context, beside counters 0 to 15. They are never reset.

        Raises:
            TypeError: the factory is none, or a value is neither a tensor nor an int.
            ValueError: the values are not those that the kernel takes; or it takes comm, and all ranks form one team.
            RuntimeError: it does not compile.

        Example:
            >>> import torch
            >>> import ncclep_py as ep
            >>> def make_peek(shape, ops):
            ...     EPOCH = shape.local.epoch
            ...     block_idx, warp_idx, read_epoch, store_header = ops.block_idx, ops.warp_idx, ops.read_epoch, ops.store_header
            ...     def peek(local, out):
            ...         if block_idx() == 0:
            ...             if warp_idx() == 0:
            ...                 store_header(out, read_epoch(local + EPOCH), 7)
            ...     return peek
            >>> def program(comm):
            ...     with ep.Group.create(comm, ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, hidden=8, num_topk=1)) as group:
            ...         out = torch.zeros(2, dtype=torch.int64)
            ...         group.run_kernel(make_peek, out=out)
            ...         return out.tolist()
            >>> with ep.LocalWorld(2, "sim") as world:
            ...     world.run(program)
            [[1, 7], [1, 7]]
        """
        group: Group = self   # type: ignore[assignment]
        group._check_open("run_kernel")
        made = factory_of(factory)
        takes = self._checked_own(made, layout)
        local, record = group.addresses()
        known: dict[str, Any] = {"window": group.window.handle, "rank": group.rank, "local": local, "record": record, "timeout": group.config.wait_ns}
        if group.network is not None and group.network.needs is not None:
            known |= {"comm": group.network.address, "signals": group.network.needs.first_free}
        missing, unknown = [p for p in takes if p not in {**known, **values}], [v for v in values if v not in takes]
        if missing or unknown:
            told = "; ".join(f"{what}: {', '.join(n)}" for what, n in (("missing", missing), ("unknown", unknown)) if n)
            raise ValueError(f"values must name what the kernel of {name_of(made)} takes ({', '.join(takes)}): {told}")
        mine = {name: _value(name, value) for name, value in values.items()}
        kernel = self.own_kernel(made, layout, blocks)
        tensors = [v for v in values.values() if hasattr(v, "data_ptr")]
        given = [(known | mine)[p] for p in takes]
        group.keep(tensors)
        group.comm.submit(kernel, given, blocks or group.num_blocks, name_of(made), tensors)

    def _checked_own(self, made: Factory, layout: Layout) -> tuple[str, ...]:
        """What the kernel of a factory takes, if this group can run it."""
        group: Group = self   # type: ignore[assignment]
        shape = group.own_shape(layout)
        takes = check_factory(made, shape, of=_own_name(True))
        if group.network is None:
            if "comm" in takes:
                raise ValueError(f"the kernel of {name_of(made)} takes comm, the network's device communicator, and this group has none: its "
                                 f"{group.num_ranks} ranks form one team")
            check_factory(made, shape)   # nor has it operations on the network
        return takes

    def own_kernel(self, made: Factory, layout: Layout = Layout.UNSET, blocks: int = 0) -> Kernel:
        """Internal: the kernel of a factory, loaded on first use."""
        group: Group = self   # type: ignore[assignment]
        key = ("own", digest_of_factory(made), layout, blocks)
        if key not in group.own_loaded:
            if group.comm.capturing():
                raise EpError(f"{name_of(made)} is not loaded, and loading is impossible during graph capture: run it once before capturing")
            registered, shape = _own_name(group.network is not None) + key[1][:16], group.own_shape(layout)
            KERNELS[registered] = (made, self._checked_own(made, layout))
            try:
                group.own_loaded[key] = group.comm.kernel(registered, shape, group.shared_bytes("", shape), blocks or group.num_blocks, group.tracer)
            except Exception as e:
                raise RuntimeError(f"{name_of(made)} does not compile: {_short(e)}") from e
        return group.own_loaded[key]


def _own_name(network: bool) -> str:
    """How the names of such kernels begin, by which `device_library.uses_network` knows them: over several teams all do, since ranks are numbered
    differently there."""
    return "own_net_" if network else "own_"


def _value(name: str, value: Any) -> int:
    """What a kernel gets for a value of the caller's."""
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a tensor or an int, got {type(value).__name__}: {value!r}")
    return operator.index(value)


def _short(error: BaseException) -> str:
    """The lines of a compiler's message that say what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(("During: Pass", "Failed in"))]
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"


def _differing(name: str, told: list[list[str]], rank: int) -> Exception | None:
    """What is wrong with what the ranks gave, if anything: a rank's error, or different factories."""
    for r, (_, problem) in enumerate(told):
        if problem and r != rank:
            return EpRefusedError(f"rank {r} refused use_kernel({name!r}): {problem}")
    if len({digest for digest, _ in told}) > 1:
        given = ", ".join(f"rank {r} {digest or 'ours'}" for r, (digest, _) in enumerate(told))
        return ValueError(f"factory must be the same on all ranks for {name}, got {given}")
    return None
