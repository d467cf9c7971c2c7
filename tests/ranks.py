"""Run functions as N real processes over Gloo, or over NCCL on one GPU.

Importing torch costs seconds, so the processes are forked from one that has done it (tests/zygote.py), and they stay: a
`RankPool` sends them one function after the other, and `pool_of(n)` hands the same pool to every test.

    parent (pytest)                             worker, one a rank
    pool.run(function, *args)  ── request ──▶   load, call
    a result a rank            ◀── answer ───   result or RankError

Nothing is left behind, whatever ends the parent: a worker dies with the thread that started it, its output
goes to an unlinked file, and the rendezvous store lives in the parent's memory. As under torchrun, that store
survives the death of any rank, rank 0's too. Linux only.

Alternatives considered: `multiprocessing` spawn (its resource tracker is a process that outlives the pool,
and torch makes its pickler send tensors as shared memory); a FileStore (leaves its file when the parent is
killed).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import marshal
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import CellType, FunctionType, MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload
from unittest import mock

import torch
import torch.distributed as dist

from tests.on_gpu import compute_on, pretend_device
from tests.zygote import Forked, fork

if TYPE_CHECKING:
    # The tests of the process ranks must not depend on the library under test.
    from gradsync.tools.lab.gpu import SharedGpu

T = TypeVar("T")
Sharing = Literal["slices", "mps"]
Backend = Literal["gloo", "nccl", "pretended"]

START_TIMEOUT = 60.0
RUN_TIMEOUT = 60.0
# On a GPU everything is small, too, and of what hangs a whole run must not take hours.
GPU_RUN_TIMEOUT = 30.0
# After a first failure the others get this long to fail too: their tracebacks often tell the other half.
GRACE = 2.0
MPS_RESTART = 2.0
# How long ranks on a GPU may take to end their collectives before they are killed.
ABORT_TIMEOUT = 5.0
# Asks a rank on a GPU to do so. Nobody else uses it.
ABORT = signal.SIGRTMIN + 7
CLOSE_TIMEOUT = 10.0
GROUP_TIMEOUT = timedelta(seconds=30)
PROBE_TIMEOUT = timedelta(seconds=2)
OUTPUT_SHOWN = 10_000
# What ranks raise because of another one.
SECONDARY = ("PeerFailedError", "CommunicatorLostError")
# Set, the tests of NCCL ranks run where there is no GPU, over Gloo: it shows that they are collected and fit together.
PRETEND = "GRADSYNC_TESTS_PRETEND_GPU"

# Warnings that torch provokes itself, as regular expressions. All others are errors in the workers.
TORCH_NOISE = (
    r"`torch\.jit\.",  # at the import of torch.compile's backend and of torch.distributed.optim
    r"Attempting to run cuBLAS, but there was no current CUDA context",  # where autograd's thread is the first to do so
    r"Sparse invariant checks are implicitly disabled",  # where a sparse tensor is made on a device, once a process
    r"Specified kernel cache directory could not be created",  # where several ranks create it at the same time
)


class RankFailure(AssertionError):  # noqa: N818 (it fails a test)
    """A rank raised, died or did not answer; the message has every rank's story, ``answers`` what there is by rank."""

    def __init__(self, message: str, answers: Mapping[int, Any] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.answers = answers


class RankError(Exception):
    """What one rank raised. `exception` is the original where it can be pickled.

    A process that ended without answering has kind "RankDied".
    """

    def __init__(self, kind: str, message: str, traceback: str = "", exception: BaseException | None = None) -> None:
        super().__init__(kind, message, traceback, exception)
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.exception = exception

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Ranks(Protocol):
    """Something that runs a function as `world_size` ranks and returns their results in rank order."""

    @property
    def world_size(self) -> int: ...

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]: ...


