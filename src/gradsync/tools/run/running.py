"""Observes a process in which a script runs, and those it starts: wrappers, backwards, optimizers, collectives.

torch's class means the same to everybody, so ours takes over its names. Accelerate's class is also what libraries such
as Transformers build on, through many names that only Accelerate has. So ``accelerate.Accelerator`` is ours for the
script and any other code that is not installed, and Accelerate's own for installed libraries; that one wraps models in
torch's class by name, which is ours. Accelerate need not be installed, and is imported when the script asks for it.

Processes that the script starts get the settings through the environment, and are observed from their import of torch
on: see :mod:`gradsync.tools.run.startup.sitecustomize`.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import site
import socket
import sys
import sysconfig
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from gradsync.accelerator import Accelerator
from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.observe.recording import close_recorders
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.parallel.torch_names import TorchDDP
from gradsync.tools.run.account import BACKWARD, DATA, FORWARD, OPTIMIZER, REST, Account, write_account
from gradsync.tools.run.startup.sitecustomize import CHILD_SETTINGS, after_import
from gradsync.tools.run.wrappers import PhaseClock, WatchedWrapper, watched

__all__ = ["ChildSettings", "begin_with_children", "is_library", "warn_if_ranks_are_started"]

# Functions of torch.distributed that are counted. Only the names there are replaced, which scripts look up: torch's own
# functions call each other below them, so `all_gather_object` is one call and not the three it makes.
COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
# Installed packages, wherever they are: of another Python than this one, by PYTHONPATH or a .pth.
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
# Where Pythons that start find what reads the settings.
STARTUP = str(Path(__file__).parent / "startup")
# Of multiprocessing's finalizers: nothing of what queues and torch do at the end is needed here.
BEFORE_QUEUES = 100


class Running:
    """Watches this process from :meth:`begin` on. With ``keep`` the script has torch's and Accelerate's own classes.

    Nothing is taken back: the process is the script's, and ends with it.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.keep = keep
        self._clock = PhaseClock()
        self._called: Counter[str] = Counter()
        self._wrappers: list[WatchedWrapper] = []
        # Beside the wrappers, which may be copied and pickled.
        self._found: weakref.WeakKeyDictionary[Any, WatchedWrapper] = weakref.WeakKeyDictionary()
        self._steps, self._rank, self._world_size = 0, 0, 1
        # Refused are those of a launcher that the script may well understand.
        with contextlib.suppress(ConfigurationError):
            environment = read_environment()
            self._rank, self._world_size = environment.rank, environment.world_size

    def begin(self) -> None:
        """Begin to watch. To be called before the script looks anything up."""
        for kind in (TorchDDP, DistributedDataParallel):
            self._watch_class(kind)
        self._watch_backward()
        self._watch_loaders()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function is not None:
                setattr(dist, name, _counted(name, function, self._called))
        if not self.keep:
            for place in (nn.parallel, nn.parallel.distributed):
                place.DistributedDataParallel = DistributedDataParallel  # type: ignore[attr-defined]
            for module in ("accelerate", "accelerate.accelerator"):
                after_import(module, _show_our_accelerator)

    def account(self) -> Account:
        """What was counted so far."""
        self._look_at_the_group()
        return Account(
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            kept=self.keep,
            steps=self._steps,
            seconds=self._clock.seconds,
            called=dict(self._called),
            wrappers=tuple(wrapper.account() for wrapper in self._wrappers),
        )

    def _look_at_the_group(self) -> None:
        """Read rank and world size while there is a group: scripts destroy it before they end."""
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    # -- what is exchanged for something that looks at the clock before and after -----------------------------------

    def _watch_class(self, kind: Any) -> None:
        initialize, forward = kind.__init__, kind.forward

        @functools.wraps(initialize)
        def watched_init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            initialize(wrapper, *args, **kwargs)
            self._look_at_the_group()
            found = watched(wrapper)
            self._wrappers.append(found)
            self._found[wrapper] = found

        # Not traced by the compiler, which goes on inside.
        @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
        @functools.wraps(forward)
        def watched_forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._found.get(wrapper)
            if found is None or not self._clock.is_mine():
                return forward(wrapper, *args, **kwargs)
            with self._clock.inside(FORWARD if torch.is_grad_enabled() else REST):
                found.before_forward()
                output = forward(wrapper, *args, **kwargs)
                found.after_forward(output)
            return output

        kind.__init__, kind.forward = watched_init, watched_forward

    def _watch_backward(self) -> None:
        # Tensor.backward calls it by this name.
        backward: Callable[..., Any] = torch.autograd.backward

        @functools.wraps(backward)
        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            with self._clock.inside(BACKWARD):
                result = backward(*args, **kwargs)
            took = time.perf_counter() - began
            for wrapper in self._wrappers:
                wrapper.after_backward(took, inside_step=self._clock.is_inside(OPTIMIZER))
            return result

        torch.autograd.backward = watched_backward

    def _watch_loaders(self) -> None:
        iterator: Any = dataloader._BaseDataLoaderIter
        take = iterator.__next__

        @functools.wraps(take)
        def watched_take(loader: Any) -> Any:
            with self._clock.inside(DATA):
                return take(loader)

        iterator.__next__ = watched_take

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._clock.enter(OPTIMIZER)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._clock.leave(OPTIMIZER)
        held = {id(each) for group in optimizer.param_groups for each in group["params"][:1]}
        concerned = [each for each in self._wrappers if not held.isdisjoint(each.parameter_ids)]
        # One that holds copies, as of parameters in another precision, may stand for any.
        ended = [each.step() for each in concerned or self._wrappers]
        if any(ended):
            self._steps += 1
            self._clock.stepped()


