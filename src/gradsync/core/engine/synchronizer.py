"""The synchronizer: what wrappers hold of one engine. Forwards, local steps, saving, and whose parameters these are.

Who owns what in an engine::

    Synchronizer              what wrappers hold
    ├── StepGuard             optimizer steps: only on means                              step_guard.py
    ├── PendingWork           blocks of accumulate(), abstaining, failing                 blocks.py
    └── BackwardEngine        the life of a backward                                      backward.py
        ├── Window            what has happened since the last step, and its weights      core/window/
        ├── Arrangement       the buckets' layout, and where each parameter lies          core/bucket/arrangement.py
        ├── Pipeline          starts and finishes the buckets, in order                   pipeline.py
        │   └── FlagReader    control flags that have arrived                             flag_reader.py
        ├── ReadyHooks        hooks on the parameters                                     ready_hooks.py
        ├── GradientStore     the gradients' memory, and whoever uses it between backwards
        └── GradientExchange  what all ranks do together in a window                      exchange.py
"""

import threading
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.weak import WeakIdKeyDictionary

from gradsync.base.errors import MisuseError
from gradsync.core.bucket import Bucket, BucketCaps, BucketLayout, ParameterSpec
from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.backward_watch import NO_TASK, current_task, watch_outputs
from gradsync.core.engine.blocks import PendingWork
from gradsync.core.engine.compilation import Compilation
from gradsync.core.engine.gradient_store import BucketClient
from gradsync.core.engine.observer import Observers
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.state import Phase
from gradsync.core.engine.step_guard import StepGuard, guard_steps, unguard_steps
from gradsync.core.reduction import Reduction
from gradsync.core.window import Window
from gradsync.health.watch import PaceMeter, Position, tell_error

__all__ = ["Synchronizer", "compiler_here", "synchronizer_of"]

# The synchronizer that averages a parameter's gradient: the last that was given the parameter.
_owners: "MutableMapping[torch.Tensor, weakref.ref[Synchronizer]]" = WeakIdKeyDictionary()