class ThreadRanks:
    """Ranks as threads of this process, for tests that need many cheap runs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        if _over is not None:
            return _run_like_threads(nccl_pool_of(self.world_size, _over), function, *args, **kwargs)
        # Imported late: the tests of the process ranks must not depend on the library under test.
        from gradsync.testing import run_ranks

        with _refuse_seeds() if self.world_size > 1 else contextlib.nullcontext():
            return run_ranks(function, self.world_size, *args, **kwargs)


_seeding = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's own generator has this seed. Threads share it: one rank after the other draws its numbers."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _refuse_seeds() -> Iterator[None]:
    """Between the seed of one rank and its numbers another rank could draw its own."""

    def refuse(seed: int) -> None:
        raise AssertionError("ranks that are threads share torch's generator. Use seeded(), or a generator of your own")

    with mock.patch.object(torch, "manual_seed", refuse):
        yield


def _run_like_threads(pool: "RankPool", function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
    """What ranks that are threads raise, these raise: the first error that is not about another rank's."""
    try:
        return pool.run(function, *args, **kwargs)
    except RankFailure as failure:
        errors = [each for _, each in sorted(failure.answers.items()) if isinstance(each, RankError)]
        culprits = [each for each in errors if each.kind not in SECONDARY] or errors
        if not culprits or culprits[0].exception is None:
            raise
        culprits[0].exception.add_note(str(failure))
        raise culprits[0].exception from None


@functools.cache
def run_once(ranks: Ranks, function: Callable[..., T], /, *args: Any) -> list[T]:
    """What `ranks.run` returns, the first time: for references that several tests compare with, and nobody changes."""
    return ranks.run(function, *args)