def _counted(name: str, function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # The compiler puts its own operation in the place of the function it knows, and counts nothing.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "gradsync":
            counts[name] += 1
        return function(*args, **kwargs)

    return counted


class _AccelerateModule(ModuleType):
    """A module of Accelerate's that shows a different class to code that is not installed."""

    @property
    def Accelerator(self) -> Any:  # noqa: N802 (the name of a class)
        own = vars(self)["Accelerator"]
        if own is not vars(self)["_accelerates_own"]:
            # Somebody has put another one there, and wants that.
            return own
        return own if is_library(sys._getframe(1).f_code.co_filename) else Accelerator

    @Accelerator.setter
    def Accelerator(self, value: Any) -> None:  # noqa: N802
        vars(self)["Accelerator"] = value


def _show_our_accelerator(module: ModuleType) -> None:
    own = vars(module).get("Accelerator")
    # A module of the same name that is not Accelerate has nothing to replace.
    if own is not None and type(module) is ModuleType:
        vars(module)["_accelerates_own"] = own
        module.__class__ = _AccelerateModule


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package: to this Python's, or to another's that PYTHONPATH or a ``.pth``
    names; or to one in a folder that ``pip install --target`` has filled. Links are followed, and not."""
    return any(map(_is_library, {os.path.abspath(file), os.path.realpath(file)}))


def _is_library(path: str) -> bool:
    if path.startswith(_LIBRARIES) or not PACKAGE_FOLDERS.isdisjoint(Path(path).parent.parts):
        return True
    roots = [os.path.abspath(each) for each in sys.path if each]
    around = [each for each in roots if path.startswith(os.path.join(each, ""))]
    return bool(around) and next(Path(max(around, key=len)).glob("*.dist-info/RECORD"), None) is not None


_FOLDERS = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
_FOLDERS += [*site.getsitepackages(), site.getusersitepackages()]
_LIBRARIES = tuple(os.path.join(os.path.abspath(folder), "") for folder in _FOLDERS)


@dataclass(frozen=True, kw_only=True)
class ChildSettings:
    """What a process must know to be observed: which classes, and where to write its account."""

    keep: bool
    folder: Path


# What watches this process: the settings may be exchanged, as by a `gradsync run` inside of another one.
_current: list[tuple[Running, ChildSettings]] = []


def begin_with_children(settings: ChildSettings) -> Running:
    """Watch this process, and those that it starts."""
    told = {"module": __name__, "keep": settings.keep, "folder": str(settings.folder)}
    os.environ[CHILD_SETTINGS] = json.dumps(told)
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != STARTUP]
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths])
    if _current:
        _current[:] = [(_current[0][0], settings)]
        return _current[0][0]
    running = Running(keep=settings.keep)
    running.begin()
    _current.append((running, settings))
    return running


def begin_started(keep: bool, folder: str) -> None:
    """Watch this process, which a watched one has started."""
    if _current:
        return
    settings = ChildSettings(keep=keep, folder=Path(folder))
    running = begin_with_children(settings)
    atexit.register(_end_child, running, settings, os.getpid())
    # This may be the server of multiprocessing's forkserver: it has imported the script, and forks the ranks.
    multiprocessing.util.register_after_fork(running, functools.partial(_begin_forked, settings=settings))


def _begin_forked(running: Running, settings: ChildSettings) -> None:
    """Account for a process that multiprocessing has forked, unless what it has wrapped is what its parent has."""
    if not running.account().wrappers:
        # Such a process runs nothing of atexit.
        end = (running, settings, os.getpid())
        multiprocessing.util.Finalize(None, _end_child, end, exitpriority=BEFORE_QUEUES)


def warn_if_ranks_are_started() -> None:
    """Warn, in a rank, if the script starts ranks itself: one that does so in each of them is hardly meant to."""
    processes: Any = torch.multiprocessing
    start = processes.spawn

    @functools.wraps(start)
    def spawn_of_a_rank(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        place = read_environment()
        if place.rank == 0 and nprocs > 1:
            print(
                f"gradsync: the script starts {nprocs} processes by torch.multiprocessing.spawn, in each of "
                f"{place.world_size} ranks. If these are to be its ranks: gradsync run --nproc 0",
                file=sys.stderr,
                flush=True,
            )
        return start(fn, args, nprocs, *more, **options)

    processes.spawn = spawn_of_a_rank


def _end_child(running: Running, settings: ChildSettings, process: int) -> None:
    """A process that wrapped nothing, as a worker of a loader, has no account; nor has one that os.fork made."""
    account = running.account()
    if account.wrappers and os.getpid() == process and _current[0][1] is settings:
        # The folder is gone where rank 0 has not waited.
        with contextlib.suppress(OSError):
            write_account(settings.folder, account)
        close_recorders()