def synchronizer_of(parameter: torch.Tensor) -> "Synchronizer | None":
    """The synchronizer that averages the parameter's gradient, if there is one."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


# torch.compile's callback for functions called from the current frame, or None. Call it directly in that frame, which
# must not be compiled itself.
compiler_here: Any = get_eval_frame_callback


CAPTURED = (
    "a CUDA graph is being captured around a synchronized step, whose replays would skip what ranks agree on in Python "
    "in each window. Capture the module before it is wrapped, by torch.cuda.make_graphed_callables(module, (sample,)); "
    "its forwards and backwards are then replayed, and its gradients are averaged as always"
)


class Synchronizer:
    """Averages the gradients of ``parameters`` over the ranks of a communicator, once per window."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        options: SynchronizerOptions,
    ) -> None:
        for owner in {synchronizer_of(parameter) for parameter in parameters} - {None}:
            owner.hand_over(parameters)  # type: ignore[union-attr]
        self._refusal: str | None = None
        # How the last forward was compiled.
        self.compilation: Compilation | None = None
        # The thread that has run the last forward.
        self.thread: int | None = None
        self.engine = BackwardEngine(parameters, specs, options)
        self.parameters = self.engine.parameters
        self.window: Window = self.engine.window
        self.pace: PaceMeter = self.engine.exchange.pace
        self.specs = list(specs)
        self.options = options
        self.communicator, self.tuner = options.communicator, options.tuner
        # Methods of its parts that wrappers and optimizers call.
        store = self.engine.store
        self.switched, self.announced = self.engine.switches.set, self.engine.announced
        self.reduce_with, self.consume_gradients = store.reduce_with, store.consume
        self.norms_of, self.require_gradients = store.norms_of, store.require_gradients
        self.confirm_means = store.confirm_means
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.pending_work = PendingWork(self.engine)
        for parameter in self.parameters:
            _owners[parameter] = weakref.ref(self)
        self._step_guard = StepGuard(self.engine, self.pending_work, self._index)
        guard_steps(self._step_guard)

    def __repr__(self) -> str:
        phase = self.engine.phase
        return f"Synchronizer({phase.name.lower()}: {phase.value}; {self.window!r}; {self.engine.pipeline!r})"

    def describe(self) -> str:
        """The state of everything, in lines: for debugging a hanging training run."""
        engine = self.engine
        learned = "" if engine.arrangement.order.learned else "not "
        lines = [
            f"{engine.phase.name.lower()}: {engine.phase.value}",
            repr(self.window),
            f"{self.synchronizations} windows synchronized, order {learned}learned, readiness by "
            f"{'hooks' if engine.store.hooks.per_parameter else 'batched checks'}, caps {list(self.caps.caps)} bytes",
            repr(engine.pipeline),
        ]
        if self.compilation is not None and (compiled := self.compilation.describe()):
            lines.append(compiled)
        lines += [f"  {engine.pipeline.state_of(bucket).value:9} {bucket!r}" for bucket in self.buckets]
        return "\n".join(lines)

    def position(self) -> Position:
        """The position in a few words, for other threads and other ranks."""
        engine, busy = self.engine, self.engine.phases.busy
        return Position(
            windows=self.synchronizations,
            phase=engine.phase.name.lower(),
            progress=engine.pipeline.progress() if engine.phase is Phase.SYNCHRONIZING else engine.phase.value,
            busy=busy,
        )

    # -- properties for wrappers -----------------------------------------------------------------------------------

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they start."""
        return self.engine.buckets

    @property
    def layout(self) -> BucketLayout:
        """The plan of the buckets."""
        return self.engine.arrangement.layout

    @property
    def caps(self) -> BucketCaps:
        """The bucket size limits, as far as they are known by now."""
        return self.engine.arrangement.caps

    @caps.setter
    def caps(self, value: BucketCaps) -> None:
        """They hold when buckets are next rebuilt."""
        self.engine.arrangement.caps = value

    @property
    def reduction(self) -> Reduction:
        """The reduction in use."""
        return self.engine.pipeline.reduction

    @property
    def synchronizations(self) -> int:
        """How many windows have been synchronized."""
        return self.window.synchronizations

    @property
    def ends(self) -> int:
        """How many synchronizations have ended, successfully or not."""
        return self.window.ends

    @property
    def enabled(self) -> bool:
        """Whether backwards synchronize."""
        return self.engine.switches.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.engine.switches.enabled = value

    def rescaled(self, factor: float | torch.Tensor) -> None:
        """Note, between two windows, that the loss scale has changed: gradients are ``factor`` times as large."""
        if type(self.reduction).rescaled is not Reduction.rescaled:
            # What the reduction keeps of the last window belongs to the old scale.
            self.engine.pipeline.flags.await_window_end()
            self.reduction.rescaled(factor)

    @property
    def observer(self) -> Observers | None:
        return self.engine.observer

    @property
    def bucket_client(self) -> BucketClient | None:
        """The component that uses the buckets between two backwards."""
        return self.engine.store.client

    @bucket_client.setter
    def bucket_client(self, client: BucketClient | None) -> None:
        self.engine.store.client = client

    @property
    def has_sharing_client(self) -> bool:
        """Whether an optimizer uses shares, so that all ranks must take part in every step."""
        return self.engine.store.has_sharing_client

    @property
    def busy(self) -> bool:
        """Whether a backward or a synchronization runs."""
        return self.engine.phases.busy

    def divide_by(self, count: int) -> None:
        """Divide sums of gradients without weights by ``count`` from now on, instead of the number of ranks."""
        self.engine.exchange.divisor = float(count)

    @property
    def steps_locally(self) -> bool:
        """Whether this rank takes steps without the others."""
        return self.engine.switches.steps_locally

    @property
    def is_detached(self) -> bool:
        return self.engine.phase is Phase.DETACHED

    # -- forwards ------------------------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """Raise MisuseError with ``reason`` in every later forward."""
        self._refusal = reason

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def before_forward(self, module: nn.Module, compiler: Any = None, *, is_marked: bool = False) -> None:
        """Prepare for a forward of ``module``, with gradients on or off; compiled if ``compiler`` is given.
        ``is_marked``: see :class:`~gradsync.core.engine.compilation.Compilation`."""
        self.compilation = Compilation(module, by_caller=bool(compiler), is_marked=is_marked)
        if self._refusal is not None:
            raise MisuseError(self._refusal)
        self.pending_work.report_owed_failure()
        if self.engine.observer is not None and not torch.is_grad_enabled():
            self.engine.observer.evaluation_began()
        client = self.engine.store.client
        if client is not None:
            client.before_forward(module, is_compiled=bool(compiler))

    def begin_forward(self) -> None:
        """Prepare for a forward with gradients on, which is about to run."""
        engine = self.engine
        if self.specs[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MisuseError(CAPTURED)
        self.pending_work.report_owed_failure()
        if engine.phases.busy and current_task() == NO_TASK:
            engine.recover()
        engine.pipeline.flags.require_alive()
        self.thread = threading.get_ident()
        if engine.observer is not None:
            engine.observer.forward_began()
        self.window.begin_forward()
        engine.store.expect_backward()

    def end_forward(self, output: Any) -> None:
        """Watch the output of a forward that has run, for the backward."""
        engine, synchronizes = self.engine, self.enabled
        self.window.end_forward(engine.arrangement.has_gradients, synchronizes=synchronizes)
        watch_outputs(output, engine, synchronizes, self.window.abstentions)
        if engine.observer is not None:
            engine.observer.forward_ended()

    def raised(self, error: BaseException, place: str) -> None:
        """Tell the others that this rank has raised outside of a backward, where they do not notice."""
        tell_error(self.communicator, error, place)

    @property
    def owes_backward(self) -> bool:
        """Whether the other ranks wait for a backward of this one, or will."""
        return self.enabled and not self.window.has_abstained

    def announce_absent(self, parameters: Iterable[torch.Tensor]) -> None:
        """Announce, during a forward, that no rank will compute gradients of these parameters from it.

        All ranks must say the same.
        """
        self.window.announce_absent(self._index[id(p)] for p in parameters if id(p) in self._index)

    # -- blocks of accumulate() --------------------------------------------------------------------------------------

    @property
    def in_block(self) -> bool:
        """Whether a micro-batch of accumulate() is running."""
        return self.window.weights.in_block

    # -- without a backward ------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Average what has accumulated, now. Collective: all ranks call it, or synchronize in their backward."""
        self.pending_work.synchronize()

    def clear(self) -> None:
        """Drop all gradients, and the window's record of them."""
        self.engine.store.clear()

    def raised_on_all(self) -> None:
        """Give the window up: all ranks have raised for a common reason, and no rank waits for this one."""
        self.window.failures += 1
        self.clear()

    # -- saving; :mod:`gradsync.core.engine.blocks` saves what has accumulated -------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What makes sums reproducible bit for bit: the layout of the buckets. The same on all ranks."""
        return self.engine.arrangement.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the layout of the buckets. All ranks must load the same, between two windows."""
        if len(state["trainable"]) != len(self.parameters):
            raise MisuseError(
                f"the saved engine has {len(state['trainable'])} parameters and this one {len(self.parameters)}: it "
                "belongs to another model"
            )
        self.engine.arrangement.load_state_dict(state)
        self.engine.store.build()

    # -- the end -------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove all hooks. Gradients stay where they are; nothing is synchronized from now on."""
        if self.engine.store.client is not None:
            self.engine.store.client.flush()
        self.engine.detach()
        unguard_steps(self._step_guard)
        for parameter in self.parameters:
            if synchronizer_of(parameter) is self:
                del _owners[parameter]

    def hand_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give these parameters to another synchronizer: a gradient is averaged once, by the last wrapper."""
        arrangement = self.engine.arrangement
        arrangement.take_out(self._index[id(p)] for p in parameters if id(p) in self._index)
        if len(arrangement.taken) == len(self.parameters):
            self.detach()
        else:
            self.engine.store.build()