class RankPool:
    """`world_size` processes in one group, started at the first `run` and again after a failure.

    The group is Gloo's, with tensors on the CPU, unless there is a `gpu`: then it is NCCL's, and the tensors that a
    test makes are on that GPU (see tests/on_gpu.py), as are those that it passes. A pretended GPU is in its place where
    there is none.
    """

    def __init__(
        self,
        world_size: int,
        backend: Backend = "gloo",
        gpu: "SharedGpu | None" = None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.world_size = world_size
        self._backend = backend
        self._gpu = gpu
        self._more = more
        self._patience = RUN_TIMEOUT if gpu is None else GPU_RUN_TIMEOUT
        # Tests for threads have functions of their own.
        self._pickler = _Pickler if backend == "gloo" else _CodePickler
        self._workers: list[_Worker] = []
        self._store: Any = None  # torch does not export the type to type checkers

    @overload
    def run(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        timeout: float | None = ...,
        expect_errors: Literal[False] = ...,
        **kwargs: Any,
    ) -> list[T]: ...
    @overload
    def run(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        timeout: float | None = ...,
        expect_errors: Literal[True],
        **kwargs: Any,
    ) -> list[T | RankError]: ...
    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call the module-level `function(*args, **kwargs)` on every rank; return the results in rank order.

        Raises RankFailure when a rank raises, dies or does not answer within `timeout` seconds (60), and ends the
        processes, whose state is then unknown. With `expect_errors` a rank's RankError stands in the place of
        its result, and the processes live on if their group still works.
        """
        if _over is not None and self is _pools.get((self.world_size, None)):
            pool = nccl_pool_of(self.world_size, _over)
            # Of the two overloads mypy takes the first.
            return pool.run(function, *args, timeout=timeout, expect_errors=expect_errors, **kwargs)  # type: ignore
        request = _dump((function, args, kwargs), self._pickler)  # first of all: what can't be pickled harms no worker
        if not self._alive():
            self._start()
        name = getattr(function, "__qualname__", repr(function))
        try:
            answers = self._ask(name, request, timeout or self._patience, expect_errors)
            # Where tests of threads run, each of which has a world of its own: one may have given this one up.
            failed = self._backend != "gloo" or any(isinstance(answer, RankError) for answer in answers)
            if failed and not self._in_step():
                self.kill()
        except BaseException:  # pytest-timeout and Ctrl-C also leave workers in the middle of a call
            self.kill()
            raise
        return answers

    def pids(self) -> list[int]:
        """The running processes in rank order; empty when the pool is not started."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Let idle workers leave by themselves, so that exit handlers (coverage) run; then end the rest."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes now. The next `run` starts new ones."""
        workers, self._workers = self._workers, []
        if self._backend == "nccl":
            _abort_collectives(workers)
        for worker in workers:
            worker.kill()
        self._store = None

    def _alive(self) -> bool:
        # An idle worker sends nothing, so a connection with something to read is one that was closed.
        return bool(self._workers) and not any(worker.connection.poll() for worker in self._workers)

    def _start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start a RankPool from the main thread: its processes die with their thread")
        try:
            self._start_once()
        except RankFailure:
            if self._gpu is None:
                raise
            # A rank that is killed in the middle of a kernel takes the server of MPS along, which comes back.
            time.sleep(MPS_RESTART)
            self._start_once()

    def _start_once(self) -> None:
        self.kill()
        self._store = _store(0, is_master=True)
        try:
            for rank in range(self.world_size):
                more = {**({} if self._gpu is None else self._gpu.variables(rank)), **self._more}
                self._workers.append(_Worker.start(rank, self.world_size, self._store.port, self._backend, more))
            self._collect("start", START_TIMEOUT, patient=False)
        except BaseException:
            self.kill()
            raise

    def _ask(self, name: str, request: bytes, timeout: float, patient: bool) -> list[Any]:
        for worker in self._workers:
            worker.send(request)
        return self._collect(name, timeout, patient)

    def _collect(self, name: str, timeout: float, patient: bool) -> list[Any]:
        """One answer a rank. Errors are answers if `patient`, else they make a RankFailure."""
        answers: dict[int, Any] = {}
        waiting = {worker.connection: worker for worker in self._workers}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                answer = answers[worker.rank] = worker.receive()
                if isinstance(answer, RankError) and not patient and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting or failed:
            silent = [worker.rank for worker in waiting.values()]
            cause = "failed" if failed else f"got no answer from ranks {silent} within {timeout:g} s"
            raise RankFailure(f"{name} on {self.world_size} ranks {cause}\n{self._story(answers)}", answers)
        return [answers[rank] for rank in range(self.world_size)]

    def _story(self, answers: dict[int, Any]) -> str:
        silent = [worker for worker in self._workers if worker.rank not in answers]
        for worker in silent:
            os.kill(worker.process.pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)  # faulthandler writes the stacks to the worker's output
        return "\n".join(worker.story(answers) for worker in self._workers)

    def _in_step(self) -> bool:
        """Whether the group still works: a failed run may leave a collective that not every rank joined."""
        try:
            timeout = PROBE_TIMEOUT.total_seconds() + GRACE
            return all(self._ask("probe", _dump((_probe, (self._backend,), {})), timeout, patient=False))
        except RankFailure:
            return False


@dataclass(frozen=True)
class _Worker:
    """The parent's end of one rank."""

    rank: int
    process: Forked
    connection: Connection
    output: IO[bytes]

    @classmethod
    def start(
        cls, rank: int, world_size: int, port: int, backend: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> "_Worker":
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (kill() closes it)
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Two ranks take the fastest transport, as a user's do; four stay with the group's own. So both are tested.
            "GRADSYNC_TRANSPORT": "auto" if world_size < 4 else "group",
            # A function is sent by name: it must be found where the parent found it.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **more,
        }
        with theirs:
            process = fork(
                f"{__name__}:serve",
                rank,
                world_size,
                port,
                backend,
                output=output,
                variables=variables,
                passed=[theirs.fileno()],
            )
        return cls(rank, process, ours, output)

    def send(self, request: bytes) -> None:
        # A story tells of one run only. The worker writes at the offset it shares with us.
        os.ftruncate(self.output.fileno(), 0)
        os.lseek(self.output.fileno(), 0, os.SEEK_SET)
        with contextlib.suppress(BrokenPipeError):  # receive() will say that the worker died
            self.connection.send_bytes(request)

    def receive(self) -> Any:
        try:
            return _load(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return RankError("RankDied", f"the process ended with exit code {self.process.wait(timeout=30)}")

    def story(self, answers: dict[int, Any]) -> str:
        answer = answers.get(self.rank)
        if isinstance(answer, RankError):
            lines = [f"--- rank {self.rank} raised {answer}", answer.traceback]
        else:
            lines = [f"--- rank {self.rank} " + ("returned" if self.rank in answers else "did not answer")]
        size = os.fstat(self.output.fileno()).st_size
        output = os.pread(self.output.fileno(), OUTPUT_SHOWN, max(0, size - OUTPUT_SHOWN))
        if output:
            lines += [f"--- rank {self.rank} wrote", output.decode(errors="replace")]
        return "\n".join(line.rstrip() for line in lines if line)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.output.close()


def _abort_collectives(workers: list[_Worker]) -> None:
    """Let ranks on a GPU end by themselves: one that is killed in the middle of a kernel takes the server of MPS, which
    all tests share, along."""
    for worker in workers:
        worker.process.send_signal(ABORT)
    deadline = time.monotonic() + ABORT_TIMEOUT
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))


def _abort_when_asked() -> None:
    """A thread of a rank on a GPU, which is woken also while the others wait in the device."""
    signal.sigwait({ABORT})
    with contextlib.suppress(Exception):
        dist.distributed_c10d._abort_process_group()
    os._exit(1)


_pools: dict[tuple[int, Sharing | None], RankPool] = {}
_gpus: "dict[Sharing, SharedGpu]" = {}
# The variables of an MPS daemon that another process has started: several would share the GPU by time slices.
_mps: Mapping[str, str] | None = None
# How the NCCL ranks share their GPU that stand in for all others, while they do.
_over: Sharing | None = None


@contextlib.contextmanager
def over_nccl(sharing: Sharing) -> Iterator[None]:
    """Inside, what `ThreadRanks` and the pools of `pool_of` are to run, NCCL ranks run."""
    global _over
    before, _over = _over, sharing
    try:
        yield
    finally:
        _over = before


def pool_of(world_size: int) -> RankPool:
    """The pool of this size that all tests share."""
    return _pools.setdefault((world_size, None), RankPool(world_size))


def nccl_pool_of(world_size: int, sharing: Sharing) -> RankPool:
    """The pool of NCCL ranks on one GPU that all tests share; gradsync/tools/lab/gpu.py says how they share the GPU."""
    if PRETEND in os.environ:
        return _pools.setdefault((world_size, sharing), RankPool(world_size, "pretended"))
    joins = sharing == "mps" and _mps is not None
    gpu = _gpu_by("slices" if joins else sharing)
    more = _mps if joins and _mps is not None else {}
    return _pools.setdefault((world_size, sharing), RankPool(world_size, "nccl", gpu, more))


def _gpu_by(sharing: Sharing) -> "SharedGpu":
    from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan

    if sharing not in _gpus:
        _gpus[sharing] = SharedGpu(SharedGpuPlan(mps=sharing == "mps")).__enter__()
    return _gpus[sharing]


def mps_for_all() -> dict[str, str]:
    """The variables of this process's MPS daemon, which is started if it is not yet: for `join_mps` elsewhere."""
    return {name: value for name, value in _gpu_by("mps").variables(0).items() if name.startswith("CUDA_MPS_")}


def join_mps(variables: Mapping[str, str]) -> None:
    """Use the MPS daemon that another process has started."""
    global _mps
    _mps = variables


@atexit.register
def close_pools() -> None:
    """Close all shared pools; they start again when used."""
    for pool in _pools.values():
        pool.close()
    while _gpus:
        _gpus.popitem()[1].__exit__()


# Where this process puts the tensors that it is sent.
_device = torch.device("cpu")


def serve(rank: int, world_size: int, port: int, backend: str, descriptor: int) -> None:
    """A worker's life: join the group, then answer requests until the parent hangs up."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in TORCH_NOISE:
        warnings.filterwarnings("ignore", message)
    connection = Connection(descriptor)
    store = _store(port, is_master=False)
    if backend == "nccl":
        # Blocked in all threads that start from here on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {ABORT})
        threading.Thread(target=_abort_when_asked, daemon=True).start()
        global _device
        _device = torch.device("cuda", 0)
        torch.cuda.set_device(_device)
        compute_on(_device)
    elif backend == "pretended":
        pretend_device()
    dist.init_process_group(
        "nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
        # Without it, barriers warn.
        device_id=_device if backend == "nccl" else None,
    )
    connection.send_bytes(_dump("ready"))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        connection.send_bytes(_answer(request))
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(port: int, *, is_master: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=GROUP_TIMEOUT
    )


def _answer(request: bytes) -> bytes:
    try:
        function, args, kwargs = _load(request)
        return _dump(function(*args, **kwargs))
    except BaseException as error:  # SystemExit, pytest.fail and pytest.skip are answers too
        frames = error.__traceback__ and error.__traceback__.tb_next  # without our own
        text = traceback.format_exception(error.with_traceback(frames))
        return _dump(RankError(type(error).__name__, str(error), "".join(text), _portable(error)))


def _portable(error: BaseException) -> BaseException | None:
    """The exception, if it survives: many with an __init__ of their own can be pickled but not loaded."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _probe(backend: Backend) -> bool:
    if backend != "gloo":
        from gradsync.communicator import choose_communicator

        # Refused at once if a test has given it up.
        choose_communicator().all_reduce(torch.ones(1, device=_device))
    # Gloo numbers a group's collectives: one that a rank never joined makes this one wait for ever somewhere.
    count = torch.ones((), device=_device)
    work = dist.all_reduce(count, async_op=True)
    assert work is not None
    work.wait(PROBE_TIMEOUT)
    return int(count) == dist.get_world_size()


def _dump(message: object, pickler: "type[_Pickler] | None" = None) -> bytes:
    buffer = io.BytesIO()
    (pickler or _Pickler)(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def _load(message: bytes) -> Any:
    return pickle.loads(message)


class _Pickler(pickle.Pickler):
    """Ordinary tensors go as the bytes of their memory: gradients that are views of one bucket carry it once.

    torch.save does so, too, and takes four times as long for small ones, which is what tests send.
    """

    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, given: Any) -> Any:
        is_tensor = type(given) in (torch.Tensor, torch.nn.Parameter)
        if is_tensor and given.is_cuda:
            # The reader has no GPU to put it on.
            return _rebuild_on_host, (given.detach().cpu(), type(given) is torch.nn.Parameter, given.requires_grad)
        if (
            not is_tensor
            or given.layout is not torch.strided
            or given.device.type != "cpu"
            or given.is_conj()
            or given.is_neg()
            or given.__dict__
        ):
            return NotImplemented
        storage = given.untyped_storage()
        memory = self._memories.setdefault(storage.data_ptr(), _Memory(storage))
        if memory.storage.nbytes() != storage.nbytes():
            return NotImplemented
        shape = given.dtype, given.storage_offset(), tuple(given.shape), given.stride()
        return _rebuild, (memory, *shape, type(given) is torch.nn.Parameter, given.requires_grad)


class _CodePickler(_Pickler):
    """Functions that are local to another one go as their code, and with what they refer to."""

    def reducer_override(self, given: Any) -> Any:
        if not isinstance(given, FunctionType) or "<" not in given.__qualname__:
            return super().reducer_override(given)
        names = given.__module__, given.__name__, given.__qualname__
        values = [cell.cell_contents for cell in given.__closure__ or ()]
        return _rebuild_function, (
            marshal.dumps(given.__code__),
            names,
            given.__defaults__,
            given.__kwdefaults__,
            values,
        )


def _rebuild_function(
    code: bytes, names: tuple[str, str, str], defaults: Any, keyword_defaults: Any, values: list[Any]
) -> FunctionType:
    module, name, qualified = names
    cells = tuple(map(CellType, values))
    function = FunctionType(marshal.loads(code), importlib.import_module(module).__dict__, name, defaults, cells)
    function.__qualname__, function.__kwdefaults__ = qualified, keyword_defaults
    return function


def _rebuild_on_host(values: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(values, requires_grad)
    return values.requires_grad_(requires_grad)


class _Memory:
    """What tensors lie in."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        nbytes = self.storage.nbytes()
        return _remember, (ctypes.string_at(self.storage.data_ptr(), nbytes) if nbytes else b"",)


def _remember(content: bytes) -> _Memory:
    return _Memory(
        torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
        if content
        else torch.UntypedStorage(0)
    )


def _rebuild(
    memory: _Memory,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype)
    tensor = tensor.set_(memory.storage, offset, shape, stride).to(_device)  # type: ignore[call-overload]
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
